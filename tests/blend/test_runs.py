"""Tokens chosen in few runs: against all choices of small prompts, and what holds for any."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tests.conftest import tiny_model

from cuvee.blend.runs import _fill, _viterbi, best_runs, context_overhead


def runs_of(positions: torch.Tensor, cached: torch.Tensor) -> int:
    """Count runs of chosen tokens that no text touches."""
    computed = ~cached
    computed[positions] = True
    groups = np.split(
        np.flatnonzero(computed.numpy()), np.flatnonzero(np.diff(np.flatnonzero(computed.numpy())) > 1) + 1
    )
    return sum(len(group) > 0 and bool(cached[group].all()) for group in groups)


def drawn(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw scores as uneven as attention, and which tokens are cached."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, generator=generator) ** 4, torch.rand(tokens, generator=generator) < 0.8


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_at_a_price_is_the_best_of_all(seed: int) -> None:
    score, cached = drawn(seed, 10)
    generator = np.random.default_rng(seed)
    price, overhead, costs = generator.uniform(0, 0.6), generator.uniform(0, 3), generator.uniform(0.2, 2, 10)

    def gain(positions: torch.Tensor) -> float:
        paid = costs[positions.numpy()].sum() + overhead * runs_of(positions, cached)
        return float(score[positions].sum() - price * paid)

    taken, free = np.zeros(10, np.uint8), (~cached).numpy().astype(np.uint8)
    spent = _viterbi()(score.double().numpy(), costs, free, price, price * overhead, taken)
    found = torch.from_numpy(taken).nonzero()[:, 0]
    assert spent == pytest.approx(costs[found.numpy()].sum()) and bool(cached[found].all())
    candidates = cached.nonzero()[:, 0].tolist()
    every = (
        torch.tensor(positions, dtype=torch.int64)
        for size in range(len(candidates) + 1)
        for positions in itertools.combinations(candidates, size)
    )
    assert gain(found) == pytest.approx(max(gain(positions) for positions in every), abs=1e-6)


@pytest.mark.parametrize(("seed", "overhead"), list(enumerate([0.0, 2.0, 1000.0])))
def test_the_budget_is_spent(seed: int, overhead: float) -> None:
    score, cached = drawn(seed, 300)
    leading = torch.zeros_like(cached)
    for count in (0, 1, 17, 100, int(cached.sum()), 1000):
        found = best_runs(score, cached, leading, count, overhead)
        assert len(found) == min(count, int(cached.sum())) and bool(cached[found].all())
        assert bool((found.diff() > 0).all())


@pytest.mark.parametrize(
    ("seed", "context_overhead", "run_overhead"), [(0, 1e-4, 2.0), (1, 0.01, 0.0), (2, 0.01, 2.0), (3, 1.0, 2.0)]
)
def test_the_budget_is_what_tokens_cost_at_their_positions(
    seed: int, context_overhead: float, run_overhead: float
) -> None:
    score, cached = drawn(seed, 300)
    costs = 1 + context_overhead * torch.arange(300).double()
    costs /= costs[cached].mean()
    for count in (1, 17, 100, int(cached.sum())):
        found = best_runs(score, cached, cached & False, count, run_overhead, context_overhead)
        spent = float(costs[found].sum())
        left = cached.clone()
        left[found] = False
        assert spent <= count + 1e-5, "within the budget"
        assert not left.any() or float(costs[left].min()) > count - spent - 1e-5, "and nothing else fits"
        assert bool(cached[found].all()) and bool((found.diff() > 0).all())
    assert len(found) == int(cached.sum())


@pytest.mark.parametrize("seed", range(2))
def test_a_higher_overhead_makes_fewer_runs_of_lower_scores(seed: int) -> None:
    score, cached = drawn(seed, 400)
    made = [best_runs(score, cached, cached & False, 60, overhead) for overhead in (0.0, 1.0, 4.0, 16.0)]
    runs, sums = [runs_of(found, cached) for found in made], [float(score[found].sum()) for found in made]
    assert runs == sorted(runs, reverse=True) and runs[0] > 4 * runs[-1]
    assert sums == sorted(sums, reverse=True)
    highest = score.masked_fill(~cached, -1).topk(60).indices.sort().values
    assert torch.equal(made[0], highest), "without overhead only scores count"


def test_what_is_left_of_the_budget_goes_where_it_buys_most() -> None:
    worth, costs, cached = np.zeros(12), np.ones(12), torch.ones(12, dtype=torch.bool)
    worth[[6, 9]], costs[[6, 9]] = (0.5, 0.3), (2.0, 1.0)
    for run_overhead, before, added in ((0.0, 0, 9), (0.9, 8, 9), (0.2, 5, 6)):
        chosen = torch.zeros(12, dtype=torch.bool)
        chosen[before] = True
        _fill(chosen, cached, ~cached, worth, costs, 2.0, run_overhead)
        assert chosen[added], "a token that joins a run needs none of its own"
        chosen[before] = False
        assert float(costs[chosen.numpy()].sum()) <= 2
    # Once 5 is chosen, 4 and 6 need no run of their own. 4 has the higher score, and 6 the higher score per cost.
    worth[[4, 5, 6]], costs[[4, 5, 6]] = (0.6, 3.0, 0.5), (3.0, 1.0, 1.0)
    chosen = torch.zeros(12, dtype=torch.bool)
    _fill(chosen, cached, ~cached, worth, costs, 4.0, 8.0)
    assert chosen[[5, 6]].all() and not chosen[4]


def test_a_run_that_touches_text_costs_no_overhead() -> None:
    score, cached = torch.zeros(40), torch.ones(40, dtype=torch.bool)
    cached[20:22] = False
    score[[5, 6, 19, 22]] = torch.tensor([1.0, 1.0, 0.9, 0.9])
    assert best_runs(score, cached, cached & False, 2, 0.0).tolist() == [5, 6]
    assert best_runs(score, cached, cached & False, 2, 4.0).tolist() == [19, 22]


def test_exact_tokens_come_last_but_join_runs() -> None:
    score, cached, leading = torch.ones(12), torch.ones(12, dtype=torch.bool), torch.zeros(12, dtype=torch.bool)
    leading[:4] = True
    score[:4] = 100
    assert best_runs(score, cached, leading, 8, 2.0).tolist() == list(range(4, 12))
    assert best_runs(score, cached, leading, 9, 2.0).tolist() == list(range(3, 12))
    leading[:4], leading[6] = False, True
    score[:] = 0
    score[[5, 7]] = 1
    assert best_runs(score, cached, leading, 3, 5.0).tolist() == [5, 6, 7]


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_scores_that_do_not_tell_tokens_apart(value: float) -> None:
    every = torch.ones(50, dtype=torch.bool)
    assert best_runs(torch.full((50,), value), every, ~every, 7, 3.0).tolist() == list(range(7))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_context_costs_what_attention_multiplies(family: str) -> None:
    model = tiny_model(family, intermediate_size=72)
    layer, config = model.base_model.layers[0], model.config
    weights = sum(part.numel() for part in layer.parameters() if part.ndim == 2)
    queries = layer.self_attn.q_proj.weight.shape[0]
    assert context_overhead(config) == pytest.approx(2 * queries / weights)
