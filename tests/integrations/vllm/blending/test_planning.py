"""Blending on the scheduler's side: what is found and asked for, and that nothing approximate gets an exact name."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integrations.vllm.sides import BLOCK, CHUNK, LORA, Desk, generate, image, make_request

from cuvee.integrations.vllm.blending import planning
from cuvee.integrations.vllm.blending.blend_options import BlendOptions
from cuvee.integrations.vllm.decision import Restored
from cuvee.integrations.vllm.messages import Entry, Load, Report, Save, StepPlan
from cuvee.naming.identity import store_key

BLOCKS = list(range(100, 200))  # of every request, as `Desk.plan` says
OPTIONS = {"segment_tokens": 12}  # segments of 4 to 48 tokens, behind position 4, and 16 reused ones
FIRST = list(range(1000, 1029))  # documents, of 29 and 21 tokens
SECOND = list(range(2000, 2021))


@pytest.fixture
def desk(desk: Callable[..., Desk]) -> Callable[..., Desk]:
    """Of an engine that blends, unless it is told not to."""

    def make(blending: bool = True, blend: dict[str, Any] | None = None, **options: Any) -> Desk:
        return desk(**options, **({"blend": {**OPTIONS, **(blend or {})}} if blending else {}))

    return make


def text(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def ask(
    d: Desk,
    name: str = "r",
    ids: Sequence[int] | None = None,
    segments: Sequence[Sequence[int]] | None = ((10, 39), (44, 65)),
    cost: float | None = None,
    chunks: int = 0,
    **changes: Any,
) -> SimpleNamespace:
    """A new request, whose first `chunks` are in the store.

    Its prompt, unless others are given: 10 tokens, FIRST, 5 tokens, SECOND, 12 tokens.
    """
    if ids is None:
        ids = [*text(10), *FIRST, *text(5, 30), *SECOND, *text(12, 40)]
    wants: dict[str, Any] = {} if segments is None else {"segments": [list(span) for span in segments]}
    if cost is not None:
        wants["cost"] = cost
    request = make_request(name, ids=ids, **{"kv_transfer_params": {"cuvee": wants}, **changes})
    d.put(request, chunks)
    d.side.arrived(request)
    return request


def load(d: Desk, request: SimpleNamespace, computed: int = 0) -> Load:
    """What the workers are told to load."""
    tokens, later = d.matched(request, computed)
    assert tokens and later, "it is always asynchronous"
    d.side.allocated(request, [BLOCKS], tokens)
    (planned,) = d.plan().loads
    assert d.plan().loads == [], "once"
    return planned


def blend(d: Desk, request: SimpleNamespace, computed: int = 0) -> Load:
    """The same, and the workers do it."""
    planned = load(d, request, computed)
    assert planned.blend is not None
    name = request.request_id
    d.side.take(Report([1], placed=[name] * d.shards))
    assert d.plan().blends == [name]
    d.side.take(Report([2], ended=[name], restored=[Restored("blend", 50, 22.5, 0.1)] * d.shards))
    d.side.allocated(request, [BLOCKS], 0)  # as the engine does once all is there
    return planned


def segments_of(saves: list[Save]) -> list[tuple[int, int]]:
    return [(save.entry.start, save.entry.tokens) for save in saves if is_segment(save)]


def is_segment(save: Save) -> bool:
    return save.entry.kind == "segment"


def segment(d: Desk, ids: list[int], start: int, tenant: str, end: int) -> Entry:
    """A segment at this position of a request that has `BLOCKS` up to `end`."""
    return Entry("segment", d.segment(ids, tenant), start, len(ids)).within([BLOCKS[: -(-end // BLOCK)]], [BLOCK])


def refused(d: Desk) -> dict[str, float]:
    return {label: value for (name, label), value in d.recorder.totals().items() if name == "blends_refused"}


NOTHING = {"blended": False, "reused_tokens": 0}


# What is found -------------------------------------------------------------------------------------------------------


def test_of_too_many_segments_the_longest_are_used(
    desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "MOST_SEGMENTS", 2)
    spans = [(0, 10), (11, 21), (22, 29), (30, 45), (46, 51)]
    d = desk()
    d.side.arrived(make_request("r", kv_transfer_params={"cuvee": {"segments": spans}}))
    found = d.record().segmented
    assert found is not None and found.spans == [(0, 10), (30, 45)] and len(found.digests) == 2
    assert "3 segments of request r are left out: a prompt has at most 2" in caplog.text


# Names of blocks -----------------------------------------------------------------------------------------------------


def names(d: Desk, number: int, **asked: Any) -> list[bytes]:
    """Of the blocks of a blended request, and of 20 tokens that were generated for it."""
    request = ask(d, f"r{number}", **asked)
    blend(d, request)
    generate(request, 20)
    found: list[bytes] = list(request.block_hashes)
    return found


def test_the_same_blend_has_the_same_names_and_another_has_others(desk: Callable[..., Desk]) -> None:
    d = desk()
    d.put_segments(FIRST)
    one_piece = names(d, 0)
    d.put_segments(SECOND)
    both, again = names(d, 1), names(d, 2)
    assert both == again, "the engine finds it in its own cache"
    assert names(d, 3, cost=0.15) == both
    other_cost, tenant = names(d, 4, cost=0.5), ask(d, "t", cache_salt="alice")
    exact = ask(d, "e", segments=[])
    generate(exact, 20)
    d.put_segments([5] * 20)
    moved = [names(d, start, ids=[5] * 60, segments=[(10, 30), (start, start + 20)]) for start in (35, 36)]
    others = [one_piece, both, other_cost, exact.block_hashes, tenant.block_hashes, *moved]
    for mine, other in itertools.combinations(others, 2):
        assert set(mine[1:]).isdisjoint(other[1:]), "generated ones included"


def test_what_was_exact_when_blocks_were_renamed_stays_exact(desk: Callable[..., Desk]) -> None:
    """The engine dropped the blocks of the exact prefix before the load began: their names are exact ones."""
    d = desk()
    d.put_segments(FIRST, SECOND)
    request = ask(d)
    before = list(request.block_hashes)
    assert d.matched(request, 32) == (33, True)
    assert request.block_hashes[:4] == before[:4] and request.block_hashes[4] != before[4]
    planned = load(d, request, 0)
    assert planned.blend is not None
    assert [piece.start for piece in planned.blend.pieces] == [44], "FIRST begins before token 32"


def test_a_last_block_without_a_name_gets_no_reused_tokens(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get its name once it is full, from that of the block before it: an exact one."""
    monkeypatch.setattr(BlendOptions, "min_reused", 4)  # blocks of engines are longer than those of the desk
    d = desk()
    ids = [*text(10), *FIRST, *text(8, 40)]
    d.put_segments(ids[20:])
    request = ask(d, ids=ids, segments=[(20, 47)])
    before = list(request.block_hashes)
    assert d.matched(request, 40) == (0, False)
    assert request.block_hashes == before and refused(d) == {"hashes": 1}


