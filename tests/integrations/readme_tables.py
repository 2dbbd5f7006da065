"""Tables of the integrations' READMEs, which say what the code does."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from cuvee.integrations.options import CodingOptions


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table below a heading."""
    part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def check_options(text: str, options: type[Any], shown: dict[str, str], *, whole: bool = False) -> None:
    """Check the table "Options": options in order, each with its default, or with what `shown` says of it.

    Unless `whole`, options that all adapters share may be left to the connector's table, with the same defaults.
    """
    table = {row[0].strip("`"): row[1] for row in rows(text, "Options")}
    shared = {field.name: field.default for field in fields(CodingOptions)}
    left_out = [field for field in fields(options) if field.name not in table]
    in_order = [field.name for field in fields(options) if field.name in table]
    assert list(table) == in_order, f"the table has {list(table)}, and {options.__name__} has {in_order}"
    missing = [
        field.name for field in left_out if whole or field.name not in shared or field.default != shared[field.name]
    ]
    assert not missing, f"the table has no row for {missing} of {options.__name__}"
    shown = {"store": "memory://?max_gb=4", "quality": 'balanced"` or `"lossless', "model_id": "computed", **shown}
    for field in fields(options):
        if field in left_out:
            continue
        default = shown.get(field.name, field.default)
        cell = table[field.name].strip("`").strip('"')
        if default is None:
            assert cell in ("none", ""), field.name
        else:
            assert cell == (str(default).lower() if isinstance(default, bool) else str(default)), field.name
