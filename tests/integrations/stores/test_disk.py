"""`DiskStore`: crashes, several processes, budgets, time to live, bad entries, failing disks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.forked import works_in_child_while_held

from cuvee.codec.errors import CorruptError, InputError
from cuvee.integrations.stores import counted, disk, folder, safe_files
from cuvee.integrations.stores.base import StoreError, TierCounters
from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.stores.disk import DiskStore
from cuvee.integrations.stores.envelope import HEADER_BYTES, ExpiredError, seal, verify

KEY = "ab/0123"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def counters(store: DiskStore) -> TierCounters:
    return store.counters()["disk"]


def file_of(root: Path, key: str) -> Path:
    tenant, _, name = key.partition("/")
    return root / tenant / name[:2] / name


def files(root: Path) -> list[Path]:
    """List the files in the store except its lock files."""
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name not in {".lock", ".evict"})


def used(root: Path) -> int:
    """Count the bytes of all files, which may be added and deleted meanwhile."""
    total = 0
    for where, _, names in os.walk(root):
        for name in {*names} - {".lock", ".evict"}:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def scan(store: DiskStore) -> None:
    with store._opened_root() as root:
        store._scan(root, time.time())


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


# --- the envelope ---


def opened(entry: bytes, **limits: float) -> bytes:
    verify(KEY, entry[:HEADER_BYTES], entry[HEADER_BYTES:], **limits)
    return entry[HEADER_BYTES:]


def test_envelope_layout_and_round_trip() -> None:
    data = seal(KEY, b"payload", 1234.5)
    assert len(data) == HEADER_BYTES + 7 == 71
    assert data[:8] == b"cuvS\x01\0\0\0" and data[16:24] == (7).to_bytes(8, "little")
    assert opened(data) == b"payload" == opened(data, ttl=60, now=1294.5) and opened(seal(KEY, b"", 0.0)) == b""
    with pytest.raises(ExpiredError, match="60"):
        opened(data, ttl=60, now=1294.6)


def test_envelope_finds_every_flipped_bit_every_cut_and_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    data = seal(KEY, b"payload", 1234.5)
    flipped = [(int.from_bytes(data) ^ 1 << bit).to_bytes(len(data)) for bit in range(8 * len(data))]
    for bad in (*flipped, *(data[:length] for length in range(len(data)))):
        with pytest.raises(CorruptError, match=r"^entry: "):
            opened(bad)
    with pytest.raises(CorruptError, match="must have 7 bytes, as its header says, got 8"):
        opened(data + b"x")
    monkeypatch.setattr("cuvee.integrations.stores.envelope._VERSION", 2)
    newer = seal(KEY, b"payload", 0.0)
    monkeypatch.undo()
    for other in (newer, seal(KEY, b"", float("nan"))):
        with pytest.raises(CorruptError, match="not a format that this build reads"):
            opened(other)


# --- files ---


def test_files_and_folders_are_the_owners_alone(tmp_path: Path) -> None:
    """Folders above the root may be read by others, but not changed."""
    mask = os.umask(0)
    root = tmp_path / "a" / "b" / "store"
    try:
        DiskStore(root).put(KEY, b"x")
    finally:
        os.umask(mask)
    paths = (tmp_path / "a", tmp_path / "a" / "b", root, root / "ab", root / "ab" / "01", file_of(root, KEY))
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (*paths, root / ".lock")]
    assert modes == [0o755, 0o755, 0o700, 0o700, 0o700, 0o600, 0o600] and file_of(root, KEY).is_file()


def test_nothing_is_created_before_the_first_put(root: Path) -> None:
    store = DiskStore(root)
    assert store.get(KEY) is None and store.contains([KEY]) == [False]
    assert store.delete(KEY) is False and store.delete_tenant("ab") == 0
    assert not root.exists()


@pytest.mark.parametrize(("name", "why"), [("file/kv", "Not a directory"), ("x" * 300, "File name too long")])
def test_a_folder_that_cannot_be_made_is_told_with_the_remedy(
    tmp_path: Path, name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that is down would be tried again, and may be full."""
    (tmp_path / "file").write_text("mine")
    with contextlib.closing(GuardedStore(DiskStore(tmp_path / name))) as store:
        assert not store.put(KEY, b"blob") and store.get(KEY) is None
    assert len(caplog.messages) == 2, "writing, and reading"
    for message in caplog.messages:
        assert re.search(
            rf"the folder cannot be made \({why}: .*{name}'\): make it, as a folder of user \d+, or", message
        )
        assert "running" not in message


def test_entries_outlive_the_process_and_are_seen_by_others(root: Path) -> None:
    DiskStore(root).put(KEY, b"x")
    other = DiskStore(root, max_bytes=10**6)
    assert other.get(KEY) == b"x"
    other.put("ab/4567", b"y")
    assert (counters(DiskStore(root, max_bytes=10**6)).entries, counters(DiskStore(root)).entries) == (2, None)
    assert (counters(other).entries, counters(other).bytes) == (2, 2 * (HEADER_BYTES + 1))


