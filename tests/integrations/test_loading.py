"""`LoadPlanner`: its decisions, and the ways in which a load can go wrong, in simulated time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from cuvee.codec.errors import InputError
from cuvee.integrations.costs import LinearCost
from cuvee.integrations.loading import ChunkParts, Decode, Fetch, LinkRate, LoadPlanner, LoadRequest, Part, Step

TICK, TOKENS, MB = 0.001, 256, 1e6
KL = (0.02, 0.005, 0.001)
SIZES = (100_000, 130_000, 200_000)


def chunks(count: int, tier: str = "net", parts: int = 3) -> tuple[ChunkParts, ...]:
    own = tuple(Part(size, kl, tier) for size, kl in zip(SIZES[:parts], KL[:parts], strict=True))
    return (ChunkParts(TOKENS, own),) * count


def request(
    own: tuple[ChunkParts, ...], deadline: float, kl_max: float = 0.02, engine_free: float = 0.0
) -> LoadRequest:
    """A prompt of these chunks and 16 tokens more."""
    return LoadRequest(own, deadline, kl_max, rest=16, engine_free=engine_free)


def steady(rate: float) -> dict[str, Callable[[float], float]]:
    return {"net": lambda now: rate}


@dataclass
class Drive:
    """An engine that does what a planner says, over links whose rates are functions of time.

    Attributes:
        asked: what is loaded.
        links: true bytes per second of each tier, by time.
        expected: bytes per second that the planner is told of, where that is not the true rate at time 0.
        token_seconds, decode_seconds: to compute a token, and to decode a chunk.
        latency: seconds until the first byte of an answer.
        missing, damaged: parts that no tier has, and parts that arrive and do not decode.
        steps, arrived: what the planner said, with times, and the parts in the order of their arrival.
    """

    asked: LoadRequest
    links: Mapping[str, Callable[[float], float]]
    expected: Mapping[str, float] = field(default_factory=dict)
    token_seconds: float = 1e-3
    decode_seconds: float = 0.002
    latency: float = 0.002
    missing: frozenset[tuple[int, int]] = frozenset()
    damaged: frozenset[tuple[int, int]] = frozenset()
    steps: list[tuple[float, Step]] = field(default_factory=list)
    arrived: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rates = {name: self.expected.get(name) or rate(0.0) for name, rate in self.links.items()}
        self.rates = {name: LinkRate(rate, self.latency, 0.3) for name, rate in rates.items()}
        self.decode = LinearCost(self.decode_seconds / TOKENS, 0.0, 0.02)
        self.planner = LoadPlanner(self.asked, self.rates, LinearCost(self.token_seconds, 0.0, 0.02), self.decode)

    def run(self, patience: float = 30.0) -> tuple[float, tuple[int, ...]]:
        """Return when the first token comes, and of how many parts each loaded chunk is."""
        waiting: dict[str, deque[tuple[Fetch, float]]] = {name: deque() for name in self.links}
        brought = dict.fromkeys(self.links, 0.0)
        now, decoded, wake, event, decoding = 0.0, np.inf, 0.0, True, Decode(0, 0)
        while now < patience:
            for name, queue in waiting.items():
                if queue and now >= queue[0][1] + self.latency:
                    brought[name] += TICK * self.links[name](now)
                    if brought[name] >= queue[0][0].nbytes:
                        fetch, brought[name], event = queue.popleft()[0], 0.0, True
                        lost = [part for part in fetch.parts if part in self.missing]
                        self.planner.arrived(fetch, now, lost)
                        self.arrived += [part for part in fetch.parts if part not in lost]
            if now >= decoded:
                bad = [part for part in range(decoding.parts) if (decoding.chunk, part) in self.damaged]
                if bad:
                    self.planner.decode_failed(bad[0])
                else:
                    self.planner.decoded(now)
                decoded, event = np.inf, True
            if event or now >= wake:
                step = self.planner.next(now)
                self.steps.append((now, step))
                for each in step.fetch:
                    waiting[each.tier].append((each, now))
                if step.decode is not None:
                    decoding, decoded = step.decode, now + self.decode_seconds
                if step.start is not None:
                    behind = TOKENS * (len(self.asked.chunks) - len(step.start)) + self.asked.rest
                    return max(now, self.asked.engine_free) + behind * self.token_seconds, step.start
                wake, event = step.wake, False
            now += TICK
        raise AssertionError(f"not started after {patience} s")

    def decodes(self) -> list[tuple[int, int]]:
        return [(step.decode.chunk, step.decode.parts) for _, step in self.steps if step.decode is not None]


def mean_kl(parts: tuple[int, ...], count: int) -> float:
    return sum(KL[own - 1] for own in parts) / count


# --- what is fetched, and when the model starts


def test_all_that_fits_is_loaded_and_the_model_starts_at_once() -> None:
    drive = Drive(request(chunks(4), 5.0), steady(20 * MB))
    seconds, parts = drive.run()
    assert parts == (3,) * 4
    assert seconds < 4 * sum(SIZES) / (20 * MB) + 0.1, "it does not wait for the deadline"


def test_bases_come_first_then_refinements_level_by_level() -> None:
    drive = Drive(request(chunks(3), 3.0), steady(1 * MB))
    drive.run()
    assert drive.arrived == [(chunk, level) for level in range(3) for chunk in range(3)]


@pytest.mark.parametrize("deadline", [0.6, 0.9, 1.3, 2.0])
def test_refinements_fill_the_time(deadline: float) -> None:
    drive = Drive(request(chunks(4), deadline), steady(1 * MB))
    seconds, parts = drive.run()
    assert len(parts) >= 3 and seconds <= deadline
    assert seconds + (SIZES[2] + SIZES[1]) / MB + 0.1 > min(deadline, 4 * sum(SIZES) / MB), "time is not left unused"


def test_a_refinement_that_stalls_does_not_keep_the_model_waiting() -> None:
    drive = Drive(request(chunks(4), 1.2), {"net": lambda now: MB if now < 0.8 else 0.0})
    seconds, parts = drive.run()
    assert seconds <= 1.2 and len(parts) == 4


def test_a_slow_decoder_takes_each_chunk_once_where_all_parts_are_there() -> None:
    drive = Drive(request(chunks(8), 1.0), steady(100 * MB), decode_seconds=0.08)
    seconds, parts = drive.run()
    assert seconds <= 1.0 and mean_kl(parts, 8) < KL[1], "eight decodings take .64 s"
    assert len(drive.decodes()) <= 10


# --- what is computed


def test_a_link_that_is_slower_than_the_engine_has_the_prompt_computed() -> None:
    seconds, parts = Drive(request(chunks(8), 1.4), steady(0.5 * MB), token_seconds=5e-4).run()
    assert parts == () and seconds <= 1.4, "a base takes .2 s to load, and its chunk .13 s to compute"


def test_chunks_are_computed_where_only_their_bases_could_be_loaded() -> None:
    """There is time to compute everything, or to refine everything: the engine's time has other uses."""
    slow = Drive(request(chunks(4), 1.2), steady(0.4 * MB))
    seconds, parts = slow.run()
    assert seconds <= 1.2 and mean_kl(parts, 4) < KL[0] / 2
    assert len(Drive(request(chunks(4), 5.0), steady(20 * MB)).run()[1]) == 4
    whole = Drive(request(chunks(4, parts=1), 5.0), steady(0.4 * MB))
    assert whole.run()[1] == (1,) * 4, "chunks that have one part are loaded at their best"


