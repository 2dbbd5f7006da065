"""Which class a token gets: the predictor, what a caller asks for, and what learning a predictor finds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.classed import with_classes
from tests.codec.reference import get_stages, stage_names
from tests.codec.vectors import LAYOUT, golden_chunk
from transformers import DynamicCache

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.entropy.token_classes import CLASSES, NEUTRAL
from cuvee.codec.errors import InputError
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.class_predictor import (
    LEAVING,
    LEAVING_TOKENS,
    Predictor,
    choose_classes,
    finer_in_long_caches,
    finer_near_end,
    recency_at,
)
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.token_prediction import Predictions
from cuvee.integrations.transformers.caches import encode_cache
from cuvee.learning.calibrate import fit
from cuvee.learning.class_predictor import TokenSample, leading_components, learn_classes, learn_predictors


@cache
def fitted(group: str = "layer") -> Profile:
    return fit(LAYOUT, [golden_chunk(seed, 96, 100 * (seed % 3)) for seed in range(15)], group)


def predictor(**changes: Any) -> Predictor:
    fields: dict[str, Any] = {
        "components": np.array([0, 2], np.int32),
        "scale": np.array([1.0, 2.0], np.float32),
        "linear": np.array([0.5, 0.0], np.float32),
        "square": np.array([0.0, -0.25], np.float32),
        "energy": 0.0,
        "bias": 1.0,
        "sinks": np.array([-3.0], np.float32),
        "means": np.array([-1.0, -1.5, 2.0], np.float32),
        "recency": np.empty(0, np.float32),
    }
    return Predictor(**(fields | changes))


@pytest.mark.parametrize(("value", "finest"), [(float("nan"), 5), (float("inf"), 0), (-float("inf"), 11), (-3e38, 5)])
def test_offsets_beyond_numbers_give_a_class_that_is_served(value: float, finest: int) -> None:
    classes = choose_classes(torch.tensor([value, 0.0]), finest)
    assert classes.dtype == np.uint8 and finest <= classes.min() and classes.max() < CLASSES
    if np.isnan(value):
        assert classes[0] == max(NEUTRAL, finest)


def test_extreme_weights_of_a_profile_do_no_harm() -> None:
    """They are anybody's to write: a class that is not served made the compiled loops write beyond their arrays."""
    plain = fitted()
    huge = np.array([3e38, -3e38], np.float32)
    step = -361
    learned = []
    for section in plain.learned:
        scale = section.scale.copy()
        scale[0] = step - 128 + 16 * 50  # the finest classes are too fine for it
        learned.append(replace(section, scale=scale, predictor=predictor(linear=huge, square=huge)))
    profile = Profile(plain.layout, plain.group, plain.source, plain.family, tuple(learned))
    codec = Codec(profile, step=2 ** (step / 64))
    chunk = golden_chunk(3, 300, 0)
    assert codec.decode(codec.encode(chunk)).tokens == 300


@pytest.mark.parametrize(("count", "tokens"), [(3, 63), (96, 17), (96, 300)])
def test_backends_choose_the_same_classes(count: int, tokens: int) -> None:
    draw = torch.Generator().manual_seed(100 * count + tokens)
    numbers = torch.randn(3, count, generator=draw).numpy()
    reads = predictor(
        components=np.arange(count, dtype=np.int32), scale=np.exp(numbers[0]), linear=numbers[1] / count,
        square=numbers[2] / count, energy=0.3, sinks=np.linspace(-4, 0, 9).astype(np.float32),
    )  # fmt: skip
    y, finer = 3 * torch.randn(count, tokens, generator=draw), torch.rand(tokens, generator=draw)
    guess = Predictions(torch.randn(5, count, generator=draw), np.arange(tokens) % 5)
    seen = set()
    for coefficients in (y, y * 1e30, y * float("nan")):
        for predictions in (None, guess):
            # All sinks, some of the run, none, and those before the run's first token.
            for start, first in ((0, 0), (6, 0), (9, 0), (2, 5)):
                for finest in (0, 9):
                    one, other = (
                        get_stages(name).predict_classes(
                            reads, coefficients.clone(), predictions, start, first, finer, finest
                        )
                        for name in stage_names()
                    )
                    assert one.dtype == other.dtype and np.array_equal(one, other)
                    assert finest <= other.min() and other.max() < CLASSES
                    seen.update(other.tolist())
    assert len(seen) > 3, "otherwise this shows nothing"


