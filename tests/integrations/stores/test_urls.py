"""`open_store`: the store of each URL, refused URLs, and messages without passwords."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.integrations.stores.dict_store import DictStore

from cuvee.codec.errors import InputError
from cuvee.integrations.stores import open_store
from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.stores.disk import DiskStore
from cuvee.integrations.stores.memory import MemoryStore
from cuvee.integrations.stores.redaction import redacted, scrubbed, secrets_of
from cuvee.integrations.stores.tiered import TieredStore
from cuvee.integrations.stores.urls import _KINDS, tier_names

SECRET = "s3cr"


class Recorded(DictStore):
    """A stand-in for a store whose client may not be installed. It records its arguments."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__()
        self.arguments, self.named = arguments, named
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the stores that would import redis-py and obstore."""
    for module, name in (("redis", "RedisStore"), ("objects", "ObjectStore")):
        fake = type(sys)(module)
        setattr(fake, name, Recorded)
        monkeypatch.setitem(sys.modules, f"cuvee.integrations.stores.{module}", fake)


def arguments(url: str) -> tuple[object, ...]:
    store = open_store(url, guarded=False)
    assert isinstance(store, Recorded)
    return store.arguments


@pytest.mark.parametrize(
    ("place", "options", "root", "budget", "ttl"),
    [
        ("store", "?max_gb=50&ttl=7d", "store", 50 * 10**9, 7 * 86400),
        ("store", "?ttl=90s&max_gb=0.001", "store", 10**6, 90),
        ("store", "?ttl=1.5h", "store", None, 5400),
        ("a%20b%23%3Fc+d@e", "?ttl=2m", "a b#?c+d@e", None, 120),
    ],
)
def test_file(tmp_path: Path, place: str, options: str, root: str, budget: int | None, ttl: float | None) -> None:
    store = open_store(f"file://{tmp_path}/{place}{options}", guarded=False)
    assert isinstance(store, DiskStore)
    assert (store.root, store.max_bytes, store.ttl) == (f"{tmp_path}/{root}", budget, ttl)
    guarded = open_store(f"file://{tmp_path}/{place}{options}")
    assert isinstance(guarded, GuardedStore) and (guarded.name, guarded.shared) == ("disk", True)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:6379/0", ("redis://host:6379/0", None, 1.0, False)),
        ("redis://[::1]:6379/2", ("redis://[::1]:6379/2", None, 1.0, False)),
        ("redis://user:p%40ss@host:6379/0?ttl=1h&timeout=0.5", ("redis://user:p%40ss@host:6379/0", 3600, 0.5, False)),
        ("VALKEYS://host:1", ("rediss://host:1", None, 1.0, False)),
        (
            "rediss://:pw@host:1?ssl_ca_certs=/etc/ca.pem&ssl_cert_reqs=none",
            ("rediss://:pw@host:1?ssl_ca_certs=/etc/ca.pem&ssl_cert_reqs=none", None, 1.0, False),
        ),
        ("redis+cluster://host:6379", ("redis://host:6379", None, 1.0, True)),
        ("valkeys+cluster://u:p@host:6379/0", ("rediss://u:p@host:6379/0", None, 1.0, True)),
        ("unix:///run/redis.sock?db=3&timeout=2", ("unix:///run/redis.sock?db=3", None, 2.0, False)),
        ("unix://u:p@/run/redis.sock", ("unix://u:p@/run/redis.sock", None, 1.0, False)),
        ("s3://bucket/prefix/a@b", ("s3://bucket/prefix/a@b", None)),
        ("gs://bucket?ttl=30d", ("gs://bucket", 30 * 86400)),
        ("abfs://c@account.dfs/p", ("abfs://c@account.dfs/p", None)),
        ("http://u:p@host:81/x", ("http://u:p@host:81/x", None)),
        ("HTTPS://host/x?ttl=1s", ("https://host/x", 1)),
    ],
)
def test_clients_get_their_part(url: str, expected: tuple[object, ...]) -> None:
    assert arguments(url) == expected
    assert isinstance(open_store(url), GuardedStore)


def test_tiers(tmp_path: Path) -> None:
    for url in (
        f"tiered:memory://?max_gb=1, file://{tmp_path}/a%2cb?ttl=1d,redis://:x%2Cy@host/0,s3://b/a%2Cc",
        ["memory://?max_gb=1", f"file://{tmp_path}/a,b?ttl=1d", "redis://:x,y@host/0", "s3://b/a,c"],
    ):
        store = open_store(url)
        assert isinstance(store, TieredStore)
        memory, *others = store.tiers
        assert isinstance(memory, MemoryStore) and memory.max_bytes == 10**9, "not guarded: it cannot fail"
        assert all(isinstance(tier, GuardedStore) for tier in others)
        store.close()
        store = open_store(url, guarded=False)
        assert isinstance(store, TieredStore)
        memory, file, redis, objects = store.tiers
        assert isinstance(file, DiskStore) and file.root == f"{tmp_path}/a,b"
        assert isinstance(redis, Recorded) and redis.arguments[0] == "redis://:x,y@host/0"
        assert isinstance(objects, Recorded) and objects.arguments[0] == "s3://b/a,c"
        store.close()
        assert redis.closed
    for url in ("tiered:memory://", ["tiered:memory://"], ["memory://"]):
        store = open_store(url)
        assert isinstance(store, TieredStore)
        (memory,) = store.tiers
        assert isinstance(memory, MemoryStore) and memory.max_bytes == 4 * 10**9
        store.close()


@pytest.mark.parametrize("url", ["tiered:memory://, file://{0}/a,FILE://{0}/b", ["tiered:file://{0}/a"], "memory://"])
def test_the_names_of_tiers_are_known_before_they_are_opened(url: Any, tmp_path: Path) -> None:
    url = url.format(tmp_path) if isinstance(url, str) else [each.format(tmp_path) for each in url]
    assert tier_names(url) == list(open_store(url).counters())


PLACES = {"memory": "", "file": "{0}/a", "redis+cluster": "host:1", "rediss+cluster": "host:1", "unix": "/run/socket"}


def test_each_scheme_names_its_tier_as_its_store_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()  # the stores themselves, which do not connect yet
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for client in ("redis", "obstore"):
        pytest.importorskip(client)
    for scheme in _KINDS:
        url = f"{scheme}://{PLACES.get(scheme, 'host').format(tmp_path)}"
        store = open_store(url)
        assert tier_names(url) == [store.name] == list(store.counters()), url
        store.close()


def test_a_bad_tier_closes_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Recorded] = []

    def close(store: Recorded) -> None:
        closed.append(store)

    monkeypatch.setattr(Recorded, "close", close)
    with pytest.raises(InputError, match=r"^ttl: "):
        open_store(["redis://host", "s3://bucket", "redis://host?ttl=0"])
    assert len(closed) == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", r"^url: must begin with the scheme of a store, or with tiered: once, got ; there are memory, file"),
        ("/var/cache", r"^url: must begin with .*got /var/cache; did you mean file:///var/cache\?$"),
        ("flie:///x", r"^url: must begin with the scheme of a store.*, got flie://; did you mean file://\?"),
        ("ftp+x://h", r"^url: must begin with the scheme of a store.*, got ftp\+x://; there are memory, file"),
        ("memory://?max_bg=8", r"^max_bg: must be an option of memory:// stores; did you mean max_gb\? \(in memory://"),
        ("memory://name", r"^url: must be memory:// with options only"),
        (
            "memory://?max_gb=-1",
            r"^max_gb: must be a number of gigabytes \(10\^9 bytes\) above 0, got '-1' \(in memory:",
        ),
        ("memory://?max_gb=0.0000000001", r"^max_gb: must .*got '0.0000000001'"),
        ("memory://?max_gb=8GB", r"^max_gb: must .*got '8GB'"),
        ("memory://?max_gb=1&max_gb=2", r"^max_gb: must be given once, got it twice"),
        ("memory://?max_gb=", r"^url: options must have the form name=value"),
        ("file://relative/path", r"^url: must be file:///absolute/path"),
        ("file:///a#b", r"^url: must be .*%23 for #"),
        ("file:///a%00b", r"^url: must be"),
        ("file:///x?ttl=7", r"^ttl: must be a number above 0 with s, m, h or d, such as 7d, got '7' \(in file:///x"),
        ("redis://h?max_gb=1", r"^max_gb: must not be given for Redis, which evicts itself: set its maxmemory"),
        ("file:///x?timeout=1", r"^timeout: must be an option of file:// stores"),
        ("redis://", r"^url: must be redis://\[user:password@\]host:port/database"),
        ("redis://host:port", r"^url: must be redis://"),
        ("redis://host:0", r"^url: must be redis://"),
        ("redis://host/0#x", r"^url: must be redis://"),
        ("redis+cluster://host/1", r"^url: must be redis://"),
        ("unix://host/path", r"^url: must be unix:///path/of/socket"),
        ("redis://host?timeout=0", r"^timeout: must be a number of seconds above 0, got '0'"),
        ("redis://host?db=1", r"^db: must be an option of redis:// stores"),
        ("s3:///x", r"^url: must be s3://bucket/prefix"),
        ("s3://b?max_gb=1", r"^max_gb: must not be given for object storage; let a lifecycle rule"),
        ("tiered:", r"^url: must name one or more tiers by non-empty URLs, got tiered:$"),
        ("tiered:memory://,,memory://", r"^url: must name one or more tiers"),
        ("tiered:tiered:memory://,memory://", r"^url: must begin with the scheme of a store, or with tiered: once"),
        ([], r"^url: must name one or more tiers by non-empty URLs, got 0 entries"),
        (["memory://", ["memory://"]], r"^url: must name one or more tiers"),
    ],
)
def test_what_is_refused(url: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("file:///home/u@corp/x?max_gb=5&ttl=7d", "file:///home/u@corp/x?max_gb=5&ttl=7d"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://user:s3cr@host:6379/0?ttl=1h", "redis://user:***@host:6379/0?ttl=1h"),
        ("redis://:s3cr@host", "redis://:***@host"),
        ("redis://s3cr@host", "redis://***@host"),
        ("rediss://host?password=s3cr&db=1", "rediss://host?password=***&db=1"),
        ("unix://u:s3cr@/run/x.sock", "unix://u:***@/run/x.sock"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
        ("https://u:s3cr@h/x", "https://u:***@h/x"),
        ("tiered:memory://,redis://u:s3cr@h,s3://b/x", "tiered:memory://,redis://u:***@h,s3://b/x"),
        ("tiered:redis://u:s3cr@h,redis://v:s3cr@i", "tiered:redis://u:***@h,redis://v:***@i"),
    ],
)
def test_redacted(url: str, shown: str) -> None:
    assert redacted(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:s3cr@x@host:1/name",
        "redis://host/0?password=s3cr:x@y",
        "tiered:memory://,redis://u:a/x,s3cr/y@host",
        "redis://u:a/s3cr@host/name",
        "redis://u:a?s3cr@host",
        "redis://u:a#s3cr@host",
        "redis://u:a&s3cr=s3cr@host/name",
        "redis://:s3cr",
        "redsi://:s3cr@host",
        "u:s3cr@host:6379",
        "redis://host/name?password=s3cr",
        "redis://host?max_gb=0&client_name=s3cr",
        "tiered:memory://,redis://u:a,s3cr@host/name",
        "tiered:redis://u:s3cr@host,memory://?max_gb=0",
        "tiered:tiered:redis://u:s3cr@host,memory://",
        ["memory://", "redis://u:s3cr@host/name"],
    ],
)
def test_no_message_shows_a_password(url: str | list[str]) -> None:
    with pytest.raises(InputError) as caught:
        open_store(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in str(error)
        error = error.__cause__ or error.__context__
    if isinstance(url, str):
        assert SECRET not in redacted(url)


@pytest.mark.parametrize("written", ["pass:/@#?&%w\u00f6rd", "  spaced out\n"])
@pytest.mark.parametrize(
    ("url", "opened"),
    [
        ("redis://host:1/0?{}", "redis://:{}@host:1/0"),
        ("rediss://user@host?{}&ttl=1d&ssl_cert_reqs=none", "rediss://user:{}@host?ssl_cert_reqs=none"),
        ("redis+cluster://host:1?{}&ttl=1h", "redis://:{}@host:1"),
        ("unix:///run/r.sock?db=2&{}", "unix://:{}@/run/r.sock?db=2"),
    ],
)
def test_a_password_from_elsewhere(
    url: str, opened: str, written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUVEE_TEST_PASSWORD", written)
    (tmp_path / "a password").write_text(written)
    expected = opened.format(quote(written.strip(), safe=""))
    for place in ("password_env=CUVEE_TEST_PASSWORD", f"password_file={tmp_path}/a%20password"):
        store = open_store(url.format(place), guarded=False)
        assert isinstance(store, Recorded) and store.arguments[0] == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://host?password_env=CUVEE_NOT_SET", "password_env: the environment variable CUVEE_NOT_SET is not set"),
        ("redis://host?password_file=/not/there", "password_file: the file /not/there cannot be read"),
        ("redis://host?password_env=s3cr", "password_env: the variable it names is not set"),
        ("redis://host?password_env=A&password_file=/s3cr", "password_env: must be the only password"),
        ("redis://u:s3cr@host?password_env=A", "password_env: must be the only password"),
        ("file:///x?password_env=A", "password_env: must be an option of file://"),
    ],
)
def test_a_password_that_is_not_there(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "s3cr")
    with pytest.raises(InputError, match=message) as caught:
        open_store(url)
    assert SECRET not in str(caught.value)


def test_what_servers_send_back_is_scrubbed() -> None:
    secrets = secrets_of("redis://user:p%40ssw0rd@host:6379/0?db=1&token=t0ken&max_gb=1")
    assert set(secrets) == {"p%40ssw0rd", "p@ssw0rd", "t0ken"}
    error = RuntimeError("unknown command 'AUTH p@ssw0rd' with t0ken")
    assert scrubbed(error, secrets) == "unknown command 'AUTH ***' with ***"
    assert scrubbed(OSError(13, "refused: t0ken"), secrets) == "[Errno 13] refused: ***"
    assert secrets_of("redis://a:b@host") == secrets_of("memory://?max_gb=1") == ()
