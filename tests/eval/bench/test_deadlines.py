"""Loads with a deadline: the store's link carries what it should, and the report holds what the engine told."""

from __future__ import annotations

import io
import json
import math
import threading
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench import deadlines, frame
from cuvee.eval.bench.deadlines import MB, SlowStore, run_deadlines_bench, show_deadlines
from cuvee.eval.bench.engine_process import QUESTION, EngineAnswer
from cuvee.integrations.stores import open_store
from cuvee.naming.part_keys import part_key

TOKENS, PROMPTS = 512, 2
COMPUTED, LOADED, BASES, LATE = 0.5, 0.4, 0.1, 0.3  # seconds
KL = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)  # of `Scripted`'s loads


def test_a_slow_store_is_a_store() -> None:
    pytest.importorskip("obstore")
    with SlowStore() as slow:
        store = open_store(slow.url, guarded=False)
        base, refinement = "ab/0123", part_key("ab/0123", 1)
        assert store.get(base) is None
        assert store.put(base, b"base" * 1000) and store.put(refinement, b"more")
        assert store.get(base) == b"base" * 1000 and store.get_many([refinement, base])[0] == b"more"
        assert store.contains([base, refinement]) == [True, True]
        slow.bases_only = True
        assert store.get(refinement) is None and store.get(base) and store.contains([base, refinement]) == [True, False]
        assert len(slow.objects) == 2
        store.close()


def test_answers_share_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own, which only waiting moves."""
    slept, written = [0.0], [0, 0]

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            slept[0] += seconds  # under the lock of the link

    monkeypatch.setattr(deadlines, "time", Clock)
    body = bytes(range(256)) * 4000

    def gone(piece: bytes) -> None:
        raise BrokenPipeError

    def write(number: int) -> Any:
        def wrote(piece: bytes) -> None:
            written[number] += len(piece)

        return wrote

    with SlowStore(rate=2 * MB) as store:
        threads = [threading.Thread(target=store.answer, args=(write(number), body)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert written == [len(body)] * 2 and slept[0] == pytest.approx(2 * len(body) / (2 * MB))
        with pytest.raises(BrokenPipeError):
            store.answer(gone, body)
        store.drain()  # an answer that was given up is no longer under way


class Scripted:
    """Stands for an `Engine`: stores two parts of each chunk, and loads bases where a deadline is tight, but late."""

    says_nothing = stores_nothing = False

    def __init__(self, log: Path) -> None:
        self._store: Any = None
        self._stored: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def start(self, model: Path, options: dict[str, Any], variant: Any, profile: Any, more: Any) -> None:
        assert options["max_num_batched_tokens"] == TOKENS + QUESTION + 1
        self._most = options["max_logprobs"]
        assert (more, variant.quality, profile) == ({"refinements": 1}, "high", Path("profile"))
        self._store = open_store(variant.store, guarded=False)

    def idle(self) -> None: ...

    def ask(self, prompts: Any, *, expect_cached: Any, forget: bool, logprobs: int, params: Any = None) -> EngineAnswer:
        (prompt,) = prompts
        assert forget and len(prompt) == TOKENS + QUESTION and logprobs == self._most
        keys = [part_key(f"ab/{sum(prompt):06x}{chunk:02x}", part) for chunk in range(2) for part in range(2)]
        if sum(prompt) not in self._stored:
            assert expect_cached == [0] and params is None
            self._stored.add(sum(prompt))
            for key in [] if self.stores_nothing else keys:
                self._store.put(key, b"x" * 1000)
            return self._answer(COMPUTED, exact=True)
        if params is None:
            return self._answer(LOADED if all(self._store.get_many(keys)) else BASES)
        tight = params["cuvee"]["deadline_ms"] < 1e3 * LOADED
        half = TOKENS / 2
        return self._answer(LATE, [half, half, 0]) if tight else self._answer(LOADED, [0, 0, TOKENS])

    def _answer(self, seconds: float, loaded_at: list[float] | None = None, exact: bool = False) -> EngineAnswer:
        loaded_at = [0, 0, 0] if loaded_at is None or self.says_nothing else loaded_at
        # The second token is not among those of a load: it counts as the least likely of them.
        first = {"1": math.log(0.5), "2": math.log(0.25)} if exact else {"1": math.log(0.25), "3": math.log(0.25)}
        return EngineAnswer(seconds, seconds, [[0]], [[first]], [0], loaded_at)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    pytest.importorskip("obstore")
    texts = [[(7 * at + number) % 50 for at in range(TOKENS + QUESTION)] for number in range(PROMPTS)]
    monkeypatch.setattr(deadlines, "Engine", Scripted)
    monkeypatch.setattr(deadlines, "_prompts", lambda model, tokens, number: texts)
    monkeypatch.setattr(frame, "find_spec", lambda package: package)
    return Scripted


def run() -> dict[str, Any]:
    return run_deadlines_bench(Path("model"), Path("profile"), TOKENS, PROMPTS, (1000.0, 1.0))


def test_every_deadline_is_asked_for_over_every_link(scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(json.dumps(run(), allow_nan=False))
    assert report["computing"] == [COMPUTED] * PROMPTS
    for link in report["links"]:
        assert (link["loading"], link["bases"]) == ([LOADED] * PROMPTS, [BASES] * PROMPTS)
        assert link["loading_kl"] == link["bases_kl"] == pytest.approx([KL] * PROMPTS)
        half, once, *_ = loads = [link["loads"][at] for at in range(0, len(link["loads"]), PROMPTS)]
        assert [load["deadline"] for load in loads] == pytest.approx([0.2, 0.4, 0.8, 0.25, 0.5, 1.0])
        assert half == {"of": "loading", "factor": 0.5, "feasible": True, "deadline": 0.2, "seconds": LATE,
                        "met": False, "kl": pytest.approx(KL),
                        "both": 0, "base": TOKENS // 2, "computed": TOKENS // 2}  # fmt: skip
        assert once["met"] and (once["both"], once["base"], once["computed"]) == (TOKENS, 0, 0)
        assert [load["met"] for load in loads] == [False, True, True, False, True, True]
    out = io.StringIO()
    show_deadlines(report).print(Console(file=out, width=160))
    assert "16 of 24" in out.getvalue() and "0 of 2" in out.getvalue() and "0.5 x computing" in out.getvalue()


def test_what_nothing_would_meet_is_not_feasible(scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bases are there after 0.3 s: half of the time of loading everything, and of computing, are too short."""
    monkeypatch.setattr(f"{__name__}.BASES", 0.3)
    report = run()
    loads = [load for link in report["links"] for load in link["loads"]]
    assert {(load["of"], load["factor"]) for load in loads if not load["feasible"]} == {
        ("loading", 0.5), ("computing", 0.5)
    }  # fmt: skip
    assert "16 of 16" in show_deadlines(report).preface


def test_an_engine_of_another_version_is_an_error(scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "says_nothing", True)
    with pytest.raises(CuveeError, match="an engine must count the parts that it loads"):
        run()
    monkeypatch.setattr(scripted, "stores_nothing", True)
    with pytest.raises(CuveeError, match="the store lacks 4 parts of a prompt"):
        run()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda package: package)
    with pytest.raises(InputError, match=r"^prompts: must be 1 … \d+, as many as the texts have, got 1000"):
        deadlines._prompts(bundled_model_path(), 1024, 1000)
    with pytest.raises(InputError, match=r"^tokens: must be a multiple of 256, got 300"):
        deadlines._prompts(bundled_model_path(), 300, 1)
