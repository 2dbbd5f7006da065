"""`cuvee store`: what it says of a store, and the deletion of a tenant."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.package.cli import running
from typer.testing import Result

from cuvee import integrations
from cuvee.integrations.identity.records import EntrySample, IdentityRecord, RecordStore
from cuvee.integrations.stores.base import RECORDS, StoreError
from cuvee.integrations.stores.disk import DiskStore
from cuvee.naming.identity import PAGE_ENGINES, page_tenant, store_key, tenant_id


def run(*args: str, code: int = 0, answer: str | None = None) -> Result:
    return running.run("store", *args, code=code, answer=answer)


def read(*args: str, code: int = 0) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run(*args, "--json", code=code).stdout)
    return data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A disk store with three entries of the tenant "alice" and one of those without a salt."""
    store = DiskStore(tmp_path / "kv")
    for number in range(3):
        store.put(store_key("alice", bytes([number]) * 32), b"a" * 100)
    store.put(store_key("", bytes(32)), b"x")
    store.close()
    return tmp_path / "kv"


def held(folder: Path) -> list[bool]:
    alice = [store_key("alice", bytes([number]) * 32) for number in range(3)]
    return DiskStore(folder).contains([*alice, store_key("", bytes(32))])


def test_info_checks_with_an_entry_of_its_own(folder: Path) -> None:
    before = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    row = read("info", f"file://{folder}", "--check")["tiers"][0]
    assert row["reachable"] and row["seconds"] > 0 and row["error"] is None
    assert (row["entries"], row["bytes"]) == (4, sum(path.stat().st_size for path in before))
    assert before == sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    assert " ms" in run("info", f"file://{folder}?max_gb=1", "--check").stdout