def test_a_chunk_without_a_base_and_all_behind_it_are_computed() -> None:
    own = (*chunks(2), ChunkParts(TOKENS, ()), *chunks(2))
    drive = Drive(request(own, 5.0), steady(20 * MB))
    assert drive.run()[1] == (3, 3) and max(chunk for chunk, _ in drive.arrived) == 1
    assert Drive(request((ChunkParts(TOKENS, ()),), 5.0), steady(20 * MB)).run()[1] == ()


# --- failures


def test_parts_that_turn_out_to_be_missing() -> None:
    base = Drive(request(chunks(4), 5.0), steady(20 * MB), missing=frozenset({(2, 0)}))
    assert base.run()[1] == (3, 3)
    refinement = Drive(request(chunks(4), 5.0), steady(20 * MB), missing=frozenset({(2, 1)}))
    assert refinement.run()[1] == (3, 3, 1, 3)


def test_a_part_that_turns_out_to_be_damaged_when_it_is_decoded() -> None:
    drive = Drive(request(chunks(4), 5.0), steady(20 * MB), damaged=frozenset({(1, 1)}))
    assert drive.run()[1] == (3, 1, 3, 3)
    assert Drive(request(chunks(4), 5.0), steady(20 * MB), damaged=frozenset({(2, 0)})).run()[1] == (3, 3)


