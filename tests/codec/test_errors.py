"""Which errors say something about a blob, so that it may be deleted, and which about the request or the machine."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import cuvee
from cuvee.codec import errors
from cuvee.codec.errors import CuveeError

BLAMED = {
    "CuveeError": False,
    "FormatError": True,
    "VersionError": True,
    "CorruptError": True,
    "KeyMismatchError": True,
    "ProfileMismatchError": False,
    "ExpiredError": True,
    "ProfileError": False,
    "InputError": False,
    "UnsupportedModelError": False,
    "OutOfMemoryError": False,
    "StoreError": False,
    "ModelUnavailableError": False,
    "RankFailedError": False,
    "ProbeError": False,
}


@cache
def raised_on_purpose() -> dict[str, ast.ClassDef]:
    """Every class of the package that descends from `CuveeError`, and itself: by its source, so that none is missed."""
    (package,) = cuvee.__path__
    classes = {
        node.name: node
        for folder in Path(package).iterdir()
        for path in ([folder] if folder.suffix == ".py" else folder.resolve().rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found: dict[str, ast.ClassDef] = {"CuveeError": classes["CuveeError"]}
    while True:
        new = {
            name: node
            for name, node in classes.items()
            if name not in found and any(ast.unparse(base).rpartition(".")[2] in found for base in node.bases)
        }
        if not new:
            return found
        found |= new


def test_every_error_says_whether_it_blames_the_blob() -> None:
    """Explicitly: one that inherits it from the class that it happens to extend has not been thought about."""
    said = {}
    for name, node in raised_on_purpose().items():
        for line in node.body:
            targets = [line.target] if isinstance(line, ast.AnnAssign) else getattr(line, "targets", [])
            if any(isinstance(target, ast.Name) and target.id == "blames_blob" for target in targets):
                said[name] = ast.literal_eval(line.value)  # type: ignore[attr-defined]
    assert said == BLAMED
    assert said.keys() == raised_on_purpose().keys()


def test_every_error_is_called_one() -> None:
    assert [name for name in raised_on_purpose() if not name.endswith("Error")] == []


def test_mismatches_are_no_bad_arguments() -> None:
    """They say that two things do not belong together, be it a key or a profile; no value of an argument is wrong."""
    for kind in (errors.KeyMismatchError, errors.ProfileMismatchError):
        assert issubclass(kind, CuveeError) and not issubclass(kind, ValueError)
