"""`cuvee blend-report`: what blending cached chunks loses, and what recomputing some of their tokens wins back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cuvee.cli.options import Calibration, Dtype, Evaluation, Json, Model, typed_command
from cuvee.cli.output import make_console, print_json, stoppable


def blend_report(
    model: Model = "books-3m",
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the report.")] = Path("out/blend"),
    profiles: Annotated[
        list[Path] | None,
        typer.Option(
            "--profile", help="Code chunks with this profile. Default: learn one, group layer.", show_default=False
        ),
    ] = None,
    calibration: Calibration = None,
    evaluation: Evaluation = None,
    multidoc: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Measure these prompts too: objects with id, passages, gold, query, target. Repeatable.",
            show_default=False,
        ),
    ] = None,
    constructions: Annotated[
        str | None,
        typer.Option(
            help="Separated by commas: reread, ahead, passages, xquad, musique. Default: the first three.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A folder with the files of xquad and musique. Default: the hub.", show_default=False
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="any_version=true: of those files.", show_default=False),
    ] = None,
    documents: Annotated[
        int | None,
        typer.Option(min=1, help="At most this many prompts of each kind but reread.", show_default=False),
    ] = None,
    selectors: Annotated[
        str | None, typer.Option(help="Separated by commas. Default: all that are compared.", show_default=False)
    ] = None,
    costs: Annotated[
        str | None, typer.Option(help="Shares of the token-layers, separated by commas.", show_default=False)
    ] = None,
    qualities: Annotated[
        str | None,
        typer.Option(help="To decode chunks at, separated by commas, or none.", show_default=False),
    ] = None,
    contexts: Annotated[
        int | None,
        typer.Option(min=0, help="How many to average chunks over; 0: only chunks computed alone.", show_default=False),
    ] = None,
    behind: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Measure chunks that are cut out of prompts where so many chunks of others stood before them, too.",
            show_default=False,
        ),
    ] = None,
    wall_time: Annotated[
        bool, typer.Option("--wall-time/--no-wall-time", help="Measure the speed of a random Llama, too.")
    ] = True,
    dtype: Annotated[Dtype, typer.Option(help="Of the model and its caches. auto: as its files say.")] = Dtype.float32,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts, costs and lengths: two minutes.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace another run in the folder.")] = False,
    as_json: Json = False,
) -> None:
    """Measure what prompts put together from cached chunks lose, by selector and cost, and how fast they are.

    A TEXT is a file (.jsonl: one document per line), hf:DATASET:SPLIT:COLUMN, or the name of a bundled text.

    Takes twelve minutes on the bundled model. Figures of exact chunks are printed as they come, and results are saved
    after each prompt. Stop it with Ctrl-C or SIGTERM, give the same command again, and it goes on where it stopped.

    Example: cuvee blend-report --model smollm2 --constructions xquad --data DIR --costs 0.15,0.3 --no-wall-time
    """
    if len(profiles or ()) > 1:
        raise typer.BadParameter("give one --profile")

    from cuvee.eval.blending.blend_report_config import BlendConfig, quick_blend_config
    from cuvee.eval.blending.blend_report_run import run_blend_report

    given: dict[str, Any] = {"profile": str(profiles[0])} if profiles else {}
    given |= {"calibration": tuple(calibration)} if calibration else {}
    given |= {"evaluation": tuple(evaluation)} if evaluation else {}
    config = BlendConfig(model=model, seed=seed, dtype=dtype.value, multidoc=tuple(map(str, multidoc or ())), **given)
    if quick:
        config = quick_blend_config(config)
    chosen: dict[str, Any] = {"data": None if data is None else str(data), "any_version": _any_version(metadata or ())}
    chosen |= {"constructions": _listed(constructions)} if constructions is not None else {}
    chosen |= {"documents": documents} if documents is not None else {}
    chosen |= {"selectors": _listed(selectors)} if selectors is not None else {}
    if costs is not None:
        asked = tuple(_number("--costs", cost) for cost in _listed(costs))
        chosen |= {"costs": asked, "few_costs": asked}
    if qualities is not None:
        chosen |= {"qualities": () if qualities == "none" else _listed(qualities)}
    chosen |= {"contexts": contexts} if contexts is not None else {}
    chosen |= {"behind": behind} if behind is not None else {}
    chosen |= {} if wall_time else {"lengths": ()}
    config = replace(config, **chosen)
    with stoppable():
        report = run_blend_report(config, out, make_console(stderr=True), force=force, command=typed_command())
    if as_json:
        print_json(report)
        return

    from cuvee.eval.blending.render import print_blend_summary

    print_blend_summary(report, make_console())
    print(f"{out / 'blend.md'}\n{out / 'blend.json'}")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers separated by commas, got {text!r}") from None


def _any_version(metadata: Sequence[str]) -> bool:
    """Whether `any_version=true` is given, the only thing that these tasks ask for."""
    known = {"any_version=true": True, "any_version=false": False}
    if unknown := [pair for pair in metadata if pair.lower() not in known]:
        raise typer.BadParameter(f"--metadata takes any_version=true or any_version=false, got {unknown[0]!r}")
    return any(known[pair.lower()] for pair in metadata)
