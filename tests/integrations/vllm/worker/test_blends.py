"""Blending on the worker's side: segments in and out of real pages, and what becomes of a blend that goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.integrations.vllm.sides import BLOCK, BLOCKS, CHUNK, LAYOUT, Bench, patience, poison

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.integrations.vllm.decision import decoding_work
from cuvee.integrations.vllm.messages import Blend, Load, Report

PAGES = [20, 3, 17, 4, 9, 22, 11, 5]  # of a prompt
SEGMENTS = [(5, 20), (31, 9), (64, 16)]  # of the sequence


class FakeBlender:
    """Stands in for `PageBlender`: fails, or says that it has computed everything, after some slices.

    Attributes:
        calls: blends that were begun.
        budgets: of each slice that was computed.
        well: what this rank said of itself, each time that ranks were to agree.
    """

    def __init__(
        self,
        error: Exception | None = None,
        slices: int = 1,
        takes: float = 10.0,
    ) -> None:
        self.error = error
        self.slices = slices
        self.takes = takes
        self.others_well = True
        self.calls: list[tuple[Blend, int]] = []
        self.budgets: list[float] = []
        self.well: list[bool] = []

    def agree(self, well: bool) -> bool:
        self.well.append(well)
        return well and self.others_well

    def begin(self, blend: Blend, end: int) -> FakeBlend:
        self.calls.append((blend, end))
        return FakeBlend(self, blend, end)


class FakeBlend:
    def __init__(self, blender: FakeBlender, blend: Blend, end: int) -> None:
        self.blender = blender
        self.left = blender.slices
        self.done = False
        self.tokens = {"reused": 4, "recomputed": 3, "new": end - blend.start - 7}

    def advance(self, budget: float) -> float:
        assert not self.done
        self.blender.budgets.append(budget)
        self.left -= 1
        if self.blender.error is not None and self.left == 0:
            raise self.blender.error
        self.done = self.left == 0
        return self.blender.takes


def store_segments(b: Bench, *segments: tuple[int, int]) -> None:
    """The engine computes the sequence, whose segments are stored beside its first two chunks."""
    blocks = list(range(16))
    b.fill(blocks, 8 * CHUNK)
    saves = [b.save_segment(blocks, *segment) for segment in segments or SEGMENTS]
    b.worker.saves.save([*saves, *b.saves(blocks, range(2))])
    b.drain()
    poison(b.cache)
    b.worker.report(0)


def run_blend(b: Bench, load: Load, blender: FakeBlender) -> Report:
    """Load, recompute once all is placed, and report, as the engine does."""
    b.worker.loads.start([load])
    place(b)
    compute(b, [load.request], blender)
    assert b.worker.loads.take_arrived() == {load.request}
    return b.worker.report(2)


def compute(b: Bench, requests: list[str], blender: FakeBlender, tokens: int = 1000) -> None:
    """The blends' part of one step of the engine."""
    b.worker.blends.advance(requests, tokens, blender)  # type: ignore[arg-type]  # as in `FakeBlender`


def place(b: Bench, request: str = "r", beside: tuple[str, ...] = ()) -> Report:
    """Wait until a request's segments are in their places; say which others may be placed or end meanwhile."""
    for _ in patience():
        assert b.worker.loads.take_arrived(0.01) == set(), "it has not arrived before it is recomputed"
        report = b.worker.report(1)
        if request in report.placed:
            assert {request}.union(beside).issuperset(report.placed) and set(report.ended) <= {*beside}
            return report
    raise AssertionError("nothing was placed")


def place_two(b: Bench) -> None:
    """Blends of two requests, each with a piece that is placed."""
    store_segments(b)
    b.worker.loads.start([
        b.load_blend(PAGES[:4], [b.piece(5, 20, 3)], 23, request="a"),
        b.load_blend(PAGES[4:], [b.piece(31, 9, 3)], 12, request="b"),
    ])  # fmt: skip
    placed: list[str] = []
    while len(placed) < 2:
        b.worker.loads.take_arrived(0.01)
        placed += b.worker.report(1).placed


