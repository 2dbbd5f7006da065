"""What engines serve, from the marks of the tests: `python -m tests.package.matrix` writes docs/matrix.md.

    @pytest.mark.serves(model="MLA", where="classes")       in the test that shows it, or on a case of it
    @pytest.mark.serves(cache="nvfp4", where="refused")

Each of a mark's `model`, `cache`, `drafts`, `parallel` and `runner` that is left out is the plain one. The file tells
the engine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "matrix.md"
ENGINES = {
    "vllm/": "vLLM, connector",
    "vllm_tier/": "vLLM, tier",
    "sglang/": "SGLang, HiCache",
    "lmcache/": "LMCache",
}
PLAIN = {
    "model": "full attention",
    "cache": "16 or 32 bits",
    "drafts": "none",
    "parallel": "one process",
    "runner": "usual",
}
WHERE = ("engine", "classes", "refused")  # the best first
SHOWN = {"drafts": "drafts by {}", "cache": "cache in {}", "runner": "runner {}"}  # of what differs from the plain case
# What a file that starts engines calls.
_RUNS = ("run_engines(", "Server.started(", "Engines.started(", "faults.run_group(")

_HEAD = """# What engines serve

Written by `python -m tests.package.matrix` from the marks of the tests. **engine**: requests run through a real one.
**classes**: the engine's own code calls ours, without a model behind it. **refused**: the engine does not start, and
says which setting to change. An empty cell: no test shows it. A row names what differs from the first. Runner V2,
async: the V2 model runner and async scheduling, vLLM's defaults on a GPU, here in Triton's interpreter. vLLM's
columns hold for 0.32 and 0.33 (`make test-next`); its ranks are forked, as on a GPU.

vLLM offloads from GPUs only, so one part is replaced in the tier's **engine** cells: the copy between device and host,
with the streams and events that order it, by threads in host memory, into the order of a GPU's pages
(`tests/integrations/vllm_tier/cpu_copies.py`). It has not run with the V2 runner. In LMCache's, nothing is replaced:
its connector runs in vLLM's CPU engine, its server in a process of its own (`--supported-transfer-mode engine_driven`).
The server's copies from a GPU have not run.

In SGLang's its `Engine` runs as it is, with its torch-native backends. Replaced by torch are kernels that copy between
a device and host memory, and those of short convolutions, the one kind of recurrent layer that ran. That memory is not
pinned; windows are read where they lie (those backends read other tokens), latents computed in absorbed form; processes
are forked, not spawned (`tests/integrations/sglang/cpu_engine.py`).
"""


@dataclass(frozen=True, slots=True)
class Served:
    """One mark.

    Attributes:
        path: of the test, below tests/integrations.
        kind: model, cache, drafts, parallel and runner.
        where: one of `WHERE`.
    """

    path: str
    kind: tuple[str, ...]
    where: str

    @property
    def engine(self) -> str:
        return next(name for prefix, name in ENGINES.items() if self.path.startswith(prefix))


def marks() -> Iterator[Served]:
    """All marks of the tests of engines.

    Raises:
        ValueError: a mark with another argument or value, or one that claims an engine in a file that starts none.
    """
    folder = ROOT / "tests" / "integrations"
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text()
        if "mark.serves" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.serves":
                given = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
                where = given.pop("where", None)
                if where not in WHERE or not given.keys() <= PLAIN.keys() or node.args:
                    raise ValueError(f"{path}:{node.lineno}: serves: must be given {', '.join(PLAIN)}, and where")
                if where == "engine" and not any(call in text for call in _RUNS):
                    raise ValueError(f"{path}:{node.lineno}: where='engine': this file starts no engine")
                kind = tuple(str(given.get(name, plain)) for name, plain in PLAIN.items())
                yield Served(path.relative_to(folder).as_posix(), kind, where)


def page() -> str:
    best: dict[tuple[tuple[str, ...], str], str] = {}
    for mark in marks():
        at = mark.kind, mark.engine
        best[at] = min(best.get(at, mark.where), mark.where, key=WHERE.index)
    plain = tuple(PLAIN.values())

    def plain_first(kind: tuple[str, ...]) -> tuple[object, ...]:
        return kind != plain, [own != usual for own, usual in zip(kind, plain, strict=True)], kind

    columns = list(ENGINES.values())
    lines = ["| " + " | ".join(["what is served", *columns]) + " |", "|---" * (1 + len(columns)) + "|"]
    for kind in sorted({kind for kind, _ in best}, key=plain_first):
        differs = [(name, own) for name, own in zip(PLAIN, kind, strict=True) if own != PLAIN[name]]
        what = ", ".join(SHOWN.get(name, "{}").format(own) for name, own in differs) or ", ".join(plain[:2])
        lines.append("| " + " | ".join([what, *(best.get((kind, engine), "") for engine in columns)]) + " |")
    return _HEAD + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
