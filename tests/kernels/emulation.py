"""Where the tests run kernels without a GPU: as PTX in the emulator, or nowhere if there is no g++ to build it.

Of PTX, CUVEE_PTX_TARGET is `sm_80`, `sm_90` (the default) or `sm_100`, and CUVEE_PTX_SEED the seed of a random order of
programs and warps; without a seed they run in order. CUVEE_REQUIRE_PTX=1 turns a missing g++ into an error.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from tests.ptx.build import KEPT, NoCompiler, compiler

ROOT = Path(__file__).parents[2]
_DAY = 86_400.0


def _choose() -> str:
    """Return where kernels run.

    Raises:
        NoCompiler: CUVEE_REQUIRE_PTX asks for the emulator, and there is no g++.
    """
    try:
        compiler()
    except NoCompiler:
        if os.environ.get("CUVEE_REQUIRE_PTX") == "1":
            raise
        return "gpu" if torch.cuda.is_available() else "nowhere"
    return "gpu" if torch.cuda.is_available() else "nowhere" if find_spec("triton") is None else "ptx"


KERNELS_RUN_ON = _choose()
TARGET = os.environ.get("CUVEE_PTX_TARGET", "sm_90")


@cache
def start() -> None:
    """Prepare this process to run kernels."""
    if KERNELS_RUN_ON != "ptx":
        return
    os.environ.setdefault("TRITON_CACHE_DIR", str(compiled_kernels()))
    from tests.ptx.driver import install
    from tests.ptx.engine import Options

    from cuvee.kernels import backend

    seed = os.environ.get("CUVEE_PTX_SEED")
    emulator = install(TARGET, Options(seed=int(seed) if seed else None), tables=("units",))
    backend.shared = backend.TritonBackend(("cuda", "cpu"))
    _watch_places(emulator.places)


def _watch_places(places: dict[int, int]) -> None:
    """Record the memory that tables of addresses describe, in every module that imported `unit_row`."""
    from tests.ptx.driver import extent

    from cuvee.kernels import chunks
    from cuvee.kernels.ops import pages

    original = pages.unit_row

    def unit_row(memory: torch.Tensor, scale: float = 1.0) -> list[int]:
        row = original(memory, scale)
        if memory.numel():
            first, end = extent(memory)
            places[first] = end
        return row

    for module in {pages, chunks, *sys.modules.values()}:
        names = getattr(module, "__dict__", {})  # no more than looked at: some modules import what is asked of them
        if names.get("unit_row") is original:
            names["unit_row"] = unit_row


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
            with suppress(FileNotFoundError):  # another worker has deleted it
                if time.time() - other.stat().st_mtime > _DAY:
                    shutil.rmtree(other, ignore_errors=True)
    return folder
