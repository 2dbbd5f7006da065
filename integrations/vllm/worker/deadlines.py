"""Loads with a deadline, on one rank: fetch the parts that `core.deadlines` chooses, until they will do.

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
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress, takewhile

from cuvee.integrations.core.chunk_io import BATCH
from cuvee.integrations.core.costs import LinearCost, prefill_quantities
from cuvee.integrations.core.deadlines import HICCUP, Choice, choose
from cuvee.integrations.vllm.messages import Aim, Entry
from cuvee.integrations.vllm.worker.restore import Answer, Fetched, LoadJob, Restorer
from cuvee.integrations.vllm.worker.state import WorkerPools, WorkerState

_DECODING = "decoding"
_REQUEST_SECONDS = 0.015  # of transfer that one request is for
_UNDER_WAY = 2  # requests at a time, so that the link is never idle
_PROBE_SECONDS = 1.0  # after which a tier that looks too slow is asked for a base, or it would look so for ever
_WAKE_SECONDS = 0.02  # until the choice is made anew if nothing happens


@dataclass(slots=True)
class _Chunk:
    """An entry of a load: the tiers of its parts, how many were asked for and decoded, and what has come."""

    at: int
    entry: Entry
    tiers: Sequence[str]
    asked: int = 0
    decoded: int = 0
    held: Fetched | None = None

    @property
    def parts(self) -> int:
        return 0 if self.held is None else len(self.held.parts)

    @property
    def gone(self) -> bool:
        return self.held is not None and not self.held.parts


@dataclass(frozen=True, slots=True)
class _Request:
    """A part of some chunks that was asked for."""

    chunks: Sequence[_Chunk]
    part: int
    tier: str
    nbytes: float
    sent: float
    answer: Future[Answer]


class DeadlineLoad:
    """One load, on the thread that loads it. The worker's state keeps what loads measure."""

    def __init__(self, state: WorkerState, pools: WorkerPools, restorer: Restorer, job: LoadJob, aim: Aim) -> None:
        self._state, self._pools, self._restorer, self._job = state, pools, restorer, job
        load, parts, tiers = job.load, state.parts, restorer.tiers(job.load)
        self._chunks = [_Chunk(at, each, tiers[parts * at :][:parts]) for at, each in enumerate(load.prefix)]
        self._edges = list(accumulate((len(load.placed(entry)) for entry in load.prefix), initial=load.start))
        self._prefill, self._end = LinearCost(*aim.prefill), self._edges[-1] + aim.rest
        self._deadline = job.begun + aim.seconds
        self._requests: deque[_Request] = deque()
        self._probes = int(bool(tiers) and state.rates.is_due(tiers[0], _PROBE_SECONDS))  # bases asked for in any case

    def fetched(self) -> Iterator[list[tuple[Entry, Fetched]]]:
        """Yield entries, some at a time: those that are to be refined with their refinements, once these are there, and
        the others as their bases. What is not yielded until the model has to start is to be computed.

        Raises:
            CuveeError: the store lacks an entry.
            Exception: that of the store.
        """
        going_on = True
        self._state.store.report_overdue("get_many", self._state.timeout)  # a call of an earlier load may still hang
        while not self._job.over and going_on:
            choice = self._choose(time.monotonic())
            self._ask(choice)
            going_on = any(request.chunks[0].at < choice[request.part] for request in self._requests)
            if going_on and wait([self._requests[0].answer], _WAKE_SECONDS).done:
                self._take()
            while batch := self._due(choice.refined if going_on else 0):
                begun = time.monotonic()
                yield batch
                tokens = sum(entry.tokens * len(fetched.parts) for entry, fetched in batch)
                self._state.rates.observe(_DECODING, tokens, time.monotonic() - begun)
        for request in self._requests:  # they are not waited for, and tell how fast their tiers are
            request.answer.add_done_callback(partial(self._learn, request))
        for each in self._chunks:
            if each.gone:
                raise self._restorer.missing(self._job.load.tenant, each.entry)
        self._job.goal = self._job.valid_until

    def _choose(self, now: float) -> Choice:
        rates, decode = self._state.rates, 1 / self._state.rates(_DECODING)

        def seconds(part: int) -> list[float]:
            return [
                math.inf if each.gone and not part
                else 0.0 if part < each.asked or part == len(each.tiers)
                else max(self._state.nbytes(each.entry, part) / rates(each.tiers[part]), decode * each.entry.tokens)
                for each in self._chunks
            ]  # fmt: skip

        coming = 0.0
        if self._requests:
            first = self._requests[0]
            rate, passed = rates(first.tier), now - max(first.sent, self._job.answered)
            left = max(sum(request.nbytes for request in self._requests) / rate - passed, 0.0)
            coming = passed if passed > first.nbytes / rate + HICCUP else left  # one that is late takes as long again
        undecoded = [decode * each.entry.tokens for each in self._chunks if each.asked > each.decoded == 0]
        under_way = max(coming, sum(undecoded))  # what has come is decoded meanwhile
        loaded = sum(1 for _ in takewhile(lambda each: each.parts, self._chunks))

        def compute(chunks: int) -> float:
            return self._prefill(*prefill_quantities(self._edges[chunks], self._end))

        return choose(self._deadline - now, self._edges, compute, under_way, loaded, seconds(0), seconds(1))

    def _ask(self, choice: Choice) -> None:
        """Ask for the next parts of a choice, so that the link is busy: for one part of several chunks in one tier. No
        base waits for a refinement in the same request, which a store may not answer.
        """
        while len(self._requests) < _UNDER_WAY:
            bases = [each for each in self._chunks[: choice.chunks or self._probes] if not each.asked]
            refined = [each for each in self._chunks[: choice.refined] if 0 < each.parts == each.asked]
            several = bases or [each for each in refined if each.asked < len(each.tiers)]
            if not several:
                return
            part = int(not bases)
            tier = several[0].tiers[part]
            most = 1 + int(_REQUEST_SECONDS * self._state.rates(tier) / self._state.nbytes(several[0].entry, part))
            chunks = [each for each in several if each.tiers[part] == tier][:most]
            if part:
                held = [each.held for each in chunks if each.held is not None]
                answer = self._pools.fetchers.submit(self._restorer.refine, held)
            else:
                digests = [each.entry.digest for each in chunks]
                answer = self._pools.fetchers.submit(self._restorer.get, self._job.load.tenant, digests, 1)
            for each in chunks:
                each.asked = part + 1
            nbytes = sum(self._state.nbytes(each.entry, part) for each in chunks)
            self._requests.append(_Request(chunks, part, tier, nbytes, time.monotonic(), answer))

    def _take(self) -> None:
        """Take the first answer."""
        request = self._requests.popleft()
        for chunk, fetched in zip(request.chunks, request.answer.result().found, strict=True):
            chunk.held = fetched
        self._learn(request, request.answer)

    def _learn(self, request: _Request, answer: Future[Answer]) -> None:
        """Learn from an answer, if there is one, how fast its tier is."""
        if not answer.cancelled() and answer.exception() is None:
            came = [len(found.parts) > request.part for found in answer.result().found]
            nbytes = sum(self._state.nbytes(each.entry, request.part) for each in compress(request.chunks, came))
            self._restorer.learn(self._job, request.tier, nbytes, answer.result())

    def _due(self, refined: int) -> list[tuple[Entry, Fetched]]:
        """Return some entries to decode: those of which more is there than in the pages, unless more is to come."""
        coming = [chunk.at for request in self._requests for chunk in request.chunks]
        batch: list[tuple[Entry, Fetched]] = []
        for each in takewhile(lambda each: each.parts and len(batch) < BATCH, self._chunks):
            waits = each.at < refined and (each.at in coming or each.asked < len(each.tiers))
            if each.held is not None and each.parts > each.decoded and not waits:
                each.decoded = each.parts
                batch.append((each.entry, each.held))
        return batch
