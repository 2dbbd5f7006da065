"""Blobs as files, for several processes at once; without an index: the file system is the truth.

    root/
      <tenant>/<id[:2]>/<id>   an entry: envelope and blob, complete from the moment it has this name
      .tmp-<random>            an entry that is being written; its writer holds an flock on it
      .gone-<random>/          a deleted tenant on its way out
      .lock                    flock: shared while an entry takes its name; exclusive while a bad entry, an empty folder
                               or a tenant goes
      .evict                   flock: one process at a time scans and evicts

**No link is followed** below the root. Every operation opens the root anew, looks whose it is and who may write to it,
and goes on from there folder by folder (`openat` with `O_NOFOLLOW`): whoever swaps a folder for a link meanwhile gains
nothing, and a link that lies in the store already is removed or refused, never what it points to.

An entry's modification time says when it was last used, its envelope when it was written.

**An odd entry** (a folder, a FIFO or a socket in its place, one that may not be read, a bad sector) is a miss, logged
once and counted; scans and sweeps go on with the rest.

**Crashes.** An entry gets its name by `rename` once all its bytes are written: a killed process leaves whole entries
and at most a temporary file. Nothing is synced: after a power failure an entry may be damaged; its checksum tells.

**Temporary files of the dead** hold no flock (the kernel drops it with the process, so neither pid reuse nor containers
matter). One is removed if, besides, nobody wrote to it for a minute: a writer creates the file just before it locks it.

**A tenant's budget** is kept likewise, by scans of the tenant's folder alone and at the expense of its own entries.

**The budget** counts file sizes. A process knows what its last scan saw and what it has written since; before a put it
scans if that would pass the budget, or if it wrote 2 % of the budget since its last scan, and evicts down to 95 %. One
process alone keeps within the budget; each further one may add 2 %, or the entries it is writing if that is more.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from cuvee.codec.errors import CorruptError, InputError
from cuvee.integrations.stores.base import (
    BAD_SECTORS,
    MAX_ENTRY_BYTES,
    ODD_ENTRY,
    Store,
    StoreError,
    TierCounters,
    check_key,
    check_max_entry,
    check_max_tenant,
    check_tenant,
)
from cuvee.integrations.stores.envelope import HEADER_BYTES, Expired, make_header, parse_header
from cuvee.integrations.stores.forks import tell_after_fork

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
# Entries with bad sectors, none read well in between, that are a disk that fails.
_BAD_ENTRIES = 8
# Seconds to wait for a lock of another process; both are held for as long as a scan at most.
_LOCK_SECONDS = 30.0
_HEX = frozenset("0123456789abcdef")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# Not to wait: opening a FIFO that nobody writes to, which may lie in the place of a file, would never return.
_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Folders in folders that are deleted: ours are two deep, and each takes a descriptor meanwhile.
_DEPTH = 32
# Links that may lead to the root, one after the other: as many as Linux follows.
_LINKS = 40


# An entry as a scan saw it: when it was last used (ns), its bytes, its tenant and its name.
_Seen = tuple[int, int, str, str]


@dataclass(slots=True)
class _Book:
    """What one process knows of the bytes of all entries, or of a tenant's.

    Attributes:
        begun, ended: bytes of puts that began, and of those that ended, since the store was opened.
        base: `begun` plus this is what the folder holds, as far as this process knows; None before the first scan.
        scanned_at: `ended` at the last scan.
        entries: the last scan's, and puts since.
    """

    begun: int = 0
    ended: int = 0
    base: int | None = None
    scanned_at: int = 0
    entries: int = 0

    def due(self, limit: int) -> bool:
        """Whether a put that has begun has to look, and perhaps to make room, first."""
        return self.base is None or self.base + self.begun > limit or self.begun - self.scanned_at > _RESCAN * limit

    def saw(self, entries: Sequence[_Seen], ended: int) -> None:
        """Take in a scan that began when `ended` bytes had been put."""
        # What ended before the scan is in its sum; what did not may be counted twice, until the next scan.
        self.base = sum(size for _, size, _, _ in entries) - ended
        self.scanned_at = ended
        self.entries = len(entries)


class DiskStore(Store):
    """Blobs in a folder, which it creates at the first put; folders are made 0700 and files 0600: they hold prompts.

    Processes of one user may share a folder; each keeps to its own budget, so give all of them the same. The file
    system must have flock and an atomic rename (local ones and NFSv4 do).

    A folder of another user than us or root, or that group or others may write to, is refused: they could swap what a
    model continues from. So is a link to it that another user made.

    Args:
        path: the folder; its parent folders are created too (0755).
        max_bytes: budget of the files; None for none.
        ttl: seconds an entry lives after it was written; None for ever.
        max_entry: bytes of a blob; larger ones are neither kept nor read.
        max_tenant_bytes: budget of each tenant's files; what exceeds it goes at that tenant's expense. None for none.

    Raises:
        InputError: an argument is out of range, or the folder is there and not safe to use.
    """

    name = "disk"
    shared = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int | None = None,
        ttl: float | None = None,
        *,
        max_entry: int = MAX_ENTRY_BYTES,
        max_tenant_bytes: int | None = None,
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise InputError(f"max_bytes: must be a positive number of bytes, got {max_bytes!r}")
        if ttl is not None and not ttl > 0:
            raise InputError(f"ttl: must be above 0 seconds, got {ttl!r}")
        if not os.fspath(path):
            raise InputError("path: must name a folder, got an empty one")
        self.root = os.path.abspath(path)
        # Said at the start where that is possible; every operation looks again.
        with suppress(OSError):
            for look in (os.lstat, os.stat):
                if objection := _objection(look(self.root), self.root):
                    raise InputError(objection)
        self.max_bytes = max_bytes
        self.ttl = ttl
        self.max_entry = check_max_entry(max_entry)
        self.max_tenant_bytes = check_max_tenant(max_tenant_bytes, max_bytes)
        self._lock = threading.Lock()
        self._counters = TierCounters()
        self._warned: set[str] = set()
        # Entries that could not be read for bad sectors since one could.
        self._unreadable: set[str] = set()
        self._prepared = False
        self._book = _Book()
        # With a budget of their own: those that put something, and whose books the last scan has not closed.
        self._tenants: dict[str, _Book] = {}
        # The clock at the last scan.
        self._scan_time = 0.0
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Look anew what the folder holds: puts that were under way are the parent's."""
        self._lock = threading.Lock()
        self._book, self._tenants = _Book(), {}

    # --- the protocol ---

    def get(self, key: str) -> bytes | None:
        """The blob of `key`, checked; None if it is not there, was bad (and is deleted) or has expired (likewise).

        Raises:
            StoreError: the store could not be read.
        """
        tenant, name = check_key(key)
        blob = None
        with self._errors(), suppress(FileNotFoundError), self._opened() as root, self._odd(key):
            blob = self._read(root, tenant, name, key)
        with self._lock:
            self._counters.answer(blob)
            if blob is not None:
                self._unreadable.clear()
        return blob

    def put(self, key: str, blob: bytes) -> bool:
        """Write an entry; False if it is larger than the budget or `max_entry`, or something else holds its place.

        Raises:
            StoreError: it could not be written (disk full, folder missing, read-only or not ours alone): what was there
                stays.
        """
        tenant, name = check_key(key)
        size = HEADER_BYTES + len(blob)
        budgets = [limit for limit in (self.max_bytes, self.max_tenant_bytes) if limit is not None]
        if len(blob) > self.max_entry or any(size > limit for limit in budgets):
            with self._lock:
                self._counters.dropped += 1
            if len(blob) > self.max_entry:
                limit = f"{len(blob)} bytes, max_entry_mb allows {self.max_entry}"
                self._warn("large", "drops entries that are too large; the first has %s", limit)
            return False
        with self._errors(), self._opened(create=True) as root:
            with self._lock:
                books = [self._book]
                if self.max_tenant_bytes is not None:
                    books.append(self._tenants.setdefault(tenant, _Book()))
                for book in books:
                    book.begun += size
            try:
                self._make_room(root, tenant)
                written = self._write(root, tenant, name, make_header(key, blob, time.time()), blob)
            finally:
                with self._lock:
                    for book in books:
                        book.ended += size
        if not written:
            return False
        with self._lock:
            for book in books:
                book.entries += 1
            self._counters.puts += 1
            self._counters.put_bytes += len(blob)
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key has a file now; with a `ttl`, whether that has not expired (reads its header)."""
        wanted = [check_key(key) for key in keys]
        there = [False] * len(wanted)
        with self._errors(), suppress(FileNotFoundError), self._opened() as root, ExitStack() as tenants:
            folders: dict[str, int | None] = {}
            for at, (tenant, name) in enumerate(wanted):
                if tenant not in folders:
                    folders[tenant] = None
                    with self._odd(tenant):
                        folders[tenant] = tenants.enter_context(_folder(root, tenant))
                if (folder := folders[tenant]) is not None:
                    with self._odd(f"{tenant}/{name}"):
                        there[at] = self._present(folder, name)
        return there

    def delete(self, key: str) -> bool:
        """Delete an entry; whether it was there."""
        tenant, name = check_key(key)
        with (
            self._errors(),
            suppress(FileNotFoundError),
            self._opened() as root,
            self._odd(key),
            _folder(root, tenant) as folder,
            _folder(folder, name[:2]) as shard,
        ):
            return _unlink(name, shard)
        return False

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant: at once for readers, whatever is put meanwhile stays.

        Raises:
            StoreError: some are left; the others are gone.
        """
        folder, gone = check_tenant(tenant), ".gone-" + secrets.token_hex(8)
        with self._errors(), suppress(FileNotFoundError), self._opened() as root:
            # No entry takes a name meanwhile: none lands in the folder on its way out.
            with self._flock(root, ".lock"):
                os.rename(folder, gone, src_dir_fd=root, dst_dir_fd=root)
            return _remove_tree(gone, root)
        return 0

    def counters(self) -> dict[str, TierCounters]:
        """A snapshot; `entries` and `bytes` are the last scan's and this process's puts since; None before a scan."""
        with self._lock:
            book = self._book
            if book.base is None:
                return {self.name: replace(self._counters)}
            return {self.name: replace(self._counters, entries=book.entries, bytes=book.base + book.begun)}

    # --- files ---

    @contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[int]:
        """A descriptor of the root, which is safe to use.

        Args:
            create: if it is not there, make it; and remove, once, what the dead left in it.

        Raises:
            FileNotFoundError: it is not there.
            PermissionError: it is not ours alone; the message says what to do.
        """
        prepare = create and not self._prepared
        if prepare:
            _make_folder(self.root, 0o700)
        root = _open_root(self.root)
        try:
            if objection := _objection(os.fstat(root), self.root):
                raise PermissionError(objection)
            if prepare:
                self._sweep(root)
                self._prepared = True
            yield root
        finally:
            os.close(root)

    def _read(self, root: int, tenant: str, name: str, key: str) -> bytes | None:
        with _folder(root, tenant) as folder, _folder(folder, name[:2]) as shard:
            file, info = _open_file(name, os.O_RDONLY, shard)
            try:
                if info.st_size > HEADER_BYTES + self.max_entry:
                    raise OSError(errno.EFBIG, f"{info.st_size} bytes are more than max_entry_mb allows", name)
                try:
                    header = parse_header(os.read(file, HEADER_BYTES))
                    header.check(key, self.ttl)
                    # Before the length is believed: it decides how much memory is taken.
                    if info.st_size != HEADER_BYTES + header.length:
                        raise CorruptError(
                            f"entry: {info.st_size} bytes, its header says {HEADER_BYTES + header.length}"
                        )
                    blob = _read_exactly(file, header.length)
                    header.check_payload(blob)
                except (CorruptError, Expired) as error:
                    self._discard(root, shard, key, info, error)
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

    def _discard(self, root: int, shard: int, key: str, info: os.stat_result, error: Exception) -> None:
        """Delete a bad entry: the inode of `info`, which the caller holds open, so that no other file can have it."""
        with self._lock:
            if isinstance(error, Expired):
                self._counters.expired += 1
            else:
                self._counters.corrupt += 1
        if isinstance(error, CorruptError):
            self._warn("corrupt", "deletes bad entries and counts them as misses; the first: %s", f"{key}: {error}")
        name = check_key(key)[1]
        try:
            # No entry takes a name while this is held: a good one that just replaced the bad one is left alone.
            with self._flock(root, ".lock"), suppress(FileNotFoundError):
                now = os.stat(name, dir_fd=shard, follow_symlinks=False)
                if (now.st_dev, now.st_ino) == (info.st_dev, info.st_ino):
                    os.unlink(name, dir_fd=shard)
        except OSError as failure:
            self._warn("discard", "cannot delete a bad entry, which stays a miss: %s", failure)

    def _write(self, root: int, tenant: str, name: str, header: bytes, blob: bytes) -> bool:
        """Whether the entry could take its place, which something odd may hold."""
        temporary, written = ".tmp-" + secrets.token_hex(8), False
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=root)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(file, header)
            _write_all(file, blob)
            # Held from before the folders are opened or made: until the entry is in them, no scan removes them.
            with (
                self._flock(root, ".lock", shared=True),
                self._odd(f"{tenant}/{name}", writing=True),
                _folder(root, tenant, create=True) as folder,
                _folder(folder, name[:2], create=True) as shard,
            ):
                os.replace(temporary, name, src_dir_fd=root, dst_dir_fd=shard)
                written = True
            if not written:
                _unlink(temporary, root)
            return written
        except BaseException:
            _unlink(temporary, root)
            raise
        finally:
            os.close(file)

    def _present(self, folder: int, name: str) -> bool:
        """Whether the tenant of `folder` has an entry of this name."""
        try:
            with _folder(folder, name[:2]) as shard:
                if self.ttl is None:
                    info = os.stat(name, dir_fd=shard, follow_symlinks=False)
                    return stat.S_ISREG(info.st_mode) and 0 <= info.st_size - HEADER_BYTES <= self.max_entry
                file, info = _open_file(name, os.O_RDONLY, shard)
        except FileNotFoundError:
            return False
        try:
            # One that is too large is not there: a smaller one may take its place.
            small = info.st_size - HEADER_BYTES <= self.max_entry
            return small and not parse_header(os.read(file, HEADER_BYTES)).expired(self.ttl)
        except CorruptError:
            return False
        finally:
            os.close(file)

    def _sweep(self, root: int) -> None:
        """Remove temporary files of dead writers, and what is left of deleted tenants."""
        for entry in _scandir(root):
            if entry.name.startswith(".gone-"):
                with self._odd(entry.name):
                    _remove_tree(entry.name, root)
            elif entry.name.startswith(".tmp-"):
                with self._odd(entry.name), suppress(BlockingIOError):
                    info = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(info.st_mode) or abs(time.time() - info.st_mtime) < _STALE_SECONDS:
                        continue
                    file, _ = _open_file(entry.name, os.O_RDWR, root)
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(entry.name, dir_fd=root)
                    finally:
                        os.close(file)

    # --- the budget ---

    def _due(self) -> bool:
        with self._lock:
            if self.max_bytes is None and self.ttl is None:
                return False
            if self._book.base is None:
                return True
            # Entries that nobody asks for any more expire too.
            if self.ttl is not None and time.monotonic() - self._scan_time > max(60.0, self.ttl / 10):
                return True
            return self.max_bytes is not None and self._book.due(self.max_bytes)

    def _tenant_due(self, tenant: str) -> bool:
        with self._lock:
            return self.max_tenant_bytes is not None and self._tenants[tenant].due(self.max_tenant_bytes)

    def _make_room(self, root: int, tenant: str) -> None:
        if not self._due() and not self._tenant_due(tenant):
            return
        # Whoever is due waits, also for the scan of another process: not to would let it write unseen for as long.
        with self._flock(root, ".evict"):
            # Another thread may have done it meanwhile. The tenant first: others shall not go for what is its own.
            if self._tenant_due(tenant):
                self._scan(root, tenant)
            if self._due():
                self._scan(root)

    def _scan(self, root: int, only: str | None = None) -> None:
        """Count what is there, of `only` one tenant or of all, and delete what has expired or exceeds a budget."""
        with self._lock:
            ended = self._book.ended
            tenants_ended = {tenant: book.ended for tenant, book in self._tenants.items()}
        if only is None:
            self._sweep(root)
        oldest = None if self.ttl is None else time.time() - self.ttl
        found: dict[str, list[_Seen]] = {}
        gone = expired = 0
        for tenant, shard, entries in self._shards(root, only):
            for entry in entries:
                with self._odd(f"{tenant}/{entry.name}"):
                    info = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(info.st_mode):
                        continue
                    # The last use is never before the write.
                    if (
                        oldest is not None
                        and info.st_mtime < oldest
                        and _unlink_same(entry.name, info.st_mtime_ns, shard)
                    ):
                        expired += 1
                        gone += info.st_size
                        continue
                    found.setdefault(tenant, []).append((info.st_mtime_ns, info.st_size, tenant, entry.name))
        with self._lock:
            under_way = self._book.begun - ended
            tenants_under_way = {
                tenant: book.begun - tenants_ended.get(tenant, 0) for tenant, book in self._tenants.items()
            }
        before = sum(map(len, found.values()))
        stuck: OSError | None = None
        for tenant, own in found.items():
            if self.max_tenant_bytes is not None:
                freed, failure = self._evict(root, own, tenants_under_way.get(tenant, 0), self.max_tenant_bytes)
                gone, stuck = gone + freed, failure or stuck
        rest = [seen for own in found.values() for seen in own]
        if only is None and self.max_bytes is not None:
            _, failure = self._evict(root, rest, under_way, self.max_bytes)
            stuck = failure or stuck
        with self._lock:
            self._counters.expired += expired
            if only is None:
                self._book.saw(rest, ended)
                self._scan_time = time.monotonic()
            elif self._book.base is not None:
                self._book.base -= gone
                self._book.entries -= before - len(rest) + expired
            left: dict[str, list[_Seen]] = {}
            for seen in rest:
                left.setdefault(seen[2], []).append(seen)
            for tenant in list(self._tenants) if only is None else [only]:
                book = self._tenants[tenant]
                if only is None and tenant not in left and book.begun == book.ended:
                    del self._tenants[tenant]
                else:
                    book.saw(left.get(tenant, []), tenants_ended.get(tenant, 0))
        if stuck is not None:
            raise stuck

    def _evict(self, root: int, entries: list[_Seen], under_way: int, limit: int) -> tuple[int, OSError | None]:
        """Delete what was used longest ago, and strike it off `entries`, until there is room below `limit`.

        Returns:
            The bytes that are gone; and, where others in the place of those that cannot be deleted were not enough, why
            they cannot: then nothing more may be written.
        """
        held = sum(size for _, size, _, _ in entries)
        total = held + under_way
        if total <= limit:
            return 0, None
        entries.sort()
        kept: list[_Seen] = []
        evicted = 0
        stuck: OSError | None = None
        for at, (used, size, tenant, name) in enumerate(entries):
            if total <= _KEEP * limit:
                kept += entries[at:]
                break
            deleted = None
            with (
                self._odd(f"{tenant}/{name}") as odd,
                _folder(root, tenant) as folder,
                _folder(folder, name[:2]) as shard,
            ):
                deleted = _unlink_same(name, used, shard)
            if odd or deleted is False:
                stuck = odd[0] if odd else stuck
                kept.append((used, size, tenant, name))
            else:
                total -= size
            evicted += deleted is True
        entries[:] = kept
        with self._lock:
            self._counters.evictions += evicted
        return held + under_way - total, stuck if total > limit else None

    def _shards(self, root: int, only: str | None) -> Iterator[tuple[str, int, list[os.DirEntry[str]]]]:
        """Entries, by tenant and open folder, and nothing else that somebody may keep there; removes empty folders."""
        folders = (
            [entry.name for entry in _scandir(root) if entry.is_dir(follow_symlinks=False)] if not only else [only]
        )
        for tenant in folders:
            if not _is_hex(tenant, 64):
                continue
            with self._odd(tenant), _folder(root, tenant) as folder:
                shards = _scandir(folder)
                for shard in shards:
                    if not _is_hex(shard.name, 2) or not shard.is_dir(follow_symlinks=False):
                        continue
                    with self._odd(f"{tenant}/{shard.name}"), _folder(folder, shard.name) as opened:
                        files = _scandir(opened)
                        named = [file for file in files if _is_hex(file.name, 128) and file.name[:2] == shard.name]
                        yield tenant, opened, named
                        if not files:
                            self._remove_empty(root, shard.name, folder)
                if not shards:
                    self._remove_empty(root, tenant, root)

    def _remove_empty(self, root: int, name: str, parent: int) -> None:
        # Locked: not between the creation of a folder and its first entry. If it is not empty any more, or somebody is
        # busy, it stays.
        with suppress(OSError), self._flock(root, ".lock", wait=0):
            os.rmdir(name, dir_fd=parent)

    # --- locks and errors ---

    @contextmanager
    def _flock(self, root: int, name: str, *, shared: bool = False, wait: float | None = None) -> Iterator[None]:
        """Hold a lock file; opened anew each time, so that it excludes the other threads too.

        Raises:
            TimeoutError: somebody else held it for `wait` seconds (default `_LOCK_SECONDS`).
        """
        file, _ = _open_file(name, os.O_RDWR | os.O_CREAT, root)
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
    def _odd(self, entry: str, *, writing: bool = False) -> Iterator[list[OSError]]:
        """Whatever one entry, or its folder, is to blame for ends here; so does that it is not there.

        Yields:
            A list that holds the error afterwards, if there was one that was counted.

        Raises:
            OSError: the store is to blame.
        """
        errors: list[OSError] = []
        try:
            yield errors
        except FileNotFoundError:
            # A folder that we make ourselves and is gone at once: somebody removes the store meanwhile.
            if writing:
                raise
        except OSError as error:
            bad = error.errno in BAD_SECTORS and not writing
            if error.errno not in ODD_ENTRY and not bad:
                raise
            errors.append(error)
            with self._lock:
                if bad:
                    self._unreadable.add(entry)
                    if len(self._unreadable) >= _BAD_ENTRIES:
                        raise
                self._counters.errors += 1
            self._warn(
                "odd", "cannot use an entry, which is a miss, as others like it will be: %s", f"{entry}: {error}"
            )

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


