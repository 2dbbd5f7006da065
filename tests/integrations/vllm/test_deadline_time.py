"""Loads with a deadline in simulated time: how many deadlines are met that can be met, whatever links and stores do.

The worker's own code fetches from a store and decides. Only the clock, the links' speed and the time of decoding are
made up, so that thousands of loads take no time, and a busy machine changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.stores.dict_store import DictStore
from tests.integrations.vllm.sides import CHUNK, Bench
from tests.integrations.vllm.worker.test_deadlines import BLOCKS, PARTS, STEP, keys_of, profile

from cuvee.codec.errors import CuveeError
from cuvee.integrations.core import deadlines as loading
from cuvee.integrations.core.deadlines import RecentRates
from cuvee.integrations.stores.tiered import TieredStore
from cuvee.integrations.vllm.messages import Aim
from cuvee.integrations.vllm.worker import deadlines as worker_deadline
from cuvee.integrations.vllm.worker import restore as worker_restore
from cuvee.integrations.vllm.worker.deadlines import DeadlineLoad
from cuvee.integrations.vllm.worker.restore import Answer, LoadJob

CHUNKS, REST = 8, 4  # that are loaded, and tokens behind them
LATENCY, DECODE = 0.004, 0.01  # seconds until the first byte, and to decode a part of a chunk
LOST = 1.0, 0.15  # what a chunk of so many parts loses; a computed one loses nothing
Rate = Callable[[float], float]


class Simulation:
    """Links whose rates are functions of time, and a clock that stands while nothing is waited for.

    Args:
        bench: a worker, with what is to be loaded in its store.
        rates: bytes per second of each tier.
        told: what the worker takes them for, over what they are at first.
    """

    def __init__(self, bench: Bench, rates: dict[str, Rate], told: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench, self.now, self.rates = bench, 100.0, rates
        self._busy = dict.fromkeys(rates, 0.0)
        self._done: dict[int, float] = {}  # when each answer is there
        self.state, self.restorer = bench.worker._state, bench.worker.loads._restorer
        initial = {tier: told * rate(0.0) for tier, rate in rates.items()}
        self.state.sizes = [each / (CHUNKS * CHUNK) for each in bytes_of(bench)]
        self.state.rates = RecentRates({**initial, "decoding": CHUNK / DECODE}, otherwise=1e9)
        self.pools: Any = SimpleNamespace(fetchers=self)
        for module in (worker_deadline, worker_restore, loading):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(worker_deadline, "wait", self._wait)
        monkeypatch.setattr(self.restorer, "_pools", self.pools)

        def get_many(store: DictStore, keys: Sequence[str]) -> list[bytes | None]:
            return self._get_many(store, keys)

        monkeypatch.setattr(DictStore, "get_many", get_many)

    def submit(self, fetch: Callable[..., Answer], *given: Any) -> Future[Answer]:
        """Fetch, and have the answer there once its link has brought it."""
        answer: Future[Answer] = Future()
        asked = self.now
        try:
            answer.set_result(fetch(*given))
        except Exception as error:
            answer.set_exception(error)
        self._done[id(answer)], self.now = self.now, asked
        return answer

    def _get_many(self, store: DictStore, keys: Sequence[str]) -> list[bytes | None]:
        try:
            found = [store.get(key) for key in keys]
        except OSError:
            self.now += LATENCY
            raise
        if nbytes := sum(len(blob) for blob in found if blob):
            self.now = self._busy[store.name] = self._end(store.name, nbytes)
        return found

    def _end(self, tier: str, nbytes: int) -> float:
        at, left = max(self.now + LATENCY, self._busy[tier]), float(nbytes)
        while left > 0:
            left -= 0.001 * self.rates[tier](at - 100.0)
            at += 0.001
        return at

    def _wait(self, answers: Sequence[Future[Any]], seconds: float) -> SimpleNamespace:
        until, done = self.now + seconds, self._done[id(answers[0])]
        self.now = max(self.now, min(done, until))
        return SimpleNamespace(done=done <= until)

    def run(self, deadline: float, token: float) -> tuple[float, list[int], LoadJob]:
        """Load by a deadline, if computing a token takes so long; return the seconds until the first token, the parts
        of each chunk that is kept, and the load.
        """
        begun, load = self.now, self.bench.load(BLOCKS, 0, CHUNKS * CHUNK)
        job, parts = LoadJob(load, begun, 0, load.end), [0] * CHUNKS
        try:
            aim = Aim(deadline, REST, (token, 0.0, 0.0))
            for batch in DeadlineLoad(self.state, self.pools, self.restorer, job, aim).fetched():
                for entry, fetched in batch:
                    assert len(fetched.parts) > parts[entry.start // CHUNK], "nothing is decoded twice for nothing"
                    parts[entry.start // CHUNK] = len(fetched.parts)
                    self.now += DECODE * len(fetched.parts)
        except (CuveeError, OSError):
            pass
        kept = parts[: parts.index(0)] if 0 in parts else parts
        computed = token * ((CHUNKS - len(kept)) * CHUNK + REST)
        return self.now - begun + computed, kept, job

    def load(self) -> None:
        """Load all parts, without a deadline."""
        load = self.bench.load(BLOCKS, 0, CHUNKS * CHUNK)
        job = LoadJob(load, self.now, load.start, load.end)
        assert sum(len(batch) for batch in self.restorer.fetched(job)) == CHUNKS
        self.now = job.answered


@pytest.fixture
def bench(bench: Callable[..., Bench]) -> Callable[..., Bench]:
    """Of chunks in parts."""

    def make() -> Bench:
        torch.manual_seed(0)
        lossy: dict[str, Any] = {"quality": None, "step": STEP, "refinements": PARTS - 1}
        return bench(profile=profile(), codec=lossy, load_timeout=60.0, **lossy)

    return make


def bytes_of(b: Bench) -> tuple[int, int]:
    """Bytes of all bases, and of all refinements."""
    sizes = [[len(b.store.get(key) or b"") for key in keys_of(b, chunk)] for chunk in range(CHUNKS)]
    return sum(base for base, _ in sizes), sum(more for _, more in sizes)


def jumping(rate: float, seed: int) -> Rate:
    draw = random.Random(seed)
    levels = [rate * 2 ** draw.uniform(-1.5, 1.5) for _ in range(600)]
    return lambda at: levels[min(int(at / 0.1), 599)]


PATTERNS: dict[str, Callable[[float], Rate]] = {
    "steady": lambda rate: lambda at: rate,
    "slower": lambda rate: lambda at: rate if at < 0.1 else rate / 3,
    "jumps": lambda rate: jumping(rate, int(rate)),
}


@pytest.mark.parametrize(
    ("pattern", "least", "most_lost"), [("steady", 0.95, 0.25), ("slower", 0.95, 0.25), ("jumps", 0.92, 0.29)]
)
def test_what_can_be_met_is_met(
    bench: Callable[..., Bench], pattern: str, least: float, most_lost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feasible is what loading all bases, or computing everything, would meet. A link that jumps by eight times has
    forecasts that are wrong.
    """
    b = bench()
    b.store_all(CHUNKS)
    bases, more = bytes_of(b)
    met, lost, kept_at = [], [], []
    for seconds, token, told, factor in product((0.1, 0.4, 1.5), (2e-3, 8e-3), (0.5, 1, 2), (0.5, 0.75, 1.0, 1.5, 2.5)):
        rate = PATTERNS[pattern](bases / seconds)
        probe = Simulation(b, {"memory": rate}, 1.0, monkeypatch)
        to_bases = max(probe._end("memory", bases) - 100.0 + DECODE, CHUNKS * DECODE) + REST * token
        to_all = max(probe._end("memory", bases + more) - 100.0, 2 * CHUNKS * DECODE) + 2 * DECODE + REST * token
        computing = token * (CHUNKS * CHUNK + REST)
        monkeypatch.undo()
        for whole in (to_all, computing):
            deadline = factor * whole + 0.02
            end, parts, _ = Simulation(b, {"memory": rate}, told, monkeypatch).run(deadline, token)
            monkeypatch.undo()
            if deadline >= min(to_bases, computing) + 0.02:
                met.append(end <= deadline)
                lost.append(sum(LOST[each - 1] for each in parts) / CHUNKS)
            kept_at.append(len(parts))
    assert len(met) > 100 and sum(met) >= least * len(met), f"{sum(met)} of {len(met)}"
    assert 0 < sum(lost) / len(lost) < most_lost, "of what loading bases alone loses"
    assert {0, CHUNKS} <= set(kept_at)


