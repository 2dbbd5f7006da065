"""Files by name, in a folder, in object storage or on the hub: all that a collection of profiles needs of its place.

Whoever can write there chooses what is read, so `read` bounds every answer, and follows no link.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cuvee.integrations.profile_collection.location import ProfileLocation
from cuvee.integrations.stores.base import StoreError
from cuvee.integrations.stores.safe_files import open_file, open_folder, read_exactly, temporary_file, write_all

# Profiles are read by others than their writer. They hold no user's data, unlike the entries of a store.
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LONGEST_MESSAGE = 500  # characters of the hub's own messages that are shown

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Listed:
    """A file: its name, its bytes, and when it was written, in seconds since 1970."""

    name: str
    size: int
    time: float


class NamedFiles(ABC):
    """Files under names of several parts, such as `a/b.json`. A part consists of letters, digits, `-`, `_` and dots.

    Attributes:
        shown: the place, for messages.
        remedy: what to do about a damaged file, for messages.
    """

    remedy = "push the profile there again"

    def __init__(self, location: ProfileLocation) -> None:
        self.shown = location.shown

    @abstractmethod
    def read(self, name: str, most: int) -> bytes | None:
        """Return the content of a file; None if there is no such file.

        Raises:
            StoreError: the place cannot be reached, or the file has more than `most` bytes, or is a link or no file.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically, replacing one of the same name.

        Raises:
            StoreError: the place cannot be reached, or refuses it.
        """

    @abstractmethod
    def list(self, folder: str) -> list[Listed]:
        """Return the files below a folder; none if there is no such folder.

        Raises:
            StoreError: the place cannot be reached, or lists nothing.
        """

    def check_size(self, name: str, size: int | None, most: int) -> bool:
        """Refuse a file of more than `most` bytes, or of unknown size, by a StoreError; return True for others."""
        if size is None or size > most:
            got = "a file of unknown size" if size is None else size
            raise StoreError(
                f"{name}: must be at most {most} bytes in {self.shown}, got {got}: it is not what cuvee pushed; push "
                "it again"
            )
        return True


class _FolderFiles(NamedFiles):
    """Files in a folder, which the first `write` creates. Links are never followed; the folder is no link either."""

    def __init__(self, location: ProfileLocation) -> None:
        super().__init__(location)
        self._path = os.path.abspath(os.path.expanduser(location.place))

    def read(self, name: str, most: int) -> bytes | None:
        try:
            with self._folder_of(name) as folder, open_file(name.rpartition("/")[2], folder) as file:
                size = os.fstat(file).st_size
                self.check_size(name, size, most)
                return read_exactly(file, size)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(
                f"{name}: must be a file that can be read, in folders that are no links, in {self.shown}, got {error}: "
                "replace it by a copy"
            ) from error

    def write(self, name: str, data: bytes) -> None:
        # Readers see the old file, or all of the new one, even after a power failure.
        try:
            with self._folder_of(name, create=True) as folder:
                with temporary_file(folder, _FILE_MODE) as (temporary, file):
                    write_all(file, data)
                    os.fsync(file)
                    os.replace(temporary, name.rpartition("/")[2], src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
        except OSError as error:
            raise StoreError(f"{name}: cannot be written in {self.shown}: {error}") from error

    def list(self, folder: str) -> list[Listed]:
        found: list[Listed] = []
        try:
            for path, _, names, opened in os.fwalk(os.path.join(self._path, folder)):
                for name in names:
                    info = os.stat(name, dir_fd=opened, follow_symlinks=False)
                    shown = os.path.relpath(os.path.join(path, name), self._path)
                    found.append(Listed(shown, info.st_size, info.st_mtime))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.shown}: cannot be listed: {error}") from error
        return found

    @contextmanager
    def _folder_of(self, name: str, *, create: bool = False) -> Iterator[int]:
        """Yield the descriptor of the folder that holds a file."""
        with ExitStack() as opened:
            folder = opened.enter_context(open_folder(self._path, None, create=create, mode=_FOLDER_MODE))
            for part in name.split("/")[:-1]:
                folder = opened.enter_context(open_folder(part, folder, create=create, mode=_FOLDER_MODE))
            yield folder


class _ObjectFiles(NamedFiles):
    """Files as objects of the same names below a prefix, the URL of an `ObjectStore`."""

    def __init__(self, location: ProfileLocation) -> None:
        from cuvee.integrations.stores.objects import ObjectStore

        super().__init__(location)
        self._store = ObjectStore(location.place)

    def read(self, name: str, most: int) -> bytes | None:
        fits = partial(self.check_size, name, most=most)
        return self._store.attempt(self._store.read_object, name, fits)

    def write(self, name: str, data: bytes) -> None:
        self._store.attempt(self._store.write_object, name, data)

    def list(self, folder: str) -> list[Listed]:
        found = self._store.attempt(self._store.list_objects, folder)
        return [Listed(name, size, time) for name, size, time in found]


class _HubFiles(NamedFiles):
    """Files in a model repository of the Hugging Face hub, through huggingface_hub.

    Files of a commit never change, so with a commit as the revision huggingface_hub's cache serves them again without a
    network. Access tokens and the address of the hub are huggingface_hub's own (HF_TOKEN, HF_ENDPOINT).
    """

    def __init__(self, location: ProfileLocation) -> None:
        try:
            import huggingface_hub  # noqa: F401 - its absence is reported before any work
        except ImportError as missing:
            raise ImportError("hf:// needs huggingface_hub: pip install cuvee[transformers]") from missing
        super().__init__(location)
        self._repository, self._revision = location.place, location.revision
        self.remedy += f", or, if only this machine's copy is damaged, remove that (hf cache rm model/{location.place})"

    def read(self, name: str, most: int) -> bytes | None:
        # The hub's announced size is checked before a download.
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

        revision = self._revision
        fixed = revision is not None and _COMMIT.fullmatch(revision) is not None
        if not fixed or not isinstance(try_to_load_from_cache(self._repository, name, revision=revision), str):
            url = hf_hub_url(self._repository, name, revision=revision)
            announced = self._ask(lambda: get_hf_file_metadata(url))
            if announced is None:
                return None
            self.check_size(name, announced.size, most)
            revision = announced.commit_hash
            if revision is None or _COMMIT.fullmatch(revision) is None:  # it becomes part of a path in the cache
                raise StoreError(f"{self.shown}: the hub names no commit of it, but {revision!r:.80}")
        cached = self._ask(lambda: hf_hub_download(self._repository, name, revision=revision))
        if cached is None:
            return None
        self.check_size(name, Path(cached).stat().st_size, most)
        return Path(cached).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        if self._revision is not None and _COMMIT.fullmatch(self._revision):
            raise StoreError(f"{self.shown}: is a commit, which never changes: push to a branch, or leave it out")
        named: dict[str, Any] = {"commit_message": "Push a cuvee profile", "revision": self._revision}
        # Asked once first: create_commit asks a hub that is down six times, in half a minute.
        self._ask(lambda: HfApi().model_info(self._repository, revision=self._revision))
        self._ask(lambda: HfApi().create_commit(self._repository, [CommitOperationAdd(name, data)], **named))

    def list(self, folder: str) -> list[Listed]:
        from huggingface_hub import HfApi

        def ask() -> list[Listed]:
            tree = HfApi().list_repo_tree(
                self._repository, folder, recursive=True, expand=True, revision=self._revision
            )
            return [
                Listed(each.path, each.size, 0.0 if (last := each.last_commit) is None else last.date.timestamp())
                for each in tree
                if hasattr(each, "size")
            ]

        return self._ask(ask) or []

    def _ask(self, call: Callable[[], _T]) -> _T | None:
        """Return `call()`; None if there is no such file."""
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            return call()
        except Exception as error:  # of huggingface_hub's HTTP client, which is another one in each of its versions
            # The second says that the hub did not answer, and that the file is not cached.
            if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
                return None
            why = " ".join(str(error).split())[:_LONGEST_MESSAGE]
            raise StoreError(
                f"{self.shown}: the hub failed, or cannot be reached: {type(error).__name__}: {why}"
            ) from error


_PLACES: dict[str, type[NamedFiles]] = {"folder": _FolderFiles, "objects": _ObjectFiles, "hub": _HubFiles}


def files_at(location: ProfileLocation) -> NamedFiles:
    """Return the files of a collection.

    Raises:
        InputError: obstore does not accept the URL.
        ImportError: obstore or huggingface_hub is missing.
    """
    return _PLACES[location.kind](location)
