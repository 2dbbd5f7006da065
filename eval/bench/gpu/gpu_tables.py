"""The report of the GPU bench as tables of 80 columns on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from cuvee.codec.support.terminal_table import terminal_table as new_table
from cuvee.kernels.ops.synthesize import SYNTHESIS_CONFIGS

__all__ = ["print_gpu_report"]


def print_gpu_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables of 80 columns."""
    hard, ceilings = report["hardware"], report["ceilings"]
    console.print(
        f"{hard.get('gpu', hard['cpu'])}; driver {hard.get('driver')}, CUDA {hard.get('cuda')}, "
        f"torch {hard['torch']}, Triton {hard['triton']}; commit {hard['commit']}, {hard['date']}",
        style="dim",
        highlight=False,
    )
    links = [entry["gb_per_s"]["median"] for entry in report["link"]]
    moved = max(proof["levels_moved"] for proof in report["proofs"])
    apart = max(proof["difference"] for proof in report["proofs"])
    console.print(
        f"Proved: bytes equal after the integers; {moved:.2%} of the levels differ by one, values by {apart:.4f}.\n"
        f"Ceilings: device copy {ceilings['copy_gb_per_s']['median']:,.0f} GB/s (read + written), "
        f"bf16 product {ceilings['matrix_tflop_per_s']['median']:,.0f} TFLOP/s,\n"
        f"pinned host to device {max(links, default=0):,.1f} GB/s. GB/s below count the uncompressed bfloat16 cache.",
        highlight=False,
    )
    for entry in report["codec"]:
        first = entry["first_call_seconds"]
        title = (
            f"{entry['shape']}, group {entry['group']}, chunks of {entry['tokens']} tokens; first calls "
            f"{first['encode']:.1f} s, {first['decode']:.1f} s"
        )
        table = new_table(
            title,
            "chunks",
            "bits",
            "encode",
            "decode",
            "on device",
            "verify",
            "raw copy",
            "restore",
            "CacheGen",
            tight=True,
        )
        for run in entry["runs"]:
            restore, device = run["restore"], run["decode"]["device_gb_per_s"]
            ratio = run["incumbent"]["device_speedup"]
            table.add_row(
                str(run["chunks"]),
                f"{run['bits_per_value']:.2f}",
                f"{run['encode']['gb_per_s']['median']:,.1f}",
                f"{run['decode']['gb_per_s']['median']:,.1f}",
                "" if device is None else f"{device:,.0f}",
                _milliseconds(run["verify_seconds"]),
                _milliseconds(restore["raw_copy_seconds"]),
                _milliseconds(restore["decode_seconds"]),
                "" if ratio is None else f"{ratio:,.1f}x",
            )
        console.print(table)
    for what in ("decode", "encode"):
        for shape in dict.fromkeys(entry["shape"] for entry in report["codec"]):
            runs = {e["group"]: e["runs"][-1] for e in report["codec"] if e["shape"] == shape}
            names = list(dict.fromkeys(name for run in runs.values() for name in run[what]["stage_seconds"]))
            if names:
                console.print(_stage_table(f"Stages of {what}: {shape}, most chunks, ms", names, runs, what))
    if report["synthesis"]:
        console.print(_synthesis_table(report["synthesis"]))
    table = new_table(
        "CacheGen-style decoder, ms on the device", "cache", "chunks", "bits", "entropy", "scale", "GB/s", tight=True
    )
    for entry in report["incumbent"]:
        for run in entry["runs"]:
            seconds = run["seconds"]
            table.add_row(
                entry["shape"],
                str(run["chunks"]),
                f"{run['bits_per_value']:.2f}",
                _milliseconds(seconds["entropy"]),
                _milliseconds(seconds["dequantize"]),
                f"{run['gb_per_s']['median']:,.1f}",
            )
    console.print(table)
    table = new_table("rANS decoder alone", "table bits", "table bytes", "bits/symbol", "G symbols/s", tight=True)
    for entry in report["rans"]:
        table.add_row(
            str(entry["prob_bits"]),
            f"{entry['table_bytes']:,}",
            f"{entry['bits_per_symbol']:.3f}",
            f"{entry['gsymbols_per_s']['median']:,.1f}",
        )
    console.print(table)
    console.print(
        "encode, decode: GB/s from an idle device to an idle device, host included; on device: the stages alone.\n"
        "verify (checksums), raw copy (uncompressed, from pinned memory), restore (bytes to pages): ms.\n"
        "CacheGen: its decoder's time on the device over ours. limit: the least time by the ceilings, of the time.\n"
        f"Triton compiled {len(report['compile']['kernels'])} kernels in {report['compile']['seconds']:.0f} s.",
        style="dim",
        highlight=False,
    )
    for entry in report["skipped"]:
        console.print(f"Left out for lack of time: {entry['shape']}, group {entry['group']}", highlight=False)


def _stage_table(title: str, names: Sequence[str], runs: Mapping[str, Mapping[str, Any]], what: str) -> Table:
    table = new_table(title, "group", *(name.replace(" ", "\n") for name in names), tight=True)
    for group, run in runs.items():
        stages, least = run[what]["stage_seconds"], run[what]["stage_limits"]
        table.add_row(group, *(_milliseconds(stages[name]) if name in stages else "" for name in names))
        shares = (least[name]["share"] if name in least else None for name in names)
        table.add_row("limit", *("" if share is None else f"{share:.0%}" for share in shares))
    return table


def _synthesis_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    cases = list(dict.fromkeys((entry["group"], entry["chunks"]) for entry in entries))
    names = [f"{group}\n{chunks} chunk{'s' * (chunks > 1)}" for group, chunks in cases]
    table = new_table("Inverse transform by configuration, ms; * in use", "tokens x components", *names, tight=True)
    for config in SYNTHESIS_CONFIGS:
        row = []
        for group, chunks in cases:
            found = [e for e in entries if (e["group"], e["chunks"], e["config"]) == (group, chunks, asdict(config))]
            shown = "".join("too large" if "error" in e else _milliseconds(e["seconds"]) for e in found)
            row.append(shown + "*" * any(entry["chosen"] for entry in found))
        label = f"{config.block_t} x {config.block_r}, {config.num_warps} warps, {config.num_stages} stages"
        table.add_row(label, *row)
    return table


def _milliseconds(timing: Mapping[str, float]) -> str:
    return f"{1e3 * timing['median']:,.2f}"
