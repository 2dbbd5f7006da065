"""Targets for stores whose servers are hostile: Redis, and object storage over HTTP.

The bytes of a case are the peer's replies, over real sockets and to the real clients. Whatever the peer sends, a store
must return the stored blob, a miss, or a `StoreError` that shows no secret, and its counters must be valid metrics.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar

from tests.fuzz.dice import Dice
from tests.fuzz.engine import Finding

from cuvee.integrations.stores import objects as object_store
from cuvee.integrations.stores import redis as redis_store
from cuvee.integrations.stores.base import Store, StoreError
from cuvee.integrations.stores.envelope import seal
from cuvee.integrations.stores.objects import ObjectStore
from cuvee.integrations.stores.redis import RedisStore
from cuvee.integrations.vllm.metrics import Recorder

KEY, OTHER = "ab12/" + "c0ffee" * 10, "ab12/" + "c0ffef" * 10
BLOB = b"blob" * 50
SECRET = "hush-hush-7"
TIMEOUT = 0.05  # seconds per operation; some cases wait for it
PATIENCE = 1.0  # seconds that a peer waits for the bytes of a request, or for its reply to be read
SLOW = 30.0  # seconds; no operation takes this long, even on a busy machine
MOST_ROUNDS = 5000  # connections per case; a scan may take many
_PORT = b"<port>"  # stands for the peer's port in a speech, since it differs in each process
HOLD, REPEAT, DRIP = 1, 2, 4  # manners of a peer: stay silent, repeat the reply, send it slowly
_SAID_AGAIN = 48 << 20


class Peer:
    """A server that sends one speech per connection, in rotation, and hangs up.

    Attributes:
        port: the port on 127.0.0.1.
        rounds: connections since `learn`.
    """

    def __init__(self, asked: Callable[[bytes], bool]) -> None:
        self._asked = asked
        self._speeches: list[bytes] = [b""]
        self._manner = 0
        self.rounds = 0
        self._kept: deque[socket.socket] = deque(
            maxlen=16
        )  # closed later, because a reset would discard the bytes that were sent
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def learn(self, speeches: list[bytes], manner: int) -> None:
        """Set the speeches and the manner from now on."""
        self._speeches, self._manner, self.rounds = speeches or [b""], manner, 0
        while self._kept:
            self._kept.popleft().close()

    def _listen(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with suppress(OSError):
                self._talk(connection)
            if len(self._kept) == self._kept.maxlen:
                self._kept.popleft().close()
            self._kept.append(connection)

    def _talk(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        request = b""
        while not self._asked(request):
            part = connection.recv(1 << 16)
            if not part:
                return
            request += part
            # redis-py waits for replies to its greetings and to AUTH.
            if request.endswith(b"\r\n") and not self._asked(request):
                connection.sendall(b"+OK\r\n" * request.count(b"*"))
                request = b""
        speech, manner = self._speeches[self.rounds % len(self._speeches)], self._manner
        self.rounds += 1
        if manner & DRIP:
            for at in range(min(len(speech), 100)):
                connection.sendall(speech[at : at + 1])
                time.sleep(0.002)
        else:
            connection.sendall(speech)
        if manner & REPEAT and speech:
            block = speech * (1 + (1 << 18) // len(speech))
            for _ in range(_SAID_AGAIN // len(block)):
                connection.sendall(block)
        if not manner & HOLD:
            connection.shutdown(socket.SHUT_WR)


@contextmanager
def only_to(port: int) -> Iterator[None]:
    """Refuse connections to other hosts, because peers name hosts that a fuzzer must not contact."""
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def connect_here(self: socket.socket, address: Any) -> None:
        if address[:2] != ("127.0.0.1", port):
            raise ConnectionRefusedError("only the peer")
        connect(self, address)

    def look_up_here(host: Any, *arguments: Any, **named: Any) -> Any:
        if host not in ("127.0.0.1", b"127.0.0.1"):
            raise socket.gaierror("only the peer")
        return lookup(host, *arguments, **named)

    socket.socket.connect, socket.getaddrinfo = connect_here, look_up_here  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        socket.socket.connect, socket.getaddrinfo = connect, lookup  # type: ignore[method-assign]


_OPERATIONS: dict[str, tuple[Callable[[Store], object], Callable[[Any], bool]]] = {
    "get": (lambda store: store.get(KEY), lambda found: found in (None, BLOB)),
    "get_many": (lambda store: store.get_many([KEY, OTHER]), lambda found: {*found} <= {None, BLOB}),
    "put": (lambda store: store.put(KEY, BLOB), lambda kept: kept in (True, False)),
    "contains": (lambda store: store.contains([KEY, OTHER]), lambda there: {*there} <= {True, False}),
    "delete": (lambda store: store.delete(KEY), lambda gone: gone in (True, False)),
    "delete_tenant": (lambda store: store.delete_tenant("ab12"), lambda gone: 0 <= gone < 10**6),
}


class _PeerTarget:
    """A case holds the operation, the kind of store, the peer's manner, and its speeches, each after its length."""

    name: str
    weight = 1.0

    def memory(self, data: bytes) -> int:
        """Allow the largest accepted reply and some copies of the speeches."""
        return (128 << 20) + 16 * len(data)

    def check(self, data: bytes) -> str:
        """Run the operation of a store on the peer."""
        operation = tuple(_OPERATIONS)[(data[0] if data else 0) % len(_OPERATIONS)]
        work, sound = _OPERATIONS[operation]
        peer, speeches, at = self.peer(), [], 3
        while at + 3 <= len(data):
            size = int.from_bytes(data[at : at + 3], "little")
            speeches.append(data[at + 3 : at + 3 + size].replace(_PORT, b"%d" % peer.port))
            at += 3 + size
        peer.learn(speeches, data[2] if len(data) > 2 else 0)
        store = self.open(peer, data[1] if len(data) > 1 else 0)
        begun = time.monotonic()
        with only_to(peer.port):
            try:
                answer = work(store)
            except StoreError as error:
                answer, outcome = error, f"{operation}: StoreError"
                _keeps_secrets(error)
            else:
                outcome = f"{operation}: {type(answer).__name__}"
                if not sound(answer):
                    raise Finding(f"{operation} answers {answer!r:.200}")
            finally:
                store.close()
        if time.monotonic() - begun > SLOW or peer.rounds > MOST_ROUNDS:
            raise Finding(f"{operation} took {time.monotonic() - begun:.1f} s and {peer.rounds} connections")
        counters = store.counters()
        if isinstance(answer, StoreError) and not next(iter(counters.values())).errors:
            raise Finding(f"{operation} failed without counting an error")
        recorder = Recorder()
        try:
            recorder.record_store(counters)
        except Exception as error:
            raise Finding(f"the counters are invalid: {counters}") from error
        if odd := [each for each in (recorder.drain() or {}).items() if not 0 <= each[1] < 1 << 64]:
            raise Finding(f"figures that cannot be sent: {odd}")
        return outcome

    def peer(self) -> Peer:
        """Return the peer of this process, which starts with the first case."""
        raise NotImplementedError

    def open(self, peer: Peer, kind: int) -> Store:
        """Open a store on the peer."""
        raise NotImplementedError


