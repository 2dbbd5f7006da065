"""What only a GPU can tell, in eight minutes: `make gpu`, or `python -m cuvee.eval.bench.gpu` in a working tree.

    machine   versions, clocks, memory
    tests     the kernels' tests against their references, bytes of streams, 300 forged blobs
    speed     encode and decode, beside copies and casts to FP8
    model     a trained model: profile, cache, KL, restoring against computing

The results come as results.json, report.md and log.txt, each of them up to date when a step ends.
`--device emulated` rehearses all steps on the CPU, at sizes that the emulator of PTX can do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench.gpu.gpu_report import write_report
from cuvee.eval.bench.gpu.steps import Step, run_steps
from cuvee.eval.files import write_json
from cuvee.eval.machine import hardware

# Modules with a function `run_step`, and limits in seconds: eight minutes together, report included.
STEPS = {
    "machine": ("cuvee.eval.bench.gpu.machine_step", 20),
    "tests": ("tests.kernels.device_step", 180),
    "speed": ("cuvee.eval.bench.gpu.gpu_bench", 120),
    "model": ("cuvee.eval.bench.gpu.model_step", 90),
}
EMULATED_SECONDS = 1800  # of each step: a shared machine may be slow, and nothing waits for it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps, or the one that is named; return the exit code: 1 if a step did not end well."""
    parser = argparse.ArgumentParser(prog="python -m cuvee.eval.bench.gpu", description="Prove and time cuvee on a GPU")
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("file", type=Path, nargs="?", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        if given.step:
            module, _ = STEPS[given.step]
            device = _prepare(given.device)
            import_module(module).run_step(device, partial(write_json, given.file), given.out)
            return 0
        return _run_all(given.device, given.out)
    except CuveeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _prepare(device: str) -> torch.device:
    """Return the device of this process; install the emulator if it is emulated."""
    if device == "emulated":
        import_module("tests.emulation").start()
        return torch.device("cpu")
    return _need_gpu()


def _need_gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise InputError(
            "device: must be a GPU that torch sees, got none; run this where `nvidia-smi` lists one, with a build of "
            f"torch for CUDA (this is {torch.__version__}), or rehearse it: --device emulated"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _run_all(device: str, out: Path) -> int:
    if device == "cuda":
        _need_gpu()
    own = [sys.executable, "-m", "cuvee.eval.bench.gpu", "--device", device, "--out", str(out)]
    steps = [
        Step(name, limit if device == "cuda" else EMULATED_SECONDS, (*own, "--step", name))
        for name, (_, limit) in STEPS.items()
    ]
    about = {"device": device, "commit": hardware()["commit"]}

    def tell(line: str) -> None:
        print(line, flush=True)

    data = run_steps(steps, out, about, tell, lambda data: write_report(data, out))
    print((out / "report.md").read_text()[-8000:])
    return int(any(step["status"] != "done" for step in data["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
