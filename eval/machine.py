"""The machine and the software of measurements."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import cuvee

__all__ = ["hardware", "torch_threads"]

_PACKAGES = ("torch", "numpy", "numba", "transformers", "lm_eval")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Limit the number of torch's own threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def hardware(*packages: str) -> dict[str, Any]:
    """Return what figures depend on, as a dict for JSON, with the versions of these additional packages."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: _version(package) for package in (*_PACKAGES, *packages)},
        "cuvee": cuvee.__version__,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this checkout, with a + if the tree has changes; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
