"""`cuvee tasks`: measure whether tasks need the cache, and what compressing the cache costs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuvee.cli.options import (
    DEFAULT_CHUNK_TOKENS,
    BatchSize,
    ChunkTokens,
    Dtype,
    Json,
    Limit,
    Metadata,
    Model,
    ModelDtype,
    TaskData,
    comma_separated,
    fields_from,
    typed_command,
)
from cuvee.cli.output import make_console, print_json, stoppable


def tasks(
    tasks: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK…",
            help="Tasks or groups. cuvee's own: the groups cuvee_local and cuvee_public, or one of their "
            "tasks, such as cuvee_lines_100; all others are lm-eval's.",
        ),
    ],
    model: Model = "books-3m",
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="The profile. Without one, the codec is lossless."),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Caches to compare, separated by commas: exact, destroyed, absent, a quality, kl=0.0005, bits=3, or a "
            "baseline such as fp8-e4m3. Default: exact,destroyed,absent, and with --profile high,balanced.",
        ),
    ] = None,
    data: TaskData = None,
    metadata: Metadata = None,
    limit: Limit = None,
    dtype: ModelDtype = Dtype.float32,
    chunk_tokens: ChunkTokens = DEFAULT_CHUNK_TOKENS,
    batch_size: BatchSize = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write scores to this JSON file as they come, and continue from it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Score tasks with the exact cache, without one, and with compressed ones, document by document.

    A task on which a destroyed cache or the question alone does as well as the exact cache shows nothing about a codec.

    Example: cuvee tasks cuvee_lines_100 cuvee_xquad --model smollm2 --profile P --data DIR --limit 40 -o tasks.json
    """
    default = "exact,destroyed,absent" + (",high,balanced" if profile else "")
    options = {**locals()} | {"variants": comma_separated(variants or default)}
    del options["default"]
    from cuvee.eval.score_tasks import TasksConfig, run_tasks, tasks_tables

    config = TasksConfig(**fields_from(options, *(name for name in options if name not in ("out", "as_json"))))
    with stoppable():
        found = run_tasks(config, out, make_console(stderr=True), typed_command())
    if as_json:
        print_json(found)
        return
    console = make_console()
    for table in tasks_tables(found):
        console.print(table.for_terminal(table.title))
        console.print(table.note, highlight=False, markup=False)