def _open_file(name: str, flags: int, folder: int) -> tuple[int, os.stat_result]:
    """A descriptor of a regular file in an open folder, and what it is like; waits for nobody.

    Raises:
        OSError: it cannot be opened, or is a link, a folder, a FIFO, a socket or a device.
    """
    file = os.open(name, flags | _FILE, 0o600, dir_fd=folder)
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.ENXIO, "no regular file", name)
    except BaseException:
        os.close(file)
        raise
    return file, info


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


def _unlink(name: str, folder: int) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _unlink_same(name: str, used: int, folder: int) -> bool | None:
    """Delete a file unless it was used or replaced since `used` (its modification time then, ns); None: it was gone."""
    try:
        if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns != used:
            return False
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return None
    return True


def _scandir(folder: int) -> list[os.DirEntry[str]]:
    """What an open folder holds; to be asked for more only while it is open."""
    with os.scandir(folder) as entries:
        return list(entries)


def _is_hex(name: str, longest: int) -> bool:
    return 0 < len(name) <= longest and _HEX.issuperset(name)


def _make_folder(path: str, mode: int) -> None:
    """Create a folder if it is not there, its parents 0755 whatever the umask allows: nobody shall swap it for his."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        pass
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if parent == path:
            raise
        _make_folder(parent, 0o755)
        with suppress(FileExistsError):
            os.mkdir(path, mode)


def _open_root(path: str, links: int = _LINKS) -> int:
    """Open a folder; it may be reached by a link, though not by one that anybody else put there.

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
            if objection := _objection(info, path):
                raise PermissionError(objection) from None
            # Of the link that was looked at, whatever stands in its place by now.
            target = os.readlink("", dir_fd=link)
        finally:
            os.close(link)
    return _open_root(os.path.join(os.path.dirname(path), target), links - 1)


