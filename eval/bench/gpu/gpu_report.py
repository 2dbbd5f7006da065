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
            lines += ["", f"## {name.capitalize()}", "", *_SHOWN[name](found)]
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
    for group, kernels in found["kernels"].items():
        if not kernels:  # rehearsed
            continue
        lines += ["", f"Kernels of one encode and one decode of the largest call, group {group}, in us on the device:"]
        lines += ["", "| kernel | launches | us |", "|---|---|---|"]
        lines += [f"| {name} | {launches} | {spent:,.0f} |" for name, launches, spent in kernels]
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


def _spread(rate: Mapping[str, float]) -> str:
    return f"{rate['median']:,.1f} ({rate['p20']:,.1f} to {rate['p80']:,.1f})"


_SHOWN = {"tests": _tests, "speed": _speed, "model": _model}
