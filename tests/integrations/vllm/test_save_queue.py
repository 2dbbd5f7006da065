"""The order of what waits to be encoded, and what is dropped from it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cuvee.integrations.vllm.messages import Entry, Kind, Save
from cuvee.integrations.vllm.save_queue import CopiedSave, SaveQueue

NOTHING: Any = None


def save(kind: Kind, name: str, start: int = 0, request: str = "r", tenant: str = "t") -> Save:
    return Save(tenant, Entry(kind, name.encode(), start, 16), request=request)


def queue_of(*saves: Save) -> SaveQueue:
    queue = SaveQueue()
    for each in saves:
        queue.add(CopiedSave(each, NOTHING, NOTHING))
    return queue


def names(saves: list[Save]) -> list[str]:
    return [each.entry.digest.decode() for each in saves]


def test_chunks_come_first_in_order_of_their_prefix_and_tails_last() -> None:
    saves = [
        save("tail", "tail 1", 32),
        save("segment", "segment 1", 99),
        save("chunk", "third", 32),
        save("chunk", "first of a", 0),
        save("tail", "tail 2", 0),
        save("segment", "segment 2", 5),
        save("chunk", "second", 16),
        save("chunk", "first of b", 0),
    ]
    queue = queue_of(*saves)
    assert len(queue) == 8
    assert names([queue.take().save for _ in saves]) == [
        "first of a", "first of b", "second", "third", "segment 1", "segment 2", "tail 1", "tail 2",
    ]  # fmt: skip
    with pytest.raises(IndexError):
        queue.take()


def test_tails_are_dropped_from_the_end() -> None:
    queue = queue_of(save("tail", "old", 5), save("chunk", "chunk"), save("tail", "new", 0), save("segment", "segment"))
    assert names(queue.droppable()) == ["new", "old"]
    queue.remove({b"old", b"unknown"})
    assert names(queue.droppable()) == ["new"] and len(queue) == 3
    assert names([queue.take().save for _ in range(3)]) == ["chunk", "segment", "new"]


def test_a_chunk_supersedes_the_tail_of_its_own_request_and_place() -> None:
    tail = save("tail", "own", 32)
    queue = queue_of(
        save("tail", "another place", 16),
        save("tail", "another request's", 32, request="s"),
        save("tail", "another tenant's", 32, tenant="u"),
        save("tail", "of a request that ended", 32, request=""),
        save("segment", "segment", 32),
        save("chunk", "chunk", 32),
        tail,
    )
    assert queue.superseded_by(save("chunk", "whole", 32)) == [tail]
    assert queue.superseded_by(save("chunk", "whole", 32, request="")) == []
    assert queue.superseded_by(save("tail", "longer", 32)) == []
    assert queue.superseded_by(save("segment", "whole", 32)) == []


def test_many_entries_keep_their_order() -> None:
    draw = random.Random(3)
    starts = [draw.randrange(50) for _ in range(500)]
    queue = queue_of(*(save("chunk", str(at), start) for at, start in enumerate(starts)))
    taken = [int(queue.take().save.entry.digest) for _ in starts]
    assert taken == sorted(range(500), key=lambda at: (starts[at], at))
