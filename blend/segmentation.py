"""Find the pieces of a prompt that are likely to recur elsewhere: by paragraphs, or by content.

    ContentChunker     cuts at a hash of the last few tokens, so the same run of tokens has the same cuts at any place
                       and after any text
    ParagraphChunker   cuts at blank lines, and longer paragraphs by content, so whole paragraphs are found again

Backup tools use content-defined chunking to find known data (Muthitacharoen et al., LBFS, SOSP 2001; Xia et al.,
FastCDC, USENIX ATC 2016). Here it works on token ids.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)

Span = tuple[int, int]
"""Tokens `start … end` of a prompt, without `end`."""

_WINDOW = 4  # tokens that decide about a cut after them
_MOST_LIKELY = 1 << 32
_LINES = 2  # line breaks that end a paragraph


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
        least: tokens of the shortest chunk, at least 1.
        mean: average tokens per chunk, not counting the limit `most`; above `least`.
        most: tokens of the longest chunk, at least `mean`.
    """

    least: int = 64
    mean: int = 192
    most: int = 768

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


@dataclass(frozen=True, slots=True, eq=False)
class LineBreaks:
    """What the tokens of a vocabulary of V ids say about line breaks.

    Attributes:
        trailing: the line breaks after each token's last visible character, uint8 `[V]`.
        blank: whether it has no visible character, bool `[V]`.
    """

    trailing: npt.NDArray[np.uint8]
    blank: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, texts: Iterable[str]) -> LineBreaks:
        """Return the line breaks of a vocabulary, given the text of each id in order."""
        trailing, blank = [], []
        for text in texts:
            visible = text.rstrip()
            trailing.append(min(text.count("\n", len(visible)), 255))
            blank.append(not visible and bool(text))
        return cls(np.array(trailing, np.uint8), np.array(blank, bool))

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> LineBreaks:
        """Return the line breaks of a tokenizer's vocabulary: any with `len()` and `decode`, such as transformers'."""
        texts, without = [], 0
        for token in range(len(tokenizer)):
            try:
                # Some strip the space before a text, and so the whole text of a token that is a space: two keep one.
                texts.append(str(tokenizer.decode([token])) or str(tokenizer.decode([token, token])))
            except Exception:  # whatever a tokenizer raises for an id that it reserves; it ends no paragraph
                texts.append("")
                without += 1
        if without:
            _log.info("cuvee: %d of %d ids of the vocabulary have no text", without, len(texts))
        return cls.of(texts)

    def paragraphs(self, tokens: npt.NDArray[np.int64]) -> list[int]:
        """Return where paragraphs begin: at visible tokens behind at least two line breaks. The first begins at 0."""
        in_vocabulary = (tokens >= 0) & (tokens < len(self.trailing))
        at = np.where(in_vocabulary, tokens, 0)
        trailing, blank = np.where(in_vocabulary, self.trailing[at], 0), in_vocabulary & self.blank[at]
        begins, lines, before = [0], 0, -1
        for position in np.flatnonzero((trailing > 0) | blank).tolist():
            if position != before + 1 or not blank[position]:
                if lines >= _LINES:
                    begins.append(before + 1)
                lines = 0
            lines += int(trailing[position])
            before = position
        if lines >= _LINES and before + 1 < len(tokens):
            begins.append(before + 1)
        return begins


@dataclass(frozen=True, slots=True)
class ParagraphChunker:
    r"""Cuts tokens at blank lines, so that a paragraph is found again whatever stands around it.

    Longer paragraphs than `content.most` are cut by content. Shorter ones than `content.least` are joined until they
    are long enough; those before a longer paragraph are left out, so that they do not change it.

        >>> breaks = LineBreaks.of(["a", "b", "\n", "c\n\n"])
        >>> chunker = ParagraphChunker(ContentChunker(least=3, mean=8, most=16), breaks)
        >>> chunker.cut([0, 0, 1, 2, 2, 1, 3, 1, 1, 1, 3, 0])
        [(0, 5), (7, 11)]

    Args:
        content: limits of the chunks, and how to cut long paragraphs.
        breaks: of the vocabulary.
    """

    content: ContentChunker
    breaks: LineBreaks

    def cut(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> list[Span]:
        """Return the chunks of `tokens`, in order, without the last paragraph if it may go on."""
        ids = np.asarray(tokens, np.int64)
        begins = self.breaks.paragraphs(ids)
        spans: list[Span] = []
        short: int | None = None  # where the short paragraphs that are being joined begin
        for start, end in itertools.pairwise(begins):
            if end - start > self.content.most:
                spans += self._within(ids, start, end)
                short = None
            elif end - start >= self.content.least:
                spans.append((start, end))
                short = None
            else:
                short = start if short is None else short
                if end - short >= self.content.least:
                    spans.append((short, end))
                    short = None
        if len(ids) - begins[-1] > self.content.most:  # it is long in any case
            spans += [(begins[-1] + a, begins[-1] + b) for a, b in self.content.cut(ids[begins[-1] :])]
        return spans

    def _within(self, ids: npt.NDArray[np.int64], start: int, end: int) -> list[Span]:
        """Cut a paragraph by content; what is left after the last cut is a chunk as well, if it is long enough."""
        spans = [(start + a, start + b) for a, b in self.content.cut(ids[start:end])]
        last = spans[-1][1] if spans else start
        return [*spans, (last, end)] if end - last >= self.content.least else spans


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
