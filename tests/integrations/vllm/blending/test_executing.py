"""`place` against a plain reference, and `PageBlender` on pages with a model that writes what it computes."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integrations.vllm.sides import BLOCK, BLOCKS, LAYOUT
from torch.utils._python_dispatch import TorchDispatchMode

from cuvee.blend.recompute import PromptKV
from cuvee.blend.recompute_model import Exchange
from cuvee.codec.paged import PagedCache
from cuvee.integrations.vllm.blending.executing import PageBlender, RankFailedError, place
from cuvee.integrations.vllm.messages import Blend, Entry

LAYERS = LAYOUT.num_layers
TABLE = [20, 3, 17, 4, 9, 22]
TOKENS = [7 * at % 61 for at in range(60)]


# place ---------------------------------------------------------------------------------------------------------------


def reference(blend: Blend, end: int) -> list[tuple[int, int, bool, bool]]:
    """Run, place in it, whether it is cached and whether it is known, token by token.

    A run is all exact tokens, what is used of a piece, or the text between pieces. A token of a piece counts from the
    piece's own beginning. The first tokens of a prompt, and those of a piece from `end` on, are in it but not cached.
    """
    owners: list[Any] = []
    for at in range(len(blend.tokens)):
        pieces = [piece for piece in blend.pieces if piece.start <= at < piece.start + piece.tokens]
        owners.append("exact" if at < blend.start else pieces[0] if pieces else "text")
    rows = []
    run, begun = -1, 0
    for at, owner in enumerate(owners):
        if at == 0 or owner != owners[at - 1]:
            run, begun = run + 1, at
        offset = at - (owner.start if isinstance(owner, Entry) else begun)
        rows.append((run, offset, isinstance(owner, Entry) and blend.first <= at < end, owner == "exact"))
    return rows


@st.composite
def blends(draw: Callable[..., Any]) -> tuple[Blend, int]:
    count = draw(st.integers(2, 60))
    bounds = sorted(draw(st.sets(st.integers(0, count), min_size=2, max_size=8)))
    spans = [(a, b) for a, b in itertools.pairwise(bounds) if draw(st.booleans())]
    pieces = [Entry("segment", bytes([number]), a, b - a) for number, (a, b) in enumerate(spans)]
    start = draw(st.integers(0, count - 1))
    pieces = [piece for piece in pieces if piece.start + piece.tokens > start]
    end = draw(st.integers(start + 1, count))
    pieces = [piece for piece in pieces if piece.start < end]
    first = draw(st.sampled_from([0, 3, 16]))
    return Blend(list(range(50, 50 + count)), start, pieces, 0.5, [], first=first), end


@settings(max_examples=400, deadline=None)
@given(blends())
def test_a_blend_is_placed_as_it_says(given: tuple[Blend, int]) -> None:
    blend, end = given
    placed = place(blend, end)
    rows = zip(placed.segment.tolist(), placed.offset.tolist(), placed.cached.tolist(), placed.exact.tolist())  # noqa: B905
    assert list(rows) == reference(blend, end)
    assert placed.tokens.tolist() == blend.tokens and placed.end == end
    assert not placed.leading.any()
    assert int(placed.cached.sum()) == blend.reused(end)


class Written(TorchDispatchMode):
    """Counts the numbers that torch's operations give: what they fill, or make anew."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for each in given if isinstance(given, tuple) else (given,):
            if isinstance(each, torch.Tensor) and not func.is_view:
                self.numbers += each.numel()
        return given


def placed_numbers(pieces: int, count: int = 1 << 14) -> int:
    """Numbers written to place so many pieces, with a token of text between them, in a prompt of `count` tokens."""
    step = count // (pieces + 1)
    blend = Blend([0] * count, 0, [Entry("segment", b"", at * step, step - 1) for at in range(pieces)], 0, [])
    written = Written()
    with written:
        place(blend, count - 1)
    return written.numbers


def test_placing_many_pieces_writes_no_more_than_placing_one() -> None:
    """Clients choose how many there are, and this runs in the engine's thread: a prompt is not walked for each."""
    one = placed_numbers(1)
    assert one >= 6 * (1 << 14), "what is asked for was counted"
    assert placed_numbers(2047) < 2 * one


# PageBlender ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rows:
    positions: torch.Tensor
    visible: torch.Tensor | None


