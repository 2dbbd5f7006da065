"""`cuvee report`: measure what compression costs a model, next to the baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuvee.cli.options import (
    DEFAULT_CHUNK_TOKENS,
    BatchSize,
    ChunkTokens,
    Dtype,
    Evaluation,
    Json,
    Metadata,
    Model,
    ReplaceRun,
    Seed,
    comma_separated,
    fields_from,
    refuse_moved,
    typed_command,
)
from cuvee.cli.output import make_console, print_json, stoppable

_COMPARE = "cuvee compare OLD.json NEW.json"
_BLEND = "cuvee blend-report"
_MOVED = {
    "--compare": _COMPARE,
    "--fail-if": f"{_COMPARE} --fail-if CONDITION",
    "--allow-different": f"{_COMPARE} --allow-different",
    "--blend": _BLEND,
    "--multidoc": f"{_BLEND} --multidoc FILE.jsonl",
}


class ReportCommand(typer.core.TyperCommand):
    """The command, which names the new commands for its former options."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override, unused-ignore]
        """Read the options."""
        refuse_moved(ctx, args, _MOVED)
        return super().parse_args(ctx, args)


def report(
    model: Model = "books-3m",
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the report.")] = Path("out/report"),
    profiles: Annotated[
        list[Path] | None,
        typer.Option("--profile", help="Measure this profile instead of learning one. Repeatable.", show_default=False),
    ] = None,
    groups: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            help="Learn a profile with this group. Repeatable. Default: layer and all if the model is small enough, "
            "else auto, as `cuvee profile learn` does.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Measure only these: keys (kivi4, pca/layer@0.4), families (pca/kv) or kinds (cuvee, pca, kvtc).",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="TOKENS,…", help="Measure size and KL with this many cached tokens, too: 256,1024,4096."),
    ] = None,
    length_sequences: Annotated[int, typer.Option(min=1, help="Sequences per length, at most.")] = 4,
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            "--calibrate-on",
            metavar="TEXT",
            help="Learn from this text; mixture is what `cuvee profile learn` learns from. Default: the mixture; "
            "bundled texts for the bundled model.",
            show_default=False,
        ),
    ] = None,
    calibration_sequences: Annotated[
        int | None,
        typer.Option(min=3, help="Learn from at most this many sequences. Default: 96 of the mixture, else 200."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Learn from this many sequences sampled from the model, too.")
    ] = 0,
    evaluation: Evaluation = None,
    sequences: Annotated[int, typer.Option(min=1, help="Measure on at most this many sequences.")] = 32,
    length: Annotated[int, typer.Option(min=8, help="Tokens per sequence.")] = 512,
    prefix: Annotated[
        int | None, typer.Option(min=1, help="How many of them are cached. Default: three quarters.")
    ] = None,
    reread: Annotated[
        bool, typer.Option("--reread/--no-reread", help="Let every second sequence repeat a part of its cache.")
    ] = True,
    chunk_tokens: ChunkTokens = DEFAULT_CHUNK_TOKENS,
    tasks: Annotated[
        str | None,
        typer.Option(help="lm-eval tasks, separated by commas; none for no tasks. Default: cuvee's local tasks."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="At most this many documents per task. Default: all; 40 if the model has over 10 M parameters."
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question. Default: what the task says.")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put prompts into the tokenizer's chat template.")
    ] = False,
    include_path: Annotated[Path | None, typer.Option(help="A folder with tasks of your own.")] = None,
    metadata: Metadata = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Dtype of the model. auto: float32 on a CPU, elsewhere what its files say.")
    ] = Dtype.auto,
    cache_dtype: Annotated[Dtype, typer.Option(help="Dtype of the caches that are coded.")] = Dtype.bfloat16,
    device: Annotated[str, typer.Option(help="Where the model runs and its caches are coded.")] = "cpu",
    batch_size: BatchSize = 8,
    seed: Seed = 7,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sequences, methods and tasks: four minutes on the bundled model.")
    ] = False,
    force: ReplaceRun = False,
    as_json: Json = False,
) -> None:
    """Measure what compression costs a model, next to the baselines: sizes, KL, task scores, plots.

    A TEXT is a file (.jsonl: one document per line), hf:DATASET:SPLIT:COLUMN, or the name of a bundled text.

    Results are saved as they come. After Ctrl-C or SIGTERM, the same command continues where it stopped.

    Example: cuvee report --model smollm2 --quick -o out/smollm2

    Example: cuvee report --model smollm2 --methods cuvee,fp8-e4m3,kivi4 --lengths 256,1024 --tasks none -o out/lengths
    """
    options = {**locals()}
    from cuvee.eval.report.report_config import ReportConfig, quick_config
    from cuvee.eval.report.report_run import run_report

    if cache_dtype is Dtype.auto:
        raise typer.BadParameter("must be a dtype; auto says none", param_hint="--cache-dtype")
    options["tasks"] = comma_separated(tasks, none=True)
    options["methods"] = comma_separated(methods)
    try:
        options["lengths"] = tuple(map(int, comma_separated(lengths) or ()))
    except ValueError:
        raise typer.BadParameter(f"must be numbers of tokens, got {lengths}", param_hint="--lengths") from None
    others = ("out", "quick", "force", "as_json")
    config = ReportConfig(**fields_from(options, *(name for name in options if name not in others)))
    if quick:
        config = quick_config(config)
    with stoppable():
        data = run_report(config, out, make_console(stderr=True), force=force, command=typed_command())
    if as_json:
        print_json(data)
        return

    from cuvee.eval.report.report_documents import print_summary

    print_summary(data, make_console())
    print(f"{out / 'report.md'}\n{out / 'report.html'}\n{out / 'report.json'}")
