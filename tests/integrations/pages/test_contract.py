"""What every adapter of an engine's pages keeps to, behind its engine's own classes: on the CPU, without an engine."""

from __future__ import annotations

import json
import logging
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.pages.adapters import ADAPTERS, L2, MODEL, MOST, Adapter, HiCache, Tier
from tests.integrations.stores.dict_store import DictStore, hold
from tests.recognizing import cached, ids_of, learned_profile, small_model
from tests.waiting import let_name, wait_until
from typer.testing import CliRunner

from cuvee.cli import app
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.integrations.identity.file_digests import file_digests
from cuvee.integrations.identity.weight_fingerprints import _fingerprints
from cuvee.integrations.pages import PageStore
from cuvee.integrations.stores import StoreError
from cuvee.integrations.stores.disk import DiskStore

PAGES = 6
Make = Callable[..., Adapter]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> DictStore:
    held = DictStore()
    monkeypatch.setattr("cuvee.integrations.pages.opening.open_store", lambda urls: held)
    return held


@pytest.fixture(params=ADAPTERS)
def kind(request: pytest.FixtureRequest) -> type[Adapter]:
    found: type[Adapter] = request.param
    return found


@pytest.fixture
def make(kind: type[Adapter], store: DictStore) -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda options=None, **given: stack.enter_context(closing(kind(store, options or {}, **given)))
        store.before = lambda operation: None


# There and back -------------------------------------------------------------------------------------------------------


