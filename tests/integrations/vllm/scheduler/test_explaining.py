"""Why a request was not loaded, or not all of it: each reason, from what leads to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.integrations.vllm.sides import CHUNK, LORA, Desk, make_request, patience

from cuvee.integrations.identity.weights_name import WeightsName
from cuvee.integrations.vllm.decision import Restored
from cuvee.integrations.vllm.messages import Delivery, Report
from cuvee.integrations.vllm.scheduler.explaining import REASONS

ASKS = {"cuvee": {"explain": True}}
TOKENS = 100  # six chunks and a rest


def _load(d: Desk, request: SimpleNamespace, tokens: int = 4 * CHUNK) -> None:
    assert d.matched(request)[0] == tokens
    d.side.allocated(request, d.tables, tokens)
    d.plan()


def _whole(d: Desk, request: SimpleNamespace) -> None:
    d.put(request, 6)
    _load(d, request, 6 * CHUNK)


def _part(d: Desk, request: SimpleNamespace) -> None:
    d.put(request, 4)
    _load(d, request)


def _nothing(d: Desk, request: SimpleNamespace) -> None:
    d.put(request, 6, tenant="another")
    assert d.matched(request)[0] == 0


def _adapter(d: Desk, request: SimpleNamespace) -> None:
    d.put(request, 6)
    request.lora_request = LORA
    assert d.matched(request)[0] == 0


def _storing(d: Desk, request: SimpleNamespace) -> None:
    first = make_request("first")
    assert d.matched(first)[0] == 0
    d.plan((first, 0, TOKENS))  # nobody stores what the plan says
    d.put(request, 4)
    assert d.matched(request)[0] == 4 * CHUNK


def _declined(d: Desk, request: SimpleNamespace) -> None:
    d.put(request, 6)
    for tokens in (16, 32, 64, 96) * 3:
        d.side._pays.prefill.observe(tokens, 0.0, tokens * 1e-4)
        d.side._pays.observe(Restored("load", tokens, 0, tokens * 1.0))
    assert d.matched(request)[0] == 0


def _queued(d: Desk, request: SimpleNamespace) -> None:
    d.put(request, 6)
    d.side._records.admitted = 1000
    d.side.arrived(request)
    for _ in patience():
        if d.side.matched_tokens(request, 0)[0] is None and d.side._records.of(request).queued is not None:
            break
    else:
        pytest.fail("it never queues")
    d.now += 1e-3
    assert d.side.matched_tokens(request, 0)[0] is None, "computing it takes longer"
    d.now += 1e-3 * TOKENS + 1.0
    assert d.matched(request)[0] == 0


def _deadline(d: Desk, request: SimpleNamespace) -> None:
    _part(d, request)
    cut = Delivery("r", 0, (CHUNK, CHUNK), (1, 1), complete=False)
    d.side.take(Report(delivered=[cut], ended=["r"]))


def _failed(d: Desk, request: SimpleNamespace) -> None:
    _part(d, request)
    d.side.take(Report(ended=["r"], failed={"r"}, causes={"r": "an entry was damaged"}))


def _timeout(d: Desk, request: SimpleNamespace) -> None:
    begun = d.now

    def hangs(operation: str) -> None:
        d.now = begun + 1e6

    d.store.before = hangs
    lookup = d.side._state.lookup_threads
    lookup.submit = lambda *_: Future()  # type: ignore[method-assign]  # no thread ever answers
    d.side.arrived(request)
    d.now += 1e6
    assert d.matched(request)[0] == 0


def _short(d: Desk, request: SimpleNamespace) -> None:
    request.num_tokens = request.num_prompt_tokens = 5
    assert d.matched(request)[0] == 0


def _below_chunk(d: Desk, request: SimpleNamespace) -> None:
    request.num_tokens = request.num_prompt_tokens = CHUNK - 1
    assert d.matched(request)[0] == 0


def _engine(d: Desk, request: SimpleNamespace) -> None:
    assert d.side.matched_tokens(request, 6 * CHUNK) == (0, False)


def _unread(d: Desk, request: SimpleNamespace) -> None:
    request.skip_reading_prefix_cache = True
    assert d.matched(request)[0] == 0


def _uncached(d: Desk, request: SimpleNamespace) -> None:
    request.cache_salt = 7
    assert d.matched(request)[0] == 0


@pytest.mark.parametrize(
    ("act", "reason", "figures"),
    [
        (_whole, "hit", (96, 96, -1)),
        (_part, "partial", (64, 64, 64)),
        (_nothing, "absent", (0, 0, 0)),
        (_adapter, "absent", (0, 0, 0)),
        (_storing, "storing", (64, 0, 64)),
        (_declined, "declined", (96, 0, 96)),
        (_queued, "queued", (96, 0, 96)),
        (_deadline, "deadline", (64, 32, 64)),
        (_failed, "failed", (64, 0, 64)),
        (_timeout, "timeout", (0, 0, 0)),
        (_short, "short", (0, 0, -1)),
        (_below_chunk, "below_chunk", (0, 0, 0)),
        (_engine, "engine", (0, 0, -1)),
        (_unread, "unread", (0, 0, -1)),
        (_uncached, "uncached", (0, 0, -1)),
    ],
)
def test_each_reason(
    desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture, act: Callable[[Desk, SimpleNamespace], None],
    reason: str, figures: tuple[int, int, int],
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    d, request = desk(decide="measured", min_tokens=8), make_request(kv_transfer_params=ASKS)
    act(d, request)
    told = d.side.explanation(request)
    assert told is not None
    assert (told["reason"], told["found_tokens"], told["loaded_tokens"], told["missing_from"]) == (reason, *figures)
    text = REASONS[reason].partition("{")[0]
    assert told["text"].startswith(text) and "{" not in told["text"]
    assert ("with this adapter" in told["text"]) is (act is _adapter)
    assert told["text"].endswith("were computed: an entry was damaged") is (act is _failed)
    (line,) = [each.getMessage() for each in caplog.records if "request r:" in each.getMessage()]
    assert repr(reason) in line


def test_the_text_tells_a_blend_apart(desk: Callable[..., Desk]) -> None:
    for blended in (False, True):
        d, request = desk(), make_request(kv_transfer_params=ASKS)
        _part(d, request)
        d.side._records.of(request).segmented = Mock(outcome={"blended": blended})
        told = d.side.explanation(request)
        assert told is not None and told["reason"] == "partial"
        assert (
            told["text"].endswith("this is about the exact prefix, and not about what was blended behind it") is blended
        )


def test_weights_without_a_name_are_a_reason_and_all_are_tested(desk: Callable[..., Desk]) -> None:
    weights = WeightsName(lambda stop: "a")
    weights.withdraw("a test says so")
    d, request = desk(weights=weights), make_request(kv_transfer_params=ASKS)
    d.side.arrived(request)
    told = d.side.explanation(request)
    assert told is not None and told["reason"] == "unnamed"
    tested = {mark.args[1][at][1] for mark in test_each_reason.pytestmark for at in range(len(mark.args[1]))}
    assert set(REASONS) - tested == {"unnamed"}


@pytest.mark.parametrize(("params", "beside"), [(None, False), ({"cuvee": {"explain": False}}, False), (ASKS, True)])
def test_who_does_not_ask_or_has_another_connector_is_not_told(
    desk: Callable[..., Desk], params: Any, beside: bool
) -> None:
    d, request = desk(setup={"other_connectors": beside}), make_request(kv_transfer_params=params)
    d.matched(request)
    assert d.side.explanation(request) is None


def test_another_tenants_entries_change_no_word(desk: Callable[..., Desk]) -> None:
    told = []
    for tenant in ("", "other"):
        d, request = desk(), make_request(kv_transfer_params=ASKS, cache_salt="mine")
        d.put(request, 6, tenant=tenant)
        d.matched(request)
        told.append(d.side.explanation(request))
    assert told[0] == told[1] and told[0] is not None and told[0]["reason"] == "absent"


def test_saved_seconds_and_first_tokens_are_counted(desk: Callable[..., Desk]) -> None:
    """A load that fails saves nothing."""
    d = desk()
    for tokens in (16, 32, 64, 96) * 3:
        d.side._pays.prefill.observe(tokens, 0.0, tokens * 0.01)
    never = d.now  # requests arrive now, on any clock
    for name, chunks in (("r", 4), ("cold", 0), ("failed", 4)):
        request = make_request(name, ids=[(7 * at + len(name)) % 61 for at in range(TOKENS)], arrival_time=1e12)
        d.put(request, chunks)
        tokens = d.matched(request)[0]
        assert tokens == chunks * CHUNK
        d.side.allocated(request, d.tables, tokens)
        d.plan()
        if tokens:
            d.side.take(Report(ended=[name], failed={name} & {"failed"}))
        d.now += 3.0
        step = d.plan((request, tokens, TOKENS - tokens))
        d.side.take(Report([step.step]))
    totals = d.recorder.totals()
    assert totals["saved_seconds_estimate", ""] == pytest.approx(0.64, rel=0.05)
    assert (totals["ttft_loaded_seconds", ""], totals["ttft_computed_seconds", ""]) == (1, 2)
    drained = d.recorder.drain() or {}
    assert {"ttft_loaded_seconds|3", "ttft_computed_seconds|3"} <= set(drained) and never < d.now
