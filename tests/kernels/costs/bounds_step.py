"""The step `bounds`: what the model of executed PTX allows at least, beside what was measured, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tests.kernels.costs.static_costs import report
from tests.kernels.costs.time_bounds import MACHINES, TARGET, model

from cuvee.codec.errors import InputError
from cuvee.eval.bench.gpu.steps import read_results

__all__ = ["compare_kernels", "machine_for", "run_step"]

# Functions by the names of the specs and counts.
_FUNCTIONS = {
    "rans_decode": "_decode_kernel", "rans_encode": "_encode_kernel", "count_words": "_count_kernel",
    "write_coded": "_write_kernel", "synthesize head": "_synthesize", "synthesize layer": "_synthesize",
}  # fmt: skip


def run_step(device: torch.device, save: Callable[[object], None], folder: Path) -> None:
    """Compile the kernels for their static costs, and save the table."""
    speed = (read_results(folder).get("steps", {}).get("speed") or {}).get("result") or {}
    name = machine_for(torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    rows = model(report([TARGET]), (name,))
    save({"machine": name, "kernels": compare_kernels(rows, speed)})


def machine_for(device: str) -> str:
    """Return which of MACHINES a device of this name is; the H100 if it is none of them."""
    return next((name for name in MACHINES if name in device.replace("-", " ").split()), "H100")


def compare_kernels(rows: list[dict[str, Any]], speed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each kernel of each coding that was modeled.

    Args:
        rows: from `tests.kernels.costs.time_bounds.model`, for one machine.
        speed: result of the step `speed`; {} if there is none.

    Returns:
        per kernel: `group`, `way`, `kernel`, its `limit` and `least` picoseconds per value by the model, `measured`
        picoseconds per value or None, and `share` = least / measured or None.

    Raises:
        InputError: kernels were measured, and none of the model's is among them.
    """
    runs = {entry["group"]: entry["runs"][-1] for entry in speed.get("codec", [])}
    out = []
    for row in rows:
        run = runs.get(row["scheme"])
        seconds = run[row["way"]]["kernel_seconds"] if run else {}
        for own in row["kernels"]:
            taken = seconds.get(_FUNCTIONS.get(own["kernel"], "_" + own["kernel"]))
            measured = None if taken is None or run is None else taken * 1e12 / (run["raw_bytes"] / 2)
            least = own["bounds"][own["limit"]]
            out.append(
                {
                    "group": row["scheme"], "way": row["way"], "kernel": own["kernel"], "limit": own["limit"],
                    "least": least, "measured": measured, "share": least / measured if measured else None,
                }
            )  # fmt: skip
    if any(run[way]["kernel_seconds"] for run in runs.values() for way in ("encode", "decode")) and not any(
        row["measured"] for row in out
    ):
        raise InputError("kernels: must be measured by the names of the model, got others; mend the names here")
    return out
