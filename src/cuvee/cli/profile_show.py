"""`cuvee profile show` and `cuvee profile check`: what a profile, or the cache of a model, holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuvee.cli.options import Json
from cuvee.cli.output import make_console, make_table, print_json

if TYPE_CHECKING:
    import rich.table

    from cuvee.codec.layout import Rope
    from cuvee.codec.profiles.profile import Profile
    from cuvee.codec.profiles.quality import CurvePoint

__all__ = ["print_profile", "profile_check", "profile_show"]


def profile_show(
    file: Annotated[Path, typer.Argument(help="A profile (.safetensors).")],
    as_json: Json = False,
) -> None:
    """Show a profile: its model, its size, and what each quality costs.

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
    moves = movable(layers)
    size = 2 if config.dtype is None else config.dtype.itemsize
    runs: list[dict[str, Any]] = []
    for index, layer in enumerate(layers):
        kept = layer.beyond
        row = {
            "kind": layer.kind,
            "heads": layer.kv_heads,
            "key": layer.head_dim,
            "value": layer.value_dim,
            "window": layer.sliding_window,
            "positions": f"{layer.positions}{'' if layer.rope is None else _rotation(layer.rope, layer.head_dim)}",
            "bytes_per_token": layer.kv_heads * (layer.head_dim + layer.value_dim) * size,
            "states_bytes": 4 * sum(math.prod(shape) for _, shape in layer.others),
            "note": f"{layer.kind} holds {kept}" if kept else layer.why,
        }
        if runs and runs[-1]["row"] == row:
            runs[-1]["last"] = index
        else:
            runs.append({"first": index, "last": index, "row": row})
    states = any(layer.beyond for layer in layers)
    beside = sum(run["row"]["states_bytes"] * (run["last"] - run["first"] + 1) for run in runs)
    total = sum(run["row"]["bytes_per_token"] * (run["last"] - run["first"] + 1) for run in runs)
    if as_json:
        print_json(
            {
                "model_type": config.model_type,
                "states": states,
                "movable": moves,
                "bytes_per_token": total,
                "states_bytes": beside,
                "layers": [{"first": run["first"], "last": run["last"], **run["row"]} for run in runs],
            }
        )
        return
    table = make_table("layers", "kind", "heads x key, value", "window", "keys", "bytes/token", "beside")
    for run in runs:
        row = run["row"]
        table.add_row(
            str(run["first"]) if run["first"] == run["last"] else f"{run['first']} … {run['last']}",
            row["kind"],
            f"{row['heads']} x {row['key']}, {row['value']}" if row["heads"] else "",
            "" if row["window"] is None else str(row["window"]),
            row["positions"] if row["heads"] else "",
            f"{row['bytes_per_token']:,}" if row["heads"] else "",
            f"{row['states_bytes']:,}" if row["states_bytes"] else "",
        )
    console = make_console()
    console.print(f"{config.model_type}: {len(layers)} layers, {total:,} bytes per token", highlight=False)
    console.print(table)
    for note in dict.fromkeys(run["row"]["note"] for run in runs if run["row"]["note"]):
        console.print(note, markup=False, highlight=False)
    if beside:
        console.print(
            f"Beside keys and values of tokens: {beside:,} bytes in float32, after the few tokens that were run.",
            highlight=False,
        )
    console.print(_verdict(states, moves))


def _verdict(states: bool, moves: bool) -> str:
    if states:
        return (
            "Kept as a whole: encode_cache and decode_cache restore a cache where it ended, with keys and values as a "
            "profile codes them. Engines' adapters and blending do not take this model."
        )
    if moves:
        return "Movable: chunks decode at any position."
    return "Bound: chunks decode at the positions where they were encoded; they cannot be moved or blended."


def _rotation(rope: Rope, head_dim: int) -> str:
    part = "" if rope.rotary_dim == head_dim else f" {rope.rotary_dim} of {head_dim}"
    return f"{part}, {'adjacent pairs' if rope.interleaved else 'halves'}"


