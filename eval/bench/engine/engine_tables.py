"""The report of the engine bench as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuvee.eval.bench.frame import Shown, machine_and_vllm
from cuvee.eval.documents import ReportTable

__all__ = ["show_engine"]


def show_engine(report: Mapping[str, Any]) -> Shown:
    """Make the tables of a report."""
    tables = [_first_token(report), _hits(report), _storing(report["storing"])]
    return Shown("Compressed offload in vLLM", machine_and_vllm(report), tables)


def _first_token(report: Mapping[str, Any]) -> ReportTable:
    model, lengths = report["model"], report["first_token"]["lengths"]
    rows = [
        ["computed, s", *(_around(entry["recompute_seconds"]) for entry in lengths)],
        ["prefill, tokens/s", *(f"{entry['prefill_tokens_per_second']['median']:.0f}" for entry in lengths)],
        ["own prefix cache, ratio", *(_around(entry["own_cache_over_recompute"]) for entry in lengths)],
    ]
    for kind in ("hit", "miss"):
        key = f"{kind}_over_recompute"
        for name in (variant["name"] for variant in report["first_token"]["variants"]):
            rows.append([f"{kind}: {name}, ratio", *(_around(entry["variants"][name][key]) for entry in lengths)])
    return ReportTable(
        ["prefix tokens ", *(str(entry["tokens"]) for entry in lengths)],
        rows,
        f"Time to first token, and its ratio to computing (median, 20th to 80th percentile). {model['name']}: "
        f"{model['layers']} layers, hidden {model['hidden']}, {model['kv_heads']} KV heads of {model['head_dim']}, "
        f"{model['raw_bytes_per_token'] / 1e6:.4f} MB of KV per token",
    )


def _hits(report: Mapping[str, Any]) -> ReportTable:
    lengths = report["first_token"]["lengths"]
    rows = []
    for name in (variant["name"] for variant in report["first_token"]["variants"]):
        for entry in lengths:
            hit = entry["variants"][name]
            seconds = (hit[f"{part}_seconds"]["median"] for part in ("hit", "load", "fetch", "decode"))
            speeds = (hit["decode_gb_per_s"]["median"], 1e-3 * hit["load_tokens_per_second"]["median"])
            rows.append(
                [
                    name, str(entry["tokens"]), *(f"{1e3 * part:.3g}" for part in seconds),
                    *(f"{speed:.3g}" for speed in speeds), f"{hit['steps']['median']:.0f}",
                ]
            )  # fmt: skip
    columns = [
        "medians ", "prefix", "hit, ms", "load", "fetch", "decode", "decode, GB/s", "load, 1000 tokens/s",
        "engine steps",
    ]  # fmt: skip
    return ReportTable(columns, rows, "Where the time of a hit goes")


def _storing(storing: Mapping[str, Any]) -> ReportTable:
    rows = []
    for name, speed in storing["tokens_per_second"].items():
        kinds = ("throughput_over_no_connector", "throughput_over_not_storing", "seconds_until_stored")
        whole, alone, behind = (storing.get(kind, {}).get(name) for kind in kinds)
        cells = (_around(whole) if whole else "1", *(_around(value) if value else "" for value in (alone, behind)))
        rows.append([name, f"{speed['median']:.0f}", *cells])
    return ReportTable(
        [" ", "tokens/s", "of no connector", "of not storing", "stored after, s"],
        rows,
        f"Storing: {storing['prompts']} prompts of {storing['prompt_tokens']} new tokens together, "
        f"{storing['generated_tokens']} generated each",
    )


def _around(value: Mapping[str, float]) -> str:
    return f"{value['median']:.2g} ({value['p20']:.2g}-{value['p80']:.2g})"
