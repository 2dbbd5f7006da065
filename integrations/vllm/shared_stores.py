"""Stores that the scheduler and a worker share where they run in one process: memory, connections, circuit breaker.

The default store of several processes is a folder in shared memory. Whoever uses it holds a lock, and the last one that
ends removes it. Engines that are killed leave it to the next ones.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from contextlib import suppress

from cuvee.integrations.stores import Store, open_store

logger = logging.getLogger(__name__)

_USERS = ".users"

_stores: dict[tuple[str, ...], tuple[Store, SharedFolder | None, int]] = {}
_stores_lock = threading.Lock()


def borrow_store(urls: tuple[str, ...], *, unnamed: bool = False) -> Store:
    """Return the store of some URLs, which `return_store` gives back.

    Args:
        urls: fastest first.
        unnamed: it is the default store, which ends with its last user.

    Raises:
        InputError: a URL or an option of one is invalid.
    """
    with _stores_lock:
        shared = _stores.get(urls)
        if shared is None:
            scheme, _, rest = urls[0].partition("://")
            folder = SharedFolder(rest.partition("?")[0]) if unnamed and scheme == "file" else None
            shared = open_store(urls if len(urls) > 1 else urls[0]), folder, 0
        store, folder, users = shared
        _stores[urls] = store, folder, users + 1
        return store


def return_store(urls: tuple[str, ...]) -> None:
    """Give a store back; the last user closes it."""
    with _stores_lock:
        store, folder, users = _stores.pop(urls)
        if users > 1:
            _stores[urls] = store, folder, users - 1
            return
    store.close()
    if folder is not None:
        folder.leave()


class SharedFolder:
    """A folder that is removed when the last process that uses it leaves.

    Args:
        path: made if there is none.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None
        try:
            while self._file is None:
                self._file = self._enter()
        except OSError as error:
            logger.warning("cuvee: the default store %s will not be removed: %s", path, error)

    def _enter(self) -> int | None:
        """Lock the file of the users, and return its descriptor; None if it was removed meanwhile."""
        with suppress(FileExistsError):
            os.mkdir(self._path, 0o700)
        try:
            file = os.open(
                os.path.join(self._path, _USERS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)  # waits for one that removes the folder
        if os.fstat(file).st_nlink:
            return file
        os.close(file)
        return None

    def leave(self) -> None:
        """Remove the folder, unless others use it. A second call does nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self._path, ignore_errors=True)
        finally:
            os.close(file)
