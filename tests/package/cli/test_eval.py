"""`cuvee eval`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import LAYOUTS, fitted_to
from tests.package.cli.running import fails, run

from cuvee.codec.profiles.quality import CurvePoint


def test_eval_hands_everything_to_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def fake(args: list[str]) -> int:
        seen.append(args)
        return 3 if "fail" in args else 0

    monkeypatch.setattr("cuvee.eval.lm_command.run_cli", fake)
    run("eval", "run", "--tasks", "a,b", "--help", "-x")
    run("eval", "--model_args", f"profile={__file__}", "--tasks", "a")
    run("eval", "fail", code=3)
    assert seen == [
        ["run", "--tasks", "a,b", "--help", "-x"],
        ["--model_args", f"profile={__file__}", "--tasks", "a"],
        ["fail"],
    ]


@pytest.mark.parametrize("word", ["profile=nowhere", "pretrained=M,profile=nowhere,quality=high"])
@pytest.mark.parametrize("option", [["--model_args"], ["--model_args="]])
def test_a_profile_that_is_not_there_is_named_first(
    option: list[str], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuvee.eval.lm_command.run_cli", lambda args: pytest.fail("lm-eval was started"))
    arguments = [option[0] + word] if option[0].endswith("=") else [*option, word]
    fails("eval", *arguments, match="profile: there is none at nowhere")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["quality=tiny"], "quality: must be one of lossless, high, balanced, small, got 'tiny'"),
        (["pretrained=M,kl=abc"], "kl: must be a positive number, got 'abc'"),
        (["pretrained=M", "ratio=-2"], "ratio: must be a positive number, got -2"),
        (["quality=high,bits=2"], "quality: must be given as exactly one of"),
        (["profile={profile},bits=99"], "bits: must lie in"),
    ],
)
@pytest.mark.parametrize("option", ["--model_args", "-a"])
def test_a_quality_that_is_none_is_named_first(
    option: str, words: list[str], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuvee.eval.lm_command.run_cli", lambda args: pytest.fail("lm-eval was started"))
    curve = [CurvePoint(index, bits, 0.1, kl=0.01) for index, bits in ((-64, 4.0), (0, 2.0))]
    fitted_to(LAYOUTS["gqa"]).with_curve(curve).save(tmp_path / "p")
    given = [word.format(profile=tmp_path / "p") for word in words]
    fails("eval", "run", option, *given, "--tasks", "a", match=match)


def test_other_options_are_lm_evals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuvee.eval.lm_command.run_cli", lambda args: 0)
    run("eval", "run", "--model_args", "quality=high", "--wandb_args", "project=p,step=5,profile=none")
