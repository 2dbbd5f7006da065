"""The form of report.json: everything comes back, and what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.eval.report.world import damaged, filled

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
    ("path", "value", "message"),
    [
        (("quality", 0, "per_sequence", "kl", 1), "much", r"report\.quality\[0\]\.per_sequence\.kl\[1\]: must be of"),
        (("quality", 0, "kl"), True, r"report\.quality\[0\]\.kl: must be of type float, got True"),
        (("quality", 0), 3, r"report\.quality\[0\]: must be an object, got 3"),
        (("profiles", "layer", "colour"), "red", r"report\.profiles\.layer: has an unknown field 'colour'"),
        (("text",), [], r"report\.text: must be an object"),
        (("quality", 0, "family"), ..., ".* lacks the field 'family'"),
    ],
)
def test_what_does_not_fit_is_named(path: tuple[Any, ...], value: Any, message: str, tmp_path: Path) -> None:
    data = damaged(filled(MADE).to_dict(), path, value)
    with pytest.raises(FormatError, match=f"^{message}"):
        Report.from_dict(data)
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(FormatError, match="is damaged: report"):
        Report.load(str(tmp_path / "report.json"))
