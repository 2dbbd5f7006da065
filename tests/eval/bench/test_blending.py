"""The bench of blends in vLLM, on an engine that answers from a script. No speed is asserted."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench import blend as blending
from cuvee.eval.bench import frame
from cuvee.eval.bench.blend import BlendScope, run_blend_bench, show_blends
from cuvee.eval.bench.engine_process import EngineAnswer
from cuvee.integrations.vllm.connector_config import Options

SCOPE = BlendScope(lengths=(64, 128), costs=(0.0, 0.5, 1.0), rounds=2, prompts=5, document=32)


class Scripted:
    """Stands for an `Engine`: takes as long as the tokens that it computes, and is the farther off the fewer."""

    made: dict[str, Scripted]  # by dtype

    def __init__(self, log: Path) -> None:
        self.asked: list[tuple[list[int], Any]] = []
        self.idled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, model: Path, options: Mapping[str, Any], store: str, more: Any) -> None:
        self.dtype = options["dtype"]
        Scripted.made[self.dtype] = self
        assert options["max_model_len"] > max(SCOPE.lengths) and options["max_logprobs"] == -1
        assert store.startswith("memory://")
        assert Options.from_dict(more).blend is not None

    def idle(self) -> None:
        self.idled += 1

    def ask(
        self, prompts: Sequence[Sequence[int]], *, expect_cached: Sequence[int], forget: bool,
        params: Mapping[str, Any], logprobs: int | None = None,
    ) -> EngineAnswer:  # fmt: skip
        (prompt,), (cached,) = prompts, expect_cached
        asked = params["cuvee"]
        self.asked.append((list(prompt), asked))
        assert forget
        for start, end in asked["segments"]:
            assert end - start == SCOPE.document
        cost = asked.get("cost")
        assert cached == (0 if cost is None else asked["segments"][-1][1])
        computed = len(prompt) if cost is None else len(prompt) - cached * (1 - cost)
        # Times are of an engine that writes no logprobs, and KLs of one in float32 that writes them all.
        assert logprobs == (-1 if self.dtype == "float32" and "segments" in asked and self.idled else None)
        right = 0.9 * math.exp(-0.1 * (1 - cost)) if cost is not None else 0.9
        named = {"7": math.log(right), "9": math.log(1 - right)} if logprobs else {}
        return EngineAnswer(float(computed), 0.0, [[7]], [[named]] if named else [], [cached])


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    Scripted.made = {}
    monkeypatch.setattr(blending, "Engine", Scripted)
    monkeypatch.setattr(frame, "find_spec", lambda _: True)


def test_blends_are_timed_over_computing_in_the_same_turn() -> None:
    report = run_blend_bench(SCOPE, bundled_model_path())
    documents = max(SCOPE.lengths) // SCOPE.document
    assert list(Scripted.made) == ["bfloat16", "float32"] and BlendScope().prompts >= 16
    for engine, each in zip(Scripted.made.values(), (SCOPE.rounds + 1, SCOPE.prompts), strict=True):
        turns = len(SCOPE.lengths) * each
        asked = engine.asked
        assert len(asked) == documents + turns * (1 + len(SCOPE.costs))
        assert engine.idled == 1 + turns
        # In a turn all prompts are one, and the exact one comes last: the engine stores it.
        for at in range(documents, len(asked), 1 + len(SCOPE.costs)):
            turn = asked[at : at + 1 + len(SCOPE.costs)]
            assert len({tuple(prompt) for prompt, _ in turn}) == 1
            assert [params.get("blend", True) for _, params in turn] == [True] * len(SCOPE.costs) + [False]
        assert len({tuple(prompt) for prompt, _ in asked[documents:]}) == turns
    for entry in report["lengths"]:
        whole = entry["tokens"] + 48
        assert entry["computed_seconds"]["median"] == whole
        assert entry["computed_seconds"]["runs"] == SCOPE.rounds
        nothing, half, everything = entry["blends"]
        assert nothing["over_computed"]["median"] == pytest.approx((whole - entry["tokens"] - 24) / whole)
        assert everything["over_computed"]["median"] == 1
        assert nothing["kl"] > half["kl"] > everything["kl"] == 0
        assert nothing["kl"] == pytest.approx(0.9 * 0.1 + 0.1 * math.log(0.1 / (1 - 0.9 * math.exp(-0.1))))
    out = io.StringIO()
    show_blends(report).print(Console(file=out, width=120))
    assert "blended at cost 0.5, ratio" in out.getvalue() and "lossless" in out.getvalue()


@pytest.mark.parametrize("length", [0, 48])
def test_lengths_are_whole_documents(length: int) -> None:
    with pytest.raises(InputError, match="length: must be a multiple of 32 tokens"):
        run_blend_bench(BlendScope(lengths=(length,), document=32), bundled_model_path())


@pytest.mark.parametrize("others", [{"7": -0.5, "9": -3.0}, {"7": -0.1, "8": -2.4}])
def test_a_kl_of_a_part_of_the_vocabulary_is_refused(others: dict[str, float]) -> None:
    whole = {"7": math.log(0.9), "9": math.log(0.1)}
    exact, found = (EngineAnswer(0.0, 0.0, [[7]], [[named]], [0]) for named in (others, whole))
    with pytest.raises(CuveeError, match=r"^logprobs: must be of the whole vocabulary"):
        found.first_token_kl(exact)
