"""Profiles in folders, in object storage and on the hub: what is taken, and what is refused."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integrations.profiles.fake_hub import REPOSITORY, fake_hub
from tests.integrations.profiles.small_profiles import (
    LAYOUT,
    OTHER_LAYOUT,
    OTHER_WEIGHTS,
    WEIGHTS,
    small_profile,
)
from tests.integrations.stores.fake_http import FakeHTTP, answer

from cuvee.codec.errors import FormatError, InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.profiles import collection as module
from cuvee.integrations.profiles.collection import ProfileCollection, find_profile
from cuvee.integrations.stores import objects
from cuvee.integrations.stores.base import StoreError

IDENTITY = small_profile().id.hex()
LAYOUT_NAME = LAYOUT.fingerprint.hex()
FOLDER = f"cuvee-profiles/{LAYOUT_NAME}"


@pytest.fixture(params=["folder", "bucket", "hub"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "folder":
        yield f"file://{tmp_path}/collection"
    elif request.param == "bucket":
        pytest.importorskip("obstore", reason="needs obstore")
        with closing(FakeHTTP()) as server:
            yield server.url
    else:
        with fake_hub(tmp_path / "hub", monkeypatch):
            yield f"hf://{REPOSITORY}"


@pytest.fixture(params=["folder", "bucket", "hub"])
def listing(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty collection that can be listed; the bucket is obstore's own, in a folder."""
    if request.param == "bucket":
        stores = pytest.importorskip("obstore.store", reason="needs obstore")
        monkeypatch.setattr(objects, "connect", lambda url: stores.LocalStore(tmp_path / "bucket", mkdir=True))
        yield "s3://bucket/profiles"
    elif request.param == "folder":
        yield f"file://{tmp_path}/collection"
    else:
        with fake_hub(tmp_path / "hub", monkeypatch):
            yield f"hf://{REPOSITORY}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A collection in a folder with one profile, whose files tests change."""
    push(str(tmp_path / "collection"), small_profile())
    return tmp_path / "collection"


def push(where: str, profile: Profile) -> str:
    ProfileCollection(where).push(profile)
    return profile.id.hex()


def pull(
    where: str | Path, identity: str, *, layout: KVLayout = LAYOUT, weights: Sequence[str] = (WEIGHTS,)
) -> Profile:
    return ProfileCollection(f"{where}#{identity}").pull(layout, weights=lambda: weights)


def refuses(
    where: str | Path, identity: str, error: type[Exception], *messages: str, layout: KVLayout = LAYOUT
) -> None:
    """Expect an error whose message holds all `messages`."""
    with pytest.raises(error) as caught:
        pull(where, identity, layout=layout)
    text = str(caught.value)
    assert all(re.search(message, text) for message in messages), text


# What is taken ------------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_a_missing_file(where: str) -> None:
    refuses(where, "0" * 32, FileNotFoundError, f"^no profile {'0' * 32} of this model's layout", LAYOUT_NAME, "push")
    pushed = push(where, small_profile())
    refuses(where, pushed, FileNotFoundError, "^no profile .* of this model's layout", layout=OTHER_LAYOUT)


def test_dtypes_of_the_cache_do_not_matter(folder: Path) -> None:
    for dtype in ("float16", "float32"):
        pulled = pull(folder, small_profile().id.hex(), layout=replace(LAYOUT, dtype=dtype))
        assert pulled.layout.dtype == "bfloat16"


def test_an_id_of_other_weights_is_refused_unless_they_do_not_matter(folder: Path) -> None:
    other = push(str(folder), small_profile(weights=OTHER_WEIGHTS))
    refuses(folder, other, ProfileMismatchError, f"^weights: must be {WEIGHTS}.*got a profile of {OTHER_WEIGHTS}")
    assert pull(folder, other, weights=()).model == OTHER_WEIGHTS
    fitted = push(str(folder), small_profile(weights=None))
    refuses(folder, fitted, ProfileMismatchError, "^weights: must be a1a1.*weights that it does not name")


def test_a_collection_lists_what_it_holds(listing: str) -> None:
    """The last pushed first, where the place keeps times; what is no profile is passed over."""
    assert ProfileCollection(listing).list() == []
    pushed = [push(listing, small_profile(number)) for number in range(2)]
    other = push(listing, small_profile(layout=OTHER_LAYOUT))
    found = ProfileCollection(listing).list(LAYOUT)
    assert {each.id for each in found} == {*pushed} and {each.layout for each in found} == {LAYOUT_NAME}
    assert all(each.size > 1000 and each.time > 1e9 for each in found)
    assert {each.id for each in ProfileCollection(listing).list()} == {*pushed, other}
    assert {ProfileCollection(listing).layout_of(each) for each in found} == {"synthetic, 3 layers 2 x 8, bfloat16"}
    assert ProfileCollection(listing).layout_of(replace(found[0], id="0" * 32)) == f"layout {LAYOUT_NAME}"


def test_the_last_pushed_is_listed_first(folder: Path) -> None:
    (first,) = folder.rglob("*.safetensors")
    second = push(str(folder), small_profile(1))
    os.utime(first, (1e9, 1e9))
    (folder / FOLDER / "notes.txt").write_text("no profile")
    assert [each.id for each in ProfileCollection(str(folder)).list()] == [second, first.stem]


# What is refused ----------------------------------------------------------------------------------------------------


def change(folder: Path, name: str, content: bytes | Callable[[bytes], bytes]) -> None:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content(file.read_bytes()))


