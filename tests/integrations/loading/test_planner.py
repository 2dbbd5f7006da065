"""`LoadPlanner`: every decision, and every way in which a load can go wrong, in simulated time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.integrations.loading.driver import KL, SIZES, TOKENS, Drive, chunks, request, steady

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.learning.calibrate import fit
from cuvee.integrations.loading import ChunkParts, Compute, LinearCost, LinkRate, LoadPlanner, LoadRequest, Part

MB = 1e6


def canceled(drive: Drive) -> list[tuple[int, int]]:
    return [part for _, step in drive.steps for fetch in step.cancel for part in fetch.parts]


def decodes(drive: Drive) -> list[tuple[int, int]]:
    return [(step.decode.chunk, step.decode.parts) for _, step in drive.steps if step.decode is not None]


# --- what is fetched, and when the model starts


def test_all_that_fits_is_loaded_and_the_model_starts_at_once() -> None:
    drive = Drive(request(chunks(4), 5.0), steady(20 * MB))
    seconds, start = drive.run()
    assert start.parts == (3,) * 4 and start.kl == pytest.approx(KL[2]) and start.in_time
    assert seconds < 4 * sum(SIZES) / (20 * MB) + 0.1, "it does not wait for the deadline"
    assert sorted(decodes(drive)) == [(chunk, 3) for chunk in range(4)], "each chunk is decoded once"
    assert not canceled(drive)


def test_bases_come_first_then_what_saves_most_per_byte() -> None:
    small, large = (tuple(Part(int(size * factor), kl, "net") for size, kl in zip(SIZES, KL, strict=True))
                    for factor in (0.8, 1.2))  # fmt: skip
    own = (ChunkParts(TOKENS, large), ChunkParts(TOKENS, small), ChunkParts(TOKENS, large))
    drive = Drive(request(own, 3.0), steady(1 * MB))
    drive.run()
    assert drive.arrived[:6] == [(0, 0), (1, 0), (2, 0), (1, 1), (0, 1), (2, 1)]
    assert drive.arrived[6] == (1, 2)


@pytest.mark.parametrize("deadline", [0.6, 0.9, 1.3, 2.0])
def test_refinements_fill_the_time_and_late_ones_are_given_up(deadline: float) -> None:
    drive = Drive(request(chunks(4), deadline), steady(1 * MB))
    seconds, start = drive.run()
    assert start.chunks == 4 and seconds <= deadline and start.in_time
    delivered = sum(sum(SIZES[:parts]) for parts in start.parts)
    assert seconds + (SIZES[2] + SIZES[1]) / MB + 0.1 > min(deadline, 4 * sum(SIZES) / MB), "time is not left unused"
    assert start.kl == pytest.approx(np.mean([KL[parts - 1] for parts in start.parts]))
    assert delivered <= seconds * MB


def test_what_is_under_way_when_the_model_starts_is_given_up() -> None:
    rate = 1 * MB
    drive = Drive(request(chunks(4), 1.2), {"net": lambda now: rate if now < 0.8 else 0.0})
    seconds, start = drive.run()
    assert seconds <= 1.2 and start.in_time and start.chunks == 4
    assert canceled(drive) and drive.planner.canceled == len(canceled(drive))
    assert not set(canceled(drive)) & {(chunk, 0) for chunk in range(4)}


def test_parts_that_are_there_are_not_decoded_again_if_that_would_be_late() -> None:
    """The decoder is slow, and refinements arrive when a coarser decoding of all chunks is under way."""
    stall = {"net": lambda now: 100 * MB if now < 0.012 or now > 0.27 else 0.0}
    drive = Drive(request(chunks(8), 0.5), stall, decode_seconds=0.045)
    seconds, start = drive.run()
    assert seconds <= 0.5 and start.in_time


def test_where_the_decoder_is_slow_chunks_are_completed_one_by_one() -> None:
    drive = Drive(request(chunks(8), 0.82), steady(10 * MB), decode_seconds=0.08)
    seconds, start = drive.run()
    assert seconds <= 0.82 and start.kl < KL[1], "eight decodings take .64 s, all bases .08 s, first refinements .1 s"
    first = min(at for at, step in drive.steps if step.decode is not None)
    assert first < 0.15, "the decoder does not wait for all first refinements"


# --- what is computed


def test_a_slow_link_has_the_end_of_the_prompt_computed() -> None:
    drive = Drive(request(chunks(8), 1.4), steady(0.5 * MB), token_seconds=5e-4)  # a base takes .2 s, or .13 to compute
    seconds, start = drive.run()
    assert 0 < start.chunks < 8 and seconds <= 1.4 and start.in_time
    assert start.kl <= KL[0] * start.chunks / 8 + 1e-12


def test_computing_is_for_need_unless_exactness_is_asked_for() -> None:
    own = chunks(2)
    _, lossy = Drive(request(own, 5.0), steady(20 * MB)).run()
    seconds, exact = Drive(request(own, 5.0, compute=Compute.EXACT), steady(20 * MB)).run()
    assert (lossy.chunks, exact.chunks, exact.kl) == (2, 0, 0.0) and seconds <= 5.0
    _, short = Drive(request(own, 0.3, compute=Compute.EXACT), steady(20 * MB)).run()
    assert short.chunks == 2, "there is no time to compute"


def test_exactness_computes_as_much_as_there_is_time_for() -> None:
    drive = Drive(request(chunks(8), 1.5, compute=Compute.EXACT), steady(1 * MB))
    seconds, start = drive.run()
    _, loaded = Drive(request(chunks(8), 1.5), steady(1 * MB)).run()
    assert seconds <= 1.5 and 0 < start.chunks < 8 and start.kl < loaded.kl


def test_a_chunk_without_a_base_and_all_behind_it_are_computed() -> None:
    own = (*chunks(2), ChunkParts(TOKENS, ()), *chunks(2))
    drive = Drive(request(own, 5.0), steady(20 * MB))
    _, start = drive.run()
    assert start.chunks == 2 and max(chunk for chunk, _ in drive.arrived) == 1


def test_a_prompt_of_which_nothing_is_stored_is_computed() -> None:
    _, start = Drive(request((ChunkParts(TOKENS, ()),), 5.0), steady(20 * MB)).run()
    assert (start.chunks, start.parts, start.kl) == (0, (), 0.0)


# --- failures


def test_a_base_that_turns_out_to_be_missing() -> None:
    drive = Drive(request(chunks(4), 5.0), steady(20 * MB), missing=frozenset({(2, 0)}))
    _, start = drive.run()
    assert start.chunks == 2 and start.parts == (3, 3) and drive.planner.failed_parts == 1


def test_a_refinement_that_turns_out_to_be_missing() -> None:
    drive = Drive(request(chunks(4), 5.0), steady(20 * MB), missing=frozenset({(2, 1)}))
    _, start = drive.run()
    assert start.parts == (3, 3, 1, 3) and start.kl == pytest.approx((3 * KL[2] + KL[0]) / 4)


def test_a_part_that_turns_out_to_be_damaged_when_it_is_decoded() -> None:
    drive = Drive(request(chunks(4), 5.0), steady(20 * MB), damaged=frozenset({(1, 1)}))
    _, start = drive.run()
    assert start.parts == (3, 1, 3, 3) and drive.planner.failed_parts == 1
    assert [made for made in decodes(drive) if made[0] == 1] == [(1, 3), (1, 1)], "from the parts that are sound"
    drive = Drive(request(chunks(4), 5.0), steady(20 * MB), damaged=frozenset({(2, 0)}))
    _, start = drive.run()
    assert start.parts == (3, 3)


def test_zero_bandwidth_computes() -> None:
    drive = Drive(request(chunks(4), 2.0), steady(0.0), expected={"net": 20 * MB})
    seconds, start = drive.run()
    assert start.chunks == 0 and seconds <= 2.0 and start.in_time
    assert canceled(drive)


def test_a_link_that_stalls_between_bases() -> None:
    drive = Drive(request(chunks(8), 1.9), {"net": lambda now: 2 * MB if now < 0.12 else 0.0})
    seconds, start = drive.run()
    assert start.chunks in (1, 2) and seconds <= 1.9, "what has come is used, and the rest is computed in time"


def test_a_link_that_stalls_when_it_is_too_late_to_compute() -> None:
    drive = Drive(request(chunks(8), 0.6), {"net": lambda now: 2 * MB if now < 0.12 else 0.0})
    seconds, start = drive.run()
    assert not start.in_time and start.kl <= 0.02
    assert seconds < 3.0, "it does not wait for good"


@pytest.mark.parametrize(("true", "told"), [(2 * MB, 20 * MB), (20 * MB, 2 * MB)])
def test_a_rate_that_is_wrong_by_ten_times(true: float, told: float) -> None:
    drive = Drive(request(chunks(8), 1.0), steady(true), expected={"net": told})
    seconds, start = drive.run()
    assert seconds <= 1.0 and start.chunks == 8
    possible = min(true * 0.8, 8 * sum(SIZES))
    assert sum(sum(SIZES[:parts]) for parts in start.parts) > 0.6 * possible, "the estimate follows what is measured"
    rate = drive.rates["net"].forecast(0.5).rate
    assert 0.5 < rate / true < 2


def test_a_rate_that_is_wrong_by_ten_times_with_time_to_compute_only_at_first() -> None:
    drive = Drive(request(chunks(8), 2.3), steady(0.2 * MB), expected={"net": 2 * MB})
    seconds, start = drive.run()
    assert seconds <= 2.3 and start.chunks < 3, "computing all takes 2.06 s: the error has to be seen within .2 s"


@pytest.mark.parametrize("deadline", [-1.0, 0.0, 0.03])
def test_a_deadline_that_cannot_be_met_starts_as_early_as_the_floor_allows(deadline: float) -> None:
    drive = Drive(request(chunks(4), deadline), steady(20 * MB))
    seconds, start = drive.run()
    assert (start.parts, start.in_time) == ((1,) * 4, False)
    assert seconds < 4 * SIZES[0] / (20 * MB) + 0.06
    assert all(part == 0 for _, part in drive.arrived)


# --- the floor


def test_the_floor_is_as_necessary_as_the_bases() -> None:
    drive = Drive(request(chunks(4), 0.6, kl_max=0.01), steady(1 * MB), token_seconds=4e-3)
    seconds, start = drive.run()
    assert start.kl <= 0.01 and seconds > 0.6 and not start.in_time
    assert (start.chunks, sorted(start.parts)) == (4, [1, 2, 2, 2]), "no more than the floor needs, since it is late"


def test_a_floor_that_parts_cannot_reach_is_computed() -> None:
    _, start = Drive(request(chunks(4), 0.1, kl_max=0.0001), steady(100 * MB)).run()
    assert start.chunks * KL[2] / 4 <= 0.0001 and start.chunks == 0
    own = chunks(4, parts=1)
    _, start = Drive(request(own, 0.1, kl_max=0.0101), steady(100 * MB)).run()
    assert start.chunks == 2 and start.kl == pytest.approx(0.01), "computed tokens lose nothing"


def test_a_floor_of_zero_takes_only_what_is_exact() -> None:
    exact = (ChunkParts(TOKENS, (Part(50_000, 0.0, "net"),)),) * 2
    assert Drive(request(exact, 5.0, kl_max=0.0), steady(20 * MB)).run()[1].chunks == 2
    assert Drive(request(chunks(2), 5.0, kl_max=0.0), steady(20 * MB)).run()[1].chunks == 0


@pytest.mark.parametrize("seed", range(12))
def test_the_floor_holds_whatever_happens(seed: int) -> None:
    random = np.random.default_rng(seed)
    rates = 10 ** random.uniform(4.5, 7.5, size=40) * (random.random(40) > 0.2)
    kl_max = float(random.choice([0.002, 0.006, 0.015, 0.02]))
    missing = frozenset((int(random.integers(6)), int(random.integers(3))) for _ in range(int(random.integers(3))))
    own = tuple(
        ChunkParts(
            TOKENS,
            tuple(Part(size, kl, str(random.choice(["net", "disk"]))) for size, kl in zip(SIZES, KL, strict=True)),
        )
        for _ in range(6)
    )
    drive = Drive(
        request(own, float(random.uniform(0.1, 2.5)), kl_max, list(Compute)[seed % 2]),
        {"net": lambda now: float(rates[int(now / 0.1) % 40]), "disk": lambda now: float(rates[int(now / 0.07) % 40])},
        expected={"net": float(10 ** random.uniform(5, 7)), "disk": 1e6},
        missing=missing,
        damaged=frozenset({(int(random.integers(6)), int(random.integers(3)))}),
    )
    _, start = drive.run(60.0)
    assert start.kl <= kl_max * (1 + 1e-9)
    assert start.kl == pytest.approx(sum(KL[parts - 1] for parts in start.parts) / 6)
    for chunk, parts in enumerate(start.parts):
        assert parts >= 1 and {(chunk, part) for part in range(parts)} <= set(drive.arrived) - missing - drive.damaged
        assert [made for made in decodes(drive) if made[0] == chunk][-1][1] == parts


# --- queues and tiers


def test_refinements_go_on_while_the_engine_is_busy() -> None:
    _, idle = Drive(request(chunks(4), 0.7), steady(1 * MB)).run()
    drive = Drive(request(chunks(4), 0.7, engine_free=1.5), steady(1 * MB))
    _, busy = drive.run()
    assert busy.kl < idle.kl and drive.steps[-1][0] <= 1.5
    assert not busy.in_time


def test_tiers_are_asked_at_the_same_time_and_parts_may_overtake_each_other() -> None:
    own = tuple(
        ChunkParts(TOKENS, tuple(Part(size, kl, tier) for size, kl, tier in zip(SIZES, KL, tiers, strict=True)))
        for tiers in (("slow", "fast", "slow"), ("fast", "fast", "slow"), ("slow", "fast", "fast"))
    )
    drive = Drive(request(own, 5.0), {"slow": lambda now: 1 * MB, "fast": lambda now: 50 * MB})
    seconds, start = drive.run()
    assert start.parts == (3, 3, 3)
    assert {fetch.tier for fetch in drive.steps[0][1].fetch} == {"slow", "fast"}
    assert drive.arrived.index((0, 1)) < drive.arrived.index((0, 0)), "a refinement before its base"
    assert len(drive.arrived) == 9, "nothing is fetched twice"
    slow = SIZES[0] * 2 + SIZES[2] * 2
    assert seconds < slow / MB + 0.1


def test_requests_overlap_so_that_latency_costs_once() -> None:
    drive = Drive(request(chunks(16), 5.0), steady(100 * MB), latency=0.03)
    seconds, start = drive.run()
    fetches = sum(len(step.fetch) for _, step in drive.steps)
    assert start.parts == (3,) * 16 and fetches > 5
    assert seconds < 16 * sum(SIZES) / (100 * MB) + 3 * drive.latency + 0.05


def test_rates_outlive_a_load() -> None:
    drive = Drive(request(chunks(8), 2.0), steady(2 * MB), expected={"net": 20 * MB})
    drive.run()
    later = LoadPlanner(
        request(chunks(8), 1.0), drive.rates, LinearCost(1e-3, 0.0), LinearCost(1e-5, 0.0), now=0.0
    )  # fmt: skip
    later.next(0.0)
    assert later.plan is not None and 2 * KL[2] < later.plan.kl < KL[0], "all parts would take 1.7 s"
    drive = Drive(request(chunks(8), 2.0), steady(20 * MB), decode_seconds=0.05, decode_expected=0.01)
    drive.run()
    assert drive.decode(TOKENS, 0.0) + drive.decode(0.0, sum(SIZES)) == pytest.approx(0.05, rel=0.1)


# --- misuse


def planner(**options: Any) -> LoadPlanner:
    return LoadPlanner(
        options.pop("asked", request(chunks(2), 1.0)), options.pop("links", {"net": LinkRate(1e6, 0.0)}),
        LinearCost(1e-3, 0.0), LinearCost(1e-5, 0.0), now=0.0, **options,
    )  # fmt: skip


def test_misuse_is_refused() -> None:
    with pytest.raises(InputError, match="links: must have the rate of every tier, got none for 'net'"):
        planner(links={"disk": LinkRate(1e6, 0.0)})
    for confidence in (0.4, 1.0, math.nan):
        with pytest.raises(InputError, match="confidence: must be"):
            planner(confidence=confidence)
    made = planner()
    (fetch, *_) = made.next(0.1).fetch
    with pytest.raises(InputError, match="now: must not run backwards"):
        made.next(0.0)
    with pytest.raises(InputError, match="missing: must be parts of the request"):
        made.failed(fetch, 0.2, ((9, 9),))
    with pytest.raises(InputError, match="decoded: must follow"):
        made.decoded(0.2)
    with pytest.raises(InputError, match="part: must be one that is being decoded, got 0"):
        made.decode_failed(0, 0.2)
    made.arrived(fetch, 0.2)
    with pytest.raises(InputError, match="fetch: must be under way"):
        made.arrived(fetch, 0.3)
    done = planner(asked=request((ChunkParts(TOKENS, ()),), 1.0))
    assert done.next(0.0).start is not None
    with pytest.raises(InputError, match="must not be used after the model was started"):
        done.next(0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoadRequest((), 1.0, 0.02), "chunks: must not be empty"),
        (lambda: LoadRequest(chunks(1), math.inf, 0.02), "deadline: must be a time"),
        (lambda: LoadRequest(chunks(1), 1.0, -0.1), "kl_max: must be at least 0"),
        (lambda: LoadRequest(chunks(1), 1.0, 0.02, start=-1), "start: must be at least 0"),
        (lambda: LoadRequest(chunks(1), 1.0, 0.02, rest=-1), "rest: must be at least 0"),
        (lambda: LoadRequest(chunks(1), 1.0, 0.02, engine_free=math.nan), "engine_free: must be a time"),
        (lambda: ChunkParts(0, ()), "tokens: must be at least 1"),
        (lambda: ChunkParts(1, (Part(0, 0.1, "net"),)), r"parts\[0\].nbytes: must be at least 1"),
        (lambda: ChunkParts(1, (Part(1, math.nan, "net"),)), r"parts\[0\].kl: must be finite"),
        (lambda: ChunkParts(1, (Part(1, 0.1, "net"), Part(1, 0.1, "net"))), r"parts\[1\].kl: must be below"),
    ],
)
def test_requests_are_checked(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


# --- real parts


def test_parts_of_the_codec_decode_to_what_was_planned() -> None:
    """The planner's steps, taken with real parts: what is in place at the start is what these parts decode to."""
    layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 2, "float32", max_positions=None)
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(2, 64, 2, 8, generator=generator)

    made = [KVChunk(noise(), noise(), layout) for _ in range(8)]
    codec = Codec(fit(layout, made), "high", refinements=1)
    stored = [codec.encode_parts(chunk) for chunk in made[:3]]
    own = tuple(
        ChunkParts(64, tuple(Part(len(part), kl, "net") for part, kl in zip(parts, KL[:2], strict=True)))
        for parts in stored
    )
    rate = sum(map(len, stored[0])) * 3 / 0.5  # all parts take .5 s
    drive = Drive(request(own, 0.49), steady(rate))
    _, start = drive.run()
    assert start.chunks == 3 and len(set(start.parts)) > 1 and 3 < sum(start.parts) < 6
    placed: dict[int, KVChunk] = {}
    for chunk, parts in decodes(drive):
        placed[chunk] = codec.decode(codec.open(stored[chunk][0], refinements=stored[chunk][1:parts]))
    errors = []
    for chunk, parts in enumerate(start.parts):
        expected = codec.decode(stored[chunk][0], refinements=stored[chunk][1:parts])
        assert all(map(torch.equal, placed[chunk].keys + placed[chunk].values, expected.keys + expected.values))
        errors.append(float((expected.keys[0] - made[chunk].keys[0]).square().mean()))
    assert all(
        a > b
        for a, p in zip(errors, start.parts, strict=True)
        for b, q in zip(errors, start.parts, strict=True)
        if p < q
    )
