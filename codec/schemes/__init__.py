"""How the sections of a blob are coded: one class per scheme, with the same methods.

| scheme | needs | loses |
|---|---|---|
| `transform` | a learned profile | quantization |
| `lossless` | nothing | nothing |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def batches(weights: Sequence[int], limit: int, most: int | None = None) -> Iterator[slice]:
    """Yield runs of at most `most` items whose weights add up to at most `limit`, or of one item."""
    start = total = 0
    for index, weight in enumerate(weights):
        if index > start and (total + weight > limit or index - start == most):
            yield slice(start, index)
            start, total = index, 0
        total += weight
    if len(weights) > start:
        yield slice(start, len(weights))


def overlap(at: slice, span: range) -> tuple[slice, slice]:
    """Return the tokens of a tile `at` that lie in `span`: as rows of the tile, and as rows of the outputs."""
    first, end = max(at.start, span.start), min(at.stop, span.stop)
    return slice(first - at.start, end - at.start), slice(first - span.start, end - span.start)
