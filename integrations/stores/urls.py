"""Stores by URL.

    memory://?max_gb=8                               RAM of this process
    file:///var/cache/kv?max_gb=50&ttl=7d            a folder, shared by processes (file:///dev/shm/kv is in RAM)
    redis://user:password@host:6379/0?ttl=1d         Redis or Valkey: also rediss, valkey, valkeys
    redis+cluster://host:6379?ttl=1h&timeout=0.5     a cluster: also rediss+cluster, valkey+cluster, valkeys+cluster
    unix:///run/redis.sock?db=0                      a socket: also redis+unix
    s3://bucket/prefix?ttl=30d                       object storage: also gs, az, abfs, http and https (WebDAV)
    tiered:memory://?max_gb=8,redis://host:6379/0    several, fastest first (a comma inside a URL is written %2C)

Servers log URLs, so keep passwords out of them: `password_env=NAME` reads the password from an environment variable,
and `password_file=/path` from a file. `max_gb` counts 10^9 bytes, `max_mb` 10^6. `ttl` takes s, m, h or d; `timeout` is
in seconds. Every store takes `max_entry_mb`, the largest blob that it stores and reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn
from urllib.parse import quote, unquote, urlsplit

from cuvee.codec.errors import InputError
from cuvee.codec.format.keys import read_secret
from cuvee.codec.support.suggest import suggestion
from cuvee.integrations.stores.base import MAX_ENTRY_BYTES, Store
from cuvee.integrations.stores.redaction import redacted

_BUDGET = ("max_gb", "max_mb")
_ENTRY = "max_entry_mb"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MEMORY_BYTES = 4 * 10**9
_REDIS_TIMEOUT = 1.0
# Options of redis-py's URLs for a private certificate authority.
_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_REDIS = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
_CLUSTERS = {f"{scheme}+cluster": plain for scheme, plain in _REDIS.items()}
_SOCKETS = ("unix", "redis+unix")
_OBJECTS = ("s3", "gs", "az", "abfs", "http", "https")
_SCHEMES = ("memory", "file", *_REDIS, *_CLUSTERS, *_SOCKETS, *_OBJECTS)
_TIERED = "tiered:"
_PASSWORD = ("password_env", "password_file")
_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"


def open_store(url: str | Sequence[str], *, guarded: bool = True) -> Store:
    """Open the store that a URL describes, without connecting. A list of URLs, or `tiered:`, makes a `TieredStore`.

    If one process opens `memory://` twice with the same budget, both stores share their entries, which are released
    when the last of the two is closed.

        >>> store = open_store("tiered:memory://?max_mb=100,memory://?max_gb=2")
        >>> store.put("ab/01", b"blob"), store.get("ab/01")
        (True, b'blob')
        >>> store.close()

    Args:
        url: see the module's docstring; a list names the fastest store first.
        guarded: wrap every store except `memory://` in a `GuardedStore`, which turns its errors into counted misses.

    Raises:
        InputError: the URL or an option is invalid. The message shows no passwords.
        ImportError: the package of the store's client is missing.
    """
    tiers: list[Any]  # a list from a configuration file may contain anything
    if isinstance(url, str):
        if not url.startswith(_TIERED):
            return _open(url, guarded)
        tiers = [tier.strip().replace("%2C", ",").replace("%2c", ",") for tier in url.removeprefix(_TIERED).split(",")]
    else:
        tiers = list(url)
    if not tiers or not all(isinstance(tier, str) and tier for tier in tiers):
        shown = redacted(url) if isinstance(url, str) else f"{len(tiers)} entries"
        raise InputError(f"url: must name one or more tiers by non-empty URLs, got {shown}")
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


def _open(url: str, guarded: bool) -> Store:
    if url.startswith(_TIERED):
        raise InputError(
            f"url: a tier must not be tiered itself, got {redacted(url)}; name its stores one after the other"
        )
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    location, _, query = rest.partition("?")
    if not separator:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        hint = f"; did you mean file://{redacted(url)}?" if url.startswith("/") else ""
        raise InputError(f"url: must begin with {known} or tiered:, got {redacted(url)}{hint}")
    if "@" in query:
        raise InputError(f"url: must write ? as %3F in a password, and @ as %40 in an option, got {redacted(url)}")
    if scheme not in _SCHEMES:
        hint = suggestion(scheme, _SCHEMES, form="{}://")
        raise InputError(f"url: must begin with the scheme of a store, got {scheme}://; {hint}")
    options = _Options(url, scheme, query)
    if scheme == "memory":
        return _memory(url, location, options)
    make = _file if scheme == "file" else _objects if scheme in _OBJECTS else _redis
    store = make(url, scheme, location, options)
    if not guarded:
        return store
    from cuvee.integrations.stores.guard import GuardedStore

    return GuardedStore(store)


def _memory(url: str, location: str, options: _Options) -> Store:
    from cuvee.integrations.stores.memory import MemoryStore

    options.only((*_BUDGET, _ENTRY))
    if location:
        raise InputError(f"url: memory:// must have options only, as in memory://?max_gb=8, got {redacted(url)}")
    return MemoryStore(options.budget() or _MEMORY_BYTES, process_wide=True, max_entry=options.entry())


def _file(url: str, scheme: str, location: str, options: _Options) -> Store:
    from cuvee.integrations.stores.disk import DiskStore

    options.only((*_BUDGET, _ENTRY, "ttl"))
    path = unquote(location)
    if not path.startswith("/") or not path.strip("/") or set(location) & set("#\0") or "\0" in path:
        raise InputError(f"url: must be file:///absolute/path, with %23 for # and %3F for ?, got {redacted(url)}")
    return DiskStore(path, options.budget(), options.ttl(), max_entry=options.entry())


def _objects(url: str, scheme: str, location: str, options: _Options) -> Store:
    from cuvee.integrations.stores.objects import ObjectStore

    for name in _BUDGET:
        if name in options.values:
            options.refuse(
                name, "must not be given for object storage; let a lifecycle rule of the bucket delete old objects"
            )
    options.only((_ENTRY, "ttl"))
    if not location or location.startswith("/"):
        raise InputError(f"url: must be {scheme}://bucket/prefix, got {redacted(url)}")
    return ObjectStore(f"{scheme}://{location}", options.ttl(), max_entry=options.entry())


def _redis(url: str, scheme: str, location: str, options: _Options) -> Store:
    from cuvee.integrations.stores.redis import RedisStore

    socket = scheme in _SOCKETS
    plain = "unix" if socket else {**_REDIS, **_CLUSTERS}[scheme]
    extra = ("db",) if socket else _TLS if plain == "rediss" else ()
    for name in _BUDGET:
        if name in options.values:
            options.refuse(
                name, "must not be given for Redis, which evicts itself: set its maxmemory, and its maxmemory-policy "
                "to allkeys-lru"
            )  # fmt: skip
    options.only((_ENTRY, "ttl", "timeout", *_PASSWORD, *extra))
    _check_redis(url, location, socket=socket, cluster=scheme in _CLUSTERS)
    location = _with_password(location, options)
    passed = "&".join(f"{name}={options.values[name]}" for name in extra if name in options.values)
    return RedisStore(
        f"{plain}://{location}" + (f"?{passed}" if passed else ""),
        options.ttl(),
        options.number("timeout", "seconds") or _REDIS_TIMEOUT,
        scheme in _CLUSTERS,
        max_entry=options.entry(),
    )


def _check_redis(url: str, location: str, *, socket: bool, cluster: bool) -> None:
    # An unquoted / or # in a password ends the host early. Then the port is invalid or the path unexpected.
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
        raise InputError(f"url: must be {form}, with special characters of a password as %XX, got {redacted(url)}")


def _with_password(location: str, options: _Options) -> str:
    """Return the location, with the password from `password_env` or `password_file` if one of them is given."""
    env, file = (options.values.get(name) for name in _PASSWORD)
    if env is None and file is None:
        return location
    user, at, place = location.rpartition("@")
    if (env is not None and file is not None) or ":" in user:
        options.refuse("password_env", "must be the only password, got another in the URL or by password_file")
    option = "password_env" if env is not None else "password_file"
    secret = read_secret(option, env=env, file=None if file is None else unquote(file))
    return f"{user}:{quote(secret, safe='')}@{place if at else location}"


class _Options:
    """The query of a URL: `name=value&...`, each name once."""

    def __init__(self, url: str, scheme: str, query: str) -> None:
        self._scheme = scheme
        self._where = f"(in {redacted(url)})"
        self.values: dict[str, str] = {}
        for pair in query.split("&") if query else ():
            name, _, value = pair.partition("=")
            if not name or not value:
                raise InputError(f"url: options must have the form name=value&name=value {self._where}")
            if name in self.values:
                raise InputError(f"{name}: must be given once, got it twice {self._where}")
            self.values[name] = value

    def only(self, known: Collection[str]) -> None:
        for name in self.values:
            if name not in known:
                hint = suggestion(name, known, most=2, form="{}")
                raise InputError(f"{name}: must be an option of {self._scheme}:// stores; {hint} {self._where}")

    def refuse(self, name: str, why: str) -> NoReturn:
        raise InputError(f"{name}: {why} {self._where}")

    def number(self, name: str, unit: str) -> float | None:
        """Return an option that is a number above 0; None if it is missing."""
        text = self.values.get(name)
        if text is None:
            return None
        value = float(text) if re.fullmatch(_NUMBER, text) else math.nan
        if not 0 < value < math.inf:
            raise InputError(f"{name}: must be a number of {unit} above 0, got {text!r} {self._where}")
        return value

    def budget(self) -> int | None:
        """Return the bytes of `max_gb` or `max_mb`; None if both are missing."""
        if all(name in self.values for name in _BUDGET):
            raise InputError(f"max_mb: must not be combined with max_gb, got both {self._where}")
        for name, unit, scale in (("max_gb", "gigabytes (10^9 bytes)", 10**9), ("max_mb", "megabytes", 10**6)):
            value = self.number(name, unit)
            if value is not None:
                if value * scale < 1:
                    raise InputError(f"{name}: must be at least one byte, got {self.values[name]!r} {self._where}")
                return round(value * scale)
        return None

    def entry(self) -> int:
        """Return the bytes of `max_entry_mb`, or the default."""
        value = self.number(_ENTRY, "megabytes")
        if value is not None and value * 10**6 < 1:
            raise InputError(f"{_ENTRY}: must be at least one byte, got {self.values[_ENTRY]!r} {self._where}")
        return MAX_ENTRY_BYTES if value is None else round(value * 10**6)

    def ttl(self) -> float | None:
        """Return the seconds of `ttl`; None if it is missing."""
        text = self.values.get("ttl")
        if text is None:
            return None
        match = re.fullmatch(f"({_NUMBER})([smhd])", text)
        seconds = float(match[1]) * _UNITS[match[2]] if match else math.nan
        if not 0 < seconds < math.inf:
            raise InputError(f"ttl: must be a number above 0 with s, m, h or d, such as 7d, got {text!r} {self._where}")
        return seconds
