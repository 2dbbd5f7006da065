"""Profiles in folders, in object storage and on the hub: what is taken, and what is refused."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.profile_collection.fake_hub import REPOSITORY, fake_hub
from tests.integrations.profile_collection.small_profiles import (
    LAYOUT,
    OTHER_LAYOUT,
    OTHER_WEIGHTS,
    WEIGHTS,
    small_profile,
)
from tests.integrations.stores.fake_http import FakeHTTP, answer, fake_http

from cuvee.codec.errors import FormatError, InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.profile_file import VERSION, metadata_of
from cuvee.integrations.profile_collection import collection as module
from cuvee.integrations.profile_collection.collection import ProfileCollection, find_profile
from cuvee.integrations.stores.base import StoreError
from cuvee.integrations.weight_fingerprints import WeightFingerprints

OF_MODEL = WeightFingerprints((WEIGHTS,))
LAYOUT_NAME = LAYOUT.fingerprint.hex()
FOLDER = f"cuvee-profiles/{LAYOUT_NAME}"
NEWEST = f"{FOLDER}/newest-{WEIGHTS}-v{VERSION}"


@pytest.fixture(params=["folder", "bucket", "hub"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty collection of each kind."""
    if request.param == "folder":
        yield f"file://{tmp_path}/collection"
    elif request.param == "bucket":
        pytest.importorskip("obstore", reason="needs obstore")
        with fake_http() as server:
            yield server.url
    else:
        with fake_hub(tmp_path / "hub", monkeypatch):
            yield f"hf://{REPOSITORY}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A collection in a folder with one profile, whose files tests change."""
    push(str(tmp_path / "collection"), small_profile())
    return tmp_path / "collection"


def push(where: str, profile: Profile) -> str:
    """Push a profile; return its id."""
    ProfileCollection(where).push(profile)
    return profile.id.hex()


def pull(where: str | Path, *, layout: KVLayout = LAYOUT, **named: Any) -> Profile:
    return ProfileCollection(str(where)).pull(layout, **{"weights": OF_MODEL, **named})


def refuses(where: str | Path, error: type[Exception], *messages: str, layout: KVLayout = LAYOUT, **named: Any) -> None:
    """Expect an error whose message holds all `messages`."""
    with pytest.raises(error) as caught:
        pull(where, layout=layout, **named)
    text = str(caught.value)
    assert all(re.search(message, text) for message in messages), text


# What is taken ------------------------------------------------------------------------------------------------------


def test_a_profile_comes_back(where: str) -> None:
    profile = small_profile()
    identity = push(where, profile)
    for named in ({}, {"id": identity}, {"id": identity, "weights": None}):
        pulled = pull(where, **named)
        assert pulled.id == profile.id and metadata_of(pulled) == metadata_of(profile)


def test_the_last_push_of_a_model_is_taken_and_an_id_goes_back(where: str) -> None:
    first, second, third = (push(where, small_profile(number)) for number in range(3))
    other = push(where, small_profile(weights=OTHER_WEIGHTS))
    elsewhere = push(where, small_profile(layout=OTHER_LAYOUT))
    assert len({first, second, third, other, elsewhere}) == 5
    assert pull(where).id.hex() == third
    assert pull(where, id=first).id.hex() == first
    assert pull(where, weights=WeightFingerprints((OTHER_WEIGHTS,))).id.hex() == other
    assert pull(where, layout=OTHER_LAYOUT).id.hex() == elsewhere
    push(where, small_profile(1))
    assert pull(where).id.hex() == second, "pushing it again goes back to it"


def test_what_is_not_there_is_a_missing_file(where: str) -> None:
    missing = (FileNotFoundError, "^no profile of this synthetic model in ", WEIGHTS, LAYOUT_NAME, "cuvee profile push")
    refuses(where, *missing)
    pushed = push(where, small_profile(weights=OTHER_WEIGHTS))
    refuses(where, *missing)
    refuses(where, FileNotFoundError, f"^no profile {'0' * 32} of this model's layout", id="0" * 32)
    refuses(where, FileNotFoundError, "^no profile .* of this model's layout", id=pushed, layout=OTHER_LAYOUT)