def test_pages_come_back_bit_for_bit_after_a_restart(make: Make, store: DictStore) -> None:
    first = make()
    first.save(PAGES)
    assert first.load(PAGES + 2) == PAGES == first.found(PAGES + 2)
    saved = first.counters
    assert saved["saved_pages"] == PAGES and saved["raw_bytes"] == PAGES * first.page * first.layout.bytes_per_token
    assert saved["blob_bytes"] == sum(map(len, store.entries.values())) < saved["raw_bytes"]
    first.close()
    again = make()
    assert again.load(PAGES + 2) == PAGES
    loaded = again.counters
    assert loaded["loaded_pages"] == PAGES and loaded["loaded_raw_bytes"] == saved["raw_bytes"]
    assert loaded["loaded_blob_bytes"] == saved["blob_bytes"]
    again.save(PAGES + 1)
    assert again.counters["saved_pages"] == 1 and again.counters["kept_pages"] == PAGES
    assert again.load(PAGES + 2) == PAGES + 1 and "contained" not in " ".join(again.counters)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Have no checkpoint read until this is called, which returns once the weights have a name."""
    go = threading.Event()

    def digests(files: Sequence[Path], stop: threading.Event | None = None) -> list[bytes]:
        assert go.wait(60)
        return file_digests(files, stop)

    def fingerprints(*given: Any) -> list[str]:
        assert go.wait(60)
        return _fingerprints(*given)

    monkeypatch.setattr("cuvee.integrations.identity.checkpoint.file_digests", digests)
    monkeypatch.setattr("cuvee.integrations.identity.weight_fingerprints._fingerprints", fingerprints)
    monkeypatch.setattr("cuvee.integrations.identity.weights_name.START_SECONDS", 0.0)
    yield partial(let_name, go)
    go.set()


def test_until_the_weights_have_a_name_nothing_is_stored_or_found(
    make: Make, store: DictStore, held: Callable[[], None]
) -> None:
    """The engine has started meanwhile. Once there is a name, the same adapter stores, finds and loads."""
    a = make()
    a.save(PAGES)
    assert a.found(PAGES) == 0 == a.load(PAGES) and not store.entries
    assert a.counters["unsaved_pages"] == PAGES and "saved_pages" not in a.counters
    held()
    a.save(PAGES)
    assert a.found(PAGES) == PAGES == a.load(PAGES)
    again = make()
    held()
    assert again.load(PAGES) == PAGES
    assert "contained" not in " ".join(a.counters)


@pytest.mark.parametrize("others", [False, True])
def test_an_engine_starts_before_its_profile_is_compared_with_the_weights(
    make: Make, store: DictStore, held: Callable[[], None], others: bool, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """If it is of others, that is said once, and nothing is ever stored; the next start, which knows it, fails."""
    small_model(seed=int(others)).save_pretrained(tmp_path / "model")
    learned_profile().save(tmp_path / "profile.safetensors")
    options = {"model": str(tmp_path / "model"), "profile": str(tmp_path / "profile.safetensors"), "step": 0.25}
    a = make(options, chunk=cached(small_model(), torch.bfloat16))
    a.save(1)
    assert a.found(1) == 0 and not store.entries
    held()
    a.save(1)
    assert a.found(1) == len(store.entries) == int(not others)
    assert a.counters.get("failures{weights}", 0) == int(others)
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == int(others)
    if others:
        assert "nothing is stored or loaded: profile: must be of the model's weights" in errors[0]
        monkeypatch.setattr("cuvee.integrations.identity.weights_name.START_SECONDS", 60)
        with pytest.raises(ProfileMismatchError, match="calibrated on other weights"):
            make(options)


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(bytes(9))])
def test_a_checkpoint_without_weights_that_can_be_read_ends_the_start(
    make: Make, tmp_path: Path, held: Callable[[], None], damage: Callable[[Path], object]
) -> None:
    """Before any of it is read to its end."""
    small_model().save_pretrained(tmp_path / "model")
    damage(tmp_path / "model" / "model.safetensors")
    with pytest.raises(InputError):
        make({"model": str(tmp_path / "model")})


def test_with_a_profile_pages_are_those_of_the_codec_with_recognized_tokens(make: Make, tmp_path: Path) -> None:
    whole, profile = cached(small_model(), torch.bfloat16), learned_profile()
    small_model().save_pretrained(tmp_path / "model")
    profile.save(tmp_path / "profile.safetensors")
    options = {"model": str(tmp_path / "model"), "profile": str(tmp_path / "profile.safetensors"), "step": 0.25}
    a, count = make(options, chunk=whole), 4
    a.save(count)
    assert a.counters["recognized_pages"] == a.counters["saved_pages"] == count
    assert a.counters["blob_bytes"] < a.counters["raw_bytes"] / 2.5
    codec, end, expected = Codec(profile, step=0.25), count * a.page, []
    for start in range(0, end, a.page):
        part = whole.slice(start, start + a.page)
        ids = ids_of(range(start, start + a.page))
        told = KVChunk(part.keys, part.values, part.layout, start, ids, end - start - a.page)
        expected.append(codec.decode(codec.encode(told)))
    assert a.load(count, expected=expected) == count


@pytest.mark.parametrize("secrets", [[b"a" * 16], [b"b" * 32, b"a" * 16]], ids=["one", "rotated"])
def test_what_was_signed_is_read_with_that_secret_alone(make: Make, tmp_path: Path, secrets: list[bytes]) -> None:
    def files(*given: bytes) -> dict[str, Any]:
        paths = [tmp_path / secret[:1].hex() for secret in given]
        for path, secret in zip(paths, given, strict=True):
            path.write_bytes(secret)
        return {"key_file": [str(path) for path in paths]}

    old = make(files(b"a" * 16))
    old.save(PAGES)
    assert make(files(*secrets)).load(PAGES) == PAGES
    for others in ({}, files(b"b" * 32)):
        assert make(others).found(PAGES) == 0 == make(others).load(PAGES)


@pytest.mark.parametrize(
    "other", [{"tenant": "another"}, {"model_id": "mine"}, {"dtype": torch.float16}], ids=["tenant", "model", "dtype"]
)
def test_others_find_nothing(make: Make, other: dict[str, Any]) -> None:
    make().save(PAGES)
    given = {name: value for name, value in other.items() if name == "dtype"}
    stranger = make({name: value for name, value in other.items() if name not in given}, **given)
    assert stranger.found(PAGES) == 0 == stranger.load(PAGES)
    stranger.save(PAGES)
    assert stranger.load(PAGES) == PAGES == make().load(PAGES)


# Why engines do not share ---------------------------------------------------------------------------------------------


def test_engines_that_do_not_share_see_each_others_entries_and_how_they_differ(
    make: Make, kind: type[Adapter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, in a gauge, and by a command. None of them tells a secret, a tenant or a folder."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("cuvee.integrations.pages.opening.open_store", lambda urls: DiskStore(tmp_path / "kv"))
    monkeypatch.setenv("KV_SECRET", "known to engines only")
    own = {"tenant": "customer-17", "key_env": "KV_SECRET"}
    tuned = tmp_path / "of-alice" / "tuned"
    shutil.copytree(MODEL, tuned)
    config = json.loads((tuned / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 300}))

    def serve(pages: int, options: dict[str, Any], **given: Any) -> tuple[str, dict[str, float]]:
        """An engine's life: it asks for a page, stores some, and ends. What it logged, and its counters."""
        a = make(options, **given)
        a.found(1)
        wait_until(lambda: any("entries of this identity" in line for line in caplog.messages))
        a.save(pages)
        a.close()
        (line,) = (line for line in caplog.messages if "entries of this identity" in line)
        caplog.clear()
        return line, a.counters

    serve(PAGES, own)
    line, counters = serve(2, own, dtype=torch.float16)
    assert f"and {PAGES} of others (1), which differ in: " in line and "cache_dtype (1)" in line
    assert counters["identity_entries{other}"] == PAGES
    line, counters = serve(1, {**own, "model": str(tuned)})
    assert "weights (2)" in line and "config.max_position_embeddings (2)" in line
    line, counters = serve(PAGES, own)
    assert f"has {PAGES} entries of this identity" in line
    assert counters["identity_entries{same}"] == PAGES and counters["identity_entries{other}"] == 3

    mine = line.partition("of this identity (")[2][:8]
    command = ["store", "explain", f"file://{tmp_path}/kv", "--identity", mine]
    told = CliRunner().invoke(app, [*command, "--json"])
    first, *others = json.loads(told.stdout)["identities"]
    assert first["entries"] == PAGES and first["fields"]["engine"] == {
        Tier: "vllm-tier", L2: "lmcache-l2", HiCache: "sglang-hicache"
    }[kind]  # fmt: skip
    assert [each["entries"] for each in others] == [2, 1]
    assert others[0]["differs"]["cache_dtype"] == ["bfloat16", "float16"]
    assert others[1]["about"]["model"] == "tuned"
    kept = b"".join(file.read_bytes() for file in (tmp_path / "kv").rglob("*") if file.is_file()).decode("latin-1")
    shown = told.stdout + CliRunner().invoke(app, command).stdout + kept
    assert '"fields"' in kept and mine in shown
    assert not [each for each in ("customer-17", "known to engines only", "of-alice") if each in shown]

    monkeypatch.setenv("NEW_SECRET", "not known to all engines")
    line, counters = serve(1, {**own, "key_env": ["NEW_SECRET", "KV_SECRET"]})
    assert (
        "has 0 entries of this identity" in line
        and f"), {PAGES} that another accepted secret has signed, and 3 of" in line
    )
    assert "secret" not in line.partition("differ in: ")[2] and counters["identity_entries{same}"] == PAGES
    said = CliRunner().invoke(app, ["store", "explain", f"file://{tmp_path}/kv"]).stdout
    assert said.count("which the first identity accepts") == 1 and "secret: 0" not in said