@pytest.mark.parametrize("gone", ["", "ab"], ids=["the root", "a tenant"])
def test_a_folder_that_is_removed_is_made_again_and_a_put_meanwhile_fails(
    root: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(root)
    replace = os.replace

    def removed(source: str, target: str, **folders: int) -> None:
        shutil.rmtree(root / gone)
        replace(source, target, **folders)

    monkeypatch.setattr(os, "replace", removed)
    with pytest.raises(StoreError, match="No such file"):
        store.put(KEY, b"x")
    monkeypatch.undo()
    for _ in range(2):
        assert store.get(KEY) is None and store.put(KEY, b"x") and store.get(KEY) == b"x" and store.flush(20)
        shutil.rmtree(root / gone)


def test_no_deletion_removes_a_folder_that_waits_for_an_entry(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(root)
    store.put(f"{KEY}00", b"the last one")
    replace = os.replace
    deleter = threading.Thread(target=store.delete, args=(f"{KEY}00",))

    def meanwhile(source: str, target: str, **folders: int) -> None:
        deleter.start()
        deleter.join(0.2)
        replace(source, target, **folders)

    monkeypatch.setattr(os, "replace", meanwhile)
    assert store.put(KEY, b"x")
    deleter.join()
    assert list(store.keys("ab")) == [KEY] and store.get(KEY) == b"x"


# --- links, and folders of other users ---


@pytest.fixture
def treasure(tmp_path: Path) -> Path:
    """Make a folder outside the store, with the layout of a tenant's folder, which must not be touched."""
    shard = tmp_path / "treasure" / "01"
    shard.mkdir(parents=True)
    (shard / "0123").write_bytes(seal(KEY, b"not the store's", 0.0))
    (shard.parent / "letter").write_bytes(b"dear diary")
    age(shard / "0123", 10**6)
    return shard.parent


def content(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def within(seconds: float, work: Callable[[], object]) -> None:
    """Fail the test if the work takes longer; exceptions of the work pass."""

    def run() -> None:
        with suppress(StoreError, OSError):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


# Where an attacker may have put something, and the part of the treasure to which a link there leads.
PLACES = {"ab": "", "ab/01": "01", "ab/01/0123": "01/0123", **dict.fromkeys((".tmp-0123", ".lock", ".evict"), "letter")}


@pytest.mark.parametrize("kind", ["link", "fifo"])
@pytest.mark.parametrize("where", PLACES)
def test_no_link_is_followed_and_no_fifo_waited_for(root: Path, treasure: Path, where: str, kind: str) -> None:
    first = DiskStore(root)
    assert first.put("cd/4567", b"x") and first.flush(20)
    bait = root / where
    bait.parent.mkdir(parents=True, exist_ok=True)
    bait.unlink(missing_ok=True)
    if kind == "link":
        bait.symlink_to(treasure / PLACES[where])
    else:
        os.mkfifo(bait)
    os.utime(bait, (0, 0), follow_symlinks=False)
    before = content(treasure)
    store = DiskStore(root, max_bytes=2000, ttl=10**10)
    found: list[object] = []
    actions: list[Callable[[], object]] = [
        lambda: found.extend(store.contains([KEY])), lambda: found.append(store.get(KEY)), lambda: scan(store),
        lambda: store.delete(KEY), lambda: store.delete_tenant("ab"),
        *(lambda name=name: store.put(f"ab/01{name:02x}", bytes(300)) for name in range(20)),
        lambda: store.put(KEY, bytes(300)),
    ]  # fmt: skip
    for action in actions:
        within(60, action)
    assert not any(found) and content(treasure) == before


def test_a_folder_that_becomes_a_link_while_it_is_scanned(
    root: Path, treasure: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is swapped for a link after it was listed and before it is opened."""
    store = DiskStore(root, max_bytes=10_000, ttl=60)
    assert store.put(KEY, b"x") and store.flush(20)
    before = content(treasure)
    usual = safe_files.open_folder

    def swap(name: str, parent: int | None, *, create: bool = False) -> Any:
        if name == "ab" and not (root / "ab").is_symlink():
            (root / "ab").rename(root / "aside")
            (root / "ab").symlink_to(treasure)
        return usual(name, parent, create=create)

    monkeypatch.setattr(folder, "open_folder", swap)
    with suppress(OSError):
        scan(store)
    assert (root / "ab").is_symlink() and content(treasure) == before


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1702])
def test_a_folder_that_others_may_write_to_is_refused(root: Path, mode: int) -> None:
    """One of its own in a folder like /dev/shm is accepted, and the message says so."""
    late = DiskStore(root)
    assert late.put(KEY, b"x") and late.flush(20)
    root.chmod(mode)
    with pytest.raises(
        InputError, match=rf"^path: must not be writable by group or others.* {root} .*{mode:04o}.*chmod go-w {root}"
    ) as caught:
        DiskStore(root)
    assert ("name a folder inside it, which is then created 0700" in str(caught.value)) is bool(mode & stat.S_ISVTX)
    for action in (
        lambda: late.get(KEY), lambda: late.put(KEY, b"y"), lambda: late.contains([KEY]),
        lambda: late.delete_tenant("ab"),
    ):  # fmt: skip
        with pytest.raises(StoreError, match="path: must not be writable by group or others"):
            action()
    assert counters(late).errors == 4
    assert DiskStore(root / "kv").put(KEY, b"x") and stat.S_IMODE((root / "kv").stat().st_mode) == 0o700
    root.chmod(0o755)
    assert late.get(KEY) == b"x" == DiskStore(root).get(KEY), "others may read: the files themselves are 0600"


def test_a_folder_of_another_user_is_refused_unless_that_is_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root could have written to a folder of root."""
    late = DiskStore(root)
    late.put(KEY, b"x")
    owner = root.stat().st_uid
    if owner == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert late.get(KEY) == b"x" == DiskStore(root).get(KEY)
        os.chown(root, 54321, 54321)
        owner = 54321
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    message = rf"must belong to user 12345 .*, got {root}, a folder of user {owner}, .*chown 12345 {root}"
    with pytest.raises(InputError, match=f"^path: {message}"):
        DiskStore(root)
    with pytest.raises(StoreError, match=message):
        late.get(KEY)
    os.chown(root, os.getuid(), os.getgid())


def test_neither_the_root_nor_its_lock_is_a_link(root: Path, tmp_path: Path) -> None:
    late, first = DiskStore(tmp_path / "link"), DiskStore(root)
    assert first.put(KEY, b"x") and first.flush(20)
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(InputError, match=r"^path: must be a folder, got .*/link, a link: name the folder that it"):
        DiskStore(tmp_path / "link")
    with pytest.raises(StoreError, match="Not a directory"):
        late.get(KEY)
    (root / ".lock").unlink()
    (root / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        DiskStore(root).put(KEY, b"x")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"path": ""}, "path"), ({"max_bytes": 0}, "max_bytes"), ({"ttl": 0.0}, "ttl"), ({"ttl": float("nan")}, "ttl")],
)
def test_arguments_are_checked(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: must"):
        DiskStore(**{"path": "/nowhere", **arguments})


# --- crashes ---

# Puts entries until it is killed, and prints each key after its put has returned.
_WRITER = """
import itertools, sys
from cuvee.integrations.stores.disk import DiskStore

root, tag, size, keys, budget = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
store = DiskStore(root, max_bytes=budget or None)
blobs = [bytes([n]) * (size + n) for n in range(7)]
print("ready", flush=True)
for count in itertools.count():
    key = f"{tag}/{count % keys:06x}"
    store.put(key, blobs[count % 7])
    print(key, flush=True)
"""


def start_writer(root: Path, tag: str, *, size: int, keys: int = 10**6, budget: int = 0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", _WRITER, str(root), tag, str(size), str(keys), str(budget)]
    writer = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    return writer


def stop(writer: subprocess.Popen[str]) -> None:
    writer.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, writer.pid, os.WSTOPPED)


def kill(writer: subprocess.Popen[str]) -> list[str]:
    """Kill the process with SIGKILL; return the keys that it printed."""
    writer.send_signal(signal.SIGKILL)
    said = writer.communicate()[0].splitlines(keepends=True)
    assert writer.returncode == -signal.SIGKILL
    return [line.strip() for line in said if line.endswith("\n")]


@pytest.mark.parametrize("keys", [10**6, 3], ids=["new keys", "the same keys"])
def test_kill_9_loses_no_committed_entry_and_leaves_no_half_one(root: Path, keys: int) -> None:
    committed: set[str] = set()
    temporary = 0
    for attempt in range(60):
        # 4 MB per entry, so that most of the time is spent writing.
        writer = start_writer(root, "aa" if keys == 3 else f"{attempt:02x}a", size=4_000_000, keys=keys)
        time.sleep(0.02 + 0.007 * (attempt % 8))
        said = kill(writer)
        committed.update(said)
        temporary += len(list(root.glob(".tmp-*")))
        if attempt >= 5 and temporary >= 2 and committed:
            break
    assert committed
    store = DiskStore(root)
    present = {f"{path.parent.parent.name}/{path.name}" for path in files(root) if not path.name.startswith(".tmp-")}
    assert committed <= present
    for key in present:
        blob = store.get(key)
        assert blob is not None and blob == bytes([blob[0]]) * (4_000_000 + blob[0])
    assert counters(store).corrupt == 0 and counters(store).misses == 0


def test_what_the_dead_left_is_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = time.time
    monkeypatch.setattr(time, "time", lambda: usual() + 86400.0)  # our clock is wrong, the file system's counts
    root.mkdir(mode=0o700)
    dead, young = root / ".tmp-dead", root / ".tmp-young"
    for path in (dead, young):
        path.write_bytes(b"half")
    age(dead, 86400.0 + disk._STALE_SECONDS + 60)
    age(young, 86400.0 + disk._STALE_SECONDS - 60)
    store = DiskStore(root, max_bytes=10_000)
    assert store.put(KEY, b"x") and store.flush(20)
    assert not dead.exists() and young.exists(), "the first put looks"
    dead.write_bytes(b"half")
    age(dead, 86400.0 + disk._STALE_SECONDS + 60)
    assert store.put(KEY, b"y") and store.flush(20) and dead.exists(), "not at every put"
    age(root / ".evict", 86400.0 + 3600.0)  # since the scan before
    assert store.put(KEY, bytes(8000)) and store.put("cd/4567", bytes(1800)) and store.flush(20)
    assert not dead.exists(), "every scan looks"


# --- disks that fail ---


class SmallDisk:
    """The file system of a folder: it has room for so many bytes of files, which others use, too.

    Attributes:
        room: bytes of all files.
        others: bytes that others use.
        number: of the error when it is full: a disk, or a quota, of which `statvfs` says nothing.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, room: int, number: int) -> None:
        self.room, self.others, self.number, self._root = room, 0, number, root
        self._write, self._statvfs = os.write, os.fstatvfs
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "fstatvfs", self.statvfs)

    @property
    def free(self) -> int:
        return max(0, self.room - self.others - used(self._root))

    def write(self, file: int, data: memoryview) -> int:
        """As much as fits; nothing fits: an error."""
        fits = min(len(data), self.free)
        if not fits:
            raise OSError(self.number, os.strerror(self.number))
        return self._write(file, data[:fits])

    def statvfs(self, file: int) -> Any:
        free = self.free if self.number == errno.ENOSPC else 10**15
        return type("", (), {"f_bavail": free, "f_frsize": 1, "real": self._statvfs(file)})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("budget", [None, 10**9])
def test_a_disk_that_is_full_before_the_budget_is_used_evicts(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, budget: int | None, number: int
) -> None:
    """The oldest go, the newest are kept, nothing fails, and no guard stops the puts; whoever takes or gives back room
    on the disk is followed.
    """
    small = SmallDisk(root, monkeypatch, 100_000, number)
    store = DiskStore(root, budget)
    keys = [f"ab/{name:04x}" for name in range(400)]

    def put(some: list[str]) -> int:
        kept = []
        for key in some:  # one every second, so that their order is known
            kept.append(store.put(key, bytes(1000 - HEADER_BYTES)))
            assert store.flush(20)
            if kept[-1]:
                os.utime(file_of(root, key), (keys.index(key), keys.index(key)))
        return kept.count(True)

    kept = put(keys[:200])
    assert 180 <= kept < 200 and 70_000 <= used(root) <= 100_000
    now = counters(store)
    assert (now.dropped, now.errors, now.puts) == (200 - kept, 0, kept) and now.evictions >= 100
    there = store.contains(keys[:200])
    assert there.index(True) > 90 and sum(there[-70:]) >= 60, "the oldest are gone, the newest are there"
    assert not list(root.glob(".tmp-*")) and caplog.text.count("the disk is full") == 1
    small.others = 50_000
    assert put(keys[200:300]) >= 60 and 20_000 <= used(root) <= 50_000
    small.others = 0
    assert put(keys[300:]) >= 80
    assert used(root) > 60_000 or (number == errno.EDQUOT and used(root) > 50_000), "room that is given back is used"
    small.others = 100_000
    assert put([KEY]) == 0 and store.get(keys[399]) is not None, "10% go at a time"


def raising(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(("call", "number"), [("replace", errno.EIO), ("open", errno.EIO), ("read", errno.EMFILE)])
def test_what_no_entry_is_to_blame_for_is_a_failure(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    store = DiskStore(root)
    store.put(KEY, b"the earlier one")
    before = files(root)
    monkeypatch.setattr(os, call, raising(number))
    with pytest.raises(StoreError, match=re.escape(os.strerror(number))):
        store.put(KEY, b"x") if call == "replace" else store.get(KEY)
    monkeypatch.undo()
    assert files(root) == before and store.get(KEY) == b"the earlier one"


def test_writes_and_reads_in_pieces(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux moves at most 2 GiB in one call."""
    write, read = os.write, os.read
    blob = os.urandom(10_000)
    store = DiskStore(root)
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:999]))
    monkeypatch.setattr(os, "read", lambda file, length: read(file, min(length, 777)))
    store.put(KEY, blob)
    assert store.get(KEY) == blob


