"""What the tasks of the scheduler's side share: the engine's measures, the store, and which entries it has."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cuvee.codec.support.once import Once
from cuvee.integrations.core.entry_keys import EntryKeys
from cuvee.integrations.stores import Store
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.messages import Entry
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.pages.layer_groups import NULL_BLOCK
from cuvee.integrations.vllm.setup import Setup
from cuvee.naming.identity import PrefixChain, companion_digest

logger = logging.getLogger(__name__)

UNSTORED = {
    "asked": "their request asks for that, or has options that cannot be read",
    "positions": "they are beyond the last position of the model by its configuration, so they are not loaded either",
    "blended": "they follow a blend, so their KV is not exact",
    "quality": "they follow tokens that were loaded at less than the stored quality",
    "reset": "they follow tokens that were computed before a reset, or before the weights changed",
    "overwritten": "the engine overwrites them before they can be copied",
}
"""Why tokens that have KV are not stored."""

PATIENCE = 1e-3  # seconds that a step of the engine waits for lookups in total, before it goes on and asks again
# Share of `lookup_timeout` after which a call hangs. Each call asks for few keys, however many a lookup needs.
_HANGS = 0.5
_THREADS = 6
_MOST_RECENT = 1 << 20  # digests remembered as stored
_RECENT_AGE = 60.0  # seconds they are believed; then the worker asks the store again


class SchedulerState:
    """What lookups, loads, saves and blends share. Used in the engine's loop alone; lookups use `keys` and `store`.

    Attributes:
        options: of the connector.
        loads, stores: whether requests are loaded and stored at all.
        chunk, block: tokens per chunk, and per block of the engine.
        blocks: tokens per block of each group of layers.
        windows: of each group of layers, how many tokens the engine keeps; None: all.
        recurrent: numbers of the groups of recurrent layers.
        positions: number of positions the model has; None: no limit.
        tails: whether tails are stored (see `saves`).
        parts: of how many parts the store has its chunks at best.
        encodes: as in `Setup`.
        predicts: whether the codec predicts a part of the cache from token ids.
        shards: number of ranks.
        holders: ranks under which entries are stored.
        keys: of entries, for a rank that is named.
        store: looked into, never read from.
        lookup_threads: wait for the store, one for each lookup.
        recorder: takes the figures.
        clock: seconds, monotonic.
        patience: seconds that the current step still waits for lookups.
    """

    def __init__(self, setup: Setup, store: Store, recorder: Recorder, clock: Callable[[], float]) -> None:
        self.options = setup.options
        self._role = setup.loads, setup.stores
        self.loads, self.stores = self._role
        self.chunk = setup.options.chunk_tokens
        self.block = setup.block_tokens
        self.blocks, self.windows = setup.blocks, setup.windows
        self.recurrent = [number for number, group in enumerate(setup.groups) if group.recurrent]
        self.positions = setup.layout.max_positions
        self.encodes = setup.encodes
        self.parts = 1 + setup.options.refinements
        self.predicts = setup.predicts
        self.shards, self.holders = setup.shards, setup.holders
        self.keys = EntryKeys(setup.options.key_ids())
        self.store = store
        self.lookup_threads = ThreadPool(_THREADS, "cuvee-lookup", setup.options.lookup_timeout)
        self.recorder = recorder
        self.clock = clock
        self.patience = PATIENCE
        self._once = Once(logger)

    def not_stored(self, reason: str, tokens: int) -> None:
        """Count tokens that are not stored for a reason of `UNSTORED`, and log each reason once."""
        if tokens <= 0:
            return
        self.recorder.count("unstored_tokens", tokens, reason)
        level = logging.WARNING if reason in ("positions", "overwritten") else logging.INFO
        self._once(reason, "cuvee: %d tokens are not stored: %s", tokens, UNSTORED[reason], level=level)

    def enable(self, enabled: bool) -> None:
        """Load and store what the engine's role allows, or nothing."""
        self.loads, self.stores = self._role if enabled else (False, False)

    @contextmanager
    def waiting(self) -> Iterator[float]:
        """Give the seconds that the caller may wait, and charge the seconds it waited to the step."""
        begun = time.monotonic()
        try:
            yield self.patience
        finally:
            self.patience = max(self.patience - (time.monotonic() - begun), 0)

    def addressed(self, tokens: int) -> int:
        """Return how many of the first tokens have positions in the model: others are neither stored nor decoded."""
        return tokens if self.positions is None else min(tokens, self.positions)

    def whole(self, tokens: int) -> int:
        """Return how many whole chunks of a prompt of this length are of use; of the last one, perhaps only a part."""
        return min(self.addressed(tokens) // self.chunk, -(-self.usable(tokens) // self.chunk))

    def usable(self, tokens: int) -> int:
        """Return how many tokens of a prompt of this length can be loaded: whole blocks without the last token, which
        is computed because its output is needed.
        """
        return min(tokens - 1, self.addressed(tokens)) // self.block * self.block

    def has_dropped(self, entry: Entry) -> bool:
        """Return whether the engine has dropped a part of an entry from a layer with a window."""
        tables = zip(entry.tables, self.windows, strict=True)
        return any(window is not None and NULL_BLOCK in blocks for blocks, window in tables)

    def is_needed(self, entry: Entry) -> bool:
        """Return whether some layer has room for a part of an entry: a window ends with the entries that follow."""
        tables = enumerate(zip(entry.tables, self.windows, strict=True))
        return any(
            window is None or any(block != NULL_BLOCK for block in blocks)
            for number, (blocks, window) in tables
            if number not in self.recurrent
        )

    def state_after(self, chain: PrefixChain, ids: Sequence[int], tokens: int) -> bytes:
        """Return the digest of the state after the first `tokens` of `ids`, whole blocks whose chunks are hashed."""
        chunks, rest = divmod(tokens, self.chunk)
        prefix = chain.tails(ids, chunks, [rest])[0] if rest else chain.digests(ids, chunks)[-1]
        return companion_digest(prefix, b"states")

    def overdue(self) -> None:
        """Tell the store that a lookup took too long, so that a call that hangs delays no other request as well."""
        self.store.report_overdue("contains", _HANGS * self.options.lookup_timeout)


class RecentEntries:
    """Digests of entries that were found or stored a moment ago, so that they are not stored again."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._seen: OrderedDict[bytes, float] = OrderedDict()

    def has(self, digest: bytes) -> bool:
        """Return whether an entry is taken for stored."""
        return self._state.clock() - self._seen.get(digest, -_RECENT_AGE) < _RECENT_AGE

    def check(self, digest: bytes) -> bool:
        """Return whether an entry is known to be stored, and remember that it is from now on."""
        now = self._state.clock()
        if self.has(digest):
            return True
        self._seen[digest] = now
        self._seen.move_to_end(digest)
        while len(self._seen) > _MOST_RECENT or now - next(iter(self._seen.values())) >= _RECENT_AGE:
            self._seen.popitem(last=False)
        return False

    def forget(self, digest: bytes) -> None:
        """Take an entry for not stored."""
        self._seen.pop(digest, None)

    def clear(self) -> None:
        """Forget all entries."""
        self._seen.clear()
