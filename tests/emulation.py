"""Choice of where the tests run kernels without a GPU: as PTX in the emulator, or in Triton's interpreter.

CUVEE_KERNELS chooses: `ptx` (the default where there is g++) or `interpreter`. Of PTX, CUVEE_PTX_TARGET is `sm_80`,
`sm_90` (the default) or `sm_100`, and CUVEE_PTX_SEED the seed of a random order of programs and
warps; without a seed they run in order. CUVEE_REQUIRE_PTX=1 turns a missing g++ into an error.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from tests.ptx.build import KEPT, NoCompiler, compiler

ROOT = Path(__file__).parents[1]
_DAY = 86_400.0


def _choose() -> str:
    """Choose, and set the environment for Triton and for child processes.

    Raises:
        ValueError: CUVEE_KERNELS is neither ptx nor interpreter.
        NoCompiler: CUVEE_KERNELS or CUVEE_REQUIRE_PTX asks for the emulator, and there is no g++.
    """
    if torch.cuda.is_available():
        return "gpu"
    wanted = os.environ.get("CUVEE_KERNELS", "")
    if wanted not in ("", "ptx", "interpreter"):
        raise ValueError(f"CUVEE_KERNELS: must be ptx or interpreter, got {wanted!r}")
    if wanted != "interpreter":
        try:
            compiler()
        except NoCompiler:
            if wanted or os.environ.get("CUVEE_REQUIRE_PTX") == "1":
                raise
            wanted = "interpreter"
    if wanted == "interpreter":
        # Triton reads this when a kernel is defined.
        os.environ["TRITON_INTERPRET"] = "1"
        return wanted
    os.environ.pop("TRITON_INTERPRET", None)
    return "ptx"


# "gpu", "ptx" or "interpreter": decided before any kernel is defined.
KERNELS_RUN_ON = _choose()
TARGET = os.environ.get("CUVEE_PTX_TARGET", "sm_90")


@cache
def start() -> None:
    """Prepare this process to run kernels."""
    if KERNELS_RUN_ON == "gpu" or find_spec("triton") is None:
        return
    if KERNELS_RUN_ON == "interpreter":
        from tests.interpreter import make_quick

        make_quick()
        return
    os.environ.setdefault("TRITON_CACHE_DIR", str(compiled_kernels()))
    from tests.ptx.driver import install
    from tests.ptx.engine import Options

    seed = os.environ.get("CUVEE_PTX_SEED")
    install(TARGET, Options(seed=int(seed) if seed else None))


def compiled_kernels() -> Path:
    """Return Triton's cache for the current sources, shared by workers and runs; delete caches older than a day."""
    import triton

    key = hashlib.sha256(triton.__version__.encode())
    for source in sorted((ROOT / "kernels").rglob("*.py")):
        key.update(source.read_bytes())
    folder = KEPT / f"triton-{key.hexdigest()[:12]}"
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for other in KEPT.glob("triton-*"):
            if time.time() - other.stat().st_mtime > _DAY:
                shutil.rmtree(other, ignore_errors=True)
    return folder
