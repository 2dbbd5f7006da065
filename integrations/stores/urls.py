"""Stores by URL.

    memory://?max_gb=8                               RAM of this process
    file:///var/cache/kv?max_gb=50&ttl=7d            a folder, shared by processes (file:///dev/shm/kv is in RAM)
    redis://user:password@host:6379/0?ttl=1d         Redis or Valkey; rediss:// with TLS
    redis+cluster://host:6379?ttl=1h&timeout=0.5     a cluster; rediss+cluster:// with TLS
    unix:///run/redis.sock?db=0                      Redis on a socket
    s3://bucket/prefix?ttl=30d                       object storage: also gs, az, abfs, http and https (WebDAV)
    tiered:memory://?max_gb=8,redis://host:6379/0    several, fastest first (a comma inside a URL is written %2C)

Servers log URLs, so keep passwords out of them: `password_env=NAME` reads the password from an environment variable,
and `password_file=/path` from a file. `max_gb` counts 10^9 bytes. `ttl` takes s, m, h or d; `timeout` is in seconds.
Options of redis-py that begin with `ssl_` are passed on. `valkey` is another word for `redis`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from cuvee.codec.errors import InputError
from cuvee.codec.support.suggest import suggestion
from cuvee.integrations.identity.secret_sources import read_secret
from cuvee.integrations.stores.base import OBJECT_SCHEMES, Store, numbered
from cuvee.integrations.stores.redaction import redacted

_MEMORY_BYTES = 4 * 10**9
_REDIS_TIMEOUT = 1.0
# Options that are amounts: how many bytes or seconds each unit is, and what a value must be.
_AMOUNTS: dict[str, tuple[dict[str, int], str]] = {
    "max_gb": ({"": 10**9}, "a number of gigabytes (10^9 bytes) above 0"),
    "timeout": ({"": 1}, "a number of seconds above 0"),
    "ttl": ({"s": 1, "m": 60, "h": 3600, "d": 86400}, "a number above 0 with s, m, h or d, such as 7d"),
}
_TIERED = "tiered:"
_PASSWORD = ("password_env", "password_file")
_Maker = Callable[[str, str, str, dict[str, Any]], Store]


class _Kind(NamedTuple):
    """The stores of a scheme: their `Store.name`, the function that makes one, and their options."""

    name: str
    make: _Maker
    options: tuple[str, ...]


def open_store(url: str | Sequence[str], *, guarded: bool = True) -> Store:
    """Open the store that a URL describes, without connecting. A list of URLs, or `tiered:`, makes a `TieredStore`.

        >>> store = open_store("tiered:memory://?max_gb=0.1,memory://?max_gb=2")
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
    tiers = _tiers(url)
    if isinstance(tiers, str):
        return _open(tiers, guarded)
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


def tier_names(url: str | Sequence[str]) -> list[str]:
    """Return the names of tiers that the `counters` of `open_store(url)` have, without opening it.

        >>> tier_names(["memory://", "redis://near", "redis://far"])
        ['memory', 'redis', 'redis-2']

    Raises:
        InputError: no store has such a URL.
    """
    tiers = _tiers(url)
    return numbered(_KINDS[_scheme(tier)].name for tier in ([tiers] if isinstance(tiers, str) else tiers))


def _tiers(url: str | Sequence[str]) -> str | list[str]:
    """Return the URLs of the tiers, or the URL of a store without any."""
    tiers: list[Any]  # a list from a configuration file may contain anything
    if not isinstance(url, str) and len(url) == 1 and str(url[0]).startswith(_TIERED):  # options are lists of URLs
        url = url[0]
    if isinstance(url, str):
        if not url.startswith(_TIERED):
            return url
        tiers = [tier.strip().replace("%2C", ",").replace("%2c", ",") for tier in url.removeprefix(_TIERED).split(",")]
    else:
        tiers = list(url)
    if not tiers or not all(isinstance(tier, str) and tier for tier in tiers):
        shown = redacted(url) if isinstance(url, str) else f"{len(tiers)} entries"
        raise InputError(f"url: must name one or more tiers by non-empty URLs, got {shown}")
    return tiers


def _scheme(url: str) -> str:
    """Return the scheme of a store's URL, which is one of `_KINDS`."""
    scheme, separator, _ = url.partition("://")
    scheme = scheme.lower().replace("valkey", "redis")
    if not separator or scheme not in _KINDS:
        hint = (
            f"did you mean file://{redacted(url)}?" if url.startswith("/") else suggestion(scheme, _KINDS, form="{}://")
        )
        shown = f"{scheme}://" if separator else redacted(url)
        raise InputError(f"url: must begin with the scheme of a store, or with tiered: once, got {shown}; {hint}")
    return scheme


def _open(url: str, guarded: bool) -> Store:
    scheme = _scheme(url)
    location, _, query = url.partition("://")[2].partition("?")
    if "@" in query:
        raise InputError(f"url: must write ? as %3F in a password, and @ as %40 in an option, got {redacted(url)}")
    store = _KINDS[scheme].make(url, scheme, location, _options(url, scheme, query))
    if not guarded or scheme == "memory":
        return store
    from cuvee.integrations.stores.breaker import GuardedStore

    return GuardedStore(store)


