"""Stores that the scheduler and a worker share where they run in one process: memory, connections, circuit breaker."""

from __future__ import annotations

import threading

from cuvee.codec.errors import InputError
from cuvee.integrations.stores import Store, open_store

_stores: dict[tuple[str, ...], tuple[Store, int]] = {}
_stores_lock = threading.Lock()


def borrow_store(urls: tuple[str, ...], executor: str | None) -> Store:
    """Return the store of some URLs, which `return_store` gives back.

    Args:
        urls: fastest first.
        executor: vLLM's name of what runs the workers; "uni": all run in the scheduler's process.

    Raises:
        InputError: a URL or an option of one is invalid, or the workers have processes of their own, and the store is
            the RAM of one.
    """
    with _stores_lock:
        store, users = _stores.get(urls) or (open_store(urls if len(urls) > 1 else urls[0]), 0)
        if not store.shared and executor != "uni":
            raise InputError(
                f"store: must be one that processes share, because the workers run in their own (executor "
                f"{executor!r}), got {store.name}: name a folder, such as file:///var/cache/kv?max_gb=50 on disk or "
                "file:///dev/shm/kv?max_gb=4 in RAM, or a server"
            )
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