def print_profile(profile: Profile, path: Path, as_json: bool = False) -> None:
    """Show a profile that was saved at `path`: for people, or as JSON."""
    from cuvee.codec.support.steps import step_value

    layout = profile.layout
    data: dict[str, Any] = {
        "file": str(path),
        "bytes": path.stat().st_size,
        "id": profile.id.hex(),
        "source": profile.source,
        "group": profile.group,
        "model": profile.model,
        "layout": {**layout.to_dict(), "fingerprint": layout.fingerprint.hex()},
        "values_per_token": layout.values_per_token,
        "text_tokens": profile.text_tokens,
        "predicted_share": _predicted_share(profile),
        "sections": [
            {
                "first_layer": section.first_layer,
                "end_layer": section.end_layer,
                "values": section.values,
                "blocks": list(section.blocks),
                "components": len(learned.scale),
                "sinks": len(learned.basis.sinks),
            }
            for section, learned in zip(profile.sections, profile.learned, strict=bool(profile.learned))
        ],
        "presets": _presets(profile),
        "curve": _curve(profile.curve),
        "curves": {kind: _curve(points) for kind, points in profile.curves.items()},
        "plain_curve": _curve(profile.plain_curve),
    }
    if as_json:
        print_json(data)
        return

    from rich.table import Table

    first, shapes = layout.layers[0], len(set(layout.layers))
    shape = f"{layout.num_layers} layers" + (f" of {shapes} shapes, the first" if shapes > 1 else "")
    facts = {
        "profile": f"{path} ({data['bytes']:,} bytes)",
        "id": data["id"],
        "model": f"{layout.model_type}, {shape} {first.kv_heads} x {first.head_dim}, {layout.dtype}",
        "weights": profile.model or "not recorded",
        "source": profile.source,
        "group": f"{profile.group}: {len(profile.sections)} sections",
        **_knowledge(profile),
    }
    console = make_console()
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(f"[dim]{name}[/dim]", str(value))
    console.print(grid)
    if not profile.curve:
        console.print("No curve was measured: no quality promises a KL with this profile.")
        return
    presets = make_table("quality", "KL at most", "step", "bits/value")
    for row in data["presets"]:
        cells = ("lossless", "") if row["step"] is None else (f"{row['step']:.3g}", _figure(row["bits_per_value"]))
        presets.add_row(row["quality"], _figure(row["kl"]) or "not promised", *cells)
    console.print(presets)
    console.print(_curve_table(profile.curve))
    if profile.plain_curve:
        console.print("Chunks without token ids; kl= and presets take their step from this curve:")
        console.print(_curve_table(profile.plain_curve))
    console.print("Ratios count a cache of 16 bits per value.", highlight=False)
    if profile.curves:
        # At most as many steps as fit beside the names.
        steps = sorted({point.step_index for points in profile.curves.values() for point in points})
        steps = steps[:: -(-len(steps) // 6)]
        kinds = make_table("kind of text", *(f"{step_value(step):.3g}" for step in steps))
        for kind, points in profile.curves.items():
            known = {point.step_index: point.kl for point in points if point.kl is not None}
            kinds.add_row(kind, *(f"{known[step]:.2g}" if step in known else "" for step in steps))
        console.print("KL by kind and step; kl= goes by the mean over kinds, presets go by the worst:")
        console.print(kinds)


def _knowledge(profile: Profile) -> dict[str, str]:
    """Return for people how much a learned profile knows: its text, and what ids predict."""
    if not profile.learned:
        return {}
    share = _predicted_share(profile)
    return {
        "text": "not recorded" if profile.text_tokens is None else f"learned from {profile.text_tokens} tokens",
        "ids": "predict nothing" if share is None else f"predict {100 * share:.0f}% of the energy",
    }


def _predicted_share(profile: Profile) -> float | None:
    """Return the share of the coefficients' energy that token ids predict; None without a table."""
    import numpy as np

    from cuvee.codec.entropy.family import deviation_of

    if profile.token_table is None:
        return None
    left, whole = (
        sum(float(np.square(deviation_of(section.scale)).sum()) for section in profile.learned_for(predicted))
        for predicted in (True, False)
    )
    return max(1 - left / whole, 0.0) if whole else 0.0


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


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _curve(points: Iterable[CurvePoint]) -> list[dict[str, Any]]:
    """Return the points of a curve for JSON, with steps as values and the ratio to 16 bits per value."""
    from cuvee.codec.support.steps import step_value

    return [{**asdict(point), "step": step_value(point.step_index), "ratio": point.ratio} for point in points]


def _curve_table(points: Iterable[CurvePoint]) -> rich.table.Table:
    """Return the points of a curve for people."""
    from cuvee.codec.support.steps import step_value

    table = make_table("step", "bits/value", "ratio", "KL ± s.e.", "delta NLL ± s.e.", "top-1")
    for point in points:
        table.add_row(
            f"{step_value(point.step_index):.3g}",
            f"{point.bits_per_value:.3f}",
            f"{point.ratio:.1f}x",
            _with_error(point.kl, point.kl_stderr),
            _with_error(point.delta_nll, point.delta_nll_stderr, "+"),
            "" if point.top1 is None else f"{100 * point.top1:.1f}%",
        )
    return table


def _with_error(value: float | None, error: float | None, sign: str = "") -> str:
    if value is None:
        return ""
    return f"{value:{sign}.5f}" + ("" if error is None else f" ± {error:.5f}")
