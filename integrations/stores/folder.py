"""The entries of a folder, and its size in one small file. Every function takes the descriptor of the open root.

The lock file of the folder holds how many bytes and entries there are. Whoever renames or deletes an entry holds the
lock, for microseconds, and updates the figures, so a put knows whether it fits without looking at any other file.

A scan that counts corrects the figures: it starts with what had been added by then (`Figures.added`), and counts what
was added meanwhile in addition, even if it saw it. Until the next such scan the bytes may be too high. Figures are
wrong until then, too, if a process dies between the two, or a hand deletes files. The next put notices a damaged lock.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from xxhash import xxh3_64_digest

from cuvee.integrations.stores.base import RECORDS, is_key, is_record, is_tenant
from cuvee.integrations.stores.safe_files import file_lock, open_file, open_folder

LOCK = ".lock"
_FIELDS = struct.Struct("<4sqqq")
_MAGIC = b"cuvI"


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
        self.bytes = max(0, self.bytes - size)
        self.entries = max(0, self.entries - 1)


@contextmanager
def locked(root: int) -> Iterator[Figures]:
    """Hold the folder's lock, yield its figures, and write them back if the body changes them.

    Raises:
        TimeoutError: another process has held the lock for long. It is stopped, or debugged.
    """
    with file_lock(LOCK, root) as file:
        before = _parse(os.pread(file, 64, 0))
        figures = replace(before)
        try:
            yield figures
        finally:
            if figures != before:
                _write(file, figures)


def figures_of(root: int) -> Figures | None:
    """Return the figures as they are at this moment, without the lock; None: there are none, or they are just changing.

    Raises:
        OSError: the file cannot be read.
    """
    with open_file(LOCK, root) as file:
        figures = _parse(os.pread(file, 64, 0))
    return figures if figures.added else None


def recount(root: int, found: int, entries: int, added: int) -> int:
    """Correct the figures after a scan that found this many bytes and entries; return the bytes that the folder holds.

    `added`: `Figures.added` before the scan.
    """
    with locked(root) as figures:
        figures.bytes, figures.entries = found + figures.added - added, entries
        return figures.bytes


def _write(file: int, figures: Figures) -> None:
    fields = _FIELDS.pack(_MAGIC, figures.bytes, figures.entries, figures.added)
    os.pwrite(file, fields + xxh3_64_digest(fields), 0)


def _parse(data: bytes) -> Figures:
    fields = data[: _FIELDS.size]
    if len(fields) < _FIELDS.size or data[_FIELDS.size :] != xxh3_64_digest(fields):
        return Figures()
    magic, *figures = _FIELDS.unpack(fields)
    return Figures(*figures) if magic == _MAGIC and min(figures) >= 0 else Figures()


@contextmanager
def open_shard(root: int, key: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder that holds an entry, or create it; yield its descriptor, and the name of the file."""
    tenant, _, name = key.partition("/")
    with open_folder(tenant, root, create=create) as folder, open_folder(name[:2], folder, create=create) as shard:
        yield shard, name


def size_of(root: int, key: str) -> int | None:
    """Return the bytes of an entry's file; None if there is none."""
    with suppress(FileNotFoundError), open_shard(root, key) as (shard, name):
        return size_in(shard, name)
    return None


def size_in(folder: int, name: str) -> int | None:
    """Return the bytes of a file in an open folder; None if there is none."""
    with suppress(FileNotFoundError):
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return info.st_size if stat.S_ISREG(info.st_mode) else None
    return None


def remove_entry(root: int, key: str, seen: tuple[int, int] | None = None) -> bool:
    """Delete an entry, and folders that become empty; return whether it was there.

    Another one, or one used since it was `seen` (inode, ns), stays.
    """
    tenant, _, name = key.partition("/")
    with (
        suppress(FileNotFoundError),
        open_folder(tenant, root) as folder,
        open_folder(name[:2], folder) as shard,
        locked(root) as figures,
    ):
        info = os.stat(name, dir_fd=shard, follow_symlinks=False)
        if seen in (None, (info.st_ino, info.st_mtime_ns)):
            os.unlink(name, dir_fd=shard)
            if stat.S_ISREG(info.st_mode) and not is_record(key):
                figures.remove(info.st_size)
            with suppress(OSError):  # a folder that is not empty stays
                os.rmdir(name[:2], dir_fd=folder)
                os.rmdir(tenant, dir_fd=root)
            return True
    return False


def remove_empty(root: int, tenant: str) -> None:
    """Delete the empty folders of a tenant: a process that was killed while it named an entry leaves some."""
    with suppress(FileNotFoundError), open_folder(tenant, root) as folder, locked(root), suppress(OSError):
        for shard in filter(is_tenant, os.listdir(folder)):
            with suppress(OSError):  # not empty
                os.rmdir(shard, dir_fd=folder)
        os.rmdir(tenant, dir_fd=root)


def tenants_of(root: int) -> list[str]:
    """Return the tenants that have a folder, records apart."""
    return [name for name in os.listdir(root) if is_tenant(name) and name != RECORDS]


def entries_of(root: int, tenant: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the key and the state of each entry of a tenant. Files with other names are passed over."""
    with suppress(FileNotFoundError), open_folder(tenant, root) as folder:
        for shard in filter(is_tenant, os.listdir(folder)):
            with suppress(FileNotFoundError), open_folder(shard, folder) as files:
                for name in os.listdir(files):
                    key = f"{tenant}/{name}"
                    if is_key(key) and name[:2] == shard:
                        with suppress(FileNotFoundError):
                            yield key, os.stat(name, dir_fd=files, follow_symlinks=False)
