"""`cuvee demo`: show what compression saves and costs on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuvee.cli.options import Model
from cuvee.cli.output import make_console


def demo(
    plot: Annotated[Path, typer.Option("--plot", help="The file for the plot (.svg, .png).")] = Path("out/demo.svg"),
    model: Model = "books-3m",
) -> None:
    """Compress a model's cache, and show what that saves and costs.

    The bundled model needs no network. smollm2 takes longer, and is downloaded once (270 MB on disk).

    Example: cuvee demo --model smollm2
    """
    from cuvee.eval.demo import run_demo

    run_demo(make_console(), plot, model=model)
