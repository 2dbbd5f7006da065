"""`IdentityRecords`: an engine's record is written and its entries are counted, beside the engine's loop."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.integrations.stores.dict_store import DictStore
from tests.integrations.vllm.sides import BLOCK, CHUNK, IDENTITY, LAYOUT, patience
from tests.waiting import wait_until

from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.identity.identity_records import IdentityRecords
from cuvee.integrations.identity.records import RecordStore
from cuvee.integrations.stores import Store
from cuvee.integrations.stores.base import StoreError
from cuvee.integrations.stores.disk import DiskStore
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.setup import Setup
from cuvee.naming.identity import Identity, store_key

OTHER = replace(IDENTITY, tokenizer="another")


def engine(store: Store, recorder: Recorder | None = None) -> IdentityRecords:
    options = Options.from_dict({"chunk_tokens": CHUNK, "quality": "lossless"})
    about = {"model": "tiny"}
    setup = Setup(
        options, LAYOUT, Profile.unlearned(LAYOUT), "lossless", BLOCK, 1, True, True, True, about=about
    )  # fmt: skip
    return IdentityRecords(setup.record, store, (), recorder or Recorder())


def digest(number: int) -> bytes:
    return number.to_bytes(8) * 4


def serve(store: Store, identity: Identity, *numbers: int) -> dict[str, float]:
    """An engine's life: it counts, stores entries, and ends. Its gauges by label."""
    recorder = Recorder()
    records = engine(store, recorder)
    records.use(identity)
    if store.shared:  # a first count that saw what is stored here would be followed by one that counts it
        wait_until(lambda: ("identity_entries", "other") in recorder.totals())
    for number in numbers:
        store.put(store_key("", digest(number)), b"x")
        records.note("", digest(number))
    records.close()
    return {label: value for (name, label), value in recorder.totals().items() if name == "identity_entries"}


def test_an_engine_counts_its_entries_and_those_of_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = DiskStore(tmp_path / "kv")
    serve(store, IDENTITY, 1, 2, 3)
    serve(store, OTHER, 4)
    store.delete(store_key("", digest(2)))
    caplog.clear()
    assert serve(store, IDENTITY, 5) == {"same": 2, "other": 1}, "what is new counts the next time"
    (line,) = [each for each in caplog.messages if "of this identity" in each]
    assert "has 2 entries of this identity" in line and "and 1 of others (1), which differ in: tokenizer (1)" in line
    counts = {each.fields["tokenizer"]: RecordStore(store).count(each) for each in RecordStore(store).read()[0]}
    assert counts == {"tokenizer": 3, "another": 1}
    store.close()


def test_weights_that_change_have_a_record_of_their_own(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv")
    records = engine(store)
    records.use(IDENTITY)
    for _ in patience():
        if RecordStore(store).read()[0]:
            break
    records.use(replace(IDENTITY, model="model live 77"))
    records.close()
    assert {each.fields["weights"] for each in RecordStore(store).read()[0]} == {"model", "model live 77"}
    store.close()


def test_only_its_own_thread_asks_the_store(tmp_path: Path) -> None:
    class Watched(DiskStore):
        threads: ClassVar[set[str]] = set()

        def attempt(self, *arguments: Any) -> Any:
            self.threads.add(threading.current_thread().name)
            return super().attempt(*arguments)

    store = Watched(tmp_path / "kv")
    records = engine(store)
    records.use(IDENTITY)
    records.note("", digest(1))
    records.close()
    assert store.threads == {"cuvee-records"}
    store.close()


def test_a_store_that_fails_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Down(DiskStore):
        def keys(self, tenant: str) -> Any:
            raise StoreError("it is down")

    store = Down(tmp_path / "kv")
    records = engine(store)
    records.use(IDENTITY)
    records.use(OTHER)
    records.close()
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(lines) == 1 and "cannot be counted: it is down" in lines[0]
    store.close()


def test_a_store_of_one_process_gets_no_record_and_no_thread() -> None:
    store = DictStore()
    assert not store.shared
    assert serve(store, IDENTITY, 1) == {} and len(store.entries) == 1
