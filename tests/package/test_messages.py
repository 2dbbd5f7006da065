"""Error messages about arguments have one form: `NAME: must …, got …`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("codec", "kernels", "blend", "integrations", "eval", "src/cuvee/cli")
# A name, an option or a placeholder for one, perhaps with an index or a part: `blobs[{}]`, `{}`, `--text {}`, `{}:{}`;
# or two names that are wrong together: `start, end`.
FORM = re.compile(r"(--)?[\w.{}\[\]'\"=:/-]+(, [\w.]+| \{\})?: ")


def raised(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each InputError that is raised with a literal message; values are written {}."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
            continue
        if ast.unparse(node.exc.func).rpartition(".")[2] != "InputError":
            continue
        text = literal(node.exc.args[0])
        if text is not None:
            yield node.lineno, text


def literal(node: ast.expr) -> str | None:
    """The text of a string, with {} for each value; None if the message is made elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = literal(node.left), literal(node.right)
        return None if left is None else left + (right or "{}")
    return None


def complaint(text: str) -> str | None:
    if not FORM.match(text):
        return "begins with no name and colon"
    if re.search(r" must be (at least|at most|between|positive|above|below|one of)\b", text) and "got " not in text:
        return "says what a value must be, and not what it is"
    return None


@pytest.mark.parametrize("folder", FOLDERS)
def test_messages_name_the_argument_first(folder: str) -> None:
    found = [
        (path.relative_to(ROOT), line, text)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in raised(path)
    ]
    wrong = [f"{path}:{line}: {complaint(text)}: {text}" for path, line, text in found if complaint(text)]
    assert len(found) > 3 and not wrong, "\n".join(wrong)
