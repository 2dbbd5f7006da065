"""Test that docstrings' examples run, and that everything that `cuvee` exports has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import cuvee

SOURCES = Path(cuvee.__file__).parent
# Every module with an example, room by room: a search from above would not follow the links to them.
MODULES = sorted(
    ".".join(("cuvee", *path.relative_to(SOURCES).with_suffix("").parts)).removesuffix(".__init__")
    for room in SOURCES.iterdir() if room.is_dir()
    for path in room.glob("**/*.py") if ">>> " in path.read_text()
)  # fmt: skip
WITHOUT = {  # plain data that another name's example shows, and errors
    "BlobInfo", "OpenBlob", "__version__",
    *(name for name in cuvee.__all__ if isinstance(getattr(cuvee, name), type) and
      issubclass(getattr(cuvee, name), Exception)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where examples write files
    module: ModuleType = importlib.import_module(name)
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE, extraglobs={"__name__": name})
    assert tried, f"{name} has no example"
    assert not failed, "the report is above"


@pytest.mark.parametrize("name", sorted(set(cuvee.__all__) - WITHOUT))
def test_what_is_public_has_an_example(name: str) -> None:
    assert ">>>" in (inspect.getdoc(getattr(cuvee, name)) or ""), name
