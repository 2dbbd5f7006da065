"""The names that docs/stability.md promises: `python -m tests.package.stability` brings its table up to date.

A name that the page lists keeps its column. A new one enters as beta: to promise it, move it by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from cuvee.cli import app
from cuvee.integrations.lmcache.l2_options import LMCacheOptions
from cuvee.integrations.options import CodingOptions
from cuvee.integrations.sglang.options import HiCacheOptions
from cuvee.integrations.stores import urls
from cuvee.integrations.vllm.blending.blend_options import BlendOptions
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.metric_table import METRICS
from cuvee.integrations.vllm_tier.tier_options import TierOptions

PAGE = Path(__file__).parents[2] / "docs" / "stability.md"
MODULES = (
    "cuvee",
    "cuvee.calibration",
    "cuvee.blend",
    "cuvee.integrations.transformers",
    "cuvee.integrations.stores",
    "cuvee.integrations.pages",
    "cuvee.integrations.vllm",
    "cuvee.integrations.vllm_tier",
)
OPTIONS: dict[str, type] = {
    "options of every engine": CodingOptions,
    "vLLM connector": Options,
    "its `blend`": BlendOptions,
    "vLLM tier": TierOptions,
    "SGLang": HiCacheOptions,
    "LMCache": LMCacheOptions,
}
_TABLE = re.compile(r"(?<=<!-- names: python -m tests\.package\.stability -->\n).*?(?=<!-- end of names)", re.DOTALL)


def public() -> dict[str, list[str]]:
    """Return the public names of the code by the row of the table that they belong to."""
    common = {field.name for field in fields(CodingOptions)}
    rows = {f"`{module}`": list(import_module(module).__all__) for module in MODULES}
    rows["commands"] = sorted(_commands(typer.main.get_command(app), "cuvee"))
    for row, kind in OPTIONS.items():
        named = [field.name for field in fields(kind)]
        rows[row] = named if kind is CodingOptions else [name for name in named if name not in common]
    rows["store URLs"] = [f"{scheme}://" for scheme in urls._KINDS]
    rows["their options"] = sorted({name for kind in urls._KINDS.values() for name in kind.options})
    rows["metrics"] = list(METRICS)
    return rows


def _commands(command: Any, name: str) -> Iterator[str]:
    if not hasattr(command, "commands"):
        yield name
    for sub in getattr(command, "commands", {}):
        yield from _commands(command.commands[sub], f"{name} {sub}")


def promised(text: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return the stable and the beta names of each row of a page's table."""
    (table,) = _TABLE.findall(text)
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]
    return {row: (re.findall("`(.+?)`", stable), re.findall("`(.+?)`", beta)) for row, stable, beta in cells}


def renewed(text: str) -> str:
    """Return a page with the names of the code in its table."""
    before, lines = promised(text), ["| names | stable | beta |", "|---|---|---|"]
    for row, names in public().items():
        stable = [name for name in names if name in before.get(row, ([], []))[0]]
        columns = (stable, [name for name in names if name not in stable])
        shown = (", ".join(f"`{name}`" for name in column) or "none" for column in columns)
        lines.append(f"| {row} | {' | '.join(shown)} |")
    return _TABLE.sub(lambda _: "\n".join([*lines, ""]), text)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
