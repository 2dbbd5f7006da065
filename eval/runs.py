"""Runs that are saved step by step and continued later: the base of `cuvee report`, `blend-report`, and `tasks`.

Ctrl-C or SIGTERM stops a run. Python handles a signal only between two of its own instructions, but a single call into
LAPACK may take minutes. A thread therefore watches for signals as well: if Python has not stopped after two seconds,
the thread ends the process. Files are written completely or not at all, and the process never ends during a write, so
the folder can always be continued.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from rich.console import Console

from cuvee.codec.data.corpus import BUNDLED_MODEL, Corpus, load_model
from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.files import write_json
from cuvee.codec.support.plain_json import parse_json
from cuvee.eval.machine import torch_threads
from cuvee.eval.progress import ProgressBar, progress_bar

__all__ = [
    "KEPT",
    "Interrupted",
    "MeasuredModel",
    "ReportRun",
    "check_folder",
    "interruptible",
    "metadata_pairs",
    "need_packages",
    "save_results",
    "software",
    "stoppable_run",
    "text_entry",
    "tokens_sha256",
    "writing",
]

KEPT = "keeps what was measured, and the same command goes on from there"  # said of a folder when a run is stopped
STOPPING = (signal.SIGINT, signal.SIGTERM)
GRACE = 2.0  # seconds that Python has to stop by itself
_WRITING = threading.Lock()  # held while a file is written, so that the process does not end during a write
_WRITE_SECONDS = 60.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped a run.

    Attributes:
        number: of the signal. A shell expects the exit code 128 + number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def interruptible(farewell: Callable[[], None]) -> Iterator[None]:
    """Raise `Interrupted` on SIGINT and SIGTERM, or end the process with 128 + signal if Python does not react.

    Args:
        farewell: called in both cases, possibly from another thread, to say how to continue.

    Python delivers signals to the main thread only; in any other thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, over = threading.Event(), threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def stop(number: int, frame: FrameType | None) -> None:
        if not heard.is_set():  # a second signal during the shutdown changes nothing
            heard.set()
            raise Interrupted(number)

    def watch() -> None:
        while not over.is_set():
            if not select.select([reading], [], [], 0.5)[0]:
                continue
            number = os.read(reading, 1)[0]
            if number in STOPPING and not heard.wait(GRACE) and not over.is_set():
                _WRITING.acquire(timeout=_WRITE_SECONDS)
                farewell()
                os._exit(128 + number)

    before = {number: signal.signal(number, stop) for number in STOPPING}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    try:
        yield
    except KeyboardInterrupt:
        farewell()
        raise
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        over.set()
        watcher.join()
        os.close(reading)
        os.close(writing)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write into the folder of a run, and keep the process alive until the write ends.

    Raises:
        InputError: the path cannot be written. Earlier contents stay.
    """
    with _WRITING:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"out: {path} cannot be written ({error.strerror or error}): what was saved before is kept; make room "
                "or allow writing, and give the same command again"
            ) from error


def save_results(path: Path, data: Any) -> None:
    """Write all measurements so far, completely or not at all. Errors: see `writing`."""
    with writing(path):
        write_json(path, data)


def need_packages(command: str, *packages: str) -> None:
    """Fail before anything slow happens if a package that a command needs is missing.

    Raises:
        ImportError: the message names the packages and the remedy.
    """
    if missing := [package for package in packages if find_spec(package) is None]:
        raise ImportError(f"{command} needs {', '.join(missing)}: pip install 'cuvee[eval]'")


def check_folder(out: Path, force: bool, resumed: str | None = None) -> None:
    """Check that a report may be written into a folder, before anything slow is loaded.

    Args:
        out: the folder; it need not exist.
        force: allow a folder that holds other files.
        resumed: allow a folder that holds this file, because the report in it will be continued.

    Raises:
        InputError: `out` is a file, holds other files, or cannot be written to.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"out: must be a folder, got the file {out}")
    if out.is_dir() and any(out.iterdir()) and not force and not (resumed and (out / resumed).exists()):
        holds = " and holds no report" if resumed else ""
        raise InputError(f"out: {out} is not empty{holds}: choose another folder, or --force")
    if not os.access(next(p for p in (out, *out.parents) if p.exists()), os.W_OK):
        raise InputError(f"out: {out} cannot be written to: choose another folder")


