"""What the scheduler's side tells the workers of an entry's tokens: their ids, from which a codec predicts, and how far
they are from the end of the prompt, near which they matter more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import fitted_to
from tests.integrations.vllm.sides import CHUNK, LAYOUT, Bench, Desk, generate, image, make_request
from tests.predicting import predicting

from cuvee.codec.chunk import KVChunk
from cuvee.codec.profiles.class_predictor import Predictor
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.token_ids import NO_TOKEN
from cuvee.integrations.vllm.messages import Save
from cuvee.learning.calibrate import fit

LOSSY: dict[str, Any] = {"quality": None, "step": 0.5}


@cache
def fitted() -> Profile:
    noise = torch.randn(2, 3, 512, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    return fit(LAYOUT, [KVChunk(noise[0], noise[1], LAYOUT)])


@cache
def profile() -> Profile:
    return predicting(fitted())


@cache
def of_recency() -> Profile:
    """A profile whose steps depend on nothing but the distance from the end."""
    one, none = np.ones(1, np.float32), np.zeros(1, np.float32)
    recency = np.array([3.0, 2.0, 1.0, 0.0], np.float32)
    nothing = np.empty(0, np.float32)
    own = Predictor(np.zeros(1, np.int32), one, none, none, 0.0, 0.0, nothing, np.zeros(2, np.float32), recency)
    learned = tuple(replace(section, predictor=own) for section in fitted().learned)
    return Profile(LAYOUT, fitted().group, fitted().source, fitted().family, learned)


@pytest.fixture
def desk(desk: Callable[..., Desk]) -> Callable[..., Desk]:
    """Of a codec that predicts."""
    return lambda **options: desk(**{"profile": profile(), "min_tokens": 8, **LOSSY, **options})


def sent(saves: list[Save]) -> dict[tuple[str, int], list[int] | None]:
    """The ids of each entry, by its kind and start."""
    return {(save.entry.kind, save.entry.start): save.token_ids for save in saves}


# The scheduler's side ------------------------------------------------------------------------------------------------


def test_segments_are_sent_with_their_ids(desk: Callable[..., Desk]) -> None:
    blend = {"segment_tokens": 24}
    d, request = desk(blend=blend), make_request(tokens=60, kv_transfer_params={"cuvee": {"segments": [[5, 30]]}})
    d.side.arrived(request)
    d.matched(request)
    saves = d.plan((request, 0, 60)).saves
    assert sent(saves)["segment", 5] == request.prompt_token_ids[5:30]


def test_a_part_of_an_image_has_no_id(desk: Callable[..., Desk]) -> None:
    """The id of its placeholder says nothing about its cache."""
    d, request = desk(), make_request(tokens=60, mm_features=[image("a", 10, 12), image("b", 30), image("c", 52, 8)])
    expected = list(request.prompt_token_ids)
    for first, end in ((10, 22), (30, 34), (52, 60)):
        expected[first:end] = [NO_TOKEN] * (end - first)
    d.matched(request)
    saves = d.plan((request, 0, 60)).saves
    assert sent(saves) == {
        ("chunk", 0): expected[:16],
        ("chunk", 16): expected[16:32],
        ("chunk", 32): expected[32:48],
        ("tail", 48): expected[48:56],
    }
    assert request.all_token_ids == request.prompt_token_ids, "the engine's list is left alone"


@pytest.mark.parametrize("options", [{"quality": "lossless", "step": None}, {"profile": fitted_to(LAYOUT)}])
def test_ids_that_are_of_no_use_are_not_sent(desk: Callable[..., Desk], options: dict[str, Any]) -> None:
    d, request = desk(**options), make_request(tokens=45)
    d.matched(request)
    saves = d.plan((request, 0, 45)).saves
    assert saves and set(sent(saves).values()) == {None}


def following(saves: list[Save]) -> dict[tuple[str, int], int]:
    return {(save.entry.kind, save.entry.start): save.following for save in saves}


def test_what_follows_in_the_prompt_is_counted(desk: Callable[..., Desk]) -> None:
    d, request = desk(profile=of_recency()), make_request(tokens=45)
    d.matched(request)
    assert following(d.plan((request, 0, 45)).saves) == {("chunk", 0): 29, ("chunk", 16): 13, ("tail", 32): 5}
    generate(request, 25)
    generated = d.plan((request, 45, 24), new=False).saves
    assert following(generated) == {("chunk", 32): 0, ("chunk", 48): 0}, "the answer may end anywhere"


# A worker ------------------------------------------------------------------------------------------------------------


def test_blobs_hold_the_ids_that_were_sent(bench: Callable[..., Bench]) -> None:
    b = bench(profile=profile(), codec=LOSSY, threads=1)
    blocks = list(range(16))
    b.fill(blocks, 8 * CHUNK)
    first, second = b.saves(blocks, range(2))
    ids = [*range(10), *[NO_TOKEN] * 6]
    tail, segment = b.save_tail(blocks, 40), b.save_segment(blocks, 5, 20)
    # A chunk with a part of an image is stored without ids.
    saves = [with_ids(first, list(range(16))), with_ids(second, ids), with_ids(tail, ids[:8])]
    saves.append(with_ids(segment, list(range(20))))
    b.worker.saves.save(saves)
    b.drain()
    stored = {key: b.codec.decode(blob).token_ids for key, blob in b.store.entries.items()}
    found = {key: None if held is None else held.tolist() for key, held in stored.items()}
    keys = [b.worker.saves._key(save) for save in saves]
    sent = [save.token_ids for save in saves]
    assert found == dict(zip(keys, [sent[0], None, *sent[2:]], strict=True))
    assert b.store.entries[b.key(0)] == b.codec.encode(b.sequence.slice(0, CHUNK).with_token_ids(range(16)))


def with_ids(save: Save, token_ids: list[int]) -> Save:
    return Save(save.tenant, save.entry, token_ids)


def test_blobs_are_coded_by_what_follows(bench: Callable[..., Bench]) -> None:
    b = bench(profile=of_recency(), codec=LOSSY, threads=1)
    blocks = list(range(4))
    b.fill(blocks, 2 * CHUNK)
    first, second = b.saves(blocks, range(2))
    b.worker.saves.save([replace(first, following=CHUNK), second])
    b.drain()
    inside, last = followed(b.sequence.slice(0, CHUNK), CHUNK), followed(b.sequence.slice(CHUNK, 2 * CHUNK), 0)
    assert b.store.entries == {b.key(0): b.codec.encode(inside), b.key(1): b.codec.encode(last)}
    assert b.codec.encode(inside) != b.codec.encode(followed(inside, 0))


def followed(chunk: KVChunk, tokens: int) -> KVChunk:
    return KVChunk(chunk.keys, chunk.values, LAYOUT, chunk.start, following=tokens)
