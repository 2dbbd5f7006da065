"""Blobs in files of a folder that several processes may share.

    root/
      <tenant>/<id[:2]>/<id>   an entry: envelope and blob, complete from the moment it has this name
      .tmp-<random>            an entry that is being written; its writer holds an flock on it
      .gone-<random>/          a deleted tenant, being removed
      .lock                    flock: held while an entry or a folder gets or loses its name; holds the folder's size
      .evict                   flock: one process at a time scans and evicts (`folder_index`)

**No link is followed** below the root. Every operation opens the root again, checks its owner and its mode, and
descends from there one folder at a time (see `safe_files`). Swapping a folder for a link meanwhile gains an attacker
nothing. A link inside the store is removed or refused; its target is never touched.

The modification time of an entry is the time of its last use. Its envelope holds the time when it was written.

**Unusable entries.** If an entry's place is taken by a folder, a FIFO or a socket, or its permissions forbid reading,
or its sectors are bad, the entry is a miss, which is counted, and logged once.

**Crashes.** `rename` gives an entry its name after all of its bytes are written. A killed process leaves complete
entries and at most one temporary file per writing thread. Nothing is synced, so a power failure may damage an entry;
its checksum reveals that.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from cuvee.codec.errors import CorruptError, CuveeError, InputError
from cuvee.codec.support.forks import tell_after_fork
from cuvee.integrations.stores.base import (
    MAX_ENTRY_BYTES,
    Store,
    TierCounters,
    check_bytes,
    check_key,
    check_tenant,
    check_ttl,
    is_key,
    is_tenant,
)
from cuvee.integrations.stores.envelope import HEADER_BYTES, ExpiredError, make_header, parse_header
from cuvee.integrations.stores.folder_index import FolderBudget, locked
from cuvee.integrations.stores.monitor import StoreMonitor
from cuvee.integrations.stores.safe_files import (
    FILE_FLAGS,
    list_folder,
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

# Seconds before the use of an entry is recorded again, which is also the error in the order of eviction. Recording it
# takes microseconds, and changes one inode, which Linux writes out about every 30 s.
_TOUCH_SECONDS = 10.0
# Errors that concern one file rather than its disk: a folder or a FIFO in its place, or its permissions.
_UNUSABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ELOOP, errno.ENXIO}
    | {errno.ENODEV, errno.ESTALE, errno.EFBIG}
)
_BAD_SECTORS = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ})


class DiskStore(Store):
    """Blobs in a folder, which the first put creates. Folders get mode 0700 and files 0600, because they hold prompts.

    Processes of one user may share a folder. Each process applies its own budget, so give all of them the same one. The
    file system must support flock and an atomic rename, as local file systems and NFSv4 do.

    The files of entries stay within the budget, apart from those that are being written. Eviction runs in the
    background: a put that finds no room for a second is given up. `flush` waits for eviction in progress.

    A folder is refused if its owner is neither this user nor root, or if its group or others may write to it: they
    could replace the caches that a model continues from. A link to the folder must not belong to another user either.

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
        max_entry: largest blob, in bytes. Larger ones are neither kept nor read.

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
    ) -> None:
        check_bytes("max_bytes", max_bytes)
        check_bytes("max_entry", max_entry)
        check_ttl(ttl)
        self.max_bytes, self.ttl, self.max_entry = max_bytes, ttl, max_entry
        if not os.fspath(path):
            raise InputError("path: must name a folder, got an empty string")
        self.root = os.path.abspath(path)
        # An unsafe folder is refused here if it exists. Every operation checks again.
        with suppress(OSError):
            for look in (os.lstat, os.stat):
                if problem := objection(look(self.root), self.root):
                    raise InputError(f"path: {problem}")
        self._monitor = StoreMonitor(_log, f"disk store {self.root}")
        self._budget = FolderBudget(max_bytes, ttl, self._opened, self._tolerate)
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Forget the thread that evicts, which only the parent has."""
        self._budget.after_fork()

    # --- operations ---

    def get(self, key: str) -> bytes | None:
        """Return the blob of `key`; None if it is not there. A corrupt or expired entry is deleted, and is a miss.

        Raises:
            StoreError: the store could not be read.
        """
        tenant, name = check_key(key)
        blob: bytes | None = None
        problem: CuveeError | None = None
        with self._errors(), suppress(FileNotFoundError), self._opened() as root, self._tolerate(key):
            blob, problem = self._read(root, tenant, name, key)
        self._monitor.answered(blob, key, problem)
        return blob

    def put(self, key: str, blob: bytes) -> bool:
        """Write an entry; False if it exceeds a limit, if there is no room, or if its place is taken by, say, a folder.

        Raises:
            StoreError: the entry could not be written: for example, the disk is full, or the folder is missing,
                read-only or writable by others. An earlier entry of this key stays.
        """
        tenant, name = check_key(key)
        size = HEADER_BYTES + len(blob)
        limit = min(HEADER_BYTES + self.max_entry, size if self.max_bytes is None else self.max_bytes)
        if size > limit:
            self._monitor.too_large(len(blob), limit - HEADER_BYTES)
            return False
        with self._errors(), self._opened(create=True) as root:
            if not self._budget.fits(root, size):
                self._monitor.count(dropped=1)
                self._monitor.warn("full", "is full, and old entries are not deleted as fast as new ones arrive")
                return False
            written = self._write(root, tenant, name, make_header(key, blob, time.time()), blob)
        if written:
            self._monitor.stored(blob)
        return written

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key has a file now. With a `ttl`, its header is read, and an expired entry is absent."""
        wanted = [check_key(key) for key in keys]
        there = [False] * len(wanted)
        with self._errors(), suppress(FileNotFoundError), self._opened() as root, ExitStack() as tenants:
            folders: dict[str, int | None] = {}
            for at, (tenant, name) in enumerate(wanted):
                if tenant not in folders:
                    folders[tenant] = None
                    with self._tolerate(tenant):
                        folders[tenant] = tenants.enter_context(open_folder(root, tenant))
                if (folder := folders[tenant]) is not None:
                    with self._tolerate(f"{tenant}/{name}"):
                        there[at] = self._present(folder, name)
        return there

    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""
        tenant, name = check_key(key)
        with (
            self._errors(),
            suppress(FileNotFoundError),
            self._opened() as root,
            self._tolerate(key),
            open_folder(root, tenant) as folder,
            open_folder(folder, name[:2]) as shard,
            locked(root) as figures,
        ):
            info = os.stat(name, dir_fd=shard, follow_symlinks=False)
            os.unlink(name, dir_fd=shard)
            if figures is not None:
                figures.remove(info.st_size)
            return True
        return False

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant, all at once for readers. Entries that are put meanwhile stay.

        Raises:
            StoreError: some entries could not be deleted; the others are gone.
        """
        folder, gone = check_tenant(tenant), ".gone-" + secrets.token_hex(8)
        with self._errors(), suppress(FileNotFoundError), self._opened() as root:
            # The lock prevents renames into place, so that no entry ends up in the folder that is being removed.
            with locked(root):
                os.rename(folder, gone, src_dir_fd=root, dst_dir_fd=root)
            count, size = remove_tree(gone, root)
            with locked(root) as figures:
                if figures is not None:
                    figures.bytes -= size
                    figures.entries -= count
            return count
        return 0

    def clear(self) -> int:
        """Delete the entries of all tenants, one tenant at a time. Files that are not of the store stay."""
        with self._errors(), suppress(FileNotFoundError), self._opened() as root:
            return sum(map(self.delete_tenant, filter(is_tenant, os.listdir(root))))
        return 0

    def keys(self, tenant: str) -> Iterator[str]:
        """Yield the keys of a tenant's entries. Files with other names are passed over."""
        folder = check_tenant(tenant)
        with self._errors(), suppress(FileNotFoundError), self._opened() as root, open_folder(root, folder) as shards:
            for shard in [entry.name for entry in list_folder(shards)]:
                names: list[str] = []
                with self._tolerate(f"{folder}/{shard}"), open_folder(shards, shard) as files:
                    names = [entry.name for entry in list_folder(files)]
                yield from filter(is_key, [f"{folder}/{name}" for name in names])

    def counters(self) -> dict[str, TierCounters]:
        """Return a snapshot. `entries` and `bytes` are those of all processes; they are known with a budget only."""
        held = self._budget.held()
        snapshot = self._monitor.snapshot(*((None, None) if held is None else (held.entries, held.bytes)))
        snapshot.evictions += self._budget.evictions
        snapshot.expired += self._budget.expired
        return {self.name: snapshot}

    def flush(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for eviction in progress; return whether none is in progress."""
        return self._budget.wait(timeout)

    # --- files ---

    @contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[int]:
        """Open the root, or create it, check that it is safe to use, and yield its descriptor.

        Raises:
            FileNotFoundError: the root does not exist.
            PermissionError: others can write to the root; the message says what to do.
        """
        try:
            root = open_root(self.root)
        except FileNotFoundError:
            if not create:
                raise
            make_folder(self.root, 0o700)
            root = open_root(self.root)
        try:
            if problem := objection(os.fstat(root), self.root):
                raise PermissionError(f"path: {problem}")
            yield root
        finally:
            os.close(root)

    def _read(self, root: int, tenant: str, name: str, key: str) -> tuple[bytes | None, CuveeError | None]:
        """Return the blob of an entry, or None and why the entry is bad. A bad entry is deleted."""
        with open_folder(root, tenant) as folder, open_folder(folder, name[:2]) as shard:
            file, info = open_file(name, os.O_RDONLY, shard)
            try:
                if info.st_size > HEADER_BYTES + self.max_entry:
                    raise OSError(errno.EFBIG, f"{info.st_size} bytes are more than max_entry_mb allows", name)
                try:
                    header = parse_header(os.read(file, HEADER_BYTES))
                    header.verify(key, self.ttl)
                    # Checked before memory of this length is allocated.
                    if info.st_size != HEADER_BYTES + header.length:
                        stated = HEADER_BYTES + header.length
                        raise CorruptError(f"entry: must have {stated} bytes, as its header says, got {info.st_size}")
                    blob = read_exactly(file, header.length)
                    header.verify_payload(blob)
                except (CorruptError, ExpiredError) as error:
                    self._discard(root, shard, name, info)
                    return None, error
                if abs(time.time() - info.st_mtime) >= _TOUCH_SECONDS:
                    try:
                        os.utime(file)
                    except OSError as error:
                        self._monitor.not_touched(error)
                return blob, None
            finally:
                os.close(file)

    def _discard(self, root: int, shard: int, name: str, info: os.stat_result) -> None:
        """Delete a bad entry, the inode in `info`. The caller holds it open, so no other file can have that inode."""
        try:
            # No entry is renamed into place while the lock is held, so a good entry that replaced the bad one is kept.
            with locked(root) as figures, suppress(FileNotFoundError):
                now = os.stat(name, dir_fd=shard, follow_symlinks=False)
                if (now.st_dev, now.st_ino) == (info.st_dev, info.st_ino):
                    os.unlink(name, dir_fd=shard)
                    if figures is not None:
                        figures.remove(now.st_size)
        except OSError as failure:
            self._monitor.not_deleted(failure)

    def _write(self, root: int, tenant: str, name: str, header: bytes, blob: bytes) -> bool:
        """Write an entry; return False if its place is taken by, say, a folder, or others have taken the room."""
        temporary, written = ".tmp-" + secrets.token_hex(8), False
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE_FLAGS, 0o600, dir_fd=root)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(file, header)
            write_all(file, blob)
            size = len(header) + len(blob)
            # The lock is taken before the folders are opened or created, so that no scan removes them meanwhile.
            with (
                locked(root) as figures,
                self._tolerate(f"{tenant}/{name}", writing=True),
                open_folder(root, tenant, create=True) as folder,
                open_folder(folder, name[:2], create=True) as shard,
            ):
                earlier = _size_of(name, shard)
                held = 0 if figures is None else figures.bytes - (earlier or 0)
                if self.max_bytes is not None and held + size > self.max_bytes:
                    self._monitor.count(dropped=1)
                    return False
                os.replace(temporary, name, src_dir_fd=root, dst_dir_fd=shard)
                written = True
                if figures is not None:
                    if earlier is not None:
                        figures.remove(earlier)
                    figures.add(size)
                self._budget.grown(figures)
            return written
        finally:
            if not written:
                unlink(temporary, root)
            os.close(file)

    def _present(self, folder: int, name: str) -> bool:
        """Return whether the tenant of `folder` has an entry of this name."""
        try:
            with open_folder(folder, name[:2]) as shard:
                if self.ttl is None:
                    info = os.stat(name, dir_fd=shard, follow_symlinks=False)
                    return stat.S_ISREG(info.st_mode) and 0 <= info.st_size - HEADER_BYTES <= self.max_entry
                file, info = open_file(name, os.O_RDONLY, shard)
        except FileNotFoundError:
            return False
        try:
            # An entry that is too large counts as absent, so that a smaller one can replace it.
            small = info.st_size - HEADER_BYTES <= self.max_entry
            return small and not parse_header(os.read(file, HEADER_BYTES)).expired(self.ttl)
        except CorruptError:
            return False
        finally:
            os.close(file)

    # --- errors ---

    @contextmanager
    def _tolerate(self, entry: str, *, writing: bool = False) -> Iterator[None]:
        """Tolerate and count errors that concern only one entry or its folder. A missing one is no error.

        Raises:
            OSError: the error concerns the whole store.
        """
        try:
            yield
        except FileNotFoundError:
            # The folder was just created and is gone: the store is being removed.
            if writing:
                raise
        except OSError as error:
            if error.errno not in (_UNUSABLE if writing else _UNUSABLE | _BAD_SECTORS):
                raise
            self._monitor.unusable(entry, error)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._monitor.failure(error, with_type=False) from error


def _size_of(name: str, parent: int) -> int | None:
    """Return the bytes of the file that an entry will replace; None if there is none."""
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None
