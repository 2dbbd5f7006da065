"""Files and folders below a root that other users must not be able to tamper with.

Everything is opened relative to a folder that is already open (`openat`) and never through a link (`O_NOFOLLOW`), so
nobody gains anything by swapping a folder for a link in between. The root itself may be a link, but only one of ours.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a FIFO that lies in place of a file and that nobody writes to would never return.
FILE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Levels of folders that are deleted. Ours are two deep; each level holds a descriptor open.
_DEPTH = 32
# Seconds to wait for a lock that another process holds. Both locks are held for the length of a scan at most.
LOCK_SECONDS = 30.0
# Links that may lead to the root, one after the other: as many as Linux follows.
_LINKS = 40


def open_file(name: str, flags: int, parent: int) -> tuple[int, os.stat_result]:
    """Open a regular file in an open folder without waiting for anybody.

    Returns:
        Its descriptor, and what `fstat` says of it.

    Raises:
        OSError: it cannot be opened, or is a link, a folder, a FIFO, a socket or a device.
    """
    file = os.open(name, flags | FILE_FLAGS, 0o600, dir_fd=parent)
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.ENXIO, "no regular file", name)
    except BaseException:
        os.close(file)
        raise
    return file, info


def read_exactly(file: int, length: int) -> bytes:
    """The next `length` bytes of a file, or fewer if it ends before."""
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
    """Delete a file unless it was used or replaced since its modification time was `used` (ns); None: it was gone."""
    try:
        if os.stat(name, dir_fd=parent, follow_symlinks=False).st_mtime_ns != used:
            return False
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return None
    return True


def list_folder(folder: int) -> list[os.DirEntry[str]]:
    """What an open folder holds. The entries can be asked for more only while it is open."""
    with os.scandir(folder) as entries:
        return list(entries)


def make_folder(path: str, mode: int) -> None:
    """Create a folder unless it exists. Missing parents are made 0755 whatever the umask: nobody may swap it."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        pass
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if parent == path:
            raise
        make_folder(parent, 0o755)
        with suppress(FileExistsError):
            os.mkdir(path, mode)


def open_root(path: str, links: int = _LINKS) -> int:
    """Open a folder. It may be reached by a link, but not by one that another user made.

    Raises:
        PermissionError: it is such a link.
        OSError: it cannot be opened.
    """
    try:
        return os.open(path, _FOLDER)
    except NotADirectoryError:
        link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            info = os.fstat(link)
            if not stat.S_ISLNK(info.st_mode) or not links:
                raise
            if problem := objection(info, path):
                raise PermissionError(problem) from None
            # The target of the link that was examined, whatever has taken its place by now.
            target = os.readlink("", dir_fd=link)
        finally:
            os.close(link)
    return open_root(os.path.join(os.path.dirname(path), target), links - 1)


def objection(info: os.stat_result, path: str) -> str | None:
    """Why a root, or a link that leads to it, is not safe to use, and what to do about it; None if it is safe.

    Whoever can put entries into the folder, or point the link elsewhere, decides what a model continues from.
    """
    link = stat.S_ISLNK(info.st_mode)
    if not link and not stat.S_ISDIR(info.st_mode):
        return None  # opening it gives a better message
    us = os.geteuid()
    if info.st_uid not in (us, 0):
        return (
            f"path: {path} is a {'link' if link else 'folder'} of user {info.st_uid}, who could swap what is stored "
            f"there: run as that user, name another folder, or run chown -h {us} {path}"
        )
    if not link and info.st_mode & 0o022:
        inside = " (or name a folder inside it, which is then created 0700)" if info.st_mode & stat.S_ISVTX else ""
        return (
            f"path: group or others may write to {path} (mode {stat.S_IMODE(info.st_mode):04o}), and could swap what "
            f"is stored there: run chmod go-w {path}{inside}"
        )
    return None


@contextmanager
def open_folder(parent: int, name: str, *, create: bool = False) -> Iterator[int]:
    """The descriptor of a folder in an open one, never of what a link points to.

    Args:
        parent: descriptor of the open folder.
        name: the folder's name in it.
        create: make the folder, 0700, if it is missing.

    Raises:
        OSError: it is missing, is not a folder (a link is not), or may not be opened.
    """
    try:
        file = os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        file = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield file
    finally:
        os.close(file)


def remove_tree(name: str, parent: int, depth: int = _DEPTH) -> int:
    """Delete a folder, or the link in its place; return how many files it held. Others may be deleting it, too.

    Raises:
        OSError: something could not be deleted; the rest is gone.
    """
    if not depth:
        raise OSError(errno.ELOOP, "folders nested too deep", name)
    count = 0
    failure: OSError | None = None
    try:
        with open_folder(parent, name) as folder:
            for entry in list_folder(folder):
                try:
                    if entry.is_dir(follow_symlinks=False):
                        count += remove_tree(entry.name, folder, depth - 1)
                    else:
                        count += unlink(entry.name, folder)
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure
        os.rmdir(name, dir_fd=parent)
    except NotADirectoryError:
        unlink(name, parent)
    except FileNotFoundError:
        pass
    return count


@contextmanager
def file_lock(parent: int, name: str, *, shared: bool = False, wait: float | None = None) -> Iterator[None]:
    """Hold an flock on a file of an open folder. It is opened anew each time, so it excludes other threads, too.

    Args:
        parent: descriptor of the folder.
        name: the lock file, which is created if it is missing.
        shared: take a shared lock, not an exclusive one.
        wait: seconds; default: `LOCK_SECONDS`.

    Raises:
        TimeoutError: somebody else held it for `wait` seconds.
    """
    file, _ = open_file(name, os.O_RDWR | os.O_CREAT, parent)
    try:
        wait = LOCK_SECONDS if wait is None else wait
        deadline, pause = time.monotonic() + wait, 0.0002
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Polling, because a process that was stopped while it holds the lock would block all others forever.
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another process has held {name} for {wait:g} s") from None
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        yield
    finally:
        # Unlock by name instead of by closing: a child that was forked meanwhile has the file open as well.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)
