"""Connections to a Redis server and to the nodes of a cluster.

Commands are sent in one write, and replies arrive in the same order. redis-py provides the connections and their pools.
Its cluster client is not used: it accepts any number of slots from a node, even 10^12, and does not let us pass a
parser.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import BlockingConnectionPool
from redis.crc import key_slot
from redis.exceptions import MovedError, RedisClusterException, ResponseError
from redis.retry import Retry

from cuvee.integrations.stores.redis_replies import ReplyParser, slots

Command = tuple[Any, ...]
Routed = tuple[str, Command]  # the name of any key in the slot that the command concerns, and the command

_READ_BYTES = 1 << 20  # redis-py reads 32 or 64 KiB at a time by default, which is half as fast from 1 MB up
_ASKED = 5  # nodes to ask for the slots before giving up


class Server:
    """One server. It connects when it is first used.

    Args:
        url: a URL that redis-py accepts.
        timeout: seconds to wait for a new or a free connection, for the start of a reply, and for each MiB of replies.
        connections: the largest number of simultaneous connections.
        most: bytes of the longest string that a reply may hold.

    Raises:
        ValueError: redis-py cannot parse the URL. The message may contain parts of a password.
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
            # By default redis-py retries ten times, with pauses, even after timeouts.
            retry=Retry(NoBackoff(), 0),
        )

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands; return their replies in order, with error replies as exceptions.

        The pool detects connections that the server closed while they were idle. If the server closes the connection
        after that check, all commands are sent a second time. That is safe because all of our commands are idempotent.

        Raises:
            redis.RedisError, OSError, …: the server did not reply, or did not follow the protocol.
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
            connection.disconnect()  # anything that still arrives belongs to these commands
            raise
        finally:
            pool.release(connection)

    def _attempt(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        connection.send_packed_command(connection.pack_commands(commands))
        replies: list[Any] = []
        begun, received = time.monotonic(), 0
        for _ in commands:
            # The parser limits the time of each reply. This limits the time of all replies together.
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
        stale: as in `Cluster`, but without effect.
    """

    def __init__(self, url: str, timeout: float, connections: int, most: int) -> None:
        self.stale = False
        self._server = Server(url, timeout, connections, most)

    def after_fork(self) -> None:
        """Do nothing: redis-py itself detects that connections belong to the parent."""

    def send(self, commands: Sequence[Routed]) -> list[Any]:
        """Send commands in one round trip; see `Server.exchange`."""
        return self._server.exchange([command for _, command in commands])

    def primaries(self) -> list[Server]:
        """Return the server, in a list."""
        return [self._server]

    def close(self) -> None:
        """Close the connections."""
        self._server.close()


class Cluster:
    """The nodes of a cluster. Their slots are read at the first use, and again whenever they are `stale`.

    The nodes name each other, and each one receives the password, so the cluster is trusted as a whole.

    Args:
        url: the URL of any node.
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

    def send(self, commands: Sequence[Routed]) -> list[Any]:
        """Send each command to the node of its slot, in one round trip per node; return the replies in order.

        Each node is addressed as a separate server, because redis-py's cluster pipeline refuses scripts. If slots have
        moved or a node is gone, the slots are read again and all commands are sent a second time. That is safe because
        all of our commands are idempotent.

        Raises:
            redis.RedisError, OSError, …: a node did not reply, or did not follow the protocol.
        """
        try:
            replies = self._send_once(commands)
        except redis.TimeoutError:
            raise
        except Exception:
            replies = None
        if replies is None or any(isinstance(reply, MovedError) for reply in replies):
            self.stale = True
            return self._send_once(commands)
        return replies

    def _send_once(self, commands: Sequence[Routed]) -> list[Any]:
        by_server: dict[Server, list[int]] = defaultdict(list)
        servers = {name: self._holder(name) for name in {name for name, _ in commands}}
        for index, (name, _) in enumerate(commands):
            by_server[servers[name]].append(index)
        replies: list[Any] = [None] * len(commands)
        for server, indices in by_server.items():
            for index, reply in zip(indices, server.exchange([commands[i][1] for i in indices]), strict=True):
                replies[index] = reply
        return replies

    def _holder(self, name: str) -> Server:
        """Return the node that holds a key.

        Raises:
            RedisClusterException, …: no node holds it, or no node could be asked.
        """
        slot = key_slot(name.encode())
        with self._lock:
            self._refresh()
            if slot not in self._holders:
                raise RedisClusterException(f"no node of the cluster holds slot {slot}")
            return self._holders[slot]

    def primaries(self) -> list[Server]:
        """Return every node that holds slots."""
        with self._lock:
            self._refresh()
            return list(self._nodes.values())

    def close(self) -> None:
        """Close the connections and forget the slots."""
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
            # Nodes that have left are not closed, because other threads may be using them.
            self._nodes, self.stale = nodes, False
            self._holders = {slot: nodes[place] for place, parts in found.items() for part in parts for slot in part}
            return
        raise failures[-1]

    def _url_of(self, host: str, port: int) -> str:
        """Return the URL of another node, with the same password and TLS settings."""
        parts = urlsplit(self._url)
        user, at, _ = parts.netloc.rpartition("@")
        place = f"[{host}]" if ":" in host else host
        return parts._replace(netloc=f"{user}{at}{place}:{port}").geturl()


def _ask(server: Server) -> dict[tuple[str, int], list[range]]:
    reply = server.exchange([("CLUSTER", "SLOTS")])[0]
    if isinstance(reply, Exception):
        raise RedisClusterException(f"CLUSTER SLOTS: must return the slots of a cluster, got {reply}") from reply
    return slots(reply, urlsplit(server.url).hostname or "localhost")
