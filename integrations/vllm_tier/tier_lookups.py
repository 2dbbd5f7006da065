"""`TierLookups`: finds out on threads which chunks are stored, and answers vLLM's scheduler at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cuvee.integrations.stores.threads import ThreadPool

_THREADS = 4  # that wait for the store


@dataclass(slots=True, eq=False)
class _Asked:
    """A chunk that requests asked for: what is known, since when the store is asked, and by which requests.

    A thread sets `answer` while the scheduler reads it. If both set it at once, either answer will do: the worst is a
    chunk that is computed, or one whose load fails.
    """

    answer: bool | None = None
    since: float | None = None
    requests: set[str] = field(default_factory=set)


class TierLookups:
    """Answers by chunk, for as long as a request that asked for it lives. For one scheduler's thread.

    The chunks of a step are asked for together, in one call of `stored`.

    Args:
        stored: tells which chunks are stored; called on threads.
        timeout: seconds after which a chunk counts as not stored.
        late: called with a number of chunks for which that happened.
        clock: monotonic clock, in seconds.

    Example:
        >>> lookups = TierLookups(lambda names: [name == b"a" for name in names], timeout=2.0, late=print)
        >>> lookups.find(b"a", "request"), lookups.find(b"b", "request")
        (None, None)
        >>> lookups.flush(), lookups.close(10.0)
        (None, None)
        >>> lookups.find(b"a", "request"), lookups.find(b"b", "request")
        (True, False)
    """

    def __init__(
        self,
        stored: Callable[[Sequence[bytes]], Sequence[bool]],
        *,
        timeout: float,
        late: Callable[[int], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stored, self._timeout, self._late, self._clock = stored, timeout, late, clock
        self._pool = ThreadPool(_THREADS, "cuvee-lookup", timeout)
        self._asked: dict[bytes, _Asked] = {}
        self._of_request: dict[str, list[bytes]] = {}
        self._new: list[bytes] = []

    def __len__(self) -> int:
        """Return how many chunks are known or asked for."""
        return len(self._asked)

    def find(self, name: bytes, request: str) -> bool | None:
        """Return whether a chunk is stored; None if that is not known yet.

        Args:
            name: of the chunk.
            request: id of the request that asks.
        """
        asked = self._asked.get(name)
        if asked is None:
            asked = self._asked[name] = _Asked()
            self._new.append(name)
        if request not in asked.requests:
            asked.requests.add(request)
            self._of_request.setdefault(request, []).append(name)
        if asked.answer is None and asked.since is not None and self._clock() - asked.since > self._timeout:
            asked.answer = False
            self._late(1)
        return asked.answer

    def flush(self) -> None:
        """Ask the store for the chunks that are new since the last call."""
        new = {name: asked for name in self._new if (asked := self._asked.get(name)) and asked.since is None}
        self._new = []
        if not new:
            return
        now = self._clock()
        for asked in new.values():
            asked.since = now
        try:
            self._pool.submit(self._ask, new, now)
        except RuntimeError:  # it was closed, or no thread can be started
            self._answer(new, [False] * len(new))

    def correct(self, names: Sequence[bytes], *, stored: bool) -> None:
        """Replace the answers for chunks that were just stored, or could not be loaded."""
        for name in names:
            asked = self._asked.get(name)
            if asked is not None:
                asked.answer = stored

    def forget(self, request: str) -> None:
        """Forget a request, and chunks that no other request asked for."""
        for name in self._of_request.pop(request, ()):
            asked = self._asked[name]
            asked.requests.discard(request)
            if not asked.requests:
                del self._asked[name]

    def close(self, timeout: float) -> None:
        """Wait at most so many seconds for the lookups under way. Chunks asked for later are not stored."""
        self._pool.dismiss(timeout)

    def _ask(self, asked: dict[bytes, _Asked], since: float) -> None:
        found: Sequence[bool] = [False] * len(asked)
        try:
            if self._clock() - since <= self._timeout:  # later, the scheduler has given them up
                found = self._stored(list(asked))
        finally:
            self._answer(asked, found)

    @staticmethod
    def _answer(asked: dict[bytes, _Asked], found: Sequence[bool]) -> None:
        for each, there in zip(asked.values(), found, strict=True):
            if each.answer is None:
                each.answer = there
