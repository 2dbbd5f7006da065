"""`BreakEven` and `BlendPays` against simulated stores and engines whose rates are known."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest

from cuvee.codec.errors import InputError
from cuvee.integrations.vllm.decision import (
    MIN_SAMPLES,
    REPORT_SECONDS,
    TRIAL_EVERY,
    WINDOW,
    BlendCost,
    BlendPays,
    BreakEven,
    Estimate,
    load_work,
)


@dataclass
class World:
    """What loads and prefill steps really take, with noise that grows with duration."""

    prefill: float  # tokens/s
    load: float  # tokens/s
    overhead: float = 0.0  # s
    noise: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def load_seconds(self, tokens: int) -> float:
        return self.overhead + tokens / self.load

    def observe_prefill(self, decision: BreakEven, tokens: int, slower: float = 1) -> None:
        decision.observe_prefill(tokens, tokens / self.prefill * slower * self._factor())

    def observe_load(self, decision: BreakEven, tokens: int, slower: float = 1) -> None:
        decision.observe_load(tokens, self.load_seconds(tokens) * slower * self._factor())

    def serve(self, decision: BreakEven, samples: int, first: float = 1) -> None:
        """Steps and loads of all lengths; the first of each takes `first` times as long."""
        for index in range(samples):
            slower = first if index == 0 else 1
            self.observe_load(decision, 256 * int(self.random.integers(1, 33)), slower)
            self.observe_prefill(decision, int(self.random.integers(16, 2049)), slower)

    def _factor(self) -> float:
        return math.exp(self.noise * self.random.standard_normal())


def exact(world: World, load_lengths: list[int]) -> BreakEven:
    """Without noise: loads of these lengths and as many steps."""
    world.noise = 0
    decision = BreakEven()
    for tokens in load_lengths:
        world.observe_load(decision, tokens)
        world.observe_prefill(decision, 100)
    return decision


WORLDS = {
    "store-far-away": World(prefill=5e3, load=20e3, overhead=0.2),
    "fast-engine": World(prefill=20e3, load=96e3, overhead=0.05),
    "load-barely-faster": World(prefill=5e3, load=6e3, overhead=0.3),
    "load-slower": World(prefill=5e3, load=3e3, overhead=0.02),
    "load-always-pays": World(prefill=5e3, load=50e3, overhead=0.001),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("first", [1, 100], ids=["warm", "first-call-compiles"])
def test_decides_as_if_it_knew(name: str, first: float) -> None:
    truth = WORLDS[name]
    right = asked = 0
    for seed in range(40):
        world = World(truth.prefill, truth.load, truth.overhead, 0.25, seed)
        decision = BreakEven()
        world.serve(decision, 16, first)
        for tokens in range(256, 8193, 256):
            load, recompute = world.load_seconds(tokens), tokens / world.prefill
            if max(load, recompute) > 1.4 * min(load, recompute):  # away from break-even
                asked += 1
                estimate = decision.tokens
                assert estimate is not None
                right += (tokens >= estimate) == (load < recompute)
    assert right / asked > 0.95


@pytest.mark.parametrize("lengths", [[256, 1024, 4096, 512, 2048], list(range(100, 3300, 100))])
def test_finds_both_lines_exactly_without_noise(lengths: list[int]) -> None:
    estimate = exact(World(prefill=2e3, load=10e3, overhead=0.099), lengths).estimate
    assert estimate is not None
    assert estimate.prefill_rate == pytest.approx(2e3)
    assert estimate.load_rate == pytest.approx(10e3)
    assert estimate.overhead == pytest.approx(0.099)
    assert estimate.break_even == 248  # 0.099 / (1/2000 - 1/10000) = 247.5


def test_break_even_length() -> None:
    assert Estimate(1000, 2000, 0.1).break_even == 200
    assert Estimate(1000, 2000, 0.1001).break_even == 201  # rounded up
    assert Estimate(1000, 2000, 0).break_even == 1
    assert Estimate(1000, math.inf, 0.1).break_even == 100
    assert Estimate(1000, 1000, 0).break_even == math.inf
    assert Estimate(1000, 900, 0).break_even == math.inf


def test_what_a_load_has_to_decode() -> None:
    assert load_work(3, 0, 256) == 768
    assert load_work(0, 16, 256) == 16 + 80  # a third of the 240 tokens that it is short of
    assert load_work(2, 255, 256) == 512 + 256
    work = [load_work(0, tail, 256) for tail in range(1, 256)]
    assert work == sorted(work) and work[-1] == load_work(1, 0, 256)


def test_what_is_decoded_in_vain_must_pay_too() -> None:
    estimate = Estimate(1000, 2000, 0.1)  # pays from 200 tokens on
    assert estimate.pays(200, 200) and not estimate.pays(199, 199)
    # 100 tokens in vain are 0.05 s more: 0.15 / (1/1000 - 1/2000) = 300, and a rounding error
    assert estimate.pays(301, 401) and not estimate.pays(299, 399)
    assert Estimate(1000, math.inf, 0.1).pays(100, 10**6), "where length makes no difference"
    assert not Estimate(1000, 900, 0).pays(10**6, 10**6)
    decision = exact(World(prefill=2e3, load=10e3, overhead=0.099), [256, 1024, 4096, 512, 2048])
    assert decision.worth_loading(248, 248) and not decision.worth_loading(248, 260)


def test_loads_until_both_sides_are_known() -> None:
    world = World(prefill=10e3, load=1e3)
    decision = BreakEven()
    for _ in range(WINDOW):
        world.observe_prefill(decision, 100)
    for _ in range(MIN_SAMPLES - 1):
        world.observe_load(decision, 512)
    unknown = (decision.tokens, decision.estimate, decision.changed())
    assert unknown == (None, None, False)
    assert all(decision.worth_loading(1) for _ in range(2 * TRIAL_EVERY))
    world.observe_load(decision, 512)
    assert decision.tokens == math.inf
    assert not decision.worth_loading(10**6)

    steps_missing = BreakEven()
    for _ in range(WINDOW):
        world.observe_load(steps_missing, 512)
    assert steps_missing.tokens is None and steps_missing.worth_loading(1)


def test_break_even_is_the_first_length_that_pays() -> None:
    decision = exact(World(prefill=2e3, load=10e3, overhead=0.099), [256, 1024, 4096, 512, 2048])
    assert decision.worth_loading(248) and not decision.worth_loading(247)


def test_loads_of_one_length_are_all_rate() -> None:
    estimate = exact(World(prefill=2e3, load=10e3, overhead=0.099), [1000, 1100, 1200, 1100, 1000]).estimate
    assert estimate is not None
    assert estimate.overhead == 0
    assert estimate.load_rate == pytest.approx(1100 / 0.21, rel=0.01)


def test_only_the_last_samples_count() -> None:
    world = World(prefill=2e3, load=10e3, overhead=0.1, noise=0)
    decision = exact(world, [100, 150, 5000])
    for _ in range(WINDOW):
        world.observe_load(decision, 1000)
        world.observe_prefill(decision, 100)
    assert decision.estimate is not None
    assert decision.estimate.overhead == 0  # nothing left that tells it from the rate


def test_a_cost_without_slope_is_all_overhead() -> None:
    decision = BreakEven()
    for tokens, seconds in [(100, 0.1), (8000, 0.1), (200, 0.1), (4000, 0.1), (2000, 0.1)]:
        decision.observe_load(tokens, seconds)
        decision.observe_prefill(100, 0.1)
    estimate = decision.estimate
    assert estimate is not None
    assert (estimate.load_rate, estimate.overhead) == (math.inf, 0.1)
    assert decision.tokens == 100
    assert decision.describe() == "loads pay from 100 tokens on: prefill 1 k tokens/s, load 100 ms"


def test_longer_loads_that_were_quicker_give_no_negative_rate() -> None:
    decision = BreakEven()
    for tokens, seconds in [(100, 0.4), (200, 0.3), (400, 0.2), (800, 0.1), (1600, 0.05)]:
        decision.observe_load(tokens, seconds)
        decision.observe_prefill(100, 0.1)
    assert decision.estimate == Estimate(1e3, math.inf, 0.3)


@pytest.mark.parametrize("slow_length", [256, 8192])
def test_a_first_load_that_compiles_does_not_count(slow_length: int) -> None:
    world = World(prefill=2e3, load=10e3, overhead=0.099, noise=0)
    decision = BreakEven()
    world.observe_load(decision, slow_length, 100)
    world.observe_prefill(decision, 1000, 100)
    for tokens in (256, 1024, 4096, 512):
        world.observe_load(decision, tokens)
        world.observe_prefill(decision, 1000)
    assert decision.tokens == 248


def test_a_long_first_step_that_compiles_is_forgotten() -> None:
    # It weighs as much as eight of the others: the median is theirs after nine.
    world = World(prefill=2e3, load=10e3, noise=0)
    decision = BreakEven()
    world.observe_prefill(decision, 2048, 100)
    for _ in range(9):
        world.observe_prefill(decision, 256)
        world.observe_load(decision, 512)
    assert decision.estimate is not None
    assert decision.estimate.prefill_rate == pytest.approx(2e3)


def test_long_steps_decide_the_prefill_rate() -> None:
    decision = BreakEven()
    for _ in range(8):
        decision.observe_prefill(2000, 1.0)
        for _ in range(3):
            decision.observe_prefill(16, 0.02)  # a step's fixed cost, hardly a token
        decision.observe_load(512, 0.1)
    assert decision.estimate is not None
    assert decision.estimate.prefill_rate == pytest.approx(2e3)


@pytest.mark.parametrize("noise", [0, 0.2])
def test_follows_a_store_that_slows_down(noise: float) -> None:
    decision = BreakEven()
    World(prefill=2e3, load=10e3, overhead=0.01, noise=noise).serve(decision, 3 * WINDOW)
    assert decision.worth_loading(2048)
    World(prefill=2e3, load=1e3, overhead=0.01, noise=noise, seed=1).serve(decision, 12)
    assert decision.tokens == math.inf
    assert not decision.worth_loading(2048)


@pytest.mark.parametrize(("faster", "pays"), [(100.0, False), (0.2, True)])
def test_follows_an_engine_whose_speed_changes(faster: float, pays: bool) -> None:
    decision = BreakEven()
    World(prefill=2e3, load=1e3 if pays else 10e3, overhead=0.01).serve(decision, 2 * WINDOW)
    assert decision.worth_loading(4096) is not pays
    changed = World(prefill=2e3 * faster, load=1, seed=1)
    for _ in range(12):
        changed.observe_prefill(decision, 1024)
    assert decision.worth_loading(4096) is pays


def test_trials_notice_that_a_store_has_recovered() -> None:
    decision = BreakEven()
    World(prefill=2e3, load=1e3).serve(decision, WINDOW)
    recovered = World(prefill=2e3, load=50e3, overhead=0.001)
    asked = loaded = 0
    while asked < 16 * TRIAL_EVERY and decision.tokens == math.inf:
        asked += 1
        if decision.worth_loading(4096):
            loaded += 1
            recovered.observe_load(decision, 4096)
        recovered.observe_prefill(decision, 512)
    assert decision.tokens is not None and decision.tokens < 4096
    assert asked == loaded * TRIAL_EVERY


def test_one_in_so_many_declined_is_tried() -> None:
    decision = exact(World(prefill=2e3, load=1e3), [512] * MIN_SAMPLES)
    answers = [decision.worth_loading(512) for _ in range(3 * TRIAL_EVERY)]
    assert [index for index, answer in enumerate(answers, 1) if answer] == [k * TRIAL_EVERY for k in (1, 2, 3)]


def test_accepted_loads_use_up_no_trials() -> None:
    decision = exact(World(prefill=2e3, load=10e3, overhead=0.099), [256, 1024, 4096, 512, 2048])
    answers = []
    for _ in range(TRIAL_EVERY - 1):
        assert decision.worth_loading(5000)
        answers.append(decision.worth_loading(10))
    assert not any(answers)
    assert decision.worth_loading(10)


def test_says_when_the_break_even_length_changes() -> None:
    now = 0.0
    decision = BreakEven(clock=lambda: now)

    def world(overhead: float) -> None:
        for _ in range(WINDOW):
            for tokens in (500, 5000):
                decision.observe_load(tokens, overhead + tokens / 2000)
            decision.observe_prefill(1000, 1.0)

    assert not decision.changed()
    world(0.1)  # break-even 200
    assert decision.changed()
    assert not decision.changed()
    now += REPORT_SECONDS
    world(0.12)  # 240: less than a quarter more
    assert not decision.changed()
    world(0.13)  # 260, against the 200 that were reported
    assert decision.changed() and not decision.changed()
    world(0.05)
    now += REPORT_SECONDS / 2
    assert not decision.changed()  # too soon
    now += REPORT_SECONDS / 2
    assert decision.changed()
    now += REPORT_SECONDS
    for _ in range(WINDOW):
        decision.observe_prefill(1000, 0.1)
    assert decision.tokens == math.inf
    assert decision.changed()
    now += REPORT_SECONDS
    assert not decision.changed()
    world(0.05)
    assert decision.changed()


def test_describes_itself() -> None:
    decision = BreakEven()
    decision.observe_load(100, 0.1)
    assert decision.describe() == "break-even length not measured yet: 1 of 5 loads, 0 of 5 prefill steps"
    world = World(prefill=21_300, load=96e3, overhead=3.1e-3)
    text = exact(world, [256, 1024, 4096, 512, 2048]).describe()
    assert text == "loads pay from 85 tokens on: prefill 21.3 k tokens/s, load 96 k tokens/s + 3.1 ms"
    text = exact(World(prefill=800, load=500), [512] * MIN_SAMPLES).describe()
    assert text == "loads pay at no length: prefill 800 tokens/s, load 500 tokens/s + 0 ms"


@pytest.mark.parametrize("method", ["observe_prefill", "observe_load"])
@pytest.mark.parametrize(
    ("tokens", "seconds", "field"),
    [(0, 1.0, "tokens"), (-5, 1.0, "tokens"), (1, 0.0, "seconds"), (1, -1.0, "seconds"), (1, math.inf, "seconds"),
     (1, math.nan, "seconds")],
)  # fmt: skip
def test_refuses_what_cannot_be_measured(method: str, tokens: int, seconds: float, field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}: must be"):
        getattr(BreakEven(), method)(tokens, seconds)


def test_threads_may_share_one() -> None:
    world = World(prefill=2e3, load=1e3, noise=0)
    decision = BreakEven()
    trials: list[int] = []
    world.serve(decision, MIN_SAMPLES)

    def run() -> None:
        for _ in range(25):
            decision.observe_load(512, 0.512)
            decision.observe_prefill(512, 0.256)
        trials.append(sum(decision.worth_loading(512) for _ in range(TRIAL_EVERY)))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(trials) == 8


# Blends --------------------------------------------------------------------------------------------------------------


@dataclass
class Blends:
    """An engine of 2,000 tokens/s, and what its blends really take. Tenants send what `decision` then runs, or not."""

    noise: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.decision = BlendPays()
        for _ in range(WINDOW):
            self.decision.observe_prefill(1024, 1024 / 2000 * self._factor())

    def seconds(self, blend: BlendCost) -> tuple[float, float]:
        place = 0.005 + 0.002 * blend.pieces + (blend.placed + blend.prefix) / 50_000
        return place, 0.02 + blend.computed / 1500

    def pays(self, tokens: int, blend: BlendCost) -> bool:
        return sum(self.seconds(blend)) < tokens / 2000

    def send(self, tokens: int, blend: BlendCost, slower: float = 1) -> bool:
        """Whether it is made."""
        made = self.decision.worth(tokens, blend)
        if made:
            place, compute = (seconds * self._factor() * slower for seconds in self.seconds(blend))
            self.decision.observe(replace(blend, place_seconds=place, compute_seconds=compute))
        return made

    def _factor(self) -> float:
        return math.exp(self.noise * self.random.standard_normal())


USELESS = {
    "mostly text": (4000, BlendCost(2, 256, 3800, 4000)),
    "small pieces": (4000, BlendCost(1000, 4000, 600, 100_000)),
    "next to nothing": (20, BlendCost(1, 16, 4, 5000)),
    "a long prefix": (300, BlendCost(1, 256, 80, 30_300, prefix=30_000)),
}
USEFUL = {
    "documents": (4000, BlendCost(8, 3600, 900, 4000)),
    "one document": (800, BlendCost(1, 700, 200, 800)),
    "many parts": (8000, BlendCost(60, 7000, 1900, 8000)),
}


@pytest.mark.parametrize("useful", USEFUL)
@pytest.mark.parametrize("useless", USELESS)
@pytest.mark.parametrize("slower", [1, 20])
def test_one_tenant_s_useless_blends_never_refuse_another_s_useful_ones(
    useful: str, useless: str, slower: float
) -> None:
    """`slower`: a tenant that manages to have its own blends take far longer, say by a store that it keeps busy."""
    world = Blends()
    assert world.pays(*USEFUL[useful])
    sent = 0
    for _ in range(20):
        sent += sum(world.send(*USELESS[useless], slower) for _ in range(50))
        assert world.send(*USEFUL[useful]), "whatever the other one has sent"
    if useless != "a long prefix":  # of which most is not what is decided about
        assert not world.pays(*USELESS[useless])
        assert sent <= 2 * MIN_SAMPLES + 1000 / TRIAL_EVERY, "but for trials"


@pytest.mark.parametrize("seed", range(5))
def test_blends_are_made_where_they_pay_once_they_were_measured(seed: int) -> None:
    world = Blends(seed=seed)
    shapes = []
    for _ in range(40):
        tokens, reused = int(world.random.integers(300, 8000)), world.random.uniform(0.02, 0.98)
        pieces = int(world.random.integers(1, 200))
        shapes.append((tokens, BlendCost(pieces, int(tokens * reused), tokens * (1 - 0.85 * reused), tokens)))
    for _ in range(WINDOW):
        for shape in shapes:
            world.send(*shape)
    for tokens, blend in shapes:
        truth = sum(world.seconds(blend)) / (tokens / 2000)
        if not 1 / 2 < truth < 2:  # an octave is as fine as it gets
            declined = dict(world.decision._declined)
            assert world.decision.worth(tokens, blend) == (truth < 1) or declined[blend.shapes] % TRIAL_EVERY == 31


def test_blends_that_became_quicker_are_noticed() -> None:
    world, (tokens, blend) = Blends(noise=0), USEFUL["documents"]
    for _ in range(MIN_SAMPLES):
        assert world.send(tokens, blend, slower=30)
    made = [world.send(tokens, blend) for _ in range(40 * TRIAL_EVERY)]
    assert made[:TRIAL_EVERY].count(True) == 1 and all(made[-10:])


def test_parts_of_blends_that_were_not_measured_are_not_guessed() -> None:
    decision = BlendPays()
    blend = BlendCost(4, 1000, 300, 1300)
    for _ in range(MIN_SAMPLES):
        decision.observe_prefill(1000, 1.0)
        assert decision.expected(blend) == 0
        decision.observe(replace(blend, place_seconds=0.25))
    assert decision.expected(blend) == pytest.approx(0.25)
    for _ in range(MIN_SAMPLES):
        decision.observe(replace(blend, compute_seconds=0.5))
    assert decision.expected(blend) == pytest.approx(0.75) and decision.worth(1000, blend)
    assert decision.expected(replace(blend, pieces=16)) == pytest.approx(0.5)
    assert not decision.worth(700, blend)
    for tokens, seconds in ((0, 1.0), (5, 0.0), (5, math.inf), (5, math.nan)):
        with pytest.raises(InputError):
            decision.observe_prefill(tokens, seconds)


def test_what_is_remembered_of_blends_is_bounded() -> None:
    """Clients choose the shapes."""
    decision, random = BlendPays(), np.random.default_rng(0)
    for _ in range(20_000):
        placed, pieces = int(random.integers(1, 1 << 17)), int(random.integers(1, 1025))
        decision.observe(BlendCost(pieces, placed, float(random.uniform(0, 1 << 17)), placed, 0, 0.1, 0.1))
    assert len(decision._place) < 12 * 19 and len(decision._compute) < 19 * 19
    assert max(map(len, decision._place.values())) <= WINDOW
