"""`SaveQueue`: entries that were copied out of the engine's pages and wait to be encoded, the most useful first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass

from cuvee.codec.paged import PagedCache
from cuvee.integrations.vllm.messages import Save
from cuvee.kernels.devices import Mark

_RANKS = {"chunk": 0, "segment": 1, "tail": 2}


@dataclass(frozen=True, slots=True, eq=False)
class CopiedSave:
    """An entry to store, with its copy.

    Attributes:
        save: what to store.
        copy: its tokens, in a cache of one block.
        ready: passed once the copy is made.
    """

    save: Save
    copy: PagedCache
    ready: Mark


def urgency(save: Save) -> tuple[int, int]:
    """Return a key that sorts entries in the order in which they are encoded.

    Chunks come first, in the order of their prefix: a chunk is of no use without the chunks before it, and the first
    ones are shared by the most prompts. Segments follow, and tails, which hold the fewest tokens and may be superseded.
    """
    return _RANKS[save.entry.kind], save.entry.start if save.entry.kind == "chunk" else 0


class SaveQueue:
    """Entries in the order in which they are to be encoded; those of equal urgency in the order of their arrival.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[int, int], int, CopiedSave]] = []
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, copied: CopiedSave) -> None:
        """Add an entry."""
        self._arrived += 1
        insort(self._waiting, (urgency(copied.save), self._arrived, copied))

    def take(self) -> CopiedSave:
        """Return and remove the most urgent entry.

        Raises:
            IndexError: there is none.
        """
        return self._waiting.pop(0)[2]

    def droppable(self) -> list[Save]:
        """Return the tails, the one that is to be dropped first in front: the last one to be encoded."""
        return [save for save in reversed(self._saves()) if save.entry.kind == "tail"]

    def superseded_by(self, save: Save) -> list[Save]:
        """Return the tails whose tokens a whole chunk holds as well: those of the same request and the same chunk."""
        if save.entry.kind != "chunk" or not save.request:
            return []
        place = save.tenant, save.request, save.entry.start
        tails = self.droppable()
        return [tail for tail in tails if (tail.tenant, tail.request, tail.entry.start) == place]

    def remove(self, digests: Collection[bytes]) -> None:
        """Remove entries."""
        self._waiting = [each for each in self._waiting if each[2].save.entry.digest not in digests]

    def _saves(self) -> list[Save]:
        return [copied.save for _, _, copied in self._waiting]
