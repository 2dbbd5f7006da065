"""Recurrent layers: which of their states are stored, how long a load may be, and what is given up without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.stores.dict_store import hold
from tests.integrations.vllm.sides import BLOCK, BLOCKS, CHUNK, TENANT, Bench, Desk, generate, make_request

from cuvee.codec.errors import UnsupportedModelError
from cuvee.integrations.vllm.messages import Entry, Load, Save
from cuvee.integrations.vllm.pages.layer_groups import NULL_BLOCK, CachedLayers, LayerGroup, RecurrentLayer
from cuvee.integrations.vllm.pages.state_pages import StatePages
from cuvee.naming.identity import PrefixChain, Scope, companion_digest, store_key

# vLLM may put the group of recurrent layers first; the last one has a group of its own.
GROUPS = (LayerGroup((), recurrent=True), LayerGroup((0, 1, 2)), LayerGroup((), recurrent=True))
LAYERS = (
    RecurrentLayer("model.layers.0.mixer", 0, ((3, 8), (2, 4, 4)), (torch.bfloat16, torch.float32)),  # as of Mamba 2
    RecurrentLayer("model.layers.2.mixer", 2, ((6,), (6,), (6,), (2, 3, 3)), (torch.float32,) * 4),  # as of Kimi Linear
)
CACHED = CachedLayers(("a", "b", "c"), (), GROUPS, LAYERS, BLOCK)
SETUP = {"layers": CACHED}
END = 3 * CHUNK
HELD = [[NULL_BLOCK] * 5 + [7], [1, 2, 3, 4, 5, 6], [NULL_BLOCK] * 5 + [9]]  # after a step that ends there
LOADED = [[NULL_BLOCK] * 5 + [11], [20, 13, 17, 14, 19, 22], [NULL_BLOCK] * 5 + [12]]
STATE = Entry("state", bytes(range(32)), END - BLOCK, BLOCK)
OTHER = bytes([99]) * 32  # digest of another sequence's state


def caches() -> dict[str, list[torch.Tensor]]:
    """Noise in every block of every layer, NaN among it."""
    held = {}
    for layer in LAYERS:
        held[layer.name] = [
            torch.randn(BLOCKS, *shape).mul(1e3).to(dtype)
            for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True)
        ]
        held[layer.name][0].view(BLOCKS, -1)[:, 1] = torch.nan
    return held


def copied(held: Mapping[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """The same, to compare with later."""
    return {name: [each.clone() for each in tensors] for name, tensors in held.items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def place(entry: Entry, tables: list[list[int]]) -> Entry:
    """An entry with its blocks in every group."""
    return entry.within(tables, [BLOCK] * len(tables))


def stored(bench: Callable[..., Bench], held: Mapping[str, list[torch.Tensor]], **options: Any) -> Bench:
    """A worker that has stored three chunks, and the states at their end."""
    b = bench(groups=GROUPS, setup=SETUP, **options)
    b.worker.attach(b.cache, states=StatePages(LAYERS, held, "bfloat16"))
    b.fill(HELD[1], END)
    entries = [*(b.chunk(at) for at in range(3)), STATE]
    b.worker.saves.save([Save(TENANT, place(entry, HELD)) for entry in entries])
    b.drain()
    assert (b.counts()["stored{chunk}"], b.counts()["stored{state}"]) == (3, 1)
    return b


def load() -> Load:
    """A load of all of it into other blocks."""
    prefix = [place(Entry("chunk", bytes([at]) * 32, at * CHUNK, CHUNK), LOADED) for at in range(3)]
    return Load("r", TENANT, prefix, 0, END, LOADED[0], state=place(STATE, LOADED))


def state_key(b: Bench) -> str:
    return store_key(TENANT, STATE.digest, b.rank, *b.codec.key_ids[:1])


def test_a_state_is_stored_as_its_step_left_it(bench: Callable[..., Bench]) -> None:
    """The engine goes on in the same blocks while the state waits to be encoded."""
    held = caches()
    before = copied(held)
    b = bench(groups=GROUPS, setup=SETUP)
    b.worker.attach(b.cache, states=StatePages(LAYERS, held, "bfloat16"))
    b.fill(HELD[1], END)
    waiting = hold(b.store, "contains")
    try:
        b.worker.saves.save([Save(TENANT, place(entry, HELD)) for entry in (*(b.chunk(at) for at in range(3)), STATE)])
        waiting.reached()
        for tensors in held.values():
            for each in tensors:
                each.zero_()
    finally:
        waiting.set()
    b.drain()
    b.load_now([load()])
    assert b.ended() == {"r": False}
    for layer, (source, target) in zip(LAYERS, ((7, 11), (9, 12)), strict=True):
        for tensor, was in zip(held[layer.name], before[layer.name], strict=True):
            assert same(tensor[target], was[source])


def missing(b: Bench) -> None:
    del b.store.entries[state_key(b)]


def damaged(b: Bench) -> None:
    blob = bytearray(b.store.entries[state_key(b)])
    blob[-40] ^= 1
    b.store.entries[state_key(b)] = bytes(blob)


def of_other_layers(b: Bench) -> None:
    states = StatePages(LAYERS[:1], caches(), "bfloat16").copy(place(STATE, HELD))
    b.store.entries[state_key(b)] = b.codec.encode_states(states)


def a_chunk_is_missing(b: Bench) -> None:
    del b.store.entries[b.key(1)]


def of_another_sequence(b: Bench) -> None:
    """By its secret alone, a state is bound to its key."""
    b.worker.saves.save([Save(TENANT, place(Entry("state", OTHER, STATE.start, BLOCK), HELD))])
    b.drain()
    b.store.entries[state_key(b)] = b.store.entries[store_key(TENANT, OTHER, b.rank, *b.codec.key_ids[:1])]


@pytest.mark.parametrize("fault", [missing, damaged, of_another_sequence, of_other_layers, a_chunk_is_missing])
def test_without_its_state_or_a_chunk_a_load_fails_as_a_whole(
    bench: Callable[..., Bench], fault: Callable[[Bench], None]
) -> None:
    """By its request: a part of it would be of no use, and the numbers of its blocks mean nothing."""
    b = stored(bench, caches(), **({"codec": {"key": b"s" * 32}} if fault is of_another_sequence else {}))
    fault(b)
    b.load_now([load()])
    assert b.ended() == {"r": True}
    assert not b.worker.loads.take_invalid_blocks()
    assert (b.counts()["recomputed_tokens"], b.counts().get("loaded_tokens", 0)) == (END, 0)
    report = b.worker.report(1)
    assert report.failed == {"r"}
    if fault is not a_chunk_is_missing:
        assert STATE.digest in report.unsaved, "it is stored again once it is computed"
        assert state_key(b) not in b.store.entries, "what never decodes is deleted"


def test_tensors_other_than_described_are_refused() -> None:
    held = caches()
    held[LAYERS[0].name][1] = held[LAYERS[0].name][1].double()
    with pytest.raises(UnsupportedModelError, match=r"model.layers.0.mixer: the engine keeps states of .*float64"):
        StatePages(LAYERS, held, "bfloat16")


# The scheduler's side ----------------------------------------------------------------------------------------------


def digest_after(d: Desk, request: SimpleNamespace, tokens: int) -> bytes:
    """Digest of the state after a request's first tokens, made by hand."""
    if tokens % CHUNK:
        return companion_digest(d.tail(request, tokens), b"states")
    chain = PrefixChain(d.identity, Scope(), CHUNK)
    return companion_digest(chain.digests(request.all_token_ids, tokens // CHUNK)[-1], b"states")


def put_states(d: Desk, request: SimpleNamespace, *ends: int, ranks: int = 1) -> None:
    for end in ends:
        for rank in range(ranks):
            d.store.entries[store_key("", digest_after(d, request, end), rank)] = b"blob"


def planned(saves: list[Save]) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """Where states end, and their blocks in every group."""
    return [(save.entry.end, save.entry.tables) for save in saves if save.entry.kind == "state"]


def tables(*ends: int) -> tuple[list[int], ...]:
    """The engine's tables while it has states after these numbers of tokens."""
    rows = [[NULL_BLOCK] * 20, list(range(100, 120)), [NULL_BLOCK] * 20]
    for end in ends:
        rows[0][end // BLOCK - 1], rows[2][end // BLOCK - 1] = 40 + end // BLOCK, 70 + end // BLOCK
    return tuple(rows)


def test_states_are_stored_at_ends_of_chunks_and_of_prompts(desk: Callable[..., Desk]) -> None:
    """Where a step ends, and where the engine has written one beside; not where it has none."""
    d, request = desk(groups=GROUPS, setup=SETUP, min_tokens=1), make_request(tokens=5 * CHUNK + BLOCK + 3)
    d.side.arrived(request)
    d.tables = tables(2 * CHUNK)
    assert planned(d.plan((request, 0, 2 * CHUNK)).saves) == [(2 * CHUNK, ((44,), (103,), (74,)))]
    d.tables = tables(2 * CHUNK, 3 * CHUNK + BLOCK)
    assert planned(d.plan((request, 2 * CHUNK, CHUNK + BLOCK), new=False).saves) == [], "within a chunk"
    d.tables = tables(3 * CHUNK + BLOCK, 5 * CHUNK + BLOCK)
    plan = d.plan((request, 3 * CHUNK + BLOCK, 2 * CHUNK + 3), new=False)
    assert planned(plan.saves) == [(5 * CHUNK + BLOCK, ((51,), (110,), (81,)))], "of the prompt's last whole block"
    assert [save.entry.digest for save in plan.saves if save.entry.kind == "state"] == [
        digest_after(d, request, 5 * CHUNK + BLOCK)
    ]
    assert {save.entry.kind for save in plan.saves} == {"chunk", "tail", "state"}
    generate(request, BLOCK)
    d.tables = tables(5 * CHUNK + BLOCK, 6 * CHUNK)
    steps = [d.plan((request, request.num_prompt_tokens + at, 1), new=False).saves for at in range(BLOCK - 3)]
    assert [planned(saves) for saves in steps] == [[]] * (BLOCK - 4) + [[(6 * CHUNK, ((52,), (111,), (82,)))]]


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        ((), 0),
        ((CHUNK, 3 * CHUNK), 3 * CHUNK),
        ((3 * CHUNK, 3 * CHUNK + BLOCK), 3 * CHUNK + BLOCK),  # within the last chunk, of which a part is used
        ((2 * CHUNK, 3 * CHUNK + 2 * BLOCK), 2 * CHUNK),  # the prompt's last token is computed in any case
    ],
)
def test_a_load_is_as_long_as_the_last_state(desk: Callable[..., Desk], ends: tuple[int, ...], found: int) -> None:
    d, request = desk(groups=GROUPS, setup=SETUP, min_tokens=1), make_request(tokens=4 * CHUNK)
    d.put(request, 4)
    put_states(d, request, *ends)
    assert d.matched(request) == (found, found > 0)
    if not found:
        return
    last = found // BLOCK
    rows = [[NULL_BLOCK] * (last - 1) + [30], list(range(1, last + 1)), [NULL_BLOCK] * (last - 1) + [31]]
    d.side.allocated(request, rows, found)
    (planned_load,) = d.plan().loads
    assert planned_load.state is not None
    assert planned_load.state.tables == ((30,), (last,), (31,))
    assert (planned_load.state.digest, planned_load.state.end) == (digest_after(d, request, found), found)
    assert planned_load.prefix[-1].start < found == planned_load.end
    assert planned_load.entries[0] is planned_load.state, "it is no use to restore the rest before"


@pytest.mark.parametrize(
    ("ends", "own", "boundary"),
    [((CHUNK,), 0, 3 * CHUNK), ((3 * CHUNK,), 0, 0), ((), 4 * CHUNK, 4 * CHUNK), ((), 2 * CHUNK, 3 * CHUNK)],
)
def test_the_engine_ends_a_step_with_the_chunks_that_were_found(
    desk: Callable[..., Desk], ends: tuple[int, ...], own: int, boundary: int
) -> None:
    """Unless there is a state, or its own cache knows of a longer prefix."""
    d = desk(groups=GROUPS, setup=SETUP, min_tokens=1)
    request = make_request(tokens=6 * CHUNK, shared_prefix_boundary=own)
    d.put(request, 3)
    put_states(d, request, *ends)
    assert d.matched(request)[0] == (ends[-1] if ends else 0)
    assert request.shared_prefix_boundary == boundary


def test_a_state_whose_last_token_is_not_known_yet_is_stored_with_the_next_step(desk: Callable[..., Desk]) -> None:
    """Where the engine plans ahead, it computes a token before the connector is told which one it is."""
    d, request = desk(groups=GROUPS, setup=SETUP, min_tokens=1), make_request(tokens=CHUNK - 1)
    d.side.arrived(request)
    d.tables = tables(CHUNK)
    d.plan((request, 0, CHUNK - 1))
    assert planned(d.plan((request, CHUNK - 1, 1), new=False).saves) == []
    generate(request, 1)
    d.tables = tables(CHUNK, CHUNK + BLOCK)
    assert planned(d.plan((request, CHUNK, 1), new=False).saves) == [(CHUNK, ((42,), (101,), (72,)))]


def test_a_state_that_the_store_has_lost_is_stored_again(desk: Callable[..., Desk]) -> None:
    d = desk(groups=GROUPS, setup=SETUP, min_tokens=1)
    d.tables = tables(CHUNK)
    d.tables[2][1] = NULL_BLOCK  # one group without it is enough to store none
    request = make_request("without", tokens=CHUNK + 1)
    d.side.arrived(request)
    assert planned(d.plan((request, 0, CHUNK)).saves) == []
    d.tables = tables(CHUNK)
    for name in ("first", "second"):
        request = make_request(name, tokens=CHUNK + 1)
        d.put(request, 1)
        assert d.matched(request) == (0, False)
        assert planned(d.plan((request, 0, CHUNK)).saves) == [(CHUNK, ((42,), (101,), (72,)))], name
