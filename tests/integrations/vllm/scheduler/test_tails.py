"""Tails on the scheduler's side: the blocks after a request's last whole chunk, stored, found again and superseded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.vllm.sides import BLOCK, LORA, Desk, generate, image, make_request

from cuvee.integrations.vllm.decision import Restored
from cuvee.integrations.vllm.messages import Entry, Report, Save
from cuvee.naming.identity import store_key

CHUNK = 64  # eight blocks, so that a tail has one of seven lengths
BLOCKS = list(range(100, 200))  # of every request, as `Desk.plan` says


@pytest.fixture
def desk(desk: Callable[..., Desk]) -> Callable[..., Desk]:
    """Of chunks that are longer than blocks."""
    return lambda **options: desk(**{"chunk_tokens": CHUNK, "min_tokens": BLOCK, **options})


def places(saves: list[Save]) -> list[tuple[int, int]]:
    """Chunk and tail of each."""
    return [(save.entry.start // CHUNK, save.entry.tokens if save.entry.kind == "tail" else 0) for save in saves]


def run(d: Desk, request: SimpleNamespace, generated: int = 0, found: int = 0) -> None:
    """The engine answers a request and stores what it is told to."""
    if found:
        d.side.allocated(request, [BLOCKS], found)
    d.write(d.plan((request, found, request.num_tokens - found)))
    for _ in range(generated):
        generate(request, 1)
        d.write(d.plan((request, request.num_tokens - 1, 1), new=False))
    generate(request, 1)  # which has no KV
    d.side.finished(request, [BLOCKS])
    d.write(d.plan())


def again(request: SimpleNamespace, name: str, more: int = 0, keep: int | None = None) -> SimpleNamespace:
    """A request whose prompt is the first `keep` tokens of another one's text and `more` others."""
    ids = list(request.all_token_ids[:keep]) + [47] * more
    return make_request(name, tokens=len(ids), prompt_token_ids=ids, all_token_ids=list(ids))


# Storing ---------------------------------------------------------------------------------------------------------


