"""`cuvee profile show` and `cuvee profile check`: what a profile, or the cache of a model, holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuvee.cli.options import Json
from cuvee.cli.output import make_console, make_table, print_json

if TYPE_CHECKING:
    from cuvee.codec.models.probe import MeasuredLayer
    from cuvee.codec.profiles.profile import Profile
    from cuvee.codec.profiles.quality import CurvePoint

__all__ = ["print_profile", "profile_check", "profile_show"]


def profile_show(
    file: Annotated[Path, typer.Argument(help="A profile (.safetensors).")],
    as_json: Json = False,
) -> None:
    """Show a profile: its model, its size, and what each quality costs. The JSON has the curve of each kind of text.

    Example: cuvee profile show smollm2.safetensors
    """
    from cuvee.codec.profiles.profile import Profile

    print_profile(Profile.load(file), file, as_json)


def profile_check(
    model_path: Annotated[
        str, typer.Argument(metavar="MODEL", help="A config.json, a folder that holds one, or a name on the hub.")
    ],
    as_json: Json = False,
) -> None:
    """Measure what the cache of a model holds, layer by layer, and whether it can be moved. Reads no weights.

    Example: cuvee profile check smollm2
    """
    from cuvee.calibration.corpus import load_config
    from cuvee.codec.models.measured import measured_layers, movable

    config, layers = measured_layers(load_config(model_path))
    size = 2 if config.dtype is None else config.dtype.itemsize
    runs: list[dict[str, Any]] = []
    for row, alike in groupby(enumerate(layers), key=lambda pair: _layer_row(pair[1], size)):
        numbers = [index for index, _ in alike]
        runs.append({"first": numbers[0], "last": numbers[-1], **row})
    total, beside = (
        sum(run[name] * (run["last"] - run["first"] + 1) for run in runs)
        for name in ("bytes_per_token", "states_bytes")
    )
    states, moves = any(layer.beyond for layer in layers), movable(layers)
    if as_json:
        sums = {"states": states, "movable": moves, "bytes_per_token": total, "states_bytes": beside}
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
    if beside:
        console.print(
            f"Beside keys and values of tokens: {beside:,} bytes in float32, after the few tokens that were run.",
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


def print_profile(profile: Profile, path: Path, as_json: bool = False) -> None:
    """Show a profile that was saved at `path`: for people, or as JSON."""
    layout, presets, size = profile.layout, _presets(profile), path.stat().st_size
    if as_json:
        print_json(
            {
                "file": str(path),
                "bytes": size,
                "id": profile.id.hex(),
                "source": profile.source,
                "group": profile.group,
                "model": profile.model,
                "layout": {**layout.to_dict(), "fingerprint": layout.fingerprint.hex()},
                "text_tokens": profile.text_tokens,
                "lengths": profile.lengths,
                "presets": presets,
                "curve": _curve(profile.curve),
                "curves": {kind: _curve(points) for kind, points in profile.curves.items()},
                "plain_curve": _curve(profile.plain_curve),
            }
        )
        return

    from rich.table import Table

    first, shapes = layout.layers[0], len(set(layout.layers))
    shape = f"{layout.num_layers} layers" + (f" of {shapes} shapes, the first" if shapes > 1 else "")
    console, grid = make_console(), Table.grid(padding=(0, 2))
    for name, value in {
        "profile": f"{path} ({size:,} bytes)",
        "id": profile.id.hex(),
        "model": f"{layout.model_type}, {shape} {first.kv_heads} x {first.head_dim}, {layout.dtype}",
        "weights": profile.model or "not recorded",
        "source": profile.source,
        "group": f"{profile.group}: {len(profile.sections)} sections",
        "text": "not recorded" if profile.text_tokens is None else f"learned from {profile.text_tokens} tokens",
        "measured": _lengths(profile),
    }.items():
        grid.add_row(f"[dim]{name}[/dim]", value)
    console.print(grid)
    if not profile.curve:
        console.print("No curve was measured: no quality promises a KL with this profile.")
        return
    table = make_table("quality", "KL at most", "step", "bits/value")
    for row in presets:
        promised = "not promised" if row["kl"] is None else f"{row['kl']:.3g}"
        cells = ("lossless", "") if row["step"] is None else (f"{row['step']:.3g}", f"{row['bits_per_value']:.3g}")
        table.add_row(row["quality"], promised, *cells)
    console.print(table)
    table = make_table("step", "bits/value", "ratio", "KL ± s.e.", "delta NLL ± s.e.", "top-1")
    for point in _curve(profile.curve):
        table.add_row(
            f"{point['step']:.3g}",
            f"{point['bits_per_value']:.3f}",
            f"{point['ratio']:.1f}x",
            _with_error(point["kl"], point["kl_stderr"]),
            _with_error(point["delta_nll"], point["delta_nll_stderr"], "+"),
            "" if point["top1"] is None else f"{100 * point['top1']:.1f}%",
        )
    console.print(table)
    console.print(
        "Ratios count a cache of 16 bits per value. The curve is the mean over kinds of text, which kl= goes by; "
        "presets go by the worst kind.",
        highlight=False,
    )


def _lengths(profile: Profile) -> str:
    """Say at which lengths a KL is promised."""
    if not profile.lengths:
        return "at lengths that are not recorded"
    *others, longest = map(str, profile.lengths)
    return f"on sequences of {' and '.join([', '.join(others), longest] if others else [longest])} tokens"


def _presets(profile: Profile) -> list[dict[str, Any]]:
    """Return the KL, step (None: lossless) and bits per value of each preset with this profile."""
    from cuvee.codec.codec import Codec
    from cuvee.codec.profiles.quality import PRESET_KL
    from cuvee.codec.support.steps import step_value

    out = []
    for quality, kl in PRESET_KL.items() if profile.curve else ():
        codec = Codec(profile, quality)
        out.append(
            {
                "quality": quality,
                "kl": kl if profile.measured().knows_kl else None,
                "step": None if codec.lossless else step_value(codec.step_index),
                "bits_per_value": None if codec.lossless else profile.measured().bits_at(codec.step_index),
            }
        )
    return out


def _curve(points: Iterable[CurvePoint]) -> list[dict[str, Any]]:
    """Return the points of a curve for JSON, with steps as values and the ratio to 16 bits per value."""
    from cuvee.codec.support.steps import step_value

    return [{**asdict(point), "step": step_value(point.step_index), "ratio": point.ratio} for point in points]


def _with_error(value: float | None, error: float | None, sign: str = "") -> str:
    if value is None:
        return ""
    return f"{value:{sign}.5f}" + ("" if error is None else f" ± {error:.5f}")
