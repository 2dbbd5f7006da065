"""A cache tells the ids and the positions of its tokens, or that it does not."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import fitted_profile, synthetic_chunk
from tests.recognizing import LIMIT, TOKENS, cached, ids_of, learned_profile, small_model

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.rope import rotate, unrotate
from cuvee.integrations.pages import recognition
from cuvee.integrations.pages.recognition import Recognizer, tells_positions


@pytest.fixture(scope="module")
def profile() -> Profile:
    return learned_profile()


@pytest.fixture(scope="module")
def recognizer(profile: Profile) -> Recognizer:
    return Recognizer(profile)


@pytest.fixture(scope="module")
def chunk() -> KVChunk:
    return cached(small_model())


def moved(chunk: KVChunk, at: range, start: int) -> KVChunk:
    """Some of the tokens, with their keys rotated as if they began at `start`."""
    part, there = chunk.slice(at.start, at.stop), torch.arange(start, start + len(at))
    keys = [
        rotate(unrotate(own, layer.rope, torch.tensor(at)), layer.rope, there)
        for own, layer in zip(part.keys, chunk.layout.layers, strict=True)
    ]
    return KVChunk(keys, part.values, chunk.layout, start)


def slots(tokens: int) -> torch.Tensor:
    return torch.arange(tokens)


# What is recognized --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 255, 2048, LIMIT - 64])
@pytest.mark.parametrize("at", [range(16), range(100, 164), range(290, 300)])
def test_ids_and_position_are_recognized(start: int, at: range, recognizer: Recognizer, chunk: KVChunk) -> None:
    found = recognizer.recognize(PagedCache.of_chunk(moved(chunk, at, start)), slots(len(at)))
    assert found.start == start
    assert found.token_ids is not None and found.token_ids.tolist() == ids_of(at)


def test_positions_may_be_known_to_be_multiples(recognizer: Recognizer, chunk: KVChunk) -> None:
    cache = PagedCache.of_chunk(moved(chunk, range(64), 320))
    for divisor, start in ((1, 320), (64, 320), (320, 320), (48, None), (256, None)):
        assert recognizer.recognize(cache, slots(64), multiple_of=divisor).start == start


def test_tokens_may_lie_anywhere(recognizer: Recognizer, chunk: KVChunk) -> None:
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(5))
    keys, values = ([own[order][:, None] for own in unit] for unit in (chunk.keys, chunk.values))  # a token per block
    found = recognizer.recognize(PagedCache(chunk.layout, keys, values), order.argsort())
    assert found.start == 0 and found.token_ids is not None and found.token_ids.tolist() == ids_of(range(TOKENS))


@pytest.mark.parametrize("name", ["gqa", "mqa", "partial", "interleaved", "yarn", "irregular", "bfloat16"])
@pytest.mark.parametrize("group", ["layer", "head", "layers:3"])
def test_positions_are_recognized_without_a_token_table(name: str, group: str) -> None:
    profile = fitted_profile(name, group)
    for start in (0, 32, 480):
        cache = PagedCache.of_chunk(synthetic_chunk(profile.layout, 200, 1, start))
        found = Recognizer(profile).recognize(cache, slots(200), multiple_of=16)
        assert found == recognition.Recognized(start, None)


# What is not ---------------------------------------------------------------------------------------------------


def test_a_model_without_rotation_tells_no_positions(profile: Profile) -> None:
    assert tells_positions(profile)
    profile = fitted_profile("no-rope", "layer")
    assert not tells_positions(profile)
    found = Recognizer(profile).recognize(PagedCache.of_chunk(synthetic_chunk(profile.layout, 50)), slots(50))
    assert found == recognition.Recognized(None, None)


def test_a_cache_of_another_model_tells_nothing(recognizer: Recognizer) -> None:
    other = cached(small_model(1))
    assert recognizer.recognize(PagedCache.of_chunk(other), slots(TOKENS)) == recognition.Recognized(None, None)


def test_one_token_without_an_id_leaves_all_without(recognizer: Recognizer, chunk: KVChunk) -> None:
    values = [own.clone() for own in chunk.values]
    values[0][7] = torch.randn(values[0][7].shape, generator=torch.Generator().manual_seed(1))
    cache = PagedCache.of_chunk(KVChunk(chunk.keys, values, chunk.layout))
    assert recognizer.recognize(cache, slots(TOKENS), 0).token_ids is None
    assert recognizer.recognize(cache, slots(7), 0).token_ids is not None


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 0.0])
def test_odd_numbers_tell_nothing(odd: float, recognizer: Recognizer, chunk: KVChunk) -> None:
    keys, values = ([torch.full_like(own, odd) for own in unit] for unit in (chunk.keys, chunk.values))
    cache = PagedCache.of_chunk(KVChunk(keys, values, chunk.layout))
    assert recognizer.recognize(cache, slots(TOKENS)).start is None
    if odd:
        assert recognizer.recognize(cache, slots(TOKENS)).token_ids is None


def test_slots_that_the_cache_does_not_have_are_refused(recognizer: Recognizer, chunk: KVChunk) -> None:
    for bad in (-1, TOKENS):
        with pytest.raises(InputError, match=r"slots: must be 0 … 299 in layer 0"):
            recognizer.recognize(PagedCache.of_chunk(chunk), torch.tensor([0, bad]))


# Searching -----------------------------------------------------------------------------------------------------


def test_the_search_finds_the_nearest_of_all_ids(
    profile: Profile, recognizer: Recognizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert profile.token_table is not None and recognizer._ids is not None
    x = torch.randn(40, len(recognizer._values), generator=torch.Generator().manual_seed(2)) / 10
    token_map = profile.learned[0].token_map
    assert token_map is not None
    own = token_map.take(recognizer._values)
    rows = own.predict(profile.token_table).float()
    for block in (16, 256):
        monkeypatch.setattr(recognition, "BLOCK", block)
        monkeypatch.setattr(recognition, "DIMENSIONS", rows.shape[1])
        search = recognition._IdSearch(profile.token_table, own)
        near = torch.cdist(x, rows)
        chosen = near[range(len(x)), search.nearest(x)]
        assert torch.allclose(chosen, near.min(1).values, rtol=1e-2)