def test_a_link_that_stops_does_not_keep_the_engine_from_computing(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has delivered some bases, and would take a minute for the others."""
    b = bench()
    b.store_all(CHUNKS)
    bases, _ = bytes_of(b)
    simulation = Simulation(b, {"memory": lambda at: bases / 0.1 if at < 0.05 else bases / 60}, 1.0, monkeypatch)
    end, parts, job = simulation.run(deadline=1.5, token=4e-3)
    assert end <= 1.5 and 0 < len(parts) < CHUNKS and job.goal == job.valid_until


def test_loads_without_a_deadline_tell_that_a_link_has_become_faster(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bases that took longer than computing are loaded again once they would be in time: from 1 to 4 MB/s, say."""
    b = bench()
    b.store_all(CHUNKS)
    bases, _ = bytes_of(b)
    token = 0.5 / (CHUNKS * CHUNK + REST)
    simulation = Simulation(b, {"memory": lambda at: bases / (1.0 if at < 10 else 0.25)}, 1.0, monkeypatch)
    assert simulation.run(0.4, token)[1] == [], "computing everything is late by least"
    simulation.now += 10
    simulation.load()
    assert simulation.state.rates("memory") == pytest.approx(4 * bases, rel=0.3), "of all of the link"
    end, parts, _ = simulation.run(0.4, token)
    assert end <= 0.4 and len(parts) > CHUNKS / 2


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_a_tier_that_looks_too_slow_is_asked_again(
    bench: Callable[..., Bench], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By loads with a deadline alone, for one base at a time, a second after the last answer."""
    b = bench()
    b.store_all(CHUNKS)
    bases, _ = bytes_of(b)
    token = 0.5 / (CHUNKS * CHUNK + REST)
    simulation = Simulation(b, {"memory": lambda at: bases / (1.0 if at < 0.3 else 0.1)}, 1.0, monkeypatch)
    for _ in range(10):
        simulation.state.rates.observe("memory", bases / 10, 0.1)
    asked = b.store.calls.count("get")
    assert simulation.run(0.4, token)[1] == [] and b.store.calls.count("get") == asked
    simulation.now += seconds
    assert simulation.run(0.4, token)[1] == [], "it is computed, whatever comes of it"
    assert b.store.calls.count("get") == asked + (seconds > 1)
    simulation.now += 0.1
    assert (simulation.run(0.4, token)[1] != []) is (seconds > 1)


def test_only_one_load_asks_a_tier_again_and_what_fails_or_is_gone_tells_nothing(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    b = bench()
    b.store_all(CHUNKS)
    pending: list[Future[Answer]] = []

    def submit(*_: object) -> Future[Answer]:
        pending.append(Future())
        return pending[-1]

    simulation = Simulation(b, {"memory": lambda at: 1.0}, 1.0, monkeypatch)
    b.store.entries.clear()
    monkeypatch.setattr(simulation.pools, "fetchers", SimpleNamespace(submit=submit))
    for _ in range(3):
        simulation.run(0.4, 1e-6)
    assert len(pending) == 1
    pending[0].set_exception(OSError("planted"))
    assert not caplog.text
    monkeypatch.setattr(simulation.pools, "fetchers", simulation)
    simulation.now += 2
    simulation.run(0.4, 1e-6)
    assert "get" in b.store.calls and simulation.state.rates("memory") == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(6))
def test_two_tiers_that_fail_at_random_cost_no_more_than_computing(
    bench: Callable[..., Bench], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are in one tier or the other or gone, and calls fail. What is kept is a whole prefix, in bounded time."""
    draw = random.Random(seed)
    b = bench()
    b.store_all(CHUNKS)
    bases, _ = bytes_of(b)
    first, second = DictStore(), DictStore()
    second.name = "far"
    for chunk in range(CHUNKS):
        for key in keys_of(b, chunk):
            if draw.random() < 0.95:
                draw.choice([first, second]).entries[key] = b.store.entries[key]
    tiers = TieredStore([first, second])
    b.worker._state.store = tiers
    rates = {"memory": lambda at: bases / 0.05, "far": jumping(bases / 0.5, seed)}
    simulation = Simulation(b, rates, draw.choice([0.3, 1.0, 3.0]), monkeypatch)

    def fail(operation: str) -> None:
        if operation == "get" and draw.random() < 0.02:
            raise OSError("planted")

    first.before = second.before = fail
    deadline, token = draw.choice([0.05, 0.3, 1.0, 3.0]), draw.choice([2e-3, 8e-3])
    end, kept, job = simulation.run(deadline, token)
    computing = token * (CHUNKS * CHUNK + REST)
    assert set(kept) <= {1, 2} and len(kept) <= CHUNKS
    assert end <= max(deadline, computing) + 1.0, "it never waits for more than what would have been computed"
    assert job.goal == job.valid_until or len(kept) < CHUNKS
    first.before = second.before = lambda operation: None
    tiers.close()
