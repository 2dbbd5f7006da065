"""Deadlines on the scheduler's side: what loads aim at, what is counted, and which blocks are renamed."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.vllm.sides import BLOCK, CHUNK, Desk, make_request
from tests.integrations.vllm.worker.test_deadlines import profile

from cuvee.integrations.core.costs import LinearCost
from cuvee.integrations.vllm.decision import Restored
from cuvee.integrations.vllm.messages import Delivery, Load, Report
from cuvee.integrations.vllm.pages.layer_groups import LayerGroup

LOSSY = {"quality": None, "step": 0.25, "refinements": 1}


@pytest.fixture
def desk(desk: Callable[..., Desk]) -> Callable[..., Desk]:
    """Of entries in two parts."""
    return lambda **options: desk(**{"profile": profile(), "min_tokens": 8, **LOSSY, **options})


def asking(tokens: int = 100, name: str = "r", **wants: Any) -> SimpleNamespace:
    ids = [(7 * index + sum(name.encode())) % 61 for index in range(tokens)]  # no two names share a prefix
    params = {"cuvee": wants} if wants else None
    never = time.time() + 1e6  # it has waited no time before it reaches the scheduler, however busy this machine is
    return make_request(name, ids=ids, kv_transfer_params=params, arrival_time=never)


def loading(d: Desk, request: SimpleNamespace, seconds: float = 0.0) -> Load:
    """The load of a request, of which the store has four chunks, so long after it has arrived."""
    d.put(request, 4)
    d.side.arrived(request)
    d.now += seconds
    tokens, _ = d.matched(request)
    d.side.allocated(request, d.tables, tokens)
    (load,) = d.plan().loads
    return load


def ended(request: SimpleNamespace, parts: tuple[int, ...], complete: bool = True) -> Report:
    """A rank's report of the end of a load that restored chunks from so many parts."""
    delivery = Delivery(request.request_id, 0, (CHUNK,) * len(parts), parts, complete)
    return Report(delivered=[delivery], ended=[request.request_id])


# What loads aim at ---------------------------------------------------------------------------------------------------


def test_a_load_aims_at_what_its_request_asks_for(desk: Callable[..., Desk]) -> None:
    d, request = desk(), asking(deadline_ms=500)
    aim = loading(d, request, seconds=0.2).aim
    assert aim is not None and aim.seconds == pytest.approx(0.3)
    assert aim.rest == 100 - 4 * CHUNK
    waited = asking(name="waited", deadline_ms=500)
    waited.arrival_time = time.time() - 0.4  # before it reached the scheduler
    late = loading(d, waited).aim
    assert late is not None and late.seconds < 0.15
    assert loading(d, asking(name="other")).aim is None


def test_the_engine_has_a_default_that_a_request_replaces(desk: Callable[..., Desk]) -> None:
    d = desk(deadline_ms=2000)
    default = loading(d, asking()).aim
    assert default is not None and default.seconds == pytest.approx(2)
    own = loading(d, asking(name="own", deadline_ms=70)).aim
    assert own is not None and own.seconds == pytest.approx(0.07)
    assert loading(d, asking(name="none", deadline_ms=None)).aim is None


def test_a_deadline_has_its_plan_decide_whether_loading_pays(desk: Callable[..., Desk]) -> None:
    d = desk(decide="measured")
    pays = d.side._pays
    for tokens in (100, 200) * 5:
        pays.prefill.observe(tokens, 0.0, tokens * 1e-6)
        pays.observe(Restored("load", tokens, 0, tokens * 1e-3))
    assert loading(d, asking(deadline_ms=100)).aim is not None
    other = asking(name="other")
    d.put(other, 4)
    d.side.arrived(other)
    assert d.matched(other)[0] == 0, "without a deadline, what is slower to load is computed"


def test_steps_teach_what_computing_costs(desk: Callable[..., Desk]) -> None:
    d = desk()
    for index in range(8):
        request = asking(100, f"r{index}")
        d.side.arrived(request)
        plan = d.plan((request, 0, 100))
        d.side.take(Report([plan.step], step_seconds={plan.step: 0.5}))
    aim = loading(d, asking(name="last", deadline_ms=100)).aim
    assert aim is not None
    assert LinearCost(*aim.prefill)(100, 100**2) == pytest.approx(0.5, rel=0.1)


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wants", [{"deadline_ms": 0}, {"deadline_ms": True}, {"deadline_ms": 10**400}, {"deadline_ms": float("nan")}]
)
def test_malformed_targets_are_refused_and_the_request_is_served(
    desk: Callable[..., Desk], wants: Any, caplog: pytest.LogCaptureFixture
) -> None:
    d = desk()
    request = make_request(kv_transfer_params={"cuvee": wants})
    assert loading(d, request).aim is None
    assert "kv_transfer_params.cuvee" in caplog.text and len(caplog.text) < 1000
    assert d.recorder.totals()["deadlines", "refused"] == 1
    outcome = d.side.outcome(request)
    assert outcome is not None and outcome["error"].startswith("kv_transfer_params.cuvee.deadline_ms: must be")


