"""Test that the paths that the documentation names exist in the tree."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("codec", "kernels", "blend", "integrations", "eval", "src", "docs", "tests", "notebooks", ".github", ".ci")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "*/README.md", "codec/FORMAT.md")
    for path in ROOT.glob(pattern)
)
PATH = re.compile(r"(?<![`\w])`(\.?[\w<>*{},.-]+(?:/[\w<>*{},.-]+)*/?)`(?![`\w])")
# Patterns of names that need not exist.
EXCEPTIONS = (
    "out/*",  # written by make and the tests
    "dist/",  # written by `make dist`
    "*<*>*",  # a placeholder: `tests/codec/test_<scheme>.py`
    "tenant/id",  # a key of a store
    "*sqlite.py", "*sums.py",  # files that recipes add
)  # fmt: skip


def named_paths(text: str) -> list[str]:
    """Return the paths in backticks: names with a slash, and names of Python files."""
    return [name for name in PATH.findall(text) if "/" in name or name.endswith(".py")]


@cache
def python_files() -> frozenset[str]:
    return frozenset(path.name for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def exists(name: str, page: str) -> bool:
    """Return whether a path exists, relative to the root or the page's folder; a bare name may be in any folder."""
    if any(fnmatch(name, pattern) for pattern in EXCEPTIONS):
        return True
    if "/" not in name and page.endswith("/README.md"):
        return any((ROOT / page).parent.rglob(name))
    return any((base / name).exists() for base in (ROOT, (ROOT / page).parent)) or name in python_files()


@pytest.mark.parametrize("page", PAGES)
def test_the_paths_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [name for name in named_paths(text) if not exists(name, page)] == []


def test_data_flow_names_definitions_that_exist_and_the_file_of_each_class() -> None:
    """Names in it are those with an underscore or with two capitals, and methods of classes."""
    text = (ROOT / "docs" / "concepts" / "data-flow.md").read_text(encoding="utf-8")
    files = re.findall(r"\w+(?:/\w+)*/(?:\w+\.py)?", text.split("```\n")[1])
    assert len(files) > 10 and [name for name in files if not (ROOT / name).exists()] == []
    told, text = {Path(name).name for name in re.findall(r"[\w./]+\.py", text)}, re.sub(r"\]\(\S+\)", "]", text)
    names = set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b|\b[a-z]+_[a-z]+\b", text.translate({ord("/"): " /"})))
    names |= set(re.findall(r"\b[A-Z]\w+\.(\w+)`", text))
    names -= {Path(name).stem for name in told} | {"NumPy"}
    rooms = (*ROOMS[:4], "src/cuvee/learning")
    sources = [(path.name, path.read_text(encoding="utf-8")) for room in rooms for path in (ROOT / room).rglob("*.py")]
    every = "\n".join(source for _, source in sources)
    assert len(names) > 50
    assert [name for name in sorted(names) if not re.search(rf"(?:class|def) {name}\b", every)] == []
    classes = [(name, file) for file, source in sources for name in re.findall(r"^class (\w+)", source, re.MULTILINE)]
    named = set(re.findall(r"\b[A-Z][a-z]\w+", text))
    assert {name for name, _ in classes} & named == {name for name, file in classes if name in named and file in told}


def test_what_make_check_runs_exists() -> None:
    root = Path(__file__).parents[2]
    names = (root / "tests" / "checked.txt").read_text(encoding="utf-8").split()
    assert len(names) > 50 and len({*names}) == len(names)
    assert [name for name in names if not (root / name).exists()] == []


def test_ci_runs_the_rooms_of_the_codec_as_without_avx512() -> None:
    (rooms,) = re.findall(r'^make quick ISA=avx2 CHECKED="(.*?)"', (ROOT / ".ci" / "run").read_text("utf-8"), re.M)
    assert set(rooms.split()) == {"tests/codec", "tests/kernels", "tests/blend"}
    assert "$(CHECKED) $(PYTEST_ARGS)" in (ROOT / "Makefile").read_text("utf-8")
