"""Lookups: ask the store for entries in the background, in calls of bounded size.

A client chooses how many entries its prompt asks for. So a lookup takes several calls: a single call could take as long
as a store that hangs, and the two could not be told apart. A caller can use the answers that came in time, and cancel
the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Generic, TypeVar

from cuvee.integrations.stores.threads import ThreadPool

if TYPE_CHECKING:  # it imports this module
    from cuvee.integrations.vllm.scheduler_state import SchedulerState

T = TypeVar("T")

CALL_KEYS = 64  # keys per call of the store; most prefixes end early, and an object store takes 16 at once
THREADS = 6


class Lookup(Generic[T]):
    """A lookup under way.

    Attributes:
        answer: to come; cancel it to ask nothing more.
        asked: when it began.
        tokens: of the prompt that it asks about.
    """

    def __init__(self, lookups: Lookups, tenant: str, nothing: T, tokens: int) -> None:
        self.answer: Future[T] = Future()
        self.asked, self.tokens = lookups.state.clock(), tokens
        self._lookups, self._tenant, self._known = lookups, tenant, nothing
        self._lock = threading.Lock()  # of the answer, which the asking and the waiting thread may both set

    def settle(self) -> T:
        """Take what is known now as the answer, so that nothing more is asked, and return it.

        Raises:
            Exception: the error of the lookup, or CancelledError if the answer was cancelled.
        """
        self._answer(lambda: self.answer.set_result(self._known))
        return self.answer.result()

    def contains(self, digests: Sequence[bytes], known: T) -> list[bool]:
        """Return whether the store has every rank's part of each entry, with a tag of any accepted secret; `known` is
        the lookup's answer if it is settled before that.

        Raises:
            CancelledError: nobody waits for the answer any more.
            Exception: that of the store.
        """
        self._known = known
        there: list[bool] = []
        state, size = self._lookups.state, self._lookups.batch
        ranks = list(range(state.shards))
        for first in range(0, len(digests), size):
            if self.answer.done():
                raise CancelledError
            batch = digests[first : first + size]
            parts = [digest for digest in batch for _ in ranks]
            found = state.keys.find(self._tenant, parts, lambda _, keys: state.store.contains(keys), ranks * len(batch))
            held = [is_there for _, is_there in found]
            there += [all(held[at : at + state.shards]) for at in range(0, len(held), state.shards)]
        return there

    def run(self, find: Callable[[Lookup[T]], T]) -> None:
        """Set the answer to what `find` returns, which asks by `contains`."""
        try:
            answer = find(self)
        except CancelledError:
            return
        except Exception as error:
            told = error
            self._answer(lambda: self.answer.set_exception(told))
        else:
            self._answer(lambda: self.answer.set_result(answer))

    def _answer(self, give: Callable[[], None]) -> None:
        with self._lock:
            if not self.answer.done():
                give()


class Lookups:
    """Asks the store for all requests of an engine. Thread-safe.

    Args:
        pool: threads that wait for the store, one per lookup.
        state: of the scheduler's side.
    """

    def __init__(self, pool: ThreadPool, state: SchedulerState) -> None:
        self._pool, self.state = pool, state

    @property
    def batch(self) -> int:
        """Most digests per call of the store, at least 1. Each call asks for all ranks' parts."""
        return max(CALL_KEYS // self.state.shards, 1)

    def begin(self, tenant: str, find: Callable[[Lookup[T]], T], nothing: T, tokens: int) -> Lookup[T]:
        """Ask in the background about a prompt of so many tokens; `nothing` is the answer while nothing is known.

        Raises:
            RuntimeError: the threads were dismissed, or none can be started.
        """
        lookup = Lookup(self, tenant, nothing, tokens)
        self._pool.submit(lookup.run, find)
        return lookup
