"""`cuvee demo`: show what compression saves and costs on a model."""

from __future__ import annotations

from cuvee.cli.options import Model
from cuvee.cli.output import make_console


def demo(model: Model = "books-3m") -> None:
    """Compress a model's cache; show what that saves and costs, and what the model says after it.

    The bundled model needs no network. smollm2 takes longer, and is downloaded once (270 MB on disk).

    Example: cuvee demo --model smollm2
    """
    from cuvee.eval.demo import run_demo

    run_demo(make_console(), model=model)
