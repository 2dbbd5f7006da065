"""Learning on one rank: the KV of entries that are stored anyway --> sums --> pieces for the scheduler's side.

One thread of the lowest priority sums one entry at a time, and rests after each for so long that it takes at most
`learn_share` of a core. What is stored meanwhile is not waited for, so entries of many requests are summed, and at most
one copy of an entry is held. Once there are enough tokens, the sums travel in pieces, one per step, and are dropped.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.learning.running_moments import RunningMoments
from cuvee.codec.paged import PagedCache
from cuvee.codec.token_ids import NO_TOKEN
from cuvee.integrations.guard import Guard
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.learning import Learning
from cuvee.integrations.vllm.messages import Save, SumsPiece
from cuvee.integrations.vllm.metrics import Recorder

ENTRIES_PER_REQUEST = 4  # of one request that are summed at most: a profile is of many texts
PIECE_BYTES = 4 << 20  # what a step's report carries at most
_REMEMBERED = 1024  # requests


class TrafficSums:
    """The sums of one rank. Thread-safe.

    Args:
        learning: what is learned.
        rank: tensor-parallel rank.
        options: of the connector.
        recorder: figures.
        guard: contains errors.
        pool: the thread that sums.
        clock: monotonic, in seconds.
        cpu_clock: CPU time of the calling thread, in seconds.
    """

    def __init__(
        self,
        learning: Learning,
        rank: int,
        options: Options,
        recorder: Recorder,
        guard: Guard,
        pool: ThreadPool,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._rank, self._options = rank, options
        self._recorder, self._guard, self._pool = recorder, guard, pool
        self._clock, self._cpu_clock = clock, cpu_clock
        self._embedding = learning.embedding
        self._lock = threading.Lock()
        # The lock guards these.
        self._sums: RunningMoments | None = learning.new_sums(rank)
        self._goal = max(options.learn_tokens, self._sums.needed)
        self._busy = False
        self._rested = clock()  # when the next entry may begin
        self._taken: OrderedDict[str, int] = OrderedDict()  # entries of each request
        self._pieces: deque[SumsPiece] = deque()

    def offer(self, save: Save, copy: PagedCache, slots: torch.Tensor) -> None:
        """Sum an entry whose tokens are at `slots` of a copy, if one is wanted now. Waits for nothing but a copy."""
        with self._lock:
            if self._sums is None or self._busy or self._clock() < self._rested or not self._wanted(save):
                return
            self._busy = True
        with self._guard("learn", self._free):
            chunk = copy.read(slots, save.entry.start)
            self._pool.submit(self._add, chunk, save)

    def take_piece(self) -> SumsPiece | None:
        """Return the next piece of the finished sums."""
        with self._lock:
            return self._pieces.popleft() if self._pieces else None

    def _wanted(self, save: Save) -> bool:
        """Return whether an entry may be learned from, and count it for its request; the lock is held."""
        ids, request = save.token_ids, save.request
        if save.entry.kind == "segment" or not request or ids is None or NO_TOKEN in ids:
            return False
        if save.tenant != self._options.tenant and not self._options.learn_tenants:
            return False
        taken = self._taken.get(request, 0)
        if taken >= ENTRIES_PER_REQUEST:
            return False
        self._taken[request] = taken + 1
        if len(self._taken) > _REMEMBERED:
            self._taken.popitem(last=False)
        return True

    def _free(self) -> None:
        with self._lock:
            self._busy = False

    def _add(self, chunk: KVChunk, save: Save) -> None:
        with self._guard("learn"):
            self._try_to_add(chunk, save)
        self._free()

    def _try_to_add(self, chunk: KVChunk, save: Save) -> None:
        sums, begun = self._sums, self._cpu_clock()
        if sums is None:
            return
        before, threads = sums.tokens, torch.get_num_threads()
        try:
            torch.set_num_threads(1)  # `learn_share` counts this thread alone
            embedded = None if self._embedding is None else self._embedding[torch.tensor(save.token_ids)]
            sums.add(chunk, embedded)
        finally:
            torch.set_num_threads(threads)  # a new thread inherits the number that was set last
            spent = self._cpu_clock() - begun
            with self._lock:
                self._rested = self._clock() + spent * (1 / self._options.learn_share - 1)
        self._recorder.count("learning_seconds", spent)
        self._recorder.count("learned_tokens", sums.tokens - before)
        if sums.tokens >= self._goal:
            data = sums.to_bytes()
            count = -(-len(data) // PIECE_BYTES)
            cut = partial(SumsPiece, self._rank)
            with self._lock:
                self._sums = None
                self._pieces.extend(
                    cut(number, count, data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
                    for number in range(count)
                )
