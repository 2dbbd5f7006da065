"""Blobs as files in a folder that several processes may share. There is no index: the file system is the truth.

    root/
      <tenant>/<id[:2]>/<id>   an entry: envelope and blob, complete from the moment it has this name
      .tmp-<random>            an entry that is being written; its writer holds an flock on it
      .gone-<random>/          a deleted tenant, being removed
      .lock                    flock: shared while an entry takes its name; exclusive while a bad entry, an empty folder
                               or a tenant is removed
      .evict                   flock: one process at a time scans and evicts

**No link is followed** below the root. Every operation opens the root anew, checks who owns it and who may write to it,
and goes on from there folder by folder (see `safe_files`). Anyone who swaps a folder for a link in between gains
nothing. A link that already lies in the store is removed or refused; what it points to is left alone.

The modification time of an entry says when it was last used. Its envelope says when it was written.

**Odd entries.** If a folder, a FIFO or a socket lies in place of an entry, or it may not be read, or its sectors went
bad, then that entry is a miss, counted, and logged once. Scans and sweeps go on with the rest.

**Crashes.** An entry gets its name by `rename` once all of its bytes are written. A killed process leaves whole
entries, and at most a temporary file. Nothing is synced, so a power failure may damage an entry; its checksum shows
that.

**Temporary files of dead writers** are not locked, because the kernel drops an flock with its process: neither reused
process ids nor containers matter. A writer creates the file just before it locks it, so a file without a lock is only
removed once nobody has written to it for a minute.

**Budgets** are kept by `folder_budget`.
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
from dataclasses import replace

from cuvee.codec.errors import CorruptError, InputError
from cuvee.integrations.stores.base import (
    BAD_SECTORS,
    MAX_ENTRY_BYTES,
    ODD_ENTRY,
    Store,
    StoreError,
    TierCounters,
    WarnOnce,
    check_key,
    check_max_bytes,
    check_max_entry,
    check_max_tenant,
    check_tenant,
    check_ttl,
)
from cuvee.integrations.stores.envelope import HEADER_BYTES, ExpiredError, make_header, parse_header
from cuvee.integrations.stores.folder_budget import FolderBudget
from cuvee.integrations.stores.forks import tell_after_fork
from cuvee.integrations.stores.safe_files import (
    FILE_FLAGS,
    file_lock,
    make_folder,
    objection,
    open_file,
    open_folder,
    open_root,
    read_exactly,
    remove_tree,
    unlink,
    write_all,
)

_log = logging.getLogger(__name__)

# Seconds that have to pass before an entry's use is noted again, and so the error in the order of eviction. A note
# costs microseconds, and one inode that Linux writes out every 30 s or so: noting less often would save few writes.
# Budgets that turn over within 10 s, so that eviction would follow the order of writing, are a few gigabytes in RAM
# under full load.
_TOUCH_SECONDS = 10.0
# This many entries with bad sectors, and none read well in between, mean that the disk is failing.
_BAD_ENTRIES = 8


class DiskStore(Store):
    """Blobs in a folder, which is created at the first put. Folders are made 0700 and files 0600: they hold prompts.

    Processes of one user may share a folder. Each keeps to its own budget, so give all of them the same one. The file
    system needs flock and an atomic rename, which local ones and NFSv4 have.

    A folder is refused if it belongs to another user than us or root, or if its group or others may write to it: they
    could swap what a model continues from. The same goes for a link to it that another user made.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as parent:
        ...     DiskStore(f"{parent}/kv").put("ab/01", b"blob")
        ...     DiskStore(f"{parent}/kv", ttl=3600).get("ab/01")  # as another process would
        True
        b'blob'

    Args:
        path: the folder. Missing parent folders are created, too (0755).
        max_bytes: budget of the files; None means no limit.
        ttl: seconds an entry lives after it was written; None means forever.
        max_entry: largest blob, in bytes. Larger ones are neither kept nor read.
        max_tenant_bytes: budget of each tenant's files, kept by evicting its own entries; None means no limit.

    Raises:
        InputError: an argument is out of range, or the folder exists and is not safe to use.
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
        self.max_bytes = check_max_bytes(max_bytes)
        self.ttl = check_ttl(ttl)
        self.max_entry = check_max_entry(max_entry)
        self.max_tenant_bytes = check_max_tenant(max_tenant_bytes, max_bytes)
        if not os.fspath(path):
            raise InputError("path: must name a folder, got an empty one")
        self.root = os.path.abspath(path)
        # An unsafe folder is refused here if it exists already. Every operation checks again.
        with suppress(OSError):
            for look in (os.lstat, os.stat):
                if problem := objection(look(self.root), self.root):
                    raise InputError(problem)
        self._lock = threading.Lock()
        self._counters = TierCounters()
        self._warn = WarnOnce(_log, f"disk store {self.root}")
        # Entries that turned out to have bad sectors since the last one that could be read.
        self._unreadable: set[str] = set()
        self._prepared = False
        self._budget = FolderBudget(max_bytes, max_tenant_bytes, ttl, self._odd)
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Make new locks, and forget what the folder holds: puts that were under way belong to the parent."""
        self._lock = threading.Lock()
        self._budget.after_fork()

    # --- the protocol ---

    def get(self, key: str) -> bytes | None:
        """The blob of `key`; None if it is not there, or if it was corrupt or had expired, and is now deleted.

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
        """Write an entry; False if it is larger than the budget or `max_entry`, or if something odd holds its place.

        Raises:
            StoreError: it could not be written, because the disk is full, say, or the folder is missing, read-only or
                not ours alone. What was there stays.
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
        with self._errors(), self._opened(create=True) as root, self._budget.reserve(root, tenant, size) as books:
            written = self._write(root, tenant, name, make_header(key, blob, time.time()), blob)
        if not written:
            return False
        self._budget.wrote(books)
        with self._lock:
            self._counters.puts += 1
            self._counters.put_bytes += len(blob)
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key has a file now. With a `ttl`, this also reads its header: it must not have expired."""
        wanted = [check_key(key) for key in keys]
        there = [False] * len(wanted)
        with self._errors(), suppress(FileNotFoundError), self._opened() as root, ExitStack() as tenants:
            folders: dict[str, int | None] = {}
            for at, (tenant, name) in enumerate(wanted):
                if tenant not in folders:
                    folders[tenant] = None
                    with self._odd(tenant):
                        folders[tenant] = tenants.enter_context(open_folder(root, tenant))
                if (folder := folders[tenant]) is not None:
                    with self._odd(f"{tenant}/{name}"):
                        there[at] = self._present(folder, name)
        return there

    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""
        tenant, name = check_key(key)
        with (
            self._errors(),
            suppress(FileNotFoundError),
            self._opened() as root,
            self._odd(key),
            open_folder(root, tenant) as folder,
            open_folder(folder, name[:2]) as shard,
        ):
            return unlink(name, shard)
        return False

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant. Readers stop seeing them at once. What is put meanwhile stays.

        Raises:
            StoreError: some are left; the others are gone.
        """
        folder, gone = check_tenant(tenant), ".gone-" + secrets.token_hex(8)
        with self._errors(), suppress(FileNotFoundError), self._opened() as root:
            # The lock keeps entries from taking their names meanwhile, so none lands in the folder that is going.
            with file_lock(root, ".lock"):
                os.rename(folder, gone, src_dir_fd=root, dst_dir_fd=root)
            return remove_tree(gone, root)
        return 0

    def counters(self) -> dict[str, TierCounters]:
        """A snapshot. `entries` and `bytes` are those of the last scan plus this process's puts since; see `held`."""
        entries, held = self._budget.held() or (None, None)
        with self._lock:
            own = replace(self._counters, entries=entries, bytes=held)
        own.evictions, own.expired = own.evictions + self._budget.evictions, own.expired + self._budget.expired
        return {self.name: own}

    # --- files ---

    @contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[int]:
        """A descriptor of the root, which was found safe to use.

        Args:
            create: make the root if it is missing. The first time, also remove what dead processes left in it.

        Raises:
            FileNotFoundError: it does not exist.
            PermissionError: it is not ours alone; the message says what to do.
        """
        prepare = create and not self._prepared
        if prepare:
            make_folder(self.root, 0o700)
        root = open_root(self.root)
        try:
            if problem := objection(os.fstat(root), self.root):
                raise PermissionError(problem)
            if prepare:
                self._budget.sweep(root)
                self._prepared = True
            yield root
        finally:
            os.close(root)

    def _read(self, root: int, tenant: str, name: str, key: str) -> bytes | None:
        with open_folder(root, tenant) as folder, open_folder(folder, name[:2]) as shard:
            file, info = open_file(name, os.O_RDONLY, shard)
            try:
                if info.st_size > HEADER_BYTES + self.max_entry:
                    raise OSError(errno.EFBIG, f"{info.st_size} bytes are more than max_entry_mb allows", name)
                try:
                    header = parse_header(os.read(file, HEADER_BYTES))
                    header.verify(key, self.ttl)
                    # Checked before the length is trusted, because it decides how much memory is taken.
                    if info.st_size != HEADER_BYTES + header.length:
                        raise CorruptError(
                            f"entry: {info.st_size} bytes, its header says {HEADER_BYTES + header.length}"
                        )
                    blob = read_exactly(file, header.length)
                    header.verify_payload(blob)
                except (CorruptError, ExpiredError) as error:
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
            self._warn("touch", "cannot note the use of entries; they will be evicted as if unused: %s", error)

    def _discard(self, root: int, shard: int, key: str, info: os.stat_result, error: Exception) -> None:
        """Delete a bad entry: the inode in `info`. The caller holds it open, so no other file can have that inode."""
        with self._lock:
            if isinstance(error, ExpiredError):
                self._counters.expired += 1
            else:
                self._counters.corrupt += 1
        if isinstance(error, CorruptError):
            self._warn("corrupt", "deletes bad entries and counts them as misses; the first: %s: %s", key, error)
        name = check_key(key)[1]
        try:
            # No entry takes a name while the lock is held, so a good one that just replaced the bad one is left alone.
            with file_lock(root, ".lock"), suppress(FileNotFoundError):
                now = os.stat(name, dir_fd=shard, follow_symlinks=False)
                if (now.st_dev, now.st_ino) == (info.st_dev, info.st_ino):
                    os.unlink(name, dir_fd=shard)
        except OSError as failure:
            self._warn("discard", "cannot delete a bad entry; it stays a miss: %s", failure)

    def _write(self, root: int, tenant: str, name: str, header: bytes, blob: bytes) -> bool:
        """Write an entry; return whether it could take its place, which something odd may hold."""
        temporary, written = ".tmp-" + secrets.token_hex(8), False
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE_FLAGS, 0o600, dir_fd=root)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(file, header)
            write_all(file, blob)
            # The lock is taken before the folders are opened or made, so no scan removes them before the entry arrives.
            with (
                file_lock(root, ".lock", shared=True),
                self._odd(f"{tenant}/{name}", writing=True),
                open_folder(root, tenant, create=True) as folder,
                open_folder(folder, name[:2], create=True) as shard,
            ):
                os.replace(temporary, name, src_dir_fd=root, dst_dir_fd=shard)
                written = True
            if not written:
                unlink(temporary, root)
            return written
        except BaseException:
            unlink(temporary, root)
            raise
        finally:
            os.close(file)

    def _present(self, folder: int, name: str) -> bool:
        """Whether the tenant of `folder` has an entry of this name."""
        try:
            with open_folder(folder, name[:2]) as shard:
                if self.ttl is None:
                    info = os.stat(name, dir_fd=shard, follow_symlinks=False)
                    return stat.S_ISREG(info.st_mode) and 0 <= info.st_size - HEADER_BYTES <= self.max_entry
                file, info = open_file(name, os.O_RDONLY, shard)
        except FileNotFoundError:
            return False
        try:
            # An entry that is too large counts as absent, so that a smaller one may take its place.
            small = info.st_size - HEADER_BYTES <= self.max_entry
            return small and not parse_header(os.read(file, HEADER_BYTES)).expired(self.ttl)
        except CorruptError:
            return False
        finally:
            os.close(file)

    # --- errors ---

    @contextmanager
    def _odd(self, entry: str, *, writing: bool = False) -> Iterator[list[OSError]]:
        """Tolerate errors that are the fault of one entry or of its folder, also that it is missing.

        Yields:
            A list, which afterwards holds the error if there was one that counts.

        Raises:
            OSError: the error is the fault of the store.
        """
        errors: list[OSError] = []
        try:
            yield errors
        except FileNotFoundError:
            # We just made the folder, and it is gone: somebody is removing the store.
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
            self._warn("odd", "cannot use an entry; it is a miss, as others like it will be: %s: %s", entry, error)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with self._lock:
                self._counters.errors += 1
                # The folder may have been removed; if so, the next put makes it again.
                self._prepared = False
            raise StoreError(f"disk store {self.root}: {error}") from error