def test_a_store_that_cannot_be_counted_costs_one_line(
    make: Make, store: DictStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(tenant: str) -> Any:
        raise StoreError("it is down")

    monkeypatch.setattr(store, "shared", True)
    monkeypatch.setattr(store, "keys", fail)
    a = make()
    a.found(1)
    wait_until(lambda: a.counters.get("failures{records}", 0) == 1)
    a.save(2)
    assert a.load(2) == 2, "it is served all the same"
    a.close()
    assert a.counters["failures{records}"] == 2
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len([line for line in lines if "cannot be counted: it is down" in line]) == 1


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "signed"), [("flipped", False), ("cut", False), ("gone", False), ("flipped", True), ("another's", True)]
)  # without a secret, the envelopes of stores tell one entry from another
def test_what_is_damaged_or_forged_is_a_miss_and_can_be_stored_again(
    make: Make, store: DictStore, tmp_path: Path, how: str, signed: bool
) -> None:
    (tmp_path / "secret").write_bytes(bytes(16))
    options = {"key_file": str(tmp_path / "secret")} if signed else {}
    a = make(options)
    a.save(1)  # pages of one call are written in any order
    a.save(MOST)
    *_, before, last = store.entries
    data = store.entries[last]
    changed = {"flipped": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "cut": data[:-3], "another's": data}
    changed["another's"] = store.entries[before]
    if how == "gone":
        del store.entries[last]
    else:
        store.entries[last] = changed[how]
    reader = make(options)
    assert 0 < reader.load(MOST) < MOST
    assert (reader.counters.get("failures{decode}", 0) > 0) == (how != "gone"), reader.counters
    assert last not in store.entries, "what never decodes is deleted"
    reader.save(MOST)
    assert reader.load(MOST) == MOST and "contained" not in " ".join(reader.counters)


