"""Links whose rate is a known function of time, and a TCP proxy that carries a server's answers at that rate.

    client --------------- at once ---------------> server
    client <--- at the link's rate, 10 ms pieces --- server

All connections share the link, as those of one machine do.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from cuvee.codec.errors import InputError

__all__ = ["MB", "Link", "LinkClock", "ThrottledProxy"]

MB = 1e6  # bytes
GRAIN = 0.01  # seconds: what a link carries at once, and how much of an idle time it makes up for
_MOST_BYTES = 1 << 18  # read at once
_SILENCE = 10 * GRAIN  # after which a link has nothing more to carry
_JOIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Link:
    """A link whose rate changes in steps, over and over.

    Attributes:
        name: in tables.
        rates: bytes per second, one after the other. An infinite one must be the only one.
        seconds: that each of them lasts.

    Raises:
        InputError: there is no rate, a number is not above 0, or an infinite rate is one of several.

    Example:
        >>> link = Link("1, then 4 MB/s", (1e6, 4e6), 0.5)
        >>> link.carried(0.75), link.seconds_for(1.5e6)
        (1500000.0, 0.75)
    """

    name: str
    rates: tuple[float, ...]
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if not self.rates or not all(rate > 0 for rate in self.rates):
            raise InputError(f"rates: must be bytes per second above 0, got {self.rates}")
        if not 0 < self.seconds < math.inf:
            raise InputError(f"seconds: must be finite and above 0, got {self.seconds}")
        if len(self.rates) > 1 and math.inf in self.rates:
            raise InputError(f"rates: an infinite one must be the only one, got {self.rates}")

    def carried(self, at: float) -> float:
        """Return the bytes from the beginning to a time in seconds."""
        whole, rest = divmod(at, self.seconds * len(self.rates))
        full = min(int(rest // self.seconds), len(self.rates) - 1)
        steps = self.seconds * (whole * sum(self.rates) + sum(self.rates[:full]))
        return steps + (rest - full * self.seconds) * self.rates[full]

    def seconds_for(self, nbytes: float, begin: float = 0.0) -> float:
        """Return the seconds that so many bytes take from a time on."""
        if self.rates == (math.inf,):
            return 0.0
        target = self.carried(begin) + nbytes
        period = self.seconds * sum(self.rates)
        whole = int(target // period)
        rest = target - whole * period
        edges = list(accumulate((rate * self.seconds for rate in self.rates), initial=0.0))
        step = next((step for step in range(len(self.rates)) if rest <= edges[step + 1]), len(self.rates) - 1)
        at = self.seconds * (whole * len(self.rates) + step) + (rest - edges[step]) / self.rates[step]
        return max(at - begin, 0.0)


class LinkClock:
    """Says when pieces that share a link arrive. Thread-safe.

    Args:
        link: the link. Its time begins now.
        now: a clock in seconds.
    """

    def __init__(self, link: Link, now: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._now = now
        self.switch(link)

    def switch(self, link: Link) -> None:
        """Take another link, whose time begins now. Pieces under way arrive as promised."""
        with self._lock:
            self._link, self._began, self._free = link, self._now(), -math.inf

    @property
    def piece(self) -> int:
        """Bytes to send at once now."""
        with self._lock:
            since = self._now() - self._began
            carried = self._link.carried(since + GRAIN) - self._link.carried(since) if self._finite else math.inf
        return int(min(max(carried, 1), _MOST_BYTES))

    def wait_for(self, nbytes: int) -> float:
        """Send a piece behind all others, and return the seconds from now until it has arrived."""
        with self._lock:
            if not self._finite:
                return 0.0
            since = self._now() - self._began
            # Threads wake up late. What the link did not carry meanwhile follows, but no more than a grain.
            begin = max(self._free, since - GRAIN, 0.0)
            self._free = begin + self._link.seconds_for(nbytes, begin)
            return max(self._free - since, 0.0)

    @property
    def _finite(self) -> bool:
        return math.inf not in self._link.rates


class ThrottledProxy:
    """Listens on a loopback port from its creation until `close`, and carries connections to a server.

    Attributes:
        port: on 127.0.0.1.
        carried: bytes that were sent to clients.

    Args:
        target: port of the server on 127.0.0.1.
        link: what carries the server's answers.
    """

    def __init__(self, target: int, link: Link) -> None:
        self._target, self._clock = target, LinkClock(link)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.carried = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._listen)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def switch(self, link: Link) -> None:
        """Go on with another link, whose time begins now."""
        self._clock.switch(link)

    def drain(self) -> None:
        """Wait until the link is silent: what was asked for and given up keeps others from it."""
        before = -1
        while before != self.carried:
            before = self.carried
            self._over.wait(_SILENCE)

    def close(self) -> None:
        """Stop listening, close all connections, and end all threads. A second call does nothing."""
        self._over.set()
        with self._lock:
            sockets = [self._listener, *self._open]
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True, name="throttled-proxy")
        self._threads.append(thread)
        thread.start()

    def _listen(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # the server is gone: its clients see a closed connection
                    client.close()
                    continue
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open |= {client, server}
                    over = self._over.is_set()
                if over:
                    self._drop(client, server)
                    return
                self._start(self._forward, client, server)
                self._start(self._answer, server, client)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(_MOST_BYTES):
                server.sendall(data)
        self._drop(client, server)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(self._clock.piece):
                # An event rather than a sleep: closing does not wait for a slow link.
                if self._over.wait(self._clock.wait_for(len(data))):
                    break
                client.sendall(data)
                with self._lock:
                    self.carried += len(data)
        self._drop(client, server)

    def _drop(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
            with self._lock:
                self._open.discard(each)
