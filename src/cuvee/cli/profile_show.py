"""`cuvee profile show`: what a profile holds, and what each quality costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuvee.cli.options import Json
from cuvee.cli.output import make_console, make_table, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from cuvee.codec.profiles.profile import Profile
    from cuvee.codec.profiles.quality import CurvePoint

__all__ = ["print_profile", "profile_show"]


def profile_show(
    file: Annotated[Path, typer.Argument(help="A profile (.safetensors).")],
    as_json: Json = False,
) -> None:
    """Show a profile: its model, its size, and what each quality costs. The JSON has the curve of each kind of text.

    Example: cuvee profile show smollm2.safetensors
    """
    from cuvee.codec.profiles.profile import Profile

    print_profile(Profile.load(file), file, as_json)


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

    make_console().print(_facts(profile, path))
    if not profile.curve:
        make_console().print("No curve was measured: no quality promises a KL with this profile.")
    else:
        _print_qualities(profile, presets)


def _facts(profile: Profile, path: Path) -> Table:
    """Return what a profile is of, and what it was learned from."""
    from rich.table import Table

    from cuvee.integrations.profiles.card import layout_text

    size, sections = path.stat().st_size, len(profile.sections)
    grid = Table.grid(padding=(0, 2))
    for name, value in {
        "profile": f"{path} ({size:,} bytes)",
        "id": profile.id.hex(),
        "model": layout_text(profile.layout),
        "weights": profile.model or "not recorded",
        "source": profile.source,
        "group": f"{profile.group}: {sections} section{'' if sections == 1 else 's'}",
        "text": "not recorded" if profile.text_tokens is None else f"learned from {profile.text_tokens} tokens",
        "measured": _lengths(profile),
    }.items():
        grid.add_row(f"[dim]{name}[/dim]", value)
    return grid


def _print_qualities(profile: Profile, presets: Iterable[Mapping[str, Any]]) -> None:
    """Show what each preset promises, and what each step costs."""
    from cuvee.eval.formatting import with_error

    console = make_console()
    table = make_table("quality", "KL at most", "step", "bits/value")
    for row in presets:
        promised = "not promised" if row["kl"] is None else f"{row['kl']:.3g}"
        cells = ("lossless", "") if row["step"] is None else (f"{row['step']:.3g}", f"{row['bits_per_value']:.3g}")
        table.add_row(row["quality"], promised, *cells)
    console.print(table)
    table = make_table("step", "bits/value", "ratio", "KL ± s.e.", "delta NLL ± s.e.", "top-1")
    for point in _curve(profile.curve):
        loss, error = point["delta_nll"], point["delta_nll_stderr"]
        table.add_row(
            f"{point['step']:.3g}",
            f"{point['bits_per_value']:.3f}",
            f"{point['ratio']:.1f}x",
            "" if point["kl"] is None else with_error(point["kl"], point["kl_stderr"]),
            "" if loss is None else with_error(loss, error, signed=True),
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
