"""Connections to a Redis server, and to the nodes of a cluster.

Commands go out as one write and are answered in order. redis-py provides the connections and their pools. Its cluster
client is not used: it believes what a node says of the slots, also if those are 10^12, and takes no parser of ours.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import BlockingConnectionPool
from redis.crc import key_slot
from redis.exceptions import RedisClusterException, ResponseError
from redis.retry import Retry

from cuvee.integrations.stores.redis_replies import ReplyParser, slots

Command = tuple[Any, ...]

_READ_BYTES = 1 << 20  # by default redis-py reads 32 or 64 KiB at a time, which is half as fast from 1 MB on
_ASKED = 5  # nodes that are asked for the slots, until one answers


class Server:
    """One server, by its URL. It connects when it is first used.

    Args:
        url: as redis-py takes it.
        timeout: seconds to wait for a connection, for a free one, for a reply to begin, and for each MiB of replies.
        connections: how many there may be at a time.
        most: bytes that the longest string of a reply may have.

    Raises:
        ValueError: redis-py cannot read the URL. The message may hold parts of a password.
    """

    def __init__(self, url: str, timeout: float, connections: int, most: int) -> None:
        self.url = url
        self._timeout = timeout
        self._pool = BlockingConnectionPool.from_url(
            url,
            timeout=timeout,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            socket_read_size=_READ_BYTES,
            max_connections=connections,
            protocol=2,
            parser_class=partial(ReplyParser, most=most),
            # By default redis-py retries ten times, with pauses, even timeouts.
            retry=Retry(NoBackoff(), 0),
        )

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands and return their replies in order, error replies as exceptions.

        The pool notices connections that the server closed while they were idle. If it closes one at that very moment,
        everything is sent once more. That is safe: each of our commands may be repeated.

        Raises:
            redis.RedisError, OSError, …: the server did not answer, or not as a Redis server does.
        """
        pool: Any = self._pool
        connection = pool.get_connection()
        try:
            try:
                return self._attempt(connection, commands)
            except redis.ConnectionError:
                connection.disconnect()
                return self._attempt(connection, commands)
        except BaseException:
            connection.disconnect()  # whatever else it sends belongs to these commands
            raise
        finally:
            pool.release(connection)

    def _attempt(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        connection.send_packed_command(connection.pack_commands(commands))
        replies: list[Any] = []
        begun, received = time.monotonic(), 0
        for _ in commands:
            # A reply keeps to its own time. Together they must not take as many times that.
            if time.monotonic() - begun > self._timeout * (1 + (received >> 20)):
                raise redis.TimeoutError("Timeout reading from socket")
            try:
                reply = connection.read_response(disable_decoding=True)
            except ResponseError as error:
                reply = error
            received += len(reply) if isinstance(reply, bytes) else 0
            replies.append(reply)
        return replies

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        self._pool.disconnect()


class OneServer:
    """A server that holds every slot.

    Attributes:
        stale: not used.
    """

    def __init__(self, url: str, timeout: float, connections: int, most: int) -> None:
        self.stale = False
        self._server = Server(url, timeout, connections, most)

    def after_fork(self) -> None:
        """Nothing: redis-py itself notices that connections belong to the parent."""

    def holder(self, name: str) -> Server:
        """The server of a key."""
        return self._server

    def primaries(self) -> list[Server]:
        """Every server."""
        return [self._server]

    def close(self) -> None:
        """Close the connections."""
        self._server.close()


class Cluster:
    """The nodes of a cluster. Their slots are read at the first use, and again once they are `stale`.

    The nodes name each other, and each gets the password: a cluster is trusted as a whole.

    Args:
        url: of any node.
        timeout, connections, most: as in `Server`, for each node.

    Attributes:
        stale: whether the slots may have moved.
    """

    def __init__(self, url: str, timeout: float, connections: int, most: int) -> None:
        self.stale = True
        self._url = url
        self._open = partial(Server, timeout=timeout, connections=connections, most=most)
        self._first = self._open(url)
        self._nodes: dict[tuple[str, int], Server] = {}
        self._holders: dict[int, Server] = {}
        self.after_fork()

    def after_fork(self) -> None:
        """Make a new lock."""
        self._lock = threading.Lock()

    def holder(self, name: str) -> Server:
        """The node that holds a key.

        Raises:
            RedisClusterException, …: no node does, or none can be asked.
        """
        slot = key_slot(name.encode())
        with self._lock:
            self._refresh()
            if slot not in self._holders:
                raise RedisClusterException(f"no node of the cluster holds slot {slot}")
            return self._holders[slot]

    def primaries(self) -> list[Server]:
        """Every node that holds slots."""
        with self._lock:
            self._refresh()
            return list(self._nodes.values())

    def close(self) -> None:
        """Close the connections, and forget the slots."""
        with self._lock:
            for server in (self._first, *self._nodes.values()):
                server.close()
            self._nodes, self._holders, self.stale = {}, {}, True

    def _refresh(self) -> None:
        if not self.stale:
            return
        known = list(self._nodes.values())
        failures: list[Exception] = []
        for server in (*random.sample(known, min(len(known), _ASKED - 1)), self._first):
            try:
                found = _ask(server)
            except Exception as error:  # the next node may know
                failures.append(error)
                continue
            nodes = {place: self._nodes.get(place) or self._open(self._url_of(*place)) for place in found}
            # Nodes that have left are dropped, not closed: other threads may be using them.
            self._nodes, self.stale = nodes, False
            self._holders = {slot: nodes[place] for place, parts in found.items() for part in parts for slot in part}
            return
        raise failures[-1]

    def _url_of(self, host: str, port: int) -> str:
        """The URL of another node: it takes the same password and the same TLS."""
        parts = urlsplit(self._url)
        user, at, _ = parts.netloc.rpartition("@")
        place = f"[{host}]" if ":" in host else host
        return parts._replace(netloc=f"{user}{at}{place}:{port}").geturl()


def _ask(server: Server) -> dict[tuple[str, int], list[range]]:
    reply = server.exchange([("CLUSTER", "SLOTS")])[0]
    if isinstance(reply, Exception):
        raise RedisClusterException(f"the node tells no slots of a cluster: {reply}") from reply
    return slots(reply, urlsplit(server.url).hostname or "localhost")
