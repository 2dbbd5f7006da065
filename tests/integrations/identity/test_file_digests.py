"""Digests of whole files: kept as long as a file is the same, and never trusted where others could have written."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuvee.codec.errors import InputError
from cuvee.integrations.identity import file_digests as module
from cuvee.integrations.identity.file_digests import file_digests


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of digests of the test's own, which also keeps those of files written a moment ago."""
    monkeypatch.setenv("CUVEE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_SETTLED", 0)
    return tmp_path / "cache" / "digests"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    hash_file = module._Work._hash

    def counted(self: Any, state: Any) -> str:
        read.append(Path(state[0]).name)
        return hash_file(self, state)

    monkeypatch.setattr(module._Work, "_hash", counted)
    return read


def write(file: Path, data: bytes) -> bytes:
    """Write a file in place; return its digest."""
    with file.open("r+b" if file.exists() else "wb") as stream:
        stream.write(data)
        stream.truncate(len(data))
    return hashlib.sha256(data).digest()


def test_a_file_is_read_once_wherever_links_to_it_are(tmp_path: Path, hashed: list[str]) -> None:
    one, other, empty = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    digests = [write(one, b"x" * 10_000_000), write(other, b"y"), write(empty, b"")]
    assert file_digests([one, other, empty]) == digests and sorted(hashed) == ["a", "b", "c"]
    (tmp_path / "link").symlink_to(one)
    assert file_digests([tmp_path / "link", other]) == digests[:2] and len(hashed) == 3


def same_size_and_time(file: Path) -> None:
    info = file.stat()
    write(file, b"new content")
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def replaced_by_a_file_of_equal_times(file: Path) -> None:
    info, other = file.stat(), file.with_suffix(".new")
    write(other, b"new content")
    os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))
    other.replace(file)


@pytest.mark.parametrize("change", [same_size_and_time, replaced_by_a_file_of_equal_times])
def test_a_file_that_hides_its_change_is_read_again(change: Callable[[Path], None], tmp_path: Path) -> None:
    file = tmp_path / "a"
    write(file, b"old content")
    before = file_digests([file])
    until_later_than(file.stat().st_ctime_ns, tmp_path)
    change(file)
    assert file_digests([file]) == [hashlib.sha256(b"new content").digest()] != before


def test_writes_through_a_mapping_are_seen(tmp_path: Path, cache: Path) -> None:
    """The kernel notes the time of the first write to a page alone, until it has written the page to the disk."""
    file = tmp_path / "a"
    write(file, bytes(8192))
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        until_later_than(file.stat().st_ctime_ns, tmp_path)
        time_ns = file.stat().st_ctime_ns
        mapped[5000] = 1
        if file.stat().st_ctime_ns == time_ns:
            pytest.skip("a tmpfs notes no times of such writes")
        before = file_digests([file])
        until_later_than(file.stat().st_ctime_ns, tmp_path)
        mapped[5000] = 2
        assert file_digests([file]) != before


def another_path(kept: Path, tmp_path: Path) -> None:
    """What was kept of one file in place of another."""
    other = tmp_path / "other"
    write(other, b"other")
    file_digests([other])
    (theirs,) = (each for each in kept.parent.iterdir() if each != kept)
    kept.write_bytes(theirs.read_bytes())


def made_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept, _: kept.write_bytes(b""),
        lambda kept, _: kept.write_bytes(kept.read_bytes()[:-3]),
        lambda kept, _: kept.write_bytes(b"[" * 100_000),
        lambda kept, _: kept.write_bytes(b'{"a": 1}'),
        lambda kept, _: kept.write_bytes(b"\xff\xfe"),
        lambda kept, _: kept.write_text(kept.read_text().replace('"]]', 'zz"]]')),
        lambda kept, _: (kept.unlink(), kept.mkdir()),
        lambda kept, _: made_fifo(kept),
        lambda kept, path: (kept.rename(path / "moved"), kept.symlink_to(path / "moved")),
        lambda kept, _: (kept.write_text(kept.read_text()[:-67] + "0" * 64 + '"]]'), kept.chmod(0o666)),
        lambda kept, _: (kept.write_text(kept.read_text()[:-67] + "0" * 64 + '"]]'), kept.parent.chmod(0o777)),
        another_path,
    ],
)
def test_what_is_kept_wrongly_is_not_believed(
    damage: Callable[[Path, Path], Any], cache: Path, tmp_path: Path, hashed: list[str]
) -> None:
    file = tmp_path / "a"
    digest = write(file, b"content")
    assert file_digests([file]) == [digest]
    (kept,) = cache.iterdir()
    damage(kept, tmp_path)
    hashed.clear()
    assert file_digests([file]) == [digest] and hashed == ["a"]


