"""Targets for entries of persistent stores, which an attacker may have written, and for URLs of stores."""

from __future__ import annotations

import math
import struct

from tests.fuzz.dice import Dice
from tests.fuzz.engine import Finding, scratch
from xxhash import xxh3_64_digest, xxh3_128_digest

from cuvee.codec.errors import CuveeError
from cuvee.integrations.stores.disk import DiskStore
from cuvee.integrations.stores.envelope import HEADER_BYTES, seal, verify
from cuvee.integrations.stores.redaction import redacted
from cuvee.integrations.stores.urls import open_store

KEY, OTHER = "ab12/" + "c0ffee" * 10, "ab12/" + "c0ffef" * 10
NOW = 1.7e9
_FIELDS = struct.Struct("<4sB3sdQ16s16s")
_TTL = (None, 60.0, 1e-9, 1e18)
_URLS = (
    "memory://?max_gb=0.008", "file:///nowhere/kv?max_gb=5&ttl=7d", "file:///dev/shm/kv?ttl=1h&max_gb=2",
    "tiered:memory://?max_gb=8,file:///nowhere/kv", "redis://user:pass-word@localhost:6379/0?ttl=1d&timeout=0.5",
    "redis+cluster://localhost:6379?ttl=1h", "unix:///run/redis.sock?db=0&password_env=HOME", "s3://bucket/a?ttl=30d",
    "https://user:pass-word@host/x?ttl=3d", "rediss://:hush-hush@[::1]:1/2?ssl_cert_reqs=none",
)  # fmt: skip
_PIECES = (
    "://", "?", "&", "=", "@", ":", "/", ",", "%2C", "%00", "%zz", "#", "[", "]", "..", "ttl=", "max_gb=1e9",
    "ttl=-1", "ttl=nan", "max_gb=inf", "timeout=0", "db=-1", "1e400", "\0", "\n", "é", "tiered:", "redis://",
    "memory://", " ", "٣",
)  # fmt: skip


class EntryTarget:
    """Envelopes, as bytes and as files in a folder."""

    name = "envelope"
    weight = 1.0

    def warm_up(self) -> None:
        if self.check(b"\0" + seal(KEY, b"blob", NOW)) != "read":
            raise Finding("a good entry is not read")

    def memory(self, data: bytes) -> int:
        """Allow copies of the given bytes, whatever length the header states."""
        return (8 << 20) + 16 * len(data)

    def make(self, dice: Dice) -> bytes:
        blob = dice.junk(dice.pick((0, 1, dice.small(3000))))
        data = bytearray(seal(dice.pick((KEY, KEY, OTHER)), blob, NOW + dice.pick((0.0, -120.0, 1e9))))
        kind = dice.number(0, 6)
        if kind <= 3:
            fields = list(_FIELDS.unpack_from(data))
            which = dice.number(0, 6)
            fields[which] = (
                dice.pick((b"cuvS", b"cuve", b"\0\0\0\0")), dice.odd(1, 1), dice.pick((bytes(3), b"\0\0\1")),
                dice.pick((math.nan, math.inf, -math.inf, 1e308, -1e308, 0.0, 5e-324, NOW)), dice.odd(8, len(blob)),
                dice.pick((xxh3_128_digest(blob), dice.junk(16))), dice.pick((xxh3_128_digest(b""), dice.junk(16))),
            )[which]  # fmt: skip
            head = _FIELDS.pack(*fields)
            data[:HEADER_BYTES] = head + xxh3_64_digest(head)
        elif kind == 4:
            data = bytearray(dice.damaged(bytes(data)))
        elif kind == 5:
            data = data[: dice.number(0, len(data))] if dice.chance(0.5) else data + dice.junk(dice.small(100))
        return bytes([dice.number(0, 255)]) + bytes(data)

    def check(self, data: bytes) -> str:
        how, entry = data[0] if data else 0, data[1:]
        ttl = _TTL[how % 4]
        try:
            blob = entry[HEADER_BYTES:]
            verify(KEY, entry[:HEADER_BYTES], blob, ttl, NOW)
        except CuveeError as error:
            outcome = type(error).__name__
        else:
            outcome = "read"
            written = _FIELDS.unpack_from(entry)[3]
            if seal(KEY, blob, written) != entry:
                raise Finding("an entry was read that no writer makes")
            if ttl is not None and NOW - written > ttl:
                raise Finding("an expired entry was read")
        if how % 8 == 0:
            self._as_file(entry, outcome)
        return outcome

    def _as_file(self, entry: bytes, outcome: str) -> None:
        tenant, _, name = KEY.partition("/")
        root = scratch() / "store"
        root.mkdir(exist_ok=True, mode=0o700)
        shard = root / tenant / name[:2]
        shard.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = shard / name
        file.write_bytes(entry)
        store = DiskStore(root)
        there, blob = store.contains([KEY]), store.get(KEY)
        if (blob is None) != (outcome != "read") or (blob is not None and blob != entry[HEADER_BYTES:]):
            raise Finding(f"as bytes it is {outcome!r}, as a file {'a miss' if blob is None else 'read'}")
        if there != [len(entry) >= HEADER_BYTES]:
            raise Finding(f"contains says {there} of a file of {len(entry)} bytes")
        if blob is None and file.exists():
            raise Finding("a bad entry was left in the store")


class UrlTarget:
    """URLs of stores, as a configuration gives them. No store connects."""

    name = "url"
    weight = 0.5

    def warm_up(self) -> None:
        for url in _URLS:
            self.check(url.encode())

    def memory(self, data: bytes) -> int:
        """Allow the memory of a client with a few connections."""
        return (48 << 20) + 16 * len(data)

    def make(self, dice: Dice) -> bytes:
        text = dice.pick(_URLS)
        for _ in range(dice.small(4)):
            at, cut = dice.number(0, len(text)), dice.pick((0, 0, dice.small(8)))
            piece = dice.pick((dice.pick(_PIECES), text[: dice.small(20)], "0" * dice.small(50)))
            text = text[:at] + piece + text[at + cut :]
        return text.encode("utf-8", "surrogatepass")

    def check(self, data: bytes) -> str:
        text = data.decode("utf-8", "replace")
        shown = redacted(text)
        if not isinstance(shown, str):
            raise Finding("redacted returned no text")
        try:
            store = open_store(text)
        except CuveeError as error:
            message = str(error)
            # Only a string in the place of a password is secret.
            secrets = [url.rpartition("@")[0].rpartition(":")[2] for url in _URLS if "@" in url]
            heads = [url.rpartition("@")[0] + "@" for url in _URLS if "@" in url]
            placed = zip(secrets, heads, strict=True)
            if any(text.startswith(h) and text.count(s) == 1 and s in message + shown for s, h in placed):
                raise Finding(f"an error shows a password: {message}") from None
            return type(error).__name__
        except ImportError:  # the documented error if the package of a protocol is missing
            return "ImportError"
        store.close()
        return "opened"
