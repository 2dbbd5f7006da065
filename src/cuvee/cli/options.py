"""Options that several commands take, their conversion to configurations, and errors about options that have moved."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "DEFAULT_CHUNK_TOKENS",
    "MODEL_HELP",
    "BatchSize",
    "Calibration",
    "ChunkTokens",
    "Config",
    "Dtype",
    "Evaluation",
    "Force",
    "Json",
    "Limit",
    "Metadata",
    "Model",
    "ModelDtype",
    "ProfileFile",
    "ReplaceRun",
    "ReportFile",
    "Seed",
    "TaskData",
    "any_version",
    "comma_separated",
    "fields_from",
    "need_one_of_profile_and_config",
    "refuse_moved",
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
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Sequences per forward pass.")]
ChunkTokens = Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens per coded chunk.")]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="At most this many documents per task.", show_default=False)
]
Metadata = Annotated[
    list[str] | None,
    typer.Option("--metadata", metavar="NAME=VALUE", help="For tasks that ask for it. Repeatable.", show_default=False),
]
ModelDtype = Annotated[Dtype, typer.Option("--dtype", help="Dtype of the model. auto: what its files say.")]
ReplaceRun = Annotated[bool, typer.Option("--force", help="Replace another run in the folder.")]
ReportFile = Annotated[
    Path | None, typer.Option("--out", "-o", help="Also write the report to this file, as JSON.", show_default=False)
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]
TaskData = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="The folder with public data. Default: the hub.", show_default=False),
]
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


def comma_separated(listed: str | None, none: bool = False) -> tuple[str, ...] | None:
    """Split the value of an option at its commas; None stays None, and with `none` the word none is an empty list."""
    if listed is None:
        return None
    return () if none and listed == "none" else tuple(filter(None, map(str.strip, listed.split(","))))


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
        raise typer.BadParameter(
            "give --profile, or --config for coding without one (lossless, or statistics in the blob)"
        )


def refuse_moved(ctx: typer.Context, args: Sequence[str], moved: Mapping[str, str]) -> None:
    """Refuse options that have moved to another command, and name that command.

    Args:
        ctx: of the command that had the option.
        args: the arguments after that command.
        moved: the command to use, by option.
    """
    for arg in args:
        option = arg.partition("=")[0]
        if option in moved:
            ctx.fail(f"{option} has moved: it is now `{moved[option]}`.")


def typed_command() -> str:
    """Return this process's command for a report that others read, with only the last part of absolute paths."""

    def public(arg: str) -> str:
        # An argument may be OPTION=PATH, PATH=SHARE or PATH,PATH.
        parts = re.split("([=,])", arg)
        return "".join(Path(part).name or part if Path(part).is_absolute() else part for part in parts)

    return shlex.join(["cuvee", *map(public, sys.argv[1:])])


def any_version(metadata: Sequence[str]) -> bool:
    """Return whether `any_version=true` is given, the only metadata of these prompts."""
    known = {"any_version=true": True, "any_version=false": False}
    if unknown := [pair for pair in metadata if pair.lower() not in known]:
        raise typer.BadParameter(f"--metadata takes any_version=true or any_version=false, got {unknown[0]!r}")
    return any(known[pair.lower()] for pair in metadata)