def _keeps_secrets(error: BaseException) -> None:
    one: BaseException | None = error
    for _ in range(16):
        if one is None:
            return
        if SECRET in f"{one} {one.args}":
            raise Finding(f"an error shows a password: {one}")
        one = one.__cause__ or one.__context__


def case(operation: str, kind: int, manner: int, speeches: list[bytes]) -> bytes:
    """Make the bytes of a case."""
    head = bytes([tuple(_OPERATIONS).index(operation), kind, manner])
    return head + b"".join(len(each).to_bytes(3, "little") + each for each in speeches)


def _manner(dice: Dice) -> int:
    """Choose a manner, mostly none, because the others take long."""
    return (HOLD * dice.chance(0.01)) | (REPEAT * dice.chance(0.003)) | (DRIP * dice.chance(0.003))


class RedisTarget(_PeerTarget):
    """Replies of a Redis server."""

    name = "redis"
    _started: ClassVar[list[Peer]] = []

    def warm_up(self) -> None:
        """Check that a good entry is read."""
        redis_store._SCAN_SECONDS = TIMEOUT
        if self.check(case("get", 0, 0, [_bulk(seal(KEY, BLOB, time.time()))])) != "get: bytes":
            raise Finding("a good entry is not read")

    def peer(self) -> Peer:
        """Return the peer, which replies to commands other than greetings and AUTH."""
        if not self._started:
            words = (b"GETRANGE", b"SET\r\n", b"STRLEN", b"UNLINK", b"SCAN")
            self._started.append(Peer(lambda request: any(word in request for word in words)))
        return self._started[0]

    def open(self, peer: Peer, kind: int) -> Store:
        """Open a plain store, or one with a time to live or a largest entry. The nodes of a cluster are trusted."""
        url = f"redis://user:{SECRET}@127.0.0.1:{peer.port}"
        limits: list[dict[str, Any]] = [{}, {"ttl": 1e9}, {"max_entry": 10**5}]
        return RedisStore(url, timeout=TIMEOUT, **limits[kind % len(limits)])

    def make(self, dice: Dice) -> bytes:
        """Make speeches that are nearly a server's replies to the operation."""
        name, kind = dice.pick(tuple(_OPERATIONS)), dice.number(0, 2)
        dice.mischief = dice.chance(0.9)
        speeches = []
        entry = seal(dice.pick((KEY, KEY, OTHER)), BLOB, 1.7e9)
        scan = [dice.pick((b"0", b"0", b"17")), [f"cuvee:{KEY}".encode()] * dice.number(0, 3)]
        replies: dict[str, list[Any]] = {
            "get": [dice.pick((entry, None, b""))],
            "get_many": [entry, b""],
            "put": [b"+OK"],
            "contains": [dice.number(0, 300), dice.number(0, 1)],
            "delete": [1],
            "delete_tenant": [scan],
        }
        speeches.append(b"".join(_spoken(dice, reply) for reply in replies[name]))
        if name == "delete_tenant":
            speeches += [_spoken(dice, 1) * dice.number(1, 3)]
        if dice.trick(0.3):
            at = dice.number(0, len(speeches) - 1)
            speeches[at] = dice.damaged(speeches[at], [*speeches, *_ODD])
        if dice.trick(0.05):
            speeches[dice.number(0, len(speeches) - 1)] = _ODD[0]
        return case(name, kind, _manner(dice), speeches)


