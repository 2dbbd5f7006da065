"""What each selector selects: on prompts small enough to do by hand, and within its budget on any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from cuvee.blend import (
    HKVD,
    Blender,
    Boundary,
    Nothing,
    Overlap,
    Product,
    Prompt,
    QueryGuided,
    Random,
    Segment,
    Selection,
    Selector,
    default_selector,
)
from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import cache_argument

LAYERS = 6


@dataclass
class Attention:
    """Stands in for `Prompt.attend`: gives the same numbers each time, and counts."""

    mass: torch.Tensor
    calls: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def __call__(self, queries: int, layers: Sequence[int]) -> torch.Tensor:
        self.calls.append((queries, tuple(layers)))
        return self.mass

    @property
    def spent(self) -> int:
        return sum(queries * (max(layers) + 1) for queries, layers in self.calls)


def prompt(
    *parts: Sequence[int], text: Sequence[int] = (), leading: bool = False, layers: int = LAYERS, mass: Any = None
) -> Prompt:
    """A prompt of `parts`, chunks but for those whose index is in `text`."""
    lengths = torch.tensor([len(part) for part in parts])
    segment = torch.repeat_interleave(torch.arange(len(parts)), lengths)
    cached = ~torch.isin(segment, torch.tensor(list(text), dtype=torch.int64))
    total = len(segment)
    return Prompt(
        tokens=torch.tensor([token for part in parts for token in part]),
        segment=segment,
        offset=torch.cat([torch.arange(n) for n in lengths]),
        cached=cached,
        leading=cached & (segment == 0) & leading,
        layers=layers,
        attend=Attention(torch.zeros(total) if mass is None else torch.tensor(mass)),
    )


def chosen(selector: Selector, on: Prompt) -> list[int]:
    """The choice of a selector that watches no layer."""
    selection = selector.begin(on)
    assert not any(selection.watches(layer) for layer in range(on.layers))
    first = selection.tokens(0)
    assert first.dtype == torch.int64
    assert all(torch.equal(selection.tokens(layer), first) for layer in range(on.layers))
    return first.tolist()


def descend(selector: Selector, on: Prompt, deviations: Callable[[int, torch.Tensor], Any]) -> list[list[int]]:
    """The positions that go through each layer, given deviations(layer, positions) of keys and values."""
    selection = selector.begin(on)
    through = []
    for layer in range(on.layers):
        tokens = selection.tokens(layer)
        through.append(tokens.tolist())
        if selection.watches(layer):
            selection.observe(layer, *deviations(layer, tokens))
    return through


A, B = [1, 2, 3, 4], [5, 2, 6, 7]
TWO = (A, B, [9, 8])  # 8 cached tokens at 0 … 7, two of text

# Boundary, Random, Nothing --------------------------------------------------------------------------------------------


def test_nothing() -> None:
    assert chosen(Nothing(), prompt(*TWO, text=[2])) == []


@pytest.mark.parametrize(
    ("selector", "leading", "expected"),
    [
        (Boundary(0.25), False, [0, 4]),
        (Boundary(0.375), False, [0, 1, 4]),  # of equal scores the first token
        (Boundary(0.5), False, [0, 1, 4, 5]),
        (Boundary(cost=0.5), False, [0, 1, 4, 5]),
        (Boundary(cost=0.49), False, [0, 1, 4]),  # a cost is never exceeded
        (Boundary(0.25), True, [4, 5]),  # leading tokens last
        (Boundary(0.625), True, [0, 4, 5, 6, 7]),
        (Boundary(1.0), True, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Boundary(0.0), False, []),
        (Boundary(tokens=0), False, []),
        (Boundary(tokens=1), False, [0, 4]),
        (Boundary(tokens=3), True, [4, 5, 6]),
        (Boundary(tokens=99), False, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
    ids=repr,
)
def test_boundary(selector: Selector, leading: bool, expected: list[int]) -> None:
    assert chosen(selector, prompt(*TWO, text=[2], leading=leading)) == expected


def test_text_moves_positions_but_is_never_selected() -> None:
    on = prompt([9], A, [9, 9], B, [8], text=[0, 2, 4])
    assert chosen(Boundary(0.25), on) == [1, 7]
    assert chosen(Boundary(1.0), on) == [1, 2, 3, 4, 7, 8, 9, 10]
    assert chosen(Random(1.0), on) == [1, 2, 3, 4, 7, 8, 9, 10]


def test_random_is_reproducible() -> None:
    on = prompt(range(100), [1], text=[1])
    assert chosen(Random(0.3), on) == chosen(Random(0.3), on) == chosen(Random(0.3, seed=0), on)
    assert chosen(Random(0.3), on) != chosen(Random(0.3, seed=1), on)
    drawn = torch.bincount(torch.tensor([n for seed in range(200) for n in chosen(Random(0.3, seed=seed), on)]))
    assert int(drawn.sum()) == 6000 and int(drawn.min()) > 30 and int(drawn.max()) < 90  # 60 each, 6.5 deviation


def test_best_takes_the_first_of_equals_and_leading_ones_last() -> None:
    on = prompt([0, 0, 0], [0, 0, 0], [0], text=[2], leading=True)
    score = torch.tensor([9.0, 9.0, 8.0, 1.0, 2.0, 2.0, 99.0])
    assert [on.best(score, n).tolist() for n in (0, 1, 2, 3, 4, 6, 9)] == [
        [], [4], [4, 5], [3, 4, 5], [0, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5],
    ]  # fmt: skip
    assert on.best(score, 2, torch.tensor([0, 3, 4])).tolist() == [3, 4]


@pytest.mark.parametrize("cached", [1, 2, 3, 7, 10, 33])
@pytest.mark.parametrize("make", [Random, Boundary, Overlap, QueryGuided, lambda r: Product(Random(), ratio=r)])
def test_a_ratio_is_a_rounded_number_of_tokens(make: Any, cached: int) -> None:
    on = prompt(range(cached), [1], text=[1])
    for ratio in (0.0, 0.1, 0.15, 0.5, 0.77, 1.0):
        assert len(chosen(make(ratio), on)) == round(ratio * cached)
    assert len(chosen(make(None), on)) == round(0.15 * cached)


# Overlap --------------------------------------------------------------------------------------------------------------


def votes(on: Prompt) -> list[float]:
    """Votes behind the score of Overlap, which are scaled to mean 1 and raised by 0.6."""
    score = Overlap().score(on)[on.cached] - 0.6
    assert float(score.mean()) == pytest.approx(1.0)
    return score.tolist()


def shares(*numbers: float) -> Any:
    return pytest.approx([n * len(numbers) / sum(numbers) for n in numbers], abs=1e-6)


def test_overlap_votes_for_a_token_and_the_one_after_it() -> None:
    assert votes(prompt(A, B, [9, 2], text=[2])) == shares(0, 1, 1, 0, 0, 1, 1, 0)
    assert chosen(Overlap(0.5), prompt(A, B, [9, 2], text=[2])) == [1, 2, 5, 6]
    assert chosen(Overlap(cost=0.5), prompt(A, B, [9, 2], text=[2])) == [1, 2, 5, 6]


def test_overlap_counts_a_pair_five_times() -> None:
    on = prompt(A, B, [1, 2], text=[2])
    # 1 occurs once; 2 twice, once after 1: five of six parts.
    assert votes(on) == shares(1, 1 + 5 / 6, 5 / 6, 0, 0, 1 / 6, 1 / 6, 0)
    assert chosen(Overlap(3 / 8), on) == [0, 1, 2]
    assert chosen(Overlap(4 / 8), on) == [0, 1, 2, 5]
    # However the text is cut into segments.
    assert votes(prompt(A, B, [1], [2], text=[2, 3])) == votes(on)
    # Text before chunks, and what follows it, is no pair; nor is what begins a prompt.
    assert votes(prompt([1], [2, 3], [2], text=[0, 2])) == shares(1, 1)


def test_overlap_stops_at_the_ends_of_chunks() -> None:
    # Nothing follows 4 in its chunk; 5 begins the next one, so that (4, 5) is no pair of it.
    assert votes(prompt(A, B, [4], text=[2])) == shares(0, 0, 0, 1, 0, 0, 0, 0)
    assert votes(prompt(A, [5, 5], [4, 5], text=[2])) == shares(0, 0, 0, 1, 1 / 2, 1 / 2 + 1 / 2)
    # Nor is the last token of a chunk and the first of the query.
    assert votes(prompt([1, 2, 3], [1], [2], text=[2])) == shares(0, 1, 1, 0)
    assert votes(prompt([1, 2, 5, 2], [1], [2], text=[2])) == shares(0, 1, 1, 1, 0)


def test_overlap_hears_only_the_text_after_the_chunks() -> None:
    assert votes(prompt(A, [3, 3], B, [2], text=[1, 3])) == shares(0, 1, 1, 0, 0, 1, 1, 0)
    # Where a chunk ends the prompt (its last token being computed), all text.
    on = prompt([3], A, text=[0])
    on.cached[-1] = False
    assert on.suffix.tolist() == [True, False, False, False, True]
    assert votes(on) == shares(0, 0, 1)


def test_overlap_without_a_match_leaves_the_first_tokens() -> None:
    on = prompt(A, B, [9, 8], text=[2])
    assert Overlap().score(on).tolist()[:8] == pytest.approx([0.6] * 8)
    assert chosen(Overlap(0.25), on) == [0, 1]
    assert chosen(Product(Overlap(), Boundary(), ratio=0.25), on) == [0, 4]


# QueryGuided, Product -------------------------------------------------------------------------------------------------


def test_query_guided_takes_what_is_looked_at() -> None:
    mass = [0.1, 0.0, 0.9, 0.2, 0.3, 0.0, 0.0, 0.8, 5.0, 5.0]
    on = prompt(*TWO, text=[2], mass=mass)
    assert chosen(QueryGuided(3 / 8), on) == [2, 4, 7]
    assert chosen(QueryGuided(1 / 8, queries=1, layers=(0, 3)), on) == [2]
    assert on.attend.calls == [(2, (2, 3, 4)), (1, (0, 3))]  # type: ignore[attr-defined]
    assert QueryGuided(queries=1, layers=(0, 3)).overhead(on) == 4 and QueryGuided().overhead(on) == 10


@pytest.mark.parametrize(
    ("layers", "asked"),
    [
        (1, (0,)), (2, (0, 1)), (3, (1, 2)), (4, (1, 2)), (5, (1, 2, 3)), (6, (2, 3, 4)), (30, (10, 15, 20)),
        (33, (11, 16, 22)),
    ],
)  # fmt: skip
def test_the_query_is_asked_at_a_third_a_half_and_two_thirds_of_the_depth(layers: int, asked: tuple[int, ...]) -> None:
    on = prompt(*TWO, text=[2], layers=layers, mass=[float(n) for n in range(10)])
    assert chosen(QueryGuided(0.25), on) == [6, 7]
    assert on.attend.calls == [(2, asked)]  # type: ignore[attr-defined]
    assert QueryGuided().overhead(on) == 2 * (max(asked) + 1)


def test_attention_that_is_nowhere_leaves_the_first_tokens_of_chunks_to_a_product() -> None:
    on = prompt(*TWO, text=[2])
    assert chosen(QueryGuided(0.25), on) == [0, 1]
    assert chosen(Product(QueryGuided(), Boundary(), ratio=0.25), on) == [0, 4]


@pytest.mark.parametrize(
    ("most", "count"),
    [
        (None, 6),
        (1.0, 6),
        (0.5, 4),  # 8 · 6 · 0.5 = 24 token-layers, 5 per token
        (10 / 48, 2),
        (9.9 / 48, 1),
        (0.0, 1),  # one always asks
    ],
)
def test_a_pass_of_the_query_can_be_bounded(most: float | None, count: int) -> None:
    on = prompt(A, B, [9, 8, 9, 8, 9, 8], text=[2])
    selector = QueryGuided(0.25, most=most)
    assert selector.overhead(on) == 5 * count
    chosen(selector, on)
    assert on.attend.calls == [(count, (2, 3, 4))]  # type: ignore[attr-defined]
    # In the first layers more may ask; where there is nobody to ask, none do.
    assert QueryGuided(most=10 / 48, layers=(0,)).overhead(on) == 6
    assert QueryGuided(most=0.5).overhead(prompt(A, B)) == 0


def test_the_query_pays_only_where_there_is_a_choice() -> None:
    for selector in (QueryGuided(1.0), QueryGuided(0.0), QueryGuided(cost=1.0), Product(QueryGuided(), ratio=1)):
        on = prompt(*TWO, text=[2])
        assert len(chosen(selector, on)) in (0, 8)
        assert on.attend.calls == []  # type: ignore[attr-defined]
    for hkvd in (HKVD(1.0, weight=QueryGuided()), HKVD(0.0, weight=QueryGuided())):
        on = prompt(*TWO, text=[2])
        hkvd.begin(on)
        assert on.attend.calls == []  # type: ignore[attr-defined]


def test_a_product_multiplies() -> None:
    on = prompt(A, B, [1, 2], text=[2])
    both = Overlap().score(on) * Boundary().score(on)
    product = Product(Overlap(), Boundary(), ratio=0.5)
    assert torch.equal(product.score(on), both)
    assert repr(product) == "Product(Overlap(), Boundary(), ratio=0.5)"
    assert repr(Boundary(tokens=4)) == "Boundary(tokens=4)"
    assert torch.equal(Product(product, Random()).score(on), both * Random().score(on))
    # Lifted votes of the first three are 2.6, 4.3 and 2.3, to be divided by 1, 2 and 3.
    assert chosen(Product(Overlap(), Boundary(), ratio=2 / 8), on) == [0, 1]
    assert chosen(Product(Overlap(), Boundary(), ratio=3 / 8), on) == [0, 1, 2]
    assert Product(QueryGuided(layers=(1,)), QueryGuided(layers=(2,)), Overlap()).overhead(on) == 2 * 2 + 2 * 3


def test_the_default_attends_near_the_boundary() -> None:
    on = prompt(A, B, [1, 2], text=[2], mass=[0.1, 0.0, 0.9, 0.2, 0.8, 0.0, 0.0, 0.8, 5.0, 5.0])
    expected = QueryGuided(queries=16).score(on) * Boundary().score(on)
    assert torch.allclose(default_selector(cost=1).score(on), expected)
    # 0.9, 0.8 and 0.8 in places 2, 0 and 3 of their chunks
    assert [chosen(default_selector(ratio=n / 8), on) for n in (1, 2, 3)] == [[4], [2, 4], [2, 4, 7]]
    # The last adjoins the text, so it needs no run of its own.
    joined = [chosen(default_selector(ratio=n / 8, run_overhead=2), on) for n in (1, 2, 3)]
    assert joined == [[7], [4, 7], [2, 4, 7]]
    assert default_selector(ratio=0.3).ratio == 0.3 and default_selector(cost=0.3).cost == 0.3


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_the_default_fits_models_of_few_layers_and_prompts_that_end_in_a_chunk(
    tiny_model: Callable[..., Any], layers: int
) -> None:
    model = tiny_model("llama", num_hidden_layers=layers)
    tokens = torch.randint(61, (40,), generator=torch.Generator().manual_seed(1))
    keys, values, layout = prefilled(model, tokens[:30])
    chunk = Segment(tokens[:30], KVChunk(keys, values, layout))
    for parts in ([Segment(tokens[:1]), chunk], [chunk, chunk], [chunk, chunk, Segment(tokens[30:])]):
        for cost in (0.15, 0.5, 1.0):
            record = Blender(model, selector=default_selector(cost=cost)).blend(parts).record
            assert cost - 0.1 < record.cost <= cost + 1e-12
        assert Blender(model, selector=default_selector(ratio=0.05)).blend(parts).record.layers == layers


@pytest.mark.parametrize(
    ("budget", "queries"),
    [({}, 2), ({"ratio": 0.15}, 2), ({"cost": 0.15}, 2), ({"cost": 0.3}, 5), ({"ratio": 0.0}, 1), ({"cost": 1}, 16)],
)
def test_the_default_asks_for_a_tenth_of_its_budget(budget: Any, queries: int) -> None:
    on = prompt([3] * 70, [4] * 70, [5] * 40, text=[2])  # 140 cached tokens in 6 layers, 5 of them asked
    selector = default_selector(**budget)
    assert selector.overhead(on) == 5 * queries
    if budget.get("cost"):
        assert queries == 16 or 5 * queries <= 0.1 * budget["cost"] * 140 * 6 < 5 * (queries + 1)


# HKVD -----------------------------------------------------------------------------------------------------------------

KEYS = torch.tensor([[0.0, 5, 0, 0, 0, 1, 0, 0], [0.0, 1, 0, 0, 0, 1, 3, 0], [0.0, 0, 0, 0, 7, 0, 0, 0]])
VALUES = torch.tensor([[0.0, 0, 0, 6, 0, 0, 0, 0], [0.0, 0, 0, 2, 0, 0, 2, 0], [0.0, 0, 0, 0, 0, 0, 0, 0]])


def tables(layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return KEYS[layer][tokens], VALUES[layer][tokens]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (HKVD(1 / 8), [[6]]),  # 3 + 2 in layer 1
        (HKVD(2 / 8), [[3, 6]]),
        (HKVD(1 / 8, of="keys"), [[6]]),
        (HKVD(2 / 8, of="keys"), [[1, 6]]),  # of equal ones the first token
        (HKVD(1 / 8, of="values"), [[3]]),
        (HKVD(1 / 8, check_layers=(0, 1)), [[3]]),  # 6 + 2
        (HKVD(2 / 8, check_layers=(0, 1)), [[1, 3]]),  # 5 + 1
        (HKVD(1 / 8, check_layers=(0, 1), of="keys"), [[1]]),
        (HKVD(1 / 8, weight=Boundary()), [[6]]),  # 5 · 4 ** -0.265 beats 2 · 5 ** -0.265, 1 · 3 ** -0.265
        (HKVD(1 / 8, of="keys", weight=Product(*[Boundary()] * 14)), [[6]]),  # 3 · 4 ** -3.71 beats 3 ** -3.71
        (HKVD(1 / 8, of="keys", weight=Product(*[Boundary()] * 15)), [[1]]),  # 3 ** -3.975 beats 3 · 4 ** -3.975
        (HKVD(2 / 8, of="keys", weight=Product(*[Boundary()] * 15)), [[1, 5]]),
        (HKVD(1 / 8, of="both", weight=Overlap()), [[6]]),
        (HKVD(cost=0.5), [[6]]),  # 48 · 0.5 - 16 = 8 = 2 · 4
        (HKVD(cost=1 / 3), [[]]),
    ],
    ids=repr,
)
def test_hkvd_takes_what_deviates_most(selector: HKVD, expected: list[list[int]]) -> None:
    on = prompt(A, B, [9, 9], text=[2])
    through = descend(selector, on, tables)
    assert through[:2] == [list(range(8))] * 2
    if selector.cost == 0.5:
        expected = [[3, 6]]
    assert through[2:] == expected * 4


def test_hkvd_watches_its_check_layers_alone() -> None:
    on = prompt(*TWO, text=[2])
    for layers, expected in (((1,), [1]), ((0, 2), [0, 2]), ((3,), [3])):
        selection = HKVD(0.25, check_layers=layers).begin(on)
        watched = []
        for layer in range(LAYERS):
            count = len(selection.tokens(layer))
            assert count == (8 if layer <= max(layers) else 2)
            if selection.watches(layer):
                watched.append(layer)
                selection.observe(layer, torch.rand(count), torch.rand(count))
        assert watched == expected


def test_hkvd_shrinks_by_what_the_last_layer_shows() -> None:
    on = prompt(A, B, [9], text=[2])
    table = torch.tensor(
        [[0.0] * 8, [8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7, 8], [1, 9, 1, 8, 1, 1, 1, 1], [0.0] * 8]
    )
    through = descend(
        HKVD(0.25, shrink=(3.0, 1.5)), on, lambda layer, tokens: (table[layer][tokens], 0 * table[layer][tokens])
    )
    assert through == [list(range(8)), list(range(8)), [0, 1, 2, 3, 4, 5], [3, 4, 5], [3, 4], [3, 4]]


def test_hkvd_takes_leading_tokens_last() -> None:
    on = prompt(A, B, [9], text=[2], leading=True)
    table = torch.tensor([9.0, 9, 9, 9, 1, 2, 3, 4])

    def flat(layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return table[tokens], 0 * table[tokens]

    assert descend(HKVD(0.25), on, flat) == [[4, 5, 6, 7]] * 2 + [[6, 7]] * 4
    assert descend(HKVD(0.5), on, flat) == [[4, 5, 6, 7]] * 6
    assert descend(HKVD(0.75), on, flat) == [list(range(8))] * 2 + [[0, 1, 4, 5, 6, 7]] * 4
    # A cost that suffices for all others is not spent on them, nor found too small because of them.
    for cost in (0.5, 0.6, 0.9):
        assert descend(HKVD(cost=cost), on, flat) == [[4, 5, 6, 7]] * 6
    assert descend(HKVD(cost=1.0), on, flat) == [list(range(8))] * 6
    assert descend(HKVD(cost=0.1), prompt(A, [9], text=[1], leading=True), flat) == [[]] * 6


def test_a_cost_that_just_pays_for_the_check_layers() -> None:
    for cached in range(1, 60):
        on = prompt(range(cached), [1], text=[1], layers=10)
        assert len(HKVD(cost=0.3, check_layers=(2,)).begin(on).tokens(0)) == cached  # 0.3 · 3 · 10 < 9 in floats


# A model's KV ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def prefilled(model: Any, tokens: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor], KVLayout]:
    """Keys and values `[T, H, D]` of each layer."""
    layers = model(tokens[None], **cache_argument(model, DynamicCache()), use_cache=True).past_key_values.layers
    keys, values = ([getattr(x, name)[0].transpose(0, 1).clone() for x in layers] for name in ("keys", "values"))
    return keys, values, KVLayout.from_config(model.config, dtype=model.dtype)


@pytest.mark.parametrize("layer", [1, 2])
def test_hkvd_finds_what_was_tampered_with(tiny_model: Callable[..., Any], layer: int) -> None:
    model = tiny_model("llama", num_hidden_layers=4, initializer_range=0.15)
    tokens = torch.randint(61, (40,), generator=torch.Generator().manual_seed(1))
    keys, values, layout = prefilled(model, tokens)
    bad_keys, bad_values = [6, 13, 29], [4, 13, 21, 28]
    keys[layer][bad_keys] += 0.1 * keys[layer].std()
    values[layer][bad_values] += 0.1 * values[layer].std()
    chunk = KVChunk([k[4:30] for k in keys], [v[4:30] for v in values], layout, 4)
    segments = [Segment(tokens[:4]), Segment(tokens[4:30], chunk), Segment(tokens[30:])]
    blend = Blender(model).blend
    for of, expected in (("keys", bad_keys), ("values", bad_values), ("both", sorted({*bad_keys, *bad_values}))):
        for checks in {(layer,), (1, layer) if layer > 1 else (0, layer)}:
            depth = blend(segments, selector=HKVD(len(expected) / 26, check_layers=checks, of=of)).record.depth
            assert (depth[4:30] == 4).nonzero()[:, 0].add(4).tolist() == expected, (of, checks)


def test_deviations_are_those_of_the_tokens_asked_for(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3", num_hidden_layers=3, initializer_range=0.15)
    tokens = torch.randint(61, (30,), generator=torch.Generator().manual_seed(1))
    keys, values, layout = prefilled(model, tokens[5:20])
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    class Watching:
        def begin(self, prompt: Prompt) -> Selection:
            return self

        def tokens(self, layer: int) -> torch.Tensor:
            return torch.tensor([[6, 9, 11, 18], [9, 11, 18], [11, 18]][layer])

        def watches(self, layer: int) -> bool:
            return True

        def observe(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            seen[layer] = keys, values

    chunk = KVChunk(keys, values, layout)
    segments = [Segment(tokens[:5]), Segment(tokens[5:20], chunk), Segment(tokens[20:])]
    before = Blender(model, selector=Nothing()).blend(segments).cache.layers
    after = Blender(model, selector=Watching()).blend(segments).cache.layers
    for layer, deviations in seen.items():
        rows = Watching().tokens(layer)
        for name, got in zip(("keys", "values"), deviations, strict=True):
            new, old = (getattr(cache[layer], name)[0][:, rows].transpose(0, 1).flatten(1) for cache in (after, before))
            expected = (new - old).square().sum(1) / new.square().sum(1).mean()
            assert got.dtype == torch.float32 and torch.allclose(got, expected, rtol=1e-4, atol=1e-9)
            assert layer == 0 or bool((got > 1e-5).all())


# Budgets --------------------------------------------------------------------------------------------------------------

PRICED: dict[str, Callable[[float], Selector]] = {
    "random": lambda cost: Random(cost=cost),
    "boundary": lambda cost: Boundary(cost=cost),
    "overlap": lambda cost: Overlap(cost=cost),
    "query": lambda cost: QueryGuided(cost=cost, queries=3),
    "query-layers": lambda cost: QueryGuided(cost=cost, queries=2, layers=(0, 1)),
    "product": lambda cost: Product(Overlap(), QueryGuided(layers=(0,)), QueryGuided(queries=1), cost=cost),
    "hkvd": lambda cost: HKVD(cost=cost),
    "hkvd-0": lambda cost: HKVD(cost=cost, check_layers=(0,), of="keys"),
    "hkvd-shrink": lambda cost: HKVD(cost=cost, shrink=(1.5, 1.2)),
    "hkvd-weight": lambda cost: HKVD(cost=cost, check_layers=(0, 2), weight=QueryGuided(queries=1, layers=(1,))),
}


def random_prompt(noise: torch.Generator) -> Prompt:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=noise))

    parts = [torch.randint(12, (draw(1, 14),), generator=noise).tolist() for _ in range(draw(2, 6))]
    text = {n for n in range(len(parts)) if draw(0, 2) == 0} | {len(parts) - 1}
    mass = torch.rand(sum(map(len, parts)), generator=noise).tolist()
    return prompt(*parts, text=sorted(text), leading=draw(0, 1) == 0, layers=draw(5, 12), mass=mass)


@pytest.mark.parametrize("name", PRICED)
def test_no_cost_is_exceeded_and_sets_are_nested(name: str) -> None:
    noise = torch.Generator().manual_seed(3)
    paid = 0
    for _ in range(150):
        on = random_prompt(noise)
        cost = [0.0, 0.05, 0.15, 0.3, 0.5, 0.8, 0.97, 1.0][int(torch.randint(8, (), generator=noise))]
        try:
            through = descend(PRICED[name](cost), on, lambda _, t: torch.rand(2, len(t), generator=noise))
        except InputError as error:
            if cost == 1 or "to pay for" not in str(error):
                raise
            continue
        spent = sum(map(len, through)) + on.attend.spent  # type: ignore[attr-defined]
        assert spent <= cost * on.cached_tokens * on.layers + 1e-6
        if not name.startswith("hkvd-shrink") and cost == 1:
            assert spent == on.cached_tokens * on.layers
        left = set(on.cached.nonzero()[:, 0].tolist())
        for tokens in through:
            assert tokens == sorted(set(tokens)) and left.issuperset(tokens)
            left = set(tokens)
        exact = set(on.leading.nonzero()[:, 0].tolist())
        if exact & left:
            assert left.issuperset(set(on.cached.nonzero()[:, 0].tolist()) - exact)
        paid += bool(left)
    assert paid > 20


@pytest.mark.parametrize("name", PRICED)
def test_a_blender_reports_no_more_than_the_cost(tiny_model: Callable[..., Any], name: str) -> None:
    model = tiny_model("llama", num_hidden_layers=6)
    tokens = torch.randint(61, (60,), generator=torch.Generator().manual_seed(1))
    keys, values, layout = prefilled(model, tokens[:50])
    chunk = KVChunk(keys, values, layout)
    segments = [Segment(tokens[:1]), Segment(tokens[:50], chunk), Segment(tokens[57:])]
    for cost in (0.6, 0.83, 1.0):
        record = Blender(model, selector=PRICED[name](cost)).blend(segments).record
        assert record.cost <= cost + 1e-12
        assert record.cost > cost - 0.06


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Random, Boundary, Overlap, QueryGuided, HKVD, lambda **kw: Product(Random(), **kw)])
def test_budgets_are_checked(make: Any) -> None:
    with pytest.raises(InputError, match=r"^ratio: must not be given along with cost"):
        make(ratio=0.1, cost=0.1)
    for name in ("ratio", "cost"):
        for value in (-0.01, 1.01, float("nan"), float("inf"), True, "0.1", 1j):
            with pytest.raises(InputError, match=rf"^{name}: must be a number from 0 to 1, got "):
                make(**{name: value})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (Product, "scorers: must be selectors with a score"),
        (lambda: Product(Random(), HKVD()), "scorers: "),  # type: ignore[arg-type]
        (lambda: Boundary(0.1, tokens=4), "Boundary.tokens: must not be given along with ratio or cost"),
        (lambda: Boundary(tokens=-1), "Boundary.tokens: must be an int of at least 0, got -1"),
        (lambda: Boundary(tokens=2.0), "Boundary.tokens: "),  # type: ignore[arg-type]
        (lambda: QueryGuided(queries=0), "QueryGuided.queries: must be an int of at least 1, got 0"),
        (lambda: default_selector(ratio=50), "ratio: must be a number from 0 to 1, got 50"),
        (lambda: QueryGuided(most=1.5), "QueryGuided.most: must be a number from 0 to 1, got 1.5"),
        (lambda: QueryGuided(layers=()), r"QueryGuided.layers: must be rising layer numbers, at least one, got \(\)"),
        (lambda: QueryGuided(layers=(2, 1)), "QueryGuided.layers: "),
        (lambda: HKVD(check_layers=()), "HKVD.check_layers: must be rising layer numbers"),
        (lambda: HKVD(check_layers=(1, 1)), "HKVD.check_layers: "),
        (lambda: HKVD(check_layers=(-1,)), "HKVD.check_layers: "),
        (lambda: HKVD(check_layers=(1.0,)), "HKVD.check_layers: "),  # type: ignore[arg-type]
        (lambda: HKVD(of="key"), "HKVD.of: must be 'keys', 'values' or 'both', got 'key'"),
        (lambda: HKVD(shrink=(1.2, 1.5)), "HKVD.shrink: must be falling numbers of at least 1"),
        (lambda: HKVD(shrink=(1.5, 0.9)), "HKVD.shrink: "),
        (lambda: HKVD(weight=HKVD()), "HKVD.weight: must have a score"),  # type: ignore[arg-type]
    ],
)
def test_arguments_are_checked(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        call()
