"""The bench of a served model: its arrivals, its figures, and a run on the real engine. No speed is asserted."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.conftest import fitted_profile
from tests.integrations.vllm.engines import need_vllm

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.eval.bench import frame, serving
from cuvee.eval.bench.engine_process import CHUNK, Traffic, Turn
from cuvee.eval.bench.serving import (
    NO_CACHE,
    OWN_CACHE,
    ServingScope,
    Words,
    arrivals,
    run_serving_bench,
    show_serving,
    summary,
)
from cuvee.integrations.stores import StoreError

SMALL = ServingScope(
    lengths=(256,), rounds=2, restores=2, shared=64, own=(64, 160), turns=3, question=24, answer=4, live=4, rate=20.0,
    seconds=4.0, cached=1 << 14, step=128, batch=(2, 272, 4),
)  # fmt: skip


def test_arrivals_are_turns_of_conversations_that_make_room_for_new_ones() -> None:
    scope = replace(SMALL, seconds=60.0)
    found = list(arrivals(scope, Words(range(100_000))))
    assert found == list(arrivals(scope, Words(range(100_000)))), "every arm gets the same"
    assert [each.at for each in found] == sorted(each.at for each in found) and found[-1].at < scope.seconds
    assert len(found) == pytest.approx(scope.rate * scope.seconds, rel=0.1)
    turns: dict[int, list[list[int]]] = {}
    for at, each in enumerate(found):
        turns.setdefault(each.conversation, []).append(each.tokens)
        begun_and_not_over = [name for name, all_turns in turns.items() if len(all_turns) < scope.turns]
        assert len(begun_and_not_over) <= scope.live, at
    for tokens in turns.values():
        assert len(tokens) <= scope.turns
        assert tokens[0][:64] == list(range(64)) and len(tokens[0]) - 64 - 24 in scope.own
        assert all(len(each) == 24 for each in tokens[1:])
    own = [token for each in found for token in each.tokens if token >= 64]
    assert len(own) == len(set(own)), "nothing but the shared context repeats"


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(InputError, match="text: must have at least 88 tokens, got 80"):
        list(arrivals(replace(SMALL, own=(0,)), Words(range(80))))


def test_figures_are_of_what_came_in_time() -> None:
    turns = [Turn(float(at), 100, 50, [at + 1.0, at + 1.5, at + 2.0, at + 3.5]) for at in range(10)]
    traffic = Traffic([*turns, Turn(11.0, 100, 0, [20.0, 21.0]), Turn(12.0, 100, 0, [])], 2, 7.0, 300.0, 200.0)
    found = summary(replace(SMALL, seconds=60.0), traffic)
    assert (found["arrived"], found["completed"], found["without_a_token"]) == (14, 10, 3)
    assert found["requests_per_hour"] == 600 and found["cached_tokens"] == 500 and found["prompt_tokens"] == 1000
    assert found["first_token_seconds"] == {"p50": 1.0, "p99": pytest.approx(8.2), "count": 11}
    assert found["between_tokens_seconds"]["p50"] == 0.5 and found["between_tokens_seconds"]["p99"] == 1.5


def test_without_vllm_it_says_so_and_prefixes_are_whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (0, 300):
        monkeypatch.setattr(frame, "find_spec", lambda _: True)
        with pytest.raises(InputError, match=f"lengths: must be multiples of {CHUNK}"):
            run_serving_bench("first-token", replace(SMALL, lengths=(length,)), bundled_model_path(), ["lossless"])
    monkeypatch.setattr(frame, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="needs vLLM"):
        run_serving_bench("storing", SMALL, bundled_model_path(), ["lossless"])


def test_what_an_engine_would_refuse_is_refused_before_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, books: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda _: True)
    monkeypatch.setattr(serving, "Engine", lambda *_: pytest.fail("an engine was started"))
    books.profile.save(mine := tmp_path / "mine")
    fitted_profile("gqa", "layer").save(other := tmp_path / "other")
    for arms, profile, redis, error, message in (
        (["balanced"], None, None, InputError, "^arm: must be one of lossless without --profile, got 'balanced'"),
        ([OWN_CACHE], None, None, InputError, "^arm: "),
        (["lossless", "balancd"], mine, None, InputError, "balancd"),
        (["balanced"], other, None, ProfileMismatchError, "layout"),
        (["lossless"], tmp_path / "none", None, FileNotFoundError, "none"),
        (["lossless"], None, "redis://127.0.0.1:1/0", StoreError, "127.0.0.1:1"),
    ):
        with pytest.raises(error, match=message):
            run_serving_bench("first-token", SMALL, bundled_model_path(), arms, (), profile, redis)
    with pytest.raises(InputError, match=r"^dtype: must be bfloat16 or float32, got 'int4'"):
        run_serving_bench("first-token", replace(SMALL, dtype="int4"), bundled_model_path(), ["lossless"])
    words = ["traffic", "--model", "books-3m"]
    for changed, message in (
        ([*words, "--seconds", "0"], "seconds: must be"),
        ([*words, "--rounds", "0"], "rounds: must be"),
        ([*words[:2], str(tmp_path / "no")], "no such model folder"),
    ):
        assert frame.run_bench("serving", "", serving._options, serving._measure, show_serving, changed) == 1
        assert message in capsys.readouterr().err


@pytest.mark.nightly
def test_a_real_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    need_vllm()
    model = bundled_model_path()
    first = json.loads(json.dumps(run_serving_bench("first-token", SMALL, model, ["lossless"]), allow_nan=False))
    found = first["arms"]["lossless"]
    assert found["computed_seconds"]["256"]["runs"] == 2
    assert {name: of["256"]["runs"] for name, of in found["restored_over_computed"].items()} == {"memory": 4, "file": 4}
    arms, usual = [NO_CACHE, OWN_CACHE, "lossless"], serving.arrivals
    monkeypatch.setattr(serving, "arrivals", lambda _, words: usual(SMALL, words))
    patient = replace(SMALL, seconds=1800.0)  # however busy the machine is, all turns are answered
    traffic = json.loads(json.dumps(run_serving_bench("traffic", patient, model, arms), allow_nan=False))
    none, own, lossless = (traffic["arms"][arm] for arm in arms)
    assert {arm["completed"] for arm in (none, own, lossless)} == {own["arrived"]} and own["arrived"] > 20
    assert none["prompt_tokens"] == own["prompt_tokens"] == lossless["prompt_tokens"] > own["cached_tokens"]
    assert none["cached_tokens"] == 0 < own["cached_tokens"] <= lossless["cached_tokens"], "no cache drops anything"
    assert lossless["stored_bytes"] <= lossless["raw_bytes"] and own["raw_bytes"] == none["raw_bytes"] == 0
    storing = run_serving_bench("storing", replace(SMALL, dtype="float32"), model, ["lossless"])
    assert (traffic["dtype"], storing["dtype"]) == ("bfloat16", "float32")
    assert storing["arms"]["lossless"]["throughput_over_not_storing"]["runs"] == 2
    for report in (first, traffic, storing):
        show_serving(report).print(Console(file=io.StringIO(), width=200))