_ODD = (
    b"-ERR unknown command, with args beginning with: user " + SECRET.encode() + b"\r\n", b"-MOVED 1 127.0.0.1:1\r\n",
    b"-MOVED\r\n", b"-ASK x y z\r\n", b"-LOADING\r\n", b"-OOM no\r\n", b"-WRONGTYPE of a wrong kind of value\r\n",
    b"-NOAUTH\r\n", b"-\r\n", b"-ERR max number of clients reached\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n",
    b"$0\r\n\r\n", b"$3000000000\r\nx", b"*1000000000\r\n:1\r\n", b"*1\r\n" * 300, b":" + b"9" * 5000 + b"\r\n",
    b"+" + b"x" * 70000,
    b"$-2\r\n", b":1_0\r\n", b":+1\r\n", b"*2\r\n*2\r\n", b"%1\r\n+a\r\n:1\r\n", b"_\r\n", b"#t\r\n", b">1\r\n+x\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\r\n", b"\n", b"", b"*500000\r\n" + b"*0\r\n" * 1000, b"-EXECABORT no\r\n",
)  # fmt: skip


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text)


def _spoken(dice: Dice, reply: Any) -> bytes:
    """Encode a reply in RESP, unless the dice break a rule."""
    if dice.trick(0.04):
        return dice.pick(_ODD)
    if isinstance(reply, list):
        count = max(len(reply) + (dice.pick((-1, 1, 7)) if dice.trick(0.03) else 0), 0)
        return b"*%d\r\n" % count + b"".join(_spoken(dice, each) for each in reply)
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        if dice.trick(0.05):
            return b":%d\r\n" % (dice.odd(8, reply) * dice.pick((1, 1, -1, 1 << 40)))
        return b":%d\r\n" % reply
    return reply + b"\r\n" if reply[:1] in b"+:" else _bulk(reply)


