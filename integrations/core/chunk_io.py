"""The pipeline under all adapters: chunks of an engine's pages to entries of a store, and back.

    pages ──encode──> blobs ──> entries           a batch at once; chunk by chunk if that fails
    names ──fetch_ahead──> entries                some at a time; the next ones while these are decoded
    entries ──restore──> pages                    opened, then decoded, in order, up to the first that fails

An entry is a blob, or a base and its refinement. One whose refinement is damaged is restored without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol, TypeVar

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.coding.open_blob import Bytes, Expected, OpenBlob
from cuvee.codec.errors import CorruptError, CuveeError
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.integrations.stores import Store
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.naming.part_keys import MAX_PARTS, part_key

logger = logging.getLogger(__name__)

T = TypeVar("T")
N = TypeVar("N")
A = TypeVar("A")

BATCH = 8  # entries that are fetched, or chunks that are encoded, at a time
_FETCHED = 1 << 27  # bytes that are fetched at a time, if entries are as large as expected
_BITS = 1.0  # of a value in a lossy part, where the profile does not say
_SAVED_BITS = 5.0  # of a value, without loss


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk to encode.

    Attributes:
        slots: int64 `[T]`, where its tokens are in the cache.
        start: position of its first token.
        token_ids: of its tokens, as in `Codec.encode`; None: not known.
        following: number of tokens that are known to follow, as in `KVChunk`.
        bound: what its tag covers besides the blob (`EntryKeys.bound_to`).
    """

    slots: torch.Tensor
    start: int
    token_ids: object
    following: int
    bound: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry as the store has it.

    Attributes:
        parts: its blob, or its base and refinements.
        bound: what its tag covers besides the blob.
        expected: what it must hold.
        name: of the entry in messages.
    """

    parts: Sequence[Bytes]
    bound: bytes
    expected: Expected
    name: str


class Writer(Protocol):
    """Writes a blob to pages that `Codec.decode_paged` cannot address."""

    def __call__(self, blob: OpenBlob, slots: Sequence[torch.Tensor], start: int | None, /) -> None:
        """Decode a blob to its slots of each group of layers, from this position on.

        Raises:
            CuveeError: the blob is damaged.
        """
        ...


class ChunkIO:
    """Codes chunks of one rank. Safe to call from several threads.

    Args:
        codec: of the rank.
        coders: threads that open, and on the CPU decode, several entries at once.
    """

    def __init__(self, codec: Codec, coders: ThreadPool) -> None:
        self.codec = codec
        self._coders = coders

    def encode(self, cache: PagedCache, chunks: Sequence[Chunk]) -> list[tuple[bytes, ...] | Exception]:
        """Return the parts of each chunk, or why it cannot be encoded. Works on this thread, and its stream."""
        try:
            paged = PagedChunks(
                cache, [chunk.slots for chunk in chunks], [chunk.start for chunk in chunks],
                tokens=[chunk.token_ids for chunk in chunks], following=[chunk.following for chunk in chunks],
            )  # fmt: skip
            return [*self.codec.encode_parts(paged, associated_data=[chunk.bound for chunk in chunks])]
        except Exception as error:
            if len(chunks) == 1:
                return [error]
        return [outcome for chunk in chunks for outcome in self.encode(cache, [chunk])]  # tells which

    def restore(
        self,
        cache: PagedCache,
        entries: Sequence[Stored],
        slots: Sequence[Sequence[torch.Tensor]],
        starts: Sequence[int] | None = None,
        write: Writer | None = None,
    ) -> tuple[list[OpenBlob], CuveeError | None]:
        """Open entries and decode them into their slots: on a device on this thread's stream, on the CPU in threads.

        Args:
            cache: the engine's pages.
            entries: to restore, in order.
            slots: of each entry, int64 `[T]` on the cache's device; of each group of layers if there is a writer.
            starts: of each entry, the position that its first token gets; default: that at which it was encoded.
            write: in place of the codec.

        Returns:
            the blobs that were decoded, up to the first entry that failed, and the error of that one. Nothing writes to
            the pages any more.
        """
        blobs, problem = self.in_a_row(partial(self._open, entry) for entry in entries)
        several = [
            partial(self._decode, cache, entries[at], blob, slots[at], None if starts is None else starts[at], write)
            for at, blob in enumerate(blobs)
        ]
        if not self.codec.on_device(cache.device):
            done, damage = self.in_a_row(several)
            return done, damage or problem
        if blobs and write is None:
            sound = len(blobs)
            try:
                places = [at for (at,) in slots[:sound]]
                self.codec.decode_paged(blobs, cache, places, None if starts is None else starts[:sound]).check()
                return blobs, problem
            except CuveeError:
                pass  # one entry is damaged; decoding them one by one tells which
        done = []
        for work in several:  # on this thread's stream
            try:
                done.append(work())
            except CuveeError as error:
                return done, error
        return done, problem

    def _open(self, entry: Stored, most: int | None = None) -> OpenBlob:
        """Open an entry from as many of its parts as are sound, and `most` of them; decoding verifies the rest.

        Raises:
            CuveeError: the base belongs to another entry, is damaged, or has no valid tag.
        """
        for count in range(len(entry.parts) if most is None else most, 0, -1):
            base, *refinements = entry.parts[:count]
            bound, expected = entry.bound, entry.expected
            try:
                return self.codec.open(base, refinements=refinements, associated_data=bound, expected=expected)
            except CuveeError as error:
                if count > 1 and error.blames_blob:  # otherwise all parts are sound
                    logger.debug("cuvee: %s: a part is left out: %s", entry.name, error)
                elif isinstance(error, CorruptError):
                    raise CorruptError(f"{entry.name}: {error}") from error
                else:
                    raise
        raise ValueError("parts: must hold a base, got none")

    def _decode(
        self,
        cache: PagedCache,
        entry: Stored,
        blob: OpenBlob,
        slots: Sequence[torch.Tensor],
        start: int | None,
        write: Writer | None,
    ) -> OpenBlob:
        """Decode an entry from as many of its parts as are sound; return the blob of these."""
        while True:
            try:
                if write is not None:
                    write(blob, slots, start)
                else:
                    at = None if start is None else [start]
                    self.codec.decode_paged([blob], cache, slots, at).check()
                return blob
            except CuveeError as error:
                if not blob.refinements or not error.blames_blob:
                    raise
                blob = self._open(entry, len(blob.refinements))

    def in_a_row(self, works: Iterable[Callable[[], T]]) -> tuple[list[T], CuveeError | None]:
        """Return the results up to the first work that failed, and its error. All works have ended on return, and also
        when another error is raised.
        """
        jobs: list[Future[T]] = []
        try:
            jobs.extend(self._coders.submit(work) for work in works)
        finally:
            wait(jobs)  # in any case, since they write the engine's pages
        results: list[T] = []
        for job in jobs:
            try:
                results.append(job.result())
            except CuveeError as error:
                return results, error
        return results, None


def put_parts(store: Store, key: str, parts: Sequence[bytes]) -> int:
    """Store the parts of an entry; return how many were stored. A refinement is not written without its base. An older
    one that remains beside a new base does not fit it, so the codec refuses it.
    """
    for number, part in enumerate(parts):
        if not store.put(part_key(key, number), part):
            return number
    return len(parts)


def get_parts(store: Store, keys: Sequence[str], most: int) -> list[tuple[bytes, ...]]:
    """Return at most so many usable parts of each entry: its base, and its refinement if both are there."""
    blobs = store.get_many([part_key(key, number) for key in keys for number in range(most)])
    several = (blobs[at : at + most] for at in range(0, len(blobs), most))
    return [tuple(part for part in parts[: [*parts, None].index(None)] if part is not None) for parts in several]


def delete_parts(store: Store, key: str, first: int) -> bool:
    """Delete the parts of an entry from number `first` on; return whether any of them was there."""
    deleted = [store.delete(part_key(key, number)) for number in range(first, MAX_PARTS)]
    return any(deleted)


def expected_sizes(codec: Codec) -> list[float]:
    """Return the expected bytes per token of each part of an entry."""
    values = sum(layer.kv_heads * (layer.head_dim + layer.value_dim) for layer in codec.profile.layout.layers)
    bits = [part.bits for part in codec.settings.expected_parts()]  # of a base, and of both parts
    guess = 8 * codec.profile.layout.torch_dtype.itemsize - _SAVED_BITS if codec.lossless else _BITS
    known = [guess * number if None in bits else each or 0.0 for number, each in enumerate(bits, 1)]
    return [max(after - before, 0.01) * values / 8 for before, after in pairwise((0.0, *known))]


def fetched_together(nbytes: float, most: int = BATCH) -> int:
    """Return how many entries of this size are fetched at a time, so that what is fetched and not decoded yet, which is
    twice that for every load, stays small.
    """
    return max(min(int(_FETCHED / nbytes), most), 1)


def fetch_ahead(
    pool: ThreadPool,
    ask: Callable[[Sequence[N]], T],
    names: Sequence[N],
    answer: Callable[[Future[T]], A],
    together: int = BATCH,
) -> Iterator[tuple[Sequence[N], A]]:
    """Yield names and what the store says of them, some at a time; the next ones are asked for meanwhile.

    Args:
        pool: threads that wait for the store.
        ask: asks the store.
        names: what to ask for.
        answer: waits for an answer, as long as the caller likes; what it raises ends this.
        together: names that are asked for at a time.
    """
    batches = [names[first : first + together] for first in range(0, len(names), together)]
    following = [pool.submit(ask, batch) for batch in batches[:1]]
    for number, batch in enumerate(batches):
        found = answer(following.pop())
        following += [pool.submit(ask, each) for each in batches[number + 1 : number + 2]]
        yield batch, found