def test_weights_that_were_loaded_in_several_dtypes_share_the_newest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of float32 has other fingerprints if it was calibrated in bfloat16."""
    both = WeightFingerprints((WEIGHTS, OTHER_WEIGHTS))
    assert pull(folder, weights=both).model == WEIGHTS
    now = time.time()
    for later, expected in ((100, OTHER_WEIGHTS), (-100, WEIGHTS)):
        monkeypatch.setattr(time, "time", lambda later=later: now + later)
        push(str(folder), small_profile(weights=OTHER_WEIGHTS))
        assert pull(folder, weights=both).model == expected


def test_unknown_weights_need_an_id_and_dtypes_of_the_cache_do_not_matter(folder: Path) -> None:
    pushed = push(str(folder), small_profile(1))
    unknown = WeightFingerprints(unknown="the checkpoint is quantized")
    refuses(folder, InputError, r"^id: must name .*\(the checkpoint is quantized\).*\?id=…", weights=unknown)
    refuses(folder, InputError, r"^id: must name the profile", weights=None)
    for dtype in ("float16", "float32"):
        pulled = pull(folder, layout=replace(LAYOUT, dtype=dtype), weights=unknown, id=pushed)
        assert (pulled.id.hex(), pulled.layout.dtype) == (pushed, "bfloat16")


def test_a_profile_without_weights_is_found_by_its_id_alone(where: str) -> None:
    newest = push(where, small_profile())
    fitted = push(where, small_profile(weights=None))
    assert pull(where).id.hex() == newest
    assert pull(where, id=fitted, weights=None).model is None
    refuses(where, ProfileMismatchError, "^weights: must be a1a1.*weights that it does not name", id=fitted)


def test_an_id_of_other_weights_is_refused_unless_they_do_not_matter(folder: Path) -> None:
    other = push(str(folder), small_profile(weights=OTHER_WEIGHTS))
    refuses(folder, ProfileMismatchError, f"^weights: must be {WEIGHTS}.*got a profile of {OTHER_WEIGHTS}", id=other)
    assert pull(folder, id=other, weights=None).model == OTHER_WEIGHTS


def test_builds_of_two_versions_take_each_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet is upgraded machine by machine."""
    monkeypatch.setattr(module, "VERSION", VERSION + 1)
    refuses(folder, FileNotFoundError, f"profiles of version {VERSION + 1}")
    push(str(folder), small_profile(1))
    assert pull(folder).id == small_profile(1).id
    monkeypatch.undo()
    assert pull(folder).id == small_profile(0).id


# What is refused ----------------------------------------------------------------------------------------------------


def change(folder: Path, name: str, content: bytes | Callable[[bytes], bytes]) -> None:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content(file.read_bytes()))


def profile_name(number: int = 0) -> str:
    return f"{FOLDER}/{small_profile(number).id.hex()}.safetensors"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda data: data[:-1], "is not a safetensors file"),
        (lambda data: data.replace(b"calibrated", b"calibrateD"), "they do not hash to their digest"),
    ],
)
def test_a_damaged_profile_is_refused_with_its_place_and_the_remedy(
    folder: Path, content: Callable[[bytes], bytes], message: str
) -> None:
    change(folder, profile_name(), content)
    refuses(folder, FormatError, f"^{folder}: {profile_name()}: ", message, "; push the profile there again$")


def test_another_profile_under_a_name_is_refused(folder: Path) -> None:
    push(str(folder), small_profile(1))
    change(folder, profile_name(1), (folder / profile_name(0)).read_bytes())
    identity = small_profile(1).id.hex()
    refuses(folder, ProfileMismatchError, f"^id: must be {identity}.*got a profile of {small_profile(0).id.hex()}")
    refuses(folder, ProfileMismatchError, f"^id: must be {identity}", id=identity)