def test_decoding_stores_whole_chunks_and_the_end_of_a_request_its_tail(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request(tokens=103)
    d.matched(request)
    assert places(d.plan((request, 0, 80)).saves) == [(0, 0)]
    (save,) = d.plan((request, 80, 23), new=False).saves
    assert save == Save("", Entry("tail", d.tail(request, 96), CHUNK, 32, ((108, 109, 110, 111),)), following=7)
    stored = []
    for _ in range(50):
        generate(request, 1)
        stored += d.plan((request, request.num_tokens - 1, 1), new=False).saves
    assert places(stored) == [(1, 0)], "103 … 153: the second chunk, and no tail at every block"
    generate(request, 1)
    d.side.finished(request, [BLOCKS])
    plan = d.plan()
    tail = Entry("tail", d.tail(request, 152), 2 * CHUNK, 24, ((116, 117, 118),))
    assert (places(plan.saves), plan.last_saves) == ([], [Save("", tail)])
    assert d.plan().last_saves == [], "once"


@pytest.mark.parametrize(
    ("options", "events", "blocks", "prompt", "last"),
    [
        ({}, [(0, 103), 1], BLOCKS, [(0, 0), (1, 32)], []),  # what was sampled last has no KV, and would end a block
        ({}, [(0, 103), (103, 1), 1], BLOCKS, [(0, 0), (1, 32)], []),  # planned ahead, asynchronously
        ({"store_generated": False}, [(0, 103), 20, (103, 19)], BLOCKS, [(0, 0), (1, 32)], []),
        ({}, [(0, 90)], BLOCKS, [(0, 0)], [(1, 24)]),  # aborted
        ({}, [(0, 90)], [], [(0, 0)], []),  # preempted
        ({"stores": False}, [(0, 90)], BLOCKS, [], []),
    ],
)
def test_what_a_request_leaves_at_its_end(
    desk: Callable[..., Desk], options: dict[str, Any], events: list[Any], blocks: list[int],
    prompt: list[tuple[int, int]], last: list[tuple[int, int]],
) -> None:  # fmt: skip
    """Events are steps, or numbers of tokens that were generated."""
    d, request = desk(**options), make_request(tokens=103)
    d.matched(request)
    saves: list[Save] = []
    for event in events:
        if isinstance(event, int):
            generate(request, event)
        else:
            saves += d.plan((request, *event), new=event[0] == 0).saves
    d.side.finished(request, [blocks])
    assert (places(saves), places(d.plan().last_saves)) == (prompt, last)


@pytest.mark.parametrize(
    ("least", "tokens", "expected"),
    [
        (8, 135, [(0, 0), (1, 0)]), (8, 136, [(0, 0), (1, 0), (2, 8)]), (32, 31, []), (32, 39, [(0, 32)]),
    ],
)  # fmt: skip
def test_a_prompt_has_a_tail_if_a_whole_block_is_left_and_can_ever_be_loaded(
    desk: Callable[..., Desk], least: int, tokens: int, expected: list[tuple[int, int]]
) -> None:
    d, request = desk(min_tokens=least), make_request(tokens=tokens)
    d.matched(request)
    assert places(d.plan((request, 0, tokens)).saves) == expected


def test_a_request_aborted_while_it_loads_leaves_nothing(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request(tokens=103)
    d.put_tails(request, 40)
    tokens, _ = d.matched(request)
    d.side.allocated(request, [BLOCKS], tokens)
    d.plan()
    request.num_computed_tokens = tokens  # as the engine says before anything has arrived
    d.store.entries.clear()
    d.side.take(Report(unsaved={d.tail(request, 40)}))
    d.side.finished(request, [BLOCKS])
    assert d.plan().last_saves == []


def test_what_was_computed_before_a_reset_is_in_no_tail(desk: Callable[..., Desk]) -> None:
    d, done, running = desk(), make_request("a", tokens=100), make_request("b", tokens=103)
    for request in (done, running):
        d.matched(request)
        d.plan((request, 0, 98))
    d.side.finished(done, [BLOCKS])
    d.side.reset()
    assert d.plan().last_saves == []
    assert d.plan((running, 98, 5), new=False).saves == []
    d.side.finished(running, [BLOCKS])
    assert d.plan().last_saves == []


# Finding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generated", [5, 25, 100])
def test_the_next_turn_finds_the_whole_conversation(desk: Callable[..., Desk], generated: int) -> None:
    d, request = desk(), make_request(tokens=103)
    d.matched(request)
    run(d, request, generated)
    text = 103 + generated  # tokens with KV
    assert d.matched(again(request, "next", more=70))[0] == text // BLOCK * BLOCK
    # A template that drops the reasoning of the answer goes on from the prompt.
    assert d.matched(again(request, "other", more=70, keep=103))[0] == 96


def test_longer_tails_and_whole_chunks_supersede_a_tail(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request(tokens=200)
    d.put(request, 1)
    for number, (end, found) in enumerate(((80, 80), (72, 80), (104, 104))):
        d.put_tails(request, end)
        assert d.matched(again(request, str(number)))[0] == found
    d.put(request, 2)
    assert d.matched(again(request, "whole"))[0] == 128
    assert d.matched(again(request, "shorter", keep=85))[0] == 80, "it is not deleted: others end or turn off there"
    assert len(d.store.entries) == 5


def test_every_rank_must_have_a_tail(desk: Callable[..., Desk]) -> None:
    d, request = desk(shards=2), make_request(tokens=123)
    d.put(request, 1)
    d.put_tails(request, 80, 96)
    del d.store.entries[store_key("", d.tail(request, 96), 1)]
    assert d.matched(request)[0] == 80


def test_tails_are_not_shared_across_tenants_adapters_and_media(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request(tokens=60)
    d.put_tails(request, 24, 48, tenant="alice")
    d.put_tails(request, 24, 48)
    for name, changes, found in (
        ("a", {"cache_salt": "alice"}, 48),
        ("b", {"cache_salt": "bob"}, 0),
        ("c", {}, 48),
        ("d", {"lora_request": LORA}, 0),
        ("e", {"mm_features": [image(start=30)]}, 24),  # the tail before the image is the same
    ):
        assert d.matched(make_request(name, tokens=60, **changes))[0] == found, name


# Loading ---------------------------------------------------------------------------------------------------------


def test_the_load_of_a_tail(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request(tokens=123)
    d.put(request, 1)
    d.put_tails(request, 96)
    d.side.allocated(request, [list(range(50, 66))], d.matched(request, 24)[0])
    assert d.store.calls.count("contains") == 1, "tails are asked for along with the whole chunks"
    (load,) = d.plan().loads
    assert (load.start, load.end, load.blocks) == (24, 96, list(range(53, 62)))
    assert load.prefix == [
        Entry("chunk", d.digests(request)[0], 0, CHUNK, (tuple(range(50, 58)),)),
        Entry("tail", d.tail(request, 96), CHUNK, 32, (tuple(range(58, 62)),)),
    ]
    assert places(d.plan((request, 96, 27)).saves) == [(1, 56)], "the end of the prompt supersedes it"


def test_the_last_block_of_a_prompt_is_left_out_of_what_is_loaded(desk: Callable[..., Desk]) -> None:
    """Its last token is computed, so the engine gives it a block that it fills itself."""
    d, request = desk(), make_request(tokens=96)
    d.put(request, 1)
    d.put_tails(request, 96)
    d.side.allocated(request, [list(range(50, 62))], d.matched(request)[0])
    (load,) = d.plan().loads
    assert (load.start, load.end, load.blocks) == (0, 88, list(range(50, 61)))
    assert load.prefix[-1] == Entry("tail", d.tail(request, 96), CHUNK, 32, ((58, 59, 60),)), "without the last block"


def test_a_tail_that_another_request_loads_is_waited_for(desk: Callable[..., Desk]) -> None:
    d, first, second = desk(), make_request("a", tokens=50), make_request("b", tokens=60)
    d.put_tails(first, 48)
    d.side.allocated(first, [BLOCKS], d.matched(first)[0])
    plan = d.plan()
    for _ in range(5):
        assert d.side.matched_tokens(second, 0) == (None, False)
        d.plan()
    d.side.take(Report([plan.step], ["a"], [Restored("load", 48, 0, 0.1)]))
    assert d.matched(second, 48) == (0, False)


def test_what_a_lookup_says_of_tails_is_believed(desk: Callable[..., Desk]) -> None:
    d, first, second, third = desk(), *(make_request(name, tokens=123) for name in "abc")
    d.matched(first)
    assert places(d.plan((first, 0, 123)).saves) == [(0, 0), (1, 56)]
    d.put(first, 1)  # the tail was evicted at once
    d.side.allocated(second, [BLOCKS], d.matched(second)[0])
    assert places(d.plan((second, 64, 59)).saves) == [(1, 56)], "so it is stored again"
    d.put_tails(first, 120)
    d.side.take(Report(ended=["b"]))
    d.side.allocated(third, [BLOCKS], d.matched(third)[0])
    assert d.plan((third, 120, 3)).saves == []


@pytest.mark.parametrize(("tail", "pays"), [(8, False), (56, True)])
def test_a_tail_costs_more_than_its_tokens(desk: Callable[..., Desk], tail: int, pays: bool) -> None:
    """A chunk pays when it is loaded as fast as it is computed, and a bit of it never makes up for what it costs."""
    d = desk(decide="measured")
    for _ in range(8):  # 16 000 tokens/s of prefill, 20 000 of loading
        d.matched(make_request("p", tokens=16))
        step = d.plan((make_request("p", tokens=16), 0, 16))
        d.now += 1e-3
        d.side.take(Report([step.step], step_seconds={step.step: 1e-3}, restored=[Restored("load", 64, 0, 3.2e-3)]))
    request = make_request(tokens=tail + 1)
    d.put_tails(request, tail)
    assert d.matched(request)[0] == (tail if pays else 0)
