"""No file, socket or long hash on the engine's thread, which runs the hooks of both sides; stores work in threads."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.stores.redis_server import redis_server
from tests.integrations.vllm.sides import image
from tests.integrations.vllm.small_engine import SmallEngine
from tests.integrations.vllm.test_identity import IDS, adapter

from cuvee.integrations.stores import open_store
from cuvee.integrations.vllm import media_names
from cuvee.integrations.vllm.scheduler import SchedulerSide
from cuvee.integrations.vllm.worker import WorkerSide
from cuvee.integrations.vllm.worker_load import WorkerLoads
from cuvee.integrations.vllm.worker_save import WorkerSaves

_EVENTS = ("open", "os.listdir", "os.scandir", "socket.connect", "socket.getaddrinfo", "fcntl.flock", "glob.glob")
_CALLS = ((os, "stat"), (os, "lstat"), (os, "fstat"), (fcntl, "flock"))
_LONGEST = 64 << 10  # bytes that may be hashed in a hook
_HOOKS = {
    SchedulerSide: ("arrived", "matched_tokens", "allocated", "finished", "plan", "take", "take_events", "reset"),
    WorkerSide: ("begin_step", "end_step", "settle", "report"),
    WorkerLoads: ("start", "take_arrived", "drop"),
    WorkerSaves: ("save",),
}


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
            if memoryview(data).nbytes > _LONGEST:
                self.note("hash")
            return usual(data, *arguments, **named)

        return watched


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    dog = Watchdog()
    watching = True
    # A hook of the interpreter stays; this one sleeps after its test.
    sys.addaudithook(lambda event, _: dog.note(event) if watching and event in _EVENTS else None)
    for owner, name in _CALLS:
        monkeypatch.setattr(owner, name, dog.before(name, getattr(owner, name)))
    for name in ("sha256", "blake2b"):
        monkeypatch.setattr(hashlib, name, dog.hashing(getattr(hashlib, name)))
    parts = media_names._parts

    def watched_parts(value: Any) -> Iterator[bytes | memoryview]:
        for part in parts(value):
            if memoryview(part).nbytes > _LONGEST:
                dog.note("hash")
            yield part

    monkeypatch.setattr(media_names, "_parts", watched_parts)
    for kind, names in _HOOKS.items():
        for name in names:
            monkeypatch.setattr(kind, name, dog.around(f"{kind.__name__}.{name}", getattr(kind, name)))
    yield dog
    watching = False


def _picture() -> SimpleNamespace:
    return image("cat", content="x" * (_LONGEST // 4))


@pytest.fixture(params=["file", "tiered", "redis"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | list[str]]:
    folder = f"file://{tmp_path}/kv?max_gb=1"
    if request.param == "redis":
        with redis_server() as server:
            yield server.url
    else:
        yield folder if request.param == "file" else ["memory://?max_gb=1", folder]


def test_the_engines_thread_opens_nothing_and_hashes_little(
    watchdog: Watchdog, urls: str | list[str], tmp_path: Path, engine: Callable[..., SmallEngine]
) -> None:
    """Stores, loads, a tail, a blend, an adapter, an image, an abort and a reset."""
    e = engine(store=open_store(urls))
    tuned = adapter(tmp_path / "a", 1)
    for turn in range(2):
        e.submit(f"plain{turn}", [*IDS, turn])
        e.submit(f"tuned{turn}", [*IDS, turn], lora_request=tuned)
        e.submit(f"seen{turn}", [*IDS, turn], mm_features=[_picture()])
        e.submit(f"parts{turn}", [50 + turn, *IDS[8:]], kv_transfer_params={"cuvee": {"segments": [[1, 33]]}})
        e.run()
    e.submit("gone", IDS)
    e.step()
    e.abort("gone")
    e.side.reset()
    e.submit("anew", IDS)
    e.run()
    loads = sum(value for (name, _), value in e.recorder.totals().items() if name == "load_seconds")
    assert loads >= 3 and len(e.done) >= 9
    assert len(watchdog.hooks) >= 13
    assert watchdog.bites == []