def test_a_profile_of_another_model_is_refused(folder: Path) -> None:
    stray = small_profile(layout=OTHER_LAYOUT)
    stray.save(folder / FOLDER / f"{stray.id.hex()}.safetensors")
    refuses(folder, ProfileMismatchError, f"^layout: must be {LAYOUT_NAME}", id=stray.id.hex())
    other = push(str(folder), small_profile(weights=OTHER_WEIGHTS))
    change(folder, NEWEST, lambda data: data.replace(small_profile().id.hex().encode(), other.encode()))
    refuses(folder, ProfileMismatchError, f"^weights: must be {WEIGHTS}.*got a profile of {OTHER_WEIGHTS}")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff\xfe\x00", f"{small_profile().id.hex()} -1\n".encode(), f"{'A' * 32} 1\n".encode(),
        f"{small_profile().id.hex()} {10**11}\n".encode(), b"../../../../etc/passwd-to-read-it 1\n",
    ],
)  # fmt: skip
def test_what_says_the_newest_is_verified(folder: Path, content: bytes) -> None:
    change(folder, NEWEST, content)
    refuses(
        folder,
        FormatError,
        f"^{NEWEST} in {folder}: must be an id and a time, got ",
        "push a profile of this model there again",
    )
    push(str(folder), small_profile(1))
    assert pull(folder).id == small_profile(1).id, "the remedy"


def test_sizes_are_bounded_before_memory_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (folder / profile_name()).stat().st_size
    monkeypatch.setattr(module, "MAX_PROFILE_BYTES", size - 1)
    refuses(folder, StoreError, f"^{profile_name()}: must be at most {size - 1} bytes in {folder}, got {size}")
    with pytest.raises(InputError, match=rf"must be at most {size - 1} bytes, got {size}"):
        push(str(folder), small_profile(1))
    monkeypatch.undo()
    with open(folder / profile_name(), "r+b") as file:
        file.truncate(1 << 40)  # sparse
    refuses(folder, StoreError, f"must be at most {8 << 30} bytes")
    change(folder, NEWEST, lambda data: data + b" " * 100)
    refuses(folder, StoreError, f"^{NEWEST}: must be at most 100 bytes")


@pytest.mark.parametrize("part", ["cuvee-profiles", FOLDER, profile_name(), NEWEST])
def test_links_are_not_followed(folder: Path, part: str) -> None:
    (folder / part).rename(folder / "elsewhere")
    (folder / part).symlink_to(folder / "elsewhere")
    refuses(folder, StoreError, "must be a file that can be read, in folders that are no links", "replace it by a copy")


def test_a_push_writes_through_no_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (folder / NEWEST).unlink()
    (folder / NEWEST).symlink_to(tmp_path / "victim")
    push(str(folder), small_profile(1))
    assert (tmp_path / "victim").read_bytes() == b"precious" and not (folder / NEWEST).is_symlink()
    (folder / FOLDER).rename(tmp_path / "moved")
    (folder / FOLDER).symlink_to(tmp_path / "moved")
    before = sorted(os.listdir(tmp_path / "moved"))
    with pytest.raises(StoreError, match=r"cannot be written in"):
        push(str(folder), small_profile(2))
    assert sorted(os.listdir(tmp_path / "moved")) == before


def test_what_is_no_file_is_refused_and_what_is_gone_names_the_remedy(folder: Path, tmp_path: Path) -> None:
    profile = folder / profile_name()
    profile.unlink()
    refuses(folder, FileNotFoundError, f"^no profile {small_profile().id.hex()} .* in {folder}: .*push it")
    os.mkfifo(profile)
    refuses(folder, StoreError, "must be a file")
    profile.unlink()
    profile.mkdir()
    refuses(folder, StoreError, "must be a file")
    (tmp_path / "file").write_bytes(b"")
    refuses(f"file://{tmp_path}/file", StoreError, "must be a file that can be read, in folders that are no links")
    with pytest.raises(StoreError, match="cannot be written in"):
        push(f"file://{tmp_path}/file", small_profile())


def test_names_in_a_profile_do_not_become_paths(tmp_path: Path) -> None:
    """The weights' fingerprint in a file may be any text."""
    for name in ("../../../../escaped", "", "A1" * 16):
        with pytest.raises(InputError, match="model: must be w2- and 32 hex digits"):
            push(str(tmp_path / "collection"), small_profile(weights=name))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", range(6))
