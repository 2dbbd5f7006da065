"""The worker's side on real pages, a real codec and a store that can be made to fail."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import fitted_to
from tests.integrations.stores.dict_store import DictStore, hold
from tests.integrations.vllm.sides import BLOCK, CHUNK, LAYOUT, TENANT, Bench, Served, make_pages, poison
from tests.predicting import predicting
from tests.waiting import wait_until

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.format.keys import Key
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import CurvePoint
from cuvee.codec.schemes.lossless import LosslessScheme
from cuvee.integrations.core import chunk_io
from cuvee.integrations.stores import StoreError
from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.stores.tiered import TieredStore
from cuvee.integrations.vllm.decision import Restored
from cuvee.integrations.vllm.messages import Delivery, Report, Save
from cuvee.integrations.vllm.worker import loads as worker_load
from cuvee.integrations.vllm.worker.step_times import StepTimes
from cuvee.naming.identity import store_key


@pytest.mark.usefixtures("untold")
def test_the_warm_up_warns_of_nothing_and_real_chunks_still_do(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """Which is logged once per process: the warm-up must not use it up."""
    curve = [CurvePoint(64 * k, 4.0 - k, 1e-2, 1e-3 * 4.0**k) for k in range(-3, 3)]
    profile = predicting(fitted_to(LAYOUT)).with_curve(curve, [CHUNK // 2])
    with caplog.at_level(logging.WARNING, logger="cuvee"):
        b = bench(profile=profile, codec={"quality": "balanced"})
        assert not caplog.records
        b.store_all()
        b.codec.encode(replace(b.sequence.slice(0, CHUNK), keys=tuple(1000 * each[:CHUNK] for each in b.sequence.keys)))
    said = ["a chunk without token ids", "a chunk is coded without loss", "contexts of up to 8 tokens"]
    assert all(caplog.text.count(each) == 1 for each in said), caplog.text


@pytest.mark.parametrize("placed", [False, True])
def test_an_idle_engine_is_woken_by_a_load_that_is_over_or_placed(bench: Callable[..., Bench], placed: bool) -> None:
    b = bench()
    b.store_all()
    go = hold(b.store, "get")
    b.store.entries[b.segment_key(5, 20)] = b.codec.encode(b.sequence.slice(5, 25))
    b.worker.loads.start([b.load_blend([1, 2, 3], [b.piece(5, 20, 3)], 23) if placed else b.load([1, 2], 0, CHUNK)])
    assert b.worker.loads.take_arrived() == set(), "without patience it is only a question"
    assert b.worker.loads.take_arrived(0.01) == set(), "patience ends"
    found: list[set[str]] = []
    asking = threading.Thread(target=lambda: found.append(b.worker.loads.take_arrived(3600.0)), daemon=True)
    asking.start()
    asking.join(0.2)
    assert not found
    go.set()
    asking.join(30)
    assert found == [set() if placed else {"r"}] and b.worker.report(1).placed == ["r"] * placed
    # Nothing is under way any more: there is nothing to wait for.
    assert placed or b.worker.loads.take_arrived(3600.0) == set()


def test_who_hears_of_the_end_of_a_load_finds_it_counted(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    b.store_all()
    del b.store.entries[b.key(1)]
    notify, heard = b.worker._state.progress.notify, list[dict[str, Any]]()

    def noted() -> None:
        heard.append(b.counts())
        notify()

    monkeypatch.setattr(b.worker._state.progress, "notify", noted)
    b.load_now([b.load([10, 11, 12, 13], 0, 2 * CHUNK)])
    (counts,) = heard
    assert (counts["load_seconds"], counts["failures{load}"], counts["recomputed_tokens"]) == (1, 1, CHUNK)


def test_a_chunk_that_is_being_stored_is_not_stored_again(bench: Callable[..., Bench]) -> None:
    b = bench()
    go = hold(b.store)
    b.fill([0, 1], CHUNK)
    for _ in range(3):
        b.worker.saves.save(b.saves([0, 1], range(1)))
    go.set()
    b.drain()
    assert b.store.calls == ["contains", "put"]


def test_a_store_that_hangs_while_it_deletes_keeps_nobody_waiting(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.store_all()
    b.store.entries[b.key(1)] = b"garbage"
    go = hold(b.store, "delete")
    b.worker.loads.start([b.load([10, 11, 12, 13], 0, 2 * CHUNK)])
    go.reached()
    b.worker._state.timeout = 0.0  # since which it hangs
    b.wait()
    assert b.worker.loads.take_invalid_blocks() == {12, 13}
    go.set()


def test_large_entries_are_fetched_few_at_a_time(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """What loads hold of fetched bytes is bounded."""
    b = bench()
    b.store_all()
    fetch, sizes = b.store.get_many, list[int]()

    def noting(keys: Sequence[str]) -> Any:
        found = fetch(keys)
        sizes.append(sum(len(each) for each in found if each is not None))
        return found

    monkeypatch.setattr(b.store, "get_many", noting)
    whole = sum(map(len, b.store.entries.values()))
    for most in (whole, 3 * whole // 8, 1):
        monkeypatch.setattr(chunk_io, "_FETCHED", 1.1 * most)
        sizes.clear()
        b.load_now([b.load(list(range(8, 24)), 0, 8 * CHUNK)])
        assert b.held(list(range(8, 24)), 0, 8 * CHUNK)
        assert sum(sizes) == whole and max(sizes) <= max(1.1 * most, whole / 7)
        assert len(sizes) == {whole: 1, 1: 8}.get(most, 3)


@pytest.mark.parametrize("damage", ["gone", "section", "empty", "another chunk"])
def test_a_bad_entry_is_deleted_and_those_before_it_kept(bench: Callable[..., Bench], damage: str) -> None:
    b = bench()
    b.store_all()
    blob = b.store.entries.pop(b.key(1))
    if damage != "gone":
        b.store.entries[b.key(1)] = {
            "section": blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:], "empty": b"",
            "another chunk": b.store.entries[b.key(2)],
        }[damage]  # fmt: skip
    blocks = [10, 11, 12, 13, 14, 15]
    b.load_now([b.load(blocks, 0, 3 * CHUNK)])
    assert b.worker.loads.take_invalid_blocks() == {12, 13, 14, 15}
    assert b.held(blocks, 0, CHUNK)
    cause = "an entry was gone or could not be read" if damage == "gone" else "an entry was damaged"
    assert b.worker._state.report.causes == {"r": cause}
    report = b.worker.report(1)
    assert report.failed == {"r"} and report.restored == []
    assert report.unsaved == set(b.digests[1:3]), "they are to be stored again"
    assert b.counts()["recomputed_tokens"] == 2 * CHUNK
    assert {*b.store.entries} == {b.key(chunk) for chunk in range(8) if chunk != 1}, "it would fail for ever"


def test_an_entry_of_another_profile_is_computed_and_not_deleted(bench: Callable[..., Bench]) -> None:
    """It is sound, and ranks with its profile read it: a fleet must not lose it to one that has another."""
    own = fitted_to(LAYOUT)
    pushed = Profile(LAYOUT, own.group, own.source, own.family, own.learned, model="b" * 32)
    assert pushed.id != own.id
    lossy = {"quality": None, "step": 4.0}
    other = bench(rank=1, codec=lossy, profile=pushed)
    other.store_all(1)
    other.load_now([other.load([10, 11], 0, CHUNK)])
    assert not other.worker.loads.take_invalid_blocks(), "it reads its own entries"
    ours = bench(rank=1, codec=lossy, profile=own, store=other.store, sequence=other.sequence)
    ours.load_now([ours.load([10, 11], 0, CHUNK)])
    assert ours.worker.loads.take_invalid_blocks() == {10, 11}
    assert ours.worker.report(1).failed == {"r"} and ours.counts()["recomputed_tokens"] == CHUNK
    other.load_now([other.load([10, 11], 0, CHUNK)])
    assert not other.worker.loads.take_invalid_blocks(), "it is still there"


@pytest.mark.parametrize("differs", ["profile", "secret"])
def test_a_rank_with_another_profile_or_secret_than_the_scheduler_stores_and_loads_nothing(
    bench: Callable[..., Bench], differs: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file was replaced while the engine started: the scheduler's names stand for the other one."""
    own, lossy = fitted_to(LAYOUT), {"quality": "balanced", "key": bytes(16)}
    b, good = (bench(codec=lossy, profile=own) for _ in range(2))
    ids, coding = good.codec.key_ids, b.setup.coding
    good.worker.settle(1, False, good.setup.coding(ids))
    good.store_all(1)
    assert good.store.entries
    b.store.entries.update(good.store.entries)
    if differs == "profile":
        replaced = Profile(LAYOUT, own.group, own.source, own.family, own.learned, model="b" * 32)
        coding = replace(b.setup, profile=replaced).coding
    else:
        ids = (Key.of(bytes(range(16))).id, *ids)
    for step in (1, 2):
        b.worker.settle(step, step == 2, coding(ids))
        b.load_now([b.load([10, 11], 0, CHUNK)])
        assert b.worker.loads.take_invalid_blocks() == {10, 11}
        b.store_all(2)
    assert b.store.entries == good.store.entries and b.counts()["stores_skipped{profile}"] == 4
    assert caplog.text.count("restart the engine") == 1


