"""Tails on the scheduler's side, beside what `test_prefixes` shows: aborts, resets, scopes, and what a tail costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.integrations.vllm.sides import BLOCK, LORA, Desk, image, make_request

from cuvee.integrations.vllm.decision import Restored
from cuvee.integrations.vllm.messages import Report, Save

CHUNK = 64  # eight blocks, so that a tail has one of seven lengths
BLOCKS = list(range(100, 200))  # of every request, as `Desk.plan` says


@pytest.fixture
def desk(desk: Callable[..., Desk]) -> Callable[..., Desk]:
    """Of chunks that are longer than blocks."""
    return lambda **options: desk(**{"chunk_tokens": CHUNK, "min_tokens": BLOCK, **options})


def places(saves: list[Save]) -> list[tuple[int, int]]:
    """Chunk and tail of each."""
    return [(save.entry.start // CHUNK, save.entry.tokens if save.entry.kind == "tail" else 0) for save in saves]


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
