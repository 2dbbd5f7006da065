"""What each selector selects: on prompts small enough to do by hand, and within its budget on any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.conftest import tiny_model

from cuvee.blend import Blender, Boundary, Guided, Nothing, Prompt, Segment, Selector
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import prefill

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
    positions = selector.select(on)
    assert positions.dtype == torch.int64
    found: list[int] = positions.tolist()
    return found


A, B = [1, 2, 3, 4], [5, 2, 6, 7]
TWO = (A, B, [9, 8])  # 8 cached tokens at 0 … 7, two of text

# Boundary, Nothing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "leading", "expected"),
    [
        (Nothing(), False, []),
        (Boundary(0.375), False, [0, 1, 4]),  # of equal scores the first token
        (Boundary(0.49), False, [0, 1, 4]),  # a cost is never exceeded
        (Boundary(0.625), True, [0, 4, 5, 6, 7]),  # leading tokens last
        (Boundary(0.0), False, []),
    ],
    ids=repr,
)
def test_boundary(selector: Selector, leading: bool, expected: list[int]) -> None:
    assert chosen(selector, prompt(*TWO, text=[2], leading=leading)) == expected


def test_text_moves_positions_but_is_never_selected() -> None:
    on = prompt([9], A, [9, 9], B, [8], text=[0, 2, 4])
    assert chosen(Boundary(0.25), on) == [1, 7]
    assert chosen(Boundary(1.0), on) == [1, 2, 3, 4, 7, 8, 9, 10]


def test_best_takes_the_first_of_equals_and_leading_ones_last() -> None:
    on = prompt([0, 0, 0], [0, 0, 0], [0], text=[2], leading=True)
    score = torch.tensor([9.0, 9.0, 8.0, 1.0, 2.0, 2.0, 99.0])
    assert [on.best(score, n).tolist() for n in (0, 1, 2, 3, 4, 6, 9)] == [
        [], [4], [4, 5], [3, 4, 5], [0, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5],
    ]  # fmt: skip


# Guided ---------------------------------------------------------------------------------------------------------------


def test_guided_takes_what_is_looked_at_near_the_boundary() -> None:
    on = prompt(A, B, [1, 2], text=[2], mass=[0.1, 0.0, 0.9, 0.2, 0.8, 0.0, 0.0, 0.8, 5.0, 5.0])
    # 0.9, 0.8 and 0.8 in places 2, 0 and 3 of their chunks; the query's pass costs less than a token.
    assert [chosen(Guided((n + 1) / 8), on) for n in (1, 2, 3)] == [[4], [2, 4], [2, 4, 7]]
    # The last adjoins the text, so it needs no run of its own.
    joined = [chosen(Guided((n + 1) / 8, run_overhead=2), on) for n in (1, 2, 3)]
    assert joined == [[7], [4, 7], [2, 4, 7]]
    # The last token costs 1.4 times the mean, and the budget of two does not pay for both.
    assert chosen(Guided(3 / 8, context_overhead=0.5), on) == [2, 4]
    assert chosen(Guided(3 / 8, run_overhead=2, context_overhead=0.5), on) != joined[1]


@pytest.mark.parametrize(
    ("layers", "asked"),
    [
        (1, (0,)), (2, (0, 1)), (4, (1, 2)), (6, (2, 3, 4)), (33, (11, 16, 22)),
    ],
)  # fmt: skip
def test_the_query_is_asked_at_a_third_a_half_and_two_thirds_of_the_depth(layers: int, asked: tuple[int, ...]) -> None:
    on = prompt(*TWO, text=[2], layers=layers, mass=[float(10**n) for n in range(10)])
    assert chosen(Guided(0.375), on) == [6, 7]
    assert on.attend.calls == [(1, asked)]  # type: ignore[attr-defined]


def test_attention_that_is_nowhere_leaves_the_first_tokens_of_chunks() -> None:
    assert chosen(Guided(0.375), prompt(*TWO, text=[2])) == [0, 4]


@pytest.mark.parametrize(("cost", "tokens"), [(0.0, 0), (0.1, 0), (1.0, 8)])
def test_the_query_is_asked_only_if_there_is_a_choice(cost: float, tokens: int) -> None:
    on = prompt(*TWO, text=[2])
    assert len(chosen(Guided(cost), on)) == tokens
    assert on.attend.calls == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("layers", [1, 3])
def test_the_default_fits_models_of_few_layers_and_prompts_that_end_in_a_chunk(layers: int) -> None:
    model = tiny_model("llama", num_hidden_layers=layers)
    tokens = torch.randint(61, (40,), generator=torch.Generator().manual_seed(1))
    chunk = Segment(tokens[:30], prefilled(model, tokens[:30]))
    for parts in ([Segment(tokens[:1]), chunk], [chunk, chunk], [chunk, chunk, Segment(tokens[30:])]):
        for cost in (0.15, 0.5, 1.0):
            record = Blender(model, selector=Guided(cost=cost)).blend(parts).record
            assert cost - 0.1 < record.cost <= cost + 1e-12


@pytest.mark.parametrize(("cost", "queries"), [(0.15, 2), (0.3, 5), (0.02, 1), (0.99, 16)])
def test_the_query_takes_a_tenth_of_the_budget(cost: float, queries: int) -> None:
    on = prompt([3] * 70, [4] * 70, [5] * 40, text=[2])  # 140 cached tokens in 6 layers, 5 of them asked
    Guided(cost).select(on)
    assert on.attend.calls == [(queries, (2, 3, 4))]  # type: ignore[attr-defined]


@torch.no_grad()
def prefilled(model: Any, tokens: torch.Tensor) -> Any:
    (chunk,) = prefill(model, tokens[None], KVLayout.from_config(model.config, dtype=model.dtype))
    return chunk


# Budgets --------------------------------------------------------------------------------------------------------------

PRICED: dict[str, Callable[[float], Selector]] = {
    "boundary": lambda cost: Boundary(cost=cost),
    "guided": lambda cost: Guided(cost=cost),
}


def random_prompt(noise: torch.Generator) -> Prompt:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=noise))

    parts = [torch.randint(12, (draw(1, 14),), generator=noise).tolist() for _ in range(draw(2, 6))]
    text = {n for n in range(len(parts)) if draw(0, 2) == 0} | {len(parts) - 1}
    mass = torch.rand(sum(map(len, parts)), generator=noise).tolist()
    return prompt(*parts, text=sorted(text), leading=draw(0, 1) == 0, layers=draw(5, 12), mass=mass)


@pytest.mark.parametrize("name", PRICED)
def test_no_cost_is_exceeded(name: str) -> None:
    noise = torch.Generator().manual_seed(3)
    paid = 0
    for _ in range(150):
        on = random_prompt(noise)
        cost = [0.0, 0.05, 0.15, 0.3, 0.5, 0.8, 0.97, 1.0][int(torch.randint(8, (), generator=noise))]
        tokens = chosen(PRICED[name](cost), on)
        spent = len(tokens) * on.layers + on.attend.spent  # type: ignore[attr-defined]
        assert spent <= cost * on.cached_tokens * on.layers + 1e-6
        if cost == 1:
            assert spent == on.cached_tokens * on.layers
        cached, exact = set(on.cached.nonzero()[:, 0].tolist()), set(on.leading.nonzero()[:, 0].tolist())
        assert tokens == sorted(set(tokens)) and cached.issuperset(tokens)
        if exact & set(tokens):
            assert set(tokens).issuperset(cached - exact)
        paid += bool(tokens)
    assert paid > 20


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Boundary, {"cost": 1.01}, "cost: must be a number from 0 to 1, got 1.01"),
        (Guided, {"cost": True}, "cost: must be a number from 0 to 1, got True"),
        (Guided, {"run_overhead": float("inf")}, "run_overhead: must be a finite number of at least 0, got inf"),
        (Guided, {"context_overhead": -1}, "context_overhead: must be a finite number of at least 0, got -1"),
        (Guided, {"cost": float("nan")}, "cost: must be a number from 0 to 1, got nan"),
        (Guided, {"run_overhead": "2"}, "run_overhead: must be a finite number of at least 0, got '2'"),
    ],
)
def test_options_are_checked(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        make(**options)
