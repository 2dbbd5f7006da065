"""Files by name, in a folder or in a store: all that a collection of profiles needs of the place where it is.

Whoever can write there chooses what is read, so `read` bounds every answer, and follows no link.
"""

from __future__ import annotations

import errno
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from cuvee.codec.errors import CorruptError, InputError
from cuvee.codec.identity import store_key
from cuvee.integrations.stores.base import Store, StoreError
from cuvee.integrations.stores.safe_files import (
    make_folder,
    open_file,
    open_folder,
    open_root,
    read_exactly,
    replace_file,
)
from cuvee.integrations.stores.urls import open_store

# Profiles are read by others than their writer. They hold no user's data, unlike the entries of a store.
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644
# What opening a link, or something else in place of a file or a folder, gives.
_NO_FILE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV})
_TENANT = "cuvee profiles"  # keeps profiles apart from the caches of all tenants of the same store


class NamedFiles(ABC):
    """Files under names of several parts, such as `a/b.json`. A part consists of letters, digits, `-`, `_` and dots.

    Attributes:
        shown: the place, for messages.
        remedy: what to do about a damaged file, for messages.
    """

    shown: str
    remedy = "push the profile there again"

    @abstractmethod
    def read(self, name: str, most: int) -> bytes | None:
        """Return the content of a file; None if there is no such file.

        Args:
            name: of the file.
            most: the most bytes that the file may have.

        Raises:
            CorruptError: the place holds the file, but damaged.
            StoreError: the place cannot be reached, or the file is too large, a link or otherwise no file.
        """

    @abstractmethod
    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files in order, each of them atomically, replacing files of the same names.

        Raises:
            InputError: a file is larger than the place takes.
            StoreError: the place cannot be reached, or refuses a file. The files before it are written.
        """

    def close(self) -> None:  # noqa: B027 - a folder holds nothing open
        """Release connections."""


class FolderFiles(NamedFiles):
    """Files in a folder. Links below it are never followed; the folder itself may be a link, but not another user's.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     files = FolderFiles(folder)
        ...     files.write({"a/b.json": b"{}"})
        ...     files.read("a/b.json", most=100), files.read("a/c.json", most=100)
        (b'{}', None)

    Args:
        path: the folder, which the first `write` creates.
    """

    def __init__(self, path: str) -> None:
        self.shown = path
        self._path = os.path.abspath(os.path.expanduser(path))

    def read(self, name: str, most: int) -> bytes | None:
        """See `NamedFiles.read`."""
        try:
            with self._folder_of(name) as folder:
                file, info = open_file(name.rpartition("/")[2], os.O_RDONLY, folder)
                try:
                    if info.st_size > most:
                        raise StoreError(_too_large(name, self.shown, most, info.st_size))
                    data = read_exactly(file, info.st_size + 1)
                finally:
                    os.close(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _NO_FILE:
                raise StoreError(
                    f"{name}: must be a file, in folders that are no links, in {self.shown}, got {error}: replace it "
                    "by a copy"
                ) from error
            raise StoreError(f"{name}: cannot be read in {self.shown}: {error}") from error
        if len(data) != info.st_size:
            raise StoreError(f"{name}: must not change while it is read, got another length in {self.shown}: try again")
        return data

    def write(self, files: Mapping[str, bytes]) -> None:
        """See `NamedFiles.write`."""
        for name, data in files.items():
            try:
                make_folder(self._path, _FOLDER_MODE)
                with self._folder_of(name, create=True) as folder:
                    replace_file(name.rpartition("/")[2], data, folder, _FILE_MODE)
            except OSError as error:
                raise StoreError(f"{name}: cannot be written in {self.shown}: {error}") from error

    @contextmanager
    def _folder_of(self, name: str, *, create: bool = False) -> Iterator[int]:
        """Yield the descriptor of the folder that holds a file."""
        with ExitStack() as opened:
            folder = open_root(self._path)
            opened.callback(os.close, folder)
            for part in name.split("/")[:-1]:
                folder = opened.enter_context(open_folder(folder, part, create=create, mode=_FOLDER_MODE))
            yield folder


class StoreFiles(NamedFiles):
    """Files as entries of a store, in the store's envelopes, whose checksums tell a damaged file from a good one.

    Args:
        url: of the store, as `open_store` takes it.
        shown: the same for messages, without secrets.

    Raises:
        InputError: the URL is wrong, or names more than one store.
        ImportError: the package of the store's client is missing.
    """

    def __init__(self, url: str, shown: str) -> None:
        self.shown = shown
        self._store: Store = open_store(url, guarded=False)

    def read(self, name: str, most: int) -> bytes | None:
        """See `NamedFiles.read`."""
        before = self._faults()
        data = self._store.get(_key(name))
        # A store answers for a damaged entry as for a missing one, and counts it.
        damaged, unusable = (now - then for now, then in zip(self._faults(), before, strict=True))
        if damaged:
            raise CorruptError(f"{name}: was damaged in {self.shown}: {self.remedy}")
        if unusable:
            raise StoreError(
                f"{name}: must be readable and within max_entry_mb in {self.shown}, got an entry that is not (the log "
                "says more): push the profile there again, or raise max_entry_mb"
            )
        if data is not None and len(data) > most:
            raise StoreError(_too_large(name, self.shown, most, len(data)))
        return data

    def write(self, files: Mapping[str, bytes]) -> None:
        """See `NamedFiles.write`."""
        for name, data in files.items():
            if not self._store.put(_key(name), data):
                raise InputError(
                    f"{name}: must be within what one entry may hold in {self.shown}, got {len(data)} bytes: raise "
                    "max_entry_mb (here and where it is read), or choose a folder or the hub"
                )

    def close(self) -> None:
        """Close the store."""
        with suppress(StoreError):
            self._store.close()

    def _faults(self) -> tuple[int, int]:
        tiers = self._store.counters().values()
        return sum(tier.corrupt for tier in tiers), sum(tier.errors for tier in tiers)


def _key(name: str) -> str:
    return store_key(_TENANT, hashlib.blake2b(name.encode(), digest_size=32, person=b"cuvee-profiles").digest())


def _too_large(name: str, shown: str, most: int, size: int) -> str:
    return f"{name}: must be at most {most} bytes in {shown}, got {size}: it is not what cuvee pushed; push it again"
