"""Segments of a prompt: by content the same wherever a document stands, and by paragraphs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuvee.blend.segmentation import ContentChunker, LineBreaks, ParagraphChunker, Span

WINDOW = 4  # tokens that decide about a cut
SMALL = ContentChunker(4, 12, 30)
ids = st.lists(st.integers(0, 40), max_size=300)
sizes = st.tuples(st.integers(1, 20), st.integers(1, 30), st.integers(0, 40)).map(
    lambda parts: ContentChunker(parts[0], parts[0] + parts[1], parts[0] + parts[1] + parts[2])
)


def ends(spans: list[Span], low: int = 0, high: int | None = None) -> list[int]:
    """Where spans end within the tokens `low … high`, counted from `low`."""
    return [end - low for _, end in spans if low < end and (high is None or end <= high)]


# By content ----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(ids, sizes)
def test_chunks_are_adjacent_and_neither_too_short_nor_too_long(tokens: list[int], chunker: ContentChunker) -> None:
    spans = chunker.cut(tokens)
    assert [start for start, _ in spans] == [0, *(end for _, end in spans)][: len(spans)]
    assert all(chunker.least <= end - start <= chunker.most for start, end in spans)
    rest = len(tokens) - (spans[-1][1] if spans else 0)
    assert 0 <= rest < chunker.most, "no more is left out than a chunk that may go on"


@settings(max_examples=200, deadline=None)
@given(ids, ids, sizes)
def test_later_tokens_change_no_chunk(tokens: list[int], more: list[int], chunker: ContentChunker) -> None:
    """So the chunks of a conversation are those of its next turn, and the open one goes on."""
    spans = chunker.cut(tokens)
    assert chunker.cut(tokens + more)[: len(spans)] == spans


@settings(max_examples=200, deadline=None)
@given(ids, ids, ids, sizes)
def test_after_the_first_common_cut_all_cuts_are_the_same(
    first: list[int], second: list[int], document: list[int], chunker: ContentChunker
) -> None:
    one, other = (ends(chunker.cut(before + document), len(before)) for before in (first, second))
    common = [at for at in one if at in other and at >= WINDOW - 1]
    if common:
        assert [at for at in one if at >= common[0]] == [at for at in other if at >= common[0]]


def test_text_without_a_likely_cut_is_cut_at_the_most() -> None:
    """A run of one token has the same hash everywhere after its first three."""
    flat = next(
        token
        for token in range(100)
        if SMALL.cut([token] * 40) == [(0, 30)]  # as most of them are
    )
    assert SMALL.cut([flat] * 100) == [(0, 30), (30, 60), (60, 90)]
    assert SMALL.cut([flat] * 30) == [(0, 30)]
    assert SMALL.cut([flat] * 29) == []


def test_any_token_ids_are_taken() -> None:
    tokens = [0, -1, 2**62, -(2**62), 2**31, 7] * 100
    assert SMALL.cut(tokens) == SMALL.cut(np.array(tokens))
    assert ends(SMALL.cut(tokens))


def test_cuts_are_those_of_every_release() -> None:
    """Stored segments are only found again by the same cuts."""
    cuts = ends(ContentChunker(8, 24, 64).cut(list(range(200))))
    assert cuts == [24, 51, 68, 85, 96, 104, 127, 141, 165, 186]


# By paragraphs -------------------------------------------------------------------------------------------------------

TEXTS = ["a", "b", " ", "\n", "c.\n", "d.\n\n", "\n\n\n", "\r\n", "", "e\nf", "g. \n \n"]
BREAKS = LineBreaks.of(TEXTS)
PARAGRAPHS = ParagraphChunker(SMALL, BREAKS)
texts = st.lists(st.integers(-1, len(TEXTS) + 1), max_size=200)


def written(tokens: Sequence[int]) -> str:
    return "".join(TEXTS[token] if 0 <= token < len(TEXTS) else "?" for token in tokens)


def test_what_tokens_say_about_line_breaks() -> None:
    assert BREAKS.trailing.tolist() == [0, 0, 0, 1, 1, 2, 3, 1, 0, 0, 2]
    assert BREAKS.blank.tolist() == [text != "" and not text.strip() for text in TEXTS]


def test_a_blank_line_may_hold_spaces_tabs_and_carriage_returns() -> None:
    class SentencePiece:
        texts = ("word", " ", "\n", "\r", "\t", "\u2581", "")

        def __len__(self) -> int:
            return len(self.texts)

        def decode(self, ids: list[int]) -> str:
            return "".join(self.texts[id].replace("\u2581", " ") for id in ids).removeprefix(" ")

    breaks = LineBreaks.of_tokenizer(SentencePiece())
    assert breaks.blank.tolist() == [False, True, True, True, True, True, False]
    for line in ([], [1], [5], [4], [5, 4, 1], [3]):
        for end in ([2], [3, 2]):
            tokens = [0, *end, *line, *end]
            assert breaks.paragraphs(np.array([*tokens, 0])) == [0, len(tokens)], (line, end)


def test_a_tokenizer_may_have_ids_without_text(caplog: pytest.LogCaptureFixture) -> None:
    class Tokenizer:
        def __len__(self) -> int:
            return len(TEXTS) + 1

        def decode(self, ids: list[int]) -> str:
            return TEXTS[ids[0]]

    with caplog.at_level("INFO"):
        breaks = LineBreaks.of_tokenizer(Tokenizer())
    assert breaks.trailing.tolist() == [*BREAKS.trailing.tolist(), 0]
    assert breaks.blank.tolist() == [*BREAKS.blank.tolist(), False]
    assert [record.getMessage() for record in caplog.records] == ["cuvee: 1 of 12 ids of the vocabulary have no text"]


@pytest.mark.parametrize(
    ("tokens", "begins"),
    [
        ([], [0]),
        ([0, 5, 1], [0, 2]),
        ([0, 4, 3, 1], [0, 3]),
        ([0, 3, 2, 3, 1], [0, 4]),
        ([0, 3, 1, 3, 1], [0]),
        ([0, 4, 4, 1], [0]),
        ([0, 5, 5, 1], [0, 2, 3]),
        ([0, 6, 7, 3, 1], [0, 4]),
        ([0, 5], [0]),
        ([3, 3, 0], [0, 2]),
        ([0, 7, 7, 12, 10, -1], [0, 3, 5]),
    ],
)
def test_paragraphs_begin_behind_blank_lines(tokens: list[int], begins: list[int]) -> None:
    assert BREAKS.paragraphs(np.array(tokens, np.int64)) == begins


@settings(max_examples=300, deadline=None)
@given(texts)
def test_paragraphs_are_those_of_the_text(tokens: list[int]) -> None:
    begins = BREAKS.paragraphs(np.array(tokens, np.int64))
    assert begins == sorted(set(begins)) and begins[0] == 0
    for begin in begins[1:]:
        before = written(tokens[:begin])
        assert before[len(before.rstrip()) :].count("\n") >= 2
        assert not written(tokens[begin : begin + 1]).isspace()


@settings(max_examples=300, deadline=None)
@given(texts, texts)
def test_later_tokens_change_no_chunk_of_a_paragraph(tokens: list[int], more: list[int]) -> None:
    spans = PARAGRAPHS.cut(tokens)
    assert all(SMALL.least <= end - start for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert PARAGRAPHS.cut(tokens + more)[: len(spans)] == spans


def paragraph(count: int, seed: int) -> list[int]:
    return [*np.random.default_rng(seed).integers(0, 2, count - 2).tolist(), 3, 3]


@pytest.mark.parametrize("count", [SMALL.least, 11, SMALL.most, 2 * SMALL.most])
def test_a_paragraph_is_found_whole_whatever_stands_around_it(count: int) -> None:
    own = paragraph(count, 0)
    found = []
    for before, after in (([], [0]), ([1, 5], [0] * 5), (paragraph(3, 1), paragraph(20, 2)), (paragraph(29, 3), [1])):
        tokens = [*before, *own, *after]
        spans = PARAGRAPHS.cut(tokens)
        found.append({tuple(tokens[a:b]) for a, b in spans if a >= len(before) and b <= len(before) + count})
    assert all(each == found[0] for each in found)
    kept = sum(map(len, found[0]))
    assert kept == count if count <= SMALL.most else kept > count - SMALL.least


def test_short_paragraphs_are_joined_and_long_ones_cut_by_content() -> None:
    short, long = paragraph(3, 0), paragraph(100, 1)
    assert PARAGRAPHS.cut([*short, *short, *short, 0]) == [(0, 6)]
    assert PARAGRAPHS.cut([*short, *paragraph(10, 2), 0]) == [(3, 13)], "a short one does not change the next"
    spans = PARAGRAPHS.cut([*long, 0])
    assert [span for span in spans if span in SMALL.cut(long)] == SMALL.cut(long)
    assert PARAGRAPHS.cut(long[:-2]) == SMALL.cut(long[:-2]), "also where it has not ended yet"
    assert PARAGRAPHS.cut(long[:20]) == [], "it may be a paragraph of its own"