@pytest.mark.parametrize("confirmed", [True, False])
def test_other_weights_end_loads_and_stores(bench: Callable[..., Bench], confirmed: bool) -> None:
    """What waits to be stored is dropped, loads under way give nothing, and none begins until the scheduler asks."""
    served = Served()
    b = bench(weights=served.weights)
    b.store_all(2)
    before = dict(b.store.entries)
    go = hold(b.store, "get", "contains")
    b.fill(list(range(8)), 4 * CHUNK)
    b.worker.loads.start([b.load([10, 11, 12, 13], 0, 2 * CHUNK)])
    go.reached()
    b.worker._state.alone = confirmed  # copies of steps that are not confirmed wait
    b.worker.saves.save(b.saves(list(range(8)), range(2, 4)))
    served.set("b")
    b.worker.settle(1, False)
    assert b.worker.loads.take_arrived() == {"r"} and b.worker.loads.take_invalid_blocks() == {10, 11, 12, 13}
    go.set()
    b.drain()
    report = b.worker.report(1)
    assert report.changed == {0} and report.unsaved >= {*b.digests[2:4]}
    b.worker.settle(2, False)
    assert not b.worker.report(2).changed, "it is said once"
    b.worker.saves.save(b.saves([0, 1], range(1)))
    b.load_now([b.load([10, 11], 0, CHUNK)])
    assert b.worker.loads.take_invalid_blocks() == {10, 11} and b.store.entries == before
    b.worker.settle(3, True)
    (seen,) = b.worker.report(3).seen
    assert (seen.step, seen.rank) == (3, 0) and None is not seen.first != seen.now is not None
    b.load_now([b.load([10, 11], 0, CHUNK)])
    assert not b.worker.loads.take_invalid_blocks()


