"""`Run`: the stages of long work, their progress, and what an interrupted run goes on from."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar

import torch
import xxhash
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import cuvee
from cuvee.codec.models.fingerprint import function_digest
from cuvee.codec.support.files import replacing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
PROGRESS_LINES = 10  # lines per stage in a log file
LEAST_PAUSE = 120.0  # seconds between two writes of what is kept
WRITING = 30.0  # at least so many times as long as the last write took

_DIGEST = 16  # bytes at the end of the file

_log = logging.getLogger(__name__)


class Sums(Protocol):
    """What a stage adds its batches to."""

    def state(self) -> Any:
        """Return it as tensors, numbers, strings, and tuples, lists and dicts of these."""
        ...

    def restore(self, state: Any) -> None:
        """Go on from a state."""
        ...


class Run:
    """Stages one after the other: a bar on a terminal, else a line per tenth of a stage (in a log file), with the time
    that all stages still take.

    With `keep`, that file holds what the stages have added up, written every few minutes. The next run with the same
    key goes on from it, to the same result. `finish` deletes it.

    Example:
        >>> run = Run(shown=False)
        >>> run.expect(("counting", 3.0), ("sorting", 1.0))
        >>> list(run.stage("counting", [1, 2, 3]))
        [1, 2, 3]
    """

    def __init__(self, shown: bool = True, keep: str | os.PathLike[str] | None = None) -> None:
        self._shown, self._console = shown, Console(file=sys.stderr)
        self._keep = None if keep is None else Path(keep)
        self._parts: dict[str, dict[str, Any]] = {}
        if self._keep is not None and self._keep.exists():
            self._parts = _read(self._keep)
        self._resumable = set(self._parts)  # parts of the file that this run goes on from, as far as is known
        self._begun: set[str] = set()
        self._part: dict[str, Any] = _new("")
        self._live: dict[str, Sums] = {}
        self._used: dict[str, int] = {}
        self._costs: list[tuple[str, float]] = []
        self._seconds = self._paid = 0.0
        self._written, self._pause = time.monotonic(), LEAST_PAUSE

    @property
    def keeps(self) -> bool:
        """Whether there is a file that keeps what was done."""
        return self._keep is not None

    def expect(self, *costs: tuple[str, float]) -> None:
        """Say which stages come, and what each costs, all in one unit of the caller's choice."""
        self._costs = list(costs)

    def begin(self, part: str, key: str) -> None:
        """Begin a part of the run, or go on with it if it was kept with the same key: of all that it depends on."""
        saved = self._parts.get(part)
        if saved is not None and saved["key"] != key:
            _log.warning("%s: is of other weights, texts or options: this run begins anew", self._keep)
            saved = None
            self._resumable &= self._begun  # what comes later depends on this part
            self._parts = {name: state for name, state in self._parts.items() if name in self._begun}
        elif saved is not None and not self._begun and self._shown:
            self._console.print(f"going on from {self._keep}", highlight=False, markup=False, soft_wrap=True)
        self._begun.add(part)
        self._part = self._parts[part] = saved or _new(key)
        self._live, self._used = {}, {}

    def value(self, name: str) -> Any:
        """Return what was put by this name in this part of the run; None if nothing was."""
        return self._part["values"].get(name)

    def put(self, name: str, value: Any) -> None:
        """Keep a result, as `Sums.state` returns it, in place of the sums that led to it."""
        self._part["values"][name] = value
        self._live, self._part["sums"] = {}, {}
        self._write()

    def stage(self, what: str, batches: Sequence[T], sums: Sums | None = None, name: str = "") -> Iterator[T]:
        """Yield the batches, apart from those that the kept sums hold; `name` is that of sums of several stages."""
        self._used[what] = self._used.get(what, 0) + 1
        stage = f"{what} {self._used[what]}"
        if sums is not None and (name := name or stage) not in self._live:
            if name in self._part["sums"]:
                sums.restore(self._part["sums"].pop(name))
            self._live[name] = sums
        cost = next((cost for label, cost in self._costs if label == what), 0.0)
        if cost:
            self._costs.remove((what, cost))
        first = self._part["done"].get(stage, 0) if sums is not None else 0
        began = time.monotonic()
        for number, left in self._with_progress(what, range(first, len(batches)), len(batches)):
            yield batches[number]
            if sums is not None:
                self._part["done"][stage] = number + 1
                if time.monotonic() - self._written > self._pause:
                    self._write()
            share = (number + 1 - first) / (len(batches) - first)
            left.append(self._left(time.monotonic() - began, share, cost * (1 - first / len(batches))))
        self._seconds += time.monotonic() - began
        self._paid += cost * (1 - first / max(len(batches), 1))

    def finish(self) -> None:
        """Delete what was kept."""
        if self._keep is not None:
            self._keep.unlink(missing_ok=True)

    def kept(self) -> str:
        """Return what an interrupted run goes on from, in words; empty if from the beginning."""
        if self._keep is None or not self._resumable or not self._keep.exists():
            return ""
        done = [f"{stage.rpartition(' ')[0]} {count}" for stage, count in self._part["done"].items()]
        return f"{self._keep} ({self._keep.stat().st_size / 1e6:,.0f} MB; at most: {', '.join(done) or 'samples'})"

    def _left(self, seconds: float, share: float, cost: float) -> float:
        """Return the seconds that all stages still take: what comes is as fast for its cost as all before it."""
        paid = self._paid + share * cost
        later = sum(cost for _, cost in self._costs)
        return seconds * (1 - share) / share + (later * (self._seconds + seconds) / paid if paid else 0.0)

    def _with_progress(self, what: str, numbers: range, count: int) -> Iterator[tuple[int, list[float]]]:
        """Yield each number and a list that takes the seconds left after it; show them."""
        left: list[float] = []
        if self._shown and self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
            )
            with Progress(*columns, console=self._console, transient=True) as bar:
                task = bar.add_task(what, total=count, completed=numbers.start, left="")
                for number in numbers:
                    yield number, left
                    bar.update(task, advance=1, left=in_words(left[-1]))
            return
        lines = int(numbers.start / max(count, 1) * PROGRESS_LINES)
        for number in numbers:
            yield number, left
            if self._shown and int((number + 1) / count * PROGRESS_LINES) > lines:
                lines = int((number + 1) / count * PROGRESS_LINES)
                self._console.print(
                    f"{what}: {number + 1} of {count}, {in_words(left[-1])}", highlight=False, soft_wrap=True
                )

    def _write(self) -> None:
        if self._keep is None:
            return
        began = time.monotonic()
        self._part["sums"] |= {name: sums.state() for name, sums in self._live.items()}
        self._keep.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._keep) as temporary:
            torch.save(self._parts, temporary)
            with open(temporary, "r+b") as file:
                digest = _digest(file, temporary.stat().st_size)
                file.write(digest)
        for name in self._live:
            del self._part["sums"][name]  # they change
        self._resumable = set(self._parts)
        self._written = time.monotonic()
        self._pause = max(LEAST_PAUSE, WRITING * (self._written - began))


