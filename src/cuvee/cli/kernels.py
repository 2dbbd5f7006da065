"""`cuvee kernels`: the Triton kernels compiled without a GPU, against their budgets."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from cuvee.cli.options import Json
from cuvee.cli.output import make_console, make_table, print_json


class Target(StrEnum):
    """What a kernel is compiled for."""

    sm_80 = "sm_80"
    sm_90 = "sm_90"
    sm_100 = "sm_100"
    gfx942 = "gfx942"


def kernels(
    targets: Annotated[
        list[Target] | None,
        typer.Option("--target", help="Compile for this one. Repeatable. Default: all.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile the Triton kernels without a GPU and say what they cost. Exit code 1 if one exceeds its budget.

    Shows the innermost loop's instructions (for the entropy coder also per symbol), registers, spills, memory, code.

    Example: cuvee kernels --target sm_90
    """
    from cuvee.kernels.static import TARGETS, check, report

    with make_console(stderr=True).status("compiling"):
        data = report([target.value for target in targets] if targets else TARGETS)
    wrong = check(data)
    if as_json:
        print_json({**data, "violations": wrong})
    else:
        _show(data)
    for line in wrong:
        typer.echo(f"error: {line}", err=True)
    if wrong:
        raise typer.Exit(1)


def _show(data: dict[str, Any]) -> None:
    from cuvee.kernels.static import shared_bytes

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
