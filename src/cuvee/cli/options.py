"""Options that several commands take, and how options that have moved are refused."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "DEFAULT_CHUNK_TOKENS",
    "MODEL_HELP",
    "Calibration",
    "Config",
    "Dtype",
    "Evaluation",
    "Force",
    "Json",
    "Model",
    "ProfileFile",
    "need_one_of_profile_and_config",
    "refuse_moved",
    "typed_command",
]

DEFAULT_CHUNK_TOKENS = 256
MODEL_HELP = "Folder or name of a transformers model. Bundled: books-3m. Real, downloaded once: smollm2."


class Dtype(StrEnum):
    """Of a model or of a cache."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


ProfileFile = Annotated[Path | None, typer.Option("--profile", help="The profile.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="Instead of a profile: the model's config.json. Lossless, or nothing learned."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
Calibration = Annotated[
    list[str] | None,
    typer.Option(
        "--calibrate-on", metavar="TEXT", help="Learn from this text. Default: bundled texts.", show_default=False
    ),
]
Evaluation = Annotated[
    list[str] | None,
    typer.Option(
        "--measure-on", metavar="TEXT", help="Measure on this text. Default: bundled texts.", show_default=False
    ),
]


def need_one_of_profile_and_config(profile: Path | None, config: Path | None) -> None:
    """Refuse both, and neither: wrong usage."""
    if (profile is None) == (config is None):
        raise typer.BadParameter(
            "give --profile, or --config for coding without one (lossless, or statistics in the blob)"
        )


def refuse_moved(ctx: typer.Context, args: Sequence[str], moved: Mapping[str, str]) -> None:
    """Name the new command to who types an option that another command has now.

    Args:
        ctx: of the command that had the option.
        args: what was typed after that command.
        moved: the command to use, by option.
    """
    for arg in args:
        option = arg.partition("=")[0]
        if option in moved:
            ctx.fail(f"{option} has moved: it is now `{moved[option]}`.")


def typed_command() -> str:
    """This process's command, for a report that others read: of an absolute path only its last part."""

    def public(arg: str) -> str:
        # An argument may be OPTION=PATH, PATH=SHARE or PATH,PATH.
        parts = re.split("([=,])", arg)
        return "".join(Path(part).name or part if Path(part).is_absolute() else part for part in parts)

    return shlex.join(["cuvee", *map(public, sys.argv[1:])])
