"""What the store has of a prompt: which chunks, which tail after them, and which state.

A lookup prefers the whole chunk, then the longest tail. So a chunk or a longer tail supersedes a tail by being found
first; the shorter one is not deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import replace

from cuvee.integrations.vllm.scheduler.lookups import Lookup
from cuvee.integrations.vllm.scheduler.request_record import NOTHING, Found
from cuvee.integrations.vllm.scheduler.state import SchedulerState
from cuvee.naming.identity import PrefixChain

logger = logging.getLogger(__name__)


class PrefixSearch:
    """Finds what the store has of prompts. Used by the threads of lookups.

    Args:
        state: of the scheduler's side.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def _tail_sizes(self, tokens: int, chunk: int) -> list[int]:
        """Return the sizes of tails of this chunk that are useful to a prompt of this many tokens, longest first."""
        state = self._state
        start = chunk * state.chunk
        if start >= state.usable(tokens):
            return []
        most = min(state.chunk, state.addressed(tokens) - start + 1)
        return list(range(state.block, most, state.block))[::-1]

    def find(
        self, chain: PrefixChain, ids: Sequence[int], tokens: int, digests: Sequence[bytes], lookup: Lookup[Found]
    ) -> Found:
        """Find what every rank has of the first `tokens` of `ids`, whose whole chunks have these digests.

        All tails of a chunk are asked for at once: those after the prompt's last whole chunk together with the last
        whole chunks, those of a missing chunk once it is known to be missing. Finds nothing if the store fails, and
        counts the failure.
        """
        begun, size, found = self._state.clock(), lookup.batch, NOTHING
        try:
            for first in range(0, max(len(digests), 1), size):
                batch = digests[first : first + size]
                chunk = first + len(batch)
                sizes = self._tail_sizes(tokens, chunk) if chunk == len(digests) else []
                tails = chain.tails(ids, chunk, sizes)
                there = lookup.contains([*batch, *tails], Found(first), len(tails))
                if not all(there[: len(batch)]):
                    chunk = first + there.index(False)
                    sizes = self._tail_sizes(tokens, chunk)
                    tails = chain.tails(ids, chunk, sizes)
                    there = lookup.contains(tails, Found(chunk), len(tails))
                    found = _longest(chunk, sizes, tails, there)
                    break
                found = _longest(chunk, sizes, tails, there[len(batch) :])
            if self._state.recurrent:
                found = self._with_state(chain, ids, tokens, found, lookup)
        except CancelledError:
            raise
        except Exception:
            logger.exception("cuvee: a lookup failed; its request is computed")
            self._state.recorder.count("failures", label="lookup")
            found = NOTHING
        self._state.recorder.count("lookup_seconds", self._state.clock() - begun)
        return found

    def _with_state(
        self, chain: PrefixChain, ids: Sequence[int], tokens: int, found: Found, lookup: Lookup[Found]
    ) -> Found:
        """Return what was found with the last state in it. The engine keeps states where its steps end: at the last
        block of a prompt, and at some ends of chunks.
        """
        state = self._state
        end = min(found.chunks * state.chunk + found.tail, state.usable(tokens))
        chunks = end // state.chunk
        ends = [*range(end, chunks * state.chunk, -state.block), *(at * state.chunk for at in range(chunks, 0, -1))]
        size = lookup.batch
        for first in range(0, len(ends), size):
            batch = ends[first : first + size]
            names = [state.state_after(chain, ids, at) for at in batch]
            there = lookup.contains(names, found, len(names))
            at = there.index(True) if any(there) else len(there)
            found = replace(found, absent=(*found.absent, *names[:at]))
            if at < len(there):
                return replace(found, stated=batch[at], state=names[at])
        return found


def _longest(chunk: int, sizes: Sequence[int], tails: Sequence[bytes], there: Sequence[bool]) -> Found:
    """Return what is there after `chunk` whole chunks: the first present tail; tails are given longest first."""
    at = next((at for at, found in enumerate(there) if found), len(there))
    absent = tuple(digest for digest, found in zip(tails, there, strict=True) if not found)
    return Found(chunk, sizes[at], tails[at], absent) if at < len(there) else Found(chunk, absent=absent)
