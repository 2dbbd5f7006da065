"""Loads with a deadline: the store's link carries what it should, and the report holds what the engine told."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench import deadlines, frame
from cuvee.eval.bench.deadlines import MB, DeadlinesScope, SlowStore, run_deadlines_bench, show_deadlines
from cuvee.eval.bench.engine.process import EngineAnswer
from cuvee.eval.bench.engine.scope import QUESTION
from cuvee.integrations.stores import open_store
from cuvee.naming.part_keys import part_key, part_number

SCOPE = DeadlinesScope(tokens=512, prompts=2, rates=(1000 * MB, 1 * MB))
COMPUTED, LOADED, LEAST = 0.09, 0.2, 0.06  # seconds


def test_a_slow_store_is_a_store() -> None:
    pytest.importorskip("obstore")
    with SlowStore() as slow:
        store = open_store(slow.url, guarded=False)
        base, refinement = "ab/0123", part_key("ab/0123", 1)
        assert store.get(base) is None
        assert store.put(base, b"base" * 1000) and store.put(refinement, b"more")
        assert store.get(base) == b"base" * 1000 and store.get_many([refinement, base])[0] == b"more"
        assert len(slow.objects) == 2 and slow.carried > 8000
        store.close()


def test_answers_share_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own, which only waiting moves."""
    now, lock = [100.0], threading.Lock()

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            with lock:
                now[0] += seconds

    monkeypatch.setattr(deadlines, "time", Clock)
    got, body = bytearray(), bytes(range(256)) * 4000

    def gone(piece: bytes) -> None:
        raise BrokenPipeError

    with SlowStore(rate=2 * MB) as store:
        store.answer(got.extend, body)
        assert bytes(got) == body and now[0] - 100 == pytest.approx(len(body) / (2 * MB), rel=0.01)
        store.answer(got.extend, body[:1000])
        assert now[0] - 100 == pytest.approx((len(body) + 1000) / (2 * MB), rel=0.01)
        assert store.carried == len(body) + 1000
        with pytest.raises(BrokenPipeError):
            store.answer(gone, body)
        store.drain()  # an answer that was given up is no longer under way


class Scripted:
    """Stands for an `Engine`: stores two parts of each chunk, and loads what a deadline leaves time for."""

    says_nothing = stores_nothing = False

    def __init__(self, log: Path) -> None:
        self._store: Any = None
        self._stored: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, model: Path, options: dict[str, Any], variant: Any, profile: Any, more: Any) -> None:
        assert options["max_num_batched_tokens"] == SCOPE.tokens + QUESTION + 1
        assert (more, variant.quality, profile) == ({"refinements": 1, "kl_max": 0.02}, "high", Path("profile"))
        self._store = open_store(variant.store, guarded=False)

    def stop(self) -> None:
        self._store.close()

    def idle(self) -> None: ...

    def ask(self, prompts: Any, *, expect_cached: Any, forget: bool, params: Any = None) -> EngineAnswer:
        (prompt,) = prompts
        assert forget and len(prompt) == SCOPE.tokens + QUESTION
        keys = [part_key(f"ab/{sum(prompt):06x}{chunk:02x}", part) for chunk in range(2) for part in range(2)]
        there = sum(prompt) in self._stored
        if not there:
            assert expect_cached == [0] and params is None
            self._stored.add(sum(prompt))
            for key in [] if self.stores_nothing else keys:
                self._store.put(key, b"x" * 1000)
        tight = params is not None and params["cuvee"]["deadline_ms"] < 1e3 * LOADED
        if there:
            self._store.get_many([key for key in keys if not (tight and part_number(key))])
        parts = [SCOPE.tokens, 0] if tight else [0, SCOPE.tokens]
        told = None if params is None else {"cuvee": {"parts": parts, "expected_kl": 0.01 if tight else 0.001}}
        seconds = (LEAST if tight else LOADED) if there else COMPUTED
        cached = SCOPE.tokens if there else 0
        return EngineAnswer(seconds, seconds, [[0]], [], [cached], {}, [None if self.says_nothing else told])


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    pytest.importorskip("obstore")
    texts = [[(7 * at + number) % 50 for at in range(SCOPE.tokens + QUESTION)] for number in range(SCOPE.prompts)]
    monkeypatch.setattr(deadlines, "Engine", Scripted)
    monkeypatch.setattr(deadlines, "_prompts", lambda scope, model: texts)
    monkeypatch.setattr(frame, "find_spec", lambda package: package)
    return Scripted


def test_every_deadline_is_asked_for_over_every_link(scripted: type[Scripted]) -> None:
    report = json.loads(json.dumps(run_deadlines_bench(SCOPE, Path("model"), Path("profile")), allow_nan=False))
    assert report["computing"]["median"] == COMPUTED
    for link in report["links"]:
        whole = link["no_deadline"]
        assert whole["seconds"]["median"] == LOADED and whole["cached"] == SCOPE.tokens and "met" not in whole
        half, once, twice = link["deadlines"]
        assert half["deadline"]["median"] == LOADED / 2 and half["met"] == 1 and half["parts"] == [SCOPE.tokens, 0]
        assert once["met"] == twice["met"] == 1 and twice["parts"] == [0, SCOPE.tokens]
        assert (half["expected_kl"], twice["expected_kl"]) == (0.01, 0.001)
        assert half["mb"] == pytest.approx(whole["mb"] / 2)
    out = io.StringIO()
    show_deadlines(report).print(Console(file=out, width=160))
    assert "1 MB/s" in out.getvalue() and "512 + 0" in out.getvalue() and "10.00" in out.getvalue()


def test_an_engine_of_another_version_is_an_error(scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "says_nothing", True)
    with pytest.raises(CuveeError, match="an answer to a deadline must tell its parts"):
        run_deadlines_bench(SCOPE, Path("model"), Path("profile"))
    monkeypatch.setattr(scripted, "stores_nothing", True)
    monkeypatch.setattr(deadlines, "_SETTLE_SECONDS", 0.0)
    with pytest.raises(CuveeError, match="the store lacks 4 parts of a prompt"):
        run_deadlines_bench(SCOPE, Path("model"), Path("profile"))


@pytest.mark.parametrize("change", [{"tokens": 300}, {"prompts": 0}, {"kl_max": 1.0}])
def test_a_scope_checks_its_numbers(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(change))}: must be"):
        DeadlinesScope(**change)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda package: package)
    with pytest.raises(InputError, match=r"^prompts: must be at most \d+, as many as the texts have"):
        deadlines._prompts(DeadlinesScope(tokens=1024, prompts=1000), bundled_model_path())
    monkeypatch.setattr(deadlines, "find_spec", lambda package: None)
    with pytest.raises(ImportError, match="obstore: pip install"):
        run_deadlines_bench(DeadlinesScope(), Path("model"), Path("profile"))
