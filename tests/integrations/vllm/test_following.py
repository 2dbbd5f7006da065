"""Entries are coded by their distance from the end of the prompt, near which tokens matter more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from tests.integrations.vllm.sides import CHUNK, LAYOUT, Bench, Desk, make_request

from cuvee.codec.chunk import KVChunk
from cuvee.codec.profiles.class_predictor import Predictor
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.vllm.messages import Save
from cuvee.learning.calibrate import fit

LOSSY: dict[str, Any] = {"quality": None, "step": 0.5}


@cache
def profile() -> Profile:
    """A profile whose steps depend on nothing but the distance from the end."""
    noise = torch.randn(2, 3, 512, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain = fit(LAYOUT, [KVChunk(noise[0], noise[1], LAYOUT)])
    one, none = np.ones(1, np.float32), np.zeros(1, np.float32)
    recency = np.array([3.0, 2.0, 1.0, 0.0], np.float32)
    nothing = np.empty(0, np.float32)
    own = Predictor(np.zeros(1, np.int32), one, none, none, 0.0, 0.0, nothing, np.zeros(2, np.float32), recency)
    learned = tuple(replace(section, predictor=own) for section in plain.learned)
    return Profile(plain.layout, plain.group, plain.source, plain.family, learned)


def following(saves: list[Save]) -> dict[tuple[str, int], int]:
    return {(save.entry.kind, save.entry.start): save.following for save in saves}


def test_the_scheduler_counts_what_follows_in_the_prompt(desk: Callable[..., Desk]) -> None:
    d, request = desk(profile=profile(), min_tokens=8, **LOSSY), make_request(tokens=45)
    d.matched(request)
    assert following(d.plan((request, 0, 45)).saves) == {("chunk", 0): 29, ("chunk", 16): 13, ("tail", 32): 5}
    request.all_token_ids += [11] * 25
    request.num_tokens += 25
    generated = d.plan((request, 45, 24), new=False).saves
    assert following(generated) == {("chunk", 32): 0, ("chunk", 48): 0}, "the answer may end anywhere"


def test_the_worker_codes_what_it_was_told(bench: Callable[..., Bench]) -> None:
    b = bench(profile=profile(), codec=LOSSY, threads=1)
    blocks = list(range(4))
    b.fill(blocks, 2 * CHUNK)
    first, second = b.saves(blocks, range(2))
    b.worker.saves.save([replace(first, following=CHUNK), second])
    b.drain()
    inside, last = followed(b.sequence.slice(0, CHUNK), CHUNK), followed(b.sequence.slice(CHUNK, 2 * CHUNK), 0)
    assert b.store.entries == {b.key(0): b.codec.encode(inside), b.key(1): b.codec.encode(last)}
    assert b.codec.encode(inside) != b.codec.encode(followed(inside, 0))


def test_segments_are_coded_like_chunks(bench: Callable[..., Bench]) -> None:
    """With the classes of their profile. Equal ones add five to fifteen times the KL to a blend on SmolLM2-135M."""
    b = bench(profile=profile(), codec=LOSSY, threads=1)
    blocks = list(range(4))
    b.fill(blocks, 2 * CHUNK)
    b.worker.saves.save([replace(b.save_segment(blocks, 5, 20), following=300)])
    b.drain()
    segment = b.sequence.slice(5, 25)
    assert b.store.entries == {b.segment_key(5, 20): b.codec.encode(followed(segment, 300))}


def followed(chunk: KVChunk, tokens: int) -> KVChunk:
    return KVChunk(chunk.keys, chunk.values, LAYOUT, chunk.start, following=tokens)
