"""Files by name, in a folder or in object storage: all that a collection of profiles needs of the place where it is.

Whoever can write there chooses what is read, so `read` bounds every answer, and follows no link.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from cuvee.integrations.stores.base import StoreError
from cuvee.integrations.stores.redaction import secrets_of
from cuvee.integrations.stores.safe_files import (
    open_file,
    open_folder,
    read_exactly,
    replace_file,
)

# Profiles are read by others than their writer. They hold no user's data, unlike the entries of a store.
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644


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

        Raises:
            StoreError: the place cannot be reached, or the file has more than `most` bytes, or is a link or no file.
        """

    @abstractmethod
    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files in order, each of them atomically, replacing files of the same names.

        Raises:
            StoreError: the place cannot be reached, or refuses a file. The files before it are written.
        """

    def too_large(self, name: str, most: int, size: int | None = None) -> StoreError:
        """Return the error for a file that is larger than `most` bytes, or whose size is not known."""
        got = "more, or a file of unknown size" if size is None else str(size)
        return StoreError(
            f"{name}: must be at most {most} bytes in {self.shown}, got {got}: it is not what cuvee pushed; push it "
            "again"
        )


class FolderFiles(NamedFiles):
    """Files in a folder. Links are never followed; the folder itself is no link either.

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
            with self._folder_of(name) as folder, open_file(name.rpartition("/")[2], folder) as file:
                size = os.fstat(file).st_size
                if size > most:
                    raise self.too_large(name, most, size)
                return read_exactly(file, size)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(
                f"{name}: must be a file that can be read, in folders that are no links, in {self.shown}, got {error}: "
                "replace it by a copy"
            ) from error

    def write(self, files: Mapping[str, bytes]) -> None:
        """See `NamedFiles.write`."""
        for name, data in files.items():
            try:
                with self._folder_of(name, create=True) as folder:
                    replace_file(name.rpartition("/")[2], data, folder, _FILE_MODE)
            except OSError as error:
                raise StoreError(f"{name}: cannot be written in {self.shown}: {error}") from error

    @contextmanager
    def _folder_of(self, name: str, *, create: bool = False) -> Iterator[int]:
        """Yield the descriptor of the folder that holds a file."""
        with ExitStack() as opened:
            folder = opened.enter_context(open_folder(self._path, None, create=create, mode=_FOLDER_MODE))
            for part in name.split("/")[:-1]:
                folder = opened.enter_context(open_folder(part, folder, create=create, mode=_FOLDER_MODE))
            yield folder


class ObjectFiles(NamedFiles):
    """Files as objects of the same names below a prefix.

    Args:
        url: of the prefix, as `ObjectStore` takes it.
        shown: the same for messages, without secrets.

    Raises:
        InputError: the URL is wrong.
        ImportError: obstore is missing.
    """

    def __init__(self, url: str, shown: str) -> None:
        from cuvee.integrations.stores.objects import connect

        self.shown, self._secrets = shown, secrets_of(url)
        self._place = connect(url)

    def read(self, name: str, most: int) -> bytes | None:
        """See `NamedFiles.read`."""
        from cuvee.integrations.stores.objects import asked, read_object, shown_error

        try:
            data = asked(lambda: read_object(self._place, name, most))
        except FileNotFoundError:
            return None
        except Exception as error:
            failure = StoreError(f"{name}: cannot be read in {self.shown}: {shown_error(error, self._secrets)}")
        else:
            if data is not None:
                return data
            failure = self.too_large(name, most)
        raise failure  # outside, because the cause may hold a password that the server sent back

    def write(self, files: Mapping[str, bytes]) -> None:
        """See `NamedFiles.write`."""
        import obstore

        from cuvee.integrations.stores.objects import asked, shown_error

        for name, data in files.items():
            try:
                asked(lambda name=name, data=data: obstore.put(self._place, name, data))  # type: ignore[misc]
                continue
            except Exception as error:
                why = shown_error(error, self._secrets)
            raise StoreError(f"{name}: cannot be written in {self.shown}: {why}")
