"""The form of report.json: everything comes back, and what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.eval.report.world import filled

from cuvee.codec.errors import FormatError
from cuvee.eval.report.schema import Report

MADE: dict[str, Any] = {
    "environment": {"cpu": "A CPU", "gpu": None},
    "profiles": {"layer": {"id": "1d", "bytes": 3}},
    "quality": [{"key": "kivi4", "kl": 0.5, "per_sequence": {"kl": [0.25, 0.75]}}],
    "exact": {"per_sequence": [1.5]},
}


def test_a_report_comes_back_from_its_json() -> None:
    report = filled(MADE)
    assert report.quality[0].per_sequence.kl == [0.25, 0.75] and report.exact and report.exact.per_sequence == [1.5]
    assert Report.from_dict(json.loads(json.dumps(report.to_dict(), allow_nan=False))) == report


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("quality", 0), 3),
        (("profiles", "layer", "colour"), "red"),
        (("text",), []),
        (("digest",), None),
        (("model", "name"), None),
        (("quality", 0, "family"), None),
        (("exact", "per_sequence"), None),
    ],
)
def test_other_fields_are_refused(path: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    data: Any = filled(MADE).to_dict()
    inside = data
    for name in path[:-1]:
        inside = inside[name]
    if value is None:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(FormatError, match=r"^report: must have the fields of version 5, but "):
        Report.load(tmp_path / "report.json")
