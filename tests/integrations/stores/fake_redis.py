"""A scripted Redis server on a loopback port."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, BinaryIO

from tests.integrations.stores.loopback import LoopbackServer, Said

# The replies of an empty server.
HONEST: dict[str, bytes] = {
    "GETRANGE": b"$0\r\n\r\n",
    "STRLEN": b":0\r\n",
    "UNLINK": b":0\r\n",
    "SCAN": b"*2\r\n$1\r\n0\r\n*0\r\n",
}

Reply = Said | Callable[[list[bytes]], Said]


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text)


class FakeRedis(LoopbackServer):
    """Replies to each command with the entry of its name in `replies`, or else like an honest, empty server.

    Attributes:
        replies: by command name; bytes, parts that are sent one after the other, or a function of the command that
            returns one of those. Tests may change it.
        commands: the commands received, except CLIENT.
    """

    def __init__(self, **replies: Reply) -> None:
        self.replies = replies
        self.commands: list[list[bytes]] = []
        super().__init__()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def serve(self, connection: socket.socket, stream: BinaryIO) -> None:
        while line := stream.readline():
            command = []
            for _ in range(int(line[1:])):
                command.append(stream.read(int(stream.readline()[1:])))
                stream.read(2)
            name = command[0].decode().upper()
            if name != "CLIENT":
                self.commands.append(command)
            reply: Any = self.replies.get(name, HONEST.get(name, b"+OK\r\n"))
            self.say(connection, reply(command) if callable(reply) else reply)