def test_info_of_a_folder_that_does_not_exist_and_of_an_empty_one(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv?max_gb=1"
    for more in ((), ("--check",)):
        done = run("info", url, *more, code=1)
        assert done.stderr.startswith(f"error: disk store {tmp_path}/kv: does not exist") and " no " in done.stdout
        assert not (tmp_path / "kv").exists()
    (tmp_path / "kv").mkdir(mode=0o700)
    row = read("info", url)["tiers"][0]
    assert (row["entries"], row["bytes"], row["reachable"]) == (0, 0, True)
    assert not list((tmp_path / "kv").iterdir())


def test_info_of_a_store_that_is_down(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("not a folder")
    done = run("info", f"file://{tmp_path}/kv", "--check", code=1)
    assert "no" in done.stdout and done.stderr.startswith("error: disk store") and done.stderr.count("\n") == 1
    (tmp_path / "good").mkdir(mode=0o700)
    data = read("info", f"tiered:file://{tmp_path}/good,file://{tmp_path}/kv", "--check", code=1)
    assert [row["reachable"] for row in data["tiers"]] == [True, False]
    assert data["tiers"][0]["error"] is None and "disk store" in data["tiers"][1]["error"]


class Wrong(DiskStore):
    """A folder that keeps nothing, loses what it keeps, or cannot let it go."""

    fault = ""

    def put(self, key: str, blob: bytes) -> bool:
        return self.fault != "put" and super().put(key, blob)

    def get(self, key: str) -> bytes | None:
        if self.fault == "get raises":
            raise StoreError("disk store: gone")
        return None if self.fault == "get" else super().get(key)

    def delete(self, key: str) -> bool:
        return self.fault != "delete" and super().delete(key)

    def contains(self, keys: Any) -> list[bool]:
        return [True] if self.fault == "contains" else super().contains(keys)


@pytest.mark.parametrize(
    ("fault", "message", "left"),
    [
        ("put", "lost an entry of 65536 bytes", 0),
        ("get", "lost an entry of 65536 bytes", 0),
        ("get raises", "gone", 0),
        ("delete", "could not be deleted", 1),
        ("contains", "could not be deleted", 0),
    ],
)
def test_info_says_what_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str, left: int
) -> None:
    monkeypatch.setattr("cuvee.integrations.stores.disk.DiskStore", Wrong)
    monkeypatch.setattr(Wrong, "fault", fault)
    (tmp_path / "kv").mkdir(mode=0o700)
    done = run("info", f"file://{tmp_path}/kv", "--check", code=1)
    assert message in done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert len(files) == left


def test_info_of_the_tiers_that_can_be_reached(folder: Path) -> None:
    done = run("info", f"tiered:memory://?max_gb=1,file://{folder}", "--json")
    assert [row["tier"] for row in json.loads(done.stdout)["tiers"]] == ["disk"]
    assert done.stderr == "note: entries in the RAM of servers cannot be reached from here\n"
    for command in (["info"], ["delete-tenant", "--salt", "x", "--yes"]):
        done = run(*command, "memory://", code=1)
        assert done.stdout == "" and done.stderr.startswith("error: url: must name a shared store, got memory://")


def test_a_password_is_not_shown() -> None:
    done = run("info", "redis://user:secret@127.0.0.1:1/0?timeout=0.2", "--json", code=1)
    assert "secret" not in done.output and json.loads(done.stdout)["url"].startswith("redis://user:***@127.0.0.1:1/0")


def test_delete_tenant(folder: Path) -> None:
    which = ("--salt", "alice")
    done = run("delete-tenant", f"file://{folder}", *which, "--yes")
    assert done.stdout == "disk: 3 deleted\n" and held(folder) == [False, False, False, True]
    assert run("delete-tenant", f"file://{folder}", *which, "--yes").stdout == "disk: 0 deleted\n"


def test_delete_tenant_deletes_what_adapters_of_other_engines_have_stored(folder: Path) -> None:
    """Each of them has tenants of its own."""
    package = Path(integrations.__file__).parent
    names = [re.findall(r'^_ENGINE = "(.+)"$', file.read_text(), re.MULTILINE) for file in package.rglob("*.py")]
    assert sorted(PAGE_ENGINES) == sorted(itertools.chain.from_iterable(names))
    store = DiskStore(folder)
    keys = [store_key(page_tenant(engine, salt), bytes(32)) for salt in ("alice", "bob") for engine in PAGE_ENGINES]
    assert all(store.put(key, b"x") for key in keys)
    assert run("delete-tenant", f"file://{folder}", "--salt", "alice", "--yes").stdout == "disk: 6 deleted\n"
    assert store.contains(keys) == [False] * 3 + [True] * 3 and held(folder)[3]


@pytest.mark.parametrize(("answer", "kept"), [("y\n", False), ("\n", True), (None, True)])
def test_delete_tenant_asks(folder: Path, answer: str | None, kept: bool) -> None:
    done = run("delete-tenant", f"file://{folder}", "--salt", "alice", code=int(kept), answer=answer)
    assert held(folder)[:3] == [kept] * 3
    assert f"Delete every entry of tenant {tenant_id('alice')} in file://{folder}?" in done.stderr
    assert ("disk: 3 deleted" in done.stdout) is not kept


def test_delete_tenant_that_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = DiskStore.delete_tenant

    def fail(store: DiskStore, tenant: str) -> int:
        if store.root.endswith("bad"):
            raise StoreError("disk store bad: I/O error")
        return original(store, tenant)

    monkeypatch.setattr(DiskStore, "delete_tenant", fail)
    url = f"tiered:file://{tmp_path}/bad,file://{folder}"
    data = read("delete-tenant", url, "--salt", "alice", "--yes", code=1)
    assert [row["deleted"] for row in data["tiers"]] == [None, 3] and "I/O" in data["tiers"][0]["error"]
    done = run("delete-tenant", url, "--salt", "alice", "--yes", code=1)
    assert done.stdout == "disk: 0 deleted\n" and done.stderr == "error: disk store bad: I/O error\n"


def test_delete_tenant_needs_a_tenant(folder: Path) -> None:
    assert "--salt" in run("delete-tenant", f"file://{folder}", "--yes", code=2).stderr and all(held(folder))


# Explain -------------------------------------------------------------------------------------------------------------


def records_in(folder: Path, *dtypes: str) -> list[IdentityRecord]:
    """A folder with a record for each dtype, the second one with an entry of "alice" and two of nobody."""
    store = DiskStore(folder)
    made: list[IdentityRecord] = []
    for dtype in dtypes:
        record = IdentityRecord({"weights": "aa", "dtype": dtype}, {"model": "books-3m"})
        if made:
            for tenant, number in (("alice", 1), ("", 1), ("", 2)):
                key = store_key(tenant, bytes([number]) * 32)
                store.put(key, b"x")
                record.sample.add(key)
        RecordStore(store).write(record)
        made.append(record)
    store.close()
    return made


def test_explain_says_which_fields_differ(tmp_path: Path) -> None:
    one, two = records_in(tmp_path / "kv", "bfloat16", "float32")
    data = read("explain", f"file://{tmp_path}/kv", "--identity", one.id[:6])
    assert [(row["identity"], row["entries"], row["differs"]) for row in data["identities"]] == [
        (one.id, 0, None), (two.id, 3, {"dtype": ["bfloat16", "float32"]}),
    ]  # fmt: skip
    said = run("explain", f"file://{tmp_path}/kv", "--identity", one.id).stdout.splitlines()
    assert said[0].startswith(f"{one.id[:8]}  0 entries, model books-3m, written ")
    assert said[1].startswith(f"{two.id[:8]}  3 entries, model books-3m, written ")
    assert said[2:] == ["          dtype: float32, not bfloat16"]
    assert read("explain", f"file://{tmp_path}/kv")["identities"][0]["identity"] == two.id
    assert read("info", f"file://{tmp_path}/kv")["tiers"][0]["entries"] == 3


def test_explain_without_records_and_with_hostile_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running.fails("store", "explain", f"file://{tmp_path}/kv", match="does not exist")
    (tmp_path / "kv").mkdir(mode=0o700)
    assert "no engine has written" in run("explain", f"file://{tmp_path}/kv").stdout
    with monkeypatch.context() as patch:
        patch.setattr(RecordStore, "count", lambda *_: pytest.fail("entries were counted"))
        running.fails("store", "explain", f"file://{tmp_path}/kv", "--identity", "ab", match="got 'ab'")
    (record,) = records_in(tmp_path / "kv", "bfloat16")
    DiskStore(tmp_path / "kv").put(f"{RECORDS}/ab", b"\x1b[31mred")
    done = run("explain", f"file://{tmp_path}/kv")
    assert record.id[:8] in done.stdout and "\x1b" not in done.output
    assert done.stderr.startswith("warning: record ab: must be JSON") and done.stderr.count("\n") == 1


def test_flags_of_an_engine_need_a_model_and_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/kv"
    for wrong in ([url, "--dtype", "float32"], [url, "--model", "m", "--identity", "a"]):
        assert "--model" in run("explain", *wrong, code=2).stderr
    with monkeypatch.context() as patch:
        patch.setattr("cuvee.cli.store._planned", lambda *_: pytest.fail("the checkpoint was read"))
        running.fails("store", "explain", url, "--model", "m", match="does not exist")
    (tmp_path / "kv").mkdir(mode=0o700)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.config", None)
    running.fails("store", "explain", url, "--model", "m", match="--model: needs vLLM 0.32 or newer")


def test_deleting_a_tenant_deletes_what_records_know_of_it(tmp_path: Path) -> None:
    one, two = records_in(tmp_path / "kv", "bfloat16", "float32")
    run("delete-tenant", f"file://{tmp_path}/kv", "--salt", "alice", "--yes")
    (left,), _ = RecordStore(DiskStore(tmp_path / "kv")).read()
    assert left.id == two.id and left.sample.keys == {store_key("", bytes([number]) * 32) for number in (1, 2)}
    run("delete-tenant", f"file://{tmp_path}/kv", "--salt", "", "--yes")
    assert RecordStore(DiskStore(tmp_path / "kv")).read() == ([], []) and one.id != two.id


def test_the_guide_shows_what_explain_prints(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "guides" / "operating.md").read_text()
    shown = text.split("cuvee store explain file:///var/cache/kv\n")[1].split("```")[0]
    store = DiskStore(tmp_path / "kv")
    for number, (dtype, entries, more) in enumerate(
        (("float32", 20, {"options.quantization": "fp8"}), ("bfloat16", 41, {}))
    ):
        fields = {"weights": "aa", "dtype": f"torch.{dtype}", "cache_dtype": dtype, **more}
        keys = [store_key("", bytes([number, at]) + bytes(30)) for at in range(entries)]
        sample = EntrySample(1 << (64 if number else 56), keys)
        written = 1795965600_000 - 18 * 60_000 * (1 - number)
        record = IdentityRecord(fields, {"model": "books-3m"}, written, sample)
        for key in keys:
            store.put(key, b"x")
        store.put(record.key, record.to_bytes())
    store.close()
    assert run("explain", f"file://{tmp_path}/kv").stdout == shown
