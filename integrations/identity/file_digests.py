"""SHA-256 of whole files, each read once: digests are kept beside cuvee's cache, and the hub's own names are used.

    $CUVEE_CACHE/digests/<hash of the real path>    path, device, inode, size, mtime, ctime -> SHA-256

What else is made of all bytes of files is kept there, too (`remembered`).

A digest that is kept holds as long as all of these are the same: whoever writes to a file changes its ctime, which
nobody can set back. Only a program that has a file of a tmpfs mapped into its memory may write to it unseen. What the
folder holds is only trusted if no other user can write to it.

In the cache of huggingface_hub a large file is a link to `blobs/<its SHA-256>`, so it need not be read; unless it was
written to after the link was made, or since it was first seen.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from cuvee.codec.errors import InputError
from cuvee.codec.support.files import cache_folder
from cuvee.codec.support.once import Once
from cuvee.integrations.stores.safe_files import (
    open_file,
    open_store_folder,
    read_exactly,
    temporary_file,
    write_all,
)

logger = logging.getLogger(__name__)

_BUFFER = 4 << 20
_THREADS = 4
_MOST = 1 << 22  # bytes of a file that keeps a digest
_SETTLED = 2e9  # nanoseconds: a file written so shortly before may be written again with the same times
_SAY = 10.0  # seconds between two lines of the log
_BLOB = re.compile("[0-9a-f]{64}")
_REVISION = re.compile("[0-9a-f]{40}")

_once = Once(logger)


def file_digests(files: Sequence[Path], stop: threading.Event | None = None) -> list[bytes]:
    """Return the SHA-256 of each file: all of its bytes, as they are now.

    Reads, on some threads, the files whose digest is neither kept nor their name. Logs progress, and the time taken.

    Args:
        files: regular files, or links to such.
        stop: once it is set, this raises an InputError soon.

    Raises:
        InputError: a file cannot be read, or changes meanwhile.
    """
    work = _Work(stop or threading.Event())
    try:
        before = [file_state(file) for file in files]
        if not files:
            return []
        pool = ThreadPoolExecutor(min(len(files), _THREADS), "cuvee-digest")
        try:
            digests = list(pool.map(work.digest, files, before))
        finally:
            work.stop_all()
            pool.shutdown()
        for file, state in zip(files, before, strict=True):
            if file_state(file) != state:
                raise _changed(file)
    except OSError as error:
        raise InputError(f"model: must name files that can be read, got {error.filename} ({error.strerror})") from error
    work.say_all()
    return digests


State = tuple[str, int, int, int, int, int]


def file_state(file: Path) -> State:
    """Return a file's real path, device, inode, size, and times of its content and its entry in nanoseconds.

    Raises:
        OSError: there is no such file.
        InputError: it is no regular file.
    """
    real = os.path.realpath(file, strict=True)
    info = os.stat(real)
    if not stat.S_ISREG(info.st_mode):
        raise InputError(f"model: must hold regular files, got {file}")
    return real, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


class _Work:
    """The digests of one call."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop, self._failed = stop, threading.Event()
        self._lock = threading.Lock()
        self._read, self._began = 0, time.monotonic()
        self._said = self._began

    def digest(self, file: Path, state: State) -> bytes:
        """Return the digest of a file in this state."""
        kept = _read_kept(state[0])
        if kept is not None and kept[0] == [state] and _BLOB.fullmatch(digest := "".join(kept[1])):
            return bytes.fromhex(digest)
        name = _name_of_blob(file, state)
        if name and kept is None:
            digest = name
        else:
            began = time.time_ns()
            digest = self._hash(state)
            if not _settled([state], began):
                return bytes.fromhex(digest)
        _keep(state[0], [state], [digest])
        return bytes.fromhex(digest)

    def _hash(self, state: State) -> str:
        sha, buffer = hashlib.sha256(), memoryview(bytearray(min(_BUFFER, state[3] + 1)))
        with open(state[0], "rb", buffering=0) as stream:
            if file_state(Path(state[0])) != state or os.fstat(stream.fileno()).st_ino != state[2]:
                raise _changed(Path(state[0]))
            with suppress(OSError):  # a page that is not written back may be written again, and keep the ctime
                os.fsync(stream.fileno())
            while count := stream.readinto(buffer):
                sha.update(buffer[:count])
                self._say(count)
                if self._stop.is_set() or self._failed.is_set():
                    raise InputError("model: must be read to its end to be named, got a stop")
        return sha.hexdigest()

    def _say(self, count: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._read += count
            late = now - self._said > _SAY
            if late:
                self._said = now
        if late:
            logger.info("cuvee: %.1f GB of weights are read to name them (%.2f GB/s)", *self._speed())

    def _speed(self) -> tuple[float, float]:
        return self._read / 1e9, self._read / 1e9 / max(time.monotonic() - self._began, 1e-9)

    def say_all(self) -> None:
        """Log what was read, if anything was."""
        if self._read:
            logger.info(
                "cuvee: %.2f GB of weights were read in %.1f s to name them (%.2f GB/s); the next start need not",
                self._read / 1e9, time.monotonic() - self._began, self._speed()[1],
            )  # fmt: skip

    def stop_all(self) -> None:
        """Let no thread read on, once one has failed."""
        self._failed.set()


def _changed(file: Path) -> InputError:
    return InputError(f"model: must not change while it is read, got {file}: start again once it is complete")


def _name_of_blob(file: Path, state: State) -> str:
    """Return the digest that the cache of huggingface_hub has made a file's name; "" if it is no such file, or was
    written to after the hub had made the link to it.
    """
    blob = Path(state[0])
    repo = blob.parent.parent
    if blob.parent.name != "blobs" or not _BLOB.fullmatch(blob.name) or not repo.name.startswith("models--"):
        return ""
    try:
        shown = file.parent.resolve().relative_to(repo.resolve()).parts
    except ValueError:
        return ""
    linked = file.is_symlink() and len(shown) >= 2 and shown[0] == "snapshots" and _REVISION.fullmatch(shown[1])
    return blob.name if linked and state[-1] <= file.lstat().st_ctime_ns else ""


# What is kept ---------------------------------------------------------------------------------------------------------


def remembered(kind: str, files: Sequence[Path], make: Callable[[], list[str]]) -> list[str]:
    """Return what `make` makes of some files, or made of them earlier if they are the same.

    Args:
        kind: names what it makes, and its version.
        files: that it reads.
        make: what it returns is kept, unless a file was written a moment ago.

    Raises:
        OSError: there is no such file.
    """
    states, began = [file_state(file) for file in files], time.time_ns()
    if known := _recalled(kind, states):
        return known
    made = make()
    if _settled(states, began) and [file_state(file) for file in files] == states:
        _keep(_name(kind, states), states, made)
    return made


def recalled(kind: str, files: Sequence[Path]) -> list[str]:
    """Return what `remembered` returns without making it; empty if it would have to be made.

    Raises:
        OSError: there is no such file.
    """
    return _recalled(kind, [file_state(file) for file in files])


def _recalled(kind: str, states: list[State]) -> list[str]:
    kept = _read_kept(_name(kind, states))
    return kept[1] if kept is not None and kept[0] == states else []


def _name(kind: str, states: Sequence[State]) -> str:
    return f"{kind} {[state[0] for state in states]}"


def _settled(states: Sequence[State], began: int) -> bool:
    """Return whether files were last written so long before a time that another write would show in their times."""
    return all(began - state[-1] >= _SETTLED for state in states)


Kept = tuple[list[State], list[str]]


def _entry(name: str) -> str:
    return hashlib.blake2b(os.fsencode(name), digest_size=16, person=b"cuvee-digest").hexdigest()


def _kept(action: Callable[[int], Kept | None]) -> Kept | None:
    """Do something in the folder of digests; None if that is not possible, which costs time only."""
    path = cache_folder() / "digests"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_store_folder(str(path), create=True) as folder:
            return action(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        _once(
            "folder", "cuvee: digests of weights are not kept, so each start reads all weights again: %s: name a "
            "folder of your own in CUVEE_CACHE", error,
        )  # fmt: skip
        return None


def _read_kept(name: str) -> Kept | None:
    def read(folder: int) -> Kept | None:
        with open_file(_entry(name), folder) as file:
            info = os.fstat(file)
            if info.st_uid not in (os.geteuid(), 0) or info.st_mode & 0o022:
                return None
            data = read_exactly(file, _MOST)
        try:
            whose, states, made = json.loads(data)
            if whose != name or not all(isinstance(each, str) for each in made):
                return None
            return [tuple(state) for state in states], list(made)
        except (ValueError, TypeError, RecursionError):
            return None

    return _kept(read)


def _keep(name: str, states: Sequence[State], made: Sequence[str]) -> None:
    def write(folder: int) -> None:
        with temporary_file(folder) as (temporary, file):
            write_all(file, json.dumps([name, states, made]).encode())
            os.rename(temporary, _entry(name), src_dir_fd=folder, dst_dir_fd=folder)

    _kept(write)