class HttpTarget(_PeerTarget):
    """Responses of object storage over HTTP."""

    name = "http"
    _started: ClassVar[list[Peer]] = []

    def warm_up(self) -> None:
        """Check that a good entry is read."""
        object_store._TIMEOUTS = {"connect_timeout": "1s", "timeout": f"{20 * TIMEOUT:g}s"}
        object_store._RETRY = {"max_retries": 1, "retry_timeout": timedelta(seconds=1)}
        entry = seal(KEY, BLOB, time.time())
        if (
            self.check(case("get", 0, 0, [_answered("200 OK", {"Content-Length": str(len(entry))}, entry)]))
            != "get: bytes"
        ):
            raise Finding("a good entry is not read")

    def peer(self) -> Peer:
        """Return the peer, which responds after all fields and the whole body of a PUT."""
        if not self._started:
            self._started.append(Peer(_is_request))
        return self._started[0]

    def open(self, peer: Peer, kind: int) -> Store:
        """Open a store with one of two limits for entries."""
        most = (10**5, 1 << 20, 512 << 20)[kind % 2]
        return ObjectStore(f"http://user:{SECRET}@127.0.0.1:{peer.port}/kv", max_entry=most)

    def make(self, dice: Dice) -> bytes:
        """Make responses that are nearly those of object storage."""
        dice.mischief = dice.chance(0.9)
        here = f"http://127.0.0.1:{_PORT.decode()}/kv"
        speeches = [self._answer(dice, here) for _ in range(dice.number(1, 3))]
        if dice.trick(0.3):
            at = dice.number(0, len(speeches) - 1)
            speeches[at] = dice.damaged(speeches[at], speeches)
        return case(dice.pick(tuple(_OPERATIONS)), dice.number(0, 1), _manner(dice), speeches)

    def _answer(self, dice: Dice, here: str) -> bytes:
        entry = seal(dice.pick((KEY, KEY, OTHER)), BLOB, 1.7e9)
        fields = {"Content-Length": str(len(entry)), "Content-Type": "application/octet-stream"}
        status = dice.pick(("200 OK", "206 Partial Content", "200 OK"))
        body = entry
        if dice.trick(0.4):
            status = dice.pick(_STATUSES)
        if dice.trick(0.3):
            fields |= dict([dice.pick(_FIELDS)])
        if dice.trick(0.1):
            fields["Content-Length"] = str(dice.odd(8, len(entry)))
        if dice.trick(0.2):
            places = (here, here + "/x", "/" + "x" * 5000, "http://elsewhere.invalid/", f"http://u:{SECRET}@127.0.0.2:1/",
                      "file:///etc/hostname", "//[::1]/", "http://", "\x7f", "ftp://h/")  # fmt: skip
            status, fields["Location"] = dice.pick(_STATUSES[:5]), dice.pick(places)
        if dice.trick(0.15):
            fields.pop("Content-Length")
            if dice.chance(0.7):
                fields["Transfer-Encoding"] = "chunked"
                sizes = (b"%x" % len(entry), b"ffffffffffffffff", b"-1", b"0", b"%x;a=b" % len(entry), b"zz", b"")
                body = (
                    dice.pick(sizes) + b"\r\n" + entry + b"\r\n" + dice.pick((b"0\r\n\r\n", b"0\r\nA: b\r\n\r\n", b""))
                )
        if dice.trick(0.1):
            body = dice.pick((b"", body[: dice.number(0, len(body))], body + b"x" * dice.small(3000), b"x" * 200_000))
        return _answered(status, fields, body)


_STATUSES = (
    "301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent", "100 Continue", "101 Switching",
    "204 No Content", "206 Partial", "304 Not Modified", "400 Bad", "401 Who", "403 No", f"403 {SECRET}", "404 Nothing",
    "405 Not So", "407 Proxy", "416 Range", "429 Later", "500 No", "503 Later", "999 What", "200", "-1 x", "2000 x", "",
)  # fmt: skip
_FIELDS = (
    ("Content-Encoding", "gzip"), ("Content-Encoding", "deflate"), ("Content-Encoding", "br"),
    ("Content-Encoding", "identity"), ("Content-Encoding", "zstd"), ("Transfer-Encoding", "chunked"),
    ("Transfer-Encoding", "gzip, chunked"), ("Content-Range", "bytes 0-1/2"), ("Content-Range", "x"),
    ("Content-Range", "bytes */*"), ("Set-Cookie", "a=b; Max-Age=99999999999"), ("Connection", "upgrade"),
    ("Connection", "keep-alive"), ("Keep-Alive", "timeout=0"), ("Upgrade", "websocket"), ("Content-Type", "\xff"),
    ("X", "y" * 9000), ("X-Many: 1\r\n" * 500 + "X", "y"), (" X", "y"), ("X", "a\r\n b"), ("Content-Length", "+5"),
    ("Content-Length", "5\r\nContent-Length: 6"), ("", ""), ("\0", "\0"), ("WWW-Authenticate", "Basic"), ("Date", "x"),
)  # fmt: skip


def _answered(status: str, fields: dict[str, str], body: bytes) -> bytes:
    lines = "".join(f"{name}: {text}\r\n" for name, text in fields.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode("latin-1") + body


def _is_request(request: bytes) -> bool:
    fields, blank, body = request.partition(b"\r\n\r\n")
    length = fields.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return bool(blank) and len(body) >= int(length or 0)