def _objection(info: os.stat_result, path: str) -> str | None:
    """Why a root, or a link that leads to it, is not safe to use, and what to do; None if it is.

    Whoever may put entries into the folder, or turn the link elsewhere, decides what a model continues from.
    """
    link = stat.S_ISLNK(info.st_mode)
    if not link and not stat.S_ISDIR(info.st_mode):
        return None  # opening it says so
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
def _folder(parent: int, name: str, *, create: bool = False) -> Iterator[int]:
    """A descriptor of a folder in an open one, never of what a link points to.

    Raises:
        OSError: it is not there, no folder (also: a link), or may not be opened.
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


def _remove_tree(name: str, parent: int, depth: int = _DEPTH) -> int:
    """Delete a folder, or the link that stands in its place; how many files were in it. Others may be at it too.

    Raises:
        OSError: something could not be deleted; the rest is gone.
    """
    if not depth:
        raise OSError(errno.ELOOP, "folders nested too deep", name)
    count = 0
    failure: OSError | None = None
    try:
        with _folder(parent, name) as folder:
            for entry in _scandir(folder):
                try:
                    if entry.is_dir(follow_symlinks=False):
                        count += _remove_tree(entry.name, folder, depth - 1)
                    else:
                        count += _unlink(entry.name, folder)
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure
        os.rmdir(name, dir_fd=parent)
    except NotADirectoryError:
        _unlink(name, parent)
    except FileNotFoundError:
        pass
    return count
