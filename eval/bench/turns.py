"""This cuvee beside another commit of it: two processes that take turns, on the same inputs, in one run.

On a shared machine a run is up to a fifth faster than the next. Processes that take turns see the same machine, so
their ratios are steady where their figures are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console

import cuvee
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench.frame import Shown, machine_line, run_bench, timed_lines
from cuvee.eval.bench.timing import Timing
from cuvee.eval.documents import ReportTable
from cuvee.eval.formatting import format_bits
from cuvee.eval.machine import hardware

__all__ = ["compare_with", "show_turns"]

TURNS, QUICK_TURNS = 9, 3
TOKENS = (64, 256)
_WORKER = Path(__file__).with_name("turns_worker.py")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


def compare_with(
    other: str,
    models: Sequence[str] = (),
    profiles: Sequence[Path] = (),
    threads: Sequence[int] = (1,),
    quick: bool = False,
    progress: Console | None = None,
) -> dict[str, Any]:
    """Measure how many times as fast this cuvee encodes and decodes as another one.

    Args:
        other: a commit of this checkout, by any name that git knows, or a folder with another checkout.
        models: whose caches to measure, by the names `load_model` takes, beside a synthetic one of Llama-3.1-8B's
            shape; with profiles fitted by layer.
        profiles: files with more profiles for these models. Both cuvees must read them. With these, also chunks of a
            text are measured that no process has met before.
        threads: of the codecs.
        quick: take fewer turns.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON: for each case, encoding and decoding, the speed of both in GB/s of the cache and
        the ratio of this one's to the other's, within turns.

    Raises:
        InputError: there is no such commit or folder, or this cuvee is not in a checkout.
        CuveeError: a worker failed; the message has its last line.
    """
    say = timed_lines(progress)
    asked: dict[str, Any] = {
        "models": list(models), "profiles": [str(path.resolve()) for path in profiles], "tokens": list(TOKENS),
        "threads": list(threads), "turns": QUICK_TURNS if quick else TURNS,
    }  # fmt: skip
    with ExitStack() as stack:
        source = stack.enter_context(_source_of(other))
        sides = []
        for name, path in (("the other", source), ("this", Path(cuvee.__file__).parents[1])):
            say(f"inputs and compiled code of {name} cuvee")
            sides.append(stack.enter_context(_worker(path, asked)))
        described = [side.answer()["cases"] for side in sides]
        if list(map(_named, described[0])) != list(map(_named, described[1])):
            raise CuveeError(f"against: {other} measures other cases: choose a later commit")
        seconds: list[list[Any]] = [[], []]
        for turn in range(asked["turns"]):
            say(f"turn {turn + 1} of {asked['turns']}")
            for index in (0, 1) if turn % 2 else (1, 0):
                sides[index].ask()
                seconds[index].append(sides[index].answer())
    cases = []
    for number, (theirs, mine) in enumerate(zip(*described, strict=True)):
        entry = {**_named(mine), "bits_per_value": [theirs["bits_per_value"], mine["bits_per_value"]]}
        for way, name in enumerate(("encode", "decode")):
            before, now = ([turn[number][way] for turn in side] for side in seconds)
            entry[name] = {
                "gb_per_s": [Timing.of(side).per_second(mine["bytes"] / 1e9) for side in (before, now)],
                "ratio": Timing.of([a / b for a, b in zip(before, now, strict=True)]).to_dict(),
            }
        cases.append(entry)
    return {"against": other, "quick": quick, "hardware": hardware(), "cases": cases}


def _named(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in ("cache", "profile", "tokens", "threads", "new")}


@contextmanager
def _source_of(other: str) -> Iterator[Path]:
    """Give the folder that holds the package `cuvee` of a commit or of another checkout."""
    if other and (Path(other) / "src" / "cuvee").exists():
        yield (Path(other) / "src").resolve()
        return
    here = Path(__file__).resolve().parent
    found = _git(here, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{other}^{{commit}}")
    if found.returncode:
        raise InputError(f"against: must be a commit of this checkout, or a folder with another one, got {other!r}")
    commit = found.stdout.strip()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / commit[:12]
        made = _git(here, "worktree", "add", "--detach", str(folder), commit)
        if made.returncode:
            raise CuveeError(f"against: git cannot check out {other}: {made.stderr.strip().splitlines()[-1:]}")
        try:
            yield folder / "src"
        finally:
            _git(here, "worktree", "remove", "--force", str(folder))


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(f"against: needs git: {error}") from error


class _Worker:
    """A process that runs `turns_worker.py` with one source."""

    def __init__(self, process: subprocess.Popen[str], asks: IO[str], answers: IO[str], errors: Path) -> None:
        self._process = process
        self._asks = asks
        self._answers = answers
        self._errors = errors

    def ask(self) -> None:
        """Ask for the next turn."""
        with suppress(OSError):  # it has ended: `answer` tells why
            self._asks.write("\n")
            self._asks.flush()

    def answer(self) -> Any:
        """Wait for the next line.

        Raises:
            CuveeError: the process has ended.
        """
        line = self._answers.readline()
        if not line:
            self._process.wait()
            said = self._errors.read_text(errors="replace").strip().splitlines()[-1:]
            raise CuveeError(f"against: measuring failed: {said[0] if said else self._process.returncode}")
        return json.loads(line)


@contextmanager
def _worker(source: Path, asked: dict[str, Any]) -> Iterator[_Worker]:
    """Run a worker until the end of the block."""
    # The path comes before an installed cuvee, and -P keeps the worker's own folder off it.
    environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": str(source)}
    command = [sys.executable, "-P", str(_WORKER), json.dumps(asked)]
    with tempfile.TemporaryDirectory() as name:
        errors = Path(name) / "errors"
        with errors.open("w") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=environment
            )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a process without the pipes that were asked for")
        try:
            yield _Worker(process, process.stdin, process.stdout, errors)
        finally:
            process.kill()
            process.communicate()


def show_turns(report: Mapping[str, Any]) -> Shown:
    """Make the table of a report."""
    rows = []
    for entry in report["cases"]:
        tokens = f"{entry['tokens']} new" if entry["new"] else str(entry["tokens"])
        row = [entry["cache"], entry["profile"], tokens, str(entry["threads"])]
        row.append(" / ".join(dict.fromkeys(format_bits(bits) for bits in entry["bits_per_value"])))
        for way in ("encode", "decode"):
            row.append(" / ".join(f"{side['median']:.3f}" for side in entry[way]["gb_per_s"]))
            ratio = entry[way]["ratio"]
            row.append(f"{ratio['median']:.2f} ({ratio['p20']:.2f}-{ratio['p80']:.2f})")
        rows.append(row)
    table = ReportTable(
        ["cache ", "profile ", "tokens", "threads", "bits", "encode", "ratio", "decode", "ratio"],
        rows,
        f"{report['against']} / this cuvee, GB/s of bfloat16",
        "Two processes take turns. Ratios are those within turns: the median, and the 20th and 80th percentiles. "
        "new: the next chunk of a text in each turn, whose tokens the process may meet for the first time.",
    )
    machine = report["hardware"]
    line = machine_line(machine, *(f"{title} {machine[title.lower()]}" for title in ("Python", "torch", "numba")))
    return Shown("Beside another commit", line, [table])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("against", metavar="COMMIT", help="a commit, or the folder of another checkout")
    parser.add_argument("--model", "-m", action="append", default=[], help="also on this model's cache; repeatable")
    parser.add_argument("--profile", action="append", type=Path, default=[], help="with this profile; repeatable")
    parser.add_argument("--threads", action="append", type=int, default=[], help="repeatable (default: 1)")


def _measure(given: argparse.Namespace, progress: Console) -> dict[str, Any]:
    threads = tuple(sorted(set(given.threads or (1,))))
    return compare_with(given.against, given.model, given.profile, threads, given.quick, progress)


if __name__ == "__main__":
    sys.exit(run_bench("turns", "Encode and decode in turns with another commit.", _options, _measure, show_turns))
