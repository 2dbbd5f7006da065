"""`cuvee eval`."""

from __future__ import annotations

import pytest
from tests.package.cli.running import fails, run


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