OLD, NEW = b"an old secret, 16+", b"a new secret, 16+"


@pytest.mark.parametrize("place", ["tenant", "digest", "rank", "another secret", "no tag"])
def test_a_tagged_entry_does_not_decode_in_anothers_place(bench: Callable[..., Bench], place: str) -> None:
    """Who can write to the store and send a prompt has a blob with a good tag: the server signs that of the prompt.

    One without our tag, too, is deleted: nobody else writes under keys that end in the id of our secret.
    """
    b = bench(codec={"key": OLD})
    b.store_all(1)
    attacker, digest, rank = {
        "tenant": ("attacker", b.digests[0], 0),
        "digest": (TENANT, b.digests[5], 0),  # another prefix, model or adapter: they are all in the digest
        "rank": (TENANT, b.digests[0], 1),
    }.get(place, (TENANT, b.digests[0], 0))
    key = {"another secret": NEW, "no tag": None}.get(place, OLD)
    chunk = b.sequence.slice(CHUNK, 2 * CHUNK)
    foreign = Codec(b.codec.profile, "lossless", key=key).encode(
        KVChunk(chunk.keys, chunk.values, LAYOUT),
        associated_data=store_key(attacker, digest, rank).encode() if key else b"",
    )
    b.store.entries[b.key(0)] = foreign
    b.load_now([b.load([10, 11], 0, CHUNK)])
    assert b.worker.loads.take_invalid_blocks() == {10, 11}
    assert b.cache.keys[0][10].isnan().all(), "nothing of it reached the pages"
    assert b.key(0) not in b.store.entries, "it would fail for ever"


