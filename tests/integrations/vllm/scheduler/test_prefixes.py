"""What the scheduler's side finds and stores of prefixes: any request, however it is computed, against a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integrations.vllm.sides import BLOCK, Desk, generate, make_request

from cuvee.integrations.vllm.messages import Entry, Report, Save
from cuvee.naming.identity import Scope, store_key

CHUNK = 32  # four blocks: tails of three lengths
TABLE = list(range(100, 200))  # blocks of every request, as `Desk.plan` says
ENDS = range(BLOCK, 128, BLOCK)  # of entries


def digest(d: Desk, request: SimpleNamespace, end: int, tenant: str = "") -> bytes:
    """Of the chunk or the tail that ends there."""
    if end % CHUNK:
        return d.tail(request, end, Scope(tenant))
    return d.digests(request, Scope(tenant))[end // CHUNK - 1]


def entry(d: Desk, request: SimpleNamespace, end: int, last: int | None = None, tenant: str = "") -> Entry:
    """The entry that ends there, in the request's blocks, of which those from position `last` on are not its."""
    start = (end - 1) // CHUNK * CHUNK
    blocks = tuple(TABLE[start // BLOCK : min(end, last or end) // BLOCK])
    return Entry("tail" if end % CHUNK else "chunk", digest(d, request, end, tenant), start, end - start, (blocks,))


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.sampled_from(range(1, 121)),
    computed=st.integers(0, 6),
    there=st.sets(st.sampled_from(ENDS)),
    whole=st.integers(0, 3),
    half=st.sets(st.sampled_from(ENDS), max_size=2),
    others=st.sets(st.sampled_from(ENDS), max_size=4),
    given=st.sampled_from([
        {}, {}, {"shards": 2}, {"shards": 2, "setup": {"replicated": True}}, {"min_tokens": 48}, {"loads": False},
        {"tenant": "alice"},
    ]),
    positions=st.sampled_from([4096, 4096, 44, 64]),
)  # fmt: skip
def test_all_that_every_rank_has_of_a_prefix_is_loaded(
    tokens: int, computed: int, there: set[int], whole: int, half: set[int], others: set[int],
    given: dict[str, Any], positions: int,
) -> None:  # fmt: skip
    """The chunks before the first that is missing and the longest tail behind them, of this tenant, of all ranks."""
    text, tenant = make_request(tokens=128), given.get("tenant", "")
    computed = min(computed, (tokens - 1) // BLOCK) * BLOCK
    found = {*there, *range(CHUNK, whole * CHUNK + 1, CHUNK)}
    with closing(Desk(**{"chunk_tokens": CHUNK, "min_tokens": BLOCK, **given})) as d:
        d.side._state.positions = positions
        holders, asked = (0,) if "setup" in given else tuple(range(d.shards)), set[str]()

        def key(end: int, rank: int = 0, of: str = tenant) -> str:
            return store_key(of, digest(d, text, end, of), rank)

        d.store.entries |= {key(end, rank): b"blob" for end in found for rank in holders}
        for end in half if len(holders) > 1 else ():
            d.store.entries.pop(key(end, 1), None)
            found -= {end}
        d.store.entries |= {key(end, 0, "bob"): b"blob" for end in others}
        contains = d.store.contains

        def noted(keys: Sequence[str]) -> list[bool]:
            asked.update(keys)
            return contains(keys)

        d.store.contains = noted  # type: ignore[method-assign]
        request, most = make_request(tokens=tokens), min(tokens, positions)
        chunks = next(at for at in range(9) if (at + 1) * CHUNK > most or (at + 1) * CHUNK not in found)
        ends = [chunks * CHUNK] + [end for end in found if chunks * CHUNK < end < min((chunks + 1) * CHUNK, most + 1)]
        usable, least = min(tokens - 1, positions) // BLOCK * BLOCK, given.get("min_tokens", BLOCK)
        end, loads = min(max(ends), usable), "loads" not in given
        expected = end - computed if loads and end - computed >= least else 0
        assert d.matched(request, computed) == (expected, expected > 0)
        assert not asked or (loads and usable >= least), "what is too short is not worth a question"
        assert asked <= {key(end, rank) for end in ENDS for rank in holders if end <= most}
        d.side.allocated(request, d.tables, expected)
        planned = d.plan().loads
        assert len(planned) == (expected > 0) and not d.plan().loads, "once"
        for load in planned:
            first, last = computed // CHUNK * CHUNK, -(-end // CHUNK) * CHUNK
            entries = [each for each in sorted({*range(CHUNK, chunks * CHUNK + 1, CHUNK), max(ends)}) if first < each]
            assert (load.tenant, load.start, load.end) == (tenant, computed, end)
            assert load.prefix == [entry(d, request, each, end, tenant) for each in entries if each <= last]
            assert load.blocks == TABLE[computed // BLOCK : end // BLOCK], "from the first token on"


@st.composite
def lives(draw: Any) -> tuple[int, int, list[int], list[tuple[int, int]], str]:
    """Of a request: tokens of its prompt, and of them in the engine; of each step of the prompt; drafted and accepted
    ones of each further step; and whether it is preempted, or a step ahead of what it knows, when it ends.
    """
    prompt = draw(st.sampled_from(range(1, 101)))
    computed = draw(st.integers(0, (prompt - 1) // BLOCK)) * BLOCK
    bounds = sorted({computed, *draw(st.lists(st.integers(computed, prompt), max_size=4)), prompt})
    drafted = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
    steps = [after - before for before, after in pairwise(bounds)]
    aborted = draw(st.sampled_from([0, 0, 0, 1])) * draw(st.integers(0, len(steps)))
    steps = steps[: len(steps) - aborted]
    return prompt, computed, steps, [] if aborted else drafted, draw(st.sampled_from(["", "ahead", "preempted"]))


@settings(max_examples=300, deadline=None)
@given(
    life=lives(),
    given=st.sampled_from([{}, {}, {"store_generated": False}, {"min_tokens": 40}, {"stores": False}]),
    positions=st.sampled_from([4096, 90]),
    lost=st.integers(0, 7),
    late=st.booleans(),
)
def test_each_chunk_is_stored_once_and_a_tail_where_the_prompt_and_the_request_end(
    life: tuple[int, int, list[int], list[tuple[int, int]], str],
    given: dict[str, Any],
    positions: int,
    lost: int,
    late: bool,
) -> None:
    """When all of its tokens are accepted: neither a draft nor what was sampled last has KV yet."""
    prompt, computed, steps, drafts, last = life
    least, stores = given.get("min_tokens", BLOCK), given.get("stores", True)
    with closing(Desk(**{"chunk_tokens": CHUNK, "min_tokens": BLOCK, **given})) as d:
        d.side._state.positions = positions
        request, done = make_request(tokens=prompt), set[int]()
        most = positions if given.get("store_generated", True) else min(positions, prompt)
        d.side.arrived(request)
        d.matched(request, computed)

        def expect(saves: list[Save], ready: int, tail: int | None) -> None:
            """Whole chunks of the first `ready` tokens, and the tail of the first `tail`."""
            new = set(range(CHUNK, min(ready, most) + 1, CHUNK))
            end = min(tail or 0, most) // BLOCK * BLOCK
            new |= {end} if end % CHUNK and end >= least else set()
            expected = sorted(new - done) if stores else []
            assert [save.entry for save in saves] == [entry(d, request, each) for each in expected]
            assert [save.following for save in saves] == [max(prompt - each, 0) for each in expected]
            done.update(expected)

        after = computed
        for before, after in pairwise(accumulate(steps, initial=computed)):
            plan = d.plan((request, before, after - before), new=before == computed)
            expect(plan.saves, after, prompt if after == prompt else None)
        for drafted, accepted in drafts:
            generate(request, 1)
            expect(d.plan((request, after, 1 + drafted), new=False).saves, after + 1, None)
            generate(request, min(drafted, accepted))
            after += 1 + min(drafted, accepted)
            request.num_computed_tokens = after
        if after >= prompt and last == "ahead":
            expect(d.plan((request, after, 1), new=False).saves, after, None)
        if after >= prompt:
            generate(request, 1)  # what has no KV
        if last == "preempted":
            request.num_computed_tokens = 0
        d.side.finished(request, [[] if last == "preempted" else TABLE])
        expect(d.plan().last_saves, 0, after if steps and last != "preempted" else 0)
        assert not d.plan().last_saves, "once"
        # The same again, when some of it could not be stored, and the engine has all of it.
        gone = {end for at, end in enumerate(sorted(done)) if at % 4 == lost}
        d.side.take(Report(unsaved={digest(d, request, end) for end in gone}))
        done -= gone
        if late:  # the store may have evicted all of it since; the worker asks before it encodes
            d.now += 61
            done.clear()
        again = make_request("again", ids=request.all_token_ids)
        prompt, before = again.num_tokens, (again.num_tokens - 1) // BLOCK * BLOCK
        most = positions
        d.matched(again, before)
        expect(d.plan((again, before, prompt - before)).saves, prompt, prompt)
