"""Lookups: ask the store for entries in the background, in calls of bounded size.

A client chooses how many entries its prompt asks for. So a lookup takes several calls: a single call could take as long
as a store that hangs, and the two could not be told apart. A caller can use the answers that came in time, and cancel
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Generic, TypeVar

from cuvee.integrations.vllm.scheduler.state import SchedulerState

T = TypeVar("T")

CALL_KEYS = 64  # keys per call of the store; most prefixes end early, and an object store takes 16 at once


class Lookup(Generic[T]):
    """A lookup, under way as soon as it is made.

    Args:
        state: of the scheduler's side.
        tenant: whose entries are asked for.
        find: returns the answer, and asks by `contains`. Runs in a thread.
        nothing: the answer while nothing is known.
        tokens: of the prompt that it asks about.

    Attributes:
        answer: of the thread.
        asked: when it began.
        tokens: as given.
        timed_out: whether the answer was not awaited: what was known by then is used.

    Raises:
        RuntimeError: the threads were dismissed, or none can be started.
    """

    def __init__(
        self, state: SchedulerState, tenant: str, find: Callable[[Lookup[T]], T], nothing: T, tokens: int
    ) -> None:
        self.asked, self.tokens, self.timed_out = state.clock(), tokens, False
        self._state, self._tenant, self._so_far = state, tenant, nothing
        self._cancelled = False
        self.answer: Future[T] = state.lookup_threads.submit(find, self)

    @property
    def over(self) -> bool:
        """Whether nothing more is awaited of it."""
        return self._cancelled or self.answer.done()

    def cancel(self) -> None:
        """Ask nothing more: nobody waits for the answer."""
        self._cancelled = True
        self.answer.cancel()

    def in_time(self) -> T | None:
        """Return the answer, or after `lookup_timeout` what is known by then; None: ask again in another step.

        Raises:
            Exception: the error of the lookup, or CancelledError if the answer was cancelled.
        """
        if self.timed_out:
            return self._so_far
        with self._state.waiting() as patience:
            pending = not wait([self.answer], patience).done
        if pending and self._state.clock() - self.asked <= self._state.options.lookup_timeout:
            return None
        if pending:
            self._state.overdue()
            self.timed_out = True
            self.cancel()
        return self._so_far if pending else self.answer.result()

    @property
    def batch(self) -> int:
        """Most digests per call of the store, at least 1. Each call asks for all ranks' parts."""
        return max(CALL_KEYS // len(self._state.holders), 1)

    def contains(self, digests: Sequence[bytes], so_far: T, guesses: int = 0) -> list[bool]:
        """Return whether the store has every rank's part of each entry, with a tag of any accepted secret.

        Args:
            digests: of the entries. Those that are not there count as misses.
            so_far: the lookup's answer if it is settled before that.
            guesses: how many of the last digests are one entry in several lengths; none of them counts as missing.

        Raises:
            CancelledError: nobody waits for the answer any more.
            Exception: that of the store.
        """
        there: list[bool] = []
        state, size = self._state, self.batch
        ranks = list(state.holders)
        for first in range(0, len(digests), size):
            if self._cancelled:
                raise CancelledError
            self._so_far = so_far
            batch = digests[first : first + size]
            parts = [digest for digest in batch for _ in ranks]
            found = state.keys.find(self._tenant, parts, state.store.contains, ranks * len(batch))
            held = [is_there for _, is_there in found]
            wanted = (len(digests) - guesses - first) * len(ranks)
            state.store.missed(held[: max(wanted, 0)].count(False))
            there += [all(held[at : at + len(ranks)]) for at in range(0, len(held), len(ranks))]
        return there