@pytest.mark.parametrize("key", [NEW, None])
def test_replicas_with_other_secrets_leave_each_others_entries_alone(
    bench: Callable[..., Bench], key: bytes | None
) -> None:
    first = bench(codec={"key": OLD})
    first.store_all(2)
    second = bench(codec={"key": key}, store=first.store, sequence=first.sequence)
    assert not set(map(first.key, range(2))) & set(map(second.key, range(2)))
    second.load_now([second.load([10, 11, 12, 13], 0, 2 * CHUNK)])
    assert second.worker.loads.take_invalid_blocks() == {10, 11, 12, 13}, "misses"
    assert set(first.store.entries) == set(map(first.key, range(2))) and "delete" not in first.store.calls
    second.store_all(2)
    assert len(first.store.entries) == 4, "it keeps its own beside them"
    for b in (first, second):
        b.load_now([b.load([10, 11, 12, 13], 0, 2 * CHUNK)])
        assert b.held([10, 11, 12, 13], 0, 2 * CHUNK)
    first.store.entries[first.key(0)] = first.store.entries[first.key(0)][:-1] + b"?"
    both = bench(codec={"key": [NEW, OLD]}, store=first.store, sequence=first.sequence)
    both.store.entries.pop(both.key(0), None)
    both.load_now([both.load([10, 11], 0, CHUNK)])
    assert both.worker.loads.take_invalid_blocks() == {10, 11}
    assert first.key(0) not in both.store.entries, "what is damaged is deleted under its own key"


def test_a_load_that_never_got_a_thread_is_given_up(bench: Callable[..., Bench]) -> None:
    """Nor does one write afterwards that the store has kept waiting: the blocks are the engine's again."""
    b = bench(load_timeout=0.2)
    b.store_all()
    go, names = hold(b.store, "get"), [str(number) for number in range(b.worker._pools.loaders.threads + 1)]
    b.worker.loads.start([b.load([2 * at, 2 * at + 1], 0, CHUNK, name) for at, name in enumerate(names)])
    b.wait(*names)
    assert b.worker.loads.take_invalid_blocks() == set(range(2 * len(names)))
    assert b.counts()["failures{timeout}"] == len(names)
    go.set()
    assert b.worker._pools.loaders.dismiss(30)
    assert b.cache.keys[0].isnan().all()
    assert b.worker.loads.take_arrived() == set() and b.worker.loads.take_invalid_blocks() == set()
    report = b.worker.report(1)
    assert report.failed == set(names)
    assert report.causes == dict.fromkeys(names, "it took longer than load_timeout")


