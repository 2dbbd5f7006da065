"""The report of the CPU bench as tables on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from cuvee.eval.bench.tables import new_table

__all__ = ["print_cpu_report"]


def print_cpu_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    machine = report["hardware"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}, torch {machine['torch']}, "
        f"numba {machine['numba']}; commit {machine['commit']}, {machine['date']}",
        style="dim",
        highlight=False,
    )
    coders = report["coders"]
    speed = {name: value["median"] for name, value in coders["msymbols_per_s"].items()}
    table = new_table("Entropy coder, one core, M symbols/s", "coder", "encode", "decode", "bits/symbol")
    bits = coders["bits_per_symbol"]
    table.add_row("cuvee", f"{speed['encode']:.0f}", f"{speed['decode']:.0f}", f"{bits['rans']:.3f}")
    theirs = (speed["constriction_encode"], speed["constriction_decode"])
    table.add_row("constriction AnsCoder", *(f"{s:.0f}" for s in theirs), f"{bits['constriction']:.3f}")
    table.add_row("vectorized torch", "", f"{speed['torch_decode']:.0f}", "")
    console.print(table)
    ratios = coders["ratios"]
    console.print(
        f"cuvee / constriction: encode {ratios['encode_over_constriction']:.1f}x, "
        f"decode {ratios['decode_over_constriction']:.1f}x; cuvee / torch: decode {ratios['decode_over_torch']:.1f}x",
        highlight=False,
    )
    for entry in report["stages"]:
        names = ["transform", "quantize and pack", "rans", "place", "container", "other"]
        title = f"Stages, one core: {entry['shape']}, group {entry['group']}, {entry['tokens']} tokens, µs"
        table = new_table(title, "", *names)
        for what in ("encode", "decode"):
            seconds = entry[what]["seconds"]
            table.add_row(what, *(f"{1e6 * seconds[name]:,.0f}" if name in seconds else "" for name in names))
        console.print(table)
    table = new_table(
        "Whole codec, GB/s of bfloat16", "cache", "group", "tokens", "threads", "bits/value", "encode", "decode"
    )
    for entry in report["whole"]:
        table.add_row(entry["shape"], entry["group"], *_whole_row(entry))
    for name in ("tokens", "layers"):
        scaling = report["scaling"][name]
        table.add_section()
        for entry in scaling["points"]:
            shape = f"{entry['layers']} layers of {scaling['shape']}" if "layers" in entry else scaling["shape"]
            table.add_row(shape, scaling["group"], *_whole_row(entry))
    console.print(table)
    table = new_table("Peak memory over the raw chunk", "cache", "group", "tokens", "encode", "decode")
    for entry in report["memory"]:
        peaks = (entry["encode_over_raw"], entry["decode_over_raw"])
        shown = ("unknown" if peak is None else f"{peak:.2f}" for peak in peaks)
        table.add_row(entry["shape"], entry["group"], str(entry["tokens"]), *shown)
    console.print(table)


def _whole_row(entry: dict[str, Any]) -> tuple[str, ...]:
    speeds = (f"{entry[name]['median']:.3f}" for name in ("encode_gb_per_s", "decode_gb_per_s"))
    return (str(entry["tokens"]), str(entry["threads"]), f"{entry['bits_per_value']:.2f}", *speeds)
