"""`cuvee blend-report`: what blending cached chunks loses, and what recomputing some of their tokens wins back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cuvee.cli.options import Calibration, Evaluation, Json, Model, typed_command
from cuvee.cli.output import make_console, print_json


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
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts, costs and lengths: two minutes.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace another run in the folder.")] = False,
    as_json: Json = False,
) -> None:
    """Measure what prompts put together from cached chunks lose, by selector and cost, and how fast they are.

    A TEXT is a file (.jsonl: one document per line), hf:DATASET:SPLIT:COLUMN, or the name of a bundled text.

    Takes twelve minutes on the bundled model. Figures of exact chunks are printed as they come.

    Example: cuvee blend-report --quick
    """
    if len(profiles or ()) > 1:
        raise typer.BadParameter("give one --profile")

    from cuvee.eval.blending.config import BlendConfig, quick_blend_config
    from cuvee.eval.blending.run import run_blend_report
    from cuvee.eval.runs import Interrupted

    given: dict[str, Any] = {"profile": str(profiles[0])} if profiles else {}
    given |= {"calibration": tuple(calibration)} if calibration else {}
    given |= {"evaluation": tuple(evaluation)} if evaluation else {}
    config = BlendConfig(model=model, seed=seed, multidoc=tuple(map(str, multidoc or ())), **given)
    if quick:
        config = quick_blend_config(config)
    try:
        data = run_blend_report(config, out, make_console(stderr=True), force=force, command=typed_command())
    except Interrupted as stopped:
        raise typer.Exit(128 + stopped.number) from None
    if as_json:
        print_json(data)
        return

    from cuvee.eval.blending.render import print_blend_summary

    print_blend_summary(data, make_console())
    print(f"{out / 'blend.md'}\n{out / 'blend.json'}")
