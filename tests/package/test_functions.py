"""Functions of the codec, its kernels and learning stay small: few parameters, few lines.

Compiled loops are exempt. Numba and Triton take no records of arrays, so their parameters are spelled out.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("codec", "kernels", "src/cuvee/learning")
MOST_PARAMETERS, MOST_LINES = 9, 60
COMPILED = {"compiled", "compiled_briefly", "inner", "inlined", "spelled_out", "jit"}  # decorators
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
EXCEPTIONS = {
    "codec/profiles/profile.py: __init__": "what a profile holds; all but five are named by the caller",
    "kernels/ops/synthesize.py: synthesize": "a launcher: each is one array, or a record of several",
    "src/cuvee/learning/calibrate.py: calibrate": "the options of a public function, named by the caller",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield the functions that Python runs."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            called = (own.func if isinstance(own, ast.Call) else own for own in node.decorator_list)
            if not COMPILED & {ast.unparse(own).rpartition(".")[2] for own in called}:
                yield node


def parameters(function: Function) -> int:
    given = function.args
    names = [own.arg for own in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if own]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def lines_with_code(text: str) -> set[int]:
    """The lines that hold more than comments; docstrings count here."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return found


def length(function: Function, coded: set[int]) -> int:
    """The lines of code of a function, without its docstring."""
    own = set(range(function.lineno, (function.end_lineno or function.lineno) + 1)) & coded
    if ast.get_docstring(function) is not None:
        doc = function.body[0]
        own -= set(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return len(own)


def too_large(text: str) -> dict[str, tuple[int, int]]:
    """The parameters and the lines of the functions that have too many of them."""
    coded = lines_with_code(text)
    found = {own.name: (parameters(own), length(own, coded)) for own in functions(ast.parse(text))}
    return {name: size for name, size in found.items() if size[0] > MOST_PARAMETERS or size[1] > MOST_LINES}


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


def test_what_counts() -> None:
    head, names = "def wide({}):\n", [f"a{i}" for i in range(MOST_PARAMETERS)]
    assert not too_large(head.format(", ".join(["self", *names])) + "    pass\n")
    assert too_large(head.format(", ".join([*names, "*", "b"])) + "    pass\n") == {"wide": (MOST_PARAMETERS + 1, 2)}
    assert not too_large("@compiled\n" + head.format(", ".join([*names, "b", "c"])) + "    pass\n")
    body = "    x = 1\n"
    assert not too_large('def long():\n    """Doc.\n\n    More.\n    """\n    # Why.\n\n' + (MOST_LINES - 1) * body)
    assert too_large("def long():\n" + MOST_LINES * body) == {"long": (0, MOST_LINES + 1)}
