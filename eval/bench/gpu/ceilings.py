"""Ceilings of this device: copies, casts to FP8 and a matrix product."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cuvee.eval.bench.gpu.cases import GpuScope
from cuvee.eval.bench.gpu.clock import Clock
from cuvee.eval.bench.timing import Timing

__all__ = ["Link", "measure_ceilings"]


def measure_ceilings(clock: Clock, scope: GpuScope) -> dict[str, Any]:
    """Time a copy (bytes read and written), casts of bfloat16 to FP8 and back, and a bfloat16 product of matrices.

    Also how far two medians of the same copy lie apart: what differs by less is noise of the clock.
    """
    device = clock.device
    source = torch.randint(256, (scope.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy, again = (clock.inside([partial(target.copy_, source)]) for _ in range(2))
    values, small = source.view(torch.bfloat16), target[: scope.copy_bytes // 2].view(torch.float8_e4m3fn)
    to_fp8, from_fp8 = clock.inside([partial(small.copy_, values)]), clock.inside([partial(values.copy_, small)])
    del source, target, values, small
    a, b = (torch.randn(scope.matrix, scope.matrix, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    product = clock.inside([partial(torch.mm, a, b, out=out)])
    return {
        "copy_bytes": scope.copy_bytes,
        "copy_gb_per_s": copy.per_second(2 * scope.copy_bytes / 1e9),
        "to_fp8_gb_per_s": to_fp8.per_second(scope.copy_bytes / 1e9),
        "from_fp8_gb_per_s": from_fp8.per_second(scope.copy_bytes / 1e9),
        "noise": abs(copy.median / again.median - 1),
        "spread": (copy.p80 - copy.p20) / copy.median,
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
