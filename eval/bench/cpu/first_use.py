"""Time from a fresh interpreter to its first decoded chunk, with compiled code in Numba's cache."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.bench.cpu.cases import BACKEND, make_chunk
from cuvee.eval.timing import Timing

__all__ = ["FIRST_USE_STEPS", "measure_first_use"]

FIRST_USE_STEPS = ("interpreter", "import_cuvee", "import_codec", "open", "first_decode", "second_decode", "total")

# Given by -c, and not a module of cuvee: running one would import packages before the clock is read.
# The clock counts from the same moment in all processes.
_PROGRAM = """
import sys, time
clock = [float(sys.argv[1]), time.monotonic()]
import cuvee
clock.append(time.monotonic())
from cuvee import Codec, Profile
clock.append(time.monotonic())
codec = Codec(Profile.load(sys.argv[2]), sys.argv[3], backend=sys.argv[4])
with open(sys.argv[5], "rb") as file:
    blob = file.read()
clock.append(time.monotonic())
for _ in range(2):
    codec.decode(blob)
    clock.append(time.monotonic())
import json
print(json.dumps(clock))
"""


def measure_first_use(profile: Profile, tokens: int, runs: int) -> list[dict[str, Any]]:
    """Seconds of each step from starting Python to a second decode, for each quality.

    interpreter      until the first line of the program runs
    import_cuvee     `import cuvee`
    import_codec     `from cuvee import Codec, Profile`: torch and Numba
    open             load the profile, make the codec, read the blob
    first_decode     load compiled code, decode
    second_decode    decode
    total            all of these but the last

    Args:
        profile: what to decode with.
        tokens: of the chunk.
        runs: measured processes per quality, after an unmeasured one that fills Numba's cache.

    Raises:
        CuveeError: a process failed.
    """
    out: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile.save(folder / "profile")
        for quality in ("lossless", "balanced"):
            blob = folder / quality
            blob.write_bytes(Codec(profile, quality, backend=BACKEND).encode(make_chunk(profile.layout, tokens)))
            arguments = [str(folder / "profile"), quality, BACKEND, str(blob)]
            _run(arguments)
            measured = [_run(arguments) for _ in range(runs)]
            seconds = {step: Timing.of([run[step] for run in measured]).to_dict() for step in FIRST_USE_STEPS}
            out.append({"quality": quality, "tokens": tokens, "seconds": seconds})
    return out


def _run(arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, "-c", _PROGRAM, repr(time.monotonic()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CuveeError(f"measuring the first use failed: {done.stderr.strip().splitlines()[-1:]}")
    clock = json.loads(done.stdout)
    steps = [later - earlier for earlier, later in pairwise(clock)]
    return dict(zip(FIRST_USE_STEPS, [*steps, clock[-2] - clock[0]], strict=True))
