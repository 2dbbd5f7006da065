"""Add numbers to rows of a cache in one compiled pass."""

from __future__ import annotations

import torch

from cuvee.codec.stages.compiled.bfloat16 import saturated, to_float
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.transform import plain
from cuvee.codec.stages.rows import Rows


@compiled
def _add(more, memory, begins, head_stride, offsets, kinds):  # type: ignore[no-untyped-def]
    tokens, heads, size = more.shape
    for t in range(tokens):
        if begins[t] < 0:
            continue
        for h in range(heads):
            source = more[t, h]
            if len(offsets):
                places = offsets[kinds[t], h]
                for i in range(size):
                    at = begins[t] + places[i]
                    memory[at] = saturated(to_float(memory[at]) + source[i], memory)
            else:
                begin = begins[t] + h * head_stride
                target = memory[begin : begin + size]
                for i in range(size):
                    target[i] = saturated(to_float(target[i]) + source[i], target)


def add_to_rows(more: torch.Tensor, rows: Rows) -> None:
    """Add finite numbers, float32 `[T, H, D]`, to rows of bfloat16 or float32."""
    _add(more.contiguous().numpy(), plain(rows.memory), rows.begins, rows.head_stride, rows.offsets, rows.kinds)
