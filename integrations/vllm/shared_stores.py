"""Stores that the scheduler and a worker share where they run in one process: memory, connections, circuit breaker."""

from __future__ import annotations

import threading

from cuvee.integrations.stores import Store, open_store

_stores: dict[tuple[str, ...], tuple[Store, int]] = {}
_stores_lock = threading.Lock()


def borrow_store(urls: tuple[str, ...]) -> Store:
    """Return the store of some URLs, which `return_store` gives back.

    Raises:
        InputError: a URL or an option of one is invalid.
    """
    with _stores_lock:
        store, users = _stores.get(urls) or (open_store(urls if len(urls) > 1 else urls[0]), 0)
        _stores[urls] = store, users + 1
        return store


def return_store(urls: tuple[str, ...]) -> None:
    """Give a store back; the last user closes it."""
    with _stores_lock:
        store, users = _stores.pop(urls)
        if users > 1:
            _stores[urls] = store, users - 1
            return
    store.close()
