"""What the tasks of a worker share: its codec, its store, the engine's pages, its threads, and the next report."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.support.torch_threads import compute_alone
from cuvee.integrations.core.chunk_io import expected_sizes
from cuvee.integrations.core.deadlines import RecentRates
from cuvee.integrations.core.entry_keys import EntryKeys
from cuvee.integrations.core.niceness import give_way
from cuvee.integrations.stores import Store
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.cores import free_cores, move_to
from cuvee.integrations.vllm.messages import LOADERS, Entry, Report
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.pages.coded_pages import CodedPages
from cuvee.integrations.vllm.pages.draft_layers import DraftPages
from cuvee.integrations.vllm.pages.layer_groups import NULL_BLOCK
from cuvee.integrations.vllm.pages.state_pages import StatePages
from cuvee.integrations.vllm.setup import Setup

# Calls of a store that wait beside each other, whatever the number of threads that code: two puts at a time of 60 ms
# each would be 33 a second. What they hold is bounded by `max_pending_gb`, and by `LOADERS` times two batches of
# `fetched_together`.
_WRITES, _FETCHES = 16, 16
# What to expect before anything is measured: bytes per second of tiers, and tokens of parts that are decoded.
_RATES, _REMOTE = {"memory": 1e9, "disk": 3e8, "decoding": 1e4}, 5e7


class WorkerPools:
    """The threads of a worker. A thread that waits for a store is replaced when the store hangs.

    No pool here is one of `concurrent.futures`: where the system refuses a thread, its `submit` raises, and the job
    runs later all the same, when its pages may be those of another request.

    Attributes:
        loaders: one load each, most of which wait for the store.
        fetchers: read from the store.
        coders: open and decode blobs.
        encoders: encode copies of pages.
        writers: write to the store.
        decoding: held by the loads whose entries are being decoded, at most as many as there are coders.

    Args:
        threads: that code.
        patience: seconds after which a job hangs.
        store_niceness: of the threads that store.
    """

    def __init__(self, threads: int, patience: float, store_niceness: int = 0) -> None:
        self._cores: frozenset[int] = frozenset()

        def pool(count: int, name: str, niceness: int = 0) -> ThreadPool:
            def begin() -> None:
                move_to(self._cores)
                give_way(niceness)
                # OpenMP threads of its own would stay. As soon as a process has more of GNU's than cores, all of them
                # sleep while they wait for each other, and no longer spin, also those of an engine in this process: a
                # step of vLLM that generates with SmolLM2-135M on two cores takes 35 to 45 ms then, in place of 25.
                compute_alone()

            return ThreadPool(count, f"cuvee-{name}", patience, begin=begin)

        self.loaders = pool(LOADERS, "load")
        self.encoders = pool(threads, "encode", store_niceness)
        self.writers = pool(_WRITES, "write", store_niceness)
        self.fetchers = pool(_FETCHES, "fetch")
        self.coders = pool(threads, "decode")
        self.decoding = threading.BoundedSemaphore(threads)

    def use_free_cores(self) -> None:
        """Run threads that start from now on beside the cores to which the engine is bound."""
        self._cores = free_cores()


class WorkerState:
    """What loads, blends and saves of one rank share.

    Attributes:
        rank: tensor-parallel rank.
        alone: whether no other rank computes with this one.
        chunk, block: tokens per chunk, and per block of the engine.
        timeout: seconds after which a load, or a call of the store, is given up.
        codec: of this rank.
        keys: of the rank's entries.
        stores: whether this rank stores; if not, another one stores the same.
        store: read and written.
        recorder: figures, drained into the reports.
        left: share of a device's memory that the engine leaves free.
        parts: most parts that an entry has; 1: entries are whole blobs.
        sizes: expected bytes per token of each part.
        rates: of these bytes per second of tiers, and tokens per second of "decoding".
        lock: guards `report`, `closed` and the tables of the tasks.
        progress: notified when a load is over or placed.
        report: what happened since the last report.
        blocks: tokens per block of each group of layers.
        windows: of each group of layers, how many tokens the engine keeps; None: all.
        fails_whole: whether a load that fails in part fails as a whole (`Setup.loads_in_part`).
        bytes_per_token: of the pages and a drafter's, uncompressed.
        bytes_per_state: of all recurrent layers, uncompressed.
        coded: the engine's pages; None: there are none yet, or the engine sleeps.
        drafts: the pages of a drafter's layers; None: there are none, or they have no name yet.
        closed: nothing is admitted any more.
        stale: why nothing is loaded or stored: the scheduler's names stand for other "weights", or for another
            "profile" or other secrets; empty: they do not.
        states: what recurrent layers hold; None: there are none, or the engine sleeps.
    """

    def __init__(self, setup: Setup, rank: int, codec: Codec, store: Store, recorder: Recorder) -> None:
        options = setup.options
        self.rank = rank
        self.alone = setup.alone
        self.chunk, self.block = options.chunk_tokens, setup.block_tokens
        self.timeout = options.load_timeout
        self.codec = codec
        self.keys = EntryKeys(codec.key_ids, setup.holder(rank))
        self.stores = setup.holder(rank) == rank
        self.store = store
        self.recorder = recorder
        self.left = setup.left
        self.parts = 1 + codec.refinements
        self.sizes = expected_sizes(codec)
        self.rates = RecentRates(_RATES, _REMOTE)
        self.lock = threading.Lock()
        self.progress = threading.Condition(self.lock)
        self.report = Report()
        self.closed = False
        self.stale = ""
        self.blocks, self.windows, self.fails_whole = setup.blocks, setup.windows, not setup.loads_in_part
        self.coded: CodedPages | None = None
        self._drafts: DraftPages | None = None
        self.states: StatePages | None = None
        self.bytes_per_token = 0
        self.bytes_per_state = sum(layer.nbytes for layer in setup.recurrent)
        self._groups = setup.groups
        self._recurrent = {number for number, group in enumerate(setup.groups) if group.recurrent}
        # An fp8 cache is coded as something else than it holds.
        self._layout = None if setup.pages is None else replace(codec.profile.layout, dtype=setup.layout.dtype)

    def attach(
        self, cache: PagedCache, coders: ThreadPool, drafts: DraftPages | None = None, states: StatePages | None = None
    ) -> None:
        """Use these pages, and these states of recurrent layers."""
        self._drafts, self.states = drafts, states
        self.coded = CodedPages(cache, self._groups, self._layout or cache.layout, self.codec, coders)
        self.bytes_per_token = self.coded.bytes_per_token + (0 if drafts is None else drafts.bytes_per_token)

    def detach(self) -> None:
        """Forget the pages."""
        self.coded = self._drafts = self.states = None

    @property
    def drafts(self) -> DraftPages | None:
        """The pages of a drafter's layers."""
        return self._drafts if self._drafts is not None and self._drafts.named else None

    @property
    def pages(self) -> CodedPages:
        """The engine's pages.

        Raises:
            RuntimeError: there are none: not yet, or the engine sleeps.
        """
        if self.coded is None:
            raise RuntimeError("no pages are attached")
        return self.coded

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.pages.cache.device

    @property
    def state_pages(self) -> StatePages:
        """The engine's states.

        Raises:
            RuntimeError: there are none: not yet, or the engine sleeps.
        """
        if self.states is None:
            raise RuntimeError("no states are attached")
        return self.states

    def nbytes(self, entry: Entry, part: int) -> float:
        """Return the expected size of a part."""
        return entry.tokens * self.sizes[part]

    def slots(self, entry: Entry, placed: range | None = None) -> list[torch.Tensor]:
        """Return the slot of each of an entry's tokens in every group of layers, int64 `[T]`; recurrent layers have
        none.

        Args:
            entry: with its blocks.
            placed: positions of the tokens that have slots, all others get `NOWHERE`; None: all have slots. Where the
                engine keeps no block before a window, tokens get `NOWHERE` as well.
        """
        placed = range(entry.start, entry.end) if placed is None else placed
        each = []
        for number, (table, tokens, window) in enumerate(zip(entry.tables, self.blocks, self.windows, strict=True)):
            slots = torch.full((entry.tokens,), NOWHERE)
            if number in self._recurrent:
                each.append(slots)
                continue
            offset = torch.arange(placed.start, placed.stop) - entry.start // tokens * tokens
            blocks = torch.tensor(table, dtype=torch.int64)[offset // tokens]
            at = blocks * tokens + offset % tokens
            if window is not None:
                at[blocks == NULL_BLOCK] = NOWHERE
            slots[placed.start - entry.start : placed.stop - entry.start] = at
            each.append(slots)
        return each
