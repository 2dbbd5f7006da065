"""The results of all steps as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuvee.eval.files import write_atomically

__all__ = ["REPORT", "gpu_markdown", "write_report"]

REPORT = "report.md"


def write_report(data: Mapping[str, Any], folder: Path) -> None:
    """Write the Markdown."""
    write_atomically(folder / REPORT, gpu_markdown(data).encode())


def gpu_markdown(data: Mapping[str, Any]) -> str:
    """Return the report: each step's status, then what it found, as far as it came."""
    lines = [f"# cuvee on {_device_line(data)}", "", "| step | status | seconds | limit |", "|---|---|---|---|"]
    for name, step in data["steps"].items():
        lines.append(f"| {name} | {step['status']} | {step['seconds']:.0f} | {step['limit']:.0f} |")
    for name, show in (("tests", _tests), ("speed", _speed), ("model", _model)):
        if result := _result(data, name):
            lines += ["", f"## {name.capitalize()}", "", *show(result)]
    for name, step in data["steps"].items():
        if step.get("said"):
            lines += ["", f"## The end of what `{name}` printed", "", "```", step["said"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _result(data: Mapping[str, Any], step: str) -> dict[str, Any]:
    return data["steps"].get(step, {}).get("result") or {}


def _device_line(data: Mapping[str, Any]) -> str:
    machine = _result(data, "machine").get("hardware", {})
    if not machine:
        return str(data["about"]["device"])
    where = machine.get("gpu") or f"emulated PTX, {machine['cpu']}"
    return (
        f"{where}; driver {machine.get('driver')}, CUDA {machine.get('cuda')}, torch {machine['torch']}, "
        f"Triton {machine['triton']}, Python {machine['python']}; commit {machine['commit']}, {machine['date']}"
    )


def _tests(found: Mapping[str, Any]) -> list[str]:
    counted = ", ".join(
        f"{found[name]} {name.replace('_', ' ')}" for name in ("passed", "failed", "skipped", "not_run")
    )
    lines = [f"{found['collected']} tests of kernels: {counted}."]
    for test, text in found["failures"].items():
        lines += ["", f"### {test}", "", "```", text.rstrip(), "```"]
    if found["more_failures"]:
        lines += ["", "Also failed: " + ", ".join(found["more_failures"])]
    return lines


def _speed(found: Mapping[str, Any]) -> list[str]:
    ceilings = found["ceilings"]
    lines = [
        f"Device copy {ceilings['copy_gb_per_s']['median']:,.0f} GB/s (read and written), bfloat16 product "
        f"{ceilings['matrix_tflop_per_s']['median']:,.0f} TFLOP/s; casts to FP8 and back "
        f"{ceilings['to_fp8_gb_per_s']['median']:,.0f} and {ceilings['from_fp8_gb_per_s']['median']:,.0f} GB/s of "
        f"bfloat16. Two medians of the same copy lie "
        f"{ceilings['noise']:.2%} apart, its 20th and 80th percentiles {ceilings['spread']:.2%}. GB/s count the "
        "uncompressed bfloat16 cache, from an idle device to an idle device, the host's work included; `device`: "
        "the launches alone. In brackets: from the 20th to the 80th percentile.",
        "",
        "| group | tokens | bits/value | encode | device | decode | device | copy from the host, ms | decode, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in found["codec"]:
        for run in entry["runs"]:
            lines.append(
                f"| {entry['group']} | {run['tokens']:,} | {run['bits_per_value']:.2f} | "
                f"{_spread(run['encode']['gb_per_s'])} | {_number(run['encode']['device_gb_per_s'])} | "
                f"{_spread(run['decode']['gb_per_s'])} | {_number(run['decode']['device_gb_per_s'])} | "
                f"{1e3 * run['raw_copy_seconds']['median']:.2f} | "
                f"{1e3 * run['decode']['seconds']['median']:.2f} |"
            )
    return [*lines, "", *(f"**{group} is wrong**: {error}" for group, error in found["errors"].items())]


def _model(found: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{found['model']}; a cache of {found['prefix']:,} tokens, group `{found['group']}`, {found['quality']}.",
        "",
    ]
    learned = found["calibrate"]
    lines.append(f"- `calibrate`, {learned['sequences']} x {learned['length']} tokens: {learned['seconds']:.1f} s")
    for where in ("device", "cpu"):
        if own := found.get(where):
            lines.append(
                f"- coded on the {where}: KL {own['kl']:.5f}, {own['bits_per_value']:.3f} bits per value, "
                f"top-1 {own['top1']:.2%}"
            )
    if own := found.get("restore"):
        seconds = {name: own[f"{name}_seconds"]["median"] for name in ("encode", "decode", "recompute")}
        taken = ", ".join(f"{name} {1e3 * median:.2f} ms" for name, median in seconds.items())
        lines.append(f"- {taken}: computing takes {own['recompute_over_restore']:.2f} times as long as decoding")
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _spread(rate: Mapping[str, float]) -> str:
    return f"{rate['median']:,.1f} ({rate['p20']:,.1f} to {rate['p80']:,.1f})"
