"""Ceilings of this device, and the least time of the codec's stages that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cuvee.codec.profiles.profile import Profile
from cuvee.eval.bench.gpu.cases import GpuScope
from cuvee.eval.bench.gpu.clock import Clock
from cuvee.eval.timing import Timing

__all__ = ["SYNTHESIS", "TF32X3", "Link", "Work", "limits", "measure_ceilings", "stage_work", "synthesis_flop"]

SYNTHESIS = "synthesize"  # the stage whose arithmetic is counted
TF32X3 = 6  # a product made of three TF32 products, each at half the rate, costs as many bfloat16 ones


def measure_ceilings(clock: Clock, scope: GpuScope) -> dict[str, Any]:
    """Time the device's ceilings: a copy (bytes read and written) and a bfloat16 product of random matrices."""
    device = clock.device
    source = torch.randint(256, (scope.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = clock.inside([partial(target.copy_, source)])
    del source, target
    a, b = (torch.randn(scope.matrix, scope.matrix, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    product = clock.inside([partial(torch.mm, a, b, out=out)])
    return {
        "copy_bytes": scope.copy_bytes,
        "copy_gb_per_s": copy.per_second(2 * scope.copy_bytes / 1e9),
        "matrix": scope.matrix,
        "matrix_tflop_per_s": product.per_second(2 * scope.matrix**3 / 1e12),
    }


class Link:
    """The copy from pinned host memory to the device."""

    def __init__(self, clock: Clock, size: int) -> None:
        self._clock = clock
        pinned = clock.device.type == "cuda"
        self._device = torch.randint(256, (size,), dtype=torch.uint8, device=clock.device)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._host.copy_(self._device)

    def measure(self, size: int) -> Timing:
        """Seconds to copy `size` bytes."""
        source, target = self._host[:size], self._device[:size]
        return self._clock.inside([partial(target.copy_, source, non_blocking=True)])


def synthesis_flop(profile: Profile, tokens: int) -> int:
    """Floating-point operations of the inverse transform at step 1."""
    flop = 0
    for section, learned in zip(profile.sections, profile.learned, strict=True):
        ranks, _ = learned.plan(0)
        flop += sum(2 * rank * size for rank, size in zip(ranks, section.blocks, strict=True))
    return flop * tokens


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a stage: bytes of device memory read or written, and floating-point operations."""

    bytes: float
    flop: float = 0.0


def stage_work(profile: Profile, tokens: int, compressed: int) -> dict[str, dict[str, Work]]:
    """The work of each stage of `decode` and `encode` at step 1, if each array is read and written once.

    Args:
        profile: for the group and the shape.
        tokens: in all chunks.
        compressed: bytes in their blobs.
    """
    layout, plans = profile.layout, [learned.plan(0)[1] for learned in profile.learned]
    planes = tokens * sum(plan.planes for plan in plans)
    components = tokens * sum(len(plan.shift) for plan in plans)
    values = tokens * layout.values_per_token
    flop = float(synthesis_flop(profile, tokens))
    basis = flop / (2 * tokens)
    tables = Work(8 * tokens * layout.layers[0].head_dim / 2)
    return {
        "decode": {
            "rotation tables": tables,
            "rans": Work(compressed + planes),
            "dequantize": Work(planes + 2 * components),
            SYNTHESIS: Work(2 * components + 2 * basis + 2 * values, flop),
        },
        "encode": {
            "rotation tables": tables,
            "gather": Work(2 * values + 4 * values),
            "analyze": Work(4 * values + 4 * basis + 4 * components, TF32X3 * flop),
            "quantize": Work(4 * components + planes),
            "rans": Work(planes + compressed),
            "write": Work(2 * compressed),
        },
    }


def limits(
    work: Mapping[str, Work], stages: Mapping[str, Timing], ceilings: Mapping[str, Any]
) -> dict[str, dict[str, float | None]]:
    """The least time of every stage by the ceilings of this device, and its share of the time measured.

    A share above 1 means that data stayed in the L2 cache from one stage to the next.
    """
    out: dict[str, dict[str, float | None]] = {}
    for name, needed in work.items():
        moved = needed.bytes / (1e9 * ceilings["copy_gb_per_s"]["median"])
        least = max(moved, needed.flop / (1e12 * ceilings["matrix_tflop_per_s"]["median"]))
        share = least / stages[name].median if name in stages else None
        out[name] = {"bytes": needed.bytes, "flop": needed.flop, "seconds": least, "share": share}
    return out
