"""Reports for tests: made up from as little as a test needs, run, drawn and written, all as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from rich.console import Console

from cuvee.eval.quality import PerSequence, Quality
from cuvee.eval.report import plot, rendering, report_run
from cuvee.eval.report.report_config import ReportConfig
from cuvee.eval.report.schema import REPORT_FORMAT, REPORT_VERSION, Report


def whole(kind: Any, given: Any) -> Any:
    """Fill in what `given` lacks of a type: nothing, zero, no text, an empty list."""
    if is_dataclass(kind):
        hints, known = get_type_hints(kind), given or {}
        needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
        names = needed | known.keys()
        return {name: whole(hints.get(name, Any), known.get(name)) for name in hints if name in names}
    origin, inner = get_origin(kind), get_args(kind)
    if NoneType in inner:
        return None if given is None else whole(inner[0], given)
    if origin is list:
        return [whole(inner[0], one) for one in given or []]
    if origin is dict:
        return {name: whole(inner[1], one) for name, one in (given or {}).items()}
    return given if given is not None or kind is Any else kind()


def filled(data: Mapping[str, Any]) -> Report:
    base = {"format": REPORT_FORMAT, "version": REPORT_VERSION, **data}
    if "chunk_tokens" not in base.get("configuration", {}):
        base["configuration"] = {"cache_dtype": "bfloat16", "chunk_tokens": 256, **base.get("configuration", {})}
    return Report.from_dict(whole(Report, base))


def damaged(data: Any, path: tuple[str | int, ...], value: object) -> Any:
    """Put a value into a report in place of another, or with `...` take that out; return the report."""
    *above, last = path
    inside = data
    for name in above:
        inside = inside[name]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return data


def quality(name: str, bits: float, kl: float, **changes: Any) -> Quality:
    """Make up what a method takes and loses; the standard error is a tenth of the KL."""
    fields: dict[str, Any] = {
        "name": name, "counts": "every byte", "bits_per_value": bits, "ratio": 16 / bits if bits else None,
        "kl": kl, "kl_stderr": kl / 10, "nll": 3.0 + kl, "delta_nll": kl, "delta_nll_stderr": kl / 5,
        "top1": 0.9 - kl / 9, "top1_stderr": 0.01, "chunk_tokens": 256, "sequences": 2,
        "cached_tokens": 768, "scored_tokens": 254,
        "per_sequence": PerSequence([bits] * 2, [kl] * 2, [kl] * 2, [0.9] * 2),
    }  # fmt: skip
    return Quality(**{**fields, **changes})


def entry(key: str, bits: float, kl: float, kind: str = "point", **changes: Any) -> dict[str, Any]:
    family, _, setting = key.partition("@")
    measured = quality(key, bits, kl, **changes).to_dict()
    return {"key": key, "family": family, "label": f"{key} label", "kind": kind, "setting": setting, **measured}


def run_report(config: ReportConfig, out: Path, console: Console | None = None, **more: Any) -> dict[str, Any]:
    return report_run.run_report(config, out, console or Console(quiet=True), **more).to_dict()


def write_report(data: Mapping[str, Any], folder: Path) -> None:
    rendering.write_report(filled(data), folder)


def markdown(data: Mapping[str, Any]) -> str:
    return rendering.markdown(filled(data))


def print_summary(data: Mapping[str, Any], console: Any) -> None:
    rendering.print_summary(filled(data), console)


def write_plot(data: Mapping[str, Any], path: Path) -> bool:
    return plot.write_plot(filled(data), path)


def draw(data: Mapping[str, Any]) -> Any:
    return plot.size_kl(filled(data))
