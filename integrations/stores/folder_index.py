"""The size of a folder of entries, in one small file, and the thread that keeps the folder within its budget.

The lock file of the folder holds how many bytes and entries there are. Whoever renames or deletes an entry holds the
lock, for microseconds, and updates the figures, so a put knows whether it fits without looking at any other file.

**No put scans.** When 95 % of the budget are used, a thread of one process scans the folder without the lock, deletes
the least recently used entries until 90 % are used, and corrects the figures; it also deletes expired entries and what
dead writers left. A put that finds no room waits for that thread for a second, and is then given up.

The scan starts with what had been added by then. What was added meanwhile is counted in addition, even if the scan saw
it: until the next scan the figures may be too high, and never too low. A process that dies, or one that does not know
the index, leaves figures that are wrong by its last entries until the next scan.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass

from xxhash import xxh3_64_digest

from cuvee.integrations.stores.safe_files import (
    file_lock,
    is_abandoned,
    list_folder,
    open_folder,
    remove_tree,
    unlink,
    unlink_same,
)

_log = logging.getLogger(__name__)

LOCK = ".lock"
_FIGURES = struct.Struct("<4sqqq")
_MAGIC = b"cuvI"
# Shares of the budget: eviction begins above the first and ends at the second.
_FULL, _KEEP = 0.95, 0.90
_WAIT_SECONDS = 1.0  # that a put waits for room
_HEX = frozenset("0123456789abcdef")

# An entry in a scan: the time of its last use (ns), its bytes, its tenant and its name.
_Scanned = tuple[int, int, str, str]


@dataclass(slots=True)
class Figures:
    """What a folder holds.

    Attributes:
        bytes, entries: of all entries.
        added: bytes of all entries that were ever added.
    """

    bytes: int = 0
    entries: int = 0
    added: int = 0

    def add(self, size: int) -> None:
        """Count an entry that appears."""
        self.bytes += size
        self.entries += 1
        self.added += size

    def remove(self, size: int) -> None:
        """Count an entry that disappears."""
        self.bytes -= size
        self.entries -= 1


@contextmanager
def locked(root: int) -> Iterator[Figures | None]:
    """Hold the folder's lock, and write back its figures if the body changes them.

    Yields:
        The figures; None if nobody has counted yet, because no store with a budget has used the folder.

    Raises:
        TimeoutError: another process has held the lock for long. It is stopped, or debugged.
    """
    with file_lock(root, LOCK) as file:
        before = _parse(os.pread(file, 64, 0))
        figures = None if before is None else Figures(before.bytes, before.entries, before.added)
        try:
            yield figures
        finally:
            if figures is not None and figures != before:
                os.pwrite(file, _packed(figures), 0)


def _packed(figures: Figures) -> bytes:
    fields = _FIGURES.pack(_MAGIC, max(0, figures.bytes), max(0, figures.entries), figures.added)
    return fields + xxh3_64_digest(fields)


def _parse(data: bytes) -> Figures | None:
    fields = data[: _FIGURES.size]
    if len(fields) < _FIGURES.size or data[_FIGURES.size :] != xxh3_64_digest(fields):
        return None
    magic, *figures = _FIGURES.unpack(fields)
    return Figures(*figures) if magic == _MAGIC and min(figures) >= 0 else None


class FolderBudget:
    """Keeps a folder, which other processes may share, within its budget. Safe to call from several threads.

    Args:
        max_bytes: budget of the files; None means no limit.
        ttl: seconds that entries live after they were written; None means forever.
        opened: returns a context that yields the descriptor of the open folder.
        tolerate: `tolerate(entry)` is a context that tolerates and counts errors that concern only that entry.

    Attributes:
        evictions: entries deleted to stay within the budget.
        expired: entries deleted because of their age.
    """

    def __init__(
        self,
        max_bytes: int | None,
        ttl: float | None,
        opened: Callable[[], AbstractContextManager[int]],
        tolerate: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.max_bytes, self._ttl = max_bytes, ttl
        self._opened, self._tolerate = opened, tolerate
        self.evictions = self.expired = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Forget the thread, which only the parent has."""
        self._changed = threading.Condition()
        self._running = False
        self._wanted = 0  # bytes for which a put waits
        self._passes = 0  # scans that have ended
        self._scanned_at: float | None = None
        self._problem: OSError | None = None

    def fits(self, root: int, size: int) -> bool:
        """Return whether an entry of `size` bytes fits now, after waiting for room for a second.

        Raises:
            OSError: it does not, because the last scan failed.
        """
        if self.max_bytes is None:
            return True
        end = time.monotonic() + _WAIT_SECONDS
        while True:
            with locked(root) as figures:
                used = None if figures is None else figures.bytes + size
            if used is not None and used <= self.max_bytes:
                return True
            with self._changed:
                passes = self._passes
                self._start(size)
                while self._passes == passes and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)
                if self._problem is not None:
                    raise self._problem
                if time.monotonic() >= end:
                    return False

    def wait(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds for a scan in progress; return whether none is in progress."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout)

    def held(self) -> Figures | None:
        """Return what the folder holds; None if that is not known, or without a budget."""
        if self.max_bytes is None:
            return None
        with suppress(OSError), self._opened() as root, locked(root) as figures:
            return figures
        return None

    def grown(self, figures: Figures | None) -> None:
        """Scan in the background if that is due, now that the folder holds so much.

        It is due at first, because dead writers may have left files; when eviction is; and from time to time, because
        entries that nobody requests expire as well.
        """
        interval = math.inf if self._ttl is None else max(60.0, self._ttl / 10)
        full = figures is not None and self.max_bytes is not None and figures.bytes > _FULL * self.max_bytes
        if full or self._scanned_at is None or time.monotonic() - self._scanned_at > interval:
            self._start(0)

    def _start(self, wanted: int) -> None:
        """Start the thread unless it runs."""
        with self._changed:
            self._wanted = max(self._wanted, wanted)
            if self._running:
                return
            thread = threading.Thread(target=self._run, name="cuvee disk budget", daemon=True)
            with suppress(RuntimeError):  # the system, or the end of the process, may prevent it
                thread.start()
                self._running = True

    def _run(self) -> None:
        problem: OSError | None = None
        try:
            # One process at a time scans. The others wait for the room that it makes.
            with (
                suppress(FileNotFoundError),
                self._opened() as root,
                file_lock(root, ".evict", wait=_WAIT_SECONDS / 2),
            ):
                self._scan(root)
        except TimeoutError:
            pass
        except OSError as error:
            problem = error
        except Exception:  # a defect, which must not end all puts
            _log.exception("a folder's entries could not be counted")
        with self._changed:
            self._running = False
            self._wanted = 0
            self._scanned_at = time.monotonic()
            self._problem = problem
            self._passes += 1
            self._changed.notify_all()

    def _scan(self, root: int) -> None:
        """Count the entries, delete expired ones and then the least recently used, and correct the figures."""
        self._sweep(root)
        if self.max_bytes is None and self._ttl is None:
            return
        with locked(root) as figures:
            added = None if figures is None else figures.added
        now, found = time.time(), list[_Scanned]()
        with closing(self._files(root)) as files:
            for tenant, shard, file in files:
                with self._tolerate(f"{tenant}/{file.name}"):
                    info = file.stat(follow_symlinks=False)
                    if not stat.S_ISREG(info.st_mode):
                        continue
                    # An entry is never used before it is written, so this one was also written that long ago.
                    if self._ttl is not None and info.st_mtime < now - self._ttl:
                        with locked(root) as figures:
                            if unlink_same(file.name, info.st_mtime_ns, shard):
                                self.expired += 1
                                if figures is not None:
                                    figures.remove(info.st_size)
                                continue
                    found.append((info.st_mtime_ns, info.st_size, tenant, file.name))
        if self.max_bytes is not None:
            with file_lock(root, LOCK) as file_:
                before = _parse(os.pread(file_, 64, 0)) or Figures()
                new = before.added - (before.added if added is None else added)
                held = Figures(sum(size for _, size, _, _ in found) + new, len(found), before.added)
                os.pwrite(file_, _packed(held), 0)
            self._evict(root, found, held.bytes)

    def _evict(self, root: int, found: list[_Scanned], held: int) -> None:
        """Delete the least recently used entries until there is room."""
        if self.max_bytes is None:
            return
        keep = min(_KEEP * self.max_bytes, self.max_bytes - self._wanted)
        if held <= min(_FULL * self.max_bytes, self.max_bytes - self._wanted):
            return
        found.sort()
        # Without a put that waits, the entry that was used last stays, even if it is nearly as large as the budget.
        for used, size, tenant, name in found if self._wanted else found[:-1]:
            if held <= keep:
                break
            with (
                self._tolerate(f"{tenant}/{name}"),
                open_folder(root, tenant) as folder,
                open_folder(folder, name[:2]) as shard,
                locked(root) as figures,
            ):
                if figures is not None and unlink_same(name, used, shard):
                    figures.remove(size)
                    self.evictions += 1
                held = held if figures is None else figures.bytes

    def _sweep(self, root: int) -> None:
        """Remove temporary files of dead writers and the rest of deleted tenants."""
        for entry in list_folder(root):
            with self._tolerate(entry.name):
                if entry.name.startswith(".gone-"):
                    remove_tree(entry.name, root)
                elif entry.name.startswith(".tmp-") and is_abandoned(entry.name, root):
                    unlink(entry.name, root)

    def _files(self, root: int) -> Generator[tuple[str, int, os.DirEntry[str]], None, None]:
        """Yield the tenant, the open folder and the file of each entry, skip other files, and remove empty folders."""
        for tenant in [entry.name for entry in list_folder(root) if is_hex(entry.name, 64)]:
            with self._tolerate(tenant), open_folder(root, tenant) as folder:
                shards = [entry.name for entry in list_folder(folder) if is_hex(entry.name, 2)]
                for name in shards:
                    with self._tolerate(f"{tenant}/{name}"), open_folder(folder, name) as shard:
                        files = list_folder(shard)
                        for file in files:
                            if is_hex(file.name, 128) and file.name[:2] == name:
                                yield tenant, shard, file
                        if not files:
                            _remove_empty(root, name, folder)
                if not shards:
                    _remove_empty(root, tenant, root)


def _remove_empty(root: int, name: str, parent: int) -> None:
    # Puts create a folder and its first entry under the lock. A folder that is no longer empty stays.
    with suppress(OSError), locked(root):
        os.rmdir(name, dir_fd=parent)


def is_hex(name: str, longest: int) -> bool:
    """Return whether a name consists of 1 to `longest` lower-case hexadecimal digits."""
    return 0 < len(name) <= longest and _HEX.issuperset(name)
