"""`cuvee compare`: show what changed between two reports, as a gate for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuvee.cli.options import Json
from cuvee.cli.output import make_console, print_json


def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD.json", help="The report.json of a run of `cuvee report`.")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json", help="The report.json of another run.")],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Exit with code 1 if this holds, such as 'kl>5%', 'score<-1se' or 'bits>1%@cuvee/*'. Repeatable.",
            show_default=False,
        ),
    ] = None,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Even if models, texts or chunks differ.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare two reports, without measuring anything.

    Example: cuvee compare old/report.json new/report.json --fail-if 'kl>5%@cuvee/*'
    """
    from cuvee.eval.report.compare import Condition, compare_reports, print_comparison
    from cuvee.eval.report.report_file import load_report

    comparison = compare_reports(
        load_report(old),
        load_report(new),
        [Condition.parse(text) for text in fail_if or []],
        allow_different=allow_different,
    )
    if as_json:
        print_json(comparison.to_dict())
    else:
        print_comparison(comparison, make_console())
    if comparison.failures:
        raise typer.Exit(1)