def tokens_at(b: Bench, start: int, end: int) -> KVChunk:
    """What the prompt's pages hold."""
    at = torch.arange(start, end)
    return b.cache.read(torch.tensor(PAGES)[at // BLOCK] * BLOCK + at % BLOCK, start)


def untouched(b: Bench, start: int, end: int) -> bool:
    """Whether nothing was written into the prompt's pages for these tokens."""
    if start == end:
        return True
    chunk = tokens_at(b, start, end)
    return all(bool(part.isnan().all()) for part in chunk.keys + chunk.values)


def holds_piece(b: Bench, start: int, tokens: int, at: int, low: int | None = None) -> bool:
    """Whether the pages hold the sequence's tokens from `start` on where `at` says, from position `low` on."""
    moved = b.codec.decode(b.store.entries[b.segment_key(start, tokens)], start=at)
    low, high = at if low is None else low, at + tokens
    there = tokens_at(b, low, high)
    wanted = moved.slice(low - at, high - at)
    return all(map(torch.equal, there.keys + there.values, wanted.keys + wanted.values))


# Segments ------------------------------------------------------------------------------------------------------------


def test_a_segment_is_stored_from_wherever_it_begins(bench: Callable[..., Bench]) -> None:
    b, segment = bench(), (5, 20)
    blocks = [(5 * number) % BLOCKS for number in range(16)]
    b.fill(blocks, 8 * CHUNK)
    b.worker.saves.save([b.save_segment(blocks, *segment)])
    b.drain()
    start, end = segment[0], sum(segment)
    assert list(b.store.entries) == [b.segment_key(*segment)]
    (blob,) = b.store.entries.values()
    assert blob == b.codec.encode(b.sequence.slice(start, end))
    counts = b.counts()
    assert counts["stored{segment}"] == 1 and "stored{chunk}" not in counts and "stored{tail}" not in counts
    assert counts["raw_bytes"] == segment[1] * LAYOUT.bytes_per_token
    assert b.worker.saves._pending == 0


# Placing -------------------------------------------------------------------------------------------------------------


def test_pieces_are_placed_behind_the_exact_prefix(bench: Callable[..., Bench]) -> None:
    """The first begins in it, and leaves its tokens alone."""
    b = bench()
    store_segments(b)
    pieces = [b.piece(5, 20, 25), b.piece(31, 9, 49)]
    load = b.load_blend(PAGES, pieces, 58, exact=2 * CHUNK)
    b.worker.loads.start([load])
    report = place(b)
    assert report.restored == [] and report.failed == set()
    assert b.held(PAGES, 0, 2 * CHUNK), "exact"
    assert holds_piece(b, 5, 20, 25, low=32) and holds_piece(b, 31, 9, 49)
    assert untouched(b, 45, 49) and untouched(b, 58, 64)
    counts = b.counts()
    assert counts["loaded{chunk}"] == 2 and counts["loaded{segment}"] == 2 and "load_seconds" not in counts


class Walked(list[Any]):
    """Counts how many of its items are read, whatever reads them by Python's means."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        self.read += len(self)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found


def walked(b: Bench, count: int) -> tuple[int, int]:
    """Pieces read, and blocks that come with them, to place so many pieces of a token, each in a block of its own."""
    load = b.load_blend(PAGES, [b.piece(5 + at, 1, at * BLOCK + 3) for at in range(count)], len(PAGES) * BLOCK - 1)
    assert load.blend is not None
    load.blocks, load.blend.pieces = Walked(load.blocks), Walked(load.blend.pieces)
    b.worker.loads.start([load])
    place(b)
    compute(b, ["r"], FakeBlender())
    assert b.worker.loads.take_arrived() == {"r"} and b.worker.report(2).restored
    assert load.blocks.read == 0
    return load.blend.pieces.read, sum(len(piece.tables[0]) for piece in load.blend.pieces)


def test_placing_a_piece_reads_neither_the_others_nor_their_blocks(bench: Callable[..., Bench]) -> None:
    """Clients choose how many there are, of prompts of thousands of blocks."""
    b = bench()
    store_segments(b, *((5 + at, 1) for at in range(len(PAGES))))
    few, many = walked(b, 2), walked(b, len(PAGES))
    assert few[0] > 2 and many[0] == len(PAGES) / 2 * few[0]
    assert few[1] == 2 and many[1] == len(PAGES)


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


# Recomputing ---------------------------------------------------------------------------------------------------------


def test_a_blend_arrives_once_it_is_recomputed(bench: Callable[..., Bench]) -> None:
    b, blender = bench(), FakeBlender()
    store_segments(b)
    load = b.load_blend(PAGES, [b.piece(5, 20, 20)], 40, exact=CHUNK)
    report = run_blend(b, load, blender)
    assert blender.calls == [(load.blend, 40)]
    assert set(report.ended) == {"r"} and not report.failed and not report.unsaved
    (done,) = report.restored
    assert load.blend is not None
    computed = 24 - (1 - load.blend.cost) * 7
    assert done[:3] == ("blend", decoding_work([CHUNK, 20], CHUNK), computed) and done.seconds > 0
    assert not b.worker.loads.take_invalid_blocks()
    counts = b.counts()
    assert counts["blend_seconds"] == 1
    assert [counts[f"blend_tokens{{{kind}}}"] for kind in ("reused", "recomputed", "new")] == [4, 3, 17]
    assert counts["loaded_tokens"] == 40 and counts["load_seconds"] == 1 and "recomputed_tokens" not in counts
    compute(b, ["r"], blender)
    b.worker.loads.drop(["r"])
    assert len(blender.calls) == 1 and b.worker.loads.take_arrived() == set(), "once"


def test_what_a_slice_leaves_of_a_step_is_for_the_next_blend(bench: Callable[..., Bench]) -> None:
    b, blender = bench(), FakeBlender(slices=2, takes=60)
    place_two(b)
    compute(b, ["unknown"], blender)
    assert blender.well == [False], "other ranks may have it, and must not wait"
    b.worker._state.timeout = 0.0  # they wait for other ranks as long as it takes
    assert b.worker.loads.take_arrived() == set()
    compute(b, ["a", "b"], blender, tokens=100)
    assert blender.budgets == [100, 40] and [end for _, end in blender.calls] == [23, 12], "in the order of the plan"
    compute(b, ["a", "b"], blender, tokens=60)
    assert blender.budgets == [100, 40, 60], "nothing is left for the second"
    assert b.worker.loads.take_arrived() == {"a"}
    compute(b, ["a", "b"], blender, tokens=60)
    assert blender.budgets == [100, 40, 60, 60] and b.worker.loads.take_arrived() == {"b"}


@pytest.mark.parametrize(
    ("error", "exact"), [(InputError("cost: does not pay"), 0), (MemoryError(), CHUNK), (None, CHUNK)]
)
def test_a_blend_that_fails_here_or_on_another_rank_is_computed_from_its_exact_prefix_on(
    bench: Callable[..., Bench], error: Exception | None, exact: int
) -> None:
    b, blender = bench(), FakeBlender(error)
    store_segments(b)
    blender.others_well = error is not None
    report = run_blend(b, b.load_blend(PAGES, [b.piece(5, 20, 20)], 40, exact=exact), blender)
    assert set(report.ended) == report.failed == {"r"} and report.restored == []
    assert len(blender.budgets) == (error is not None)
    assert b.worker.loads.take_invalid_blocks() == set(PAGES[exact // BLOCK : 5])
    assert exact == 0 or b.held(PAGES, 0, exact)
    counts = b.counts()
    assert (
        counts["failures{blend}"] == 1 and counts["recomputed_tokens"] == 40 - exact and "blend_seconds" not in counts
    )
    assert counts.get("loaded_tokens", 0) == exact
    assert b.segment_key(5, 20) in b.store.entries, "that says nothing of the entry"


@pytest.mark.parametrize("parted", [False, True])
def test_a_blend_that_fails_or_whose_ranks_cannot_agree_ends_its_step(
    bench: Callable[..., Bench], parted: bool, contained: list[tuple[str, BaseException]]
) -> None:
    """Ranks may have computed different parts of it; what they do next must not depend on that."""

    class Parted(FakeBlender):
        def agree(self, well: bool) -> bool:
            super().agree(well)
            raise RuntimeError("connection closed by peer")

    b, blender = bench(), Parted() if parted else FakeBlender(InputError("cost: does not pay"))
    place_two(b)
    compute(b, ["a", "b"], blender)
    assert blender.well == [True] and b.worker.loads.take_arrived() == {"a"}
    assert [entry for entry, _ in contained] == ["blend"] * parted


@pytest.mark.parametrize(("harm", "start"), [("gone", 0), ("damaged", BLOCK), ("shorter", 0)])
def test_a_piece_that_cannot_be_placed_leaves_the_exact_prefix(
    bench: Callable[..., Bench], harm: str, start: int
) -> None:
    b, blender = bench(), FakeBlender()
    store_segments(b)
    key, blob = b.segment_key(31, 9), b.store.entries[b.segment_key(31, 9)]
    if harm == "gone":
        del b.store.entries[key]
    elif harm == "damaged":
        b.store.entries[key] = blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:]
    else:
        b.store.entries[key] = b.codec.encode(b.sequence.slice(31, 39))
    pieces = [b.piece(5, 20, 20), b.piece(31, 9, 41)]
    b.worker.loads.start([b.load_blend(PAGES, pieces, 50, start=start, exact=CHUNK)])
    b.wait()
    assert b.worker.loads.take_invalid_blocks() == set(PAGES[2:7])
    assert b.held(PAGES, start, CHUNK)
    report = b.worker.report(1)
    assert report.failed == set(report.ended) == {"r"} and report.placed == []
    assert {piece.digest for piece in pieces} <= report.unsaved, "they are to be stored again"
    assert key not in b.store.entries and b.segment_key(5, 20) in b.store.entries
    compute(b, ["r"], blender)
    assert not blender.calls
    counts = b.counts()
    assert counts["failures{load}"] == 1 and counts["recomputed_tokens"] == 50 - CHUNK


@pytest.mark.parametrize("device", [False, True])
def test_a_good_piece_that_cannot_go_where_the_prompt_has_it_is_kept(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, device: bool
) -> None:
    """A client chooses where: beyond the positions that the profile knows, say, where the engine allows more."""
    b = bench()
    store_segments(b)
    if device:  # there, all pieces are decoded together before one by one
        monkeypatch.setattr(b.codec, "on_device", lambda device: True)
    before = dict(b.store.entries)
    beyond = b.load_blend(PAGES, [b.piece(5, 20, 20), b.piece(31, 9, 41)], 50, exact=CHUNK)
    pieces = beyond.blend.pieces  # type: ignore[union-attr]
    pieces[1] = replace(pieces[1], start=4090)
    b.worker.loads.start([beyond])
    b.wait()
    assert b.counts()["failures{load}"] == 1 and b.held(PAGES, 0, CHUNK)
    assert b.store.entries == before


@pytest.mark.parametrize(("exact", "slices"), [(0, 0), (CHUNK, 1)])
def test_a_dropped_blend_is_computed(bench: Callable[..., Bench], exact: int, slices: int) -> None:
    """Before its first slice, or between two."""
    b, blender = bench(), FakeBlender(slices=3)
    store_segments(b)
    b.worker.loads.start([b.load_blend(PAGES, [b.piece(5, 20, 20)], 40, exact=exact)])
    place(b)
    for _ in range(slices):
        compute(b, ["r"], blender)
    b.worker.loads.drop(["unknown", "r"])
    assert b.worker.loads.take_arrived() == {"r"}
    assert b.worker.loads.take_invalid_blocks() == set(PAGES[exact // BLOCK : 5])
    report = b.worker.report(2)
    assert set(report.ended) == report.failed == {"r"} and report.restored == []
    compute(b, ["r"], blender)
    assert len(blender.budgets) == slices


@pytest.mark.parametrize("early", [False, True])
def test_what_is_dropped_while_it_loads_is_not_placed(bench: Callable[..., Bench], early: bool) -> None:
    """Nor is what the scheduler wants recomputed too early: other ranks must not wait."""
    b, blender, go, reading = bench(), FakeBlender(), threading.Event(), threading.Event()
    store_segments(b)

    def hold(operation: str) -> None:
        if operation == "get":
            reading.set()
            _wait(go)

    b.store.before = hold
    b.worker.loads.start([b.load_blend(PAGES, [b.piece(5, 20, 20)], 40)])
    assert reading.wait(30)
    if early:
        compute(b, ["r"], blender)
        assert blender.well == [False] and not blender.calls
    else:
        b.worker.loads.drop(["r"])
    assert b.worker.loads.take_arrived() == {"r"} and b.worker.loads.take_invalid_blocks() == set(PAGES[:5])
    go.set()
    b.worker.close()
    assert b.worker.report(1).placed == [] and untouched(b, 0, 64)
