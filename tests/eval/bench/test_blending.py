"""The bench of blends in vLLM. No speed is asserted."""

from __future__ import annotations

import argparse
import io
import math

import pytest
from rich.console import Console
from tests.integrations.vllm.engines import need_vllm

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench import blend
from cuvee.eval.bench.blend import BlendScope, run_blend_bench, show_blends
from cuvee.eval.bench.engine_process import EngineAnswer

SCOPE = BlendScope(lengths=(384, 448), costs=(0.0, 0.5, 1.0), rounds=2, prompts=5, document=64)


@pytest.mark.nightly
def test_a_real_engine() -> None:
    need_vllm()
    report = run_blend_bench(SCOPE, bundled_model_path())
    assert [entry["tokens"] for entry in report["lengths"]] == [384, 448]
    for entry in report["lengths"]:
        assert entry["computed_seconds"]["runs"] == SCOPE.rounds
        assert [blend["over_computed"]["runs"] for blend in entry["blends"]] == [SCOPE.rounds] * 3
        nothing, _, everything = (blend["kl"] for blend in entry["blends"])
        assert nothing > 10 * abs(everything)
    out = io.StringIO()
    show_blends(report).print(Console(file=out, width=120))
    assert "blended at cost 0.5, ratio" in out.getvalue() and "lossless" in out.getvalue()


def test_every_speed_is_a_median_of_five_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    parser, scopes = argparse.ArgumentParser(), list[BlendScope]()
    monkeypatch.setattr(blend, "run_blend_bench", lambda scope, model: scopes.append(scope))
    blend._options(parser)
    flags = [each.option_strings[0] for each in parser._actions if each.nargs == 0 and each.dest != "help"]
    for given in ([], ["--length", "1024"], flags):
        blend._measure(parser.parse_args(["--model", str(bundled_model_path()), *given]))
    assert min(scope.rounds for scope in scopes) >= 5


@pytest.mark.parametrize("length", [0, 48])
def test_lengths_are_whole_documents(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuvee.eval.bench.frame.find_spec", lambda _: True)
    with pytest.raises(InputError, match="length: must be a multiple of 32 tokens"):
        run_blend_bench(BlendScope(lengths=(length,), document=32), bundled_model_path())


@pytest.mark.parametrize("others", [{"7": -0.5, "9": -3.0}, {"7": -0.1, "8": -2.4}])
def test_a_kl_of_a_part_of_the_vocabulary_is_refused(others: dict[str, float]) -> None:
    whole = {"7": math.log(0.9), "9": math.log(0.1)}
    exact, found = (EngineAnswer(0.0, 0.0, [[7]], [[named]], [0]) for named in (others, whole))
    with pytest.raises(CuveeError, match=r"^logprobs: must be of the whole vocabulary"):
        found.first_token_kl(exact)