def test_offsets_are_a_sum_over_features() -> None:
    y = torch.tensor([[1.0, -2.0, 100.0], [0.0, 4.0, 2.0]])
    got = predictor().offsets(y, 10, 0, torch.zeros(3))
    want = [1 + 0.5 * u - 0.25 * np.log(v * v + 0.01) for u, v in ((1, 0), (-2, 2), (6, 1))]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32))
    energy = predictor(energy=2.0).offsets(y, 10, 0, torch.zeros(3)) - got
    torch.testing.assert_close(energy, 2 * (y.square().sum(0) + 1e-9).log())
    finer = torch.tensor([0.0, 0.5, 2.0])
    torch.testing.assert_close(predictor().offsets(y, 10, 0, finer), got - finer)


RECENCY = np.array([3.0, 2.0, 1.0, 0.0], np.float32)  # 1, 2, 4 and 8 tokens from the end


def test_tokens_are_finer_near_the_end() -> None:
    got = finer_near_end(RECENCY, 0, 8, 0).tolist()
    assert got[-1] == 3.0 and got[-2] == 2.0 and got[-4] == 1.0 and got[0] == 0.0
    assert got[-3] == pytest.approx(2 - np.log2(1.5)), "linear in the logarithm of the distance"
    assert finer_near_end(np.empty(0, np.float32), 9, 3, 5).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("tokens", [1, 16, 60, 100])
