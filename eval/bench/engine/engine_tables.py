"""The report of the engine bench as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from cuvee.eval.bench.engine.scope import RAW_FILES
from cuvee.eval.bench.table_style import new_table

__all__ = ["print_engine_report"]


def print_engine_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    machine, model = report["hardware"], report["model"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores; vLLM {machine['vllm']}, torch {machine['torch']}; commit "
        f"{machine['commit']}, {machine['date']}",
        style="dim",
        highlight=False,
    )

    def show(title: str, table: Table) -> None:
        console.print(f"\n{title}\n", highlight=False)
        console.print(table)

    if "footprint" in report:
        footprint = report["footprint"]
        table = new_table(
            "", "preset", "profile", "chunk", "raw MB", "payload MB", "files MB", "bits/value", "raw/files"
        )
        for entry in footprint["entries"]:
            sizes = (f"{entry[name] / 1e6:.3f}" for name in ("raw_bytes", "payload_bytes", "file_bytes"))
            ratios = (f"{entry['bits_per_value']:.2f}", f"{entry['ratio_on_disk']:.2f}")
            table.add_row(entry["quality"], entry["profile"] or "none", str(entry["chunk_tokens"]), *sizes, *ratios)
        show(
            f"Footprint: {footprint['model']}, {footprint['prompts']} prompts of {footprint['prompt_tokens']} tokens "
            f"from {', '.join(footprint['texts'])}",
            table,
        )
    lengths = report["first_token"]["lengths"]
    names = [variant["name"] for variant in report["first_token"]["variants"]]
    what = (
        f"{model['name']}: {model['layers']} layers, hidden {model['hidden']}, {model['kv_heads']} KV heads of "
        f"{model['head_dim']}, {model['raw_bytes_per_token'] / 1e6:.4f} MB of KV per token"
    )
    table = new_table("", "prefix tokens", *(str(entry["tokens"]) for entry in lengths))
    table.add_row("computed, s", *(_around(entry["recompute_seconds"]) for entry in lengths))
    table.add_row("prefill, tokens/s", *(f"{entry['prefill_tokens_per_second']['median']:.0f}" for entry in lengths))
    table.add_row("own prefix cache, ratio", *(_around(entry["own_cache_over_recompute"]) for entry in lengths))
    for kind in ("hit", "miss"):
        if "raw_files" in lengths[0]:
            found = (entry["raw_files"][f"{kind}_over_recompute"] for entry in lengths)
            table.add_row(f"{kind}: {RAW_FILES}, ratio", *map(_around, found))
        for name in names:
            if f"{kind}_over_recompute" in lengths[0]["variants"][name]:
                found = (entry["variants"][name][f"{kind}_over_recompute"] for entry in lengths)
                table.add_row(f"{kind}: {name}, ratio", *map(_around, found))
    show(f"Time to first token, and its ratio to computing (median, 20th to 80th percentile). {what}", table)

    columns = ["prefix", "hit, ms", "load", "fetch", "decode", "decode, GB/s", "load, 1000 tokens/s", "engine steps"]
    table = new_table("", "medians", *columns)
    for name in names:
        for entry in (lengths[0], lengths[-1]):
            hit = entry["variants"][name]
            milliseconds = (
                f"{1e3 * hit[key]['median']:.3g}"
                for key in ("hit_seconds", "load_seconds", "fetch_seconds", "decode_seconds")
            )
            speeds = (hit["decode_gb_per_s"]["median"], 1e-3 * hit["load_tokens_per_second"]["median"])
            table.add_row(
                name, str(entry["tokens"]), *milliseconds, *(f"{speed:.3g}" for speed in speeds),
                f"{hit['steps']['median']:.0f}",
            )  # fmt: skip
    show("Where the time of a hit goes", table)

    table = new_table(
        "", "", "pays from, measured", "connector says", "prefill tokens/s", "load tokens/s", "overhead ms"
    )
    for variant in report["first_token"]["variants"]:
        table.add_row(variant["name"], *_verdict_row(variant, lengths[0]["tokens"]))
    show("From which length on a load pays", table)

    storing = report["storing"]
    table = new_table("", "", "tokens/s", "throughput, ratio", "stored after, s")
    for name, speed in storing["tokens_per_second"].items():
        ratio, behind = (storing[key].get(name) for key in ("throughput_over_no_connector", "seconds_until_stored"))
        table.add_row(
            name, f"{speed['median']:.0f}", _around(ratio) if ratio else "1", _around(behind) if behind else ""
        )
    show(
        f"Storing: {storing['prompts']} prompts of {storing['prompt_tokens']} new tokens together, "
        f"{storing['generated_tokens']} generated each",
        table,
    )


def _around(value: Mapping[str, float]) -> str:
    return f"{value['median']:.2g} ({value['p20']:.2g}-{value['p80']:.2g})"


def _verdict_row(variant: Mapping[str, Any], shortest: int) -> list[str]:
    measured, said = variant["pays_from_tokens"], variant["connector"]
    shown = "never" if measured is None else f"{measured:.0f}" if measured else f"{shortest} or less"
    if said is None:
        return [shown, "not measured yet", "", "", ""]
    numbers = (said["prefill_tokens_per_second"], said["load_tokens_per_second"])
    return [
        shown,
        "never" if said["break_even_tokens"] is None else f"{said['break_even_tokens']:.0f}",
        *("" if number is None else f"{number:.0f}" for number in numbers),
        f"{1e3 * said['overhead_seconds']:.1f}",
    ]