def test_a_failed_push_leaves_the_newest_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    """A file is on disk before it has its name, and so is the profile before what names it the newest."""
    calls: list[str] = []

    def failing(name: str, usual: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **named: Any) -> None:
            if name == "fsync" or "src_dir_fd" in named:  # not the temporary file of the profile
                calls.append(name)
                if len(calls) > fails:
                    raise OSError(28, "No space left on device")
            usual(*arguments, **named)

        return call

    with monkeypatch.context() as patched:
        for name in ("fsync", "replace"):
            patched.setattr(os, name, failing(name, getattr(os, name)))
        with pytest.raises(StoreError, match="No space left on device"):
            push(str(folder), small_profile(1))
    assert calls == ["fsync", "replace", "fsync", "fsync", "replace", "fsync"][: fails + 1]
    assert not [file for file in folder.rglob("*") if file.name.startswith(".tmp-")]
    assert pull(folder).id == small_profile(1 if fails == 5 else 0).id


# Object storage -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket() -> Iterator[FakeHTTP]:
    pytest.importorskip("obstore", reason="needs obstore")
    with fake_http() as server:
        yield server


def test_sizes_of_objects_are_bounded(bucket: FakeHTTP, monkeypatch: pytest.MonkeyPatch) -> None:
    push(bucket.url, small_profile())
    sent = bucket.sent
    bucket.tell = lambda method, path: [answer(Content_Length="99999999999"), *[b"x" * 10**6] * 100]
    refuses(bucket.url, StoreError, f"^{NEWEST}: must be at most 100 bytes in {bucket.url}, got 99999999999")
    assert bucket.sent - sent < 50 * 10**6
    bucket.tell = lambda method, path: None
    monkeypatch.setattr(module, "MAX_PROFILE_BYTES", 1000)
    refuses(bucket.url, StoreError, f"^{profile_name()}: must be at most 1000 bytes")


def test_a_bucket_that_is_down_is_an_error_and_its_password_stays_secret(
    bucket: FakeHTTP, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuvee.integrations.stores.objects._RETRY", {"max_retries": 0})
    where = f"http://user:verysecret@127.0.0.1:{bucket.port}/kv"
    bucket.tell = lambda method, path: answer("503 Later")
    for call in (lambda: pull(where), lambda: push(where, small_profile())):
        with pytest.raises(StoreError) as caught:
            call()
        assert "verysecret" not in str(caught.value) and "503" in str(caught.value)


# Engines ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_model: Callable[..., Any]) -> tuple[Path, KVLayout, str]:
    """A tiny Llama on disk, its layout, and the fingerprint of its weights."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", KVLayout.from_config(model.config, "bfloat16"), model_fingerprint(model)


def test_an_engine_finds_the_profile_of_its_checkpoint(
    where: str,
    checkpoint: tuple[Path, KVLayout, str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, layout, weights = checkpoint
    with pytest.raises(FileNotFoundError, match=f"^no profile .*{weights}"):
        find_profile(where, layout, path)
    first = push(where, small_profile(0, weights, layout))
    second = push(where, small_profile(1, weights, layout))
    caplog.set_level(logging.INFO)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert find_profile(where, layout, path).id.hex() == second
    assert not list((tmp_path / "temporary").iterdir())
    (line,) = [record.message for record in caplog.records if record.message.startswith("cuvee: took profile ")]
    assert second in line and line.endswith(f", from {where}") and "the newest of these weights, pushed on 20" in line
    caplog.clear()
    assert find_profile(f"{where}?id={first}", layout, path.parent / "not asked").id.hex() == first
    assert "named by its id" in caplog.text
    if where.startswith("file://"):  # a path is taken for a folder if there is one
        assert find_profile(where.removeprefix("file://"), layout, path).id.hex() == second


def test_an_engine_reads_a_file_as_before(tmp_path: Path) -> None:
    small_profile().save(tmp_path / "p")
    assert find_profile(str(tmp_path / "p"), LAYOUT, "not asked").id == small_profile().id
    with pytest.raises(FileNotFoundError, match=r"^no profile at missing$"):
        find_profile("missing", LAYOUT, "not asked")