@contextmanager
def stoppable_run(console: Console, kept: str, model: str) -> Iterator[None]:
    """Run measurements of a model until they end or a signal stops them.

    Args:
        console: where an interrupted run says what is kept.
        kept: that sentence, such as OUT and `KEPT`.
        model: name of the model. The bundled one runs with a single torch thread: it gains nothing from more, and on a
            busy machine several threads wait for each other.
    """

    def farewell() -> None:
        console.print(f"interrupted: {kept}", highlight=False, markup=False, soft_wrap=True)

    few = torch_threads(1) if model == BUNDLED_MODEL else contextlib.nullcontext()
    with few, interruptible(farewell):
        yield


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A loaded model, the layout of its caches, and the fingerprint of its weights."""

    name: str
    lm: Any
    layout: KVLayout
    fingerprint: str

    @classmethod
    def load(cls, name: str, dtype: str, device: str = "cpu") -> MeasuredModel:
        """Load a model by the names that `load_model` takes. Errors: see there."""
        lm = load_model(name, dtype, device)
        return cls(name, lm, KVLayout.from_config(lm.config, dtype=lm.dtype), model_fingerprint(lm))

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.lm.parameters())

    def profile(self, path: str) -> Profile:
        """Load a profile and check that it was calibrated on this model.

        Raises:
            ProfileMismatchError: the profile belongs to another layout or to other weights.
            FormatError, OSError: see `Profile.load`.
        """
        profile = Profile.load(path)
        profile.check_layout(self.layout)
        if profile.model not in (None, self.fingerprint):
            raise ProfileMismatchError(
                f"{path}: was calibrated on other weights ({profile.model[:12]}…) than those of {self.name} "
                f"({self.fingerprint[:12]}…): learn one for this model, or leave --profile out"
            )
        return profile

    def describe(self) -> dict[str, Any]:
        """The model as reports describe it."""
        return {
            "name": Path(self.name).name,
            "fingerprint": self.fingerprint,
            "model_type": self.layout.model_type,
            "parameters": self.parameters,
            "dtype": self.layout.dtype,
            "layers": self.layout.num_layers,
            "values_per_token": self.layout.values_per_token,
        }


class ReportRun(ABC):
    """One run of a report in a folder: `data` holds all measurements so far, and `measure` makes the others.

    A subclass names its file, calls `resume` at the end of its constructor, and saves after every measurement.
    """

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]
    FILE: ClassVar[str]
    PERSON: ClassVar[bytes]  # sets the digests of this kind of run apart, at most 16 bytes
    COLUMNS: ClassVar[int]  # for the description of a step in the progress bar

    data: dict[str, Any]

    def __init__(self, model: str, dtype: str, device: str, out: Path, console: Console) -> None:
        self.out = out
        self.console = console
        self.measured = MeasuredModel.load(model, dtype, device)
        self.model = self.measured.lm
        self.layout = self.measured.layout
        self.fingerprint = self.measured.fingerprint

    @abstractmethod
    def measure(self, progress: ProgressBar) -> None:
        """Make and save all measurements that `data` lacks."""

    @abstractmethod
    def write_documents(self) -> None:
        """Write what readers open: Markdown, HTML, plots."""

    @staticmethod
    @abstractmethod
    def measurements(data: Mapping[str, Any]) -> int:
        """The number of measurements in results."""

    def resume(
        self,
        configuration: dict[str, Any],
        decided: Mapping[str, Any],
        rest: Mapping[str, Any],
        command: str,
        force: bool,
    ) -> None:
        """Set `data` to the measurements that the folder holds of this run, or to a report without measurements.

        Args:
            configuration: what was asked for, as JSON.
            decided: everything that the figures follow from, as JSON. Its digest tells one run from another.
            rest: the other entries of a report without measurements.
            command: what a reader would type to get the same report.
            force: discard the results of another run.

        Raises:
            InputError: the file holds no results of this format, or those of another run.
        """
        text = json.dumps(decided, sort_keys=True, separators=(",", ":"), allow_nan=False)
        fresh: dict[str, Any] = {
            "format": self.FORMAT,
            "version": self.VERSION,
            "complete": False,
            "digest": hashlib.blake2b(text.encode(), digest_size=16, person=self.PERSON).hexdigest(),
            "command": command,
            "configuration": configuration,
            **rest,
            "seconds": 0.0,
        }
        path = self.out / self.FILE
        self.data = fresh
        if not path.exists():
            return
        try:
            found = parse_json(path.read_text(encoding="utf-8"))
            same = all(found[name] == fresh[name] for name in ("format", "version", "digest"))
            state = "complete" if found["complete"] else f"{self.measurements(found)} measurements done"
            before = found["configuration"]
            differs = [name for name, value in configuration.items() if value != before.get(name)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if force:
                return
            raise InputError(f"out: {path} is not a report: choose another folder, or --force") from error
        if same:
            line = f"{self.out} holds this run, {state}: continuing"
            self.console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
            self.data = dict(found)
        elif not force:
            what = ", ".join(differs) or "format"
            raise InputError(f"out: {self.out} holds another run (it differs in {what}): choose another, or --force")

    def run(self) -> dict[str, Any]:
        """Make all missing measurements, then write the documents.

        Returns:
            The report, as a dict for JSON.
        """
        self._began, self._before = time.perf_counter(), self.data["seconds"]
        self.save()
        if not self.data["complete"]:
            with progress_bar(self.console, self.COLUMNS) as progress:
                self.measure(progress)
            self.data["complete"] = True
            self.save()
        with writing(self.out):
            self.write_documents()
        return self.data

    def save(self) -> None:
        """Write all measurements so far."""
        self.data["seconds"] = self._before + time.perf_counter() - self._began
        save_results(self.out / self.FILE, self.data)


def software(machine: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `hardware()` that figures follow from, without the commit, the date and the number of cores."""
    return {name: value for name, value in machine.items() if name not in ("commit", "date", "cores")}


def metadata_pairs(pairs: Collection[str]) -> dict[str, str]:
    """Split "name=value" strings.

    Raises:
        InputError: a string has no "=".
    """
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise InputError(f"metadata: must be name=value, got {wrong[0]!r}")
    return dict(pair.split("=", 1) for pair in pairs)


def text_entry(corpus: Corpus) -> dict[str, Any]:
    """Describe a text for a report, without the folder of its file."""
    return {"name": Path(corpus.name).name, "sha256": corpus.sha256, "tokens": corpus.tokens}


def tokens_sha256(*tokens: torch.Tensor) -> str:
    """The SHA-256 of token IDs, in hex."""
    digest = hashlib.sha256()
    for row in tokens:
        digest.update(row.contiguous().numpy().tobytes())
    return digest.hexdigest()