def test_without_names_there_is_no_blend(desk: Callable[..., Desk]) -> None:
    d = desk()
    d.put_segments(FIRST, SECOND)
    request = ask(d)
    del request.block_hashes[8:]
    assert d.matched(request) == (0, False)
    assert refused(d) == {"hashes": 1} and d.side.outcome(request) == {"blended": False, "refused": "hashes"}


# Any prompt ----------------------------------------------------------------------------------------------------------

DOCUMENTS = [FIRST, SECOND, text(9, 3000), text(3, 4000)]  # the last is shorter than any segment
PARTS = st.one_of(st.integers(0, 3), st.integers(1, 25).map(lambda tokens: text(tokens, 100)))


def all_saves(d: Desk, request: SimpleNamespace, before: int, generated: int = 60) -> list[Save]:
    """Everything that is stored of a request from here to its end."""
    plans, tokens = [], request.num_tokens
    for first, end in itertools.pairwise((before, (before + tokens) // 2, tokens)):
        plans.append(d.plan((request, first, end - first), new=first == before))
        assert all(save.entry.end <= end for save in plans[-1].saves)
    for _ in range(generated):
        generate(request, 1)
        plans.append(d.plan((request, request.num_tokens - 1, 1), new=False))
    generate(request, 1)
    d.side.finished(request, [BLOCKS])
    plans.append(d.plan())
    return [save for plan in plans for save in plan.saves + plan.last_saves]


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(PARTS, min_size=1, max_size=6),
    stored=st.sets(st.integers(0, 3)),
    prefix=st.integers(0, 4),
    computed=st.integers(0, 8),
    positions=st.sampled_from([4096, 4096, 70]),
    tenant=st.sampled_from(["", "alice"]),
    wanted=st.sampled_from([True, True, False]),
    fails=st.booleans(),
)
def test_what_is_blended_named_and_stored(
    parts: list[int | list[int]], stored: set[int], prefix: int, computed: int, positions: int, tenant: str,
    wanted: bool, fails: bool,
) -> None:  # fmt: skip
    """Of prompts of documents and other text, some of which this tenant has stored, and a prefix."""
    ids, spans = list[int](), list[tuple[int, int, int]]()
    for part in parts:
        if isinstance(part, int):
            spans.append((len(ids), len(ids) + len(DOCUMENTS[part]), part))
        ids += DOCUMENTS[part] if isinstance(part, int) else [(token + len(ids)) % 5000 for token in part]
    n, salt = len(ids), tenant or None
    with closing(Desk(blend=OPTIONS, shards=2, min_tokens=BLOCK)) as d:
        d.side._state.positions = positions
        d.put_segments(*(DOCUMENTS[each] for each in stored), tenant=tenant)
        d.put_segments(*DOCUMENTS, tenant="bob")
        d.put(make_request(ids=ids), prefix, tenant=tenant)
        usable = max(min(n - 1, positions), 0) // BLOCK * BLOCK
        computed = min(computed, (n - 1) // BLOCK) * BLOCK
        there = min(prefix, min(n, positions) // CHUNK) * CHUNK
        base = max(computed, min(there, usable))
        wants = {"segments": [span[:2] for span in spans], "blend": wanted}
        request = make_request(ids=ids, cache_salt=salt, kv_transfer_params={"cuvee": wants})
        exact_names = list(request.block_hashes)
        d.side.arrived(request)
        tokens, _ = d.matched(request, computed)
        # What is expected, token by token.
        kept = [span for span in spans if span[1] - span[0] >= 4 and span[1] <= positions]
        found = [span for span in kept if span[2] in stored]
        pieces = [span for span in found if span[1] > max(base, 4)]
        end = min(pieces[-1][1], n - 1) if pieces else base
        reused = sum(any(a <= at < b for a, b, _ in pieces) for at in range(max(base, 4), end))
        changed = max(base, pieces[0][0]) if pieces else n
        why = "parts" if not kept else "unwanted" if not wanted else "few" if pieces else "exact" if found else "absent"
        blended = wanted and reused >= 16
        outcome: dict[str, Any] = {"blended": True, "reused_tokens": reused, "cost": 0.15}
        if not blended:
            outcome = {"blended": False, "reused_tokens": 0, "reason": why}
            pieces, end, changed = [], base, n + 100
        assert tokens == end - computed and d.side.outcome(request) == outcome
        same = changed // BLOCK
        assert request.block_hashes[:same] == exact_names[:same]
        assert set(exact_names[same:]).isdisjoint(request.block_hashes) and len(request.block_hashes) == n // BLOCK
        d.side.allocated(request, [BLOCKS], tokens)
        loads = d.plan().loads
        assert len(loads) == (end > computed) and (not blended or loads[0].blend is not None)
        for planned in loads:
            assert (planned.tenant, planned.start, planned.end) == (tenant, computed, end)
            assert planned.blocks == BLOCKS[computed // BLOCK : -(-end // BLOCK)]
            chunks = range(computed // CHUNK * CHUNK, base, CHUNK) if base > computed else ()
            assert [entry.start for entry in planned.prefix] == [*chunks]
            if planned.blend is not None:
                own = [segment(d, ids[a:b], a, tenant, end) for a, b, _ in pieces]
                assert (planned.blend.tokens, planned.blend.start, planned.blend.first) == (ids, base, 4)
                assert planned.blend.pieces == own and planned.blend.reused(end) == reused
                assert planned.blend.blocks == BLOCKS[: -(-end // BLOCK)]
        if blended and fails:
            for _ in range(2):
                d.side.take(Report([2], ended=["r"], failed={"r"}))
            assert d.matched(request) == (0, False)
            assert d.side.outcome(request) == {"blended": False, "refused": "failed"} and refused(d) == {"failed": 1}
            pieces, end = [], 0
        elif loads:
            d.side.take(Report([1], placed=["r"] * 2 * blended))
            assert d.plan().blends == ["r"] * blended
            d.side.take(Report([2], ended=["r"] * 2))
        saves = all_saves(d, request, end)
        assert {save.tenant for save in saves} <= {tenant}
        new = {each: (a, b) for a, b, each in reversed(kept) if (a, b, each) not in pieces}  # each once
        assert sorted(segments_of(saves)) == sorted((a, b - a) for a, b in new.values())
        # What is exact has exact names; nothing else is stored.
        most = min(changed, positions, request.num_tokens - 1)
        asked = usable - computed >= BLOCK  # otherwise nobody knows what is there
        new_chunks = {*range(CHUNK, most + 1, CHUNK)} - {*range(CHUNK, there * asked + 1, CHUNK)}
        tails = {each for each in (min(n, most) // BLOCK * BLOCK, most // BLOCK * BLOCK) if each % CHUNK}
        assert sorted(save.entry.end for save in saves if not is_segment(save)) == sorted(new_chunks | tails)


# What is refused -----------------------------------------------------------------------------------------------------

IMAGE = image(start=2)
REFUSALS = [
    ("adapter", {"lora_request": LORA}),
    ("media", {"mm_features": [IMAGE]}),
    ("prompt_logprobs", {"skip_reading_prefix_cache": True}),
]


@pytest.mark.parametrize(("reason", "changes"), REFUSALS)
def test_requests_that_cannot_be_blended_are_told_so_if_they_asked(
    desk: Callable[..., Desk], reason: str, changes: dict[str, Any]
) -> None:
    d = desk()
    d.put_segments(FIRST, SECOND)
    silent = ask(d, "silent", segments=None, ids=FIRST * 5, kv_transfer_params=None, **changes)
    assert d.matched(silent) == (0, False) and refused(d) == {}
    if reason != "prompt_logprobs":  # its segments are exact, and may be stored
        assert d.side.outcome(silent) is None and segments_of(d.plan((silent, 0, 145)).saves) == []
    request = ask(d, **changes)
    assert d.matched(request) == (0, False)
    assert d.side.outcome(request) == {"blended": False, "refused": reason}
    assert refused(d) == {reason: 1}
    saves = d.plan((request, 0, 77)).saves
    assert saves and segments_of(saves) == [], "its prefix is stored"


def test_a_request_with_a_deadline_is_not_blended(desk: Callable[..., Desk]) -> None:
    d = desk()
    d.put_segments(FIRST, SECOND)
    wants = {"segments": [[10, 39], [44, 65]], "deadline_ms": 500}
    request = ask(d, chunks=2, kv_transfer_params={"cuvee": wants})
    assert d.record().due is not None
    assert d.matched(request) == (32, True) and refused(d) == {}


# Lookups that go wrong -----------------------------------------------------------------------------------------------


def intercept(d: Desk, segment: Sequence[int], act: Callable[[], object]) -> None:
    """Act before the store is asked for a segment, and before no other question."""
    contains, key = d.store.contains, store_key("", d.segment(segment), 0)

    def asked(keys: Sequence[str]) -> list[bool]:
        if key in keys:
            act()
        return contains(keys)

    d.store.contains = asked  # type: ignore[method-assign]


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def test_a_lookup_that_fails_or_hangs_is_given_up(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    down = desk()
    intercept(down, FIRST, lambda: 1 / 0)
    assert down.matched(ask(down)) == (0, False) and refused(down) == {"failed": 1}
    d, go = desk(lookup_timeout=5), threading.Event()
    overdue: list[tuple[str, float]] = []
    monkeypatch.setattr(d.store, "report_overdue", lambda *said: overdue.append(said))
    d.put_segments(FIRST)
    intercept(d, FIRST, lambda: _wait(go))
    request = ask(d, chunks=1)
    while d.record().learned is None:
        assert d.side.matched_tokens(request, 0) == (None, False)
        d.plan()
    d.now += 4
    assert d.side.matched_tokens(request, 0) == (None, False)
    d.now += 2
    assert d.matched(request) == (16, True), "its exact prefix is loaded all the same"
    go.set()
    assert d.matched(request) == (16, True)
    assert refused(d) == {"timeout": 1} and d.side.outcome(request) == {"blended": False, "refused": "timeout"}
    assert overdue == [("contains", 2.5)], "so the next ones need not lose their patience to it"


# Whether it pays -----------------------------------------------------------------------------------------------------


def measure(d: Desk, prefill: float, blended: float, decoded: int = 50, computed: float = 22.5) -> None:
    """Steps of 16 tokens, and blends like those that are asked for, that took so many seconds."""
    for _ in range(8):
        small = make_request("p", tokens=16)
        d.matched(small)
        step = d.plan((small, 0, 16))
        d.side.take(
            Report(
                [step.step],
                step_seconds={step.step: prefill},
                restored=[Restored("blend", decoded, computed, blended)],
            )
        )


def test_blends_that_do_not_pay_are_declined(desk: Callable[..., Desk]) -> None:
    d = desk(decide="measured")
    d.put_segments(FIRST, SECOND)
    measure(d, 1e-3, 0.65)
    request = ask(d)
    before = list(request.block_hashes)
    for _ in range(3):
        assert d.matched(request) == (0, False)
    assert refused(d) == {"declined": 1} and d.side.outcome(request) == {"blended": False, "refused": "declined"}
    assert request.block_hashes == before
    off = desk(blending=False)
    off.put_segments(FIRST, SECOND)
    assert off.matched(ask(off, cost=7)) == (0, False) and off.side.outcome(off.record().request) is None


def test_a_step_that_blends_says_nothing_of_prefill(desk: Callable[..., Desk]) -> None:
    d = desk()
    d.put_segments(FIRST)
    load(d, ask(d))
    other = make_request("p", tokens=64)
    d.matched(other)
    d.side.take(Report(placed=["r"]))
    plan = d.plan((other, 0, 32))
    assert plan.blends == ["r"] and plan.step not in d.side._pays._timed_steps
    d.side.take(Report(ended=["r"]))
    assert d.plan((other, 32, 32), new=False).step in d.side._pays._timed_steps


# Resets --------------------------------------------------------------------------------------------------------------


def test_reset_finds_no_segment_that_was_there(desk: Callable[..., Desk]) -> None:
    d = desk()
    d.put_segments(FIRST, SECOND)
    old, request = {d.segment(FIRST), d.segment(SECOND)}, ask(d)
    d.side.reset()
    later = ask(d, "s")
    for each in (request, later):
        assert d.matched(each) == (0, False)
    saves = [save for save in d.plan((request, 0, 77)).saves if is_segment(save)]
    assert segments_of(saves) == [(10, 29), (44, 21)] and old.isdisjoint(save.entry.digest for save in saves)
    d.write(StepPlan(1, saves=saves))
    assert d.matched(ask(d, "t")) == (65, True), "what was stored since is found"


# The planner by itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named", "least"), [({}, False, 128), ({"min_context": 7}, False, 7), ({}, True, 0)]
)
def test_segments_that_are_found_need_text_before_them(
    desk: Callable[..., Desk], options: dict[str, Any], named: bool, least: int
) -> None:
    d = desk(blend=options)
    request = ask(d, ids=[3 * (at * at) % 997 for at in range(300)], segments=[(0, 20)] if named else None)
    segmented = d.record().segmented
    assert segmented is not None
    spans = [(start, end - start) for start, end in segmented.spans if start >= least]
    assert spans and segments_of(d.plan((request, 0, 300)).saves) == spans


def test_blends_get_what_a_step_leaves(desk: Callable[..., Desk]) -> None:
    """They share what the engine's own requests do not take, and have a quarter of a step in any case."""
    d = desk()
    d.side._blends._step_tokens = 400
    d.put_segments(FIRST, SECOND)
    names = ["a", "b", "c"]
    for name in names:
        load(d, ask(d, name))
    d.side.take(Report([1], placed=list(names)))
    other = make_request("other", 400)
    d.side.arrived(other)
    for scheduled, left in ((0, 400), (150, 250), (299, 101), (301, 100), (400, 100)):
        plan = d.plan((other, 0, scheduled)) if scheduled else d.plan()
        assert (plan.blends, plan.blend_tokens) == (names, left)


def test_a_blend_is_named_until_its_load_is_over(desk: Callable[..., Desk]) -> None:
    d = desk()
    d.put_segments(FIRST, SECOND)
    names = ["a", "b", "c"]
    for name in names:
        load(d, ask(d, name))
    assert d.plan().idle
    d.side.take(Report([1], placed=["a", "c", "b"]))
    assert d.plan().blends == d.plan().blends == ["a", "c", "b"], "in the order in which they are ready"
    assert not d.plan().idle, "the next slice waits for nothing"
    d.side.take(Report([2], ended=["c"]))
    assert d.plan().blends == ["a", "b"]
    d.side.finished(d.record("b").request, [[]])
    plan = d.plan()
    assert plan.blends == ["a"] and plan.drops == ["b"], "it was aborted amid its slices"
    d.side.take(Report([3], ended=["a"], failed={"a"}))
    plan = d.plan()
    assert plan.blends == [] and plan.drops == ["a"], "ranks that are not told would wait for it"
    assert not d.side._blends._ready
