"""`Recompute` where a part of the prompt is known and a part is left to somebody else, against `Blender`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.blend.random_choice import Random
from tests.blend.test_blender import LAYERS, Chosen, Whole, alone, close, cut, ids, layers_of, layout_of, whole

from cuvee.blend import (
    Blender,
    Boundary,
    Guided,
    Nothing,
    Segment,
    Selector,
    recompute,
)
from cuvee.blend.recompute import KVExchange, Observer, Placed, PromptKV, Recompute, Recomputed, same
from cuvee.blend.recompute_model import TransformersModel
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache

# Text that stays exact, two chunks with text between them, text, and text that is left to somebody else.
ENDS = (9, 18, 21, 30, 34, 42)
CACHED = (1, 3)
KNOWN, END, TOKENS = 9, 34, 42
POISON = 7.0
# None of these looks at what is known, which is text to `Blender` and not computed yet when its query asks.
SELECTORS: tuple[Selector, ...] = (
    Nothing(),
    Random(0.4, seed=1),
    Random(1.0),
    Boundary(0.25),
)


class DenseKV(PromptKV):
    """KV `[H, T, D]` per layer, of which the query's pass gets copies."""

    def __init__(self, layout: KVLayout, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.keys, self.values = ([part.clone() for part in parts] for parts in (keys, values))
        pages = PagedCache.dense(layout, *([x.transpose(0, 1) for x in parts] for parts in (self.keys, self.values)))
        super().__init__(pages, torch.arange(TOKENS), torch.ones(TOKENS, dtype=torch.bool))

    def exchange(self, index: int, positions: torch.Tensor, end: int, observer: Observer | None) -> KVExchange:
        return KVExchange(self.keys[index][:, :end], self.values[index][:, :end], positions, observer)


class Noting(TransformersModel):
    """Notes the tokens of each pass, those of the query's apart."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.computed: set[int] = set()
        self.asked: list[list[int]] = []

    def rows(self, positions: torch.Tensor, visible: torch.Tensor | None) -> Any:
        if visible is None:
            self.computed |= set(positions.tolist())
        else:
            self.asked.append(positions.tolist())
        return super().rows(positions, visible)


@pytest.fixture
def model(tiny_model: Callable[..., Any]) -> Any:
    model = tiny_model("llama", num_hidden_layers=LAYERS, initializer_range=0.15)
    model.set_attn_implementation("sdpa")
    return model


def segments(model: Any, tokens: torch.Tensor) -> list[Segment]:
    """The prompt for `Blender`."""
    return [
        Segment(part, alone(model, part, 50 + start) if index in CACHED else None)
        for index, (start, _, part) in enumerate(cut(tokens, ENDS))
    ]


def placed(tokens: torch.Tensor, known: int = KNOWN, end: int = END) -> Placed:
    at = torch.arange(TOKENS)
    segment = torch.bucketize(at, torch.tensor(ENDS), right=True)
    starts = torch.tensor([0, *ENDS[:-1]])
    cached = (segment == CACHED[0]) | (segment == CACHED[1])
    return Placed(tokens, segment, at - starts[segment], cached, torch.zeros_like(cached), at < known, end)


def in_place(model: Any, tokens: torch.Tensor, full: Whole) -> DenseKV:
    """Known KV is exact, chunks were computed alone, and all other KV is poison."""
    kv = DenseKV(layout_of(model), full.keys, full.values)
    for index, (start, stop, part) in enumerate(cut(tokens, ENDS)):
        chunk = whole(model, part, start)
        for mine, theirs in zip(kv.keys + kv.values, chunk.keys + chunk.values, strict=True):
            if index:
                mine[:, start:stop] = theirs if index in CACHED else POISON
    return kv


@torch.no_grad()
def run(
    model: Any,
    tokens: torch.Tensor,
    selector: Selector,
    total: Callable[[torch.Tensor], torch.Tensor] = same,
    given: Placed | None = None,
    rows: int = recompute.MOST_ROWS,
    correct: bool = True,
) -> tuple[Noting, DenseKV, Recomputed]:
    noting, kv = Noting(model), in_place(model, tokens, whole(model, tokens))
    prompt = placed(tokens) if given is None else given
    return noting, kv, Recompute(noting, kv, prompt, total, rows, correct).run(selector)


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
@pytest.mark.parametrize(("rows", "correct"), [(1, False), (4, False), (1024, False), (1024, True)])
def test_gives_the_kv_that_a_blend_of_the_whole_prompt_gives(
    model: Any, selector: Selector, rows: int, correct: bool
) -> None:
    tokens = ids(TOKENS)
    expected = Blender(model, selector=selector, correct=correct).blend(segments(model, tokens))
    noting, kv, done = run(model, tokens, selector, rows=rows, correct=correct)
    for index, layer in enumerate(layers_of(expected.cache)):
        for mine, theirs in ((kv.keys[index], layer.keys[0]), (kv.values[index], layer.values[0])):
            assert close(mine[:, :END], theirs[:, :END])
            assert (mine[:, END:] == POISON).all(), "that is left to somebody else"
    at = torch.arange(TOKENS)
    own = (at >= KNOWN) & (at < END)
    assert torch.equal(done.computed, expected.record.computed & own)
    assert noting.computed == set(done.computed.nonzero()[:, 0].tolist()) and min(noting.computed) >= KNOWN
    assert len(done.hidden) == int(done.computed.sum())


def test_the_query_looks_at_what_is_known_and_is_the_end_of_the_prompt(model: Any) -> None:
    """As if what is known were a chunk that begins the prompt."""
    tokens, full = ids(TOKENS), whole(model, ids(TOKENS))
    parts = segments(model, tokens)
    parts[0] = Segment(tokens[:KNOWN], full.chunk(model, 0, KNOWN))
    mine, theirs = (Chosen(look=lambda prompt: prompt.attend(3, (1, 2))) for _ in range(2))
    expected = Blender(model, selector=theirs).blend(parts)
    noting, kv, done = run(model, tokens, mine)
    assert close(mine.seen, theirs.seen) and mine.seen[:KNOWN].all()
    assert noting.asked == [[TOKENS - 3, TOKENS - 2, TOKENS - 1]]
    assert done.query_token_layers == expected.record.query_token_layers == 9
    assert not mine.seen[18:21].any() and not mine.seen[30 : TOKENS - 3].any(), "text that is not computed yet"
    assert all((part[:, END:] == POISON).all() for part in kv.keys + kv.values)


@pytest.mark.parametrize(
    ("selector", "calls"),
    [(Random(0.5), 0), (Guided(0.6), 1)],
    ids=["nothing", "guided"],
)
def test_ranks_decide_by_sums_over_all_of_them(model: Any, selector: Selector, calls: int) -> None:
    tokens = ids(TOKENS)
    given: list[torch.Tensor] = []

    def total(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.dtype == torch.float32
        given.append(tensor)
        return tensor

    _, _, done = run(model, tokens, selector, total)
    assert len(given) == calls
    favored = torch.zeros(TOKENS)
    favored[[10, 23, 24]] = 1e6
    if calls == 1:
        _, _, done = run(model, tokens, Guided(0.25), lambda tensor: favored)
        assert done.computed[[10, 23, 24]].all(), "what the sum says counts, not this rank's part"


def test_nothing_to_compute_is_nothing_done(model: Any) -> None:
    tokens = ids(TOKENS)
    before = in_place(model, tokens, whole(model, tokens))
    noting, kv, done = run(model, tokens, Nothing(), given=placed(tokens, known=9, end=18))
    assert not done.computed.any() and len(done.hidden) == 0 and noting.computed == set()
    assert all(map(torch.equal, kv.keys + kv.values, before.keys + before.values))
