"""`cuvee demo`: show what compression saves and costs on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuvee.cli.options import Json, Model
from cuvee.cli.output import make_console, print_json


def demo(
    plot: Annotated[Path, typer.Option("--plot", help="The file for the plot (.svg, .png).")] = Path("out/demo.svg"),
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw none.")] = False,
    model: Model = "books-3m",
    as_json: Json = False,
) -> None:
    """Compress a model's cache, and show what that saves and costs.

    The bundled model needs no network. smollm2 takes longer, and is downloaded once (270 MB on disk).

    Example: cuvee demo --model smollm2
    """
    from cuvee.eval.demo import run_demo

    report = run_demo(make_console(stderr=as_json), None if no_plot else plot, model=model)
    if as_json:
        print_json(report)
