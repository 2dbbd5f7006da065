"""Lookups answer at once, once per chunk and request, and give up in time. They need no vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from tests.integrations.stores.fake_clock import Clock

from cuvee.integrations.vllm_tier.tier_lookups import TierLookups


class Asked:
    """A store that is asked for chunks, and can be made to hang or fail."""

    def __init__(self, *stored: bytes) -> None:
        self.stored = set(stored)
        self.calls: list[list[bytes]] = []
        self.free = threading.Event()
        self.free.set()
        self.late = 0
        self.clock = Clock()
        self.lookups = TierLookups(self.ask, timeout=2.0, late=self.count, clock=self.clock)

    def ask(self, names: Sequence[bytes]) -> list[bool]:
        self.calls.append(list(names))
        self.free.wait(30)
        return [name in self.stored for name in names]

    def count(self, chunks: int) -> None:
        self.late += chunks


def test_chunks_of_a_step_are_asked_for_together_and_once() -> None:
    asked = Asked(b"a")
    lookups = asked.lookups
    for request in ("one", "two", "one"):
        assert [lookups.find(name, request) for name in (b"a", b"b")] == [None, None]
    lookups.flush()
    lookups.flush()
    lookups.close(10)
    assert asked.calls == [[b"a", b"b"]]
    assert [lookups.find(name, "three") for name in (b"a", b"b")] == [True, False]
    for request in ("one", "two", "three"):
        assert len(lookups) == 2
        lookups.forget(request)
    assert len(lookups) == 0
    lookups.forget("nobody")


def test_a_late_answer_is_a_miss_for_good() -> None:
    asked = Asked(b"a")
    asked.free.clear()
    asked.lookups.find(b"a", "one")
    asked.lookups.flush()
    asked.clock.now += 1.9
    assert asked.lookups.find(b"a", "one") is None
    asked.clock.now += 0.2
    assert asked.lookups.find(b"a", "one") is False and asked.late == 1
    asked.free.set()
    asked.lookups.close(10)
    assert asked.lookups.find(b"a", "one") is False and asked.late == 1


def test_a_request_that_ends_before_the_answer_leaves_nothing() -> None:
    asked = Asked(b"a")
    asked.lookups.find(b"a", "one")
    asked.lookups.forget("one")
    asked.lookups.flush()
    assert not asked.calls
    asked.free.clear()
    asked.lookups.find(b"a", "two")
    asked.lookups.flush()
    asked.lookups.forget("two")
    assert asked.lookups.find(b"a", "three") is None, "it is asked for anew"
    asked.free.set()
    asked.lookups.flush()
    asked.lookups.close(10)
    assert asked.lookups.find(b"a", "three") is True


def test_corrections_replace_answers_of_live_requests_only() -> None:
    asked = Asked(b"a")
    asked.lookups.find(b"a", "one")
    asked.lookups.flush()
    asked.lookups.correct([b"a", b"unknown"], stored=False)
    asked.lookups.close(10)
    assert asked.lookups.find(b"a", "one") is False and len(asked.lookups) == 1


def test_an_error_of_the_store_and_the_end_are_misses() -> None:
    asked = Asked()
    asked.stored = None  # type: ignore[assignment]  # asking it raises
    asked.lookups.find(b"a", "one")
    asked.lookups.flush()
    asked.lookups.close(10)
    assert asked.lookups.find(b"a", "one") is False
    asked.lookups.find(b"b", "one")
    asked.lookups.flush()
    assert asked.lookups.find(b"b", "one") is False


@pytest.mark.parametrize("waited", [1.0, 3.0])
def test_what_waited_too_long_for_a_thread_is_not_asked_for(waited: float) -> None:
    asked = Asked(*(bytes([number]) for number in range(9)))
    asked.free.clear()
    for number in range(9):  # more than there are threads
        asked.lookups.find(bytes([number]), "one")
        asked.lookups.flush()
    until = time.monotonic() + 30
    while len(asked.calls) < 4 and time.monotonic() < until:
        time.sleep(0.002)
    asked.clock.now += waited
    asked.free.set()
    asked.lookups.close(10)
    assert len(asked.calls) == (9 if waited < 2 else 4)