def computed(tokens: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
    """What the model makes of tokens, `[H, S, D]`: another number for every token, position and layer."""
    number = tokens.float() + 100 * positions + 10_000 * (layer + 1)
    return number[None, :, None].expand(2, -1, 16)


class PagesModel:
    """Writes new KV into pages by itself, as an engine's layers do, and notes who went through which layer."""

    layout = LAYOUT

    def __init__(self, cache: PagedCache, blocks: Sequence[int]) -> None:
        self.cache = cache
        self.blocks = torch.tensor(blocks)
        self.through: list[list[int]] = [[] for _ in range(LAYERS)]
        self.seen: list[tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.fails: Callable[[str], None] = lambda where: None
        self.masks: weakref.WeakSet[Rows] = weakref.WeakSet()
        self.most_masks = 0

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, None].float()

    def rows(self, positions: torch.Tensor, visible: torch.Tensor | None) -> Rows:
        self.fails("rows")
        rows = Rows(positions, visible)
        self.masks.add(rows)
        self.most_masks = max(self.most_masks, len(self.masks))
        return rows

    def layer(self, index: int, hidden: torch.Tensor, rows: Rows, exchange: Exchange) -> torch.Tensor:
        self.fails("layer")
        new = computed(hidden[:, 0].long(), rows.positions, index)
        if rows.visible is not None:
            keys, values = exchange(new.bfloat16(), -new.bfloat16())
            self.seen.append((rows.positions.tolist(), keys.clone(), values.clone(), rows.visible))
            return hidden
        exchange(new, -new)
        self.through[index] += rows.positions.tolist()
        slots = self.blocks[rows.positions // BLOCK] * BLOCK + rows.positions % BLOCK
        for pages, part in ((self.cache.keys[index], new), (self.cache.values[index], -new)):
            pages.view(-1, 2, 16)[slots] = part.transpose(0, 1).bfloat16()
        self.fails("written")
        return hidden

    def queries(self, index: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        return torch.ones(4, len(hidden), 16)


def pages(known: int, pieces: Sequence[Entry], end: int) -> PagedCache:
    """NaN, and 1 where KV is known, 2 where a piece is."""
    parts = [torch.full((BLOCKS, BLOCK, 2, 16), torch.nan).bfloat16() for _ in range(2 * LAYERS)]
    slots = torch.tensor(TABLE).repeat_interleave(BLOCK) * BLOCK + torch.arange(BLOCK).repeat(len(TABLE))
    for part in parts:
        for piece in pieces:
            part.view(-1, 2, 16)[slots[piece.start : min(piece.start + piece.tokens, end)]] = 2
        part.view(-1, 2, 16)[slots[:known]] = 1
    return PagedCache(LAYOUT, parts[:LAYERS], parts[LAYERS:])


def run(
    blend: Blend,
    end: int,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    rows: int = 1024,
    budget: float = math.inf,
) -> tuple[PagesModel, dict[str, int], torch.Tensor, list[tuple[float, int]]]:
    """The model after it, the record, and the last layer's keys `[T]` of the first tokens; and of each slice what it
    says it took, and the token-layers that the model computed in it, the query's included.
    """
    cache = pages(blend.start, blend.pieces, end)
    opened: list[PagesModel] = []

    def open_model(blocks: Sequence[int]) -> Any:
        opened.append(PagesModel(cache, blocks))
        return opened[-1]

    blending = PageBlender(cache, BLOCK, open_model, 0.0, total, lambda well: well, rows).begin(blend, end)
    slices, before = [], 0
    while not blending.done:
        took, (model,) = blending.advance(budget), opened
        after = sum(map(len, model.through)) + sum(len(positions) for positions, *_ in model.seen)
        slices.append((took, after - before))
        before = after
    at = torch.arange(len(TABLE) * BLOCK)
    keys, _ = cache.layer(LAYERS - 1, torch.tensor(TABLE)[at // BLOCK] * BLOCK + at % BLOCK)
    return model, blending.tokens, keys[:, 0, 0].float(), slices


PIECES = [Entry("segment", b"a", 6, 12), Entry("segment", b"b", 22, 14)]  # of tokens 6 … 18 and 22 … 36


def request(cost: float) -> Blend:
    """Ten exact tokens, the rest of a piece, text, a piece, and 24 tokens of which none is placed."""
    return Blend(TOKENS, 10, PIECES, cost, TABLE[:5])


def test_what_is_chosen_is_decided_by_all_ranks_together() -> None:
    asked: list[torch.Tensor] = []
    favored = torch.zeros(60)
    favored[[13, 25, 26]] = 1e6

    def total(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor.clone())
        return favored

    model = run(request(0.25), 38, total)[0]
    assert [(tensor.shape, tensor.dtype) for tensor in asked] == [((60,), torch.float32)] and asked[0].isfinite().all()
    assert {13, 25, 26} <= set(model.through[0]), "what the sum says counts, not this rank's part"
    run(request(0), 38, total)
    assert len(asked) == 1, "nobody was asked"


def test_what_is_added_to_kv_stays_within_its_dtype() -> None:
    parts = [torch.full((1, BLOCK, 2, 16), 6e4, dtype=torch.float16) for _ in range(2 * LAYERS)]
    pages = PagedCache(replace(LAYOUT, dtype="float16"), parts[:LAYERS], parts[LAYERS:])
    kv = PromptKV(pages, torch.arange(BLOCK), torch.ones(BLOCK, dtype=torch.bool))
    more = torch.full((2, 2, 16), 6e4)
    kv.adder(torch.tensor([1, 3]))(0, more, -3 * more)
    keys, values = kv.layer(0)
    assert (keys[:, [1, 3]] == 65504).all() and (values[:, [1, 3]] == -65504).all() and (keys[:, 2] == 6e4).all()


# Slices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cost", "rows", "budget"), [(0.0, 3, 1), (0.6, 3, 7), (1.0, 1024, 1)])
def test_slices_make_what_one_piece_makes(cost: float, rows: int, budget: int) -> None:
    # What corrects a token depends on the rows, not on the budget.
    model, record, keys, _ = run(request(cost), 38, rows=rows)
    sliced, same_record, same_keys, _ = run(request(cost), 38, rows=rows, budget=budget)
    assert torch.equal(keys.nan_to_num(-1), same_keys.nan_to_num(-1))
    assert same_record == record and sliced.through == model.through


def test_a_slice_computes_no_more_than_it_may() -> None:
    """28 tokens in units of 4, in slices of 10. However little it may compute, it gets on."""
    assert [took for took, _ in run(request(1), 38, rows=4, budget=0.5)[3]] == [4] * 7
    found = run(request(1), 38, rows=4, budget=10)[3]
    assert all(took <= 10 for took, _ in found)
    assert all(computed <= 10 * LAYERS for _, computed in found)
    assert sum(computed for _, computed in found) == 28 * LAYERS
    assert sum(took for took, _ in found) == pytest.approx(28)
    assert len(found) >= 28 / 10


def test_no_more_than_one_unit_is_prepared_at_a_time() -> None:
    """A mask has a row per token, and what a backend wants of a unit is as large."""
    model = run(request(1), 38, rows=2)[0]
    assert len(model.through[0]) == 28 and model.most_masks <= 2


# Ranks ---------------------------------------------------------------------------------------------------------------


class Fails:
    """Raises the `number`-th time that a rank comes to a place."""

    def __init__(self, place: str, number: int) -> None:
        self.place, self.number, self.seen = place, number, 0

    def __call__(self, where: str) -> None:
        self.seen += where == self.place
        if where == self.place and self.seen == self.number:
            raise MemoryError(f"no room at {where}")


def agreements(
    fails: Callable[[str], None] = lambda where: None, parted: int = 0
) -> tuple[list[tuple[bool, int]], BaseException | None]:
    """What one rank says each time that ranks agree, with the layers that it has entered; and what it raises.

    Another rank says that it cannot go on at agreement number `parted`.
    """
    blend, said, entered = request(0.6), list[tuple[bool, int]](), 0
    cache = pages(blend.start, blend.pieces, 38)
    model = PagesModel(cache, blend.blocks)

    def before(where: str) -> None:
        nonlocal entered
        fails(where)
        entered += where == "layer"

    def agree(well: bool) -> bool:
        said.append((well, entered))
        return well and len(said) != parted

    def open_model(blocks: Sequence[int]) -> Any:
        before("open")
        return model

    model.fails = before
    blending = PageBlender(cache, BLOCK, open_model, 0.0, lambda t: t, agree, 4).begin(blend, 38)
    try:
        while not blending.done:
            blending.advance(10)
    except (MemoryError, RankFailedError) as error:
        assert not blending.done
        return said, error
    return said, None


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("open", 1),  # before anything is computed
        ("rows", 2),  # the first unit
        ("rows", 4),  # a later one
        ("written", 0),  # the last time
    ],
)
def test_no_rank_waits_for_one_that_failed(place: str, number: int) -> None:
    """Layers wait for those of other ranks. Whatever fails while a unit is prepared, all ranks hear of it before they
    compute the unit, so all have entered as many layers each time that they agree.
    """
    counted = Fails(place, 0)
    well, nothing = agreements(counted)
    said, error = agreements(Fails(place, number or counted.seen))
    assert nothing is None and isinstance(error, MemoryError)
    assert said == [*well[: len(said) - 1], (False, well[len(said) - 1][1])]
    told, error = agreements(parted=len(said))
    assert isinstance(error, RankFailedError) and told == well[: len(said)]
