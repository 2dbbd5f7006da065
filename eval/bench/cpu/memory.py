"""Peak memory of one encode and one decode, each in a fresh process.

`python -m cuvee.eval.bench.cpu.memory encode|decode PROFILE TOKENS` is that process: it prints the bytes as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.bench.cpu.cases import BACKEND, make_chunk

__all__ = ["MEMORY_TOKENS", "measure_memory"]

MEMORY_TOKENS = 4096


def measure_memory(profile: Profile, tokens: int) -> dict[str, Any]:
    """Measure the peak memory of one encode and one decode over the size of the raw chunk. None without /proc.

    The peak includes what the operation returns (the blob or the decoded chunk), but not the chunk it is given.
    """
    peaks: dict[str, Any] = {"tokens": tokens, "raw_bytes": tokens * profile.layout.bytes_per_token}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile"
        profile.save(path)
        for what in ("encode", "decode"):
            command = [sys.executable, "-m", "cuvee.eval.bench.cpu.memory", what, str(path), str(tokens)]
            # With a fixed threshold glibc returns every large buffer immediately, so none is reused unseen.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                raise CuveeError(f"measuring memory failed: {done.stderr.strip().splitlines()[-1:]}")
            extra = json.loads(done.stdout)
            peaks[f"{what}_over_raw"] = None if extra is None else extra / peaks["raw_bytes"]
    return peaks


def _measure_here(what: str, path: str, tokens: int) -> int | None:
    """Return the bytes by which the peak rises above the process's memory before the call."""
    torch.set_num_threads(1)
    codec = Codec(Profile.load(path), "balanced", backend=BACKEND, threads=1)
    layout = codec.profile.layout
    codec.decode(codec.encode(make_chunk(layout, 128)))  # compiles
    chunk = make_chunk(layout, tokens)
    blob = codec.encode(chunk) if what == "decode" else b""
    held = _reset_peak()
    if held is None:
        return None
    result = codec.encode(chunk) if what == "encode" else codec.decode(blob)
    peak = _status("VmHWM")
    del result
    return None if peak is None else max(peak - held, 0)


def _reset_peak() -> int | None:
    """Reset the peak of this process, and return the bytes it holds now."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    return None


if __name__ == "__main__":
    print(json.dumps(_measure_here(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
