"""Parsing and checking replies of a Redis server that is not trusted.

redis-py's own parsers accept any announced string length, endless lines and any depth of nested arrays. `ReplyParser`
reads the same protocol (RESP2) within bounds on bytes, elements, depth and time. A reply that exceeds a bound ends its
connection with an `InvalidResponse`. The functions below the parser check the content of a reply.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis._parsers import BaseParser  # the base class for `parser_class`, a public option, is here since 5.0
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as RedisTimeoutError

# A server holds at most 2^32 keys. No bucket holds 2^56 bytes, and the sum over 64 buckets still fits 63 bits.
MOST_KEYS = 1 << 32
MOST_BYTES = 1 << 56

SLOTS = 16384  # in every cluster
_MOST_NODES = 1000  # in a cluster, by its specification

_LONGEST_LINE = 1 << 16  # bytes; errors are the longest lines, since a string's line only announces its length
_LEAST_STRING = 1 << 16  # bytes that are always allowed for a string, such as the name of a key
_LEAST_REPLY = 16 << 20  # bytes that are always allowed for a reply, such as a page of SCAN or the slots of a cluster
_MOST_ELEMENTS = 1 << 19  # in a reply; CLUSTER SLOTS with 16384 ranges and three nodes for each has 300,000
_DEEPEST = 8
_NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")
_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,255}")


class ReplyParser(BaseParser):
    """A parser for redis-py's option `parser_class`. Strings remain bytes, and error replies are returned.

    A reply must begin within the connection's `socket_timeout`, and each MiB of it must arrive within the same time.

    Args:
        socket_read_size: bytes to read from the socket at a time.
        most: bytes of the longest string that is accepted.
    """

    def __init__(self, socket_read_size: int, most: int) -> None:
        self._read_size = socket_read_size
        self._most = max(most, _LEAST_STRING)
        self._sock: Any = None
        self._timeout: float | None = None
        self._inbox = bytearray()

    def on_connect(self, connection: Any) -> None:
        """Read from a new connection."""
        self._sock, self._timeout = connection._sock, connection.socket_timeout
        self._inbox = bytearray()

    def on_disconnect(self) -> None:
        """Forget the connection and the bytes that were not parsed."""
        self._sock = None
        self._inbox = bytearray()

    def can_read(self, timeout: float = 0) -> bool:
        """Return whether unsolicited bytes have arrived. The pool checks this before it hands out a connection.

        Raises:
            RedisConnectionError: the server has closed the connection.
        """
        if self._sock is None or self._inbox:
            return bool(self._inbox)
        try:
            self._sock.settimeout(timeout)
            self._inbox += self._receive(self._read_size)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        finally:
            self._sock.settimeout(self._timeout)
        return True

    def read_response(self, disable_decoding: bool = False, **_: Any) -> Any:
        """Return the next reply: bytes, an integer, None, an error, or a list of these.

        Raises:
            InvalidResponse: the reply violates the protocol or exceeds a bound.
            RedisTimeoutError: the reply, or a MiB of it, did not arrive in time.
            RedisConnectionError: the server closed the connection, or refused it with an error.
        """
        if self._sock is None:
            raise RedisConnectionError("Connection closed by server.")
        self._begun, self._received, self._elements = time.monotonic(), 0, 0
        self._room = max(self._most, _LEAST_REPLY)
        try:
            reply = self._reply(0)
        finally:
            if self._sock is not None:  # None if another thread has closed the store
                self._sock.settimeout(self._timeout)
        if isinstance(reply, RedisConnectionError):
            raise reply
        return reply

    def _reply(self, depth: int) -> Any:
        self._elements += 1
        if self._elements > _MOST_ELEMENTS or depth > _DEEPEST:
            raise InvalidResponse(f"reply: must have at most {_MOST_ELEMENTS} elements and {_DEEPEST} levels of arrays")
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            try:
                return self.parse_error(rest.decode("utf-8", "replace"))  # type: ignore[no-untyped-call]
            except Exception as error:  # MOVED without a node, for example
                raise InvalidResponse("reply: an error that cannot be parsed") from error
        if kind not in b":$*" or _NUMBER.fullmatch(rest) is None:
            raise InvalidResponse("reply: must follow the protocol RESP2")
        number = int(rest)
        if kind == b":":
            return number
        if number == -1:
            return None
        if kind == b"*":
            if not 0 <= number <= _MOST_ELEMENTS:
                raise InvalidResponse(f"reply: must have at most {_MOST_ELEMENTS} elements, got {number}")
            return [self._reply(depth + 1) for _ in range(number)]
        if not 0 <= number <= self._most:
            raise InvalidResponse(f"reply: a string must have at most {self._most} bytes, got {number}")
        return self._string(number)

    def _line(self) -> bytes:
        seen = 0
        while (end := self._inbox.find(b"\r\n", max(seen - 1, 0))) < 0 and len(self._inbox) <= _LONGEST_LINE:
            seen = len(self._inbox)
            self._inbox += self._arrival(self._read_size)
        if not 0 < end <= _LONGEST_LINE:
            raise InvalidResponse(f"reply: its first line must have 1 to {_LONGEST_LINE} bytes")
        line = bytes(self._inbox[:end])
        del self._inbox[: end + 2]
        self._spend(end)
        return line

    def _string(self, length: int) -> bytes:
        self._spend(length)
        text = self._inbox[: length + 2]
        del self._inbox[: length + 2]
        while (missing := length + 2 - len(text)) > 0:
            text += self._arrival(missing)
        if not text.endswith(b"\r\n"):
            raise InvalidResponse("reply: a string must end with CR LF after its announced length")
        return bytes(memoryview(text)[:length])

    def _spend(self, count: int) -> None:
        self._room -= count
        if self._room < 0:
            raise InvalidResponse(f"reply: must have at most {max(self._most, _LEAST_REPLY)} bytes")

    def _arrival(self, most: int) -> bytes:
        """Return the next bytes that arrive within the remaining time."""
        if self._timeout is not None:
            left = self._begun + self._timeout * (1 + (self._received >> 20)) - time.monotonic()
            if left <= 0:
                raise RedisTimeoutError("Timeout reading from socket")
            self._sock.settimeout(left)
        try:
            data = self._receive(min(most, self._read_size))
        except TimeoutError as error:
            raise RedisTimeoutError("Timeout reading from socket") from error
        self._received += len(data)
        return data

    def _receive(self, most: int) -> bytes:
        data: bytes = self._sock.recv(most)
        if not data:
            raise RedisConnectionError("Connection closed by server.")
        return data


class Account(NamedTuple):
    """The state of a bucket, as the script ACCOUNT returns it."""

    evicted: int
    bytes: int
    entries: int
    complete: int


def whole_number(reply: object, name: str, most: int) -> int:
    """Return a reply that is an integer from 0 to `most`.

    Raises:
        InvalidResponse: it is anything else; the message begins with `name`.
    """
    if type(reply) is not int or not 0 <= reply <= most:
        raise InvalidResponse(f"{name}: must be an integer from 0 to {most}, got {_shown(reply)}")
    return reply


def expect(reply: object, name: str, expected: bytes) -> None:
    """Check that a reply is `expected`.

    Raises:
        InvalidResponse: it is not.
    """
    if reply != expected:
        raise InvalidResponse(f"{name}: must be {expected.decode()}, got {_shown(reply)}")


def array(reply: object, name: str, length: int | None = None) -> list[Any]:
    """Return a reply that is an array, of `length` elements if that is given.

    Raises:
        InvalidResponse: it is anything else.
    """
    if not isinstance(reply, list) or (length is not None and len(reply) != length):
        size = "" if length is None else f" of {length}"
        raise InvalidResponse(f"{name}: must be an array{size}, got {_shown(reply)}")
    return reply


def account(reply: object) -> Account:
    """Parse the reply of the script ACCOUNT.

    Raises:
        InvalidResponse: the script does not return such a reply.
    """
    limits = Account(evicted=MOST_KEYS, bytes=MOST_BYTES, entries=MOST_KEYS, complete=1)
    numbers = array(reply, "the accounts", len(limits))
    return Account(*(whole_number(*each) for each in zip(numbers, Account._fields, limits, strict=True)))


def put_account(replies: Sequence[object]) -> Account | None:
    """Parse the replies to SET, or to MULTI, SET, ACCOUNT, EXEC; None without a transaction.

    Raises:
        InvalidResponse: a server does not reply that to these commands.
    """
    if len(replies) == 1:
        expect(replies[0], "SET", b"OK")
        return None
    expect(replies[0], "MULTI", b"OK")
    stored, accounts = array(replies[-1], "EXEC", 2)
    expect(stored, "SET", b"OK")
    return account(accounts)


def page(reply: object) -> tuple[int, list[bytes]]:
    """Return the cursor and the names in a reply to SCAN.

    Raises:
        InvalidResponse: a server does not reply that to SCAN.
    """
    cursor, names = array(reply, "SCAN", 2)
    if not isinstance(cursor, bytes) or re.fullmatch(rb"[0-9]{1,20}", cursor) is None:
        raise InvalidResponse(f"cursor: must be a number, got {_shown(cursor)}")
    for name in array(names, "names"):
        if not isinstance(name, bytes):
            raise InvalidResponse(f"names: must be strings, got {_shown(name)}")
    return int(cursor), names


def slots(reply: object, host: str) -> dict[tuple[str, int], list[range]]:
    """Return the slots of each primary, by host and port, from a reply to CLUSTER SLOTS.

    Args:
        reply: the reply.
        host: the host of the node that was asked. A node without a host in the reply has the same host.

    Raises:
        InvalidResponse: a server does not reply that to CLUSTER SLOTS.
    """
    found: dict[tuple[str, int], list[range]] = {}
    held = 0
    for part in array(reply, "CLUSTER SLOTS"):
        if not isinstance(part, list) or len(part) < 3 or not isinstance(part[2], list) or len(part[2]) < 2:
            raise InvalidResponse(f"CLUSTER SLOTS: must hold slots and their nodes, got {_shown(part)}")
        first = whole_number(part[0], "first slot", SLOTS - 1)
        last = whole_number(part[1], "last slot", SLOTS - 1)
        name, port = part[2][0], whole_number(part[2][1], "port", 65535)
        given = name.decode("ascii", "replace") if isinstance(name, bytes) else ""
        node = host if name in (None, b"", b"?") else given
        if _HOST.fullmatch(node) is None:
            raise InvalidResponse(f"host: must be a name or an address, got {_shown(name)}")
        found.setdefault((node, port), []).append(range(first, last + 1))
        held += max(last + 1 - first, 0)
        if held > SLOTS or len(found) > _MOST_NODES:
            raise InvalidResponse(f"CLUSTER SLOTS: must name at most {SLOTS} slots and {_MOST_NODES} nodes")
    return found


def _shown(reply: object) -> str:
    """Describe a reply without its bytes, which may contain a secret or parts of one."""
    if reply is None:
        return "nil"
    if isinstance(reply, int):
        return str(reply)
    if isinstance(reply, bytes):
        return f"a string of {len(reply)} bytes"
    return f"an array of {len(reply)}" if isinstance(reply, list) else type(reply).__name__
