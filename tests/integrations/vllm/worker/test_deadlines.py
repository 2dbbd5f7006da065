"""A worker with chunks in parts: what it stores, what it restores of which parts, and loads with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tests.integrations.stores.dict_store import DictStore, hold
from tests.integrations.vllm.sides import BLOCK, CHUNK, LAYOUT, TENANT, Bench, poison
from tests.predicting import predicting

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import OutOfMemoryError
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import CurvePoint
from cuvee.codec.token_ids import NO_TOKEN
from cuvee.integrations.vllm.messages import Aim, Delivery, Entry, Report, Save
from cuvee.learning.calibrate import fit
from cuvee.naming.identity import store_key
from cuvee.naming.part_keys import part_key

PARTS = 2
STEP = 0.25
BLOCKS = list(range(16))
PREFILL = (0.5, 0.0, 0.0)  # so slow that a busy machine loads all the same


@cache
def profile() -> Profile:
    """A learned profile with a curve."""
    noise = torch.randn(2, 3, 512, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    fitted = fit(LAYOUT, [KVChunk(noise[0], noise[1], LAYOUT)])
    points = [CurvePoint(64 * octave, 2.0 - octave, 0.01, kl=0.02 * 4.0 ** (octave - 1)) for octave in (-3, 1)]
    return fitted.with_curve(points)


@pytest.fixture
def bench(bench: Callable[..., Bench]) -> Callable[..., Bench]:
    """Of chunks in parts."""

    def make(**options: Any) -> Bench:
        codec = {"quality": None, "step": STEP, "refinements": PARTS - 1, **options.pop("codec", {})}
        options = {"quality": None, "step": STEP, "refinements": PARTS - 1, **options}
        return bench(**{"profile": profile(), "codec": codec, "threads": 1, **options})

    return make


def keys_of(b: Bench, chunk: int) -> list[str]:
    return [part_key(b.key(chunk), number) for number in range(PARTS)]


def aim(seconds: float = 60.0, rest: int = 1) -> Aim:
    return Aim(seconds, rest, PREFILL)


def run(b: Bench, chunks: int = 4, planned: Aim | None = None, request: str = "r", start: int = 0) -> Report:
    """Load the first chunks, and return what is reported of it."""
    load = b.load(BLOCKS, start, chunks * CHUNK, request)
    load.aim = planned
    b.worker.loads.start([load])
    b.wait(request)
    return b.worker.report(1)


def delivered(report: Report) -> Delivery:
    (delivery,) = report.delivered
    return delivery


def holds(b: Bench, chunk: int, parts: int) -> bool:
    """Whether the pages hold a chunk as its first parts decode."""
    blobs = [stored_before[key] for key in keys_of(b, chunk)[:parts]]
    bound = store_key(TENANT, b.digests[chunk], 0).encode() if b.codec.key_ids else b""
    expected = b.codec.decode(blobs[0], refinements=blobs[1:], associated_data=bound)
    offsets = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
    held = b.cache.read(torch.tensor(BLOCKS)[offsets // BLOCK] * BLOCK + offsets % BLOCK, chunk * CHUNK)
    return all(map(torch.equal, [*held.keys, *held.values], [*expected.keys, *expected.values]))


stored_before: dict[str, bytes] = {}


def stored(b: Bench) -> Bench:
    """Store all chunks, and keep what they were for `holds`."""
    b.store_all()
    stored_before.clear()
    stored_before.update(b.store.entries)
    return b


# What is stored ------------------------------------------------------------------------------------------------------


def test_a_chunk_without_its_last_part_is_stored_again(bench: Callable[..., Bench]) -> None:
    b = stored(bench())
    assert set(stored_before) == {key for chunk in range(8) for key in keys_of(b, chunk)}
    assert b.counts()["stored_bytes"] == sum(map(len, stored_before.values()))
    del b.store.entries[keys_of(b, 2)[-1]], b.store.entries[keys_of(b, 5)[0]]
    b.fill(BLOCKS, 8 * CHUNK)
    puts = b.store.calls.count("put")
    b.worker.saves.save(b.saves(BLOCKS, range(8)))
    b.drain()
    assert set(b.store.entries) == set(stored_before)
    assert b.store.calls.count("put") - puts == 2 * PARTS, "of the two chunks that lacked a part"
    assert not b.worker.report(1).unsaved


def test_a_store_that_takes_the_base_alone_has_the_chunk(bench: Callable[..., Bench]) -> None:
    b = bench()
    put = b.store.put
    b.store.put = lambda key, blob: put(key, blob) if len(key.split("706172")) == 1 else False  # type: ignore[method-assign]
    b.store_all(chunks=1)
    assert list(b.store.entries) == [b.key(0)]
    assert b.counts()["stored_bytes"] == len(b.store.entries[b.key(0)])
    assert not b.worker.report(1).unsaved


def test_a_chunk_that_is_lossless_because_it_has_no_ids_is_whole(bench: Callable[..., Bench]) -> None:
    """It has one part and lacks none: it counts as of all parts, and is not stored again."""
    rough = [CurvePoint(64 * octave, 2.0 - octave, 0.01, kl=2.0**octave, plain=True) for octave in (-3, 1)]
    predicts = predicting(profile()).with_curve([*profile().points, *rough])
    b = bench(profile=predicts, codec={"step": None, "kl": 0.01}, step=None, kl=0.01)
    b.fill(BLOCKS, 8 * CHUNK)
    save = b.saves(BLOCKS, range(1))[0]
    without = Save(save.tenant, save.entry, [NO_TOKEN] * CHUNK)
    for _ in range(2):
        b.worker.saves.save([without])
        b.drain()
    assert list(b.store.entries) == [b.key(0)] and b.store.calls.count("put") == 1
    for name, planned in (("load", None), ("plan", aim())):
        poison(b.cache)
        assert delivered(run(b, chunks=1, planned=planned, request=name)).parts == (PARTS,)
        assert b.held(BLOCKS, 0, CHUNK)


def test_a_chunk_that_its_profile_misfits_is_stored_without_loss_and_counted(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.sequence = KVChunk([own * 1e4 for own in b.sequence.keys], [own * 1e4 for own in b.sequence.values], LAYOUT)
    b.fill(BLOCKS, 8 * CHUNK)
    b.worker.saves.save(b.saves(BLOCKS, range(2)))
    b.drain()
    assert b.recorder.totals()["misfits", ""] == 2 and set(b.store.entries) == {b.key(0), b.key(1)}
    poison(b.cache)
    assert delivered(run(b, chunks=2)).parts == (PARTS,) * 2
    assert b.held(BLOCKS, 0, 2 * CHUNK)


def test_parts_are_expected_to_be_as_large_as_the_profile_says(bench: Callable[..., Bench]) -> None:
    """Of a curve that is no line, so that a base and its refinement differ; and where nothing was measured."""
    entry = Entry("chunk", b"", 0, CHUNK)
    curve = [CurvePoint(step, bits, 0.01, kl=0.01) for step, bits in ((-192, 5.0), (-64, 1.5), (64, 1.0))]
    for points, expected in ((curve, (1.25, 2.0)), ([], (1.0, 1.0))):
        b = bench(profile=profile().with_curve(points))
        sizes = [b.worker._state.nbytes(entry, part) for part in range(PARTS)]
        assert sizes == pytest.approx([CHUNK * LAYOUT.values_per_token * bits / 8 for bits in expected])


# Loads, with a plan and without --------------------------------------------------------------------------------------


@pytest.mark.parametrize("planned", [None, aim()], ids=["load", "plan"])
def test_a_load_takes_all_parts_that_are_there(bench: Callable[..., Bench], planned: Aim | None) -> None:
    b = stored(bench())
    del b.store.entries[keys_of(b, 2)[1]]
    report = run(b, planned=planned)
    delivery = delivered(report)
    assert delivery == Delivery("r", 0, (CHUNK,) * 4, (2, 2, 1, 2), True)
    assert [holds(b, chunk, parts) for chunk, parts in enumerate(delivery.parts)] == [True] * 4
    assert not report.failed and not report.unsaved and b.worker.loads.take_invalid_blocks() == set()
    assert bool(report.restored) == (planned is None), "the time of a plan says nothing of the store"
    counts = b.counts()
    assert counts["loaded{chunk}"] == 4 and counts["loaded_tokens"] == 4 * CHUNK and "loaded_at{0}" not in counts
    assert counts["loaded_at{2}"] == 3 * CHUNK and counts["loaded_at{1}"] == CHUNK


@pytest.mark.parametrize(("planned", "how"), [(None, "damaged"), (aim(), "another's")], ids=["load", "plan"])
def test_a_bad_refinement_is_left_out_and_deleted(bench: Callable[..., Bench], planned: Aim | None, how: str) -> None:
    b = stored(bench())
    bad = keys_of(b, 1)[1]
    blob = b.store.entries[bad]
    b.store.entries[bad] = b.store.entries[keys_of(b, 3)[1]] if how != "damaged" else blob[:-9] + bytes(9)
    report = run(b, planned=planned)
    delivery = delivered(report)
    assert delivery.parts == (2, 1, 2, 2) and not report.failed
    assert holds(b, 1, 1) and holds(b, 0, 2)
    assert bad not in b.store.entries and keys_of(b, 1)[0] in b.store.entries
    assert b.counts()["failures{refinement}"] == 1


@pytest.mark.parametrize(("planned", "gone"), [(None, False), (aim(), False), (aim(), True)])
def test_a_bad_base_ends_the_load_before_it_and_takes_its_refinements_along(
    bench: Callable[..., Bench], planned: Aim | None, gone: bool
) -> None:
    b = stored(bench())
    blob = b.store.entries[keys_of(b, 2)[0]]
    b.store.entries[keys_of(b, 2)[0]] = blob[:-9] + bytes(9)
    if gone:
        for key in keys_of(b, 2):
            del b.store.entries[key]
    report = run(b, planned=planned)
    assert report.failed == {"r"} and delivered(report).parts == (2, 2)
    assert b.worker.loads.take_invalid_blocks() == set(BLOCKS[4:8])
    assert not set(keys_of(b, 2)) & set(b.store.entries)
    assert b.counts()["failures{load}"] == 1 and "failures{refinement}" not in b.counts()
    assert b.digests[2] in report.unsaved and b.counts()["recomputed_tokens"] == 2 * CHUNK


@pytest.mark.parametrize("planned", [None, aim()], ids=["load", "plan"])
@pytest.mark.parametrize("reason", ["", "was bad, and is deleted: entry: belongs to another key"])
def test_the_log_says_why_an_entry_is_missing(
    bench: Callable[..., Bench], planned: Aim | None, reason: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    b = stored(bench(codec={"key": [bytes(range(16)), bytes(16)]}, key_env=None))
    key = keys_of(b, 2)[0]
    del b.store.entries[key]
    monkeypatch.setattr(b.store, "why_missing", lambda asked: reason if asked == key else "")
    assert run(b, planned=planned).failed == {"r"}
    assert f"request r: chunk 2 {reason or 'is no longer in the store'}; its tokens from" in caplog.text


def test_parts_are_bound_to_their_place_and_older_secrets_are_tried(bench: Callable[..., Bench]) -> None:
    old, new = bytes(16), bytes(range(16))
    b = stored(bench(codec={"key": old}))
    rotated = bench(codec={"key": [new, old]}, store=b.store)
    rotated.sequence = b.sequence
    for name, planned in (("load", None), ("plan", aim())):
        delivery = delivered(run(rotated, planned=planned, request=name))
        assert delivery.parts == (2,) * 4
    for number in range(PARTS):  # a copy from another place
        b.store.entries[keys_of(b, 0)[number]] = b.store.entries[keys_of(b, 1)[number]]
    assert delivered(run(b, planned=aim(), request="copied")).parts == ()


@pytest.mark.parametrize("error", [OutOfMemoryError("decode: none left"), ZeroDivisionError()])
def test_an_error_that_is_not_of_the_bytes_deletes_nothing(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    b = stored(bench())
    opened = Codec.open

    def full(codec: Codec, blob: bytes, *, refinements: Sequence[bytes] = (), **given: Any) -> Any:
        if refinements:
            raise error
        return opened(codec, blob, refinements=refinements, **given)

    monkeypatch.setattr(Codec, "open", full)
    report = run(b, planned=aim())
    assert report.failed == {"r"} and "failures{refinement}" not in b.counts()
    assert b.store.entries == stored_before


# Planned loads -------------------------------------------------------------------------------------------------------


def test_refinements_that_hang_are_left_out_by_the_deadline(bench: Callable[..., Bench]) -> None:
    store = Parted()
    b = stored(bench(store=store))
    store.hangs = True
    try:
        report = run(b, planned=aim(seconds=2.0))
        assert delivered(report).parts == (1,) * 4 and delivered(report).complete
        assert all(holds(b, chunk, 1) for chunk in range(4))
        assert not report.failed
    finally:
        store.gate.set()


def test_a_deadline_that_has_passed_gives_the_first_token_soon(bench: Callable[..., Bench]) -> None:
    b = stored(bench())
    report = run(b, planned=aim(seconds=-5.0))
    assert not report.failed and "r" in report.ended


def test_where_there_is_time_to_compute_nothing_is_loaded_coarsely(bench: Callable[..., Bench]) -> None:
    store = Parted()
    b = stored(bench(store=store))
    b.worker._state.rates.observe("memory", 1, 3600.0)  # a byte took an hour
    load = b.load(BLOCKS, 0, 4 * CHUNK)
    load.aim = Aim(0.5, 1, (1e-6, 0.0, 0.0))
    b.worker.loads.start([load])
    b.wait()
    report = b.worker.report(1)
    assert delivered(report) == Delivery("r", 0, (), (), False)
    assert not report.failed and not report.unsaved, "the store has all parts of these chunks"
    assert b.worker.loads.take_invalid_blocks() == set(BLOCKS[:8])
    counts = b.counts()
    assert counts["loaded_at{0}"] == 4 * CHUNK and "failures{load}" not in counts
    assert "recomputed_tokens" not in counts


def test_a_store_that_fails_has_everything_computed(bench: Callable[..., Bench]) -> None:
    b = stored(bench())

    def fails(operation: str) -> None:
        if operation == "get":
            raise OSError("gone")

    b.store.before = fails
    report = run(b, planned=aim())
    assert delivered(report).parts == () and report.failed == {"r"}
    assert b.counts()["failures{load}"] >= 1


def test_a_store_that_hangs_is_given_up_after_the_load_timeout(bench: Callable[..., Bench]) -> None:
    b = stored(bench(load_timeout=0.2))
    gate = hold(b.store, "get")
    try:
        load = b.load(BLOCKS, 0, 4 * CHUNK)
        load.aim = aim(seconds=30.0, rest=10**6)  # computing would take a quarter of an hour
        b.worker.loads.start([load])
        b.wait()
        assert b.counts()["failures{timeout}"] == 1
        assert b.worker.loads.take_invalid_blocks() == set(BLOCKS[:8])
    finally:
        gate.set()


class Parted(DictStore):
    """A store whose refinements can be made to hang."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.gate = False, threading.Event()

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if self.hangs and any("70617274" in key[-10:] for key in keys):
            self.gate.wait(60)
        return super().get_many(keys)
