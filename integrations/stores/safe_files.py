"""Files and folders below a root, protected against tampering by other users.

Everything is opened relative to an open folder (`openat`) and never through a link (`O_NOFOLLOW`), so swapping a folder
for a link meanwhile gains an attacker nothing. The root itself is no link either.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a FIFO without a writer, in place of a file, would never return.
_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Seconds to wait for a lock that is held for microseconds, unless a process is stopped while it holds it.
LOCK_SECONDS = 5.0


class UnusableFolderError(PermissionError):
    """The root of a store cannot be made, or is not safe to use; the message ends with the remedy."""


@contextmanager
def open_file(name: str, parent: int, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a regular file in an open folder, without blocking, and yield its descriptor."""
    file = os.open(name, flags | _FILE, 0o600, dir_fd=parent)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.ENXIO, "not a regular file", name)
        yield file
    finally:
        os.close(file)


@contextmanager
def temporary_file(parent: int) -> Iterator[tuple[str, int]]:
    """Create `.tmp-<random>` in an open folder; yield its name and descriptor, and delete it unless it is renamed."""
    name = ".tmp-" + secrets.token_hex(8)
    try:
        with open_file(name, parent, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            yield name, file
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)


@contextmanager
def open_folder(name: str, parent: int | None, *, create: bool = False) -> Iterator[int]:
    """Open a folder in an open folder, or by its path, or create it; never through a link. Yield its descriptor.

    Missing parents of a path get mode 0755, so that no other user can swap the folder.
    """
    try:
        folder = os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
        for above in reversed(Path(name).parents) if parent is None else ():
            above.mkdir(0o755, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        folder = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


def read_exactly(file: int, length: int) -> bytes:
    """Read the next `length` bytes of a file, or fewer at its end."""
    # Usually one read returns everything, without a copy. The kernel reads at most 2 GiB at a time.
    parts = [os.read(file, length)]
    missing = length - len(parts[0])
    while missing and parts[-1]:
        parts.append(os.read(file, missing))
        missing -= len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


def write_all(file: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


@contextmanager
def open_store_folder(path: str, *, create: bool = False) -> Iterator[int]:
    """Open the root of a store, or create it, check that it is safe to use, and yield its descriptor.

    Raises:
        FileNotFoundError: the root does not exist.
        UnusableFolderError: it cannot be made, or others can write to it.
    """
    with ExitStack() as opened:
        try:
            root = opened.enter_context(open_folder(path, None, create=create))
        except OSError as error:
            missing = isinstance(error, FileNotFoundError) and not create
            if missing or os.path.lexists(path):
                raise
            raise UnusableFolderError(
                error.errno,
                f"the folder cannot be made ({error.strerror}: {error.filename!r}): make it, as a folder of user "
                f"{os.geteuid()}, or name another",
            ) from error
        if problem := objection(os.fstat(root), path):
            raise UnusableFolderError(f"path: {problem}")
        yield root


def objection(info: os.stat_result, path: str) -> str | None:
    """Return why a root is not safe to use, and the remedy; None if it is safe.

    A user who can write to the folder, or redirect a link to it, controls the caches that a model continues from.
    """
    if stat.S_ISLNK(info.st_mode):
        return f"must be a folder, got {path}, a link: name the folder that it leads to"
    if not stat.S_ISDIR(info.st_mode):
        return None  # opening it gives a better message
    us = os.geteuid()
    if info.st_uid not in (us, 0):
        return (
            f"must belong to user {us} or to root, got {path}, a folder of user {info.st_uid}, who could replace "
            f"entries: run as that user, name another folder, or run chown {us} {path}"
        )
    if info.st_mode & 0o022:
        inside = " (or name a folder inside it, which is then created 0700)" if info.st_mode & stat.S_ISVTX else ""
        return (
            f"must not be writable by group or others, who could replace entries, got {path} with mode "
            f"{stat.S_IMODE(info.st_mode):04o}: run chmod go-w {path}{inside}"
        )
    return None


@contextmanager
def file_lock(name: str, parent: int, wait: float | None = None) -> Iterator[int]:
    """Hold an flock on a file of an open folder, and yield its descriptor. It also excludes other threads.

    If another holds it for `wait` seconds (`LOCK_SECONDS`), this raises a TimeoutError.
    """
    with open_file(name, parent, os.O_RDWR | os.O_CREAT) as file:
        wait = LOCK_SECONDS if wait is None else wait
        deadline, pause = time.monotonic() + wait, 0.0002
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Poll, because a process that is stopped while it holds the lock would block all others forever.
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another process has held {name} for {wait:g} s") from None
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        try:
            yield file
        finally:
            # Closing alone does not unlock the file if a child that was forked meanwhile has it open as well.
            fcntl.flock(file, fcntl.LOCK_UN)
