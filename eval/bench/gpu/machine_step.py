"""The step `machine`: versions, clocks, memory, and what is missing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton

from cuvee.eval.machine import hardware

__all__ = ["NEEDED", "describe_machine", "run_step"]

# What the steps import.
NEEDED = (
    "torch", "triton", "numba", "llvmlite", "numpy", "safetensors", "xxhash", "typer", "rich", "transformers", "pytest",
    "xdist", "hypothesis",
)  # fmt: skip
_QUERY = (
    "name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.mem", "clocks.max.sm",
    "clocks.max.mem", "power.draw", "power.limit", "temperature.gpu", "pstate", "utilization.gpu",
)  # fmt: skip


def run_step(device: torch.device, save: Callable[[object], None], folder: Path) -> None:
    """Describe the machine and save it."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    save({"hardware": describe_machine(device), "missing": missing})
    print("missing:", ", ".join(missing) or "nothing")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the environment that figures depend on, with the GPU as `nvidia-smi` shows it now."""
    gpu: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        state = _nvidia_smi()
        gpu = {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "gpu_free_bytes": torch.cuda.mem_get_info(device)[0],
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": state.get("driver_version"),
            "cuda": torch.version.cuda,
            "nvidia_smi": state,
        }
    return {**hardware(), "device": device.type, "triton": triton.__version__, **gpu}


def _nvidia_smi() -> dict[str, str]:
    """What `nvidia-smi` says of the first GPU; {} if it says nothing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.split("\n")[0].split(", ")
    return dict(zip(_QUERY, values, strict=True)) if done.returncode == 0 and len(values) == len(_QUERY) else {}
