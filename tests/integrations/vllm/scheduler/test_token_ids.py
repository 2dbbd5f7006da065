"""Token ids go from the scheduler's side to the workers and into the blobs, so that a codec can predict from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.conftest import fitted_to
from tests.integrations.vllm.sides import CHUNK, LAYOUT, Bench, Desk, image, make_request
from tests.predicting import predicting

from cuvee.codec.chunk import KVChunk
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.token_ids import NO_TOKEN
from cuvee.integrations.vllm.messages import Save
from cuvee.learning.calibrate import fit

LOSSY = {"quality": None, "step": 0.5}
PLACES = list(range(100, 120))  # the engine's blocks


@cache
def profile() -> Profile:
    noise = torch.randn(2, 3, 512, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    return predicting(fit(LAYOUT, [KVChunk(noise[0], noise[1], LAYOUT)]))


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


def test_an_id_outside_the_vocabulary_costs_only_its_own_entry(bench: Callable[..., Bench]) -> None:
    b = bench(profile=profile(), codec=LOSSY, threads=1)
    blocks = list(range(4))
    b.fill(blocks, 2 * CHUNK)
    first, second = b.saves(blocks, range(2))
    b.worker.saves.save([with_ids(first, [10**6] * CHUNK), with_ids(second, [3] * CHUNK)])
    b.drain()
    assert list(b.store.entries) == [b.key(1)]
    assert b.counts()["failures{encode}"] == 1


def with_ids(save: Save, token_ids: list[int]) -> Save:
    return Save(save.tenant, save.entry, token_ids)
