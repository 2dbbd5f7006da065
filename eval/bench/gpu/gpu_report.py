"""The results of all steps as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["gpu_markdown"]

_SAID = 6000  # characters of its output that are shown of a step that did not end well


def gpu_markdown(data: Mapping[str, Any], folder: Path) -> str:
    """Return the report: each step's status, then what it left in the folder, as far as it came."""
    machine = data["hardware"]
    lines = [
        f"# cuvee on {machine.get('gpu') or 'emulated PTX'}",
        "",
        f"{machine['cpu']}; driver and clocks {machine.get('driver_and_clocks')}, CUDA {machine.get('cuda')}, torch "
        f"{machine['torch']}, Triton {machine['triton']}, Python {machine['python']}; commit {machine['commit']}, "
        f"{machine['date']}",
        "",
        "| step | status | seconds | limit |",
        "|---|---|---|---|",
    ]
    for name, step in data["steps"].items():
        lines.append(f"| {name} | {step['status']} | {step['seconds']:.0f} | {step['limit']:.0f} |")
    for name, step in data["steps"].items():
        file, log = folder / f"{name}.json", folder / f"{name}.log"
        if file.is_file():
            found = json.loads(file.read_text())
            lines += ["", f"## {name.capitalize()}", "", *(_tests(found) if name == "tests" else _speed(found))]
        if step["status"] != "done":
            said = log.read_text(errors="replace")[-_SAID:].rstrip()
            lines += ["", f"## The end of what `{name}` printed", "", "```", said, "```"]
    return "\n".join(lines) + "\n"


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
    ceilings = ", ".join(f"{name} {rate['median']:,.0f}" for name, rate in found["ceilings"].items())
    lines = [
        f"Ceilings in GB/s: {ceilings}. Copies on the device count bytes read and written; casts, encode and decode "
        "the uncompressed bfloat16 cache. Encode and decode run from an idle device with a cold cache to an idle "
        "device, the host's work included. In brackets: from the 20th to the 80th percentile.",
        "",
        "| group | tokens | bits/value | encode, GB/s | decode, GB/s | decode, ms | copy from the host, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in found["runs"]:
        lines.append(
            f"| {run['group']} | {run['tokens']:,} | {run['bits_per_value']:.2f} | {_spread(run['encode_gb_per_s'])} | "
            f"{_spread(run['decode_gb_per_s'])} | {1e3 * run['decode_seconds']['median']:.2f} | "
            f"{1e3 * run['raw_copy_seconds']['median']:.2f} |"
        )
    return [*lines, "", *(f"**{group} is wrong**: {error}" for group, error in found["errors"].items())]


def _spread(rate: Mapping[str, float]) -> str:
    return f"{rate['median']:,.1f} ({rate['p20']:,.1f} to {rate['p80']:,.1f})"