def _memory(url: str, scheme: str, location: str, given: dict[str, Any]) -> Store:
    from cuvee.integrations.stores.memory import MemoryStore

    _check(url, not location, "memory:// with options only, as in memory://?max_gb=8")
    return MemoryStore(given.get("max_gb", _MEMORY_BYTES))


def _file(url: str, scheme: str, location: str, given: dict[str, Any]) -> Store:
    from cuvee.integrations.stores.disk import DiskStore

    path = unquote(location)
    good = path.startswith("/") and path.strip("/") and not set(location) & set("#\0") and "\0" not in path
    _check(url, good, "file:///absolute/path, with %23 for # and %3F for ?")
    return DiskStore(path, given.get("max_gb"), given.get("ttl"))


def _objects(url: str, scheme: str, location: str, given: dict[str, Any]) -> Store:
    _check(url, location and not location.startswith("/"), f"{scheme}://bucket/prefix")
    from cuvee.integrations.stores.objects import ObjectStore

    return ObjectStore(f"{scheme}://{location}", given.get("ttl"))


def _redis(url: str, scheme: str, location: str, given: dict[str, Any]) -> Store:
    scheme, _, cluster = scheme.partition("+")
    socket, good = scheme == "unix", False
    # An unquoted / or # in a password ends the host early. Then the port is invalid or the path unexpected.
    with suppress(ValueError):
        parts = urlsplit(f"redis://{location}")
        path = re.fullmatch("/.*[^/]" if socket else "/?0?" if cluster else "(/[0-9]*)?", parts.path)
        good = not parts.fragment and path is not None and bool(parts.hostname) != socket and parts.port != 0
    form = "unix:///path/of/socket" if socket else "redis://[user:password@]host:port/database"
    _check(url, good, f"{form}, with special characters of a password as %XX")
    server = f"{scheme}://{_with_password(url, location, given)}"
    if passed := "&".join(f"{name}={text}" for name, text in given.items() if name == "db" or name[:4] == "ssl_"):
        server += f"?{passed}"
    from cuvee.integrations.stores.redis import RedisStore

    timeout = given.get("timeout", _REDIS_TIMEOUT)
    return RedisStore(server, given.get("ttl"), timeout, bool(cluster))


_SERVER = ("ttl", "timeout", *_PASSWORD)
_KINDS = {
    "memory": _Kind("memory", _memory, ("max_gb",)),
    "file": _Kind("disk", _file, ("max_gb", "ttl")),
    **dict.fromkeys(("redis", "rediss", "redis+cluster", "rediss+cluster"), _Kind("redis", _redis, _SERVER)),
    "unix": _Kind("redis", _redis, (*_SERVER, "db")),
    **dict.fromkeys(OBJECT_SCHEMES, _Kind("object", _objects, ("ttl",))),
}
# Why some stores have no budget, and what to do instead.
_NO_BUDGET = {
    _redis: "Redis, which evicts itself: set its maxmemory, and its maxmemory-policy to allkeys-lru",
    _objects: "object storage; let a lifecycle rule of the bucket delete old objects",
}


def _check(url: str, good: object, form: str) -> None:
    if not good:
        raise InputError(f"url: must be {form}, got {redacted(url)}")


def _options(url: str, scheme: str, query: str) -> dict[str, Any]:
    """Return the options in a query `name=value&...`: sizes in bytes, times in seconds, all others as they are."""
    given: dict[str, Any] = {}
    where, (_, make, known) = f"(in {redacted(url)})", _KINDS[scheme]
    for pair in query.split("&") if query else ():
        name, _, text = pair.partition("=")
        if not name or not text:
            raise InputError(f"url: options must have the form name=value&name=value {where}")
        if name in given:
            raise InputError(f"{name}: must be given once, got it twice {where}")
        if name == "max_gb" and make in _NO_BUDGET:
            raise InputError(f"{name}: must not be given for {_NO_BUDGET[make]} {where}")
        if name not in known and not (name.startswith("ssl_") and scheme.startswith("rediss")):
            hint = suggestion(name, known, most=2, form="{}")
            raise InputError(f"{name}: must be an option of {scheme}:// stores; {hint} {where}")
        given[name] = text
        if name in _AMOUNTS:
            units, form = _AMOUNTS[name]
            match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)([a-z]?)", text)
            value = float(match[1]) * units.get(match[2], 0) if match else 0
            given[name] = value if name in ("ttl", "timeout") else round(value)
            if not given[name]:
                raise InputError(f"{name}: must be {form}, got {text!r} {where}")
    return given


def _with_password(url: str, location: str, given: dict[str, Any]) -> str:
    """Return the location, with the password from `password_env` or `password_file` if one of them is given."""
    env, file = (given.get(name) for name in _PASSWORD)
    if env is None and file is None:
        return location
    user, at, place = location.rpartition("@")
    if (env is not None and file is not None) or ":" in user:
        why = "must be the only password, got another in the URL or by password_file"
        raise InputError(f"password_env: {why} (in {redacted(url)})")
    option = "password_env" if env is not None else "password_file"
    secret = read_secret(option, env=env, file=None if file is None else unquote(file))
    return f"{user}:{quote(secret, safe='')}@{place if at else location}"