def in_words(seconds: float) -> str:
    """Return the time that a run still takes, in words.

    Example:
        >>> in_words(95), in_words(1500)
        ('95 s left in all', '25 min left in all')
    """
    return f"{seconds:.0f} s left in all" if seconds < 120 else f"{seconds / 60:.0f} min left in all"


def key_of(model: PreTrainedModel, *parts: Any) -> str:
    """Return a key for `Run.begin`: a digest of what a run depends on, tensors and other values in any nesting.

    The model's weights are one of the parts.
    """
    digest = hashlib.sha256(repr((cuvee.__version__, torch.__version__, torch.get_num_threads())).encode())
    digest.update(repr((model.dtype, model.device.type, function_digest(model))).encode())

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            digest.update(repr(part.shape).encode() + part.cpu().long().numpy().tobytes())
        elif isinstance(part, list | tuple):
            digest.update(repr(len(part)).encode())
            for item in part:
                add(item)
        else:
            digest.update(repr(part).encode())

    add(parts)
    return digest.hexdigest()


def _new(key: str) -> dict[str, Any]:
    return {"key": key, "done": {}, "sums": {}, "values": {}}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read what a run has kept; nothing, with a warning, from a file that is damaged or of another kind."""
    size = path.stat().st_size - _DIGEST
    with open(path, "rb") as file:
        sound = size > 0 and _digest(file, size) == file.read()
    if sound:
        return dict(torch.load(path, weights_only=True))
    _log.warning("%s: is damaged, or was not kept by a run: this run begins anew and replaces it", path)
    return {}


def _digest(file: BinaryIO, size: int) -> bytes:
    """Return the digest of the next bytes of a file: torch checks none of its own."""
    digest = xxhash.xxh3_128(b"cuvee run 1")
    while size and (piece := file.read(min(size, 1 << 24))):
        digest.update(piece)
        size -= len(piece)
    return digest.digest()
