"""Stores by URL.

    memory://?max_gb=8                               RAM of this process
    file:///var/cache/kv?max_gb=50&ttl=7d            a folder, shared by processes (file:///dev/shm/kv: in RAM)
    redis://user:password@host:6379/0?max_gb=8       Redis or Valkey: also rediss, valkey, valkeys
    redis+cluster://host:6379?ttl=1h&timeout=0.5     a cluster: also rediss+cluster, valkey+cluster, valkeys+cluster
    unix:///run/redis.sock?db=0                      a socket: also redis+unix
    s3://bucket/prefix?ttl=30d                       object storage: also gs, az, abfs and fsspec+<protocol>
    tiered:memory://?max_gb=8,redis://host:6379/0    several, fastest first (a comma inside a URL is written %2C)

A password need not stand in the URL, which servers log: `password_env=NAME` takes it from an environment variable,
`password_file=/path` from a file. `max_gb` is in 10^9 bytes, `max_mb` in 10^6; with `max_gb_per_tenant` no tenant may
exceed that; `ttl` takes s, m, h or d; `timeout` is in seconds. Every store takes `max_entry_mb`, the largest blob that
it keeps and reads.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn
from urllib.parse import quote, unquote, urlsplit

from cuvee.codec.errors import InputError
from cuvee.codec.keys import read_secret
from cuvee.integrations.stores.base import MAX_ENTRY_BYTES, Store

_BUDGET = ("max_gb", "max_mb")
_SHARE = "max_gb_per_tenant"
_ENTRY = "max_entry_mb"
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
_PASSWORD = ("password_env", "password_file")
_LEAST_SECRET = 4  # characters: a shorter one is no secret, and hiding it would garble messages
# Options that a message may show; anything else may be a secret.
_HARMLESS = {*_BUDGET, _SHARE, _ENTRY, "ttl", "timeout", "db"}
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


def secrets_of(url: str) -> tuple[str, ...]:
    """What `redacted` hides of the URL of one store, as written and unquoted: servers may send it back in messages."""
    place, _, query = url.partition("://")[2].partition("?")
    user, _, _ = place.rpartition("@")
    found = [user.partition(":")[2]]
    found += [value for name, _, value in (pair.partition("=") for pair in query.split("&")) if name not in _HARMLESS]
    both = [form for secret in found for form in (secret, unquote(secret))]
    return tuple(dict.fromkeys(form for form in both if len(form) >= _LEAST_SECRET))


def scrubbed(error: BaseException, secrets: Sequence[str]) -> str:
    """The message of an error without the secrets, which are taken out of the errors behind it, too: logs show them."""
    one: BaseException | None = error
    for _ in range(16):  # a chain of errors may be a ring
        if one is None:
            break
        one.args = tuple(_without(part, secrets) if isinstance(part, str) else part for part in one.args)
        one = one.__cause__ or one.__context__
    return _without(str(error), secrets)


def _without(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


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

        options.only((*_BUDGET, _SHARE, _ENTRY))
        if location:
            raise InputError(f"url: memory:// takes options only, such as memory://?max_gb=8; got {redacted(url)}")
        size = options.budget() or _MEMORY_BYTES
        share = options.share(size)
        return MemoryStore(size, shared=True, max_entry=options.entry(), max_tenant_bytes=share)

    store: Store
    if scheme == "file":
        from cuvee.integrations.stores.disk import DiskStore

        options.only((*_BUDGET, _SHARE, _ENTRY, "ttl"))
        path = unquote(location)
        if not path.startswith("/") or not path.strip("/") or set(location) & set("#\0") or "\0" in path:
            raise InputError(
                f"url: a folder is written file:///absolute/path, with %23 for # and %3F for ?; got {redacted(url)}"
            )
        budget = options.budget()
        share = options.share(budget)
        store = DiskStore(path, budget, options.ttl(), max_entry=options.entry(), max_tenant_bytes=share)
    elif scheme in _BUCKETS or fsspec:
        from cuvee.integrations.stores.objects import ObjectStore

        options.only(("ttl", _ENTRY))
        if not location or (not fsspec and location.startswith("/")):
            raise InputError(f"url: an object store is written {scheme}://bucket/prefix, got {redacted(url)}")
        url = f"{fsspec[1] if fsspec else scheme}://{location}"
        store = ObjectStore(url, options.ttl(), max_entry=options.entry())
    else:
        from cuvee.integrations.stores.redis import RedisStore

        socket = scheme in _SOCKETS
        plain = "unix" if socket else {**_REDIS, **_CLUSTERS}[scheme]
        own = ("db",) if socket else _TLS if plain == "rediss" else ()
        options.only((*_BUDGET, _SHARE, _ENTRY, "ttl", "timeout", *_PASSWORD, *own))
        _check_redis(url, location, socket=socket, cluster=scheme in _CLUSTERS)
        location = _with_password(location, options)
        passed = "&".join(f"{name}={options.values[name]}" for name in own if name in options.values)
        store = RedisStore(
            f"{plain}://{location}" + (f"?{passed}" if passed else ""),
            options.budget(),
            options.ttl(),
            options.number("timeout", "seconds") or _REDIS_TIMEOUT,
            scheme in _CLUSTERS,
            max_entry=options.entry(),
            max_tenant_bytes=options.share(options.budget(), needed=True),
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


def _with_password(location: str, options: _Options) -> str:
    """The location with the password that `password_env` or `password_file` name, if one does."""
    env, file = (options.values.get(name) for name in _PASSWORD)
    if env is None and file is None:
        return location
    user, at, place = location.rpartition("@")
    if (env is not None and file is not None) or ":" in user:
        options.refuse("password_env", "give one password: in the URL, by password_env or by password_file")
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

    def refuse(self, name: str, why: str) -> NoReturn:
        raise InputError(f"{name}: {why} {self._where}")

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

    def share(self, budget: int | None, *, needed: bool = False) -> int | None:
        """Bytes of `max_gb_per_tenant`; None without it. `needed`: whether it takes a budget of all."""
        value = self.number(_SHARE, "gigabytes (10^9 bytes)")
        if value is None:
            return None
        if needed and budget is None:
            raise InputError(f"{_SHARE}: takes max_gb, too, at {self._scheme}:// stores {self._where}")
        share = round(value * 10**9)
        if share < 1 or (budget is not None and share > budget):
            most = "" if budget is None else f" and at most the budget of all, {budget / 1e9:g}"
            raise InputError(f"{_SHARE}: must be at least one byte{most}, got {self.values[_SHARE]!r} {self._where}")
        return share

    def entry(self) -> int:
        """Bytes of `max_entry_mb`; the default without it."""
        value = self.number(_ENTRY, "megabytes")
        if value is not None and value * 10**6 < 1:
            raise InputError(f"{_ENTRY}: must be at least one byte, got {self.values[_ENTRY]!r} {self._where}")
        return MAX_ENTRY_BYTES if value is None else round(value * 10**6)

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
