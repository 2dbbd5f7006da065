"""An engine in simulated time that does what a `LoadPlanner` says, over links whose rates are functions of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from cuvee.integrations.loading import (
    ChunkParts,
    Compute,
    Decode,
    Fetch,
    LinearCost,
    LinkRate,
    LoadPlanner,
    LoadRequest,
    Part,
    Start,
    Step,
)

TICK = 0.001
TOKENS = 256
KL = (0.02, 0.005, 0.001)
SIZES = (100_000, 130_000, 200_000)


def chunks(count: int, tier: str = "net", parts: int = 3) -> tuple[ChunkParts, ...]:
    """Chunks whose parts are all alike."""
    own = tuple(Part(size, kl, tier) for size, kl in zip(SIZES[:parts], KL[:parts], strict=True))
    return (ChunkParts(TOKENS, own),) * count


def request(
    own: tuple[ChunkParts, ...],
    deadline: float,
    kl_max: float = 0.02,
    compute: Compute = Compute.NEEDED,
    engine_free: float = 0.0,
) -> LoadRequest:
    """A prompt of these chunks and 16 tokens more."""
    return LoadRequest(own, deadline, kl_max, rest=16, compute=compute, engine_free=engine_free)


@dataclass
class Drive:
    """Runs a load to its start.

    Attributes:
        asked: what is loaded.
        links: true bytes per second of each tier, by time.
        expected: bytes per second that the planner is told of, where that is not the true rate at time 0.
        token_seconds: to compute a token.
        decode_seconds: to decode a chunk.
        decode_expected: what the planner is told of that; 0: the truth.
        latency: seconds until the first byte of an answer.
        missing: parts that no tier has.
        damaged: parts that arrive, and do not decode.
        steps: what the planner said, with times; filled by `run`.
        arrived: parts in the order of their arrival; filled by `run`.
    """

    asked: LoadRequest
    links: Mapping[str, Callable[[float], float]]
    expected: Mapping[str, float] = field(default_factory=dict)
    token_seconds: float = 1e-3
    decode_seconds: float = 0.002
    decode_expected: float = 0.0
    latency: float = 0.002
    missing: frozenset[tuple[int, int]] = frozenset()
    damaged: frozenset[tuple[int, int]] = frozenset()
    steps: list[tuple[float, Step]] = field(default_factory=list)
    arrived: list[tuple[int, int]] = field(default_factory=list)

    def run(self, patience: float = 30.0) -> tuple[float, Start]:
        """Return when the first token comes, and what the model was started with."""
        rates = {name: self.expected.get(name) or rate(0.0) for name, rate in self.links.items()}
        self.rates = {name: LinkRate(rate, self.latency, 0.3) for name, rate in rates.items()}
        self.decode = LinearCost((self.decode_expected or self.decode_seconds) / TOKENS, 0.0, 0.02)
        prefill = LinearCost(self.token_seconds, 0.0, 0.02)
        self.planner = LoadPlanner(self.asked, self.rates, prefill, self.decode, now=0.0)
        waiting: dict[str, deque[tuple[Fetch, float]]] = {name: deque() for name in self.links}
        brought = dict.fromkeys(self.links, 0.0)
        now, decoded, wake, event = 0.0, np.inf, 0.0, True
        decoding = Decode(0, 0)
        while now < patience:
            for name, queue in waiting.items():
                if queue and now >= queue[0][1] + self.latency:
                    brought[name] += TICK * self.links[name](now)
                    if brought[name] >= queue[0][0].nbytes:
                        fetch, brought[name], event = queue.popleft()[0], 0.0, True
                        lost = tuple(part for part in fetch.parts if part in self.missing)
                        if lost:
                            self.planner.failed(fetch, now, lost)
                        else:
                            self.planner.arrived(fetch, now)
                        self.arrived += [part for part in fetch.parts if part not in lost]
            if now >= decoded:
                bad = [part for part in range(decoding.parts) if (decoding.chunk, part) in self.damaged]
                if bad:
                    self.planner.decode_failed(bad[0], now)
                else:
                    self.planner.decoded(now)
                decoded, event = np.inf, True
            if event or now >= wake:
                step = self.planner.next(now)
                self.steps.append((now, step))
                for each in step.cancel:
                    if waiting[each.tier][0][0] is each:
                        brought[each.tier] = 0.0
                    waiting[each.tier] = deque(entry for entry in waiting[each.tier] if entry[0] is not each)
                for each in step.fetch:
                    waiting[each.tier].append((each, now))
                if step.decode is not None:
                    decoding, decoded = step.decode, now + self.decode_seconds
                if step.start is not None:
                    behind = TOKENS * (len(self.asked.chunks) - step.start.chunks) + self.asked.rest
                    return max(now, self.asked.engine_free) + behind * self.token_seconds, step.start
                wake, event = step.wake, False
            now += TICK
        raise AssertionError(f"not started after {patience} s")


def steady(rate: float) -> dict[str, Callable[[float], float]]:
    """One tier of constant bytes per second."""
    return {"net": lambda now: rate}
