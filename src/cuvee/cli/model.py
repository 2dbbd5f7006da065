"""`cuvee model`: what the cache of a model holds, and where the files of a named model are."""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuvee.cli.options import MODEL_HELP, Json
from cuvee.cli.output import make_console, make_table, print_json

if TYPE_CHECKING:
    from cuvee.codec.models.probe import MeasuredLayer

app = typer.Typer(no_args_is_help=True, help="Check whether a model is supported, or find its files.")


@app.command("path")
def model_path(model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]) -> None:
    """Print the folder of books-3m or smollm2, for engines, which do not know these names; any other name as it is.

    Example: cuvee model path books-3m
    """
    from cuvee.calibration.corpus import model_path as find

    path = find(model)
    if path == model and "/" not in model and not Path(model).exists():
        typer.echo(f"note: {model} is neither bundled nor a folder here: an engine looks for it on the hub", err=True)
    print(path)


@app.command("check")
def model_check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A config.json, a folder that holds one, or a name on the hub.")
    ],
    as_json: Json = False,
) -> None:
    """Measure what the cache of a model holds, layer by layer, and whether it can be moved. Reads no weights.

    Example: cuvee model check smollm2
    """
    from cuvee.calibration.corpus import load_config
    from cuvee.codec.models.measured import measured_layers, movable

    config, layers = measured_layers(load_config(model))
    size = 2 if config.dtype is None else config.dtype.itemsize
    runs: list[dict[str, Any]] = []
    for row, alike in groupby(enumerate(layers), key=lambda pair: _layer_row(pair[1], size)):
        numbers = [index for index, _ in alike]
        runs.append({"first": numbers[0], "last": numbers[-1], **row})
    total, state_bytes = (
        sum(run[name] * (run["last"] - run["first"] + 1) for run in runs)
        for name in ("bytes_per_token", "states_bytes")
    )
    states, moves = any(layer.beyond for layer in layers), movable(layers)
    if as_json:
        sums = {"states": states, "movable": moves, "bytes_per_token": total, "states_bytes": state_bytes}
        print_json({"model_type": config.model_type, **sums, "layers": runs})
        return
    table = make_table("layers", "kind", "heads x key, value", "window", "keys", "bytes/token", "beside")
    for run in runs:
        of_heads = (f"{run['heads']} x {run['key']}, {run['value']}", run["positions"], f"{run['bytes_per_token']:,}")
        shape, positions, size_of_token = of_heads if run["heads"] else ("", "", "")
        table.add_row(
            str(run["first"]) if run["first"] == run["last"] else f"{run['first']} … {run['last']}",
            run["kind"],
            shape,
            str(run["window"] or ""),
            positions,
            size_of_token,
            f"{run['states_bytes']:,}" if run["states_bytes"] else "",
        )
    console = make_console()
    console.print(f"{config.model_type}: {len(layers)} layers, {total:,} bytes per token", highlight=False)
    console.print(table)
    for note in dict.fromkeys(run["note"] for run in runs if run["note"]):
        console.print(note, markup=False, highlight=False)
    if state_bytes:
        console.print(
            f"Beside keys and values of tokens: {state_bytes:,} bytes in float32, after the few tokens that were run.",
            highlight=False,
        )
    if states:
        console.print(
            "Kept as a whole: encode_cache and decode_cache restore a cache where it ended, with keys and values as a "
            "profile codes them. Engines' adapters and blending do not take this model."
        )
    elif moves:
        console.print("Movable: chunks decode at any position.")
    else:
        console.print("Bound: chunks decode at the positions where they were encoded; they cannot be moved or blended.")


def _layer_row(layer: MeasuredLayer, size: int) -> dict[str, Any]:
    """Describe a layer whose values take `size` bytes each, for JSON."""
    rotation, rope, kept = "", layer.rope, layer.beyond
    if rope is not None:
        part = "" if rope.rotary_dim == layer.head_dim else f" {rope.rotary_dim} of {layer.head_dim}"
        rotation = f"{part}, {'adjacent pairs' if rope.interleaved else 'halves'}"
    return {
        "kind": layer.kind,
        "heads": layer.kv_heads,
        "key": layer.head_dim,
        "value": layer.value_dim,
        "window": layer.sliding_window,
        "positions": f"{layer.positions}{rotation}",
        "bytes_per_token": layer.kv_heads * (layer.head_dim + layer.value_dim) * size,
        "states_bytes": 4 * sum(math.prod(shape) for _, shape in layer.others),
        "note": f"{layer.kind} holds {kept}" if kept else layer.why,
    }
