"""Lookups of prefixes: which chunks of a prompt the store has, and which tail after them.

A lookup prefers the whole chunk, then the longest tail. So a chunk or a longer tail supersedes a tail by being found
first; the shorter one is not deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import CancelledError, wait
from dataclasses import replace
from functools import partial
from typing import Any

from cuvee.integrations.vllm.lookups import Lookup, Lookups
from cuvee.integrations.vllm.scheduler_events import SchedulerEvents
from cuvee.integrations.vllm.scheduler_state import NOTHING, Found, KnownEntries, SchedulerState, Tracked
from cuvee.naming.identity import PrefixChain

logger = logging.getLogger(__name__)

_LOOKUP_AGE = 10.0  # seconds after which the store is asked again: entries may have been evicted


class PrefixLookups:
    """Asks the store what it has of requests, in the background.

    Args:
        state: of the scheduler's side.
        lookups: asks the store.
        known: learns what is there and what is not.
        events: learns what is gone.
    """

    def __init__(self, state: SchedulerState, lookups: Lookups, known: KnownEntries, events: SchedulerEvents) -> None:
        self._state = state
        self._lookups = lookups
        self._known = known
        self._events = events
        self._distrusted = -1.0  # lookups from before this time are not believed

    def distrust(self) -> None:
        """Believe no lookup from before now, because a load failed."""
        self._distrusted = self._state.clock()

    def worth_asking(self, request: Any, computed: int) -> bool:
        """Return whether enough tokens after the first `computed` could be found."""
        state = self._state
        could = state.usable(request.num_tokens) - computed
        return state.loads and not request.skip_reading_prefix_cache and could >= state.options.least_tokens

    def ask(self, tracked: Tracked) -> Lookup[Found]:
        """Send the question what the store has of a request's tokens."""
        tokens = tracked.request.num_tokens
        digests = self._whole(tracked, tokens)
        find = partial(self._find, tracked.chain, tracked.request.all_token_ids, tokens, digests)
        tracked.lookup = lookup = self._lookups.begin(tracked.tenant, find, NOTHING, tokens)
        tracked.settled = False
        return lookup

    def look_up(self, tracked: Tracked) -> Found | None:
        """Return what the store has of a request's tokens; None: not known yet."""
        now = self._state.clock()
        lookup = tracked.lookup
        stale = lookup is not None and (
            lookup.tokens != tracked.request.num_tokens
            or now - lookup.asked > _LOOKUP_AGE
            or lookup.asked <= self._distrusted
        )
        if lookup is None or (stale and lookup.answer.done()):
            lookup = self.ask(tracked)
        with self._state.waiting() as patience:
            late = not wait([lookup.answer], patience).done
        if late:
            if now - lookup.asked <= self._state.options.lookup_timeout:
                return None
            self._state.overdue()
            found = lookup.settle()
            if not found.chunks and not found.tail:
                tracked.refused = tracked.settled = True
                self._state.recorder.count("lookups", label="timeout")
                return NOTHING
        else:
            found = lookup.answer.result()
        if lookup.tokens != tracked.request.num_tokens:  # this question has no answer yet; ask again once it has
            return None
        whole = self._whole(tracked, lookup.tokens)
        self._events.gone(found.missing)
        for digest in (*whole[found.chunks :], *found.absent):
            self._known.forget(digest)  # it is absent, or not known to be there
        for digest in whole[: found.chunks] + [found.digest] * bool(found.tail) + [found.state] * bool(found.stated):
            self._known.check(digest)
        return found

    def _whole(self, tracked: Tracked, tokens: int) -> list[bytes]:
        """Return the digests of the useful whole chunks among a request's first tokens; of the last one, perhaps only
        a part is used.
        """
        state = self._state
        limit = min(state.addressed(tokens) // state.chunk, -(-state.usable(tokens) // state.chunk))
        return tracked.chain.digests(tracked.request.all_token_ids, limit)

    def _tail_sizes(self, tokens: int, chunk: int) -> list[int]:
        """Return the sizes of tails of this chunk that are useful to a prompt of this many tokens, longest first."""
        state = self._state
        start = chunk * state.chunk
        if start >= state.usable(tokens):
            return []
        most = min(state.chunk, state.addressed(tokens) - start + 1)
        return list(range(state.block, most, state.block))[::-1]

    def _find(
        self, chain: PrefixChain, ids: Sequence[int], tokens: int, digests: Sequence[bytes], lookup: Lookup[Found]
    ) -> Found:
        """Find what every rank has of the first `tokens` of `ids`, whose whole chunks have these digests.

        All tails of a chunk are asked for at once: those after the prompt's last whole chunk together with the last
        whole chunks, those of a missing chunk once it is known to be missing. Finds nothing if the store fails, and
        counts the failure.
        """
        begun, size, found = self._state.clock(), self._lookups.batch, NOTHING
        try:
            for first in range(0, max(len(digests), 1), size):
                batch = digests[first : first + size]
                chunk = first + len(batch)
                sizes = self._tail_sizes(tokens, chunk) if chunk == len(digests) else []
                tails = chain.tails(ids, chunk, sizes)
                there = lookup.contains([*batch, *tails], Found(first))
                if not all(there[: len(batch)]):
                    chunk = first + there.index(False)
                    sizes = self._tail_sizes(tokens, chunk)
                    tails = chain.tails(ids, chunk, sizes)
                    there = lookup.contains(tails, Found(chunk, missing=digests[chunk]))
                    found = replace(_longest(chunk, sizes, tails, there), missing=digests[chunk])
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
        places = [*range(end, chunks * state.chunk, -state.block), *(at * state.chunk for at in range(chunks, 0, -1))]
        size = self._lookups.batch
        for first in range(0, len(places), size):
            batch = places[first : first + size]
            names = [state.state_after(chain, ids, at) for at in batch]
            there = lookup.contains(names, found)
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
