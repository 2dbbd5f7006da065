"""Stores by URL.

    memory://?max_gb=8                               RAM of this process
    file:///var/cache/kv?max_gb=50&ttl=7d            a folder, shared by processes (file:///dev/shm/kv: in RAM)
    redis://user:password@host:6379/0?max_gb=8       Redis or Valkey: also rediss, valkey, valkeys
    redis+cluster://host:6379?ttl=1h&timeout=0.5     a cluster: also rediss+cluster, valkey+cluster, valkeys+cluster
    unix:///run/redis.sock?db=0                      a socket: also redis+unix
    s3://bucket/prefix?ttl=30d                       object storage: also gs, az, abfs and fsspec+<protocol>
    tiered:memory://?max_gb=8,redis://host:6379/0    several, fastest first (a comma inside a URL is written %2C)

`max_gb` is in 10^9 bytes, `max_mb` in 10^6; `ttl` takes s, m, h or d; `timeout` is in seconds.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.base import Store

_BUDGET = ("max_gb", "max_mb")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MEMORY_BYTES = 4 * 10**9
_REDIS_TIMEOUT = 1.0
# What redis-py reads from its own URLs and a private certificate authority needs.
_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_REDIS = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
_CLUSTERS = {f"{scheme}+cluster": plain for scheme, plain in _REDIS.items()}
_SOCKETS = ("unix", "redis+unix")
_BUCKETS = ("s3", "gs", "az", "abfs")
_FSSPEC = re.compile(r"fsspec\+([a-z][a-z0-9_.-]*)")
_SCHEMES = ("memory", "file", *_REDIS, *_CLUSTERS, *_SOCKETS, *_BUCKETS)
_KNOWN = ", ".join(f"{scheme}://" for scheme in (*_SCHEMES, "fsspec+<protocol>"))
_TIERED = "tiered:"
# Options that a message may show; anything else may be a secret.
_HARMLESS = {*_BUDGET, "ttl", "timeout", "db"}
_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"


def open_store(url: str | Sequence[str], *, guarded: bool = True) -> Store:
    """The store that a URL describes; a list of URLs, or `tiered:`, makes a `TieredStore`. Connects to nothing yet.

    Two opens of one `memory://` budget in a process share one store, which goes with the last one closed.

    Args:
        url: see the module; a list is fastest first.
        guarded: wrap every store but `memory://` in a `GuardedStore`, which turns its errors into counted misses.

    Raises:
        InputError: the URL or an option is not valid; passwords do not appear in the message.
        ImportError: the client's package is missing.
    """
    tiers: list[Any]  # a list may come from a file, with anything in it
    if isinstance(url, str):
        if not url.startswith(_TIERED):
            return _open(url, guarded)
        tiers = [tier.strip().replace("%2C", ",").replace("%2c", ",") for tier in url.removeprefix(_TIERED).split(",")]
    else:
        tiers = list(url)
    if not tiers or not all(isinstance(tier, str) and tier for tier in tiers):
        shown = redacted(url) if isinstance(url, str) else f"{len(tiers)} entries"
        raise InputError(f"url: tiers are one or more URLs, none of them empty; got {shown}")
    from cuvee.integrations.stores.tiered import TieredStore

    stores: list[Store] = []
    try:
        for tier in tiers:
            stores.append(_open(tier, guarded))
        return TieredStore(stores)
    except BaseException:
        for store in stores:
            store.close()
        raise


def redacted(url: str) -> str:
    """`url`, of one store or `tiered:`, as messages and logs may show it: rather too little of it than a password."""
    # Not every comma ends a URL: one in a password should have been written %2C, and must not be shown either.
    return ",".join(_redacted(part) for part in re.split(r",(?=\s*[a-zA-Z][a-zA-Z0-9+.-]*://)", url))


def _redacted(url: str) -> str:
    head, separator, rest = url.partition("://")
    if not separator:
        head, rest = "", url
    # The last @: a password may hold more of them, and / and ? too, where somebody forgot to quote it.
    user, at, place = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    if at and (colon or "/" not in user):
        rest = (f"{name}:***@" if colon else "***@") + place
    elif not at and (broken := re.match(r"([^/?\[]*?):(?![0-9]*([/?]|$))", rest)):
        rest = f"{broken[1]}:***"
    place, question, query = rest.partition("?")
    names = ((pair, pair.partition("=")[0]) for pair in query.split("&"))
    shown = "&".join(pair if name in _HARMLESS else f"{name}=***" for pair, name in names) if question else ""
    return head + separator + place + question + shown


def _open(url: str, guarded: bool) -> Store:
    if url.startswith(_TIERED):
        raise InputError(
            f"url: a tier cannot be tiered itself, got {redacted(url)}; name its stores one after the other"
        )
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    location, _, query = rest.partition("?")
    if not separator:
        raise InputError(f"url: must begin with {_KNOWN} or tiered:, got {redacted(url)}")
    if "@" in query:
        raise InputError(f"url: write ? as %3F in a password, and @ as %40 in an option; got {redacted(url)}")
    fsspec = _FSSPEC.fullmatch(scheme)
    if scheme not in _SCHEMES and not fsspec:
        near = difflib.get_close_matches(scheme, _SCHEMES, 1)
        hint = f"did you mean {near[0]}://?" if near else f"there are {_KNOWN}"
        raise InputError(f"url: no store is called {scheme}://; {hint}")
    options = _Options(url, scheme, query)

    if scheme == "memory":
        from cuvee.integrations.stores.memory import MemoryStore

        options.only(_BUDGET)
        if location:
            raise InputError(f"url: memory:// takes options only, such as memory://?max_gb=8; got {redacted(url)}")
        return MemoryStore(options.budget() or _MEMORY_BYTES, shared=True)

    store: Store
    if scheme == "file":
        from cuvee.integrations.stores.disk import DiskStore

        options.only((*_BUDGET, "ttl"))
        path = unquote(location)
        if not path.startswith("/") or not path.strip("/") or set(location) & set("#\0") or "\0" in path:
            raise InputError(
                f"url: a folder is written file:///absolute/path, with %23 for # and %3F for ?; got {redacted(url)}"
            )
        store = DiskStore(path, options.budget(), options.ttl())
    elif scheme in _BUCKETS or fsspec:
        from cuvee.integrations.stores.objects import ObjectStore

        options.only(("ttl",))
        if not location or (not fsspec and location.startswith("/")):
            raise InputError(f"url: an object store is written {scheme}://bucket/prefix, got {redacted(url)}")
        store = ObjectStore(f"{fsspec[1] if fsspec else scheme}://{location}", options.ttl())
    else:
        from cuvee.integrations.stores.redis import RedisStore

        socket = scheme in _SOCKETS
        plain = "unix" if socket else {**_REDIS, **_CLUSTERS}[scheme]
        own = ("db",) if socket else _TLS if plain == "rediss" else ()
        options.only((*_BUDGET, "ttl", "timeout", *own))
        _check_redis(url, location, socket=socket, cluster=scheme in _CLUSTERS)
        passed = "&".join(f"{name}={options.values[name]}" for name in own if name in options.values)
        store = RedisStore(
            f"{plain}://{location}" + (f"?{passed}" if passed else ""),
            options.budget(),
            options.ttl(),
            options.number("timeout", "seconds") or _REDIS_TIMEOUT,
            scheme in _CLUSTERS,
        )
    if not guarded:
        return store
    from cuvee.integrations.stores.guard import GuardedStore

    return GuardedStore(store)


def _check_redis(url: str, location: str, *, socket: bool, cluster: bool) -> None:
    # An unquoted / or # of a password ends the host early: what is left has no valid port, or an odd path.
    form = "unix:///path/of/socket" if socket else "redis://[user:password@]host:port/database"
    try:
        parts = urlsplit(f"redis://{location}")
        host, port, path = parts.hostname, parts.port, parts.path
    except ValueError:
        good = False
    else:
        paths = "/.*[^/]" if socket else "/?0?" if cluster else "(/[0-9]*)?"
        good = not parts.fragment and re.fullmatch(paths, path) is not None and bool(host) != socket and port != 0
    if not good:
        raise InputError(f"url: write {form}, a password's special characters as %XX; got {redacted(url)}")


class _Options:
    """The query of a URL: `name=value&...`, each name once."""

    def __init__(self, url: str, scheme: str, query: str) -> None:
        self._scheme = scheme
        self._where = f"(in {redacted(url)})"
        self.values: dict[str, str] = {}
        for pair in query.split("&") if query else ():
            name, _, value = pair.partition("=")
            if not name or not value:
                raise InputError(f"url: options are written name=value&name=value {self._where}")
            if name in self.values:
                raise InputError(f"{name}: given twice {self._where}")
            self.values[name] = value

    def only(self, known: Collection[str]) -> None:
        for name in self.values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 2)
                hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
                raise InputError(f"{name}: no option of {self._scheme}:// stores, {hint} {self._where}")

    def number(self, name: str, unit: str) -> float | None:
        """A number above 0; None if it was not given."""
        text = self.values.get(name)
        if text is None:
            return None
        value = float(text) if re.fullmatch(_NUMBER, text) else math.nan
        if not 0 < value < math.inf:
            raise InputError(f"{name}: must be a number of {unit} above 0, got {text!r} {self._where}")
        return value

    def budget(self) -> int | None:
        """Bytes of `max_gb` or `max_mb`; None without either."""
        if all(name in self.values for name in _BUDGET):
            raise InputError(f"max_mb: give max_gb or max_mb, not both {self._where}")
        for name, unit, scale in (("max_gb", "gigabytes (10^9 bytes)", 10**9), ("max_mb", "megabytes", 10**6)):
            value = self.number(name, unit)
            if value is not None:
                if value * scale < 1:
                    raise InputError(f"{name}: must be at least one byte, got {self.values[name]!r} {self._where}")
                return round(value * scale)
        return None

    def ttl(self) -> float | None:
        """Seconds of `ttl`; None without it."""
        text = self.values.get("ttl")
        if text is None:
            return None
        match = re.fullmatch(f"({_NUMBER})([smhd])", text)
        seconds = float(match[1]) * _UNITS[match[2]] if match else math.nan
        if not 0 < seconds < math.inf:
            raise InputError(f"ttl: must be a number above 0 with s, m, h or d, such as 7d; got {text!r} {self._where}")
        return seconds
