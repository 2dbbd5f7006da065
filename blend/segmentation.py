"""Find the pieces of a prompt that are likely to recur elsewhere: by a separator, or by content.

    ContentChunker   cuts at a hash of the last few tokens, so the same run of tokens has the same cuts at any place
                     and after any text
    split            cuts at a separator that the prompt has between its parts

Backup tools use content-defined chunking to find known data (Muthitacharoen et al., LBFS, SOSP 2001; Xia et al.,
FastCDC, USENIX ATC 2016). Here it works on token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuvee.codec.errors import InputError

Span = tuple[int, int]
"""Tokens `start … end` of a prompt, without `end`."""

_WINDOW = 4  # tokens that decide about a cut after them
_MOST_LIKELY = 1 << 32


@dataclass(frozen=True, slots=True)
class ContentChunker:
    """Cuts tokens where a hash of the last four selects, within limits on the length of chunks.

    A document that begins in the middle of a chunk has the same cuts only after the next cut. About one chunk at either
    end of a moved document is therefore not found again: choose `mean` well below the length of your documents.

        >>> document = list(range(1000, 3000))
        >>> cut = ContentChunker(least=32, mean=128, most=512).cut
        >>> first = {tuple(document[a:b]) for a, b in cut(document)}
        >>> again = cut([7] * 300 + document + [8] * 100)
        >>> len(first), sum(tuple(([7] * 300 + document)[a:b]) in first for a, b in again if b <= 2300)
        (14, 13)

    Args:
        least: tokens of the shortest chunk.
        mean: average tokens per chunk, not counting the limit `most`.
        most: tokens of the longest chunk.

    Raises:
        InputError: not 1 <= least < mean <= most.
    """

    least: int = 64
    mean: int = 192
    most: int = 768

    def __post_init__(self) -> None:
        for name in ("least", "mean", "most"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name}: must be a whole number of at least 1, got {value!r}")
        if not self.least < self.mean <= self.most:
            raise InputError(
                f"mean: must be above least={self.least} and at most most={self.most} tokens, got {self.mean}"
            )

    def cut(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> list[Span]:
        """Return the chunks of `tokens`, adjacent and in order, without the tokens after the last cut."""
        ids = np.asarray(tokens, np.int64)
        likely = np.flatnonzero(_window_hash(ids) < _MOST_LIKELY // (self.mean - self.least)) + 1
        spans = []
        start = 0
        while start + self.least <= len(ids):
            at = int(np.searchsorted(likely, start + self.least))
            end = min(int(likely[at]) if at < len(likely) else len(ids) + 1, start + self.most)
            if end > len(ids):
                break
            spans.append((start, end))
            start = end
        return spans


def split(tokens: Sequence[int], separator: Sequence[int]) -> list[Span]:
    """Return the runs of `tokens` between separators, without the tokens after the last separator.

        >>> split([1, 2, 0, 3, 0, 0, 4, 5], [0])
        [(0, 2), (3, 4)]

    Args:
        tokens: the prompt.
        separator: one token or more.

    Raises:
        InputError: the separator has no tokens.
    """
    if not len(separator):
        raise InputError("separator: must hold at least one token, got none")
    ids, mark = np.asarray(tokens, np.int64), np.asarray(separator, np.int64)
    if len(ids) < len(mark):
        return []
    found = np.flatnonzero((np.lib.stride_tricks.sliding_window_view(ids, len(mark)) == mark).all(1))
    spans = []
    start = 0
    for at in found.tolist():
        if at < start:  # overlaps the previous separator
            continue
        if at > start:
            spans.append((start, at))
        start = at + len(mark)
    return spans


def _window_hash(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return 32 hash bits per token, of the token and the three before it (splitmix64, Steele et al., OOPSLA 2014)."""
    mixed = ids.astype(np.uint64)
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed + np.uint64(0x9E3779B97F4A7C15)) if shift == 30 else mixed
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        total = np.zeros(len(ids), np.uint64)
        for back in range(min(_WINDOW, len(ids))):
            total[back:] += mixed[: len(ids) - back] * np.uint64(2 * back + 1)
        total = (total ^ (total >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return total >> np.uint64(32)
