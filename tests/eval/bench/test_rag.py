"""The bench of retrieval traffic in vLLM, on an engine that answers from a script. No speed is asserted."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from cuvee.codec.data.bundled import bundled_model_path
from cuvee.codec.errors import InputError
from cuvee.eval.bench.engine import rag_bench
from cuvee.eval.bench.engine.process import EngineAnswer
from cuvee.eval.bench.engine.rag_bench import RagScope, draw_rag_report, print_rag_report, rag_prompts, run_rag_bench
from cuvee.eval.tasks.public import OpenQuestion

SCOPE = RagScope(questions=20, paragraphs=8, passages=3, restarted=5, blend=(("mean_tokens", 100),))
PARAGRAPHS = [f"Paragraph {number} says that {7 * number} is the number of {number}." for number in range(12)]


class Scripted:
    """Stands for an `Engine`: takes a second per token that it computes.

    The engine's prefix cache finds nothing. The connector finds half of each prompt, from the third one on.
    """

    started: list[dict[str, Any]]

    def __init__(self, log: Path) -> None:
        Scripted.started = []
        self.prompts: list[list[list[int]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, model: Path, options: Mapping[str, Any], *variant: Any, **connector: Any) -> None:
        self.blends = bool(variant)
        self.started.append({"variant": variant, **connector, "asked": []})

    def idle(self) -> None:
        assert self.blends

    def stop(self) -> None:
        pass

    def ask(self, prompts: Sequence[Sequence[int]], *, expect_cached: None) -> EngineAnswer:
        (prompt,) = prompts
        asked = self.started[-1]["asked"]
        asked.append(list(prompt))
        blended = self.blends and len(asked) > 2
        cached = len(prompt) // 2 if blended else 0
        figures: dict[str, float] = {}
        if blended:
            figures = {
                "blends": 1, "blend_kl": 0.19 if len(asked) == 20 else 0.01, "blended_tokens": 11,
                "blend_reused_tokens": 10, "blend_recomputed_tokens": 2,
            }  # fmt: skip
        return EngineAnswer(float(len(prompt) - cached), 0.0, [[7]], [[]], [cached], figures)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rag_bench, "Engine", Scripted)
    monkeypatch.setattr(rag_bench, "find_spec", lambda _: True)
    monkeypatch.setattr(
        rag_bench, "open_questions",
        lambda *_, **__: [OpenQuestion((one,), f"Question {n}?", "yes") for one in PARAGRAPHS for n in range(3)],
    )  # fmt: skip


def run(scope: RagScope = SCOPE) -> dict[str, Any]:
    return run_rag_bench(scope, bundled_model_path())


def test_both_engines_get_the_same_traffic() -> None:
    run()
    plain, plain_again, blends, blends_again, checked = (started["asked"] for started in Scripted.started)
    assert plain == blends == checked and len(plain) == SCOPE.questions
    assert plain_again == blends_again and len(plain_again) == SCOPE.restarted
    first, second, third = (Scripted.started[at] for at in (2, 3, 4))
    assert first["blend"] == second["blend"] == {"mean_tokens": 100}
    assert third["blend"] == {"mean_tokens": 100, "check_every": 1}
    assert first["variant"][0].store == second["variant"][0].store, "what was stored outlives a restart"
    assert third["variant"][0].store != first["variant"][0].store
    assert first["decide"] == "measured"
    assert [started["variant"] for started in Scripted.started[:2]] == [(), ()]


def test_ratios_shares_and_kl() -> None:
    report = run()
    traffic = report["traffic"]
    assert traffic["p50_ratio"] == pytest.approx(0.5, abs=0.05)
    assert traffic["prefix_cache"]["reused"] == 0
    lengths = [len(prompt) for prompt in Scripted.started[2]["asked"]]
    assert traffic["blends"]["reused"] == pytest.approx((sum(n // 2 for n in lengths[2:]) - 18 * 3) / sum(lengths))
    over_time = traffic["blends"]["reused_over_time"]
    assert len(over_time) == 8 and over_time[0] < 0.25 < over_time[-1]
    assert traffic["over_prefix_cache"]["runs"] == SCOPE.questions
    assert report["restart"]["over_prefix_cache"]["runs"] == SCOPE.restarted
    each = [0.01] * 17 + [0.19]
    assert report["kl"] == {
        "checked": 18, "mean": pytest.approx(0.02), "standard_error": pytest.approx(0.01), "median": 0.01, "each": each,
        "recomputed": 0.2,
    }  # fmt: skip
    assert report["seed"] == 0


def test_popular_paragraphs_come_more_often() -> None:
    prompts = rag_prompts(replace(SCOPE, questions=200, exponent=2.0), bundled_model_path(), None, False)
    assert len(prompts) == 205 and len({tuple(prompt) for prompt in prompts}) > 80
    even = rag_prompts(replace(SCOPE, questions=200, exponent=0.0), bundled_model_path(), None, False)
    assert most_of_one(prompts) > 1.5 * most_of_one(even)


def most_of_one(prompts: Sequence[Sequence[int]]) -> int:
    """How many prompts begin with the same paragraph."""
    head = [tuple(prompt[20:50]) for prompt in prompts]
    return max(map(head.count, set(head)))


def test_a_report_is_printed_and_drawn() -> None:
    report = run()
    file = io.StringIO()
    print_rag_report(report, Console(file=file, width=140))
    text = file.getvalue()
    assert "20 questions about 3 of 8 paragraphs each" in text and "mean_tokens 100" in text
    assert "18 blends: 0.02 ± 0.01 nats, median 0.01; 20% of the reused tokens were recomputed" in text
    left, right = draw_rag_report(report).axes
    assert len(left.lines) == len(right.lines) == 2


@pytest.mark.parametrize("changes", [{"paragraphs": 13}, {"passages": 9}, {"passages": 0}])
def test_traffic_that_the_data_cannot_make(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="paragraphs: must be from passages="):
        run(replace(SCOPE, **changes))


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rag_bench, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="needs vLLM"):
        run()