def test_an_engine_with_windows_refuses_deadlines_by_name(desk: Callable[..., Desk]) -> None:
    d, request = desk(refinements=0, groups=(LayerGroup((0, 1, 2), 64),)), asking(deadline_ms=100)
    assert loading(d, request).aim is None
    assert d.recorder.totals()["deadlines", "refused"] == 1


# What was delivered --------------------------------------------------------------------------------------------------


def test_blocks_that_are_worse_than_stored_are_renamed_and_what_follows_them_is_not_stored(
    desk: Callable[..., Desk],
) -> None:
    """The worst of all ranks counts."""
    d, request = desk(shards=2), asking(deadline_ms=5000)
    loading(d, request)
    exact = list(request.block_hashes)
    d.side.take(ended(request, (2, 2, 2, 2)))
    assert request.block_hashes == exact
    d.side.take(ended(request, (2, 1, 2), complete=False))
    same = [old == new for old, new in zip(exact, request.block_hashes, strict=True)]
    assert same == [True] * (CHUNK // BLOCK) + [False] * (len(exact) - CHUNK // BLOCK)
    assert not d.plan((request, 4 * CHUNK, 100 - 4 * CHUNK)).saves
    assert d.unstored() == {"quality": 100 - 4 * CHUNK}
    d.side.finished(request, d.tables)
    assert not d.plan().last_saves


def test_complete_loads_keep_their_names_and_go_on_to_be_stored(desk: Callable[..., Desk]) -> None:
    d, request = desk(), asking(deadline_ms=500)
    loading(d, request)
    exact = list(request.block_hashes)
    d.side.take(ended(request, (2, 2, 2, 2)))
    assert request.block_hashes == exact
    saves = d.plan((request, 4 * CHUNK, 100 - 4 * CHUNK)).saves
    assert [save.entry.start for save in saves] == [4 * CHUNK, 5 * CHUNK, 6 * CHUNK][: len(saves)] and saves


def test_a_plan_that_leaves_chunks_out_is_not_repeated(desk: Callable[..., Desk]) -> None:
    d, request = desk(), asking(deadline_ms=500)
    loading(d, request)
    d.side.take(ended(request, (), complete=False))
    assert d.matched(request)[0] == 0, "the engine asks again, for it has freed the blocks"


@pytest.mark.parametrize("given_up", [False, True])
def test_a_request_without_a_deadline_or_given_up_keeps_poor_blocks_to_itself_as_well(
    desk: Callable[..., Desk], given_up: bool
) -> None:
    d, request = desk(), asking()
    loading(d, request)
    exact = list(request.block_hashes)
    if given_up:
        d.side._give_up(request)
    d.side.take(ended(request, (1, 1, 1, 1)))
    assert not set(exact) & set(request.block_hashes)


# Deadlines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "result"), [(0.3, "met"), (0.7, "missed")])
def test_the_step_of_the_first_token_tells_whether_the_deadline_was_met(
    desk: Callable[..., Desk], seconds: float, result: str
) -> None:
    d, request = desk(), asking(deadline_ms=500)
    loading(d, request)
    d.side.take(ended(request, (2, 2, 2, 1)))
    d.plan((request, 4 * CHUNK, 10))
    last = d.plan((request, 4 * CHUNK + 10, 100 - 4 * CHUNK - 10), new=False)
    d.side.take(Report(steps=[last.step - 1]))  # the engine had planned ahead
    d.now += seconds
    if result == "met":  # a request of one token ends before the engine hands on the step's report
        d.side.finished(request, d.tables)
    for _ in range(2):
        d.side.take(Report(steps=[last.step]))
    counted = {label: value for (name, label), value in d.recorder.totals().items() if name == "deadlines"}
    assert counted == {result: 1}


def test_a_request_that_is_preempted_after_its_first_token_is_in_no_hurry(desk: Callable[..., Desk]) -> None:
    d, request = desk(), asking(deadline_ms=500)
    loading(d, request)
    d.side.take(ended(request, (2, 2, 2, 2)))
    plan = d.plan((request, 4 * CHUNK, 100 - 4 * CHUNK))
    d.side.take(Report(steps=[plan.step]))
    tokens, _ = d.matched(request)
    d.side.allocated(request, d.tables, tokens)
    (load,) = d.plan().loads
    assert load.aim is None
