"""Test that notebooks run without output on standard error, and are committed with their outputs.

    python tests/package/test_notebooks.py NOTEBOOK...

executes notebooks and writes them back with their outputs, as they are to be committed: no times, no versions.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ("quickstart", "quality_vs_size", "blend")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
MOST_BYTES = 150_000
CELL_SECONDS = 600  # before a cell that hangs is ended

Notebook = Any  # nbformat's nodes have no attributes that a type checker knows


def main(paths: list[Path]) -> None:
    """Execute notebooks and write them back. A temporary folder takes the files that they and their tools write."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
            OMP_NUM_THREADS="1",  # sums do not depend on the number of cores
            MPLBACKEND="module://matplotlib_inline.backend_inline",
            PYTHONWARNINGS="ignore:IProgress not found",  # tqdm, imported by transformers, wants a widget for its bars
            # A user's own settings might interfere.
            **dict.fromkeys(("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"), folder),
            **dict.fromkeys(("IPYTHONDIR", "MPLCONFIGDIR"), folder),
        )
        # Its first import builds the list of fonts, and on a slow machine writes that to standard error.
        importlib.import_module("matplotlib.font_manager")
        for path in paths:
            execute(path, folder)


def execute(path: Path, folder: str) -> None:
    """Execute a notebook in a kernel of its own and write it back with its outputs. On failure, the file is unchanged.

    Raises:
        CellExecutionError: a cell raised.
        ValueError: a cell wrote to standard error.
    """
    from nbclient import NotebookClient

    notebook = read(path)
    NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # flushes depend on timing
        resources={"metadata": {"path": folder}},
        # Its only warning is that traffic between local processes is not encrypted.
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    ).execute()
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.get("name") == "stderr":
                raise ValueError(f"cell {cell.id} wrote to standard error:\n{output.text}")
    notebook.metadata = nbformat.from_dict(metadata(notebook))
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    partial = path.with_suffix(".partial")
    partial.write_text(nbformat.writes(notebook, version=4) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read(path: Path) -> Notebook:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Notebook) -> list[Notebook]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def metadata(notebook: Notebook) -> dict[str, Any]:
    """Return what a notebook says of itself, with a digest of the code that its outputs are of."""
    code = "\0".join(cell.source for cell in code_cells(notebook))
    return METADATA | {"executed_sha256": hashlib.sha256(code.encode()).hexdigest()}


def printed(cell: Notebook) -> str:
    return "\n".join(o.text if o.output_type == "stream" else str(o.data.get("text/plain", "")) for o in cell.outputs)


def shape(cell: Notebook) -> list[list[str]]:
    """Return the kinds of a cell's outputs, without their content."""
    return [[o.name] if o.output_type == "stream" else sorted(o.data) for o in cell.outputs]


def run(path: Path) -> subprocess.CompletedProcess[str]:
    """Run `main` in a new process, so that neither pytest's filters nor its threads reach the kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    command = [sys.executable, str(Path(__file__).resolve()), str(path)]
    return subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(params=NOTEBOOKS)
def committed(request: pytest.FixtureRequest) -> Path:
    return ROOT / "notebooks" / f"{request.param}.ipynb"


@pytest.mark.nightly
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    original = ROOT / "notebooks" / f"{name}.ipynb"
    copy = tmp_path / original.name
    copy.write_bytes(original.read_bytes())
    done = run(copy)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [original.name]  # a notebook leaves nothing behind
    before, after = read(original), read(copy)
    assert [cell.source for cell in after.cells] == [cell.source for cell in before.cells]
    # Figures may differ in their last digits between machines.
    assert [shape(cell) for cell in code_cells(after)] == [shape(cell) for cell in code_cells(before)]


def test_notebooks_are_committed_as_execution_leaves_them(committed: Path) -> None:
    text = committed.read_text(encoding="utf-8")
    notebook = read(committed)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert json.loads(text)["metadata"] == metadata(notebook), "run this file on it: its outputs are of other code"
    assert text == nbformat.writes(notebook, version=4) + "\n"
    assert len(text.encode()) < MOST_BYTES
    identifiers = [cell.id for cell in notebook.cells]
    assert len(set(identifiers)) == len(identifiers)
    assert all(re.fullmatch(r"[a-z][a-z-]+", name) for name in identifiers), "give cells names, not random ids"
    assert all(cell.metadata == {} for cell in notebook.cells)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


def test_outputs_are_there_and_none_is_an_error(committed: Path) -> None:
    outputs = [output for cell in code_cells(read(committed)) for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    images = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert images
    assert not [cell.id for cell in code_cells(read(committed)) if not cell.outputs]


def test_nothing_tells_where_a_notebook_was_run(committed: Path) -> None:
    notebook = read(committed)
    for cell in notebook.cells:
        text = cell.source + ("\n" + printed(cell) if cell.cell_type == "code" else "")
        assert not re.search(r"(?<![\w./:])(?:/[\w.-]+){2,}|\b[A-Za-z]:\\|(?<!\w)~/", text), f"a path in {cell.id}"
        assert not re.search(r"\w@\w", text), f"user@host in {cell.id}"
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text), f"this machine's name in {cell.id}"
        assert not re.search(r"\b\d+(\.\d+)? ?(ms|s|seconds|[GM]B/s)\b", text), f"a speed in {cell.id}"


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
