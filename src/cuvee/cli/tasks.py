"""`cuvee tasks`: what tasks show, and what compression costs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuvee.cli.options import DEFAULT_CHUNK_TOKENS, Dtype, Json, Model, ProfileFile, typed_command
from cuvee.cli.output import make_console, print_json, stoppable


def tasks(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK…",
            help="Tasks or groups. cuvee's own: the groups cuvee_local and cuvee_public, or one of their "
            "tasks, such as cuvee_lines_100; all others are lm-eval's.",
        ),
    ],
    model: Model = "books-3m",
    profile: ProfileFile = None,
    arms: Annotated[
        str,
        typer.Option(
            help="Separated by commas: exact, destroyed, absent, a quality, kl=0.0005, bits=3, or a baseline such as "
            "fp8-e4m3."
        ),
    ] = "exact,destroyed,absent,high,balanced",
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder with the tasks' data. Default: the hub.", show_default=False),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="For tasks that ask for it. Repeatable.", show_default=False),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many documents per task.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the model. auto: as its files say.")] = Dtype.float32,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens coded together.")] = DEFAULT_CHUNK_TOKENS,
    batch_size: Annotated[int, typer.Option(min=1, help="Contexts per forward pass.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write scores to this JSON file as they come, and go on from it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Score tasks with the exact cache, without one, and with compressed ones, document by document.

    A task on which a destroyed cache or the question alone does as well as the exact cache shows nothing of a codec.

    Example: cuvee tasks cuvee_lines_100 cuvee_xquad --model smollm2 --profile P --data DIR --limit 40 -o tasks.json
    """
    from cuvee.eval.arms import ArmsConfig, arms_tables, run_arms

    config = ArmsConfig(
        model=model,
        tasks=tuple(names),
        arms=tuple(filter(None, arms.split(","))),
        profile=None if profile is None else str(profile),
        data=None if data is None else str(data),
        metadata=tuple(metadata or ()),
        limit=limit,
        dtype=dtype.value,
        chunk_tokens=chunk_tokens,
        batch_size=batch_size,
    )
    with stoppable():
        found = run_arms(config, out, make_console(stderr=True), typed_command())
    if as_json:
        print_json(found)
        return
    console = make_console()
    for table in arms_tables(found):
        console.print(table.for_terminal(table.title))
        console.print(table.note, highlight=False, markup=False)
