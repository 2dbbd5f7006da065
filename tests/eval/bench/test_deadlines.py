"""`cuvee bench deadlines`: links carry what they should, servers keep what they are given, and the report is right."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.part_keys import part_key
from cuvee.eval.bench.deadlines import deadlines_bench, stores
from cuvee.eval.bench.deadlines.deadlines_bench import (
    COMPUTING,
    DEADLINES_QUICK,
    LOADING,
    DeadlinesScope,
    Load,
    report_of,
    run_deadlines_bench,
)
from cuvee.eval.bench.deadlines.deadlines_tables import (
    deadlines_markdown,
    draw_deadlines_report,
    print_deadlines_report,
)
from cuvee.eval.bench.deadlines.links import GRAIN, MB, Link, LinkClock, ThrottledProxy
from cuvee.eval.bench.deadlines.stores import ObjectServer
from cuvee.eval.bench.engine.process import EngineAnswer
from cuvee.eval.plots import save_figure
from cuvee.integrations.stores import open_store

FAST = Link("fast", (math.inf,))
STEPS = Link("steps", (16 * MB, 1 * MB, 64 * MB, 4 * MB), 0.2)


# Links ----------------------------------------------------------------------------------------------------------------


def test_a_link_carries_its_rates_and_the_time_for_bytes_is_the_inverse() -> None:
    assert Link("", (2 * MB,)).carried(1.5) == 3 * MB
    assert [STEPS.carried(at) / MB for at in (0.1, 0.2, 0.3, 0.6, 0.8, 0.9)] == pytest.approx(
        [1.6, 3.2, 3.3, 16.2, 17.0, 18.6]
    )
    for begin in (0.0, 0.1, 0.35, 0.8, 2.05):
        for nbytes in (1.0, 3.2 * MB, 17 * MB, 100 * MB):
            seconds = STEPS.seconds_for(nbytes, begin)
            assert STEPS.carried(begin + seconds) - STEPS.carried(begin) == pytest.approx(nbytes, abs=1e-3)
    assert FAST.seconds_for(1e12) == 0


@pytest.mark.parametrize(
    ("rates", "seconds", "message"),
    [
        ((), 1.0, "rates: must be bytes per second above 0"),
        ((1.0, 0.0), 1.0, "rates: must be bytes per second above 0"),
        ((1.0,), 0.0, "seconds: must be"),
        ((1.0, math.inf), 1.0, "rates: an infinite one must be the only one"),
    ],
)
def test_links_are_checked(rates: tuple[float, ...], seconds: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Link("", rates, seconds)


@pytest.mark.parametrize("late", [0.0, 0.004])
@pytest.mark.parametrize("link", [Link("", (1 * MB,)), Link("", (64 * MB,)), STEPS])
def test_what_has_arrived_is_what_the_link_carries(link: Link, late: float) -> None:
    """On a clock that stands still; `late` is how much later than asked for a thread wakes up."""
    now, arrived = 100.0, 0
    clock = LinkClock(link, lambda: now)
    while now < 102.0:
        piece = clock.piece
        assert 0 < piece <= 1.01 * max(link.rates) * GRAIN + 1
        wait = clock.wait_for(piece)
        now += wait + (late if wait else 0.0)
        arrived += piece
        burst = link.seconds_for(0) + max(link.rates) * GRAIN
        assert link.carried(now - 100 - late - GRAIN) - 1 <= arrived <= link.carried(now - 100) + burst + piece
    now += 5.0  # an idle time is made up for by a grain only
    before = link.carried(now - 100 - GRAIN)
    for _ in range(20):
        nbytes = clock.piece
        now += clock.wait_for(nbytes)
        before += nbytes
        assert before <= link.carried(now - 100) + nbytes
    clock.switch(FAST)
    assert clock.wait_for(10**9) == 0.0 and clock.piece > 1 << 16


def test_connections_share_a_link() -> None:
    clock = LinkClock(Link("", (1 * MB,)), lambda: 0.0)
    waits = [clock.wait_for(10_000) for _ in range(3)]
    assert waits == pytest.approx([0.01, 0.02, 0.03])


@contextmanager
def echoing() -> Iterator[int]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_a_proxy_carries_bytes_as_they_are_and_ends_with_its_threads() -> None:
    sent = bytes(range(256)) * 2000
    before = threading.active_count()
    with echoing() as port:
        with ThrottledProxy(port, Link("", (50 * MB,))) as proxy:
            clients = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(2)]
            for client in clients:
                threading.Thread(target=client.sendall, args=(sent,)).start()
            for client in clients:
                with client, client.makefile("rb") as stream:
                    assert stream.read(len(sent)) == sent
            proxy.drain()
            assert proxy.carried == 2 * len(sent)
            slow = socket.create_connection(("127.0.0.1", proxy.port))
            proxy.switch(Link("", (1.0,)))
            slow.sendall(b"this takes half a minute")
        proxy.close()  # again
        assert not [thread for thread in threading.enumerate() if thread.name == "throttled-proxy"]
        with slow:
            assert len(slow.recv(100)) <= 1, "closing does not wait for the link"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", proxy.port))
    assert threading.active_count() <= before + 2


def test_a_proxy_without_a_server_closes_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        ThrottledProxy(port, FAST) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        assert client.recv(1) == b""


# Stores ---------------------------------------------------------------------------------------------------------------


def test_the_object_server_is_a_store_behind_a_proxy(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with ObjectServer(tmp_path) as server, ThrottledProxy(server.port, FAST) as proxy:
        store = open_store(server.url(proxy.port), guarded=False)
        base, refinement = "ab/0123", part_key("ab/0123", 1)
        assert store.get(base) is None
        assert store.put(base, b"base" * 1000) and store.put(refinement, b"more")
        assert store.get(base) == b"base" * 1000 and store.get_many([refinement, base])[0] == b"more"
        assert {key: size - 64 for key, size in server.sizes().items()} == {base: 4000, refinement: 4}
        store.close()


@pytest.mark.parametrize("name", ["redis", "http"])
def test_what_a_store_needs_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "find_spec", lambda package: None)
    monkeypatch.setattr(stores.shutil, "which", lambda program: None)
    assert {"redis": "redis-server", "http": "aiohttp"}[name] in (stores.missing(name) or "")
    if name == "redis":
        monkeypatch.setattr(stores.shutil, "which", lambda program: program)
        assert "redis: pip install cuvee[redis]" in (stores.missing(name) or "")
