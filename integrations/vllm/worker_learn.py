"""Learning on one rank: the KV of entries that are stored anyway --> sums --> pieces for the scheduler's side.

One thread of the lowest priority sums one entry after the other, and rests after each for so long that it takes at most
`learn_share` of a core. Copies that wait for it are bounded; while there are too many, entries are stored without being
summed, so what is summed is of many requests. Once there are enough tokens, the sums travel in pieces, one per step.
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
WAITING_BYTES = 64 << 20  # of copies; a larger one waits alone
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
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._rank, self._options = rank, options
        self._recorder, self._guard, self._pool = recorder, guard, pool
        self._cpu_clock = cpu_clock
        self._embedding = learning.embedding
        self._closing = threading.Event()
        self._lock = threading.Lock()
        # The lock guards these.
        self._sums: RunningMoments | None = learning.new_sums(rank)
        self._goal = max(options.learn_tokens, self._sums.needed)
        self._waiting = 0  # bytes of copies
        self._taken: OrderedDict[str, int] = OrderedDict()  # entries of each request
        self._pieces: deque[SumsPiece] = deque()

    def offer(self, save: Save, copy: PagedCache, slots: torch.Tensor) -> None:
        """Sum an entry whose tokens are at `slots` of a copy, later, if another one is wanted. Takes a copy of it."""
        size = save.entry.tokens * copy.layout.bytes_per_token
        with self._lock:
            full = self._waiting > 0 and self._waiting + size > WAITING_BYTES
            if self._sums is None or full or not self._wanted(save):
                return
            self._waiting += size
        with self._guard("learn", partial(self._free, size)):
            chunk = copy.read(slots, save.entry.start)
            self._pool.submit(self._add, chunk, save, size)

    def close(self) -> None:
        """Sum nothing more: what is not finished is lost."""
        self._closing.set()
        self._pool.dismiss(0, cancel=True)

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

    def _free(self, size: int) -> None:
        with self._lock:
            self._waiting -= size

    def _add(self, chunk: KVChunk, save: Save, size: int) -> None:
        begun = self._cpu_clock()
        with self._guard("learn"):
            self._try_to_add(chunk, save)
        self._free(size)
        # PyTorch's threads share in the work, and their time is not this thread's.
        spent = (self._cpu_clock() - begun) * torch.get_num_threads()
        self._recorder.count("learning_seconds", spent)
        self._closing.wait(spent / self._options.learn_share - spent)

    def _try_to_add(self, chunk: KVChunk, save: Save) -> None:
        sums = self._sums
        if sums is None or self._closing.is_set():
            return
        before = sums.tokens
        sums.add(chunk, None if self._embedding is None else self._embedding[torch.tensor(save.token_ids)])
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
