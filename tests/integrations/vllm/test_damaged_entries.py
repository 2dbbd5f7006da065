"""A damaged entry is stored again by the request that could not load it, whatever operation of the store fails once."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.vllm.sides import CHUNK, IDENTITY
from tests.integrations.vllm.small_engine import SmallEngine

from cuvee.integrations.stores import folder
from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.stores.disk import DiskStore
from cuvee.integrations.stores.envelope import HEADER_BYTES, seal
from cuvee.naming.identity import PrefixChain, Scope, store_key

PROMPT = random.Random(1).choices(range(60), k=6 * CHUNK + 5)


class FailingDisk(DiskStore):
    """A folder of a machine without memory: an operation fails once its count in `left` comes to 0. Of puts, those of
    `key` count.
    """

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(path)
        self.key, self.left = key, Counter[str]()

    def fail(self, operation: str) -> None:
        self.left[operation] -= 1
        if self.left[operation] == 0:
            raise OSError("no memory")

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        self.fail("get")
        return super()._read(keys)

    def _there(self, keys: Sequence[str]) -> list[bool]:
        self.fail("contains")
        return super()._there(keys)

    def _write(self, key: str, blob: bytes) -> bool:
        self.fail("put" if key == self.key else "put another")
        return super()._write(key, blob)


def damage(path: Path, key: str, found_by: str) -> None:
    """Have the store find that an entry is bad, or the codec, which asks the store to delete it."""
    path.write_bytes(bytes(path.stat().st_size) if found_by == "store" else seal(key, b"no blob", time.time()))


CASES = [
    ("nothing", 0, 1),
    *(("contains", number, 1) for number in range(1, 6)),  # of lookups, then of saves
    ("get", 1, 1),
    ("delete", 1, 1),
    ("put", 1, 2),  # that is left to the next request
]


@pytest.mark.parametrize(
    ("found_by", "operation", "number", "requests"),
    # A deletion that is asked for and fails has the store not written to for a while.
    [*(("store", *case) for case in CASES), ("codec", "nothing", 0, 1), ("codec", "delete", 1, 2)],
)
def test_a_damaged_entry_is_stored_again(
    found_by: str, operation: str, number: int, requests: int, engine: Callable[..., SmallEngine], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    now = [0.0]
    key = store_key("", PrefixChain(IDENTITY, Scope(), CHUNK).digests(PROMPT, 3)[2])
    disk = FailingDisk(tmp_path, key)
    guarded: Any = GuardedStore(disk, lambda: now[0])  # an outage lasts for one request
    e = engine(store=guarded, blend=None)
    e.submit("first", PROMPT)
    e.run()
    tenant, _, name = key.partition("/")
    path = tmp_path / tenant / name[:2] / name
    good = path.read_bytes()
    damage(path, key, found_by)
    bad = path.read_bytes()
    remove = folder.remove_entry

    def removed(*given: Any) -> bool:
        disk.fail("delete")
        return remove(*given)

    monkeypatch.setattr(folder, "remove_entry", removed)
    disk.left[operation] = number
    for at in range(requests):
        assert not path.exists() or path.read_bytes() == bad, f"before request {at}"
        e.submit(f"later {at}", PROMPT)  # it adds no tail, whose put would race this one's to probe the store
        e.run()
        now[0] += 60.0
    assert disk.left[operation] <= 0, "it has not failed"
    assert path.read_bytes()[HEADER_BYTES:] == good[HEADER_BYTES:]
