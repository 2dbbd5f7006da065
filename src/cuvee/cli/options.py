"""Options that several commands take, and their conversion to configurations."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "DEFAULT_CHUNK_TOKENS",
    "MODEL_HELP",
    "Config",
    "Dtype",
    "Force",
    "Json",
    "Model",
    "ProfileFile",
    "fields_from",
    "need_one_of_profile_and_config",
    "typed_command",
]

DEFAULT_CHUNK_TOKENS = 256
MODEL_HELP = "Folder or name of a transformers model. Bundled: books-3m. Real, downloaded once: smollm2."


class Dtype(StrEnum):
    """A dtype of a model or of a cache."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


ProfileFile = Annotated[Path | None, typer.Option("--profile", help="The profile.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="Instead of a profile: the model's config.json. Lossless only."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]


def fields_from(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Turn options of a command into the fields of the same names of its configuration.

    Args:
        options: values by name, as the command received them.
        names: the options to take.

    Returns:
        The fields, with lists as tuples, paths as strings and enum members as their values. Options that were not
        given are left out, so that the configuration's defaults apply.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(plain, value))
        return value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value

    return {name: plain(options[name]) for name in names if options[name] not in (None, [])}


def need_one_of_profile_and_config(profile: Path | None, config: Path | None) -> None:
    """Refuse a command with both options, or with neither."""
    if (profile is None) == (config is None):
        raise typer.BadParameter("give --profile, or --config for lossless coding without one")


def typed_command() -> str:
    """Return this process's command for a report that others read, with only the last part of absolute paths."""

    def public(arg: str) -> str:
        # An argument may be OPTION=PATH or PATH,PATH.
        parts = re.split("([=,])", arg)
        return "".join(Path(part).name or part if Path(part).is_absolute() else part for part in parts)

    return shlex.join(["cuvee", *map(public, sys.argv[1:])])
