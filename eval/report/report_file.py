"""Reading a `report.json` back, and checking that it holds what a comparison needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cuvee.codec.errors import FormatError, InputError, VersionError
from cuvee.codec.support.plain_json import parse_json
from cuvee.eval.documents import ReportData

__all__ = ["METRIC_FIELDS", "REPORT_FORMAT", "REPORT_VERSION", "SPEEDS", "load_report"]

REPORT_FORMAT, REPORT_VERSION = "cuvee-report", 1
METRIC_FIELDS: dict[str, str] = {
    "bits": "bits_per_value",
    "ratio": "ratio",
    "kl": "kl",
    "nll": "nll",
    "top1": "top1",
    "encode": "encode_gb_per_s",
    "decode": "decode_gb_per_s",
    "score": "score",
}
"""Metric -> field of the report. The last one is a field of "scores", all others are fields of "quality"."""
SPEEDS = ("encode", "decode")
_PER_SEQUENCE = ("bits_per_value", "kl", "delta_nll", "top1")
_MOST = 1e300  # larger numbers come from damaged files, and would overflow


def load_report(path: Path) -> dict[str, Any]:
    """Read a finished report.

    Raises:
        FormatError: the file is not a report, or lacks or repeats something that a comparison needs.
        InputError: the run of this report has not finished.
        OSError: the file cannot be read.
        VersionError: the report has a newer version.
    """
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != REPORT_FORMAT:
        raise FormatError(f"{path} is not a report: give the report.json that `cuvee report` writes")
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"{path}: version: must be a whole number from 1, got {version!r}")
    if version > REPORT_VERSION:
        raise VersionError(
            f"{path} is a report of version {version}; this cuvee reads up to {REPORT_VERSION}: update it"
        )
    if data.get("complete") is not True:
        raise InputError(f"report: {path} is of a run that has not finished; give its command again to go on")
    try:
        _check_report(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    return data


def _check_report(data: ReportData) -> None:
    for name in ("configuration", "environment", "model", "text"):
        _require(isinstance(data.get(name), dict), name, "must be an object")
    for name in ("quality", "tasks", "scores"):
        entries = data.get(name)
        _require(isinstance(entries, list) and all(isinstance(e, dict) for e in entries), name, "must list objects")
    skipped = data.get("skipped", [])
    whole = isinstance(skipped, list) and all(isinstance(e, dict) and isinstance(e.get("key"), str) for e in skipped)
    _require(whole, "skipped", "must list objects with a key")
    for name in ("calibration", "evaluation"):
        texts = data["text"].get(name)
        _require(isinstance(texts, list) and all(isinstance(t, dict) for t in texts), f"text.{name}", "must list texts")
    _check_unique("quality", [entry.get("key") for entry in data["quality"]])
    _check_unique("tasks", [task.get("name") for task in data["tasks"]])
    _check_unique("scores", [score.get("key") for score in data["scores"]], [s.get("task") for s in data["scores"]])
    for entry in data["quality"]:
        for metric, field in METRIC_FIELDS.items():
            if metric != "score":
                where = f"quality {entry['key']}: {field}"
                optional = metric in ("ratio", *SPEEDS)
                known = field in entry and (_is_number(entry[field]) or (optional and entry[field] is None))
                _require(known, where, "must be a number")
        lists = entry.get("per_sequence")
        _require(isinstance(lists, dict), f"quality {entry['key']}: per_sequence", "must be an object")
        lengths = {len(lists[name]) if _is_list(lists.get(name)) else 0 for name in _PER_SEQUENCE}
        whole = len(lengths) == 1 and 0 not in lengths
        _require(whole, f"quality {entry['key']}: per_sequence", "must list as many numbers of each kind")
    for score in data["scores"]:
        where = f"scores {score['key']} {score['task']}"
        _require(_is_number(score.get("score")), f"{where}: score", "must be a number")
        _require(score.get("stderr") is None or _is_number(score["stderr"]), f"{where}: stderr", "must be a number")
        per_doc = score.get("per_doc")
        _require(per_doc is None or _is_list(per_doc), f"{where}: per_doc", "must list numbers")


def _check_unique(name: str, *columns: list[Any]) -> None:
    """Refuse names that are not strings, or occur twice."""
    rows = list(zip(*columns, strict=True))
    _require(all(isinstance(part, str) for row in rows for part in row), name, "each must have a name")
    twice = next((row for row in rows if rows.count(row) > 1), None)
    _require(twice is None, name, f"{' '.join(twice or ())} is there twice")


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise FormatError(f"{where}: {what}")


def _is_number(value: Any) -> bool:
    # The comparison is false for NaN. Infinities also come from literals such as 1e999.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))
