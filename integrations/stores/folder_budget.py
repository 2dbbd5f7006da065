"""What a folder of entries may hold: its budget, the budgets of tenants, and the time to live of entries.

The budget counts file sizes. A process knows what its last scan found and what it has written since. Before a put it
scans the folder if the put would exceed the budget, or if it has written 2 % of the budget since its last scan, and
evicts down to 95 %. One process alone keeps within the budget. Each further process may add 2 %, or the entries it is
writing if they are larger.

The budget of a tenant is kept in the same way, by scans of the tenant's folder alone, and by evicting the tenant's own
entries.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

from cuvee.integrations.stores.safe_files import (
    file_lock,
    list_folder,
    open_file,
    open_folder,
    remove_tree,
    unlink_same,
)

# A scan is due once this share of the budget was written since the last one; eviction stops at the other share.
_RESCAN = 0.02
_KEEP = 0.95
# Seconds after which a temporary file that nobody has locked is taken for a dead writer's.
STALE_SECONDS = 60.0
_HEX = frozenset("0123456789abcdef")

# An entry as a scan found it: when it was last used (ns), its bytes, its tenant and its name.
_Seen = tuple[int, int, str, str]


@dataclass(slots=True)
class _Book:
    """What one process knows about the bytes of all entries, or of one tenant's.

    Attributes:
        begun, ended: bytes of the puts that have begun, and of those that have ended, since the store was opened.
        base: `base + begun` is what the folder holds, as far as this process knows; None before the first scan.
        scanned_at: the value of `ended` at the last scan.
        entries: how many the last scan found, plus the puts since.
    """

    begun: int = 0
    ended: int = 0
    base: int | None = None
    scanned_at: int = 0
    entries: int = 0

    def due(self, limit: int) -> bool:
        """Whether a put that has begun must scan first, and perhaps make room."""
        return self.base is None or self.base + self.begun > limit or self.begun - self.scanned_at > _RESCAN * limit

    def saw(self, entries: Sequence[_Seen], ended: int) -> None:
        """Take over the result of a scan that began when `ended` bytes had been put."""
        # Puts that ended before the scan are in its sum. Later ones may be counted twice, until the next scan.
        self.base = sum(size for _, size, _, _ in entries) - ended
        self.scanned_at = ended
        self.entries = len(entries)


class FolderBudget:
    """Keeps a folder of entries within its budget, together with other processes. Safe to call from several threads.

    Every method takes `root`, the descriptor of the open folder.

    Args:
        max_bytes: budget of the files; None means no limit.
        max_tenant_bytes: budget of each tenant's files; None means no limit.
        ttl: seconds an entry lives after it was written; None means forever.
        odd: `odd(entry)` is a context that tolerates and counts what is the fault of one entry; see `DiskStore`.

    Attributes:
        evictions: entries deleted to stay within a budget.
        expired: entries deleted because of their age.
    """

    def __init__(
        self,
        max_bytes: int | None,
        max_tenant_bytes: int | None,
        ttl: float | None,
        odd: Callable[[str], AbstractContextManager[list[OSError]]],
    ) -> None:
        self.max_bytes = max_bytes
        self.max_tenant_bytes = max_tenant_bytes
        self.ttl = ttl
        self._odd = odd
        self.evictions = self.expired = 0
        self._scan_time = 0.0  # when the last scan of everything ended
        self.after_fork()

    def after_fork(self) -> None:
        """Forget what the folder holds: the puts that were under way belong to the parent."""
        self._lock = threading.Lock()
        self._book = _Book()
        # Books of the tenants that have put something, until a scan finds nothing of theirs.
        self._tenants: dict[str, _Book] = {}

    @contextmanager
    def reserve(self, root: int, tenant: str, size: int) -> Iterator[list[_Book]]:
        """Make room for an entry of `size` bytes, which is then written.

        Yields:
            The books to pass to `wrote` if the entry took its place.

        Raises:
            OSError: entries that have to go cannot be deleted.
        """
        with self._lock:
            books = [self._book]
            if self.max_tenant_bytes is not None:
                books.append(self._tenants.setdefault(tenant, _Book()))
            for book in books:
                book.begun += size
        try:
            self._make_room(root, tenant)
            yield books
        finally:
            with self._lock:
                for book in books:
                    book.ended += size

    def wrote(self, books: Sequence[_Book]) -> None:
        """Count an entry that took its place."""
        with self._lock:
            for book in books:
                book.entries += 1

    def held(self) -> tuple[int, int] | None:
        """Entries and bytes: those of the last scan, plus what this process has put since; None before any scan."""
        with self._lock:
            book = self._book
            return None if book.base is None else (book.entries, book.base + book.begun)

    def sweep(self, root: int) -> None:
        """Remove temporary files of dead writers, and what is left of deleted tenants."""
        for entry in list_folder(root):
            if entry.name.startswith(".gone-"):
                with self._odd(entry.name):
                    remove_tree(entry.name, root)
            elif entry.name.startswith(".tmp-"):
                with self._odd(entry.name), suppress(BlockingIOError):
                    info = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(info.st_mode) or abs(time.time() - info.st_mtime) < STALE_SECONDS:
                        continue
                    file, _ = open_file(entry.name, os.O_RDWR, root)
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(entry.name, dir_fd=root)
                    finally:
                        os.close(file)

    def scan(self, root: int, only: str | None = None) -> None:
        """Count the entries of all tenants, or `only` of one, and delete those that expired or exceed a budget."""
        with self._lock:
            ended = self._book.ended
            tenants_ended = {tenant: book.ended for tenant, book in self._tenants.items()}
        if only is None:
            self.sweep(root)
        oldest = None if self.ttl is None else time.time() - self.ttl
        found: dict[str, list[_Seen]] = {}
        gone = expired = 0
        for tenant, shard, entries in self._shards(root, only):
            for entry in entries:
                with self._odd(f"{tenant}/{entry.name}"):
                    info = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(info.st_mode):
                        continue
                    # An entry is never used before it is written, so this one was written before `oldest`, too.
                    if (
                        oldest is not None
                        and info.st_mtime < oldest
                        and unlink_same(entry.name, info.st_mtime_ns, shard)
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
            self.expired += expired
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

    def _due(self) -> bool:
        with self._lock:
            if self.max_bytes is None and self.ttl is None:
                return False
            if self._book.base is None:
                return True
            # Entries that nobody asks for have to expire, too.
            if self.ttl is not None and time.monotonic() - self._scan_time > max(60.0, self.ttl / 10):
                return True
            return self.max_bytes is not None and self._book.due(self.max_bytes)

    def _tenant_due(self, tenant: str) -> bool:
        with self._lock:
            return self.max_tenant_bytes is not None and self._tenants[tenant].due(self.max_tenant_bytes)

    def _make_room(self, root: int, tenant: str) -> None:
        if not self._due() and not self._tenant_due(tenant):
            return
        # This also waits for the scan of another process: otherwise a put would go uncounted for as long.
        with file_lock(root, ".evict"):
            # Another thread may have scanned meanwhile. The tenant goes first, at its own expense and not at others'.
            if self._tenant_due(tenant):
                self.scan(root, tenant)
            if self._due():
                self.scan(root)

    def _evict(self, root: int, entries: list[_Seen], under_way: int, limit: int) -> tuple[int, OSError | None]:
        """Delete what was used longest ago, and take it off `entries`, until there is room below `limit`.

        Returns:
            The bytes that are gone. Then, if some entries could not be deleted and the others were not enough, the
            reason: nothing more may be written.
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
                open_folder(root, tenant) as folder,
                open_folder(folder, name[:2]) as shard,
            ):
                deleted = unlink_same(name, used, shard)
            if odd or deleted is False:
                stuck = odd[0] if odd else stuck
                kept.append((used, size, tenant, name))
            else:
                total -= size
            evicted += deleted is True
        entries[:] = kept
        with self._lock:
            self.evictions += evicted
        return held + under_way - total, stuck if total > limit else None

    def _shards(self, root: int, only: str | None) -> Iterator[tuple[str, int, list[os.DirEntry[str]]]]:
        """Entries by tenant and open folder. Skips whatever else is kept there, and removes empty folders."""
        folders = (
            [entry.name for entry in list_folder(root) if entry.is_dir(follow_symlinks=False)] if not only else [only]
        )
        for tenant in folders:
            if not _is_hex(tenant, 64):
                continue
            with self._odd(tenant), open_folder(root, tenant) as folder:
                shards = list_folder(folder)
                for shard in shards:
                    if not _is_hex(shard.name, 2) or not shard.is_dir(follow_symlinks=False):
                        continue
                    with self._odd(f"{tenant}/{shard.name}"), open_folder(folder, shard.name) as opened:
                        files = list_folder(opened)
                        named = [file for file in files if _is_hex(file.name, 128) and file.name[:2] == shard.name]
                        yield tenant, opened, named
                        if not files:
                            _remove_empty(root, shard.name, folder)
                if not shards:
                    _remove_empty(root, tenant, root)


def _remove_empty(root: int, name: str, parent: int) -> None:
    # The lock keeps this from happening between the creation of a folder and its first entry. The folder stays if it
    # is no longer empty, or if somebody holds the lock.
    with suppress(OSError), file_lock(root, ".lock", wait=0):
        os.rmdir(name, dir_fd=parent)


def _is_hex(name: str, longest: int) -> bool:
    return 0 < len(name) <= longest and _HEX.issuperset(name)
