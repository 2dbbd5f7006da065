"""What all adapters share: keys of entries, fetching ahead, and works in a row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from cuvee.codec.errors import CorruptError, CuveeError
from cuvee.integrations.core.chunk_io import BATCH, ChunkIO, fetch_ahead
from cuvee.integrations.core.entry_keys import EntryKeys
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.naming.identity import store_key

NEW, OLD = bytes([1] * 8), bytes([2] * 8)
DIGESTS = [bytes([number]) * 32 for number in range(3)]


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    made = ThreadPool(2, "test", 30)
    yield made
    made.dismiss(10)


def test_an_empty_entry_is_there_and_no_parts_are_not() -> None:
    """An empty blob is damaged, and is to be deleted under the key that has it."""
    keys = EntryKeys([NEW, OLD])
    assert keys.find("t", DIGESTS[:1], lambda names: [b""] * len(names)) == [(keys.written("t", DIGESTS[0]), b"")]
    for absent in (None, False, ()):
        (found,) = keys.find("t", DIGESTS[:1], lambda names, absent=absent: [absent] * len(names))  # type: ignore[misc]
        assert found == (keys.all("t", DIGESTS[0])[1], absent)


def test_tags_cover_tenant_digest_and_shard_but_no_secret() -> None:
    signed = EntryKeys([NEW, OLD], 3)
    assert signed.bound_to("t", DIGESTS[1]) == store_key("t", DIGESTS[1], 3).encode()
    assert EntryKeys([OLD], 3).bound_to("t", DIGESTS[1]) == signed.bound_to("t", DIGESTS[1])
    others = {
        EntryKeys([NEW], shard).bound_to(tenant, digest) for shard in (3, 4) for tenant in "tu" for digest in DIGESTS
    }
    assert len(others) == 12
    assert EntryKeys([]).bound_to("t", DIGESTS[1]) == b""
    assert EntryKeys([]).all("t", DIGESTS[1]) == [store_key("t", DIGESTS[1])]


def test_each_shard_has_its_own_entry() -> None:
    keys = EntryKeys([NEW])
    found = keys.find("t", [DIGESTS[0]] * 2, lambda names: names, [0, 7])
    assert [key for key, _ in found] == [store_key("t", DIGESTS[0], shard, NEW) for shard in (0, 7)]


def test_the_next_entries_are_asked_for_while_these_are_decoded(pool: ThreadPool) -> None:
    asked: list[list[int]] = []
    began = threading.Semaphore(0)

    def ask(numbers: Sequence[int]) -> list[int]:
        asked.append(list(numbers))
        began.release()
        return [2 * number for number in numbers]

    def answer(future: Future[list[int]]) -> list[int]:
        return future.result(30)

    total = 2 * BATCH + 1
    fetched = fetch_ahead(pool, ask, range(total), answer)
    first = next(fetched)
    assert first == (range(BATCH), [2 * number for number in range(BATCH)])
    assert began.acquire(timeout=30) and began.acquire(timeout=30), "the second batch is under way"
    assert not began.acquire(blocking=False), "and no more"
    assert [len(numbers) for numbers, _ in fetched] == [BATCH, 1]
    assert [number for each in asked for number in each] == list(range(total))
    assert list(fetch_ahead(pool, ask, range(0), answer)) == []


def test_no_more_is_asked_for_once_an_answer_is_late(pool: ThreadPool) -> None:
    asked: list[int] = []

    def late(_: Future[None]) -> None:
        raise TimeoutError

    fetched = fetch_ahead(pool, lambda numbers: asked.append(len(numbers)), range(3 * BATCH), late)
    with pytest.raises(TimeoutError):
        next(fetched)
    assert list(fetched) == [] and sum(asked) <= BATCH


def test_works_in_a_row_end_before_the_first_that_failed(pool: ThreadPool) -> None:
    io, ended = ChunkIO(None, pool), threading.Event()  # type: ignore[arg-type]

    def fail() -> int:
        raise CorruptError("damaged")

    def last() -> int:
        ended.wait(0.2)
        ended.set()
        return 3

    results, problem = io.in_a_row([lambda: 1, lambda: 2, fail, last])
    assert results == [1, 2] and isinstance(problem, CuveeError) and ended.is_set(), "it writes to the engine's pages"
    ended.clear()

    def bug() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        io.in_a_row([bug, last])
    assert ended.is_set()
    ended.clear()

    def interrupted() -> Iterator[Callable[[], int]]:
        yield last
        bug()

    with pytest.raises(ZeroDivisionError):
        io.in_a_row(interrupted())
    assert ended.is_set()
