"""Loads with a deadline or a floor, on one rank: fetch and decode what a `LoadPlanner` says, part by part.

    planner --Step--> fetchers: store -> parts --+
       ^              a coder:  parts -> pages --+--> events
       +-----------------------------------------------+

`integrations.loading` decides. Here its steps are carried out, and it is told what happened. The engine computes what
is not loaded.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from cuvee.codec.errors import CuveeError
from cuvee.integrations.costs import LinearCost
from cuvee.integrations.loading import Decode, Fetch, LinkRate, LoadPlanner, LoadRequest, Step
from cuvee.integrations.vllm.messages import Aim, Entry
from cuvee.integrations.vllm.worker_restore import LoadJob, Planned, Restorer
from cuvee.integrations.vllm.worker_state import WorkerPools, WorkerState
from cuvee.naming.part_keys import part_key

logger = logging.getLogger(__name__)

# What to expect of tiers, decoder and engine before anything is measured: bytes per second, seconds until the first
# byte, seconds per token. The spreads say that this may be wrong by a factor of three.
_TIERS = {"memory": (1e9, 1e-5), "disk": (3e8, 1e-3)}
_REMOTE = 5e7, 2e-3
_DECODE_SECONDS = 1e-4
_UNKNOWN = 1.1


class PlannedLoads:
    """Carries out plans, and keeps what they measure from one load to the next.

    Args:
        state: of the worker.
        pools: threads of the worker.
        restorer: decodes entries.
    """

    def __init__(self, state: WorkerState, pools: WorkerPools, restorer: Restorer) -> None:
        self.state = state
        self.pools = pools
        self.restorer = restorer
        # This lock guards what is measured, which planners read and change.
        self.lock = threading.Lock()
        self.decode = LinearCost(_DECODE_SECONDS, 0.0, _UNKNOWN)
        self._links: dict[str, LinkRate] = {}

    def run(self, job: LoadJob, aim: Aim) -> None:
        """Restore what the plan of a load says; `job.planned` is set at the end, unless the load was given up."""
        _Run(self, job, aim).run()

    def links(self, tiers: Sequence[str]) -> Mapping[str, LinkRate]:
        """Return the rates of some tiers; the lock is held."""
        for tier in tiers:
            if tier not in self._links:
                rate, latency = _TIERS.get(tier, _REMOTE)
                self._links[tier] = LinkRate(rate, latency, _UNKNOWN)
        return {tier: self._links[tier] for tier in tiers}


@dataclass(frozen=True, slots=True)
class _Answer:
    """The store's answer to a request: the parts that it has, and the store key of the entry of each."""

    fetch: Fetch
    parts: Mapping[tuple[int, int], tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class _Decoded:
    """The decoder's answer: what it was given, why that failed, if it did, and whether the bytes are to blame."""

    what: Decode
    problem: Exception | None
    blames_blob: bool = False


class _Run:
    """One load, on the thread that loads it. Threads of the pools only put events into its queue."""

    def __init__(self, loads: PlannedLoads, job: LoadJob, aim: Aim) -> None:
        self._loads = loads
        self._state = loads.state
        self._job = job
        self._entries: list[Entry] = job.load.prefix
        self._aim = aim
        self._events: SimpleQueue[_Answer | _Decoded] = SimpleQueue()
        self._parts: list[list[bytes | None]] = [[None] * self._state.parts for _ in self._entries]
        self._keys: list[str] = []
        self._levels = [0] * len(self._entries)  # of how many parts each entry was decoded
        self._lost = False
        self._incomplete: set[int] = set()  # entries without all of their refinements

    def run(self) -> None:
        job, state = self._job, self._state
        if job.over:  # given up before a thread was free for it
            return
        # A request of an earlier load may still hang in the store, and no one waits for it.
        state.store.overdue("get_many", state.timeout)
        planner = self._planner()
        while not job.over:
            with self._loads.lock:
                step = planner.next(time.monotonic())
            if step.start is not None:
                self._end(len(step.start))
                return
            self._carry_out(step)
            try:
                event = self._events.get(timeout=max(step.wake - time.monotonic(), 0))
                while True:
                    self._take(event, planner)
                    event = self._events.get_nowait()
            except Empty:
                continue

    def _planner(self) -> LoadPlanner:
        """Return the planner of this load."""
        state, load, aim = self._state, self._job.load, self._aim
        self._keys = [state.keys.written(load.tenant, entry.digest) for entry in self._entries]
        tiers = state.store.locate([part_key(key, number) for key in self._keys for number in range(state.parts)])
        chunks = []
        for at, entry in enumerate(self._entries):
            own = tiers[at * state.parts : (at + 1) * state.parts]
            expected = state.figures.expected(entry.tokens, own)
            chunks.append(replace(expected, tokens=len(load.placed(entry))))
        begun = self._job.begun
        first, second, spread = aim.prefill
        prefill = LinearCost(first, second, spread)
        deadline = begun + (state.timeout if aim.seconds is None else aim.seconds)
        request = LoadRequest(
            tuple(chunks), deadline, math.inf if aim.kl_max is None else aim.kl_max, load.start, aim.rest,
            engine_free=begun + aim.queued * first,
        )  # fmt: skip
        with self._loads.lock:
            return LoadPlanner(request, self._loads.links(sorted(set(tiers))), prefill, self._loads.decode)

    def _carry_out(self, step: Step) -> None:
        for fetch in step.fetch:
            self._loads.pools.fetchers.submit(self._fetch, fetch)
        if step.decode is not None:
            if self._state.codec.on_device(self._state.pages.device):
                self._decode(step.decode)  # on this thread's stream, which follows the engine's
            else:
                self._loads.pools.coders.submit(self._decode, step.decode)

    def _take(self, event: _Answer | _Decoded, planner: LoadPlanner) -> None:
        """Tell the planner what has happened."""
        now = time.monotonic()
        if isinstance(event, _Decoded):
            with self._loads.lock:
                if event.problem is None:
                    planner.decoded(now)
                else:
                    self._leave_out(event, planner)
            return
        missing = tuple(part for part in event.fetch.parts if part not in event.parts)
        for (chunk, number), (key, part) in event.parts.items():
            self._parts[chunk][number] = part
            self._keys[chunk] = key
            self._state.figures.observe(self._entries[chunk].tokens, number, len(part))
        for chunk, number in missing:
            self._lack(chunk, number)
        with self._loads.lock:
            planner.arrived(event.fetch, now, missing)

    def _leave_out(self, event: _Decoded, planner: LoadPlanner) -> None:
        """Leave out the last part of what does not decode. If that was not to blame, the one before is next."""
        chunk, number = event.what.chunk, event.what.parts - 1
        logger.debug("cuvee: part %d of an entry is left out: %s", number, event.problem)
        if event.blames_blob:
            self._job.bad.append((self._keys[chunk], number))
        self._lack(chunk, number)
        planner.decode_failed(number)

    def _lack(self, chunk: int, number: int) -> None:
        """Note that a part of an entry is not to be had."""
        if number:
            self._incomplete.add(chunk)
        else:
            self._lost = True

    def _fetch(self, fetch: Fetch) -> None:
        """Ask the store for parts, and put its answer into the queue. Whatever fails is missing."""
        found: Mapping[tuple[int, int], tuple[str, bytes]] = {}
        begun = time.monotonic()
        try:
            if not self._job.over:
                found = self._get(fetch)
        except Exception as error:
            logger.warning("cuvee: request %s: parts could not be fetched: %s", self._job.load.request, error)
            self._state.recorder.count("failures", label="load")
        finally:
            self._state.recorder.count("fetch_seconds", time.monotonic() - begun)
            self._events.put(_Answer(fetch, found))

    def _get(self, fetch: Fetch) -> Mapping[tuple[int, int], tuple[str, bytes]]:
        """Read parts."""
        state, digests = self._state, [self._entries[chunk].digest for chunk, _ in fetch.parts]

        def ask(asked: list[int], keys: list[str]) -> list[bytes | None]:
            return state.store.get_many(
                [part_key(key, fetch.parts[at][1]) for at, key in zip(asked, keys, strict=True)]
            )

        found = zip(fetch.parts, state.keys.find(self._job.load.tenant, digests, ask), strict=True)
        return {part: (key, blob) for part, (key, blob) in found if blob is not None}

    def _decode(self, what: Decode) -> None:
        """Decode an entry into its pages, unless the load is over, and put the outcome into the queue."""
        outcome = _Decoded(what, RuntimeError("it was not decoded"))
        begun = time.monotonic()
        try:
            parts = [part for part in self._parts[what.chunk][: what.parts] if part is not None]
            with self._job.lock:
                if not self._job.over:
                    self._levels[what.chunk] = self._loads.restorer.place(
                        self._job.load, self._entries[what.chunk], parts
                    )
            outcome = _Decoded(what, None)
        except CuveeError as error:
            outcome = _Decoded(what, error, error.blames_blob)
        except Exception as error:
            logger.exception("cuvee: request %s: an entry was not decoded", self._job.load.request)
            outcome = _Decoded(what, error)
        finally:
            self._state.recorder.count("decode_seconds", time.monotonic() - begun)
            self._events.put(outcome)

    def _end(self, chunks: int) -> None:
        """Note what is in place. What is still on its way is not waited for."""
        job, load = self._job, self._job.load
        poor = [self._entries[at].digest for at in sorted(self._incomplete) if at >= chunks]
        with job.lock:
            if job.over:
                return
            for entry in self._entries[:chunks]:
                self._loads.restorer.count(entry)
                job.valid_until = max(job.valid_until, min(entry.end, load.end))
            job.parts = self._levels[:chunks]
            job.planned = Planned(self._lost, tuple(poor))
