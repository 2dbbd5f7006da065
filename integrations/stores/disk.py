"""Blobs in files of a folder that several processes may share.

    root/
      <tenant>/<id[:2]>/<id>   an entry: envelope and blob, complete from the moment it has this name
      .tmp-<random>            an entry that is being written
      .lock                    flock: held while an entry or a folder gets or loses its name; holds the folder's size
      .evict                   flock: one process at a time scans and evicts

**No link is followed** below the root. Every operation opens the root again, checks its owner and its mode, and
descends from there one folder at a time (`safe_files`), so that swapping a folder for a link meanwhile gains nothing.

**No put scans.** When 95% of the budget are used, a thread of one process scans the folder without the lock, and
deletes the least recently used entries until 90% are used; it also deletes expired entries and what dead writers left.
The modification time of an entry is the time of its last use. Its envelope holds the time when it was written.

**Damaged entries.** An entry that fails its checksum is deleted, and so is one that is no file but, say, a link or a
FIFO, or whose sectors are bad. Each is a miss, counted as `corrupt`. Any other error of a file is one of the store.

**Crashes.** `rename` gives an entry its name after all of its bytes are written. A killed process leaves complete
entries and at most one temporary file per writing thread. Nothing is synced, so a power failure may damage an entry;
its checksum reveals that.

**A disk that is full** before the budget is used, or a quota that is: the put is given up, and the budget becomes what
the folder holds, so the scan evicts 10% of it. Later scans make it what the folder holds and the disk has left.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice

from cuvee.codec.errors import InputError
from cuvee.codec.support.forks import tell_after_fork
from cuvee.integrations.stores import folder, safe_files
from cuvee.integrations.stores.base import check_max_bytes, is_record
from cuvee.integrations.stores.counted import CountedStore
from cuvee.integrations.stores.envelope import HEADER_BYTES, make_header
from cuvee.integrations.stores.safe_files import open_store_folder, temporary_file

# Shares of the budget: eviction begins above the first and ends at the second.
_FULL, _KEEP = 0.95, 0.90
# Seconds before the use of an entry is recorded again, which is also the error in the order of eviction. Recording it
# takes microseconds, and changes one inode, which Linux writes out about every 30 s.
_TOUCH_SECONDS = 10.0
# A temporary file that was not written to for this many seconds is removed. Its writer is dead, or its put fails.
_STALE_SECONDS = 600.0
# What writing says of a full disk.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# What reading says of a damaged file: a link or no regular file, or sectors that cannot be read.
_DAMAGED = (errno.ELOOP, errno.ENXIO, errno.EIO, errno.EUCLEAN, errno.EBADMSG)


class DiskStore(CountedStore):
    """Blobs in a folder, which the first put creates. Folders get mode 0700 and files 0600, because they hold prompts.

    Processes of one user may share a folder. Each process applies its own budget, so give all of them the same one. The
    file system must support flock and an atomic rename, as local file systems and NFSv4 do. The files of entries stay
    within the budget, apart from those that are being written. A put that finds no room is given up, and the next
    eviction makes room for one of its size. An entry may take 90% of the budget at most.

    A folder is refused if it is a link, if its owner is neither this user nor root, or if its group or others may write
    to it: they could replace the caches that a model continues from.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as parent:
        ...     store = DiskStore(f"{parent}/kv", ttl=3600)
        ...     store.put("ab/01", b"blob")
        ...     DiskStore(f"{parent}/kv").get("ab/01")  # as another process would
        ...     store.close()  # waits for its thread, which looks for expired entries
        True
        b'blob'

    Args:
        path: the folder. Missing parent folders are created as well (0755).
        max_bytes: budget of all files; None means no limit.
        ttl: seconds an entry lives after it was written; None means forever.

    Raises:
        InputError: an argument is out of range, or the folder exists and is not safe to use.
    """

    name = "disk"
    shared = True
    failures = OSError

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None = None, ttl: float | None = None) -> None:
        if not os.fspath(path):
            raise InputError("path: must name a folder, got an empty string")
        self.root = os.path.abspath(path)
        super().__init__(f"disk store {self.root}", ttl)
        check_max_bytes(max_bytes)
        self.max_bytes = max_bytes
        # An unsafe folder is refused here if it exists. Every operation checks again.
        with suppress(OSError):
            if problem := safe_files.objection(os.lstat(self.root), self.root):
                raise InputError(f"path: {problem}")
        self._scanner: threading.Thread | None = None
        self._scanned_at = -math.inf  # the first put scans, because dead writers may have left files
        self._interval = math.inf if ttl is None else max(60.0, ttl / 10)  # entries that nobody requests expire as well
        self._wanted = 0  # bytes for which a put found no room
        self._room: float = math.inf  # bytes of all files for which the disk has room; unknown until it is full
        self._disk_full = False  # since the last scan
        self._lost = False  # the folder's size is not known
        self._figures: folder.Figures | None = None  # what the folder held a moment ago
        self.after_fork()
        tell_after_fork(self)
        with suppress(OSError), self._opened_root():  # a folder that exists is counted from the start
            pass

    def after_fork(self) -> None:
        """See `Forked`: a file may be read while a lock is held, and no thread of the parent gives it back."""
        self._counting, self._noting, self._lock = (threading.Lock() for _ in range(3))

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        blobs: list[bytes | None] = [None] * len(keys)
        with suppress(FileNotFoundError), self._opened_root() as root:
            for at, key in enumerate(keys):
                with suppress(FileNotFoundError):
                    blobs[at] = self._blob(root, key)
        return blobs

    def _write(self, key: str, blob: bytes) -> bool:
        size = HEADER_BYTES + len(blob)
        if self.max_bytes is not None and size > int(_KEEP * self.max_bytes):
            return self._too_large(len(blob), int(_KEEP * self.max_bytes) - HEADER_BYTES)
        try:
            with self._opened_root(create=True) as root, temporary_file(root) as (name, file):
                safe_files.write_all(file, make_header(key, blob, time.time()))
                safe_files.write_all(file, blob)
                return self._name(root, name, key, size)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            text = "the disk is full before the budget is used, so old entries are deleted to make room: %s"
            self._warn("disk", text, error)
        self._disk_full, self._wanted = True, max(self._wanted, size)
        self._count(dropped=1)
        self._start_scan()
        return False

    def _there(self, keys: Sequence[str]) -> list[bool]:
        there = [False] * len(keys)
        with suppress(FileNotFoundError), self._opened_root() as root:
            for at, key in enumerate(keys):
                size = folder.size_of(root, key)
                there[at] = size is not None and 0 <= size - HEADER_BYTES <= self.max_entry
        return there

    def _remove(self, keys: Sequence[str]) -> int:
        with suppress(FileNotFoundError), self._opened_root() as root:
            return sum(folder.remove_entry(root, key) for key in keys)
        return 0

    def delete_tenant(self, tenant: str) -> int:
        """See `CountedStore.delete_tenant`. Its folder goes, too."""
        deleted = super().delete_tenant(tenant)
        self.attempt(self._remove_folder, tenant)
        return deleted

    def _remove_folder(self, tenant: str) -> None:
        with suppress(FileNotFoundError), self._opened_root() as root:
            folder.remove_empty(root, tenant)

    def _pages(self, tenant: str) -> Iterator[list[str]]:
        with suppress(FileNotFoundError), self._opened_root() as root:
            entries = folder.entries_of(root, tenant)
            while page := [key for key, _ in islice(entries, 1000)]:
                yield page

    def _held(self) -> tuple[int | None, int | None]:
        """Return the figures of all processes, as the last operation saw them; there are none without a budget."""
        figures = self._figures
        return (None, None) if figures is None else (figures.entries, figures.bytes)

    @contextmanager
    def _opened_root(self, create: bool = False) -> Iterator[int]:
        """Open the folder, and note what it holds afterwards: who asks for `counters` must not wait for a file."""
        with open_store_folder(self.root, create=create) as root:
            try:
                yield root
            finally:
                self._note(root)

    def _note(self, root: int) -> None:
        if self.max_bytes is not None:
            with suppress(OSError), self._noting:  # or a thread could put older figures in place of newer ones
                self._figures = folder.figures_of(root) or self._figures

    def count(self) -> tuple[int, int]:
        """Return the number and the bytes of all entries, found by looking at each; the folder is not changed.

        Raises:
            StoreError: there is no folder, or it cannot be read.
        """

        def found() -> list[int]:
            with open_store_folder(self.root) as root:
                each = (folder.entries_of(root, tenant) for tenant in folder.tenants_of(root))
                return [info.st_size for entries in each for _, info in entries]

        sizes = self.attempt(found)
        return len(sizes), sum(sizes)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for a scan in progress; return whether none is in progress."""
        scanner = self._scanner
        if scanner is not None:
            scanner.join(timeout)
        return scanner is None or not scanner.is_alive()

    def _blob(self, root: int, key: str) -> bytes | None:
        """Return the blob of an entry; None if it is damaged or expired, and then deleted."""
        try:
            with folder.open_shard(root, key) as (shard, name), safe_files.open_file(name, shard) as file:
                info = os.fstat(file)
                if info.st_size > HEADER_BYTES + self.max_entry:
                    self._beyond(key, self.max_entry)
                    return None
                header = os.read(file, HEADER_BYTES)
                payload = safe_files.read_exactly(file, info.st_size - len(header))
                # While it is open, no other file can have its inode: a good entry that replaced it stays.
                delete = partial(folder.remove_entry, root, key, (info.st_ino, info.st_mtime_ns))
                blob = self._verified(key, header, payload, delete)
                if blob is not None and abs(time.time() - info.st_mtime) >= _TOUCH_SECONDS:
                    self._touch(file)
                return blob
        except OSError as error:
            if error.errno == errno.ESTALE:  # on NFS: another host has deleted it
                return None
            if error.errno not in _DAMAGED:
                raise
            self._bad(key, error, partial(folder.remove_entry, root, key))
            return None

    def _touch(self, file: int) -> None:
        """Record that an entry was used."""
        try:
            os.utime(file)
        except OSError as error:
            text = "cannot note the use of entries; they will be evicted as if unused: %s"
            self._warn("not touched", text, error)

    def _name(self, root: int, temporary: str, key: str, size: int) -> bool:
        """Give an entry its name; False if there is no room."""
        # The lock is taken before the folders are opened or created, so that no deletion removes them meanwhile.
        with folder.locked(root) as figures:
            self._lost |= not figures.added and bool(folder.tenants_of(root))
            room = self._budget - figures.bytes
            fits = is_record(key) or size <= room or size <= room + (folder.size_of(root, key) or 0)
            if fits:
                with folder.open_shard(root, key, create=True) as (shard, name):
                    earlier = folder.size_in(shard, name)
                    os.replace(temporary, name, src_dir_fd=root, dst_dir_fd=shard)
                if not is_record(key):
                    if earlier is not None:
                        figures.remove(earlier)
                    figures.add(size)
            due = self._counts(figures) or time.monotonic() - self._scanned_at >= self._interval
        if not fits:
            self._wanted = max(self._wanted, size)
            self._count(dropped=1)
            self._warn("full", "is full, and old entries are not deleted as fast as new ones arrive")
        if due or not fits:
            self._start_scan()
        return fits

    def _counts(self, figures: folder.Figures) -> bool:
        """Return whether a scan has to count what is there, and maybe to evict."""
        if self._budget == math.inf:
            return self._disk_full
        return self._lost or self._disk_full or self._wanted > 0 or figures.bytes > _FULL * self._budget

    @property
    def _budget(self) -> float:
        """The bytes that all files may have now."""
        return min(self._room, math.inf if self.max_bytes is None else self.max_bytes)

    def _start_scan(self) -> None:
        """Scan in the background, unless a scan runs."""
        with self._lock:
            if self._scanner is None or not self._scanner.is_alive():
                scanner = threading.Thread(target=self._run, name="cuvee disk budget", daemon=True)
                with suppress(RuntimeError):  # the system, or the end of the process, prevents it
                    scanner.start()
                    self._scanner = scanner

    def _run(self) -> None:
        try:
            # One process at a time scans. What the others cannot store meanwhile is given up.
            quiet = suppress(FileNotFoundError, TimeoutError)
            with quiet, self._opened_root() as root, safe_files.file_lock(".evict", root, wait=0) as file:
                os.utime(file)  # the clock of all times of files here: with NFS, that of the server
                self._scan(root, os.fstat(file).st_mtime)
        except OSError as error:
            self._warn("scan", "cannot look for old entries: %s", error)
        finally:
            self._scanned_at = time.monotonic()

    def _scan(self, root: int, now: float) -> None:
        """Delete what dead writers left, expired entries, and the least recently used; correct the figures."""
        for name in os.listdir(root):
            if name.startswith(".tmp-"):
                with suppress(FileNotFoundError):
                    info = os.stat(name, dir_fd=root, follow_symlinks=False)
                    if now - info.st_mtime > _STALE_SECONDS:
                        os.unlink(name, dir_fd=root)
        with folder.locked(root) as figures:
            added, counts = figures.added, self._counts(figures)
        if not counts and self.ttl is None:
            return
        found: list[tuple[int, int, int, str]] = []  # by last use: ns, inode, bytes, key
        for tenant in folder.tenants_of(root):
            for key, info in folder.entries_of(root, tenant):
                # An entry is never used before it is written, so this one was also written that long ago.
                old = self.ttl is not None and info.st_mtime < now - self.ttl
                if old and folder.remove_entry(root, key, (info.st_ino, info.st_mtime_ns)):
                    self._count(expired=1)
                else:
                    found.append((info.st_mtime_ns, info.st_ino, info.st_size, key))
        if not counts:
            return
        self._lost = False
        # What is put during a scan may be counted twice, until the next one.
        held = folder.recount(root, sum(size for _, _, size, _ in found), len(found), added)
        disk = os.fstatvfs(root)
        if self._disk_full:
            self._disk_full, self._room = False, held
        elif self._room < math.inf:
            self._room = held + disk.f_bavail * disk.f_frsize
        budget, wanted, self._wanted = self._budget, self._wanted, 0
        room = budget - (wanted if wanted <= _KEEP * budget else 0)  # or all entries would go in vain
        if held > min(_FULL * budget, room):
            for used, inode, size, key in sorted(found):
                if held <= min(_KEEP * budget, room):
                    break
                if folder.remove_entry(root, key, (inode, used)):
                    self._count(evictions=1)
                    held -= size