def test_whatever_the_store_does_nothing_wrong_is_loaded(make: Make, store: DictStore) -> None:
    """It fails, hangs, forgets and lies at random. Afterwards all is as before."""
    draw, lock = random.Random(7), threading.Lock()
    make().save(1, sequence=9)  # the first encoding compiles
    a = make({"load_timeout": 0.4, "lookup_timeout": 0.3})
    odds = {"error": 0.0, "hang": 0.0, "lie": 0.0}

    def disturb(operation: str) -> None:
        with lock:
            chance, victim = draw.random(), draw.choice(list(store.entries) or [""])
            if chance < odds["lie"] and victim in store.entries:
                data = bytearray(store.entries.pop(victim))
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                if draw.random() < 0.5:
                    store.entries[victim] = bytes(data[: draw.choice([len(data), len(data) - 3])])
        if chance > 1 - odds["error"]:
            raise draw.choice([StoreError("planted"), OSError("planted"), ZeroDivisionError("planted")])
        if 0.4 < chance < 0.4 + odds["hang"]:
            time.sleep(0.6)

    store.before = disturb
    loaded = 0
    for _ in range(15):
        odds.update(error=draw.choice([0, 0.3]), hang=draw.choice([0, 0, 0.05]), lie=draw.choice([0, 0.2]))
        sequence, count = draw.randrange(3), draw.randrange(1, PAGES)
        a.save(count, sequence)
        loaded += a.load(count, sequence)
    store.before = lambda operation: None
    assert loaded and "contained" not in " ".join(a.counters), a.counters
    assert any(name.startswith("failures") for name in a.counters)
    last = make()
    last.save(PAGES, sequence=5)
    assert last.load(PAGES + 1, sequence=5) == PAGES