def test_a_load_that_queues_does_not_use_up_its_time(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    b, now, gate = bench(load_timeout=30), [100.0], threading.Semaphore(0)
    b.store_all()
    monkeypatch.setattr(worker_load, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def passing(operation: str) -> None:
        if operation == "get":
            gate.acquire()

    b.store.before = passing
    threads = b.worker._pools.loaders.threads
    loads = [b.load([2 * at, 2 * at + 1], 0, CHUNK, str(at)) for at in range(threads + 2)]
    b.worker.loads.start(loads)
    jobs = dict(b.worker.loads._jobs)
    next_one, last = jobs[str(threads)], jobs[str(threads + 1)]
    wait_until(lambda: sum(job.started > 0 for job in jobs.values()) == threads, "all threads have a load")
    now[0] = 125.0
    gate.release()
    wait_until(lambda: next_one.started == 125.0, "a thread has the next load")
    now[0] = 140.0
    b.wait(*map(str, range(threads)))
    assert b.counts()["failures{timeout}"] == threads - 1, "40 seconds of work each"
    assert not next_one.over and not last.over, "15 seconds of work, and none"
    gate.release(100)
    b.wait(str(threads), str(threads + 1))
    assert b.held(loads[-1].blocks, 0, CHUNK) and b.held(loads[-2].blocks, 0, CHUNK)


def test_a_step_is_encoded_in_one_go_by_each_thread(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(threads=2)
    calls: list[list[int]] = []
    encode = b.codec.encode_parts

    def counted(chunks: PagedChunks, **more: Any) -> list[tuple[bytes, ...]]:
        calls.append([start // CHUNK for start in chunks.starts])
        return encode(chunks, **more)

    monkeypatch.setattr(b.codec, "encode_parts", counted)
    blocks = [9, 2, 5, 0, 7, 11, 1, 3, 8, 4]
    b.fill(blocks, 5 * CHUNK)
    b.worker.saves.save(b.saves(blocks, range(5)))
    b.drain()
    assert sorted(calls) == [[0, 2, 4], [1, 3]]


def test_a_write_that_hangs_holds_up_none_of_its_batch(bench: Callable[..., Bench]) -> None:
    b = bench(threads=2)
    go = hold(b.store, "put", once=True)
    blocks = list(range(8))
    b.fill(blocks, 4 * CHUNK)
    b.worker.saves.save(b.saves(blocks, range(4)))
    wait_until(lambda: len(b.worker.saves._sizes) == 1, "all but one are stored")
    assert len(b.store.entries) == 3 and go.begun.is_set()
    waiting = (b.worker.report(1).metrics or {})["pending_bytes|"]
    assert 0 < waiting < CHUNK * LAYOUT.bytes_per_token, "what is not written still counts: its blob"
    go.set()
    b.drain()
    assert len(b.store.entries) == 4
    assert [(b.worker.report(step).metrics or {})["pending_bytes|"] for step in (2, 3)] == [0, 0], "in every report"


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (PagedCache, "copy", MemoryError("none left")),
        (Codec, "encode_parts", RuntimeError("a bug")),
        (DictStore, "put", StoreError("no space left")),
    ],
)
def test_what_cannot_be_copied_encoded_or_put_is_reported_and_the_engine_goes_on(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: type,
    name: str, error: Exception,
) -> None:  # fmt: skip
    b = bench()
    b.fill([0, 1, 2, 3], 2 * CHUNK)

    def fails(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        b.worker.saves.save(b.saves([0, 1, 2, 3], range(2)))
        b.drain()
    assert b.worker.report(1).unsaved == set(b.digests[:2]) and b.worker.saves._pending == 0
    assert b.counts()["failures{store}" if name == "put" else "failures{encode}"] == 2
    assert ("Traceback" in caplog.text) == isinstance(error, RuntimeError), "a bug is told with where it is"
    b.worker.saves.save(b.saves([0, 1, 2, 3], range(2)))
    b.drain()
    assert len(b.store.entries) == 2


@pytest.mark.parametrize("ends", ["raises", "is heard to begin", "is not heard of"])
def test_nothing_is_stored_of_a_step_whose_forward_raised_nor_of_later_ones(
    ends: str, bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """With asynchronous scheduling there are later ones. The end of a request, too, may be copied then.

    vLLM's second model runner calls nothing any more after an error. One that the engine's caller handles meanwhile is
    none of the step.
    """
    b, blocks = bench(), list(range(16))
    b.fill(blocks, 8 * CHUNK)
    try:
        raise ValueError("of the caller")
    except ValueError:
        b.step(1, b.saves(blocks, range(2)))
        b.drain()
        if ends == "raises":
            with pytest.raises(SystemExit):
                b.step(2, [*b.saves(blocks, range(2, 4)), b.save_segment(blocks, 5, 20)], error=SystemExit(1))
    if ends == "is heard to begin":
        b.worker.begin_step(2, 0)
    b.step(3, b.saves(blocks, range(4, 6)), [b.save_tail(blocks, 6 * CHUNK + BLOCK)])
    b.step(4, b.saves(blocks, range(6, 8)))
    b.drain()
    assert set(b.store.entries) == {b.key(0), b.key(1)}
    lost = 8 if ends == "raises" else 5
    unsaved = b.worker.report(4).unsaved
    assert set(b.digests[4:]) < unsaved and len(unsaved) == lost and not set(b.digests[:2]) & unsaved
    assert b.counts()["stores_skipped{failed}"] == lost
    assert caplog.text.count("step 2 of the engine has failed") == 1


def test_several_ranks_store_only_what_all_of_them_have_computed(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    b, blocks = bench(shards=2), list(range(16))
    b.fill(blocks, 8 * CHUNK)
    b.step(1, b.saves(blocks, range(2)))
    b.step(2, b.saves(blocks, range(2, 4)))
    assert not b.store.entries and b.worker.saves.queued()[0] == 4
    poison(b.cache)
    b.step(3, b.saves(blocks, range(4, 5)), confirmed=1)
    wait_until(lambda: len(b.store.entries) == 2, "the first step is stored")
    b.load_now([b.load([20, 21, 22, 23], 0, 2 * CHUNK)])
    assert b.held([20, 21, 22, 23], 0, 2 * CHUNK)
    b.fill(blocks, 8 * CHUNK)
    # The tail of a request that ended with the third step waits for no other.
    b.step(4, b.saves(blocks, range(5, 6)), [b.save_tail(blocks, 6 * CHUNK + BLOCK)], confirmed=3)
    wait_until(lambda: len(b.store.entries) == 6, "three steps and a tail are stored")
    b.worker.close()
    assert set(b.store.entries) > {b.key(chunk) for chunk in range(5)} and b.key(5) not in b.store.entries
    assert b.counts()["stores_skipped{stopped}"] == 1 and "other ranks may not have computed them" in caplog.text


def _in_time(work: Callable[[], object], seconds: float = 10) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


@pytest.mark.parametrize("hanging", ["contains", "put"])
def test_close_is_bounded_and_says_what_is_lost(
    bench: Callable[..., Bench], hanging: str, caplog: pytest.LogCaptureFixture
) -> None:
    b = bench(close_timeout=0.3, threads=1)
    blocks = list(range(8))
    b.fill(blocks, 4 * CHUNK)
    go = hold(b.store, hanging)
    b.worker.saves.save(b.saves(blocks, range(4)))
    go.reached()
    with caplog.at_level("INFO", logger="cuvee"):
        _in_time(b.worker.close)
    assert b.counts()["stores_skipped{stopped}"] == 4
    assert "4 chunks waited to be compressed" in caplog.text and "close_timeout=0.3" in caplog.text
    assert "stores_skipped stopped 4" in caplog.text, "in the summary, too"
    go.set()
    _in_time(b.worker.close)


def test_what_a_store_could_not_write_behind_is_lost(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuvee.integrations.vllm.worker.side._FLUSH_SECONDS", 0.1)
    b = bench(close_timeout=0.3)
    slow = DictStore()
    go = hold(slow, "put")
    tiers = TieredStore([b.store, slow])
    b.worker._state.store = tiers
    blocks = list(range(8))
    b.fill(blocks, 4 * CHUNK)
    b.worker.saves.save(b.saves(blocks, range(4)))
    b.drain()
    go.reached()
    _in_time(b.worker.close)
    assert b.counts()["stores_skipped{stopped}"] == 4
    assert "4 to be written" in caplog.text
    go.set()
    tiers.close()
    assert len(slow.entries) == 4


def test_close_does_not_wait_for_what_decodes_for_ever(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stores what waits meanwhile."""
    monkeypatch.setattr("cuvee.integrations.vllm.worker.side._FLUSH_SECONDS", 0.1)
    b = bench(close_timeout=1.0)
    go, begun = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        go.wait(60)

    b.worker._pools.coders.submit(busy)
    assert begun.wait(10)
    b.fill([0, 1], CHUNK)
    held = hold(b.store, "put")
    b.worker.saves.save(b.saves([0, 1], range(1)))
    held.reached()
    held.set()
    _in_time(b.worker.close)
    go.set()
    assert b.key(0) in b.store.entries and "stores_skipped{stopped}" not in b.counts()


def test_close_does_not_wait_for_loads(bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    b = bench(threads=1)
    b.store_all()
    go = hold(b.store, "get")
    b.worker.loads.start([b.load([1, 2], 0, CHUNK, "a"), b.load([3, 4], 0, CHUNK, "b")])
    go.reached()
    _in_time(b.worker.close)
    go.set()
    assert b.worker._pools.loaders.dismiss(30) and b.worker._pools.fetchers.dismiss(30)
    assert b.cache.keys[0][1].isnan().all(), "the engine may have freed its pages"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_calls_of_a_store_wait_beside_each_other_whatever_the_threads_that_code(bench: Callable[..., Bench]) -> None:
    """A put that waits 60 ms for its answer would let two threads write 33 chunks a second."""
    b = bench(threads=1)
    together = threading.Barrier(3)

    def meet(operation: str) -> None:
        if operation in ("put", "get"):
            together.wait(10)

    b.store.before = meet
    b.store_all(chunks=3)
    assert set(b.store.entries) == {b.key(chunk) for chunk in range(3)}
    b.worker.loads.start([b.load([6 + 2 * at, 7 + 2 * at], 0, CHUNK, f"r{at}") for at in range(3)])
    b.wait("r0", "r1", "r2")
    assert b.counts()["loaded_tokens"] == 3 * CHUNK and not b.worker.loads.take_invalid_blocks()


def test_no_more_loads_decode_at_a_time_than_threads_code(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = 2
    b = bench(threads=threads)
    b.store_all(chunks=1)
    coding = b.worker._state.pages.io
    restore, changed, now, most = coding.restore, threading.Condition(), 0, 0

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal now, most
        with changed:
            now, most = now + 1, max(most, now + 1)
            changed.notify_all()
            changed.wait_for(lambda: most >= threads, 10)
            changed.wait(0.02)  # for one more than there may be
        try:
            return restore(*given, **more)
        finally:
            with changed:
                now -= 1

    monkeypatch.setattr(coding, "restore", counted)
    b.worker.loads.start([b.load([2 * at, 2 * at + 1], 0, CHUNK, f"r{at}") for at in range(6)])
    b.wait(*(f"r{at}" for at in range(6)))
    assert most == threads and b.counts()["loaded_tokens"] == 6 * CHUNK


def test_saves_and_loads_go_on_after_some_that_hang(bench: Callable[..., Bench]) -> None:
    b = bench(threads=1, load_timeout=0.5)
    b.worker._state.store = guarded = GuardedStore(b.store)
    guarded.first_backoff = guarded.max_backoff = 1e-3
    blocks = list(range(16))
    b.fill(blocks, 8 * CHUNK)
    go = hold(b.store, "put", once=True)
    b.worker.saves.save(b.saves(blocks, range(1)))
    go.reached()
    threading.Event().wait(0.6)
    b.worker.saves.save(b.saves(blocks, range(1, 3)))
    wait_until(lambda: not b.worker.saves._sizes.keys() & set(b.digests[1:3]), "chunks are stored")
    assert b.worker._state.store.counters()["memory"].errors == 1, "the one that hangs, once"
    b.worker.saves.save(b.saves(blocks, range(3, 5)))
    wait_until(lambda: not b.worker.saves._sizes.keys() & set(b.digests[3:5]), "chunks are stored")
    # The circuit of writing has opened for it; reading has not.
    assert b.key(0) not in b.store.entries
    go.set()


def test_a_store_that_is_down_is_not_asked_until_it_may_be_back(bench: Callable[..., Bench]) -> None:
    b = bench()
    later = 0.0
    b.worker._state.store = GuardedStore(b.store, lambda: later)

    def fail(operation: str) -> None:
        if operation == "put":
            raise StoreError("down")

    b.store.before = fail
    blocks = list(range(16))
    b.fill(blocks, 8 * CHUNK)
    b.worker.saves.save(b.saves(blocks, range(1)))
    b.drain()
    calls = len(b.store.calls)
    b.worker.saves.save(b.saves(blocks, range(1, 4)))
    b.drain()
    assert len(b.store.calls) == calls and b.counts()["stores_skipped{down}"] == 3
    assert b.worker.report(1).unsaved == set(b.digests[:4]), "they are to be stored again"
    later = 60.0
    b.store.before = lambda operation: None
    for chunks in (range(1), range(4)):  # the first put is the probe, and skips those beside it
        b.worker.saves.save(b.saves(blocks, chunks))
        b.drain()
    assert {b.key(chunk) for chunk in range(4)} == {*b.store.entries}


def test_what_all_ranks_hold_is_stored_by_the_first_and_loaded_by_all(bench: Callable[..., Bench]) -> None:
    store, given = DictStore(), {"shards": 2, "setup": {"replicated": True}}
    first = bench(rank=0, store=store, **given)
    second = bench(rank=1, store=store, sequence=first.sequence, **given)
    blocks = list(range(16))
    for rank in (second, first):
        rank.fill(blocks, 8 * CHUNK)
        rank.step(1, rank.saves(blocks, range(8)))
        rank.step(2, [], confirmed=1)
        rank.drain()
        assert {*store.entries} == (set() if rank is second else {first.key(chunk) for chunk in range(8)})
    assert not any(rank.worker.report(2).unsaved for rank in (first, second))
    poison(second.cache)
    second.load_now([second.load([4, 5], 0, CHUNK)])
    assert second.held([4, 5], 0, CHUNK)


@pytest.mark.parametrize(("left", "free", "chunks"), [(0.08, 100, 3), (1.0, 4, 2), (1.0, 100, 4), (0.0, 0, 4)])
def test_copies_have_a_budget_and_leave_the_engine_its_memory_on_a_device(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    left: float, free: int, chunks: int,
) -> None:  # fmt: skip
    """They take half of what it leaves free, by its own account and by the driver's, in chunks of 80 in all; none is
    left where there is no device.
    """
    size = CHUNK * LAYOUT.bytes_per_token
    memory = (free * size, 80 * size) if left else None
    monkeypatch.setattr("cuvee.integrations.vllm.worker.saves.memory_of", lambda device: memory)
    b = bench(max_pending_gb=4.5 * size / 1e9, setup={"left": left})
    go = hold(b.store)
    blocks = list(range(16))
    b.fill(blocks, 8 * CHUNK)
    b.worker.saves.save(b.saves(blocks, range(6)))
    assert b.worker.saves.queued()[0] == chunks and b.counts()["stores_skipped{full}"] == 6 - chunks
    assert ("lower --gpu-memory-utilization" in caplog.text) == (chunks < 4)
    assert caplog.text.count("fill max_pending_gb") == 1
    go.set()
    b.drain()
    assert b.worker.report(1).unsaved == set(b.digests[chunks:6])
    b.worker.saves.save(b.saves(blocks, range(chunks, 6)))
    b.drain()
    assert len(b.store.entries) == min(2 * chunks, 6), "the budget is free again"


def test_attaching_compiles_both_ways(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba compiles at the first call, which takes seconds: no request may be the one that waits for it."""
    stages: list[str] = []

    def spied(name: str) -> Callable[..., Any]:
        work = getattr(LosslessScheme, name)

        def spy(*arguments: Any) -> Any:
            sections = arguments[2] if name == "encode" else arguments[1]
            stages.extend([name] * len(sections))
            return work(*arguments)

        return spy

    for name in ("encode", "decode"):
        monkeypatch.setattr(LosslessScheme, name, spied(name))
    b = bench()
    assert stages == ["encode"] * 3 + ["decode"] * 3, "each of the layers"
    assert all(tensor.isnan().all() for tensor in b.cache.keys + b.cache.values)


def test_reports_of_ranks_add_up() -> None:
    load, blend = Restored("load", 16, 0, 0.5), Restored("blend", 5, 3, 9)
    one = Report([1], ["c"], [load], {"a"}, {b"x"}, None, placed=["a"])
    one.add(Report([1], ["d"], [blend], {"b"}, {b"y"}, None, placed=["b", "a"]))
    assert (one.steps, one.ended, one.restored) == ([1, 1], ["c", "d"], [load, blend])
    assert (one.failed, one.unsaved) == ({"a", "b"}, {b"x", b"y"})
    assert sorted(one.placed) == ["a", "a", "b"]
    one.add(Report(causes={"a": "gone"}))
    one.add(Report(changed={3}, delivered=[Delivery("r", 0, (), (), True)], step_seconds={1: 0.5}))
    one.add(Report(step_seconds={1: 0.2, 2: 0.1}, metrics={"raw_bytes|": 2}))
    one.add(Report(metrics={"raw_bytes|": 3}))
    assert (one.changed, len(one.delivered), one.step_seconds) == ({3}, 1, {1: 0.5, 2: 0.1})
    assert one.metrics == {"raw_bytes|": 5} and one.causes == {"a": "gone"}


def test_steps_are_timed_once_and_failed_ones_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now, cpu = [10.0], torch.device("cpu")
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    times = StepTimes()
    for step, seconds, failed in ((1, 0.5, False), (2, 0.25, True), (3, 2.0, False)):
        times.begin(step, cpu)
        now[0] += seconds
        times.end(cpu, failed)
        now[0] += 5.0  # until the next step begins
    times.end(cpu, failed=False)  # none has begun
    assert times.take() == {1: 0.5, 3: 2.0} and times.take() == {}


def test_a_worker_that_lets_go_of_pages_ends_its_loads_and_keeps_nothing(bench: Callable[..., Bench]) -> None:
    """As before vLLM 0.33 sleeps: what waits to be stored is stored, and other pages serve afterwards."""
    b = bench()
    b.store_all(4)
    go = hold(b.store, "get", "put")
    b.fill([20, 21], CHUNK)
    b.worker.saves.save([Save(TENANT, replace(b.chunk(5), start=0).within([[20, 21]], [BLOCK]))])
    b.worker.loads.start([b.load([1, 2, 3, 4], 0, 2 * CHUNK)])
    old = [weakref.ref(tensor) for tensor in b.cache.keys + b.cache.values]
    for _ in range(2):
        b.worker.detach()
    assert not b.worker.attached
    assert b.worker.loads.take_arrived() == {"r"} and b.worker.loads.take_invalid_blocks() == {1, 2, 3, 4}
    pages = b.cache.keys[0].clone()
    held, b.cache = b.cache.keys[0], make_pages(LAYOUT, torch.device("cpu"), permuted=False)
    go.set()
    b.drain()
    assert b.counts()["stored{chunk}"] == 5
    assert torch.equal(held.nan_to_num(9), pages.nan_to_num(9)), "no load writes any more"
    del held
    gc.collect()
    assert [ref() for ref in old] == [None] * len(old)
    b.worker.attach(b.cache)
    b.load_now([b.load([7, 8, 9, 10], 0, 2 * CHUNK)])
    assert b.held([7, 8, 9, 10], 0, 2 * CHUNK) and not b.worker.loads.take_invalid_blocks()
