"""What `cuvee report` and `cuvee blend-report` have in common: a folder to fill, profiles and texts to name, an end.

A run is stopped by Ctrl-C or SIGTERM. Python hears a signal only between two steps of its own, and a single call into
LAPACK may take minutes. So a thread hears it, too: if Python has not stopped after two seconds, the thread ends the
process. All files are written whole or not at all, and never while the process ends, so the folder can be continued.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from cuvee.codec.data.corpus import Corpus
from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.files import write_json
from cuvee.codec.support.plain_json import parse_json

__all__ = [
    "Interrupted",
    "check_folder",
    "interruptible",
    "load_matching_profile",
    "resume",
    "run_digest",
    "save_results",
    "text_entry",
    "writing",
]

STOPPING = (signal.SIGINT, signal.SIGTERM)
GRACE = 2.0  # seconds that Python has to stop by itself
_WRITING = threading.Lock()  # held while a file is written; nobody ends the process meanwhile
_WRITE_SECONDS = 60.0


class Interrupted(KeyboardInterrupt):
    """Somebody pressed Ctrl-C or sent SIGTERM.

    Attributes:
        number: of the signal. A shell expects the exit code 128 + number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def interruptible(farewell: Callable[[], None]) -> Iterator[None]:
    """Raise `Interrupted` on SIGINT and SIGTERM, or end the process with 128 + signal if Python does not hear them.

    Args:
        farewell: called in both cases, to say how to go on; perhaps from another thread.

    Signals only concern the main thread; in any other one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, over = threading.Event(), threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def stop(number: int, frame: FrameType | None) -> None:
        if not heard.is_set():  # a second one, while the first is being dealt with, changes nothing
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
    """Write into the folder of a run; the process does not end meanwhile.

    Raises:
        InputError: it cannot be written. What was there stays.
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
    """Write what has been measured so far, whole or not at all. Errors: see `writing`."""
    with writing(path):
        write_json(path, data)


def check_folder(out: Path, force: bool, resumed: str | None = None) -> None:
    """Make sure that a report may be written into a folder, before anything slow is loaded.

    Args:
        out: the folder; it need not exist.
        force: allow a folder that holds other things.
        resumed: a folder that holds this file is fine too: the report in it will be continued.

    Raises:
        InputError: a file, a folder with other things in it, or one that cannot be written to.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"out: {out} is a file: choose a folder")
    if out.is_dir() and any(out.iterdir()) and not force and not (resumed and (out / resumed).exists()):
        holds = " and holds no report" if resumed else ""
        raise InputError(f"out: {out} is not empty{holds}: choose another folder, or --force")
    if not os.access(next(p for p in (out, *out.parents) if p.exists()), os.W_OK):
        raise InputError(f"out: {out} cannot be written to")


def run_digest(decided: Mapping[str, Any], kind: bytes) -> str:
    """What tells one run from another, in hex.

    Args:
        decided: everything that its figures follow from, as JSON.
        kind: of run, in at most 16 bytes.
    """
    text = json.dumps(decided, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16, person=kind).hexdigest()


def resume(
    path: Path, fresh: dict[str, Any], console: Console, force: bool, done: Callable[[Mapping[str, Any]], int]
) -> dict[str, Any]:
    """What a file of results already holds of this run, or else `fresh`.

    Args:
        path: written by `save_results`; it need not exist.
        fresh: this run before anything has been measured, with its "format", "version", "digest" (see `run_digest`)
            and "configuration". Results that are finished are "complete".
        console: where to say that the run goes on.
        force: take `fresh` if the file holds anything else.
        done: how many measurements results hold.

    Raises:
        InputError: the file holds no results of this format, or those of another run.
    """
    if not path.exists():
        return fresh
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        same = all(found[name] == fresh[name] for name in ("format", "version", "digest"))
        state = "complete" if found["complete"] else f"{done(found)} measurements done"
        before = found["configuration"]
        differs = [name for name, value in fresh["configuration"].items() if value != before.get(name)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if force:
            return fresh
        raise InputError(f"out: {path} is not a report: choose another folder, or --force") from error
    if same:
        line = f"{path.parent} holds this run, {state}: going on"
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
        return dict(found)
    if force:
        return fresh
    what = ", ".join(differs) or "format"
    raise InputError(f"out: {path.parent} holds another run (it differs in {what}): choose another, or --force")


def load_matching_profile(path: str, layout: KVLayout, fingerprint: str, model: str) -> Profile:
    """Load a profile and make sure that it was calibrated on this model.

    Args:
        path: the profile's file.
        layout: of the model's caches.
        fingerprint: of the model's weights.
        model: what the user calls the model.

    Raises:
        ProfileMismatchError: it belongs to another layout or to other weights.
        FormatError, OSError: see `Profile.load`.
    """
    profile = Profile.load(path)
    profile.check_layout(layout)
    if profile.model not in (None, fingerprint):
        raise ProfileMismatchError(
            f"{path}: was calibrated on other weights ({profile.model[:12]}…) than those of {model} "
            f"({fingerprint[:12]}…): learn one for this model, or leave --profile out"
        )
    return profile


def text_entry(corpus: Corpus) -> dict[str, Any]:
    """Describe a text for a report, without the folder it lies in."""
    return {"name": Path(corpus.name).name, "sha256": corpus.sha256, "tokens": corpus.tokens}
