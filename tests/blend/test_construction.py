"""A model in which the effect of a missing prefix is known: which selectors find it, and what that recovers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.blend.pointer_model import (
    GAIN,
    LAYERS,
    READING,
    SLOTS,
    VOCABULARY,
    PointerPrompt,
    pointer_model,
    pointer_prompt,
)
from transformers import DynamicCache

from cuvee.blend import HKVD, Blender, BlendResult, Boundary, Nothing, QueryGuided, Random, Segment, Selector
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import cache_argument, prefill

SEEDS = range(3)
COST = 0.15


@pytest.fixture(scope="module")
def model() -> Any:
    return pointer_model()


def cached(model: Any, tokens: torch.Tensor) -> KVChunk:
    """The chunk as its own prefill leaves it."""
    layout = KVLayout.from_config(model.config, dtype=model.dtype)
    with torch.no_grad():
        (chunk,) = prefill(model, tokens[None], layout)
    return chunk


def segments(model: Any, on: PointerPrompt) -> list[Segment]:
    chunks = [Segment(tokens, cached(model, tokens)) for tokens in (on.facts, on.pointers)]
    return [Segment(on.opening), *chunks, Segment(on.questions)]


def blend(model: Any, on: PointerPrompt, selector: Selector) -> BlendResult:
    return Blender(model, selector=selector).blend(segments(model, on), logits_to_keep=SLOTS)


@torch.no_grad()
def full(model: Any, on: PointerPrompt) -> tuple[torch.Tensor, DynamicCache]:
    """Logits `[SLOTS, V]` of the questions, and the cache."""
    cache = DynamicCache()
    tokens = torch.cat((on.opening, on.facts, on.pointers, on.questions))
    logits: torch.Tensor = model(tokens[None], **cache_argument(model, cache), use_cache=True).logits[0, -SLOTS:]
    return logits, cache


def divergence(model: Any, on: PointerPrompt, got: torch.Tensor) -> float:
    """Mean KL of the questions' predictions to those of a full prefill, nats."""
    p, q = full(model, on)[0].double().log_softmax(-1), got.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def recovered(model: Any, on: PointerPrompt, selector: Selector) -> tuple[float, list[int]]:
    """Share of the floor's KL, and which pointers went through all layers."""
    result = blend(model, on, selector)
    assert result.record.cost <= COST
    floor = divergence(model, on, blend(model, on, Nothing()).logits)
    through = [at for at in on.pointer_positions if int(result.record.depth[at]) == LAYERS]
    return 1 - divergence(model, on, result.logits) / floor, through


@pytest.mark.parametrize("seed", SEEDS)
def test_the_model_answers(model: Any, seed: int) -> None:
    on = pointer_prompt(seed)
    logits, _ = full(model, on)
    assert logits.argmax(-1).tolist() == on.answers
    assert logits.max(-1).values.tolist() == pytest.approx([GAIN] * SLOTS, rel=0.03)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_the_prefix_nothing_but_the_pointers_changes(model: Any, seed: int) -> None:
    on = pointer_prompt(seed)
    cache, stale = full(model, on)[1], blend(model, on, Nothing()).cache
    total = len(on.opening) + len(on.facts) + len(on.pointers)
    for index, (new, old) in enumerate(zip(cache.layers, stale.layers, strict=True)):
        for name in ("keys", "values"):
            a, b = (getattr(layer, name)[0, :, :total].transpose(0, 1).flatten(1) for layer in (new, old))
            error = (a - b).norm(dim=1) / a.norm(dim=1).mean()
            changed = (error > 0.02).nonzero()[:, 0].tolist()
            # Keys of these layers do not read what was copied.
            expected = on.pointer_positions if index and name == "values" else []
            assert changed == expected, (index, name)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_floor_knows_no_answer(model: Any, seed: int) -> None:
    on = pointer_prompt(seed)
    result = blend(model, on, Nothing())
    assert float(result.logits.std()) < 1e-3
    # All tokens alike against one of e^GAIN.
    share = math.exp(GAIN) / (math.exp(GAIN) + VOCABULARY - 1)
    expected = math.log(VOCABULARY) + share * math.log(share) + (1 - share) * math.log((1 - share) / (VOCABULARY - 1))
    assert divergence(model, on, result.logits) == pytest.approx(expected, rel=0.03) and expected > 4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "selector",
    [
        HKVD(cost=COST),
        HKVD(cost=COST, of="values"),
        HKVD(cost=COST, shrink=(1.2,)),
        HKVD(0.02),
        QueryGuided(cost=COST, queries=SLOTS, layers=(READING,)),
    ],
    ids=repr,
)
def test_selectors_that_use_attention_find_the_pointers(model: Any, selector: Selector, seed: int) -> None:
    on = pointer_prompt(seed)
    share, through = recovered(model, on, selector)
    assert through == on.pointer_positions
    assert share >= 0.98


def test_in_blobs_they_are_found_too(model: Any) -> None:
    on = pointer_prompt(0)
    codec = Codec.without_profile(KVLayout.from_config(model.config, dtype=model.dtype))
    blobs = [s if s.chunk is None else Segment(s.tokens, codec.encode(s.chunk)) for s in segments(model, on)]  # type: ignore[arg-type]
    floor = divergence(model, on, blend(model, on, Nothing()).logits)
    result = Blender(model, codec, HKVD(cost=COST)).blend(blobs, logits_to_keep=SLOTS)
    assert 1 - divergence(model, on, result.logits) / floor >= 0.98


@pytest.mark.parametrize("seed", SEEDS)
def test_selectors_by_position_do_not_find_the_pointers(model: Any, seed: int) -> None:
    on = pointer_prompt(seed)
    share, through = recovered(model, on, Boundary(cost=COST))
    assert through == [] and abs(share) < 0.01


def test_chance_finds_as_many_as_it_recomputes(model: Any) -> None:
    shares = []
    for seed in range(8):
        on = pointer_prompt(seed % 3)
        share, through = recovered(model, on, Random(cost=COST, seed=seed))
        assert share == pytest.approx(len(through) / SLOTS, abs=0.03)
        shares.append(share)
    assert sum(shares) / len(shares) < 0.3


def test_all_layers_up_to_the_reading_one_must_be_recomputed(model: Any) -> None:
    """Pointers recomputed in the check layers alone, as where nothing is selected after them, recover nothing."""
    on = pointer_prompt(0)
    result = blend(model, on, HKVD(0.0))
    assert result.record.computed == (200, 200, *[0] * (LAYERS - 2))
    floor = divergence(model, on, blend(model, on, Nothing()).logits)
    assert divergence(model, on, result.logits) == pytest.approx(floor, rel=0.01)