def test_a_folder_that_cannot_be_made_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    write(tmp_path / "file", b"")
    monkeypatch.setenv("CUVEE_CACHE", str(tmp_path / "file" / "cache"))
    digest = write(tmp_path / "a", b"content")
    assert file_digests([tmp_path / "a"]) == file_digests([tmp_path / "a"]) == [digest] and hashed == ["a", "a"]


def test_a_file_written_a_moment_ago_is_not_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be written again within one tick of the clock that gives files their times."""
    monkeypatch.setattr(module, "_SETTLED", 1e18)
    write(tmp_path / "a", b"content")
    file_digests([tmp_path / "a"])
    assert not cache.exists() or not list(cache.iterdir())


def snapshot(tmp_path: Path, blob: str, repo: str = "models--org--name", kind: str = "snapshots") -> Path:
    """A file of the hub's cache: a link to a blob, which holds something else than its name says."""
    target = tmp_path / "hub" / repo / "blobs" / blob
    target.parent.mkdir(parents=True)
    write(target, b"content")
    link = tmp_path / "hub" / repo / kind / ("c" * 40) / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(f"../../blobs/{blob}")
    return link


def test_the_hubs_own_names_are_used(tmp_path: Path, hashed: list[str]) -> None:
    name = hashlib.sha256(b"content").hexdigest()
    assert file_digests([snapshot(tmp_path, name)]) == [bytes.fromhex(name)] and not hashed


def test_a_blob_that_was_written_to_is_read(tmp_path: Path, hashed: list[str]) -> None:
    link = snapshot(tmp_path, "ab" * 32)
    assert file_digests([link]) == [bytes.fromhex("ab" * 32)]
    digest = write(link, b"trained in place")
    assert file_digests([link]) == [digest] and len(hashed) == 1


def test_a_blob_that_was_written_to_before_it_was_seen_is_read(tmp_path: Path, hashed: list[str]) -> None:
    """As `save_pretrained` into a snapshot does."""
    link = snapshot(tmp_path, "ab" * 32)
    until_later_than(link.lstat().st_ctime_ns, tmp_path)
    digest = write(link, b"trained in place")
    assert file_digests([link]) == [digest] and len(hashed) == 1


def until_later_than(time_ns: int, folder: Path) -> None:
    """Wait until the file system gives files a later time: it counts in ticks of the kernel."""
    probe = folder / "probe"
    while not probe.exists() or probe.stat().st_ctime_ns <= time_ns:
        probe.write_bytes(b"")


@pytest.mark.parametrize(
    "where",
    [
        {"blob": "ab" * 20},  # a small file, named by git's SHA-1
        {"blob": "AB" * 32},
        {"blob": "ab" * 32, "repo": "org--name"},
        {"blob": "ab" * 32, "kind": "copies"},
    ],
)
def test_other_links_are_read(where: dict[str, str], tmp_path: Path) -> None:
    assert file_digests([snapshot(tmp_path, **where)]) == [hashlib.sha256(b"content").digest()]


@pytest.mark.parametrize("how", ["written", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_read_is_noticed(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write(first, b"content"), write(second, b"content")
    until_later_than(second.stat().st_ctime_ns, tmp_path)
    say = module._Work._say

    def change(self: Any, count: int) -> None:
        say(self, count)
        if how == "written":
            write(first, b"others!")
        elif how == "replaced":
            write(tmp_path / "new", b"content")
            (tmp_path / "new").replace(first)
        else:
            first.unlink(missing_ok=True)

    monkeypatch.setattr(module._Work, "_say", change)
    with pytest.raises(InputError, match=r"^model: must (not change while it is read|name files that can be read)"):
        file_digests([second, first])


def test_reading_can_be_stopped(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    write(tmp_path / "a", b"content")
    with pytest.raises(InputError, match="stop"):
        file_digests([tmp_path / "a"], stop)
