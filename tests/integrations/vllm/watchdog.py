"""A watchdog over the thread of an engine: it notes files, sockets and long hashes inside the hooks that it watches."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cuvee.integrations.vllm.scheduler import media_names

_EVENTS = ("open", "os.listdir", "os.scandir", "socket.connect", "socket.getaddrinfo", "fcntl.flock", "glob.glob")
_CALLS = ((os, "stat"), (os, "lstat"), (os, "fstat"), (fcntl, "flock"))
LONGEST = 64 << 10  # bytes that may be hashed in a hook


class Watchdog:
    """Notes what happens inside hooks, by thread.

    Attributes:
        bites: what should not have happened, and in which hook.
        hooks: names of the hooks that were called.
    """

    def __init__(self) -> None:
        self.bites: list[tuple[str, str]] = []
        self.hooks: set[str] = set()
        self._inside: dict[int, str] = {}

    def note(self, what: str) -> None:
        hook = self._inside.get(threading.get_ident())
        if hook is not None:
            self.bites.append((what, hook))

    def around(self, hook: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            thread = threading.get_ident()
            before = self._inside.get(thread)
            self.hooks.add(hook)
            self._inside[thread] = hook
            try:
                return usual(*arguments, **named)
            finally:
                if before is None:
                    del self._inside[thread]
                else:
                    self._inside[thread] = before

        return watched

    def before(self, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            self.note(name)
            return usual(*arguments, **named)

        return watched

    def hashing(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def watched(data: Any = b"", *arguments: Any, **named: Any) -> Any:
            if memoryview(data).nbytes > LONGEST:
                self.note("hash")
            return usual(data, *arguments, **named)

        return watched


@contextmanager
def watched(hooks: Mapping[type, Sequence[str]]) -> Iterator[Watchdog]:
    """Watch these methods of classes, of objects that are made inside this context."""
    dog, parts = Watchdog(), media_names._parts
    watching = True
    # A hook of the interpreter stays; this one sleeps afterwards.
    sys.addaudithook(lambda event, _: dog.note(event) if watching and event in _EVENTS else None)

    def watched_parts(value: Any) -> Iterator[bytes | memoryview]:
        for part in parts(value):
            if memoryview(part).nbytes > LONGEST:
                dog.note("hash")
            yield part

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _CALLS:
            patch.setattr(owner, name, dog.before(name, getattr(owner, name)))
        for name in ("sha256", "blake2b"):
            patch.setattr(hashlib, name, dog.hashing(getattr(hashlib, name)))
        patch.setattr(media_names, "_parts", watched_parts)
        for kind, names in hooks.items():
            for name in names:
                patch.setattr(kind, name, dog.around(f"{kind.__name__}.{name}", getattr(kind, name)))
        yield dog
    watching = False
