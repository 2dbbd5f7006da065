"""Print the oldest release that pyproject.toml admits of each dependency, as pins for pip: `make compat`.

python tests/package/oldest.py > pins.txt && pip install -c pins.txt -e ".[dev]"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
# Extras whose dependencies users choose with cuvee. Those of developers are the newest.
EXTRAS = ("transformers", "plot", "gpu", "eval", "redis", "objects")


def pins(requirements: Iterable[str]) -> list[str]:
    """`name==version` for each `name>=version`; requirements of cuvee's own extras are left out."""
    found = []
    for requirement in requirements:
        match = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)", requirement)
        if match:
            found.append(f"{match[1]}=={match[2]}")
    return found


def oldest() -> list[str]:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return pins([*project["dependencies"], *(entry for name in EXTRAS for entry in extras[name])])


if __name__ == "__main__":
    print("\n".join(oldest()))
