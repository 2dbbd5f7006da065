"""docs/stability.md promises the public names, exit codes and format versions that the code has."""

from __future__ import annotations

import re
from pathlib import Path

from tests.package.stability import PAGE, promised, public, renewed

import cuvee.cli
from cuvee.codec.format import container
from cuvee.codec.profiles import profile_file
from cuvee.integrations.stores import envelope

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_names_what_is_public_once() -> None:
    listed = {row: sorted(stable + beta) for row, (stable, beta) in promised(TEXT).items()}
    assert listed == {row: sorted(names) for row, names in public().items()}, "python -m tests.package.stability"
    assert "`Codec`" in TEXT and len(promised(TEXT)["`cuvee`"][0]) > 20


def test_a_new_name_enters_as_beta_and_a_promise_is_kept() -> None:
    assert renewed(TEXT) == TEXT
    without = TEXT.replace(", `OpenBlob`", "")
    stable, beta = promised(renewed(without))["`cuvee`"]
    assert "OpenBlob" in beta and "OpenBlob" not in stable and "Codec" in stable


def test_the_page_has_every_exit_code() -> None:
    """That the code raises: `tests/package/cli` shows what for."""
    sources = (file.read_text(encoding="utf-8") for file in Path(cuvee.cli.__file__).parent.glob("*.py"))
    raised = {code for text in sources for code in re.findall(r"typer\.Exit\((\d+)\)", text)}
    assert {*re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)} == raised | {"0", "2"}


def test_the_page_names_the_versions_of_the_formats() -> None:
    versions = dict(re.findall(r"^\| (blob|profile|entry of a store)[^|]* \| (\d+) \|", TEXT, re.MULTILINE))
    expected = (container.VERSION, profile_file.VERSION, envelope._VERSION)
    assert tuple(versions.values()) == tuple(map(str, expected))
