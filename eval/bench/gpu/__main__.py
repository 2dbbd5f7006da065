"""What only a GPU can tell: a step of `make gpu`, or `python -m cuvee.eval.bench.gpu STEP` in a working tree.

    tests     the kernels' tests against their references, bytes of streams, 300 forged blobs
    speed     encode and decode, readable by the CPU and the other way round, beside copies and casts to FP8

OUT/STEP.json is kept up to date while a step runs. `--device emulated` rehearses it on the CPU, at sizes that the
emulator of PTX can do.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.files import write_json
from cuvee.eval.machine import hardware

__all__ = ["STEPS", "main"]

STEPS = {"tests": "tests.kernels.device_step", "speed": "cuvee.eval.bench.gpu.speed"}  # modules with a `run_step`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a step; return the exit code: 1 if it did not end well."""
    parser = argparse.ArgumentParser(prog="python -m cuvee.eval.bench.gpu", description="Prove or time cuvee on a GPU")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    given = parser.parse_args(arguments)
    try:
        if given.device == "cuda" and not torch.cuda.is_available():
            raise InputError(
                "device: must be a GPU that torch sees, got none; run this where `nvidia-smi` lists one, with a build "
                f"of torch for CUDA (this is {torch.__version__}), or rehearse it: --device emulated"
            )
        machine = hardware("triton")
        if given.device == "cuda":
            device, machine = torch.device("cuda", torch.cuda.current_device()), machine | _gpu()
        else:
            import_module("tests.kernels.emulation").start()
            device = torch.device("cpu")
        given.out.mkdir(parents=True, exist_ok=True)

        def save(report: Mapping[str, Any]) -> None:
            write_json(given.out / f"{given.step}.json", {"device": given.device, "hardware": machine, **report})

        import_module(STEPS[given.step]).run_step(device, save)
    except CuveeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


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
