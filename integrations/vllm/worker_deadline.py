"""Loads with a deadline, on one rank: fetch the parts that `integrations.loading` chooses, until they will do.

    choose --batch--> fetchers: store -> parts --+
       ^                                         |
       +---- the rates of tiers <----------------+--> `WorkerLoads`: parts -> pages

The engine computes what is not loaded.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

from cuvee.codec.errors import CuveeError
from cuvee.integrations.chunk_io import BATCH
from cuvee.integrations.costs import LinearCost, prefill_quantities
from cuvee.integrations.loading import HICCUP, Choice, RecentRates, choose
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.messages import Aim, Entry
from cuvee.integrations.vllm.worker_restore import Fetched, LoadJob, Restorer
from cuvee.integrations.vllm.worker_state import WorkerState
from cuvee.naming.part_keys import part_key

_DECODING = "decoding"
# What to expect before anything is measured: bytes per second of tiers, and tokens of parts that are decoded.
_RATES, _REMOTE = {"memory": 1e9, "disk": 3e8, _DECODING: 1e4}, 5e7
_REQUEST_SECONDS = 0.015  # of transfer that one request is for
_UNDER_WAY = 2  # requests at a time, so that the link is never idle
_WAKE_SECONDS = 0.02  # until the choice is made anew if nothing happens


@dataclass(frozen=True, slots=True)
class _Request:
    """A part of some entries that was asked for: the numbers of the entries, and that of the part."""

    at: Sequence[int]
    part: int
    tier: str
    nbytes: int
    sent: float
    answer: Future[tuple[list[Fetched], float]]

    def is_wanted(self, choice: Choice) -> bool:
        return self.at[0] < (choice.refined if self.part else choice.chunks)


class DeadlineLoads:
    """Fetches by deadlines, and keeps what that measures from one load to the next.

    Args:
        state: of the worker.
        fetchers: threads that wait for the store.
        restorer: reads entries.
    """

    def __init__(self, state: WorkerState, fetchers: ThreadPool, restorer: Restorer) -> None:
        self.state, self.fetchers, self.restorer = state, fetchers, restorer
        self.rates = RecentRates(_RATES, _REMOTE)

    def fetched(self, job: LoadJob, aim: Aim) -> Iterator[list[tuple[Entry, Fetched]]]:
        """Yield entries of a load, some at a time: those that are to be refined with their refinements, once these are
        there, and the others as their bases. What is not yielded until the model has to start is to be computed.

        Raises:
            CuveeError: the store lacks an entry.
            Exception: that of the store.
        """
        run, going_on = _Run(self, job, aim), True
        self.state.store.report_overdue("get_many", self.state.timeout)  # a request of an earlier load may still hang
        while not job.over and going_on:
            choice = run.choose(time.monotonic())
            run.ask(choice)
            going_on = any(request.is_wanted(choice) for request in run.requests)
            if going_on and wait([run.requests[0].answer], _WAKE_SECONDS).done:
                run.take()
            while batch := run.due(choice if going_on else replace(choice, refined=0)):
                begun = time.monotonic()
                yield batch
                tokens = sum(entry.tokens * len(fetched.parts) for entry, fetched in batch)
                self.rates.observe(_DECODING, tokens, time.monotonic() - begun)
        if missing := run.missing():
            raise CuveeError(f"{self.restorer.name(job.load.prefix[missing[0]])} is no longer in the store")
        job.as_planned = True


class _Run:
    """One load, on the thread that loads it."""

    def __init__(self, loads: DeadlineLoads, job: LoadJob, aim: Aim) -> None:
        self._loads, self._state, load = loads, loads.state, job.load
        self._tenant, self._entries, parts = load.tenant, load.prefix, self._state.parts
        keys = [self._state.keys.written(load.tenant, entry.digest) for entry in load.prefix]
        found = self._state.store.locate([part_key(key, number) for key in keys for number in range(parts)])
        self._tiers = [found[at : at + parts] for at in range(0, len(found), parts)]
        self._edges = list(accumulate((len(load.placed(entry)) for entry in load.prefix), initial=load.start))
        self._prefill, self._end = LinearCost(*aim.prefill), self._edges[-1] + aim.rest
        self._deadline = job.begun + aim.seconds
        self._held: list[Fetched | None] = [None] * len(keys)
        self._asked, self._decoded = [0] * len(keys), [0] * len(keys)  # parts of each entry
        self.requests: deque[_Request] = deque()
        self._answered = 0.0  # when the last one was

    def choose(self, now: float) -> Choice:
        """Return what to load."""
        rates, entries = self._loads.rates, self._entries
        decode = 1 / rates(_DECODING)  # of a token

        def seconds(part: int) -> list[float]:
            return [
                0.0 if part < asked or part == len(tiers)
                else max(self._size(at, part) / rates(tiers[part]), decode * entries[at].tokens)
                for at, (asked, tiers) in enumerate(zip(self._asked, self._tiers, strict=True))
            ]  # fmt: skip

        bases = seconds(0)
        for at in self.missing():
            bases[at] = math.inf
        there, pending = now, 0.0
        if self.requests:
            first = self.requests[0]
            rate, passed = rates(first.tier), now - max(first.sent, self._answered)
            late = passed > first.nbytes / rate + HICCUP
            left = sum(request.nbytes for request in self.requests) / rate - passed
            there += passed if late else max(left, 0.0)  # an answer that is late takes as long again
        for entry, asked, decoded in zip(entries, self._asked, self._decoded, strict=True):
            pending += decode * entry.tokens if asked and not decoded else 0.0
        # What has come is decoded meanwhile.
        ready = max(there + min(pending, decode * max(entry.tokens for entry in entries)), now + pending)
        loaded = sum(1 for _ in takewhile(lambda held: held and held.parts, self._held))
        return choose(self._deadline, self._edges, self._compute, now, ready, loaded, bases, seconds(1))

    def _compute(self, chunks: int) -> float:
        """Return the seconds to compute what follows so many chunks."""
        return self._prefill(*prefill_quantities(self._edges[chunks], self._end))

    def missing(self) -> list[int]:
        """Return the numbers of the entries that the store does not have."""
        return [at for at, held in enumerate(self._held) if held is not None and not held.parts]

    def ask(self, choice: Choice) -> None:
        """Ask for the next parts of a choice, so that the link is busy. No base waits for a refinement in the same
        request, which a store may not answer.
        """
        while len(self.requests) < _UNDER_WAY:
            bases = [at for at in range(choice.chunks) if not self._asked[at]]
            refinements = [at for at in range(choice.refined) if self._is_refinable(at)]
            if not bases and not refinements:
                return
            self._send(*((0, bases) if bases else (1, refinements)))

    def _is_refinable(self, at: int) -> bool:
        held = self._held[at]
        return held is not None and bool(held.parts) and self._asked[at] < len(self._tiers[at])

    def _send(self, part: int, several: Sequence[int]) -> None:
        """Ask for a part of the first of these entries, as many as one request is for."""
        loads, tier, nbytes = self._loads, self._tiers[several[0]][part], 0
        numbers: list[int] = []
        for number in several:
            if self._tiers[number][part] != tier or (numbers and nbytes >= _REQUEST_SECONDS * loads.rates(tier)):
                break
            numbers.append(number)
            nbytes += self._size(number, part)
            self._asked[number] = part + 1
        digests = [self._entries[number].digest for number in numbers]
        held = [self._held[number] for number in numbers] if part else None

        def fetch() -> tuple[list[Fetched], float]:
            begun = time.monotonic()
            try:
                return loads.restorer.get(self._tenant, digests, part + 1, held), time.monotonic()
            finally:
                self._state.recorder.count("work_seconds", time.monotonic() - begun, "fetch")

        self.requests.append(_Request(numbers, part, tier, nbytes, time.monotonic(), loads.fetchers.submit(fetch)))

    def _size(self, at: int, part: int) -> int:
        return round(self._entries[at].tokens * self._state.sizes(str(part)))

    def take(self) -> None:
        """Take the first answer."""
        request, nbytes = self.requests.popleft(), 0
        found, answered = request.answer.result()
        for number, fetched in zip(request.at, found, strict=True):
            self._held[number] = fetched
            for part, blob in enumerate(fetched.parts[request.part :], request.part):
                nbytes += len(blob)
                self._state.sizes.observe(str(part), len(blob), self._entries[number].tokens)
        if nbytes:
            self._loads.rates.observe(request.tier, nbytes, answered - max(request.sent, self._answered))
        self._answered = answered

    def due(self, choice: Choice) -> list[tuple[Entry, Fetched]]:
        """Return some entries to decode: those of which more is there than in the pages, unless more is to come."""
        batch: list[tuple[Entry, Fetched]] = []
        coming = {at for request in self.requests if request.is_wanted(choice) for at in request.at}
        for at, fetched in enumerate(self._held):
            if fetched is None or not fetched.parts or len(batch) == BATCH:
                break
            waits = at in coming or (at < choice.refined and self._asked[at] < len(self._tiers[at]))
            if len(fetched.parts) > self._decoded[at] and not waits:
                self._decoded[at] = len(fetched.parts)
                batch.append((self._entries[at], fetched))
        return batch
