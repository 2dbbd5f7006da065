"""Memory that threads use again."""

from __future__ import annotations

import threading

import numpy as np

from cuvee.codec.support.arena import MAX_CACHED, Arena


def test_a_buffer_is_used_again_and_grows() -> None:
    arena = Arena()
    first = arena.array("a", 100, np.float32)
    assert first.shape == (100,) and first.dtype == np.float32
    first[:] = 7
    again = arena.array("a", 50, np.float32)
    assert np.shares_memory(first, again) and again.shape == (50,) and (again == 7).all()
    assert np.shares_memory(first, arena.array("a", 200, np.uint16)), "whatever the type"
    assert not np.shares_memory(first, arena.array("b", 100, np.float32)), "a name of its own"
    larger = arena.array("a", 101, np.float32)
    assert larger.shape == (101,) and not np.shares_memory(first, larger)
    assert np.shares_memory(larger, arena.array("a", 100, np.float32)), "and stays large"
    assert arena.array("c", 0, np.int64).shape == (0,)


def test_a_large_buffer_is_not_kept() -> None:
    arena = Arena()
    kept = arena.array("a", 100, np.uint8)
    assert arena.array("a", MAX_CACHED + 1, np.uint8).shape == (MAX_CACHED + 1,)
    assert np.shares_memory(kept, arena.array("a", 100, np.uint8))


def test_every_thread_has_its_own() -> None:
    arena = Arena()
    mine = arena.array("a", 100, np.uint8)
    mine[:] = 1
    found: list[bool] = []

    def other() -> None:
        own = arena.array("a", 100, np.uint8)
        own[:] = 2
        found.append(np.shares_memory(mine, own))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [False] and (mine == 1).all()
