"""`cuvee eval`: lm-eval with contexts that go through the codec."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

_QUALITIES = ("quality", "kl", "bits", "ratio", "step")
_OURS = re.compile(rf"(?:^|,)(profile|{'|'.join(_QUALITIES)})=([^,]+)")


def evaluate(ctx: typer.Context) -> None:
    """Run lm-eval's own command line, with the model cuvee and cuvee's tasks registered. Its help: cuvee eval --help.

    Example: cuvee eval run --model_args pretrained=MODEL,profile=FILE,quality=balanced --tasks cuvee_local
    """
    _check(_model_args(ctx.args))  # before lm-eval and a model are loaded

    from cuvee.eval.lm_command import run_cli

    if code := run_cli(ctx.args):
        raise typer.Exit(code)


def _model_args(args: list[str]) -> dict[str, Any]:
    """Return the profile and the qualities among `--model_args`; of those in JSON none."""
    found: dict[str, Any] = {}
    option = ""
    for word in args:
        if word.startswith("-"):
            option = word.partition("=")[0]
        if option in ("--model_args", "-a"):
            found |= _OURS.findall(word.removeprefix(f"{option}="))
    for name in found.keys() & {*_QUALITIES[1:]}:
        with suppress(ValueError):
            found[name] = float(found[name])
    return found


def _check(given: dict[str, Any]) -> None:
    """Refuse a profile that is not there, and a quality that is none or that the profile does not reach."""
    path = given.pop("profile", None)
    if path is not None and not Path(path).is_file():
        raise FileNotFoundError(f"profile: there is none at {path}: name another file, or learn one")
    if not given:
        return
    from cuvee.codec.profiles.profile import Profile
    from cuvee.codec.profiles.quality import Quality
    from cuvee.codec.profiles.setting import Setting

    quality = Quality(given.pop("quality", None), **given)
    if path is not None and quality.ratio is None:  # which depends on the model's dtype
        Setting.choose(Profile.load(path), quality)
