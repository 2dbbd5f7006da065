"""`cuvee blend-report`: measure what blending cached chunks loses, and what recomputing some tokens recovers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cuvee.cli.options import (
    Calibration,
    Dtype,
    Evaluation,
    Json,
    Metadata,
    Model,
    ModelDtype,
    ReplaceRun,
    Seed,
    TaskData,
    any_version,
    comma_separated,
    fields_from,
    typed_command,
)
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
            help="Also measure these prompts: objects with id, passages, gold, query, target. Repeatable.",
            show_default=False,
        ),
    ] = None,
    constructions: Annotated[
        str | None,
        typer.Option(
            help="Prompts, separated by commas: reread, ahead, passages, xquad, musique. Default: the first three.",
            show_default=False,
        ),
    ] = None,
    data: TaskData = None,
    metadata: Metadata = None,
    documents: Annotated[
        int | None,
        typer.Option(min=1, help="At most this many prompts of each kind except reread.", show_default=False),
    ] = None,
    selectors: Annotated[
        str | None,
        typer.Option(help="Selectors, separated by commas. Default: all that are compared.", show_default=False),
    ] = None,
    costs: Annotated[
        str | None, typer.Option(help="Shares of the token-layers, separated by commas.", show_default=False)
    ] = None,
    qualities: Annotated[
        str | None,
        typer.Option(help="Qualities of decoded chunks, separated by commas, or none.", show_default=False),
    ] = None,
    contexts: Annotated[
        int | None,
        typer.Option(min=0, help="Contexts to average chunks over; 0: only chunks computed alone.", show_default=False),
    ] = None,
    behind: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Also measure chunks cut out of prompts, behind this many chunks of other prompts.",
            show_default=False,
        ),
    ] = None,
    wall_time: Annotated[
        bool, typer.Option("--wall-time/--no-wall-time", help="Also measure the speed of a random Llama.")
    ] = True,
    dtype: ModelDtype = Dtype.float32,
    seed: Seed = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts, costs and lengths: two minutes.")] = False,
    force: ReplaceRun = False,
    as_json: Json = False,
) -> None:
    """Measure what prompts built from cached chunks lose, by selector and cost, and how fast they are.

    A TEXT is a file (.jsonl: one document per line), hf:DATASET:SPLIT:COLUMN, or the name of a bundled text.

    Takes twelve minutes on the bundled model. Figures of exact chunks are printed as they come, and results are saved
    after each prompt. After Ctrl-C or SIGTERM, the same command continues where it stopped.

    Example: cuvee blend-report --model smollm2 --constructions xquad --data DIR --costs 0.15,0.3 --no-wall-time
    """
    options = {**locals()}
    if len(profiles or ()) > 1:
        raise typer.BadParameter("give one --profile")

    from cuvee.eval.blend_report.blend_report_config import BlendConfig, quick_blend_config
    from cuvee.eval.blend_report.blend_report_run import run_blend_report

    options["profile"] = profiles[0] if profiles else None
    options["any_version"] = any_version(metadata or ())
    options |= {name: comma_separated(options[name]) for name in ("constructions", "selectors")}
    options["qualities"] = comma_separated(qualities, none=True)
    if costs is not None:
        options["costs"] = options["few_costs"] = tuple(_number("--costs", c) for c in comma_separated(costs) or ())
    options["lengths"] = None if wall_time else ()
    first = ("model", "profile", "calibration", "evaluation", "multidoc", "dtype", "seed")
    config = BlendConfig(**fields_from(options, *first))
    if quick:
        config = quick_blend_config(config)
    named = (
        "data",
        "any_version",
        "constructions",
        "documents",
        "selectors",
        "costs",
        "qualities",
        "contexts",
        "behind",
    )
    config = replace(config, **fields_from({"few_costs": None, **options}, *named, "few_costs", "lengths"))
    with stoppable():
        report = run_blend_report(config, out, make_console(stderr=True), force=force, command=typed_command())
    if as_json:
        print_json(report)
        return

    from cuvee.eval.blend_report.blend_sections import print_blend_summary

    print_blend_summary(report, make_console())
    print(f"{out / 'blend.md'}\n{out / 'blend.json'}")


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers separated by commas, got {text!r}") from None
