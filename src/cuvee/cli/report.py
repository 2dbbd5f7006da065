"""`cuvee report`: measure what compression costs a model, next to the baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuvee.cli.options import Dtype, Json, Model, fields_from, typed_command
from cuvee.cli.output import make_console, print_json
from cuvee.codec.errors import InputError

_MEASURING, _TASKS = "Measuring", "Tasks"


def report(
    model: Model = "books-3m",
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the report.")] = Path("out/report"),
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD.json",
            help="List what changed since this report.json. Exit with code 3 if a figure got worse or is missing.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sequences, methods and tasks.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace another run in the folder.")] = False,
    as_json: Json = False,
    profiles: Annotated[
        list[Path] | None,
        typer.Option(
            "--profile", show_default=False, rich_help_panel=_MEASURING,
            help="Measure this profile, which `cuvee profile learn` has written. Repeatable.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method", metavar="NAME", show_default=False, rich_help_panel=_MEASURING,
            help="Measure only this: a key (kivi4, pca/layer@0.4), a family (pca/layer) or a kind (cuvee, pca). "
            "Repeatable. Default: all but PCA, which learns first.",
        ),
    ] = None,
    evaluation: Annotated[
        list[str] | None,
        typer.Option(
            "--text", metavar="TEXT", show_default=False, rich_help_panel=_MEASURING,
            help="Measure on this text. Repeatable. Default: bundled texts.",
        ),
    ] = None,
    sequences: Annotated[
        int, typer.Option(min=1, help="Measure on at most this many sequences.", rich_help_panel=_MEASURING)
    ] = 32,
    length: Annotated[int, typer.Option(min=8, help="Tokens per sequence.", rich_help_panel=_MEASURING)] = 512,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Dtype of the model. auto: float32 on a CPU, elsewhere what its files say.", rich_help_panel=_MEASURING
        ),
    ] = Dtype.auto,
    device: Annotated[
        str, typer.Option(help="Where the model runs and its caches are coded.", rich_help_panel=_MEASURING)
    ] = "cpu",
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task", metavar="NAME", show_default=False, rich_help_panel=_TASKS,
            help="Score this lm-eval task or group, or a YAML file's. Repeatable. Default: the group cuvee_local.",
        ),
    ] = None,
    no_tasks: Annotated[bool, typer.Option("--no-tasks", rich_help_panel=_TASKS, help="Score none.")] = False,
    controls: Annotated[
        bool,
        typer.Option(
            "--controls", rich_help_panel=_TASKS,
            help="Score the question alone, too, and say which tasks show nothing about a codec.",
        ),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, rich_help_panel=_TASKS,
            help="At most this many documents per task. Default: all; 40 if the model has over 10 M parameters.",
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", show_default=False, rich_help_panel=_TASKS,
            help="For tasks that ask for it. Repeatable.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Measure what compression costs a model, next to the baselines: sizes, KL, task scores, a plot.

    A TEXT is a file (.jsonl: one document per line), or the name of a bundled text.

    Results are saved as they come: whatever ends a run, the same command continues where it stopped.

    Example: cuvee report --model smollm2 --profile smollm2.safetensors --quick -o out/smollm2

    Example: cuvee report --model smollm2 --profile P.safetensors --method cuvee --task cuvee_lines_100 --controls

    Example: cuvee report --profile books-3m.safetensors --quick --against old/report.json
    """
    options = {**locals()}
    from cuvee.eval.report.rendering import print_summary
    from cuvee.eval.report.report_config import ReportConfig, quick_config
    from cuvee.eval.report.report_run import run_report

    others = ("out", "against", "quick", "force", "as_json", "no_tasks")
    fields = fields_from(options, *(name for name in options if name not in others))
    if no_tasks:
        if idle := [name for name in ("tasks", "limit", "metadata") if name in fields]:
            raise InputError(f"{idle[0]}: must be left out with --no-tasks, got {fields[idle[0]]}")
        fields["tasks"] = ()
    config = ReportConfig(**fields)
    console = make_console(stderr=True)
    try:
        chosen = quick_config(config) if quick else config
        result = run_report(chosen, out, console, against=against, force=force, command=typed_command())
    except KeyboardInterrupt:
        console.print(
            f"interrupted: {out} keeps what was measured, and the same command continues",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    if as_json:
        print_json(result.to_dict())
    else:
        print_summary(result, make_console())
        print(f"{out / 'report.md'}\n{out / 'report.json'}")
    if result.against is not None and result.against.worse:
        raise typer.Exit(3)