def test_a_link_that_delivers_nothing() -> None:
    seconds, parts = Drive(request(chunks(4), 2.0), steady(0.0), expected={"net": 20 * MB}).run()
    assert parts == () and seconds <= 2.0


def test_a_link_that_stalls_between_bases() -> None:
    drive = Drive(request(chunks(8), 1.9), {"net": lambda now: 2 * MB if now < 0.12 else 0.0})
    seconds, parts = drive.run()
    assert len(parts) in (1, 2) and seconds <= 1.9, "what has come is used, and the rest is computed in time"


def test_a_link_that_stalls_when_it_is_too_late_to_compute() -> None:
    seconds, _ = Drive(request(chunks(8), 0.6), {"net": lambda now: 2 * MB if now < 0.12 else 0.0}).run()
    assert 0.6 < seconds < 4.0, "it does not wait for good"


@pytest.mark.parametrize(("true", "told"), [(2 * MB, 20 * MB), (20 * MB, 2 * MB)])
def test_a_rate_that_is_wrong_by_ten_times(true: float, told: float) -> None:
    drive = Drive(request(chunks(8), 1.0), steady(true), expected={"net": told})
    seconds, parts = drive.run()
    assert seconds <= 1.0 and mean_kl(parts, 8) <= (0.016 if true < told else 0.006)
    assert 1 / 3 < drive.rates["net"].rate / true < 3, "the estimate follows what is measured"


@pytest.mark.parametrize("deadline", [-1.0, 0.0, 0.03])
def test_a_deadline_that_cannot_be_met_starts_as_early_as_possible(deadline: float) -> None:
    drive = Drive(request(chunks(4), deadline), steady(20 * MB))
    seconds, parts = drive.run()
    assert parts == (1,) * 4 and all(part == 0 for _, part in drive.arrived)
    assert seconds < 4 * SIZES[0] / (20 * MB) + 0.06


# --- the floor


def test_the_floor_is_as_necessary_as_the_bases() -> None:
    drive = Drive(request(chunks(4), 0.6, kl_max=0.01), steady(1 * MB), token_seconds=4e-3)
    seconds, parts = drive.run()
    assert mean_kl(parts, 4) <= 0.01 and seconds > 0.6
    assert parts == (2, 2, 2, 1), "no more than the floor needs, since it is late"


def test_a_floor_that_parts_cannot_reach_is_computed() -> None:
    assert Drive(request(chunks(4), 0.1, kl_max=0.0001), steady(100 * MB)).run()[1] == ()
    _, parts = Drive(request(chunks(4, parts=1), 0.1, kl_max=0.0101), steady(100 * MB)).run()
    assert parts == (1, 1), "computed tokens lose nothing"
    exact = (ChunkParts(TOKENS, (Part(50_000, 0.0, "net"),)),) * 2
    assert Drive(request(exact, 5.0, kl_max=0.0), steady(20 * MB)).run()[1] == (1, 1)


@pytest.mark.parametrize("seed", range(12))
def test_the_floor_holds_whatever_happens(seed: int) -> None:
    random = np.random.default_rng(seed)
    rates = 10 ** random.uniform(4.5, 7.5, size=40) * (random.random(40) > 0.2)
    kl_max = float(random.choice([0.002, 0.006, 0.015, 0.02]))
    own = tuple(
        ChunkParts(
            TOKENS,
            tuple(Part(size, kl, str(random.choice(["net", "disk"]))) for size, kl in zip(SIZES, KL, strict=True)),
        )
        for _ in range(6)
    )
    drive = Drive(
        request(own, float(random.uniform(0.1, 2.5)), kl_max),
        {"net": lambda now: float(rates[int(now / 0.1) % 40]), "disk": lambda now: float(rates[int(now / 0.07) % 40])},
        expected={"net": float(10 ** random.uniform(5, 7)), "disk": 1e6},
        missing=frozenset((int(random.integers(6)), int(random.integers(3))) for _ in range(int(random.integers(3)))),
        damaged=frozenset({(int(random.integers(6)), int(random.integers(3)))}),
    )
    _, parts = drive.run(60.0)
    assert mean_kl(parts, 6) <= kl_max * (1 + 1e-6)
    for chunk, count in enumerate(parts):
        sound = set(drive.arrived) - drive.missing - drive.damaged
        assert count >= 1 and {(chunk, part) for part in range(count)} <= sound
        assert [made for made in drive.decodes() if made[0] == chunk][-1][1] == count


