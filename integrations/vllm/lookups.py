"""Lookups: ask the store for entries in the background, in calls of bounded size, for one tenant after the other.

    Lookups.begin --> tenant: lookup, lookup, … --+
                      tenant: lookup, …         --+--> a thread: one call of the store --> behind the tenant's others,
                      tenant: …                 --+                                        or the answer

A client chooses how many entries its prompt asks for. So a lookup takes several calls: a single call could take as long
as a store that hangs, and the two could not be told apart. After each call the next tenant has its turn, and within a
tenant the next lookup. A caller can use the answers that came in time, and cancel the rest.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cuvee.integrations.stores.threads import ThreadPool

T = TypeVar("T")

CALL_KEYS = 64  # keys per call of the store; most prefixes end early, and an object store takes 16 at once
THREADS = 6
THREADS_PER_TENANT = 4  # so that a tenant with slow calls leaves threads to the others


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """The next question of a lookup.

    Attributes:
        digests: of entries; the answer is whether each is there.
        known: answer of the whole lookup if this question is not answered in time.
    """

    digests: Sequence[bytes]
    known: T


Asking = Generator[Question[T], list[bool], T]
"""Yields one question after the other, and returns the lookup's answer. It runs in threads, one at a time."""


class Lookup(Generic[T]):
    """A lookup under way.

    Attributes:
        answer: to come; cancel it to ask nothing more.
    """

    def __init__(self, tenant: str, asking: Asking[T], nothing: T) -> None:
        self.answer: Future[T] = Future()
        self._tenant, self._asking, self._known = tenant, asking, nothing
        self._question: Question[T] | None = None
        self._there: list[bool] = []
        self._lock = threading.Lock()  # of the answer, which the asking and the waiting thread may both set

    def settle(self) -> T:
        """Take what is known now as the answer, so that nothing more is asked, and return it.

        Raises:
            Exception: the error of the lookup, or CancelledError if the answer was cancelled.
        """
        self._answer(lambda: self.answer.set_result(self._known))
        return self.answer.result()

    def step(self, contains: Callable[[str, Sequence[bytes]], list[bool]], most: int) -> None:
        """Ask the store once, for at most `most` entries; the answer is set if that was the last call."""
        try:
            try:
                question = self._next(lambda: next(self._asking)) if self._question is None else self._question
                first = len(self._there)
                self._there += contains(self._tenant, question.digests[first : first + most])
                if len(self._there) == len(question.digests):
                    self._next(lambda: self._asking.send(self._there))
            except StopIteration:
                raise
            except Exception as error:
                told = error
                self._next(lambda: self._asking.throw(told))
        except StopIteration as end:
            answer = end.value
            self._answer(lambda: self.answer.set_result(answer))
        except Exception as error:
            told = error
            self._answer(lambda: self.answer.set_exception(told))

    def _next(self, ask: Callable[[], Question[T]]) -> Question[T]:
        """Return the next question that needs the store."""
        question = ask()
        while not question.digests:
            question = self._asking.send([])
        self._question, self._known, self._there = question, question.known, []
        return question

    def _answer(self, give: Callable[[], None]) -> None:
        with self._lock:
            if not self.answer.done():
                give()


class Lookups:
    """Asks the store for all requests of an engine. Thread-safe.

    Args:
        pool: threads that wait for the store.
        contains: asks the store for digests of a tenant.
        shards: keys per digest.
        patience: seconds after which a call counts as stuck, and not against its tenant any more.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        pool: ThreadPool,
        contains: Callable[[str, Sequence[bytes]], list[bool]],
        shards: int,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._contains = contains
        self._shards = shards
        self._patience = patience
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[Lookup[Any]]] = OrderedDict()  # by tenant, the next one first
        self._calls: dict[str, list[float]] = {}  # when those under way began, by tenant
        self._unused = 0  # jobs that found only tenants with enough calls under way

    @property
    def batch(self) -> int:
        """Most digests per call of the store, at least 1. Each call asks for all ranks' parts."""
        return max(CALL_KEYS // self._shards, 1)

    def begin(self, tenant: str, asking: Asking[T], nothing: T) -> Lookup[T]:
        """Ask in the background; `nothing` is the answer while nothing is known.

        Raises:
            RuntimeError: the threads were dismissed, or none can be started.
        """
        lookup = Lookup(tenant, asking, nothing)
        self._wait(tenant, lookup)
        try:
            self._pool.submit(self._serve)
        except BaseException:
            lookup.answer.cancel()  # otherwise it would take a turn from a lookup that a request waits for
            raise
        return lookup

    def _wait(self, tenant: str, lookup: Lookup[Any]) -> None:
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(lookup)

    def _serve(self) -> None:
        """Make one call for the next lookup. A job makes only one call, or it would seem to be stuck."""
        with self._lock:
            turn = self._turn()
            if turn is None:
                self._unused += bool(self._waiting)
                return
        tenant, lookup, began = turn
        jobs = 0
        try:
            lookup.step(self._contains, self.batch)
            if not lookup.answer.done():
                self._wait(tenant, lookup)
                jobs = 1
        finally:
            with self._lock:
                self._calls[tenant].remove(began)
                if not self._calls[tenant]:
                    del self._calls[tenant]
                if self._unused:
                    self._unused -= 1
                    jobs += 1
        for done in range(jobs):
            try:
                self._pool.submit(self._serve)
            except Exception:  # the threads were dismissed, or none can be started
                with self._lock:
                    self._unused += jobs - done  # the next call that ends makes up for it
                with suppress(Exception):  # cancelled meanwhile
                    lookup.settle()
                return

    def _turn(self) -> tuple[str, Lookup[Any], float] | None:
        """Return the next lookup that is still wanted, of the next tenant that may call, and count its call."""
        now = self._clock()
        for tenant in list(self._waiting):
            lookups = self._waiting[tenant]
            while lookups and lookups[0].answer.done():
                lookups.popleft()
            if not lookups:
                del self._waiting[tenant]
                continue
            calls = self._calls.get(tenant, [])
            if sum(now - began <= self._patience for began in calls) >= THREADS_PER_TENANT:
                continue
            lookup = lookups.popleft()
            if lookups:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            self._calls.setdefault(tenant, []).append(now)
            return tenant, lookup, now
        return None
