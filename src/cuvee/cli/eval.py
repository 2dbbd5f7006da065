"""`cuvee eval`: lm-eval with contexts that go through the codec."""

from __future__ import annotations

import re
from pathlib import Path

import typer


def evaluate(ctx: typer.Context) -> None:
    """Run lm-eval's own command line, with the model cuvee and cuvee's tasks registered. Its help: cuvee eval --help.

    Example: cuvee eval run --model_args pretrained=MODEL,profile=FILE,quality=balanced --tasks cuvee_local
    """
    for path in re.findall(r"(?:^|[,=])profile=([^,\n]+)", "\n".join(ctx.args), re.MULTILINE):
        if not Path(path).is_file():  # found before lm-eval and a model are loaded
            raise FileNotFoundError(f"profile: there is none at {path}: name another file, or learn one")

    from cuvee.eval.lm_command import run_cli

    if code := run_cli(ctx.args):
        raise typer.Exit(code)
