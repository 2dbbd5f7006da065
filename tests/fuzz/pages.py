"""A target for the entries that hold an engine's pages, in a store whose owner is hostile and does not have the key."""

from __future__ import annotations

from functools import cached_property

import torch
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Finding
from tests.integrations.stores.dict_store import DictStore

from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache
from cuvee.integrations.pages import Counts, PageStore
from cuvee.naming.identity import Identity, PageNames, Scope, store_key

PAGE, PAGES = 4, 8  # tokens, pages
NAMES = [b"page %d" % number for number in range(PAGES)]
LAYOUT = KVLayout("fuzz", (LayerLayout(1, 8, 8, None),) * 2, "bfloat16", None)


class PagesTarget:
    """One entry of eight signed pages is replaced. Pages must come back exactly, or not at all."""

    name = "pages"
    weight = 1.0

    @cached_property
    def _codec(self) -> Codec:
        return Codec.without_profile(LAYOUT, key=bytes(range(16)), threads=1)

    @cached_property
    def _names(self) -> PageNames:
        return PageNames(Identity("m", "", LAYOUT.fingerprint, b"", "lossless"), Scope(), "fuzz", PAGE)

    @cached_property
    def _memory(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randn(PAGES, PAGE, 1, 8, generator=generator).bfloat16() for _ in range(4)]

    @cached_property
    def _whole(self) -> dict[str, bytes]:
        store = DictStore()
        pages = self._open(store)
        done = pages.save(PagedCache(LAYOUT, self._memory[:2], self._memory[2:]), torch.arange(PAGES * PAGE), NAMES, 0)
        pages.close()
        if not all(done):
            raise Finding("good pages are not stored")
        return dict(store.entries)

    @cached_property
    def _keys(self) -> list[str]:
        """The keys of the entries, page by page."""
        return [store_key("", self._names.page(name), 0, self._codec.key_ids[0]) for name in NAMES]

    def _open(self, store: DictStore) -> PageStore:
        return PageStore(self._codec, store, self._names, counts=Counts(), threads=1)

    def warm_up(self) -> None:
        if set(self._whole) != set(self._keys) or self.check(b"\0" + self._whole[self._keys[0]]) != f"{PAGES} pages":
            raise Finding("good entries are not read")

    def memory(self, data: bytes) -> int:
        return (16 << 20) + 64 * len(data)

    def make(self, dice: Dice) -> bytes:
        which = dice.number(0, len(self._keys) - 1)
        good = self._whole[self._keys[which]]
        entry = dice.damaged(good) if dice.number(0, 3) else self._whole[dice.pick(self._keys)]
        return bytes([which]) + entry

    def check(self, data: bytes) -> str:
        """Load all pages as if no process had seen them before."""
        store = DictStore()
        store.entries.update(self._whole)
        store.entries[self._keys[(data[0] if data else 0) % len(self._keys)]] = data[1:]
        memory = [torch.full_like(tensor, torch.nan) for tensor in self._memory]
        pages = self._open(store)
        try:
            there = pages.stored(NAMES)
            done = pages.load(PagedCache(LAYOUT, memory[:2], memory[2:]), torch.arange(PAGES * PAGE), NAMES, 0)
        finally:
            pages.close()
        loaded = done.index(False) if False in done else PAGES
        if any(done[loaded:]):
            raise Finding("pages behind a missing one were loaded")
        if loaded > sum(there):
            raise Finding(f"{loaded} pages were loaded of {sum(there)} that are there")
        if not all(torch.equal(back[:loaded], own[:loaded]) for back, own in zip(memory, self._memory, strict=True)):
            raise Finding("a page came back with other contents")
        return f"{loaded} pages"
