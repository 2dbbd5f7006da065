"""Tables of the integrations' READMEs, which say what the code does."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table below a heading."""
    part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def check_options(text: str, options: type[Any], shown: dict[str, str]) -> None:
    """Check the table "Options": every option in order, with its default, or with what `shown` says of it."""
    table = {row[0].strip("`"): row[1] for row in rows(text, "Options")}
    assert list(table) == [field.name for field in fields(options)]
    shown = {"store": "memory://?max_gb=4", "quality": 'balanced"` or `"lossless', "model_id": "computed", **shown}
    for field in fields(options):
        default = shown.get(field.name, field.default)
        cell = table[field.name].strip("`").strip('"')
        if default is None:
            assert cell in ("none", ""), field.name
        else:
            assert cell == (str(default).lower() if isinstance(default, bool) else str(default)), field.name
