"""Identities of LoRA adapters: the files that an engine read an adapter's weights from.

An engine reads them when it is told to load the adapter, or in the step of its first request, and again after it has
dropped them for others. So an adapter is identified by its files as they are at each request, which must be those of
the first one, or of the load; and before entries are stored, each rank compares the files again. If they have changed,
nobody knows which weights the engine has: from then on its requests are computed, and not stored.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet

from cuvee.codec.errors import InputError
from cuvee.codec.support.once import Once
from cuvee.integrations.identity.checkpoint import checkpoint_files, checkpoint_identity
from cuvee.naming.identity import canonical

logger = logging.getLogger(__name__)

Signature = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of an adapter.

    Attributes:
        path: their folder, or a hub id in the local cache.
        content: `checkpoint_identity`.
    """

    path: str
    content: str

    def identity(self, name: str) -> str:
        """Return the identity of the adapter by its name, `Scope.adapter`."""
        return canonical(name.encode("utf-8", "surrogatepass"), self.content.encode()).hex()


class AdapterFolders:
    """Reads the folders of adapters, each once as long as its files stay the same. Threads may use it at once."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Signature, AdapterFiles]] = {}

    def read(self, path: str) -> tuple[Signature, AdapterFiles]:
        """Return what tells whether the files of a folder have changed, and the files.

        Raises:
            InputError, OSError: they cannot be read, or change at this moment.
        """
        signature = _signature(path)
        known = self._read.get(path)
        if known is None or known[0] != signature:
            known = signature, AdapterFiles(path, checkpoint_identity(path))
            if _signature(path) != signature:
                raise InputError(f"adapter: must not change while it is read, got {path}")
            self._read[path] = known  # only now: other threads take it as it is
        return known

    def holds(self, files: AdapterFiles) -> bool:
        """Return whether a folder still holds these files."""
        try:
            return self.read(files.path)[1] == files
        except (InputError, OSError):
            return False


class Adapters:
    """The adapters of one engine, by the numbers that it gives them.

    Attributes:
        changes: how often the engine has loaded or dropped weights, as far as it tells.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._folders = AdapterFolders()
        self._read_from: dict[int, tuple[str, Signature] | None] = {}  # where its weights are from; None: unknown
        self._found: dict[int, tuple[float, int, str, AdapterFiles | None]] = {}  # since when, `changes`, path
        self._once = Once(logger)

    def find(self, number: int, name: str, path: str, since: float = math.inf) -> AdapterFiles | None:
        """Return the files that the engine has an adapter's weights from; None: that is not known, and it is logged.
        The answer holds until `changes` changes. One thread uses this, beside the engine's.

        Args:
            number: of the adapter in the engine, which has one set of weights by each.
            name: in requests.
            path: its folder, or a hub id in the local cache.
            since: `time.monotonic` of the request. If the files were looked at after that for another request, they are
                not looked at again, so requests that wait together cost as much as one.
        """
        began, changes = time.monotonic(), self.changes
        if number in self._found:
            last, then, where, files = self._found[number]
            if last > since and (then, where) == (changes, path):
                return files
        files = self._find(number, name, path)
        self._found[number] = began, changes, path, files
        return files

    def _find(self, number: int, name: str, path: str) -> AdapterFiles | None:
        try:
            # Noted before the files are read, which takes long: the engine may read them meanwhile.
            noted = self._read_from.setdefault(number, (path, _signature(path)))
            signature, files = self._folders.read(path)
        except (InputError, OSError) as error:  # tried again at the next request
            self._warn(name, path, str(error))
            return None
        if noted == (path, signature):
            return files
        self._read_from[number] = None
        self._warn(name, path, "its files have changed since the engine may have read them; load it anew or restart")
        return None

    def overdue(self, number: int) -> None:
        """Note that the engine begins with an adapter's request, and may read its weights, before `find` has ended."""
        self._read_from.setdefault(number, None)

    @contextmanager
    def loading(self, number: int, path: str, again: bool) -> Iterator[None]:
        """Note from which files the engine reads an adapter's weights inside this context.

        Args:
            number: of the adapter in the engine.
            path: its folder, or a hub id in the local cache.
            again: the engine reads them even if it has an adapter by this number.
        """
        before, reads = self._signature(path), again or number not in self._read_from
        yield
        if reads:
            self.changes += 1
            self._read_from[number] = None if before is None or before != self._signature(path) else (path, before)

    def unloaded(self, number: int) -> None:
        """Forget an adapter whose weights the engine has dropped."""
        self.changes += 1
        self._read_from.pop(number, None)

    def _signature(self, path: str) -> Signature | None:
        try:
            return _signature(path)
        except (InputError, OSError):
            return None

    def _warn(self, name: str, path: str, reason: str) -> None:
        self._once((name, path), "cuvee: requests of adapter %r (%s) are not cached: %s", name, path, reason)


_watching: WeakSet[Adapters] = WeakSet()


def watch_loads(adapters: Adapters, executor: Any) -> None:
    """Tell adapters what vLLM loads and unloads by name; it does not tell connectors.

    Args:
        adapters: of the engine in this process.
        executor: vLLM's class `Executor`, whose methods `add_lora` and `remove_lora` all its engines call.
    """
    _watching.add(adapters)
    if hasattr(executor.add_lora, "__wrapped__"):
        return
    add, remove = executor.add_lora, executor.remove_lora

    @wraps(add)
    def add_lora(self: Any, lora_request: Any) -> Any:
        with ExitStack() as stack:
            for each in list(_watching):
                again = bool(lora_request.load_inplace)
                stack.enter_context(each.loading(lora_request.lora_int_id, lora_request.lora_path, again))
            return add(self, lora_request)

    @wraps(remove)
    def remove_lora(self: Any, lora_id: int) -> Any:
        for each in _watching:
            each.unloaded(lora_id)
        return remove(self, lora_id)

    executor.add_lora, executor.remove_lora = add_lora, remove_lora


def _signature(path: str) -> Signature:
    """Return what changes whenever the files of a folder change, or another folder takes its place.

    Raises:
        InputError, OSError: there is none.
    """
    given = Path(path)
    link = given.lstat() if given.is_symlink() else None
    root, files = checkpoint_files(path)
    stats = [(str(file.name), os.stat(file)) for file in files]
    folder = root.stat()
    return (
        (folder.st_dev, folder.st_ino, *(() if link is None else (link.st_ino, link.st_ctime_ns))),
        *((name, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats),
    )