# --- queues, tiers and rates


def test_refinements_go_on_while_the_engine_is_busy() -> None:
    _, idle = Drive(request(chunks(4), 0.7), steady(1 * MB)).run()
    drive = Drive(request(chunks(4), 0.7, engine_free=1.5), steady(1 * MB))
    _, busy = drive.run()
    assert mean_kl(busy, 4) < mean_kl(idle, 4) and drive.steps[-1][0] <= 1.5


def test_tiers_are_asked_at_the_same_time_and_parts_may_overtake_each_other() -> None:
    own = tuple(
        ChunkParts(TOKENS, tuple(Part(size, kl, tier) for size, kl, tier in zip(SIZES, KL, tiers, strict=True)))
        for tiers in (("slow", "fast", "slow"), ("fast", "fast", "slow"), ("slow", "fast", "fast"))
    )
    drive = Drive(request(own, 5.0), {"slow": lambda now: 1 * MB, "fast": lambda now: 50 * MB})
    seconds, parts = drive.run()
    assert parts == (3, 3, 3) and {fetch.tier for fetch in drive.steps[0][1].fetch} == {"slow", "fast"}
    assert drive.arrived.index((0, 1)) < drive.arrived.index((0, 0)), "a refinement before its base"
    assert len(drive.arrived) == 9, "nothing is fetched twice"
    assert seconds < (SIZES[0] * 2 + SIZES[2] * 2) / MB + 0.1


def test_requests_overlap_so_that_latency_costs_once() -> None:
    drive = Drive(request(chunks(16), 5.0), steady(100 * MB), latency=0.03)
    seconds, parts = drive.run()
    assert parts == (3,) * 16 and sum(len(step.fetch) for _, step in drive.steps) > 2
    assert seconds < 16 * sum(SIZES) / (100 * MB) + 4 * drive.latency + 0.05


def test_one_load_teaches_the_next() -> None:
    drive = Drive(request(chunks(8), 2.0), steady(2 * MB), expected={"net": 20 * MB})
    drive.run()
    later = LoadPlanner(request(chunks(8), 0.3), drive.rates, LinearCost(1e-3, 0.0), drive.decode)
    assert all(part == 0 for fetch in later.next(0.0).fetch for _, part in fetch.parts), "bases alone take .4 s"
    assert drive.decode.samples >= 8


def test_a_latency_is_no_part_of_the_rate() -> None:
    link = LinkRate(1e6, 0.0)
    for number in range(60):
        nbytes = 100_000 if number % 2 else 1000
        link.observe_request(nbytes, number, number - 1, number + 0.02 + nbytes / 2e6)
    assert 0.005 < link.latency < 0.025 and link.rate == pytest.approx(2e6, rel=0.3)
    quick = LinkRate(1e6, 1.0)
    quick.observe_request(1000, 0.0, -1.0, 1e-4)
    assert quick.rate < 3e7, "a latency that was thought too long makes no rate without bound"


def test_misuse_is_refused() -> None:
    cost = LinearCost(1e-3, 0.0)
    with pytest.raises(InputError, match=r"links: must hold chunks, and the rates of \['net'\], got \['disk'\]"):
        LoadPlanner(request(chunks(2), 1.0), {"disk": LinkRate(1e6, 0.0)}, cost, cost)
    with pytest.raises(InputError, match="chunks, links: must hold chunks"):
        LoadPlanner(request((), 1.0), {}, cost, cost)
    with pytest.raises(InputError, match="decoded: must follow a step"):
        LoadPlanner(request(chunks(2), 1.0), {"net": LinkRate(1e6, 0.0)}, cost, cost).decoded(0.1)
