"""What only a GPU can tell, in seven minutes: `make gpu`, or `python -m cuvee.eval.bench.gpu` in a working tree.

    tests     the kernels' tests against their references, bytes of streams, 300 forged blobs
    speed     encode and decode, readable by the CPU and the other way round, beside copies and casts to FP8
    model     a trained model: profile, cache, KL beside the CPU's, restoring beside computing

Each step is a process of its own, which is killed at its limit: a kernel that faults or hangs takes nothing from the
other steps. STEP.json and STEP.log are kept up to date while a step runs; results.json says how each ended. A log has
the figures as people read them, and is shown when its step is over.
`--device emulated` rehearses all steps on the CPU, at sizes that the emulator of PTX can do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.files import write_json
from cuvee.eval.machine import hardware

__all__ = ["EMULATED_SECONDS", "STEPS", "main", "run_step"]

# Modules with a function `run_step`, and limits in seconds.
STEPS = {
    "tests": ("tests.kernels.device_step", 180),
    "speed": ("cuvee.eval.bench.gpu.speed", 120),
    "model": ("cuvee.eval.bench.gpu.model", 90),
}
SHOWN = 6000  # characters of a log
EMULATED_SECONDS = 1800  # of each step: a shared machine may be slow, and nothing waits for it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; return the exit code: 1 if a step did not end well."""
    parser = argparse.ArgumentParser(prog="python -m cuvee.eval.bench.gpu", description="Prove and time cuvee on a GPU")
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--step", choices=STEPS, action="append", help="repeatable (default: all)")
    parser.add_argument("--inside", choices=STEPS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        if given.device == "cuda" and not torch.cuda.is_available():
            raise InputError(
                "device: must be a GPU that torch sees, got none; run this where `nvidia-smi` lists one, with a build "
                f"of torch for CUDA (this is {torch.__version__}), or rehearse it: --device emulated"
            )
        if given.inside:
            device = torch.device("cuda", torch.cuda.current_device()) if given.device == "cuda" else _emulated()
            save = partial(write_json, given.out / f"{given.inside}.json")
            import_module(STEPS[given.inside][0]).run_step(device, save)
            return 0
        return _run_all(given.device, given.out, given.step or list(STEPS))
    except CuveeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _emulated() -> torch.device:
    import_module("tests.kernels.emulation").start()
    return torch.device("cpu")


def _run_all(device: str, out: Path, steps: Sequence[str]) -> int:
    data: dict[str, Any] = {"device": device, "hardware": hardware("triton"), "steps": {}}
    if device == "cuda":
        data["hardware"] |= _gpu()
    out.mkdir(parents=True, exist_ok=True)
    for name in steps:
        limit = STEPS[name][1] if device == "cuda" else EMULATED_SECONDS
        print(f"{name}: at most {limit} s", flush=True)
        own = ["-m", "cuvee.eval.bench.gpu", "--device", device, "--out", str(out), "--inside", name]
        (out / f"{name}.json").unlink(missing_ok=True)
        log, began = out / f"{name}.log", time.monotonic()
        status, seconds = run_step([sys.executable, *own], log, limit), time.monotonic() - began
        data["steps"][name] = {"status": status, "seconds": round(seconds, 1), "limit": limit}
        write_json(out / "results.json", data)
        print(log.read_text(errors="replace")[-SHOWN:].rstrip())
        print(f"{name}: {status} after {seconds:.0f} s", flush=True)
    return int(any(step["status"] != "done" for step in data["steps"].values()))


def run_step(command: Sequence[str], log: Path, seconds: float) -> str:
    """Run a command, and kill it, with all that it started, after this time. Return `done`, `failed` or `cut`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return "failed" if process.wait(seconds) else "done"
        except subprocess.TimeoutExpired:
            return "cut"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended, with all that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _gpu() -> dict[str, Any]:
    """What figures depend on beyond `hardware()`: the GPU and its driver."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver: str | None = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver_and_clocks": driver,
        "cuda": torch.version.cuda,
    }


if __name__ == "__main__":
    sys.exit(main())