def profile_name(number: int = 0) -> str:
    return f"{FOLDER}/{small_profile(number).id.hex()}.safetensors"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda data: data[:-1], "is not a safetensors file, or is truncated"),
        (lambda data: data.replace(b"calibrated", b"calibrateD"), "they do not hash to their digest"),
    ],
)
def test_a_damaged_profile_is_refused_with_its_place_and_the_remedy(
    folder: Path, content: Callable[[bytes], bytes], message: str
) -> None:
    change(folder, profile_name(), content)
    place = f"^{folder}#{IDENTITY}: {profile_name()}: "
    refuses(folder, IDENTITY, FormatError, place, message, "; push the profile there again$")


def test_another_profile_under_a_name_is_refused(folder: Path) -> None:
    push(str(folder), small_profile(1))
    change(folder, profile_name(1), (folder / profile_name(0)).read_bytes())
    identity = small_profile(1).id.hex()
    refuses(folder, identity, ProfileMismatchError, f"^id: must be {identity}.*got a profile of {IDENTITY}")


def test_a_profile_of_another_model_is_refused(folder: Path) -> None:
    stray = small_profile(layout=OTHER_LAYOUT)
    stray.save(folder / FOLDER / f"{stray.id.hex()}.safetensors")
    refuses(folder, stray.id.hex(), ProfileMismatchError, f"^layout: must be {LAYOUT_NAME}")


def test_what_is_no_file_is_missing_and_what_is_gone_names_the_remedy(folder: Path, tmp_path: Path) -> None:
    profile = folder / profile_name()
    missing = f"^no profile {IDENTITY} .* in {folder}#{IDENTITY}: .*push it"
    profile.unlink()
    refuses(folder, IDENTITY, FileNotFoundError, missing)
    os.mkfifo(profile)
    refuses(folder, IDENTITY, FileNotFoundError, missing)
    profile.unlink()
    profile.mkdir()
    refuses(folder, IDENTITY, FileNotFoundError, missing)
    with pytest.raises(StoreError, match=f"^{folder}: failed, or cannot be reached: IsADirectoryError"):
        push(str(folder), small_profile())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=f"^file://{tmp_path}/file: failed, or cannot be reached: NotADirectoryError"):
        push(f"file://{tmp_path}/file", small_profile())


def test_a_failed_push_leaves_no_half_profile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        for number in range(2):
            with pytest.raises(StoreError, match="No space left on device"):
                push(str(folder), small_profile(number))
    assert {path.name for path in (folder / FOLDER).iterdir()} == {f"{IDENTITY}.safetensors", f"{IDENTITY}.md"}
    assert pull(folder, IDENTITY).id == small_profile().id


# Object storage -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket() -> Iterator[FakeHTTP]:
    pytest.importorskip("obstore", reason="needs obstore")
    with closing(FakeHTTP()) as server:
        yield server


def test_sizes_of_objects_are_bounded(bucket: FakeHTTP, monkeypatch: pytest.MonkeyPatch) -> None:
    push(bucket.url, small_profile())
    sent = bucket.sent
    bucket.tell = lambda method, path: [answer(Content_Length="99999999999"), *[b"x" * 10**6] * 100]
    refuses(bucket.url, IDENTITY, StoreError, f"^{profile_name()}: must be at most .* bytes, got 9999")
    assert bucket.sent - sent < 50 * 10**6
    bucket.tell = lambda method, path: None
    monkeypatch.setattr(module, "MAX_PROFILE_BYTES", 1000)
    refuses(bucket.url, IDENTITY, StoreError, f"^{profile_name()}: must be at most 1000 bytes")


def test_a_bucket_that_is_down_is_an_error_and_its_password_stays_secret(
    bucket: FakeHTTP, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuvee.integrations.stores.objects._RETRY", {"max_retries": 0})
    where = f"http://user:verysecret@127.0.0.1:{bucket.port}/kv"
    bucket.tell = lambda method, path: answer("503 Later")
    for call in (lambda: pull(where, IDENTITY), lambda: push(where, small_profile())):
        with pytest.raises(StoreError) as caught:
            call()
        assert "verysecret" not in str(caught.value) and "503" in str(caught.value)


# Engines ------------------------------------------------------------------------------------------------------------


def test_an_engine_takes_the_profile_of_an_id(where: str, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = (push(where, small_profile(number)) for number in range(2))
    caplog.set_level(logging.INFO)
    assert find_profile(f"{where}#{first}", LAYOUT).id.hex() == first
    (line,) = [record.message for record in caplog.records if record.message.startswith("cuvee: took profile ")]
    assert first in line and line.endswith(f"from {where}#{first}")
    if where.startswith("file://"):
        assert find_profile(f"{where.removeprefix('file://')}#{first}", LAYOUT).id.hex() == first


def test_without_an_id_the_remedy_is_named(folder: Path) -> None:
    """Processes that looked for the newest at different moments would have different ones."""
    where = str(folder)
    with pytest.raises(InputError) as caught:
        find_profile(where, LAYOUT)
    assert str(caught.value) == (
        f"profile: must name a file, or a place and an id (URL#id), got {where}: cuvee profile list {where} shows "
        "the ids"
    )


def test_a_place_that_cannot_be_listed_is_named(bucket: FakeHTTP) -> None:
    bucket.tell = lambda method, path: answer("405 Method Not Allowed")
    with pytest.raises(StoreError, match=f"{bucket.url}: "):
        ProfileCollection(bucket.url).list()


def test_an_engine_reads_a_file_as_before(tmp_path: Path) -> None:
    small_profile().save(tmp_path / "p")
    assert find_profile(str(tmp_path / "p"), LAYOUT).id == small_profile().id
    with pytest.raises(FileNotFoundError, match=r"^no profile at missing: .*cuvee profile learn"):
        find_profile("missing", LAYOUT)