# --- bad entries ---


def test_a_good_entry_that_replaces_a_bad_one_meanwhile_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = DiskStore(root), DiskStore(root)
    store.put(KEY, b"payload")
    file_of(root, KEY).write_bytes(b"bad")

    def slowly(*entry: Any) -> None:
        # The bad file is open; now it is replaced, and only then found to be bad.
        monkeypatch.setattr(counted, "verify", verify)
        other.put(KEY, b"good")
        verify(*entry)

    monkeypatch.setattr(counted, "verify", slowly)
    assert store.get(KEY) is None, "what it read was bad"
    assert counters(store).corrupt == 1
    assert store.get(KEY) == b"good"


def test_no_entry_takes_its_name_between_the_look_and_the_deletion(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = DiskStore(root), DiskStore(root)
    store.put(KEY, b"payload")
    file_of(root, KEY).write_bytes(b"bad")
    unlink = os.unlink
    writer = threading.Thread(target=other.put, args=(KEY, b"good"))

    def last_moment(name: str, dir_fd: int) -> None:
        monkeypatch.setattr(os, "unlink", unlink)
        writer.start()
        writer.join(0.2)
        assert writer.is_alive(), "has to wait for the deletion"
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", last_moment)
    assert store.get(KEY) is None
    writer.join()
    assert store.get(KEY) == b"good"


@pytest.mark.parametrize("kind", ["bad", "expired", "link"])
def test_what_cannot_be_deleted_is_a_miss_until_it_is_replaced(
    root: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a disk's sectors fail, and the file system is read-only from then on."""
    other, now = "cd/4567", time.time()
    store = DiskStore(root, ttl=60.0)
    with closing(store):
        assert store.put(KEY, b"payload") and store.put(other, b"good")
        file = file_of(root, KEY)
        if kind == "link":
            file.unlink()
            file.symlink_to(file_of(root, other))
        else:
            file.write_bytes(bytes(100) if kind == "bad" else seal(KEY, b"payload", now - 61))
        monkeypatch.setattr(folder, "remove_entry", raising(errno.EROFS))
        for _ in range(2):
            assert store.get_many([KEY, other]) == [None, b"good"] and store.contains([KEY, other]) == [False, True]
        assert (counters(store).corrupt + counters(store).expired, counters(store).errors) == (2, 0)
        assert "and cannot be deleted: " in store.why_missing(KEY)
        assert caplog.text.count("cannot delete a bad entry") == 1
        with closing(DiskStore(root)) as another:
            assert another.put(KEY, b"theirs") and store.get(KEY) == b"theirs" and store.contains([KEY]) == [True]
        file.write_bytes(bytes(100))
        assert store.get(KEY) is None and store.contains([KEY]) == [False]
        assert store.put(KEY, b"mine") and store.contains([KEY]) == [True] and not store.why_missing(KEY)


# --- entries that are no files ---


@pytest.mark.parametrize("kind", ["fifo", "socket", "link", "a bad sector"])
def test_what_is_no_file_or_cannot_be_read_is_a_damaged_entry(
    root: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(root, max_bytes=5000)
    path, other = file_of(root, KEY), "cd/4567"
    assert store.put(KEY, b"x" * 100) and store.put(other, b"y" * 100)
    number, read = path.stat().st_ino, os.read

    def failing(file: int, length: int) -> bytes:
        if os.fstat(file).st_ino == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, length)

    if kind == "a bad sector":
        monkeypatch.setattr(os, "read", failing)
    else:
        path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):  # the path of one is limited
            server.bind(path.name)
    assert store.get_many([KEY, other]) == [None, b"y" * 100] and not os.path.lexists(path)
    monkeypatch.undo()
    now = counters(store)
    assert (now.corrupt, now.errors, now.misses, now.hits) == (1, 0, 1, 1)
    assert caplog.text.count("deletes bad entries") == 1 and KEY in caplog.text
    assert store.put(KEY, b"good") and store.get_many([KEY, other]) == [b"good", b"y" * 100]


@pytest.mark.parametrize("call", ["unlink", "open"])
def test_a_tenant_that_cannot_be_deleted_is_no_success(root: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = DiskStore(root)
    for name in range(6):
        store.put(f"ab/{name:04x}", b"x")
    usual = getattr(os, call)

    def fail(path: str, *arguments: Any, **named: Any) -> Any:
        if path[:2] == "00":  # a shard or an entry
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return usual(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match="not permitted"):
            store.delete_tenant("ab")
    assert store.delete_tenant("ab") == 6 and not (root / "ab").exists()


def test_empty_folders_of_a_killed_process_go_with_their_tenant(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store")
    assert store.put(KEY, b"x") and store.put("cd/0001", b"y")
    for shard in ("00", "fe"):
        (tmp_path / "store" / "ab" / shard).mkdir(exist_ok=True)
    assert store.delete_tenant("ab") == 1 and not (tmp_path / "store" / "ab").exists()
    (tmp_path / "store" / "ab" / "00").mkdir(parents=True)
    assert store.delete_tenant("ab") == 0 and not (tmp_path / "store" / "ab").exists()
    (tmp_path / "store" / "cd" / "strange").mkdir(exist_ok=True)
    assert store.delete_tenant("cd") == 1 and (tmp_path / "store" / "cd" / "strange").exists(), "no entry's"


# --- time to live ---


def test_entries_that_nobody_asks_for_expire_too(root: Path) -> None:
    other = DiskStore(root)
    assert other.put(KEY, b"x") and other.put("ab/4567", b"x") and other.flush(20)
    age(file_of(root, KEY), 61)
    store = DiskStore(root, ttl=60)
    assert store.put("ab/89ab", b"y") and store.flush(20)
    assert not file_of(root, KEY).parent.exists() and store.contains(["ab/4567", "ab/89ab"]) == [True, True]
    assert counters(store).expired == 1
    age(file_of(root, "ab/4567"), 61)
    assert store.put("ab/89ab", b"y") and store.flush(20)
    assert file_of(root, "ab/4567").exists(), "not at every put"
    store._scanned_at -= 61
    assert store.put("ab/89ab", b"y") and store.flush(20)
    assert not file_of(root, "ab/4567").exists() and counters(store).expired == 2


# --- the budget ---


def test_the_least_recently_used_go_first(root: Path) -> None:
    size = 1000 - HEADER_BYTES
    store = DiskStore(root, max_bytes=10_000)
    keys = [f"ab/{name:04x}" for name in range(10)]
    for position, key in enumerate(keys[:9]):
        store.put(key, bytes(size))
        age(file_of(root, key), 1000 - position)
    assert store.flush(20) and counters(store).bytes == 9000 and counters(store).evictions == 0
    store.get(keys[0])
    store.contains([keys[1]])
    assert store.put(keys[9], bytes(size)) and store.flush(20)
    # It is full to the last byte. Eviction goes down to 90%: the two that were used least recently, but the new one.
    assert store.contains(keys) == [True, False, *[True] * 8]
    now = counters(store)
    assert (now.evictions, now.entries, now.bytes) == (1, 9, 9000)
    assert used(root) == 9000


def test_a_put_that_finds_no_room_is_given_up_and_the_next_one_has_it(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(root, max_bytes=10_000)
    for name in range(9):
        assert store.put(f"ab/{name:04x}", bytes(1000 - HEADER_BYTES)) and store.flush(20)
    for kept in (False, True):
        assert store.put("cd/0000", bytes(8000 - HEADER_BYTES)) is kept and store.flush(20)
        assert (root / "cd").exists() is kept
    now = counters(store)
    assert (now.evictions, now.dropped) == (8, 1) and used(root) <= 10_000 and caplog.text.count("is full") == 1
    assert store.delete_tenant("ab") == 1 and store.delete_tenant("cd") == 1
    assert store.put("ef/0000", bytes(9_001 - HEADER_BYTES)) is False, "more than eviction leaves"
    assert store.put("ef/0000", bytes(9_000 - HEADER_BYTES)) is True and store.flush(20) and used(root) == 9000


@pytest.mark.parametrize("lost", [b"", b"cuvI" + bytes(32), b"cuvI" + b"\1\0\0\0\0\0\0\0" * 4, b"x" * 36])
def test_figures_that_are_lost_are_counted_again(root: Path, lost: bytes) -> None:
    """By the first put of a process."""
    first = DiskStore(root, max_bytes=100_000)
    for name in range(20):
        first.put(f"ab/{name:04x}", bytes(1000 - HEADER_BYTES))
    assert first.flush(20)
    (root / ".lock").write_bytes(lost)
    store = DiskStore(root, max_bytes=10_000)
    assert counters(store).bytes is None
    assert store.put("cd/0000", bytes(1000 - HEADER_BYTES)) and store.flush(20)
    now = counters(store)
    assert used(root) == now.bytes == 9000 and store.contains(["cd/0000"]) == [True]
    assert store.delete("cd/0000") and store.delete_tenant("ab") == 8
    assert (counters(store).entries, counters(store).bytes) == (0, 0)


def test_what_is_put_during_a_scan_is_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan may have seen it or not: afterwards the figures are too high, never too low."""
    store, other = DiskStore(root, max_bytes=100_000), DiskStore(root, max_bytes=100_000)
    for tenant in ("aa", "bb"):
        store.put(f"{tenant}/01", bytes(1000 - HEADER_BYTES))
    other.put("aa/01", bytes(1000 - HEADER_BYTES))
    assert store.flush(20) and other.flush(20)
    usual = folder.entries_of
    calls: list[str] = []

    def meanwhile(opened: int, tenant: str) -> Any:
        if calls == ["aa"]:
            for name in ("aa", "bb"):
                other.put(f"{name}/02", bytes(1000 - HEADER_BYTES))
        calls.append(tenant)
        return usual(opened, tenant)

    monkeypatch.setattr(folder, "entries_of", meanwhile)
    monkeypatch.setattr(os, "listdir", lambda folder, usual=os.listdir: sorted(usual(folder)))
    store._lost = True
    scan(store)
    assert calls and used(root) == 4000 and counters(store).bytes in (5000, 6000)
    store._lost = True
    scan(store)
    assert counters(store).bytes == 4000


def test_use_is_noted_once_in_a_while(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If it cannot be noted, it is a hit all the same."""
    monkeypatch.setattr(disk, "_TOUCH_SECONDS", 500.0)
    store = DiskStore(root)
    store.put(KEY, b"x")
    path = file_of(root, KEY)
    for seconds, noted in ((disk._TOUCH_SECONDS / 2, False), (disk._TOUCH_SECONDS * 2, True), (-3600.0, True)):
        age(path, seconds)
        before = path.stat().st_mtime
        store.get(KEY)
        assert (path.stat().st_mtime != before) is noted
    assert abs(path.stat().st_mtime - time.time()) < 60, "a time in the future is put right"
    assert not caplog.records
    age(path, 1000)
    monkeypatch.setattr(os, "utime", raising(errno.EROFS))
    assert store.get(KEY) == b"x" and store.get(KEY) == b"x"
    assert caplog.text.count("cannot note the use of entries") == 1


def test_replacing_does_not_use_up_the_budget(root: Path) -> None:
    store = DiskStore(root, max_bytes=10**4)
    for _ in range(20):
        store.put(KEY, bytes(5000))
    assert store.flush(20) and counters(store).evictions == 0 and counters(store).bytes == used(root) == 5064


def test_what_others_keep_in_the_folder_is_left_alone(root: Path) -> None:
    others = [root / "notes.txt", root / "ab" / "readme", root / "photos" / "ab" / "abcd", root / "ab" / "01" / "02ff"]
    others.append(root / "ab" / "00" / "notes.txt")
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(2000))
        age(path, 10**6)
    (root / "empty").mkdir()
    store = DiskStore(root, max_bytes=1000, ttl=60)
    for name in range(10):
        store.put(f"ab/{name:04x}", bytes(500))
        assert store.flush(20)  # else all may be dropped before any is evicted
    assert counters(store).evictions
    store._lost = True
    scan(store)
    assert all(path.exists() for path in others) and (root / "empty").exists()
    own = list(store.keys("ab"))
    assert all(key.startswith("ab/00") and len(key) == 7 for key in own)
    assert counters(store).bytes == len(own) * (500 + HEADER_BYTES)


def test_an_entry_used_since_the_scan_is_not_evicted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = DiskStore(root, max_bytes=4000), DiskStore(root)
    keys = ["ab/0000", "ab/0001", "ab/0002"]
    for position, key in enumerate(keys):
        store.put(key, bytes(900))
        age(file_of(root, key), 1000 - position)
    assert store.flush(20)

    def meanwhile(*arguments: Any) -> int:
        other.get(keys[0])
        other.delete(keys[1])
        return usual(*arguments)

    usual = folder.recount
    monkeypatch.setattr(folder, "recount", meanwhile)
    assert store.put("ab/0003", bytes(900)) and store.flush(20)
    assert store.contains([*keys, "ab/0003"]) == [True, False, False, True]
    assert counters(store).evictions == 1, "the other one was somebody else's deletion"


def test_several_processes_keep_one_budget(root: Path) -> None:
    budget, writers, entry = 4_000_000, 3, 70_006 + HEADER_BYTES
    running = [start_writer(root, f"{tag}a", size=70_000, budget=budget) for tag in range(writers)]
    try:
        most = 0
        for _ in range(25):
            time.sleep(0.05)
            # Walking the folder meanwhile could count both evicted and new files.
            for writer in running:
                stop(writer)
            most = max(most, used(root))
            for writer in running:
                writer.send_signal(signal.SIGCONT)
    finally:
        said = [kill(writer) for writer in running]
    put = sum(len(keys) for keys in said) * entry
    assert put > 2 * budget, "too few puts to show anything"
    assert 0.8 * budget < most <= budget + writers * entry, "what is being written is not counted"
    store = DiskStore(root)
    for path in files(root):
        if not path.name.startswith(".tmp-"):
            assert store.get(f"{path.parent.parent.name}/{path.name}") is not None


def test_threads_note_what_the_folder_holds_one_after_the_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan's thread ends while a put does: the figures of the one that read first must not be kept."""
    store, usual = DiskStore(root, max_bytes=10**6), folder.figures_of
    assert store.put(KEY, b"x") and store.flush(20)
    deleter = threading.Thread(target=store.delete, args=(KEY,))

    def meanwhile(opened: int) -> folder.Figures | None:
        found = usual(opened)
        if not deleter.ident:
            deleter.start()
            deleter.join(0.2)
        return found

    monkeypatch.setattr(folder, "figures_of", meanwhile)
    assert store.contains([KEY]) == [True]
    deleter.join()
    assert counters(store).entries == 0


def test_a_lock_that_is_never_given_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(root, max_bytes=10_000)
    for name in range(4):
        assert store.put(f"ab/{name:04x}", bytes(1000)) and store.flush(20)
    monkeypatch.setattr(safe_files, "LOCK_SECONDS", 0.05)
    file = os.open(root / ".lock", os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        begun = time.monotonic()
        with pytest.raises(StoreError, match=r"another process has held \.lock for 0.05 s"):
            store.put("ab/0005", bytes(5000))
        assert time.monotonic() - begun < 10
        assert store.get("ab/0003") == bytes(1000), "reading goes on"
        assert not list(root.glob(".tmp-*"))
    finally:
        os.close(file)
    assert store.put("ab/0005", bytes(5000)) and used(root) <= 10_000


def test_a_forked_process_does_not_keep_the_lock(root: Path) -> None:
    """It shares the open file, as a copy of the descriptor does."""
    store = DiskStore(root)
    assert store.put(KEY, b"x") and store.flush(20)
    with safe_files.open_store_folder(str(root)) as opened:
        with safe_files.file_lock(".lock", opened) as file:
            forked = os.dup(file)
        with safe_files.file_lock(".lock", opened, wait=0):
            os.close(forked)


@pytest.mark.parametrize("lock", ["_counting", "_noting", "_lock"])
def test_a_child_waits_for_no_thread_of_its_parent(root: Path, lock: str) -> None:
    store = DiskStore(root, max_bytes=10**6)
    assert store.put(KEY, b"x") and store.flush(20)

    def work() -> bool:
        store._start_scan()
        return store.put(KEY, b"y") and store.get(KEY) == b"y"

    assert works_in_child_while_held(getattr(store, lock), work)


def test_a_scan_that_fails_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DiskStore, "_scan", raising(errno.EIO))
    store = DiskStore(root)
    assert store.put(KEY, b"x") and store.flush(20) and store.get(KEY) == b"x"
    assert "cannot look for old entries: " in caplog.text and os.strerror(errno.EIO) in caplog.text


def test_nobody_fails_while_another_process_scans_for_long(root: Path) -> None:
    """As in a large folder on slow storage. What fits is stored at once; the rest is given up, which is no error."""
    store = DiskStore(root, max_bytes=10_000)
    guarded = GuardedStore(store)
    scanning = "import fcntl, sys; file = open(sys.argv[1], 'a+'); fcntl.flock(file, 2); print(flush=True); input()"
    assert guarded.put("ab/0000", bytes(3000)) and store.flush(20)
    with subprocess.Popen(
        [sys.executable, "-c", scanning, str(root / ".evict")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert guarded.put("ab/0001", bytes(1000)) is True
        for _ in range(2):
            assert guarded.put("ab/0002", bytes(8000)) is False and store.flush(20), "no room, and nobody makes any"
        assert guarded.get_many(["ab/0000", "ab/0001"]) == [bytes(3000), bytes(1000)]
        now = counters(store)
        assert (now.errors, now.skipped, now.dropped) == (0, 0, 2), "the breaker stays closed"
        other.communicate(b"\n", timeout=20)
    assert guarded.put("ab/0002", bytes(8000)) is False and store.flush(20)
    assert guarded.put("ab/0002", bytes(8000)) is True and used(root) <= 10_000


def test_counters_wait_for_no_file(root: Path) -> None:
    """An engine asks in every step, also while the process that holds the folder's lock is stopped."""
    store, other = DiskStore(root, max_bytes=10**6), DiskStore(root, max_bytes=10**6)
    store.put(KEY, b"x")
    assert other.contains([KEY]) == [True]
    opened: list[object] = []
    asking = threading.get_ident()
    sys.addaudithook(lambda event, _: opened.append(event) if threading.get_ident() == asking else None)
    with safe_files.open_store_folder(str(root)) as folder_, safe_files.file_lock(".lock", folder_):
        opened.clear()
        counted = [counters(each) for each in (store, other)]
        seen = list(opened)
    asking = 0
    assert [(each.entries, each.bytes) for each in counted] == [(1, HEADER_BYTES + 1)] * 2
    assert not {"open", "fcntl.flock"} & set(map(str, seen))