@pytest.mark.parametrize(("operation", "told"), [("contains", "contains"), ("get", "get_many"), ("put", "put")])
def test_a_store_that_hangs_is_a_miss_in_bounded_time_and_is_told_so(
    make: Make, store: DictStore, operation: str, told: str
) -> None:
    make().save(2)
    late: list[str] = []
    store.report_overdue = lambda operation, seconds: late.append(operation)  # type: ignore[method-assign]
    seconds = 1.0 if operation == "put" else 0.4  # beside puts that hang, lookups and loads are to be in time
    a = make({"load_timeout": seconds, "lookup_timeout": seconds})
    held, began = hold(store, operation), time.monotonic()
    try:
        a.save(2, sequence=1)
        there = a.found(2), a.load(2), a.load(2, sequence=1)
        a.close()
    finally:
        held.set()
    assert time.monotonic() - began < 30 and told in late
    failed = any(name.startswith("failures") for name in a.counters)
    if operation == "put":
        assert failed and there == (2, 2, 0)
    else:  # some adapters look pages up by reading them
        assert failed and set(there[:2]) <= {0, 2} and (0 in there[:2] or operation == "contains")


def test_a_store_that_fails_is_a_miss_that_is_counted(make: Make, store: DictStore) -> None:
    make().save(2)
    before = dict(store.entries)

    def fail(operation: str) -> None:
        raise StoreError("gone")

    store.before = fail
    a = make()
    a.save(2)
    assert a.found(2) == 0 == a.load(2) and store.entries == before
    assert a.counters["failures{lookup}"] >= 1 and a.counters["failures{store}"] >= 1
    assert a.counters["unsaved_pages"] == 2


@pytest.mark.parametrize("method", ["_held", "_in_order", "_save_missing"])
def test_an_error_of_ours_is_a_miss(
    make: Make, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make().save(2)
    a = make()

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(PageStore, method, fail)
    a.save(2, sequence=1)
    loaded = a.load(2), a.load(2, sequence=1)
    assert loaded in {"_held": [(0, 0), (2, 0)], "_in_order": [(0, 0)], "_save_missing": [(2, 0)]}[method]
    assert any(name.startswith("contained") for name in a.counters) and "planted" in caplog.text


@pytest.mark.parametrize("kind", [each for each in ADAPTERS if each.values[0] in (Tier, L2)], indirect=True)
def test_what_no_longer_fits_is_refused_and_counted(make: Make, store: DictStore) -> None:
    page = make()
    size = page.page * page.layout.bytes_per_token
    a, held = make({"max_pending_gb": 2.5 * size / 1e9}), hold(store, "put")
    for sequence in range(8):
        a.submit(3, sequence)
    refused = a.counters.get("unsaved_pages", 0)
    held.set()
    a.settle()
    assert 0 < refused == a.counters["unsaved_pages"] < 24
    assert a.counters["saved_pages"] == 24 - refused
    assert sum(a.load(3, sequence) for sequence in range(8)) == 24 - refused


@pytest.mark.parametrize("kind", [each for each in ADAPTERS if each.values[0] in (Tier, L2)], indirect=True)
def test_what_waited_too_long_is_given_up(make: Make) -> None:
    """The engine may need its memory for others by then."""
    a = make({"load_timeout": 1e-9})
    a.save(2)
    assert a.load(2) == 0 and a.counters["unsaved_pages"] == 2


# The end --------------------------------------------------------------------------------------------------------------


def test_closing_ends_what_has_begun_and_gives_up_what_waits(make: Make, store: DictStore) -> None:
    """What was counted as stored is there, and nothing is told of the rest."""
    a = make()
    a.save(1, sequence=9)  # the first encoding compiles
    store.before = lambda operation: time.sleep(0.05) if operation == "put" else None
    for sequence in range(6):
        a.submit(2, sequence)
    a.close()
    a.close()
    store.before = lambda operation: None
    saved, again = a.counters["saved_pages"] - 1, make()
    assert sum(again.load(2, sequence) for sequence in range(6)) == saved


@pytest.mark.parametrize("kind", [each for each in ADAPTERS if each.values[0] in (HiCache,)], indirect=True)
def test_a_closed_adapter_has_no_pages(make: Make) -> None:
    """The other engines end with it."""
    a = make()
    a.save(2)
    a.close()
    assert a.found(2) == 0 == a.load(2)
    a.submit(2, sequence=1)
    a.close()
    assert make().found(2, sequence=1) == 0
