"""Test imports: packages point one way, modules form no circle, and private names stay in their folder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Each may import those before it, and itself; `kernels` is reached from `codec` by name alone (`codec/backends.py`).
PACKAGES = ("codec", "kernels", "learning", "naming", "blend", "integrations", "calibration", "eval", "cli")
IN_SRC = ("learning", "naming", "calibration", "cli")  # the others lie in the root
# The door for users imports everything public when it is first asked for, so that `import cuvee` loads nothing.
FACADES = ("cuvee",)
# Folders of `codec` that know nothing of others: the entropy coder of blobs, the container of coders.
APART = (
    ("codec.entropy", "codec.format"), ("codec.entropy", "codec.profiles"), ("codec.entropy", "codec.stages"),
    ("codec.format", "codec.entropy"), ("codec.format", "codec.profiles"), ("codec.format", "codec.stages"),
)  # fmt: skip


@dataclass(frozen=True)
class Import:
    """An import of a module, or of a name from it.

    Attributes:
        line: where, for messages.
        source: the module that imports.
        target: the module that is imported.
        name: what of it; None: all of it.
        typing: whether only a type checker sees it.
    """

    line: str
    source: str
    target: str
    name: str | None
    typing: bool


@cache
def sources() -> dict[str, Path]:
    """Return the file of each module, except the facade and `python -m cuvee`."""
    folders = [ROOT / ("src/cuvee" if name in IN_SRC else "") / name for name in PACKAGES]
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = ("cuvee", *path.relative_to(folder.parent).with_suffix("").parts)
            found[".".join(parts[:-1] if path.stem == "__init__" else parts)] = path
    return found


def under_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(node: ast.AST, typing: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node below a node, and whether only a type checker sees it."""
    for child in ast.iter_child_nodes(node):
        hidden = typing or (under_type_checking(node) and child in getattr(node, "body", ()))
        yield child, hidden
        yield from statements(child, hidden)


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """Yield the imports of cuvee's modules, also in functions, under TYPE_CHECKING, and by `import_module("name")`."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node, typing in statements(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "cuvee":
                    yield Import(where, module, alias.name, None, typing)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            if base.split(".")[0] != "cuvee":
                continue
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (
                    Import(where, module, whole, None, typing)
                    if whole in sources()
                    else Import(where, module, base, alias.name, typing)
                )
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and str(node.args[0].value).startswith("cuvee.")
        ):
            yield Import(where, module, str(node.args[0].value), None, typing)


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for module, path in sources().items() for found in imports_of(module, path))


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else FACADES[0]


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return the nodes of a circle, the first one again at the end; none: []."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_parser_sees_what_there_is() -> None:
    kinds = {(found.typing, found.name is None) for found in imports()}
    assert len(sources()) > 100 and len(imports()) > 400
    assert {(False, False), (True, False), (False, True)} <= kinds
    assert {package_of(module) for module in sources()} == set(PACKAGES)
    unknown = {found.target for found in imports()} - sources().keys() - set(FACADES)
    assert not unknown, unknown


def test_packages_point_one_way() -> None:
    """Imports that only a type checker sees count too: a signature is a dependency."""
    rank = {name: number for number, name in enumerate(PACKAGES)}
    wrong = [
        f"{found.line}: {found.source} imports {found.target}"
        for found in imports()
        if found.target not in FACADES and rank[package_of(found.target)] > rank[package_of(found.source)]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_wheel_needs_no_benchmark() -> None:
    """Benchmarks are run from a checkout, and left out of the wheel."""
    bench = "cuvee.eval.bench"
    within = [found for found in imports() if found.target.startswith(bench)]
    wrong = [f"{found.line}: {found.source}" for found in within if not found.source.startswith(bench)]
    assert len(within) > 40 and not wrong, "\n".join(wrong)


def inside(module: str, folder: str) -> bool:
    return module.startswith(f"cuvee.{folder}.") or module == f"cuvee.{folder}"


def codec_folder(module: str) -> str | None:
    """Return the folder of `codec` that a module lies in; None for modules elsewhere, and those of `codec` itself."""
    path = sources()[module].relative_to(ROOT)
    return path.parts[1] if path.parts[0] == "codec" and len(path.parts) > 2 else None


def test_folders_of_the_codec_point_one_way() -> None:
    """Also those that only a type checker sees."""
    wrong = [
        f"{found.line}: {found.source} imports {found.target}"
        for found in imports()
        if any(inside(found.source, source) and inside(found.target, target) for source, target in APART)
    ]
    assert not wrong, "\n".join(wrong)
    edges: dict[str, set[str]] = {}
    for found in imports():
        source, target = codec_folder(found.source), found.target in sources() and codec_folder(found.target)
        if source and target and source != target and not found.typing:
            edges.setdefault(source, set()).add(target)
    assert {"entropy", "format"} <= edges["schemes"] and not circle(edges), circle(edges)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports within functions count; imports that only a type checker sees may form circles.

    A package's `__init__` is a module like others: one that imports its own members must not be imported by them.
    """
    edges: dict[str, set[str]] = {module: set() for module in sources()}
    for found in imports():
        if not found.typing and found.target in edges:
            edges[found.source].add(found.target)
    assert not circle(edges), " <- ".join(circle(edges))


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def test_private_names_stay_in_their_folder() -> None:
    """Only modules of the same folder import a name with a leading underscore."""
    wrong = []
    for found in imports():
        private = [part for part in (*found.target.split("."), found.name or "") if is_private(part)]
        folder = found.target if found.target in sources() and sources()[found.target].stem == "__init__" else None
        home = folder or found.target.rpartition(".")[0]
        if private and not f"{found.source}.".startswith(f"{home}."):
            wrong.append(f"{found.line}: {found.source} imports {found.name or found.target} of {found.target}")
    assert not wrong, "\n".join(wrong)


def test_the_emulator_is_a_package_of_its_own() -> None:
    """It runs what Triton emits, and knows neither cuvee nor another test."""
    folder, outside = ROOT / "tests/ptx", set()
    for path in sorted(folder.rglob("*.py")):
        nodes = [node for node, _ in statements(ast.parse(path.read_text(encoding="utf-8")))]
        names = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        outside |= {name for name in names if re.match(r"cuvee|tests(?!\.ptx)", name)}
    assert folder.is_dir() and not outside, outside
