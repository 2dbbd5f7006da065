"""Groups of layers with tables of blocks of their own, and windows: what is stored, restored and given up of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.integrations.vllm.sides import BLOCK, BLOCKS, CHUNK, TENANT, Bench, Desk, generate, make_request

from cuvee.integrations.vllm.messages import Entry, Load, Save
from cuvee.integrations.vllm.pages.layer_groups import NULL_BLOCK, LayerGroup

# The middle layer has a window of one chunk and a block.
MIXED = (LayerGroup((0, 2)), LayerGroup((1,), CHUNK + BLOCK))
WINDOWED = (LayerGroup((0, 1, 2), CHUNK),)
# As where the heads of two layers are larger: their blocks have half as many tokens.
UNEQUAL = (LayerGroup((0, 2), block=BLOCK // 2), LayerGroup((1,), CHUNK + BLOCK))


def sizes(groups: tuple[LayerGroup, ...]) -> list[int]:
    """Tokens per block of each group."""
    return [group.block or BLOCK for group in groups]


def place(entry: Entry, tables: list[list[int]], groups: tuple[LayerGroup, ...]) -> Entry:
    """An entry with its blocks in every group."""
    return entry.within(tables, sizes(groups))


def compute(b: Bench, tables: list[list[int]], groups: tuple[LayerGroup, ...], tokens: range) -> None:
    """The engine computes tokens of the sequence into each group's blocks, as far as there are any."""
    for group, table, size in zip(groups, tables, sizes(groups), strict=True):
        at = torch.tensor([position for position in tokens if table[position // size] != NULL_BLOCK])
        write = b.cache.writer(torch.tensor(table)[at // size] * size + at % size)
        for layer in group.layers:
            write(layer, b.sequence.keys[layer][at], b.sequence.values[layer][at])


def load(b: Bench, tables: list[list[int]], start: int, end: int, groups: tuple[LayerGroup, ...] | None = None) -> Load:
    """A load of whole chunks into each group's blocks, which begin at the first token."""
    groups = groups or (MIXED if len(tables) > 1 else WINDOWED)
    prefix = [place(b.chunk(at), tables, groups) for at in range(start // CHUNK, end // CHUNK)]
    size = sizes(groups)[0]
    return Load("r", TENANT, prefix, start, end, tables[0][start // size : end // size])


def store(b: Bench, groups: tuple[LayerGroup, ...], chunks: int = 3) -> None:
    """The engine computes and stores chunks; each group has its blocks in another order."""
    counts = [chunks * CHUNK // size for size in sizes(groups)]
    tables = [list(range(1, counts[0] + 1)), list(range(2 * counts[-1], counts[-1], -1))][: len(groups)]
    compute(b, tables, groups, range(chunks * CHUNK))
    b.worker.saves.save([Save(TENANT, place(b.chunk(at), tables, groups)) for at in range(chunks)])
    b.drain()
    assert b.counts()["stored{chunk}"] == chunks


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("groups", [MIXED, UNEQUAL], ids=["mixed", "unequal"])
def test_each_group_is_restored_into_its_own_blocks(
    bench: Callable[..., Bench], permuted: bool, groups: tuple[LayerGroup, ...]
) -> None:
    b = bench(groups=groups, permuted=permuted)
    store(b, groups)
    everywhere = torch.arange(BLOCKS * BLOCK)
    before = b.cache.read(everywhere, 0)
    tables = [[20, 13, 17, 14, 19, 22], [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 21, 15, 16]]
    if groups is UNEQUAL:
        tables[0] = [half for block in tables[0] for half in (2 * block + 1, 2 * block)]
    start = BLOCK  # the first block was found in the engine's own cache
    b.load_now([load(b, tables, start, 3 * CHUNK, groups)])
    assert b.ended() == {"r": False}
    expected = b.cache.read(everywhere, 0)
    for group, table, size in zip(groups, tables, sizes(groups), strict=True):
        held = [at for at in range(start, 3 * CHUNK) if table[at // size] != NULL_BLOCK]
        slots = torch.tensor([table[at // size] * size + at % size for at in held])
        rest = torch.tensor(sorted(set(range(BLOCKS * BLOCK)) - set(slots.tolist())))
        for layer in group.layers:
            for ours, was, want in (
                (expected.keys, before.keys, b.sequence.keys), (expected.values, before.values, b.sequence.values)
            ):  # fmt: skip
                assert torch.equal(ours[layer][slots], want[layer][held])
                assert torch.equal(ours[layer][rest].nan_to_num(9), was[layer][rest].nan_to_num(9)), "left alone"


def test_a_load_that_cannot_begin_is_told_by_its_request(bench: Callable[..., Bench]) -> None:
    b = bench(groups=MIXED)
    b.load_now([Load("r", "", [], 0, 2 * BLOCK, [NULL_BLOCK, 3])])
    assert b.ended() == {"r": True}
    assert not b.worker.loads.take_invalid_blocks()


def test_chunks_of_which_a_layer_has_dropped_a_part_are_not_stored(desk: Callable[..., Desk]) -> None:
    """As of a prefix that the engine found in its own cache; once they are computed again, they are."""
    d, request = desk(groups=MIXED), make_request(tokens=4 * CHUNK + 3)
    d.side.arrived(request)
    d.tables = (list(range(100, 110)), [NULL_BLOCK] * 3 + list(range(120, 127)))
    plan = d.plan((request, 2 * CHUNK, 2 * CHUNK + 3))
    assert [save.entry.start // CHUNK for save in plan.saves] == [2, 3]
    assert [save.entry.tables[1:] for save in plan.saves] == [((121, 122),), ((123, 124),)]
    assert d.recorder.totals()["stores_skipped", "window"] == 2
    d.side.finished(request, d.tables)
    d.tables = (list(range(100, 110)), list(range(120, 130)))
    request = make_request("again", tokens=4 * CHUNK + 3)
    d.side.arrived(request)
    again = d.plan((request, 0, 4 * CHUNK + 3))
    assert [save.entry.start // CHUNK for save in again.saves] == [0, 1]


@pytest.mark.parametrize(("overwritten", "copied"), [(122, False), (103, True)])
def test_a_tail_whose_blocks_are_overwritten_in_any_group_is_not_copied(
    desk: Callable[..., Desk], overwritten: int, copied: bool
) -> None:
    d, tokens = desk(groups=MIXED, min_tokens=1), CHUNK + BLOCK
    d.tables = (list(range(100, 110)), list(range(120, 130)))
    request = make_request(tokens=tokens - 1)  # one token less: its end makes no tail
    d.side.arrived(request)
    d.plan((request, 0, tokens - 1))
    generate(request, 2)
    d.plan((request, tokens - 1, 1), new=False)
    d.side.finished(request, d.tables)
    last = d.plan(overwritten=[overwritten]).last_saves
    assert [save.entry.tables for save in last] == [((102,), (122,))] * copied
    assert d.unstored() == ({} if copied else {"overwritten": BLOCK})


def test_chunks_before_the_window_of_all_layers_are_not_fetched(desk: Callable[..., Desk]) -> None:
    d, request = desk(groups=WINDOWED), make_request(tokens=3 * CHUNK + 1)
    d.put(request, 3)
    assert d.matched(request) == (3 * CHUNK, True)
    d.side.allocated(request, [[NULL_BLOCK] * 3 + [21, 15, 16]], 3 * CHUNK)
    (planned,) = d.plan().loads
    assert [entry.start for entry in planned.prefix] == [CHUNK, 2 * CHUNK]
    assert (planned.start, planned.end) == (0, 3 * CHUNK)
