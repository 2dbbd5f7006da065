"""Blobs as files, for several processes at once; without an index: the file system is the truth.

    root/
      <tenant>/<id[:2]>/<id>   an entry: envelope and blob, complete from the moment it has this name
      .tmp-<random>            an entry that is being written; its writer holds an flock on it
      .gone-<random>/          a deleted tenant on its way out
      .lock                    flock: shared while an entry takes its name; exclusive while a bad entry, an empty folder
                               or a tenant goes
      .evict                   flock: one process at a time scans and evicts

An entry's modification time says when it was last used, its envelope when it was written.

**Crashes.** An entry gets its name by `rename` once all its bytes are written: a killed process leaves whole entries
and at most a temporary file. Nothing is synced: after a power failure an entry may be damaged; its checksum tells.

**Temporary files of the dead** hold no flock (the kernel drops it with the process, so neither pid reuse nor containers
matter). One is removed if, besides, nobody wrote to it for a minute: a writer creates the file just before it locks it.

**The budget** counts file sizes. A process knows what its last scan saw and what it has written since; before a put it
scans if that would pass the budget, or if it wrote 2 % of the budget since its last scan, and evicts down to 95 %. One
process alone keeps within the budget; each further one may add 2 %, or the entries it is writing if that is more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from cuvee.codec.errors import CorruptError, InputError
from cuvee.integrations.stores.base import Store, StoreError, TierCounters, check_key, check_tenant
from cuvee.integrations.stores.envelope import HEADER_BYTES, Expired, make_header, parse_header

_log = logging.getLogger(__name__)

# Seconds between two notes of an entry's use: how wrong the order of eviction may be. A note costs microseconds and one
# inode to write out, which Linux does every 30 s or so: to note less often saves few writes. A budget that turns over
# within 10 s, where the order would be that of writing, is a few gigabytes in RAM under full load.
_TOUCH_SECONDS = 10.0
# Seconds after which a temporary file that nobody holds is a dead writer's.
_STALE_SECONDS = 60.0
# Shares of the budget.
_RESCAN = 0.02
_KEEP = 0.95
# Seconds to wait for a lock of another process; both are held for as long as a scan at most.
_LOCK_SECONDS = 30.0
_HEX = frozenset("0123456789abcdef")


class DiskStore(Store):
    """Blobs in a folder, which it creates at the first put; folders are made 0700 and files 0600: they hold prompts.

    Processes of one user may share a folder; each keeps to its own budget, so give all of them the same. The file
    system must have flock and an atomic rename (local ones and NFSv4 do).

    Args:
        path: the folder; its parent folders are created too.
        max_bytes: budget of the files; None for none.
        ttl: seconds an entry lives after it was written; None for ever.
    """

    name = "disk"
    shared = True

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None = None, ttl: float | None = None) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise InputError(f"max_bytes: must be a positive number of bytes, got {max_bytes!r}")
        if ttl is not None and not ttl > 0:
            raise InputError(f"ttl: must be above 0 seconds, got {ttl!r}")
        if not os.fspath(path):
            raise InputError("path: must name a folder, got an empty one")
        self.root = os.path.abspath(path)
        self.max_bytes = max_bytes
        self.ttl = ttl
        self._lock = threading.Lock()
        self._counters = TierCounters()
        self._warned: set[str] = set()
        self._prepared = False
        # Bytes of puts that began, and of those that ended, since the store was opened.
        self._begun = 0
        self._ended = 0
        # `_begun` plus this is what the folder holds, as far as this process knows; None before the first scan.
        self._base: int | None = None
        self._entries = 0
        # `_ended` and the clock at the last scan.
        self._scanned_at = 0
        self._scan_time = 0.0

    # --- the protocol ---

    def get(self, key: str) -> bytes | None:
        """The blob of `key`, checked; None if it is not there, was bad (and is deleted) or has expired (likewise).

        Raises:
            StoreError: the file could not be read.
        """
        path = self._path(*check_key(key))
        with self._errors():
            blob = self._read(path, key)
        with self._lock:
            self._counters.answer(blob)
        return blob

    def put(self, key: str, blob: bytes) -> bool:
        """Write an entry; False if it is larger than the budget.

        Raises:
            StoreError: it could not be written (disk full, folder missing or read-only): what was there stays.
        """
        tenant, name = check_key(key)
        size = HEADER_BYTES + len(blob)
        if self.max_bytes is not None and size > self.max_bytes:
            with self._lock:
                self._counters.dropped += 1
            return False
        with self._errors():
            self._prepare()
            with self._lock:
                self._begun += size
            try:
                self._make_room()
                self._write(tenant, name, make_header(key, blob, time.time()), blob)
            finally:
                with self._lock:
                    self._ended += size
        with self._lock:
            self._entries += 1
            self._counters.puts += 1
            self._counters.put_bytes += len(blob)
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key has a file now; with a `ttl`, whether that has not expired (reads its header)."""
        paths = [self._path(*check_key(key)) for key in keys]
        with self._errors():
            return [self._present(path) for path in paths]

    def delete(self, key: str) -> bool:
        """Delete an entry; whether it was there."""
        path = self._path(*check_key(key))
        with self._errors():
            return _unlink(path)

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant: at once for readers, whatever is put meanwhile stays."""
        folder = os.path.join(self.root, check_tenant(tenant))
        gone = os.path.join(self.root, ".gone-" + secrets.token_hex(8))
        with self._errors():
            try:
                # No entry takes a name meanwhile: none lands in the folder on its way out.
                with self._flock(".lock"):
                    os.rename(folder, gone)
            except FileNotFoundError:
                return 0
            return _remove_tree(gone)

    def counters(self) -> dict[str, TierCounters]:
        """A snapshot; `entries` and `bytes` are the last scan's and this process's puts since; None before a scan."""
        with self._lock:
            if self._base is None:
                return {self.name: replace(self._counters)}
            return {self.name: replace(self._counters, entries=self._entries, bytes=self._base + self._begun)}

    # --- files ---

    def _path(self, tenant: str, name: str) -> str:
        return f"{self.root}/{tenant}/{name[:2]}/{name}"

    def _read(self, path: str, key: str) -> bytes | None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            info = os.fstat(file)
            try:
                header = parse_header(os.read(file, HEADER_BYTES))
                header.check(key, self.ttl)
                # Before the length is believed: it decides how much memory is taken.
                if info.st_size != HEADER_BYTES + header.length:
                    raise CorruptError(f"entry: {info.st_size} bytes, its header says {HEADER_BYTES + header.length}")
                blob = _read_exactly(file, header.length)
                header.check_payload(blob)
            except (CorruptError, Expired) as error:
                self._discard(path, info, error)
                return None
            self._touch(file, info)
            return blob
        finally:
            os.close(file)

    def _touch(self, file: int, info: os.stat_result) -> None:
        if abs(time.time() - info.st_mtime) < _TOUCH_SECONDS:
            return
        try:
            os.utime(file)
        except OSError as error:
            self._warn("touch", "cannot note the use of entries, which are evicted as if unused: %s", error)

    def _discard(self, path: str, info: os.stat_result, error: Exception) -> None:
        """Delete a bad entry: the inode of `info`, which the caller holds open, so that no other file can have it."""
        with self._lock:
            if isinstance(error, Expired):
                self._counters.expired += 1
            else:
                self._counters.corrupt += 1
        if isinstance(error, CorruptError):
            self._warn("corrupt", "deletes bad entries and counts them as misses; the first: %s", f"{path}: {error}")
        try:
            # No entry takes a name while this is held: a good one that just replaced the bad one is left alone.
            with self._flock(".lock"), suppress(FileNotFoundError):
                now = os.stat(path)
                if (now.st_dev, now.st_ino) == (info.st_dev, info.st_ino):
                    os.unlink(path)
        except OSError as failure:
            self._warn("discard", "cannot delete a bad entry, which stays a miss: %s", failure)

    def _write(self, tenant: str, name: str, header: bytes, blob: bytes) -> None:
        temporary = os.path.join(self.root, ".tmp-" + secrets.token_hex(8))
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(file, header)
            _write_all(file, blob)
            with self._flock(".lock", shared=True):
                self._rename(temporary, tenant, name)
        except BaseException:
            _unlink(temporary)
            raise
        finally:
            os.close(file)

    def _rename(self, temporary: str, tenant: str, name: str) -> None:
        path = self._path(tenant, name)
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            # The first of its folder.
            for folder in (os.path.join(self.root, tenant), os.path.dirname(path)):
                with suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
            os.replace(temporary, path)

    def _present(self, path: str) -> bool:
        try:
            if self.ttl is None:
                return os.stat(path).st_size >= HEADER_BYTES
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not parse_header(os.read(file, HEADER_BYTES)).expired(self.ttl)
        except CorruptError:
            return False
        finally:
            os.close(file)

    def _prepare(self) -> None:
        """Create the folder, and remove what the dead left in it, once."""
        if self._prepared:
            return
        with suppress(FileExistsError):
            os.makedirs(self.root, mode=0o700)
        self._sweep()
        self._prepared = True

    def _sweep(self) -> None:
        """Remove temporary files of dead writers, and what is left of deleted tenants."""
        for entry in _scandir(self.root):
            if entry.name.startswith(".gone-"):
                _remove_tree(entry.path)
            elif entry.name.startswith(".tmp-"):
                with suppress(FileNotFoundError, BlockingIOError):
                    if abs(time.time() - entry.stat().st_mtime) < _STALE_SECONDS:
                        continue
                    file = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC)
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(entry.path)
                    finally:
                        os.close(file)

    # --- the budget ---

    def _due(self) -> bool:
        with self._lock:
            if self.max_bytes is None and self.ttl is None:
                return False
            if self._base is None:
                return True
            # Entries that nobody asks for any more expire too.
            if self.ttl is not None and time.monotonic() - self._scan_time > max(60.0, self.ttl / 10):
                return True
            return self.max_bytes is not None and (
                self._base + self._begun > self.max_bytes or self._begun - self._scanned_at > _RESCAN * self.max_bytes
            )

    def _make_room(self) -> None:
        if self._due():
            # Whoever is due waits, also for the scan of another process: not to would let it write unseen for as long.
            with self._flock(".evict"):
                # Another thread may have done it meanwhile.
                if self._due():
                    self._scan()

    def _scan(self) -> None:
        with self._lock:
            ended = self._ended
        self._sweep()
        oldest = None if self.ttl is None else time.time() - self.ttl
        found: list[tuple[int, int, str]] = []
        total = expired = evicted = 0
        for path in self._paths():
            with suppress(FileNotFoundError):
                info = os.stat(path)
                # The last use is never before the write.
                if oldest is not None and info.st_mtime < oldest and _unlink_same(path, info.st_mtime_ns):
                    expired += 1
                    continue
                found.append((info.st_mtime_ns, info.st_size, path))
                total += info.st_size
        count = len(found)
        with self._lock:
            under_way = self._begun - ended
        if self.max_bytes is not None and total + under_way > self.max_bytes:
            found.sort()
            for used, size, path in found:
                if total + under_way <= _KEEP * self.max_bytes:
                    break
                deleted = _unlink_same(path, used)
                if deleted is not False:
                    total -= size
                    count -= 1
                evicted += deleted is True
        with self._lock:
            # What ended before the scan is in `total`; what did not may be counted twice, until the next scan.
            self._base = total - ended
            self._scanned_at = ended
            self._scan_time = time.monotonic()
            self._entries = count
            self._counters.expired += expired
            self._counters.evictions += evicted

    def _paths(self) -> Iterator[str]:
        """Paths of entries, and of nothing else that somebody may keep in the folder; removes empty folders."""
        for tenant in _scandir(self.root):
            if _is_hex(tenant.name, 64) and tenant.is_dir(follow_symlinks=False):
                shards = _scandir(tenant.path)
                for shard in shards:
                    if _is_hex(shard.name, 2) and shard.is_dir(follow_symlinks=False):
                        files = _scandir(shard.path)
                        for file in files:
                            if _is_hex(file.name, 128) and file.name[:2] == shard.name:
                                yield file.path
                        if not files:
                            self._remove_empty(shard.path)
                if not shards:
                    self._remove_empty(tenant.path)

    def _remove_empty(self, folder: str) -> None:
        # Locked: not between the creation of a folder and its first entry. If it is not empty any more, or somebody is
        # busy, it stays.
        with suppress(OSError), self._flock(".lock", wait=0):
            os.rmdir(folder)

    # --- locks and errors ---

    @contextmanager
    def _flock(self, name: str, *, shared: bool = False, wait: float | None = None) -> Iterator[None]:
        """Hold a lock file; opened anew each time, so that it excludes the other threads too.

        Raises:
            TimeoutError: somebody else held it for `wait` seconds (default `_LOCK_SECONDS`).
        """
        file = os.open(os.path.join(self.root, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            wait = _LOCK_SECONDS if wait is None else wait
            deadline, pause = time.monotonic() + wait, 0.0002
            while True:
                try:
                    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    # Not a blocking flock: a process that was stopped while it held the lock would stop all others.
                    if time.monotonic() >= deadline:
                        raise TimeoutError(f"another process has held {name} for {wait:g} s") from None
                    time.sleep(pause)
                    pause = min(2 * pause, 0.02)
            yield
        finally:
            # By name, not by closing: a child that was forked meanwhile has the lock open as well.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with self._lock:
                self._counters.errors += 1
                # The folder may have been removed: make it again at the next put.
                self._prepared = False
            raise StoreError(f"disk store {self.root}: {error}") from error

    def _warn(self, kind: str, message: str, detail: object) -> None:
        with self._lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        _log.warning("disk store %s: " + message, self.root, detail)


def _read_exactly(file: int, length: int) -> bytes:
    # One read of the whole is the rule and makes no copy; the kernel reads at most 2 GiB at a time.
    parts = [os.read(file, length)]
    missing = length - len(parts[0])
    while missing and parts[-1]:
        parts.append(os.read(file, missing))
        missing -= len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _unlink_same(path: str, used: int) -> bool | None:
    """Delete a file unless it was used or replaced since `used` (its modification time then, ns); None: it was gone."""
    try:
        if os.stat(path).st_mtime_ns != used:
            return False
        os.unlink(path)
    except FileNotFoundError:
        return None
    return True


def _scandir(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_hex(name: str, longest: int) -> bool:
    return 0 < len(name) <= longest and _HEX.issuperset(name)


def _remove_tree(folder: str) -> int:
    """Delete a folder; how many files were in it. Another process may be at it too."""
    count = 0
    for parent, _, names in os.walk(folder, topdown=False):
        count += sum(_unlink(os.path.join(parent, name)) for name in names)
        with suppress(FileNotFoundError):
            os.rmdir(parent)
    return count
