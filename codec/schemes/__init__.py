"""How the sections of a blob are coded: one class per scheme, with the same methods.

| scheme | needs | loses |
|---|---|---|
| `transform` | a learned profile | quantization |
| `lossless` | nothing | nothing |
"""

from __future__ import annotations


def overlap(at: slice, span: range) -> tuple[slice, slice]:
    """Return the tokens of a tile `at` that lie in `span`: as rows of the tile, and as rows of the outputs."""
    first, end = max(at.start, span.start), min(at.stop, span.stop)
    return slice(first - at.start, end - at.start), slice(first - span.start, end - span.start)
