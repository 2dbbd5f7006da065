"""Saves: which chunks, tails and segments of a request are new and complete, and so are to be stored.

A tail has a key of its own, made from the chunks before it and its tokens. Only two tails of a request are stored: one
where its prompt ends, and one where the request ends, because a tail for every block would write each token of a chunk
many times. A tail serves requests that diverge from there: the same prompt again, a regenerated answer, a chat
template that drops the reasoning of earlier answers. These requests may reach another replica, so a tail is not
deleted when it is superseded. The store evicts unused tails first.

What a chunk adds to a tail that was loaded is coded together with the decoded tail. That is exact at lossless. A
learned profile codes each token by itself and finds the same numbers again: the squared error grows by 2 to 3% once,
and then no more.

What recurrent layers hold is an entry of its own, because the engine keeps it at few places: a chunk that one request
has stored without it may be found by another one that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuvee.codec.token_ids import NO_TOKEN
from cuvee.integrations.vllm.blending.planning import BlendPlanner
from cuvee.integrations.vllm.messages import Entry, Save
from cuvee.integrations.vllm.pages.layer_groups import NULL_BLOCK
from cuvee.integrations.vllm.scheduler.request_record import RequestRecord
from cuvee.integrations.vllm.scheduler.state import RecentEntries, SchedulerState


class SchedulerSaves:
    """Decides what to store.

    Args:
        state: of the scheduler's side.
        recent: entries that need not be stored again.
        planner: knows the segments to store.
    """

    def __init__(self, state: SchedulerState, recent: RecentEntries, planner: BlendPlanner) -> None:
        self._state = state
        self._recent = recent
        self._planner = planner
        self._last: list[Save] = []  # of requests that ended since the last step was planned

    def completed(self, record: RequestRecord, before: int, after: int, block_state: Any) -> list[Save]:
        """Return the chunks, segments and states of a request that a step completes, and the prompt's tail if it
        computes the prompt's end.

        Args:
            record: the request.
            before: first position that the step computes.
            after: position after the last one.
            block_state: the engine's table of blocks.
        """
        request, chunk = record.request, self._state.chunk
        self._leave_out(record, before, after)
        others = self._segments(record, after, block_state) + self._states(record, after, block_state)
        done = min(after, self._storable(record)) // chunk
        first = min(record.saved, before // chunk)  # fewer than saved: a load failed, or the request was preempted
        prompt_ends = before < request.num_prompt_tokens <= after
        if done <= first and not prompt_ends:
            return others
        digests = record.chain.digests(request.all_token_ids, max(done, first))
        record.saved = max(done, first)
        wanted = [at for at in range(first, done) if not self._recent.check(digests[at])]
        if not wanted and not prompt_ends:
            return others
        tables = block_state.get_block_ids(request.request_id)
        saves = [self._save(record, Entry("chunk", digests[at], at * chunk, chunk), tables) for at in wanted]
        end = min(request.num_prompt_tokens, self._storable(record))
        return self._held(saves + (self._tail(record, end, tables) if prompt_ends else [])) + others

    def end(self, record: RequestRecord, tables: Sequence[Sequence[int]]) -> None:
        """Store the tail of a request that has ended with the next step; its blocks are in these tables."""
        self._last += self._held(self._last_tail(record, tables))

    def take_last(self) -> list[Save]:
        """Return and forget the tails of requests that have ended."""
        last, self._last = self._last, []
        return last

    def unchanged(self, saves: Sequence[Save], output: Any) -> list[Save]:
        """Return the saves whose blocks the engine does not overwrite before the step, with zeros or copies of other
        blocks.
        """
        overwritten = set(output.new_block_ids_to_zero or ())
        overwritten.update(block for copied in output.kv_cache_block_copies or () for block in copied)
        kept = [save for save in saves if all(map(overwritten.isdisjoint, save.entry.tables))]
        lost = [save for save in saves if save not in kept]
        self.forget(lost)
        self._state.not_stored("overwritten", sum(save.entry.tokens for save in lost))
        return kept

    def forget(self, saves: Sequence[Save]) -> None:
        """Take entries that were to be stored for not stored."""
        for save in saves:
            self._recent.forget(save.entry.digest)

    def reset(self) -> None:
        """Forget what is stored and what was to be."""
        self._recent.clear()
        self._last.clear()

    def _leave_out(self, record: RequestRecord, before: int, after: int) -> None:
        """Count what a step computes and cannot be stored."""
        exact = None if record.segmented is None else record.segmented.exact
        last = self._state.addressed(after)
        end = last if exact is None else min(last, exact)
        self._state.not_stored("positions", after - max(last, before))
        self._state.not_stored("blended", last - max(end, before))

    def _segments(self, record: RequestRecord, after: int, block_state: Any) -> list[Save]:
        """Return a prompt's new segments whose last token this step or an earlier one computes."""
        segmented = record.segmented
        if segmented is None:
            return []
        harvest = self._planner.harvest(segmented, self._state.addressed(after))
        new = [at for at in harvest if not self._recent.check(segmented.digests[at])]
        if not new:
            return []
        tables = block_state.get_block_ids(record.request.request_id)
        return [self._save(record, segmented.entry(at), tables) for at in new]

    def _states(self, record: RequestRecord, after: int, block_state: Any) -> list[Save]:
        """Return the states that the engine holds after a step which ends `after` so many tokens.

        It keeps a state where the step ends, and one at the last end of a block before that, which the step before has
        left or this one has written beside. Those at the ends of chunks are stored, and that at the prompt's last
        block: more than one in each chunk would outweigh the chunks.
        """
        state, request = self._state, record.request
        saves: list[Save] = []
        if not state.recurrent:
            return []
        tables = block_state.get_block_ids(request.request_id)
        for end in sorted({(after - 1) // state.block * state.block, after // state.block * state.block}):
            at_prompts_end = end == state.usable(request.num_prompt_tokens)
            if end <= record.stated or not (at_prompts_end or end % state.chunk == 0) or end > self._storable(record):
                continue
            record.stated = end
            if any(tables[group][end // state.blocks[group] - 1] == NULL_BLOCK for group in state.recurrent):
                continue
            record.chain.digests(request.all_token_ids, end // state.chunk)
            digest = state.state_after(record.chain, request.all_token_ids, end)
            if not self._recent.check(digest):
                entry = Entry("state", digest, end - state.block, state.block)
                saves.append(Save(record.tenant, entry.within(tables, state.blocks), None, 0, record.adapter))
        return saves

    def _held(self, saves: Sequence[Save]) -> list[Save]:
        """Return the saves whose tokens are in the engine's blocks in every layer.

        Of a prefix that the engine has found in its own cache, layers with a window hold the end alone.
        """
        dropped = [save for save in saves if self._state.has_dropped(save.entry)]
        if not dropped:
            return list(saves)
        self.forget(dropped)
        self._state.recorder.count("stores_skipped", len(dropped), "window")
        return [save for save in saves if save not in dropped]

    def _last_tail(self, record: RequestRecord, tables: Sequence[Sequence[int]]) -> list[Save]:
        """Return the tail of a request that has ended."""
        request = record.request
        # A preempted request has no blocks, and none of its tokens count as computed. The last token's KV is left out:
        # where the engine plans ahead it may be there, but the connector is not told.
        held = len(tables[0]) * self._state.block
        end = min(record.computed, request.num_computed_tokens, request.num_tokens - 1, held)
        return self._tail(record, min(end, self._storable(record)), tables)

    def _tail(self, record: RequestRecord, end: int, tables: Sequence[Sequence[int]]) -> list[Save]:
        """Return the tail of a request's first `end` tokens, which have KV in these blocks: the whole blocks after the
        last whole chunk. Empty if it was stored a moment ago, or has too few tokens ever to be loaded.
        """
        state = self._state
        chunk, tokens = divmod(end // state.block * state.block, state.chunk)
        start = chunk * state.chunk
        if not tokens or start + tokens < state.options.least_tokens:
            return []
        ids = record.request.all_token_ids
        record.chain.digests(ids, chunk)
        (digest,) = record.chain.tails(ids, chunk, [tokens])
        if self._recent.check(digest):
            return []
        return [self._save(record, Entry("tail", digest, start, tokens), tables)]

    def _save(self, record: RequestRecord, entry: Entry, tables: Sequence[Sequence[int]]) -> Save:
        """Return the order to store an entry out of its request's blocks, with its tokens if they are wanted."""
        request, entry = record.request, entry.within(tables, self._state.blocks)
        following = max(request.num_prompt_tokens - entry.end, 0)
        if not self._state.predicts:
            return Save(record.tenant, entry, None, following, record.adapter)
        ids = list(request.all_token_ids[entry.start : entry.end])
        for item in request.mm_features:  # their cache does not follow from the ids of their placeholders
            first = max(item.mm_position.offset, entry.start)
            end = min(item.mm_position.offset + item.mm_position.length, entry.end)
            for at in range(first, end):
                ids[at - entry.start] = NO_TOKEN
        return Save(record.tenant, entry, ids, following, record.adapter)

    def _storable(self, record: RequestRecord) -> int:
        """Return how many of a request's tokens may be stored once they have KV: those before the first inexact one."""
        request = record.request
        # What is sampled in a step has no KV yet; under asynchronous scheduling its tokens are not known either.
        generated = self._state.options.store_generated
        wanted: int = request.num_tokens if generated else request.num_prompt_tokens
        segmented = record.segmented
        exact = wanted if segmented is None or segmented.exact is None else segmented.exact
        return min(self._state.addressed(wanted), exact)
