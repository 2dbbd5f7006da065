"""The phases of requests and loads, what each call of the engine changes, and the documented way of a chunk."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.vllm.sides import Desk, make_request

from cuvee.integrations.identity.weights_name import WeightsName
from cuvee.integrations.vllm.messages import Delivery, Report, StepPlan
from cuvee.integrations.vllm.phases import NEXT, LoadPhase, RequestPhase, following
from cuvee.integrations.vllm.scheduler.request_record import RequestRecord

DOCS = (Path(__file__).parents[4] / "docs" / "concepts" / "data-flow.md").read_text(encoding="utf-8")
IDS = range(1000, 1100)
SEGMENTS = {"cuvee": {"segments": [[64, 88]]}}  # behind four chunks


@pytest.mark.parametrize("kind", [RequestPhase, LoadPhase])
def test_other_changes_than_those_of_the_table_are_refused(kind: type[Enum]) -> None:
    for before, after in itertools.product(kind, kind):
        if after in NEXT[before]:
            assert following(before, after) is after
        else:
            with pytest.raises(RuntimeError, match=f"phase: {after.value} cannot follow {before.value}"):
                following(before, after)


@pytest.mark.parametrize(("kind", "drawing"), list(enumerate(DOCS.split("```mermaid\nflowchart LR\n")[1:])))
def test_the_phases_are_drawn(kind: int, drawing: str) -> None:
    drawn = set[tuple[str, str]]()
    for line in drawing.split("```", maxsplit=1)[0].splitlines():
        groups = [group.split(" & ") for group in line.strip().split(" --> ")]
        drawn |= {pair for before, after in itertools.pairwise(groups) for pair in itertools.product(before, after)}
    allowed = {(before.value, after.value) for before in (RequestPhase, LoadPhase)[kind] for after in NEXT[before]}
    assert drawn == allowed


@pytest.mark.parametrize("name", ["Load", "Store"])
def test_what_is_loaded_or_stored_goes_through_few_methods(name: str) -> None:
    steps = DOCS.split(f"**{name}**\n\n")[1].split("\n\n")[0]
    assert 10 < len(re.findall(r"`\w+\.\w+`", steps)) <= 22


# What happens, in order, and the phase after each event. Two ranks; four chunks and perhaps a segment are stored.
DAYS = {
    "loaded and preempted": "ask promised, take loading, end loading, end asking, end asking, ask promised, "
    "take loading",
    "asked again and left": "ask promised, ask promised, leave asking, leave asking, end asking",
    "reset": "ask promised, reset asking, take asking, end asking, fail over",
    "blended": "blend asking, ask promised, take loading, place loading, place placed, end placed, end asking",
    "failed": "ask promised, take loading, fail ending, end ending, end over, ask over",
    "failed once a rank had placed": "blend asking, ask promised, take loading, place loading, fail ending, "
    "end ending, end over",
    "failed before a rank had placed": "blend asking, ask promised, take loading, fail ending, place ending",
    "failed once placed": "blend asking, ask promised, take loading, place loading, place placed, fail ending, "
    "place ending, end ending, end over",
    "left out for a deadline": "ask promised, take loading, cut ending, end ending, end over",
    "given up": "ask promised, take loading, break ending, end ending, end over",
    "given up once placed": "blend asking, ask promised, take loading, place loading, place placed, break ending",
    "given up while asking": "break over, ask over, take over",
    "given up once promised": "ask promised, break over, take over, end over",
    "ended while asking": "finish over",
    "ended once promised": "ask promised, finish over",
    "ended while loading": "ask promised, take loading, finish over",
    "ended once placed": "blend asking, ask promised, take loading, place loading, place placed, finish over",
    "early": "early early, ask early, finish over",
    "named": "early early, ask early, name early, ask promised",
    "unnamed": "early early, odd early, name early, ask over",
}


class Day:
    """One request and what becomes of it.

    Attributes:
        seen: changes of its phase.
        drops: what ranks are told to give up.
    """

    def __init__(self, desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.weights = Weights()
        early = {"weights": self.weights} if "early" in name else {}
        self.d = desk(shards=2, blend={"segment_tokens": 12}, **early)
        blends = SEGMENTS if "blend" in name else None
        self.request = make_request(ids=IDS, kv_transfer_params=blends)
        self.d.put(self.request, 4)
        if blends:
            self.d.put_segments(list(IDS)[64:88])
        self.seen: list[tuple[str, str]] = []
        self.drops: list[str] = []
        enter = self.d.side._records.enter

        def entered(record: RequestRecord, phase: RequestPhase) -> None:
            before = record.phase
            enter(record, phase)
            self.seen.append((before.value, phase.value))

        monkeypatch.setattr(self.d.side._records, "enter", entered)
        self.d.side.arrived(self.request)
        self.record = self.d.record()
        self.tokens = 0

    def live(self, events: str, plans: bool = False) -> str:
        """Let all of it happen, perhaps with a step after each event, and return what was made of it."""
        after = []
        for event, _ in map(str.split, events.split(", ")):
            self.do(event)
            after.append(f"{event} {self.record.phase.value}")
            if plans:
                self.plan()
        return ", ".join(after)

    def plan(self) -> StepPlan:
        """Ranks recompute a blend when and as long as all of them have placed it."""
        plan = self.d.plan()
        self.drops += plan.drops
        assert plan.blends == ["r"] * (self.record.phase is RequestPhase.PLACED)
        return plan

    def do(self, event: str) -> None:
        d, request = self.d, self.request
        if event == "ask":
            self.tokens, _ = d.matched(request)
        elif event in ("take", "leave"):
            d.side.allocated(request, d.tables, (self.tokens or 64) if event == "take" else 0)
        elif event == "break":
            d.side._give_up(request)
        elif event == "finish":
            d.side.finished(request, d.tables)
        elif event == "reset":
            d.side.reset()
        elif event == "name":
            self.weights.current = Weights.name
        elif event == "odd":
            request.resumable = True
        elif event == "place":
            d.side.take(Report(placed=["r"]))
        elif event == "end":
            d.side.take(Report(ended=["r"]))
        elif event == "fail":
            d.side.take(Report(failed={"r"}))
        elif event == "cut":
            d.side.take(Report(delivered=[Delivery("r", 0, (16,), (1,), False)]))


class Weights(WeightsName):
    """Weights whose name is there when a test says so."""

    name: Any = type("Named", (), {"text": "model"})
    current: Any = None

    def __init__(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def day(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Day]:
    return lambda name: Day(desk, monkeypatch, DAYS[name])


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("name", DAYS)
def test_each_event_has_its_phase(name: str, plans: bool, day: Callable[[str], Day]) -> None:
    """What has ended leaves nothing behind, is not started, and is given up by ranks that wait with it."""
    made = day(name)
    assert made.live(DAYS[name], plans) == DAYS[name]
    records = made.d.side._records
    assert records.admitted == (made.record.phase.value in ("promised", "loading", "placed", "ending"))
    made.plan()
    assert bool(made.drops) == ("place" in DAYS[name] and name != "blended")
    made.do("finish")
    assert not records and not records.admitted and not made.d.side._records.loading and not made.plan().loads
    made.do("place")
    assert made.d.plan().drops == ["r"] and made.d.plan().drops == []


def test_each_change_of_the_table_happens(day: Callable[[str], Day]) -> None:
    seen = set()
    for name, events in DAYS.items():
        made = day(name)
        made.live(events)
        seen.update(made.seen)
    assert seen == {(before.value, after.value) for before in RequestPhase for after in NEXT[before]}


@pytest.mark.parametrize("phase", [RequestPhase.ASKING, RequestPhase.PROMISED])
def test_a_change_that_is_not_possible_is_kept_from_the_engine(
    phase: RequestPhase, day: Callable[[str], Day], monkeypatch: pytest.MonkeyPatch,
    contained: list[tuple[str, BaseException]],
) -> None:  # fmt: skip
    """The request is computed. If the engine waits for its load already, ranks report that as failed."""
    made = day("asked again and left")
    monkeypatch.setitem(NEXT, phase, {RequestPhase.OVER})
    made.do("ask")
    made.do("take")
    ((hook, error),) = contained
    assert hook == {"asking": "matched_tokens", "promised": "allocated"}[phase.value]
    assert "cannot follow" in str(error) and made.record.phase is RequestPhase.OVER and not made.record.cached
    (load,) = made.d.plan().loads
    assert not load.entries and load.blocks == made.d.tables[0]
