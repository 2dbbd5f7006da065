"""Coded streams: their parts and their number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cuvee.codec.support.arrays import I32, U16, U32

LOWER_BOUND = 1 << 16
WORD_BITS = 16
MAX_TOKENS_PER_STREAM_LOG2 = 7
MAX_TOKENS_PER_STREAM = 1 << MAX_TOKENS_PER_STREAM_LOG2
MIN_STREAM_BYTES = 6  # size of a stream without words in a blob: a state of 4 bytes and a length of 2
WINDOW = 256  # tokens per sorted window; a multiple of every number of tokens per stream


@dataclass(frozen=True, slots=True)
class Streams:
    """Coded streams: initial decoder states `[S]` uint32, word counts `[S]` uint32, and all words `[W]` uint16."""

    states: U32
    lengths: U32
    words: U16


# The class stream of a section whose tokens all have one class: it holds nothing.
ONE_CLASS = Streams(np.array([LOWER_BOUND], np.uint32), np.zeros(1, np.uint32), np.empty(0, np.uint16))


@dataclass(frozen=True, slots=True)
class Escapes:
    """Values that their table cannot code: `index` `[E]` uint32, row * T + column, increasing; `value` `[E]` int32."""

    index: U32
    value: I32


NO_ESCAPES = Escapes(np.empty(0, np.uint32), np.empty(0, np.int32))


def stream_count(tokens: int, tokens_per_stream: int) -> int:
    """Return the number of streams that hold `tokens` tokens."""
    return -(-tokens // tokens_per_stream)


def windows(first: int, end: int) -> Iterator[slice]:
    """Yield the windows of the tokens `first … end - 1`; `first` is a multiple of WINDOW."""
    for start in range(first, end, WINDOW):
        yield slice(start, min(start + WINDOW, end))