def test_small_chunks_share_the_readers_that_leave(tokens: int) -> None:
    """They leave after one of the chunks, so that none of these is coded as finely as the last before all of them."""
    count = -(-LEAVING_TOKENS // tokens)
    level = finer_in_long_caches(RECENCY, 10_000 + tokens)
    got = finer_near_end(RECENCY, 0, tokens, 10_000) - level
    for number in (0, tokens - 1):
        distances = tokens - number + tokens * np.arange(count)
        costs = 4 ** recency_at(RECENCY, distances)
        assert got[number] == pytest.approx(0.5 * np.log2(LEAVING * costs.mean() + 1 - LEAVING), abs=1e-6)
    followed = finer_near_end(RECENCY, 0, 2, 1) - finer_in_long_caches(RECENCY, 3)
    share = LEAVING / (LEAVING_TOKENS // 2)  # all others read from the end of the cache, one token on
    assert followed[-1] == pytest.approx(0.5 * np.log2(share * 4**3 + (1 - share) * 4**2))


def test_no_length_overflows() -> None:
    assert bool(torch.isfinite(finer_near_end(RECENCY, 2**32 - 20, 10, 2**200)).all())
    assert bool(torch.isfinite(finer_near_end(np.full(32, -64, np.float32), 0, 10, 2**70)).all())


@pytest.mark.parametrize(
    ("recency", "fall"), [([3.0, 2.25, 1.5, 0.75], 1.5), ([0.0, 0.0, 0.0, 0.0], 1.0), ([9.0, 6.0, 3.0, 0.0], 2.0)]
)
def test_steps_make_up_for_the_length_of_a_cache(recency: list[float], fall: float) -> None:
    """What tokens cost is summed up one by one: as much as at the last distance, or less beyond it."""
    own = np.array(recency, np.float32)
    assert finer_in_long_caches(own, 8) == finer_in_long_caches(own, 3) == 0
    assert finer_in_long_caches(np.empty(0, np.float32), 10**6) == 0
    for cached in (9, 16, 100, 10_000):
        cost = 8 + sum((d / 8) ** -fall for d in np.arange(8.5, cached))
        assert 4 ** finer_in_long_caches(own, cached) == pytest.approx(cost / 8, rel=2e-3), cached


def test_a_chunk_knows_what_follows_it() -> None:
    whole = golden_chunk(0, 40, 0)
    assert whole.following == 0
    head, tail = whole.slice(0, 16), whole.slice(16, 40)
    assert (head.following, tail.following, head.slice(4, 8).following) == (24, 0, 32)
    assert KVChunk.concat([head, tail]).following == 0
    assert KVChunk.concat([whole.slice(0, 4), whole.slice(4, 8)]).following == 32
    later = KVChunk(head.keys, head.values, LAYOUT, following=7)
    assert later.following == 7 and later.slice(0, 15).following == 8
    for wrong in (-1, 1.0, True, None, "2"):
        with pytest.raises(InputError, match=r"^following: must be an int of at least 0"):
            KVChunk(head.keys, head.values, LAYOUT, following=wrong)  # type: ignore[arg-type]


def with_recency() -> Profile:
    plain, none = fitted(), np.zeros(2, np.float32)
    learned = tuple(
        replace(section, predictor=predictor(linear=none, square=none, bias=0.0, recency=RECENCY))
        for section in plain.learned
    )
    return Profile(plain.layout, plain.group, plain.source, plain.family, learned)


def test_the_end_of_a_cache_comes_back_exacter() -> None:
    codec = Codec(with_recency(), step=0.5)
    whole = golden_chunk(5, 300, 3)
    errors = {}
    for following in (0, 1000):
        chunk = KVChunk(whole.keys, whole.values, LAYOUT, 3, following=following)
        back = codec.decode(codec.encode(chunk))
        errors[following] = (back.keys[0] - chunk.keys[0]).square().mean((1, 2))
    assert torch.equal(errors[0][:280], errors[1000][:280]), "other tokens are coded as before"
    assert float(errors[0][-2:].mean()) < 0.5 * float(errors[1000][-2:].mean())
    assert float(errors[0][-2:].mean()) < 0.1 * float(errors[0][:280].mean())


def test_slices_of_pages_and_of_chunks_are_coded_alike() -> None:
    codec = Codec(with_recency(), step=0.5)
    whole = golden_chunk(5, 48, 0)
    cache = PagedCache.of_chunk(whole)
    slots, after = [torch.arange(0, 20), torch.arange(20, 48)], [28, 0]
    pages = codec.encode(PagedChunks(cache, slots, [0, 20], following=after))
    assert pages == [codec.encode(whole.slice(0, 20)), codec.encode(whole.slice(20, 48))]
    assert codec.encode(PagedChunks(cache, slots, [0, 20]))[0] != pages[0], "the default is the end of the cache"
    held: Any = DynamicCache()
    for layer, (keys, values) in enumerate(zip(whole.keys, whole.values, strict=True)):
        held.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
    pieces = [whole.slice(0, 20), whole.slice(20, 40), whole.slice(40, 48)]
    assert encode_cache(codec, held, chunk_tokens=20) == [codec.encode(piece) for piece in pieces]
    with pytest.raises(InputError, match=r"^following: must be one for each of the 2 chunks.*, got 1"):
        codec.encode(PagedChunks(cache, slots, [0, 20], following=[1]))
    with pytest.raises(InputError, match=r"^following: must be an int of at least 0, got -1"):
        codec.encode(PagedChunks(cache, slots, [0, 20], following=[1, -1]))


def test_classes_are_half_octaves() -> None:
    offsets = torch.tensor([-9.0, -0.26, -0.24, 0.0, 0.24, 0.26, 1.0, 9.0])
    assert choose_classes(offsets, 0).tolist() == [0, 10, 11, 11, 11, 12, 13, 15]
    assert choose_classes(offsets, 12).tolist() == [12, 12, 12, 12, 12, 12, 13, 15]


def squared_errors(codec: Codec, chunk: KVChunk, blob: bytes) -> torch.Tensor:
    back = codec.decode(blob)
    pairs = zip((*chunk.keys, *chunk.values), (*back.keys, *back.values), strict=True)
    return torch.stack([(a - b).square().sum((1, 2)) for a, b in pairs]).sum(0)


@pytest.mark.parametrize("group", ["head", "layer"])
def test_important_tokens_are_coded_finely(group: str) -> None:
    chunk = golden_chunk(5, 300, 50)
    weights = np.ones(300)
    weights[100:110], weights[200:260] = 256.0, 2.0**-8
    profile = with_classes(fitted(group), weights, 50)
    for backend in ("reference", "numba"):
        codec = Codec(profile, step=0.05, backend=backend)
        blob = codec.encode(chunk)
        error = squared_errors(codec, chunk, blob)
        usual = error[torch.from_numpy(weights == 1)].mean()
        # A step of 2^-3 octaves is an error of 2^-6, three octaves coarser 2^6 until the components are gone.
        assert float(error[100:110].mean() / usual) < 0.05
        assert float(error[200:260].mean() / usual) > 4
        part = codec.decode(blob, tokens=range(90, 280))
        assert torch.equal(part.keys[1], codec.decode(blob).keys[1][90:280])
    assert Codec(profile, step=0.05, backend="numba").encode(chunk) == blob or group == "head"


def sample(tokens: int = 6000, seed: int = 0) -> tuple[TokenSample, np.ndarray[Any, np.dtype[np.int16]]]:
    """Tokens whose third component says what they cost: e = exp(2 u) times noise; the first ones are sinks."""
    rng = np.random.default_rng(seed)
    scale = np.linspace(100, -200, 24).astype(np.int16)
    spread = np.exp2(scale / 64)[:, None]
    y = (rng.standard_normal((24, tokens)) * spread).astype(np.float32)
    energy = np.exp(2 * y[2] / spread[2]) * rng.gamma(4, 0.25, tokens)
    return TokenSample(
        y,
        y,
        energy.astype(np.float32),
        np.full(tokens, 1000),
        np.array([1e5], np.float32),
        np.array([40.0], np.float32),
    ), scale


def test_learning_finds_what_tokens_cost() -> None:
    made, scale = sample()
    (found,) = learn_predictors([made], [scale], [1])
    y = torch.from_numpy(made.y[found.components])
    offsets = found.offsets(y, 10, 0, torch.zeros(y.shape[1])).numpy()
    want = -0.375 / np.log(2) * np.log(made.energy)
    assert np.corrcoef(offsets, want)[0, 1] > 0.85
    assert abs(float(offsets.mean())) < 1e-3, "the blob's step is the mean step"
    assert float(found.sinks[0]) < offsets.mean() - 2
    other, _ = sample(seed=1)
    none = torch.zeros(other.y.shape[1])
    held_out = found.offsets(torch.from_numpy(other.y[found.components]), 10, 0, none).numpy()
    assert np.corrcoef(held_out, np.log(other.energy))[0, 1] < -0.85


def test_learning_finds_what_the_end_of_a_cache_costs() -> None:
    """Sequences of 100 tokens, on which e falls with the inverse of the distance from their end."""
    made, scale = sample()
    distance = np.tile(np.arange(100, 0, -1), 60)
    (found,) = learn_predictors(
        [replace(made, energy=(made.energy / distance).astype(np.float32), distance=distance)], [scale], [1]
    )
    octaves = found.recency
    assert len(octaves) == 7 and octaves[-1] == 0, "1, 2, … 64"
    np.testing.assert_allclose(np.diff(octaves), -0.5, atol=0.2)
    assert abs(octaves[0] - 6 * 0.5) < 0.2
    (flat,) = learn_predictors([replace(made, distance=distance)], [scale], [1])
    assert np.abs(flat.recency).max() < 0.2
    y = torch.from_numpy(made.y[found.components])
    near = torch.from_numpy(recency_at(octaves, distance)).float()
    offsets = found.offsets(y, 10, 0, near).numpy()
    assert abs(float(offsets.mean())) < 1e-3, "the blob's step is the mean step, the ends included"


def test_classes_say_how_wide_their_tokens_are() -> None:
    made, scale = sample()
    wide = made.energy > np.quantile(made.energy, 0.9)
    y = made.y.copy()
    y[:, wide] *= 4
    changed = replace(made, y=y, whole=y)
    (found,) = learn_predictors([changed], [scale], [1])
    classes, frequencies, class_scale = learn_classes(changed, found, scale)
    assert len(classes) == y.shape[1] and frequencies.sum() == 4096 and frequencies.min() >= 1
    assert np.all(np.diff(class_scale.astype(int)) <= 32)
    common = np.bincount(classes, minlength=CLASSES)
    fine = [k for k in range(CLASSES) if common[k] > 100 and k < NEUTRAL - 1]
    coarse = [k for k in range(CLASSES) if common[k] > 100 and k > NEUTRAL]
    assert class_scale[fine].min() > class_scale[coarse].max() + 40


def test_leading_components_are_the_widest_in_order() -> None:
    scale = np.array([5, 90, -3, 90, 7], np.int16)
    assert leading_components(scale, 1).tolist() == [0, 1, 2, 3, 4]
    many = np.arange(500, dtype=np.int16)
    assert leading_components(many, 1).tolist() == list(range(404, 500))
    assert len(leading_components(many, 9)) == 384
