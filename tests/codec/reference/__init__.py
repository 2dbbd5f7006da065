"""The stages in plain NumPy, written to be read: with `codec/FORMAT.md`, they specify the bitstream.

A file has the stages of the file of the same name in `codec/stages/compiled`, which must give the same bytes. Whoever
imports this can ask for `Codec(..., backend="reference")`, which is a hundred times slower.
"""

from __future__ import annotations

from functools import cache

from cuvee.codec import backends
from cuvee.codec.cpu.backend import CpuBackend
from cuvee.codec.stages.stages import STAGES, Stages, compiled_stages, gather_stages

# The linear stages are those of PyTorch, which serve every layout in production, too.
_MODULES = {module: f"{__name__}.{module}" for module in STAGES} | {
    "integer_product": f"{__name__}.product", "transform": "cuvee.codec.stages.transform",
}  # fmt: skip


def stage_names() -> list[str]:
    """The names that `get_stages` accepts, which are backends, too."""
    return ["reference", "numba"]


@cache
def get_stages(name: str) -> Stages:
    return compiled_stages() if name == "numba" else gather_stages(name, _MODULES)


def make_backend(name: str, threads: int) -> CpuBackend:
    return CpuBackend(get_stages(name), threads)


backends.MODULES["reference"] = __name__, "cpu"
