"""Files and folders below a root, protected against tampering by other users.

Everything is opened relative to an open folder (`openat`) and never through a link (`O_NOFOLLOW`), so swapping a folder
for a link meanwhile gains an attacker nothing. The root itself may be a link, but only one that we or root own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a FIFO without a writer, in place of a file, would never return.
FILE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Levels of folders that are deleted. Our folders are two deep; each level holds a descriptor open.
_DEPTH = 32
# Seconds to wait for a lock that is held for microseconds, unless a process is stopped while it holds it.
LOCK_SECONDS = 5.0
# Seconds after which an unlocked temporary file counts as left by a dead writer.
STALE_SECONDS = 60.0
# The longest chain of links to the root: as many links as Linux follows.
_LINKS = 40


def open_file(name: str, flags: int, parent: int) -> tuple[int, os.stat_result]:
    """Open a regular file in an open folder, without blocking; return its descriptor and its `fstat`."""
    file = os.open(name, flags | FILE_FLAGS, 0o600, dir_fd=parent)
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.ENXIO, "not a regular file", name)
    except BaseException:
        os.close(file)
        raise
    return file, info


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


def unlink(name: str, parent: int) -> bool:
    """Delete a file of an open folder; return whether it was there."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return False
    return True


def unlink_same(name: str, used: int, parent: int) -> bool | None:
    """Delete a file if its modification time still is `used` (ns); return whether it did, or None if it was gone."""
    try:
        if os.stat(name, dir_fd=parent, follow_symlinks=False).st_mtime_ns != used:
            return False
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return None
    return True


def list_folder(folder: int) -> list[os.DirEntry[str]]:
    """List an open folder. The entries can be queried further only while it is open."""
    with os.scandir(folder) as entries:
        return list(entries)


def make_folder(path: str, mode: int) -> None:
    """Create a folder unless it exists. Missing parents get mode 0755, so that no other user can swap the folder."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        pass
    except FileNotFoundError:
        make_folder(os.path.dirname(path), 0o755)
        with suppress(FileExistsError):
            os.mkdir(path, mode)


def open_root(path: str, links: int = _LINKS) -> int:
    """Open a folder. Its path may be a link, but not one that another user made (PermissionError)."""
    try:
        return os.open(path, _FOLDER)
    except NotADirectoryError:
        link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            info = os.fstat(link)
            if not stat.S_ISLNK(info.st_mode) or not links:
                raise
            if problem := objection(info, path):
                raise PermissionError(f"path: {problem}") from None
            # Read through the descriptor: the target of the link that was checked, even if the link was replaced since.
            target = os.readlink("", dir_fd=link)
        finally:
            os.close(link)
    return open_root(os.path.join(os.path.dirname(path), target), links - 1)


def objection(info: os.stat_result, path: str) -> str | None:
    """Return why a root, or a link to it, is not safe to use, and the remedy; None if it is safe.

    A user who can write to the folder, or redirect the link, controls the caches that a model continues from.
    """
    link = stat.S_ISLNK(info.st_mode)
    if not link and not stat.S_ISDIR(info.st_mode):
        return None  # opening it gives a better message
    us = os.geteuid()
    if info.st_uid not in (us, 0):
        return (
            f"must belong to user {us} or to root, got {path}, a {'link' if link else 'folder'} of user "
            f"{info.st_uid}, who could replace entries: run as that user, name another folder, or run chown -h {us} "
            f"{path}"
        )
    if not link and info.st_mode & 0o022:
        inside = " (or name a folder inside it, which is then created 0700)" if info.st_mode & stat.S_ISVTX else ""
        return (
            f"must not be writable by group or others, who could replace entries, got {path} with mode "
            f"{stat.S_IMODE(info.st_mode):04o}: run chmod go-w {path}{inside}"
        )
    return None


def replace_file(name: str, data: bytes, parent: int, mode: int = 0o600) -> None:
    """Write a file of an open folder. Readers see the old file, or all of the new one, even after a power failure.

    A link in its place is replaced, not followed. If this fails, what was there stays.
    """
    temporary = ".tmp-" + secrets.token_hex(8)
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE_FLAGS, mode, dir_fd=parent)
    try:
        write_all(file, data)
        os.fsync(file)
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        unlink(temporary, parent)
        raise
    finally:
        os.close(file)
    os.fsync(parent)


@contextmanager
def open_folder(parent: int, name: str, *, create: bool = False, mode: int = 0o700) -> Iterator[int]:
    """Open a folder inside an open folder, or create it; never through a link. Yield its descriptor."""
    try:
        file = os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
        with suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=parent)
        file = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield file
    finally:
        os.close(file)


def remove_tree(name: str, parent: int, depth: int = _DEPTH) -> tuple[int, int]:
    """Delete a folder, or a link in its place, even if others delete it, too; return its files and their bytes.

    If some of it cannot be deleted, this raises the last error, and the rest is gone.
    """
    if not depth:
        raise OSError(errno.ELOOP, "folders nested too deep", name)
    count = size = 0
    failure: OSError | None = None
    try:
        with open_folder(parent, name) as folder:
            for entry in list_folder(folder):
                try:
                    if entry.is_dir(follow_symlinks=False):
                        files, held = remove_tree(entry.name, folder, depth - 1)
                    else:
                        held = entry.stat(follow_symlinks=False).st_size
                        files = int(unlink(entry.name, folder))
                    count, size = count + files, size + held * bool(files)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure
        os.rmdir(name, dir_fd=parent)
    except NotADirectoryError:
        unlink(name, parent)
    except FileNotFoundError:
        pass
    return count, size


def is_abandoned(name: str, parent: int) -> bool:
    """Return whether a temporary file was left by a dead writer: nobody locks it, and nobody has written for a minute.

    The kernel releases an flock when its process ends, so reused process ids and containers do not matter.
    """
    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISREG(info.st_mode) or abs(time.time() - info.st_mtime) < STALE_SECONDS:
        return False
    file, _ = open_file(name, os.O_RDWR, parent)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


@contextmanager
def file_lock(parent: int, name: str, *, wait: float | None = None) -> Iterator[int]:
    """Hold an flock on a file of an open folder, and yield its descriptor. It also excludes other threads.

    If another holds it for `wait` seconds (`LOCK_SECONDS`), this raises a TimeoutError.
    """
    file, _ = open_file(name, os.O_RDWR | os.O_CREAT, parent)
    try:
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
        yield file
    finally:
        # Closing alone does not unlock the file if a child that was forked meanwhile has it open as well.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)
