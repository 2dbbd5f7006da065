"""Limits on a folder of entries: its budget, the budgets of tenants, and the time to live of entries.

The budget counts file sizes. A process knows the result of its last scan and what it has written since. Before a put,
it scans the folder if the put would exceed the budget, or if it has written 2 % of the budget since its last scan, and
evicts down to 95 %. A single process stays within the budget. Each further process may exceed it by 2 %, or by the
entries that it is writing if they are larger.

The budget of a tenant is kept in the same way, by scanning only the tenant's folder and evicting only the tenant's
entries.

The least recently used entries are evicted first, and refinements sooner (`base.PART_WEIGHTS`).
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

from cuvee.codec.part_keys import part_number
from cuvee.integrations.stores.base import PART_WEIGHTS, Lifetimes
from cuvee.integrations.stores.safe_files import (
    file_lock,
    list_folder,
    open_file,
    open_folder,
    remove_tree,
    unlink_same,
)

# A scan is due after this share of the budget was written since the last scan. Eviction stops at the other share.
_RESCAN = 0.02
_KEEP = 0.95
# Seconds after which an unlocked temporary file counts as left by a dead writer.
STALE_SECONDS = 60.0
_HEX = frozenset("0123456789abcdef")

# An entry in a scan: the time of its last use (ns), its bytes, its tenant and its name.
_Scanned = tuple[int, int, str, str]


@dataclass(slots=True)
class _Tally:
    """One process's knowledge of the bytes of all entries, or of one tenant's entries.

    Attributes:
        begun, ended: bytes of the puts that have begun and of the puts that have ended, since the store was opened.
        base: the folder holds `base + begun` bytes, as far as this process knows; None before the first scan.
        scanned_at: the value of `ended` at the last scan.
        entries: how many entries the last scan found, plus the puts since.
    """

    begun: int = 0
    ended: int = 0
    base: int | None = None
    scanned_at: int = 0
    entries: int = 0

    def due(self, limit: int) -> bool:
        """Return whether a put that has begun must scan first, and perhaps make room."""
        return self.base is None or self.base + self.begun > limit or self.begun - self.scanned_at > _RESCAN * limit

    def update(self, entries: Sequence[_Scanned], ended: int) -> None:
        """Take over the result of a scan that began when `ended` bytes had been put."""
        # The scan counts puts that ended before it. Later puts may be counted twice until the next scan.
        self.base = sum(size for _, size, _, _ in entries) - ended
        self.scanned_at = ended
        self.entries = len(entries)


class FolderBudget:
    """Keeps a folder, which other processes may share, within its budget. Safe to call from several threads.

    Every method takes `root`, the descriptor of the open folder.

    Args:
        max_bytes: budget of the files; None means no limit.
        max_tenant_bytes: budget of each tenant's files; None means no limit.
        lifetimes: how long entries live after they were written.
        tolerate: `tolerate(entry)` is a context that tolerates and counts errors that concern only that entry; see
            `DiskStore`.

    Attributes:
        evictions: entries deleted to stay within a budget.
        expired: entries deleted because of their age.
    """

    def __init__(
        self,
        max_bytes: int | None,
        max_tenant_bytes: int | None,
        lifetimes: Lifetimes,
        tolerate: Callable[[str], AbstractContextManager[list[OSError]]],
    ) -> None:
        self.max_bytes = max_bytes
        self.max_tenant_bytes = max_tenant_bytes
        self.lifetimes = lifetimes
        self._tolerate = tolerate
        self.evictions = self.expired = 0
        self._scan_time = 0.0  # when the last full scan ended
        self.after_fork()

    def after_fork(self) -> None:
        """Forget what the folder holds, because puts in progress belong to the parent."""
        self._lock = threading.Lock()
        self._tally = _Tally()
        # Tallies of the tenants that have put entries, until a scan finds none of their entries.
        self._tenants: dict[str, _Tally] = {}

    @contextmanager
    def reserve(self, root: int, tenant: str, size: int) -> Iterator[list[_Tally]]:
        """Make room for an entry of `size` bytes, which the body of the `with` statement writes.

        Yields:
            The tallies to pass to `wrote` if the entry was written.

        Raises:
            OSError: too few entries could be deleted to make room.
        """
        with self._lock:
            tallies = [self._tally]
            if self.max_tenant_bytes is not None:
                tallies.append(self._tenants.setdefault(tenant, _Tally()))
            for tally in tallies:
                tally.begun += size
        try:
            self._make_room(root, tenant)
            yield tallies
        finally:
            with self._lock:
                for tally in tallies:
                    tally.ended += size

    def wrote(self, tallies: Sequence[_Tally]) -> None:
        """Count an entry that was written."""
        with self._lock:
            for tally in tallies:
                tally.entries += 1

    def held(self) -> tuple[int, int] | None:
        """Return entries and bytes of the last scan plus the puts of this process since; None before the first scan."""
        with self._lock:
            tally = self._tally
            return None if tally.base is None else (tally.entries, tally.base + tally.begun)

    def sweep(self, root: int) -> None:
        """Remove temporary files of dead writers and the rest of deleted tenants."""
        for entry in list_folder(root):
            if entry.name.startswith(".gone-"):
                with self._tolerate(entry.name):
                    remove_tree(entry.name, root)
            elif entry.name.startswith(".tmp-"):
                with self._tolerate(entry.name), suppress(BlockingIOError):
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
        """Count the entries of all tenants, or `only` of one, and delete entries that expired or exceed a budget."""
        with self._lock:
            ended = self._tally.ended
            tenants_ended = {tenant: tally.ended for tenant, tally in self._tenants.items()}
        if only is None:
            self.sweep(root)
        now = time.time()
        found: dict[str, list[_Scanned]] = {}
        gone = expired = 0
        for tenant, shard, files in self._shards(root, only):
            for file in files:
                with self._tolerate(f"{tenant}/{file.name}"):
                    info = file.stat(follow_symlinks=False)
                    if not stat.S_ISREG(info.st_mode):
                        continue
                    # An entry is never used before it is written, so this one was also written that long ago.
                    ttl = self.lifetimes.of(file.name)
                    if (
                        ttl is not None
                        and info.st_mtime < now - ttl
                        and unlink_same(file.name, info.st_mtime_ns, shard)
                    ):
                        expired += 1
                        gone += info.st_size
                        continue
                    found.setdefault(tenant, []).append((info.st_mtime_ns, info.st_size, tenant, file.name))
        with self._lock:
            in_progress = self._tally.begun - ended
            tenants_in_progress = {
                tenant: tally.begun - tenants_ended.get(tenant, 0) for tenant, tally in self._tenants.items()
            }
        before = sum(map(len, found.values()))
        stuck: OSError | None = None
        for tenant, entries in found.items():
            if self.max_tenant_bytes is not None:
                freed, failure = self._evict(root, entries, tenants_in_progress.get(tenant, 0), self.max_tenant_bytes)
                gone, stuck = gone + freed, failure or stuck
        rest = [entry for entries in found.values() for entry in entries]
        if only is None and self.max_bytes is not None:
            _, failure = self._evict(root, rest, in_progress, self.max_bytes)
            stuck = failure or stuck
        with self._lock:
            self.expired += expired
            if only is None:
                self._tally.update(rest, ended)
                self._scan_time = time.monotonic()
            elif self._tally.base is not None:
                self._tally.base -= gone
                self._tally.entries -= before - len(rest) + expired
            left: dict[str, list[_Scanned]] = {}
            for entry in rest:
                left.setdefault(entry[2], []).append(entry)
            for tenant in list(self._tenants) if only is None else [only]:
                tally = self._tenants[tenant]
                if only is None and tenant not in left and tally.begun == tally.ended:
                    del self._tenants[tenant]
                else:
                    tally.update(left.get(tenant, []), tenants_ended.get(tenant, 0))
        if stuck is not None:
            raise stuck

    def _due(self) -> bool:
        with self._lock:
            ttl = self.lifetimes.shortest
            if self.max_bytes is None and ttl is None:
                return False
            if self._tally.base is None:
                return True
            # Entries that are never requested must expire as well.
            if ttl is not None and time.monotonic() - self._scan_time > max(60.0, ttl / 10):
                return True
            return self.max_bytes is not None and self._tally.due(self.max_bytes)

    def _tenant_due(self, tenant: str) -> bool:
        with self._lock:
            return self.max_tenant_bytes is not None and self._tenants[tenant].due(self.max_tenant_bytes)

    def _make_room(self, root: int, tenant: str) -> None:
        if not self._due() and not self._tenant_due(tenant):
            return
        # This also waits for the scan of another process, during which this put would not be counted.
        with file_lock(root, ".evict"):
            # Another thread may have scanned meanwhile. The tenant's own entries are evicted before those of others.
            if self._tenant_due(tenant):
                self.scan(root, tenant)
            if self._due():
                self.scan(root)

    def _evict(self, root: int, entries: list[_Scanned], in_progress: int, limit: int) -> tuple[int, OSError | None]:
        """Delete the entries of the largest age x weight, and remove them from `entries`, until there is room.

        Returns:
            The bytes deleted; and the error if some entries could not be deleted and the others did not make enough
            room, in which case nothing more may be written.
        """
        held = sum(size for _, size, _, _ in entries)
        total = held + in_progress
        if total <= limit:
            return 0, None
        now = time.time_ns()

        def key(entry: _Scanned) -> tuple[int, _Scanned]:
            # Without refinements this is the order of use. An entry from the future has no age to multiply.
            age = now - entry[0]
            return -age * PART_WEIGHTS[part_number(entry[3])] if age > 0 else -age, entry

        entries.sort(key=key)
        kept: list[_Scanned] = []
        evicted = 0
        stuck: OSError | None = None
        for at, (used, size, tenant, name) in enumerate(entries):
            if total <= _KEEP * limit:
                kept += entries[at:]
                break
            deleted = None
            with (
                self._tolerate(f"{tenant}/{name}") as odd,
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
        return held + in_progress - total, stuck if total > limit else None

    def _shards(self, root: int, only: str | None) -> Iterator[tuple[str, int, list[os.DirEntry[str]]]]:
        """Yield entries by tenant and open folder. Other files are skipped, and empty folders removed."""
        folders = (
            [entry.name for entry in list_folder(root) if entry.is_dir(follow_symlinks=False)] if not only else [only]
        )
        for tenant in folders:
            if not _is_hex(tenant, 64):
                continue
            with self._tolerate(tenant), open_folder(root, tenant) as folder:
                shards = list_folder(folder)
                for shard in shards:
                    if not _is_hex(shard.name, 2) or not shard.is_dir(follow_symlinks=False):
                        continue
                    with self._tolerate(f"{tenant}/{shard.name}"), open_folder(folder, shard.name) as opened:
                        files = list_folder(opened)
                        named = [file for file in files if _is_hex(file.name, 128) and file.name[:2] == shard.name]
                        yield tenant, opened, named
                        if not files:
                            _remove_empty(root, shard.name, folder)
                if not shards:
                    _remove_empty(root, tenant, root)


def _remove_empty(root: int, name: str, parent: int) -> None:
    # The lock prevents this between the creation of a folder and its first entry. The folder stays if it is no longer
    # empty, or if the lock is held.
    with suppress(OSError), file_lock(root, ".lock", wait=0):
        os.rmdir(name, dir_fd=parent)


def _is_hex(name: str, longest: int) -> bool:
    return 0 < len(name) <= longest and _HEX.issuperset(name)
