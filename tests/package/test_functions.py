"""Functions stay small: few parameters, few lines. Compiled loops are exempt."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("blend", "codec", "eval", "integrations", "kernels", "src")
MOST_PARAMETERS, MOST_LINES = 9, 60
COMPILED = {"compiled", "compiled_briefly", "inner", "inlined", "spelled_out", "jit"}  # decorators
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
EXCEPTIONS = {
    "codec/profiles/profile.py: __init__": "what a profile holds; all but five are named by the caller",
    "eval/lm.py: __init__": "the arguments that lm-eval's command names",
    "src/cuvee/cli/encode.py: encode": "a parameter for each option of a command",
    "src/cuvee/cli/profile.py: profile_learn": "a parameter for each option of a command, on several lines",
    "src/cuvee/cli/report.py: report": "a parameter for each option of a command, on several lines",
    "src/cuvee/learning/calibrate.py: calibrate": "the options of a public function, named by the caller",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield the functions that Python runs."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            called = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
            if not COMPILED & {ast.unparse(each).rpartition(".")[2] for each in called}:
                yield node


def parameters(function: Function) -> int:
    given = function.args
    arguments = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    names = [each.arg for each in arguments if each is not None]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@cache
def lines_with_code(text: str) -> set[int]:
    """The lines that hold more than comments; docstrings count here."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return found


def length(function: Function, text: str) -> int:
    """The lines of code of a function, without its docstring; of a short one, all its lines."""
    lines = set(range(function.lineno, (function.end_lineno or function.lineno) + 1))
    if len(lines) <= MOST_LINES:
        return len(lines)
    lines &= lines_with_code(text)
    if ast.get_docstring(function) is not None:
        doc = function.body[0]
        lines -= set(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return len(lines)


def too_large(text: str) -> dict[str, tuple[int, int]]:
    """The parameters and the lines of the functions that have too many of them."""
    found = [(each.name, parameters(each), length(each, text)) for each in functions(ast.parse(text))]
    return {name: (wide, long) for name, wide, long in found if wide > MOST_PARAMETERS or long > MOST_LINES}


def test_functions_are_small() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 100
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {name}": size
        for path in paths
        for name, size in too_large(path.read_text(encoding="utf-8")).items()
    }
    assert {name: size for name, size in found.items() if name not in EXCEPTIONS} == {}
    assert not EXCEPTIONS.keys() - found.keys(), "an exception that is none any more"
