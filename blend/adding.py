"""Add numbers to tokens in pages: in one compiled pass on the CPU, and by torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cuvee.codec.models import dtypes
from cuvee.codec.paged import PagedCache
from cuvee.codec.stages.compiled.bfloat16 import saturated, to_float
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.transform import plain
from cuvee.codec.stages.rows import LayerRows, Rows, cache_rows, dense_rows, has_rows


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


def _add_to_rows(more: torch.Tensor, rows: Rows) -> None:
    """Add finite numbers, float32 `[T, H, D]`, to rows of bfloat16 or float32."""
    _add(more.contiguous().numpy(), plain(rows.memory), rows.begins, rows.head_stride, rows.offsets, rows.kinds)


def prepare(cache: PagedCache) -> None:
    """Compile or load the loop for this cache now, so that no request waits for it."""
    if compilable(cache.device, cache.dtype):
        _add_to_rows(torch.zeros(1, 1, 1), dense_rows(torch.zeros(1, 1, 1, dtype=cache.dtype)))


def compilable(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether compiled loops add to memory of this kind: bfloat16 and float32 on the CPU."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)


def rows_to_add_to(cache: PagedCache, slots: torch.Tensor) -> LayerRows | None:
    """Return the rows of the tokens at `slots`, int64 `[T]`, in all layers; None where torch has to add.

    Raises:
        InputError: the cache does not have one of the slots.
    """
    if not compilable(cache.device, cache.dtype) or not has_rows(cache):
        return None
    return cache_rows(cache, slots, range(cache.layout.num_layers))


def adder(cache: PagedCache, slots: torch.Tensor) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
    """Return a function that adds float32 `[T, H, D]` to the keys and values of a layer at `slots`.

    Sums are rounded once to the cache's dtype, and none is beyond its range. The cache must have no scales. The slots
    must be the cache's and differ from each other; on a device that is not checked, because checking waits for the
    device.

        >>> from cuvee.codec.layout import KVLayout, LayerLayout
        >>> layout = KVLayout("mine", (LayerLayout(1, 2, 2, None),), "float32", max_positions=None)
        >>> cache = PagedCache(layout, [torch.zeros(2, 4, 1, 2)], [torch.ones(2, 4, 1, 2)])
        >>> adder(cache, torch.tensor([5, 0]))(0, torch.ones(2, 1, 2), torch.full((2, 1, 2), 3.0))
        >>> cache.keys[0].sum(), cache.values[0][1, 1]
        (tensor(4.), tensor([[4., 4.]]))

    Args:
        cache: the pages.
        slots: int64 `[T]` on the cache's device; -1 leaves a token out, on the CPU.

    Raises:
        InputError: the cache does not have one of the slots; on the CPU only.
    """
    rows = rows_to_add_to(cache, slots)
    if rows is not None:

        def add(index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            for of_layers, more in zip(rows, (keys, values), strict=True):
                found = of_layers[index]
                if found is not None:
                    _add_to_rows(more, found)

        return add
    read, write = cache.reader(slots), cache.writer(slots)

    def add_by_torch(index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        old = read(index)
        write(
            index,
            *(
                dtypes.saturated(part.float() + more, part.dtype)
                for part, more in zip(old, (keys, values), strict=True)
            ),
        )

    return add_by_torch
