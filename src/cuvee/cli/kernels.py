"""`cuvee kernels`: the Triton kernels compiled without a GPU, against their budgets."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from cuvee.cli.options import Json
from cuvee.cli.output import make_console, make_table, print_json
from cuvee.codec.errors import InputError

SHOWN_PS = 0.05  # the table of the model leaves out kernels that take less


class Target(StrEnum):
    """A GPU architecture that kernels are compiled for."""

    sm_80 = "sm_80"
    sm_90 = "sm_90"
    sm_100 = "sm_100"
    gfx942 = "gfx942"


def kernels(
    targets: Annotated[
        list[Target] | None,
        typer.Option("--target", help="Compile for this architecture. Repeatable. Default: all.", show_default=False),
    ] = None,
    as_model: Annotated[
        bool, typer.Option("--model", help="Show upper bounds of speed on known GPUs instead, from the counted work.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compile the Triton kernels without a GPU and show what they cost. Exit code 1 if a kernel exceeds its budget.

    Shows each kernel's instructions in the innermost loop (for the entropy coder also per symbol), registers, spills,
    memory and code size. With --model, shows the least time that each kernel needs on an H200, and upper bounds of the
    speed of coding on that and other GPUs.

    Example: cuvee kernels --target sm_90
    """
    from cuvee.kernels.analysis.static_costs import TARGETS, check, report
    from cuvee.kernels.analysis.time_bounds import MACHINES, model

    if as_model and targets:
        raise InputError("target: must be left out with --model, which compiles for the GPUs that it knows")
    modeled = sorted({machine.target for machine in MACHINES.values()})
    chosen = modeled if as_model else [target.value for target in targets] if targets else TARGETS
    data = report(chosen, progress=True)
    wrong = check(data)
    rows = model(data) if as_model else None
    if as_json:
        print_json({**data, "violations": wrong, **({} if rows is None else {"model": rows})})
    elif rows is None:
        _show(data)
    else:
        _show_model(rows)
    for line in wrong:
        typer.echo(f"error: {line}", err=True)
    if wrong:
        raise typer.Exit(1)


def _show(data: dict[str, Any]) -> None:
    from cuvee.kernels.analysis.static_costs import shared_bytes

    table = make_table("kernel", "target", "loop", "each", "regs", "spill", "shared", "code", "s")
    for entry in data["kernels"]:
        if entry["error"] is not None:
            table.add_row(entry["kernel"], entry["target"], "failed")
            continue
        loop = entry["loop"] or {"instructions": 0, "instructions_per_symbol": None}
        each = loop["instructions_per_symbol"]
        table.add_row(
            entry["kernel"],
            entry["target"],
            str(loop["instructions"] or ""),
            "" if each is None else f"{each:.1f}",
            str(entry["registers"]),
            str(entry["spilled_bytes"]),
            str(shared_bytes(entry)),
            str(entry["code_bytes"]),
            f"{entry['seconds']:.1f}",
        )
    console = make_console()
    console.print(table)
    console.print("loop: instructions; each: per symbol; spill, shared and code: bytes", highlight=False)
    console.print(", ".join(f"{name} {version}" for name, version in data["versions"].items()), highlight=False)


def _show_model(rows: list[dict[str, Any]]) -> None:
    from cuvee.kernels.analysis.time_bounds import LIMITS, MACHINES

    first, *_ = MACHINES
    table = make_table("coding", "kernel", *LIMITS, "limit", "GB/s")
    totals = make_table("coding", "bits", *MACHINES)
    speeds: dict[tuple[str, str, float], dict[str, str]] = {}
    for row in rows:
        speeds.setdefault((row["scheme"], row["way"], row["bits"]), {})[row["machine"]] = f"{row['gb_per_s']:,.0f}"
        if row["machine"] != first:
            continue
        for kernel in row["kernels"]:
            least = kernel["bounds"]
            if max(least.values()) >= SHOWN_PS:
                cells = (f"{least[limit]:.2f}" for limit in LIMITS)
                speed = f"{kernel['gb_per_s']:,.0f}"
                table.add_row(f"{row['way']}, {row['scheme']}", kernel["kernel"], *cells, kernel["limit"], speed)
    for (scheme, way, bits), speed_of in speeds.items():
        totals.add_row(f"{way}, {scheme}", f"{bits:.1f}", *(speed_of[machine] for machine in MACHINES))
    console = make_console()
    console.print(table)
    console.print(
        f"least picoseconds per value, by limit of the {first}; kernels below {SHOWN_PS} are left out",
        highlight=False,
    )
    console.print(totals)
    console.print("at most, in GB/s of bfloat16, all kernels one after the other; bits: per value", highlight=False)
