"""What coding costs in memory, beside the chunk."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# 8 layers of 2 heads of 32: 1024 values per token, 32 MB at 16384 tokens. Peaks are read from the kernel in a process
# of its own, after a warm-up has loaded and compiled everything.
SCRIPT = """
import ctypes, gc, json, sys, torch
from cuvee.codec.codec import Codec
from cuvee.codec.chunk import KVChunk
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.learning.calibrate import fit
from cuvee.codec.profiles.profile import Profile

torch.set_num_threads(1)
tokens = 16384
rope = Rope(tuple(1e4 ** (-i / 16) for i in range(16)))
layout = KVLayout("synthetic", (LayerLayout(2, 32, 32, rope),) * 8, "bfloat16", None)

def chunk(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    falling = (0.9 ** torch.arange(64)).view(2, 32)
    def unit():
        out = torch.empty(tokens, 2, 32, dtype=torch.bfloat16)
        for at in range(0, tokens, 512):
            out[at : at + 512] = torch.randn(min(512, tokens - at), 2, 32, generator=generator) * falling
        return out
    return KVChunk([unit() for _ in range(8)], [unit() for _ in range(8)], layout)

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

def peak(job):
    # What is free must not be counted as taken before, or a job that takes it would look smaller than it is.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    result = job()
    return (status("VmHWM") - before), result

def peaks(scheme):
    if scheme == "lossless":
        profile = Profile.unlearned(layout)
    else:
        profile = fit(layout, [chunk(4200, 0)], scheme)
    codec = Codec(profile, "lossless", threads=2) if scheme == "lossless" else Codec(profile, step=0.25, threads=2)
    codec.decode(codec.encode(chunk(600, 1)))
    big = chunk(tokens, 2)
    encode, blob = peak(lambda: codec.encode(big))
    nbytes = big.nbytes
    del big
    decode, back = peak(lambda: codec.decode(blob))
    return {"raw": nbytes, "encode": encode, "decode": decode, "blob": len(blob)}

print(json.dumps({scheme: peaks(scheme) for scheme in sys.argv[1:]}))
"""


SCHEMES = ("layer", "lossless")


@pytest.fixture(scope="module")
def peaks() -> dict[str, dict[str, int]]:
    """Of each scheme, one after the other in one process: to start it takes longer than to measure."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    # Freed memory goes back at once, so that it is not mistaken for free.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", SCRIPT, *SCHEMES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if "clear_refs" in done.stderr:
        pytest.skip("the kernel does not let us reset the peak")
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_peak_is_below_three_times_the_chunk(scheme: str, peaks: dict[str, dict[str, int]]) -> None:
    result = peaks[scheme]
    assert result["raw"] == 2 * 1024 * 16384
    assert result["decode"] >= result["raw"]  # its output: the measurement works
    assert result["encode"] < 3 * result["raw"] and result["decode"] < 3 * result["raw"], result
