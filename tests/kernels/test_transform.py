"""The linear maps on the device against the codec's stages; `test_backend.py` runs them together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.kernels.chunk_world import Batch, Cache, fill, make_cache, random_units
from tests.kernels.packing import launch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.token_classes import CLASSES
from cuvee.codec.errors import InputError
from cuvee.codec.format.streams import WINDOW
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.models.rope import cos_sin
from cuvee.codec.profiles.sections import Section, partition
from cuvee.codec.stages.reference.token_order import coding_order
from cuvee.codec.stages.reference.transform import gather as codec_gather
from cuvee.codec.stages.reference.transform import place
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import dense_rows
from cuvee.kernels.jobs import BlockField, JobField, Status, job_table
from cuvee.kernels.ops import synthesize as synthesize_module
from cuvee.kernels.ops.analyze import analysis_tokens, analyze, gather
from cuvee.kernels.ops.arguments import ChunkBatch, RotationTables, TokenOrder
from cuvee.kernels.ops.synthesize import (
    SYNTHESIS_CONFIGS,
    SynthesisConfig,
    product_precision,
    synthesis_config,
    synthesize,
)
from cuvee.kernels.ops.transform import rotation_tables
from cuvee.kernels.tiles import lay_out_tiles

CPU = torch.device("cpu")
POISON = float("nan")
SINKS = 3


def rope(rotary_dim: int, scaling: float = 1.0, interleaved: bool = False) -> Rope:
    return Rope(tuple(1e4 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)), scaling, interleaved)


def uniform(layer: LayerLayout, layers: int = 2, dtype: str = "float32") -> KVLayout:
    return KVLayout("synthetic", (layer,) * layers, dtype, None)


LAYOUTS: dict[str, KVLayout] = {
    "32": uniform(LayerLayout(2, 32, 32, rope(32))),
    "64": uniform(LayerLayout(1, 64, 64, rope(64)), dtype="bfloat16"),
    "80": uniform(LayerLayout(1, 80, 80, rope(80)), dtype="float16"),
    "96": uniform(LayerLayout(1, 96, 96, rope(96))),
    "128": uniform(LayerLayout(2, 128, 128, rope(128)), dtype="bfloat16"),
    "256": uniform(LayerLayout(1, 256, 256, rope(256))),
    "odd": uniform(LayerLayout(3, 7, 13, None), 3),
    "partial": uniform(LayerLayout(2, 33, 20, rope(10, 1.3))),
    "interleaved": uniform(LayerLayout(2, 40, 40, rope(40, interleaved=True))),
    "yarn": uniform(LayerLayout(2, 16, 16, rope(16, 1.3)), dtype="bfloat16"),
    "irregular": KVLayout(
        "synthetic",
        (
            LayerLayout(2, 12, 20, rope(12)),
            LayerLayout(1, 30, 7, rope(10, 1.2, True)),
            LayerLayout(3, 5, 9, None),
            LayerLayout(1, 160, 40, rope(12)),
        ),
        "float32",
        None,
    ),
}
CASES = [
    *(("irregular", group) for group in ("head", "unit", "layers:2")), ("64", "all"), ("32", "unit"),
    ("80", "layer"), ("96", "head"), ("128", "layer"), ("256", "head"), ("odd", "layers:2"),
    ("partial", "unit"), ("interleaved", "layer"), ("yarn", "all"), ("128", "heads:2"), ("odd", "heads:2"),
]  # fmt: skip

# Caches by layout and kind, in every order of memory; with heads that fill no tile, or several.
KINDS = [
    *(("32", kind) for kind in ("bthd", "bhtd", "tbhd", "bhdt", "hbtd", "bdht", "bthd2", "bhtd2", "single")),
    ("80", "bthd"), ("odd", "bhtd"), ("partial", "bthd"), ("interleaved", "bhdt"), ("256", "bthd"),
]  # fmt: skip
ELEMENTS = [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float32, torch.float8_e5m2]
PAGES = [(name, kind, own) for name, kind in KINDS for own in ELEMENTS[: 5 if kind == "bthd" else 2]]


@dataclass
class World:
    """Chunks in a cache, and linear maps for them that have nothing to do with each other.

    Attributes:
        centers: of each section `[SINKS + 1, N]`: of the first positions, and of all others.
        forward, inverse: of each section's blocks `[rank, n]`; the inverse ones transposed.
        columns: of all jobs, one after the other: class of each column, and its token.
    """

    batch: Batch
    cache: Cache
    centers: list[torch.Tensor]
    forward: list[list[torch.Tensor]]
    inverse: list[list[torch.Tensor]]
    columns: tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

    @property
    def ranks(self) -> list[list[int]]:
        return [[len(matrix) for matrix in section] for section in self.forward]

    @property
    def block_ranks(self) -> torch.Tensor:
        """Components of each block by class: never more of a coarser one."""
        ranks = torch.tensor([rank for section in self.ranks for rank in section])[:, None]
        return (ranks - 3 * torch.arange(CLASSES)).clamp_min(0).int().to(self.batch.device)

    def section_columns(self, index: int) -> tuple[slice, torch.Tensor]:
        """The columns of a section, and which of its values each holds (-1: none)."""
        own = slice(*self.batch.laid.bounds[index : index + 2].tolist())
        return own, torch.from_numpy(self.batch.laid.order[own]).long()

    def means(self) -> torch.Tensor:
        parts = [self.batch.laid.pack(own, index) for index, own in enumerate(self.centers)]
        return torch.cat(parts, 1).contiguous().to(self.batch.device)

    def basis(self, maps: list[list[torch.Tensor]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        parts = [m.flatten() for i, own in enumerate(maps) for m in self.batch.laid.pack_basis(own, i)]
        return torch.cat(parts).to(dtype).contiguous().to(self.batch.device)

    def jobs(self, run: slice = slice(None)) -> tuple[npt.NDArray[np.int64], int]:
        """Jobs of a run of sections of all chunks, strides with room beyond the tokens, and how many coefficients."""
        rows, size, column = [], 16, 0
        for tokens in self.batch.tokens:
            for section, ranks in enumerate(self.ranks):
                stride = -(-tokens // 16) * 16 + 16 * (section % 2)
                if section in range(len(self.ranks))[run]:
                    rows.append((tokens, size, stride, column))
                size += sum(ranks) * stride + 16
                column += tokens
        tokens, at, stride, column = np.array(rows).T
        return job_table(len(rows), tokens=tokens, coefficients=at, stride=stride, columns=column), size

    def order(self) -> dict[str, torch.Tensor]:
        """The arguments of `TokenOrder`."""
        classes, tokens = self.columns
        order = torch.from_numpy((tokens % WINDOW).astype(np.uint8)), torch.from_numpy(classes)
        return {
            "order": order[0].to(self.batch.device), "classes": order[1].to(self.batch.device),
            "block_ranks": self.block_ranks,
        }  # fmt: skip

    # What the codec makes of it ----------------------------------------------------------------------------------

    def parts(self, run: slice = slice(None)) -> Iterator[tuple[int, int, npt.NDArray[np.int64]]]:
        """Chunk, section and row of each job."""
        sections = range(len(self.ranks))[run]
        for number, job in enumerate(self.jobs(run)[0]):
            yield number // len(sections), sections[number % len(sections)], job

    def runs(self, job: npt.NDArray[np.int64], size: int) -> Iterator[tuple[slice, torch.Tensor, int]]:
        """Runs of `size` columns of a job: which, their tokens, and the class of the first."""
        own = slice(job[JobField.COLUMNS], job[JobField.COLUMNS] + job[JobField.TOKENS])
        classes, tokens = self.columns[0][own], torch.from_numpy(self.columns[1][own])
        for start in range(0, len(classes), size):
            yield slice(start, start + size), tokens[start : start + size], int(classes[start])

    def center_rows(self, chunk: int, rows: torch.Tensor | None) -> torch.Tensor:
        """The row of the means of each token of a chunk."""
        first = self.batch.sources[chunk]
        positions = torch.arange(first, first + self.batch.tokens[chunk]).clamp_max(SINKS)
        return positions if rows is None else rows[self.batch.at(chunk)].cpu().long()

    def stored(self, chunk: int) -> KVChunk:
        """What the cache holds of a chunk, float32; zero where a token has no slot."""
        slots = self.cache.slots[self.batch.at(chunk)]
        held = replace(self.cache, slots=slots.clamp_min(0))
        units = []
        for unit, scale in enumerate(self.cache.scales.nan_to_num(1.0).tolist()):
            rows = held.rows(unit, slice(None)).float().cpu() * scale
            units.append(torch.where((slots.cpu() >= 0)[:, None, None], rows, 0.0))
        return KVChunk.unchecked(units[::2], units[1::2], self.batch.layout, self.batch.sources[chunk])

    def gathered(self, means: torch.Tensor, rows: torch.Tensor | None = None, run: slice = slice(None)) -> torch.Tensor:
        """Columns of values less their centers, zeros where a column holds none, NaN elsewhere."""
        x = torch.full((self.batch.total + 2, self.batch.laid.columns + 32), POISON)
        for chunk, index, job in self.parts(run):
            tokens = int(job[JobField.TOKENS])
            columns, order = self.section_columns(index)
            rotation = Rotation(self.batch.sources[chunk], tokens, CPU, inverse=True)
            values = codec_gather(self.stored(chunk), self.batch.sections[index], rotation, slice(0, tokens))
            center = means.cpu()[self.center_rows(chunk, rows), columns]
            x[self.batch.at(chunk), columns] = (self.batch.laid.pack(values, index) - center).where(order >= 0, 0.0)
        return x

    def unpacked(self, columns: torch.Tensor, index: int) -> torch.Tensor:
        """Values `[..., N]` of a section's columns."""
        order = self.section_columns(index)[1]
        values = columns.new_empty(*columns.shape[:-1], self.batch.sections[index].values)
        values[..., order[order >= 0]] = columns[..., order >= 0]
        return values

    def analyzed(self, x: torch.Tensor, is_sorted: bool, run: slice = slice(None)) -> torch.Tensor:
        """The coefficients of these columns, NaN elsewhere."""
        y = torch.full((self.jobs(run)[1],), POISON)
        for chunk, index, job in self.parts(run):
            values = self.unpacked(x[self.batch.at(chunk), self.section_columns(index)[0]], index)
            tokens = len(values)
            runs = list(self.runs(job, analysis_tokens(max(self.batch.tokens))))
            runs = runs if is_sorted else [(slice(0, tokens), torch.arange(tokens), 0)]
            for matrix, first, out in self.blocks(y, job, index):
                for at, token, k in runs:
                    rank = max(len(matrix) - 3 * k, 0)
                    out[:rank, at] = matrix[:rank] @ values[token, first : first + matrix.shape[1]].T
        return y

    def blocks(
        self, y: torch.Tensor, job: npt.NDArray[np.int64], index: int, inverse: bool = False
    ) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
        """Map, first value and coefficients `[rank, T]` (a view) of each block of a job."""
        row = value = 0
        for matrix in (self.inverse if inverse else self.forward)[index]:
            stride = int(job[JobField.STRIDE])
            at = int(job[JobField.COEFFICIENTS]) + row * stride
            yield matrix, value, y.as_strided((len(matrix), int(job[JobField.TOKENS])), (stride, 1), at)
            row, value = row + len(matrix), value + matrix.shape[1]

    def synthesized(
        self, y: torch.Tensor, size: int, means: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor | None = None,
        run: slice = slice(None),
    ) -> Cache:  # fmt: skip
        """The cache that the codec writes."""
        want, layout = self.cache.copy(), self.batch.layout
        sizes = [(layer.kv_heads, size) for layer in layout.layers for size in (layer.head_dim, layer.value_dim)]
        outputs = [torch.zeros(self.batch.total, *size) for size in sizes]
        layers = set()
        for chunk, index, job in self.parts(run):
            section, tokens, at = self.batch.sections[index], int(job[JobField.TOKENS]), self.batch.at(chunk)
            x = torch.zeros(tokens, section.values)
            for matrix, first, coefficients in self.blocks(y, job, index, inverse=True):
                rounded = matrix.to(y.dtype).float()
                for own, token, k in self.runs(job, size):
                    rank = max(len(matrix) - 3 * k, 0)
                    x[token, first : first + matrix.shape[1]] = coefficients[:rank, own].float().T @ rounded[:rank]
            center = self.unpacked(means.cpu()[self.center_rows(chunk, rows), self.section_columns(index)[0]], index)
            keys, values = ([dense_rows(unit[at]) for unit in outputs[which::2]] for which in (0, 1))
            rotation = Rotation(self.batch.targets[chunk], tokens, CPU)
            place(x, center, section, layout, rotation, slice(0, tokens), keys, values)
            layers |= {*range(section.first_layer, section.end_layer)}
        written = range(min(layers), max(layers) + 1)
        keys_of, values_of = ([outputs[2 * layer + which].to(slots.device) for layer in written] for which in (0, 1))
        want.paged().write(keys_of, values_of, slots, written)
        return want


def make_world(
    name: str, group: str, device: torch.device, counts: tuple[int, ...] = (15, 1, 33), max_rank: int = 24,
    kind: str = "bthd", element: torch.dtype | None = None,
) -> World:  # fmt: skip
    generator, layout = torch.Generator().manual_seed(0), LAYOUTS[name]
    places = (0, SINKS - 1, 1000), (7, 0, 100_000)
    sources, targets = (tuple(own[i % 3] for i in range(len(counts))) for own in places)
    batch = Batch(layout, counts, sources, targets, device, group)
    cache = make_cache(layout, batch.total, kind, element or layout.torch_dtype, device)
    fill(cache, batch, [random_units(layout, tokens, generator) for tokens in counts])
    forward: list[list[torch.Tensor]] = []
    inverse: list[list[torch.Tensor]] = []
    for index, section in enumerate(batch.sections):
        most = [min(n, max_rank) for n in section.blocks]
        ranks = [max(r - (7 * (index + i)) % (r + 1), 0) for i, r in enumerate(most)]
        for maps in (forward, inverse):
            pairs = zip(ranks, section.blocks, strict=True)
            maps.append([torch.randn(rank, n, generator=generator) for rank, n in pairs])
    centers = [torch.randn(SINKS + 1, section.values, generator=generator) * 3 for section in batch.sections]
    draw, classes, tokens = np.random.default_rng(0), [], []
    for count in counts:
        for _ in batch.sections:
            own = draw.integers(0, 6, count).astype(np.uint8)
            tokens.append(coding_order(own))
            classes.append(own[tokens[-1]])
    return World(batch, cache, centers, forward, inverse, (np.concatenate(classes), np.concatenate(tokens)))


def centered(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Means with further rows behind them, and rows: a center of its own for every third token."""
    generator, means, total = torch.Generator().manual_seed(11), world.means(), world.batch.total
    further = torch.randn(total, means.shape[1], generator=generator).to(means.device)
    rows = torch.cat([world.center_rows(chunk, None) for chunk in range(len(world.batch.tokens))])
    own = torch.arange(total) % 3 == 0
    rows[own] = len(means) + torch.randperm(total, generator=generator)[own]
    return torch.cat([means, further]), rows.int().to(means.device)


def test_llama_is_one_tile_a_head() -> None:
    layout = uniform(LayerLayout(8, 128, 128, rope(128)), 2, "bfloat16")
    for group, blocks in (("head", 32), ("unit", 4), ("layer", 2), ("layers:2", 1)):
        tables = lay_out_tiles(layout, partition(layout, group), {rope(128): 0})
        assert (len(tables.tiles), tables.pairs, len(tables.blocks), tables.columns) == (32, 64, blocks, 4096)
        assert not (tables.order < 0).any()


def test_a_block_must_not_end_within_a_head() -> None:
    with pytest.raises(InputError, match="an end within a head"):
        lay_out_tiles(LAYOUTS["odd"], [Section(0, 1, (10, 50))], {})


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("use_source", [False, True])
def test_rotation_tables(use_source: bool, inverse: bool, device: torch.device) -> None:
    ropes = [rope(12), rope(128, 1.3), Rope((1.0, 0.9999999, 0.5), 0.7)]
    inv_freq = torch.tensor([f for r in ropes for f in r.inv_freq], device=device)
    scaling = torch.tensor([r.attention_scaling for r in ropes for _ in r.inv_freq], device=device)
    rows = [[33, 2, 0, 5], [1, 35, 2**20 - 1, 2**24 + 1], [16, 40, 131_056, 2**20 - 16]]
    got = [torch.full((60, len(inv_freq)), POISON, device=device) for _ in range(2)]
    chunks = torch.tensor(rows, device=device)
    rotation_tables(chunks, inv_freq, scaling, RotationTables(*got), use_source, inverse, 33)
    assert all(int(table.isnan().all(1).sum()) == 60 - 50 for table in got)
    for tokens, first, source, target in rows:
        positions = torch.arange(tokens, device=device) + (source if use_source else target)
        column = 0
        for r in ropes:
            square = r.attention_scaling**2 if inverse else 1
            for mine, theirs in zip(got, cos_sin(r, positions), strict=True):
                part = mine[first : first + tokens, column : column + len(r.inv_freq)]
                torch.testing.assert_close(part, theirs / square, rtol=0, atol=3e-7)  # two units of float32 at 1.43
            column += len(r.inv_freq)
    none = torch.empty(0, device=device)  # without a RoPE
    tables = RotationTables(none.view(5, 0), none.view(5, 0))
    rotation_tables(torch.tensor([[5, 0, 0, 0]], device=device), none, none, tables, use_source, inverse, 5)


# From a cache to coefficients -----------------------------------------------------------------------------------


def check_gather(world: World, means: torch.Tensor, rows: torch.Tensor | None = None, run: slice = slice(None)) -> None:
    """At most three roundings of sums of two products; nothing else is written."""
    cos, sin = world.batch.rotations(True)
    x = torch.full((world.batch.total + 2, world.batch.laid.columns + 32), POISON, device=world.batch.device)
    arguments = world.batch.arguments(world.cache, run=run)
    more = {} if rows is None else {"center_rows": rows}
    launch(gather, **arguments, cos=cos, sin=sin, means=means, x=x, **more)
    torch.testing.assert_close(x.cpu(), world.gathered(means, rows, run), rtol=1e-6, atol=2e-5, equal_nan=True)
    assert not arguments["status"].any()


@pytest.mark.parametrize(("name", "group"), CASES)
def test_gather(name: str, group: str, device: torch.device) -> None:
    world = make_world(name, group, device)
    means = world.means()
    means[:, torch.from_numpy(world.batch.laid.order < 0)] = 7
    check_gather(world, means)
    check_gather(world, *centered(world))


def test_gather_a_run_of_sections_with_holes(device: torch.device) -> None:
    world = make_world("irregular", "layer", device)
    world.cache.slots[[2, 15, 40]] = -1
    check_gather(world, world.means(), run=slice(1, 3))


@pytest.mark.parametrize(("name", "kind", "element"), PAGES)
def test_gather_from_pages(name: str, kind: str, element: torch.dtype, device: torch.device) -> None:
    world = make_world(name, "layer", device, (33, 15), kind=kind, element=element)
    world.cache.slots[5] = -1
    check_gather(world, world.means())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_gather_flags_what_is_not_finite_and_slots(value: float, device: torch.device) -> None:
    world = make_world("irregular", "layer", device, kind="dense")
    world.cache.units[0][0, 2 + 3, 1, 11] = value  # chunk 0, layer 0
    world.cache.units[5][0, 2 + 15, 2, 8] = value  # chunk 1, layer 2
    world.cache.units[6][0, 0] = value  # nobody's
    world.cache.slots[20] = 10**6  # chunk 2: all sections
    arguments = world.batch.arguments(world.cache)
    cos, sin = world.batch.rotations(True)
    x = torch.empty(world.batch.total, world.batch.laid.columns, device=device)
    launch(gather, **arguments, cos=cos, sin=sin, means=world.means(), x=x)
    expected = torch.zeros(3, len(world.batch.sections), dtype=torch.int32)
    expected[0, 0] = expected[1, 2] = int(Status.NOT_FINITE)
    expected[2] = int(Status.SLOT)
    assert torch.equal(arguments["status"].cpu(), expected.flatten())


def check_analyze(world: World, is_sorted: bool, run: slice = slice(None)) -> torch.Tensor:
    """float32 sums of up to N products, far from bfloat16's error; nothing but the owed elements is written."""
    x = world.gathered(world.means())
    first, end, _ = run.indices(len(world.ranks))
    _, blocks, _ = world.batch.laid.with_ranks(world.ranks)
    own = (blocks[:, BlockField.SECTION] >= first) & (blocks[:, BlockField.SECTION] < end)
    jobs, size = world.jobs(run)
    y = torch.full((size,), POISON, device=world.batch.device)
    shared = world.batch.arguments(world.cache, run=run)
    batch = ChunkBatch(*(shared[field.name] for field in fields(ChunkBatch)))
    order = TokenOrder(**world.order() | {"block_ranks": world.block_ranks[torch.from_numpy(own)].contiguous()})
    listed, cut = (torch.from_numpy(table.copy()).to(world.batch.device) for table in (jobs, blocks[own]))
    analyze(
        x.to(world.batch.device), listed, cut, world.basis(world.forward), batch, y,
        max(rank for ranks in world.ranks[run] for rank in ranks), order if is_sorted else None,
    )  # fmt: skip
    length = max(section.values for section in world.batch.sections)
    bound = 16e-6 * float(x[: world.batch.total, : world.batch.laid.columns].abs().max()) * length**0.5
    torch.testing.assert_close(y.cpu(), world.analyzed(x, is_sorted, run), rtol=0, atol=bound, equal_nan=True)
    return y


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(("name", "group"), CASES)
def test_analyze(name: str, group: str, is_sorted: bool, device: torch.device) -> None:
    check_analyze(make_world(name, group, device, (15, 1, 70)), is_sorted)


def test_analyze_a_run_of_sections_and_large_ranks(device: torch.device) -> None:
    world = make_world("128", "layer", device, (20,), max_rank=200)
    assert [rank for (rank,) in world.ranks] == [200, 193]
    assert int((~check_analyze(world, False, slice(1, 2)).isnan()).sum()) == 193 * 20
    assert bool(check_analyze(make_world("32", "layer", device, max_rank=0), False).isnan().all())


# From coefficients to a cache -----------------------------------------------------------------------------------


def check_synthesis(
    world: World, dtype: torch.dtype, run: slice = slice(None), config: SynthesisConfig | None = None,
    means: torch.Tensor | None = None, rows: torch.Tensor | None = None, beyond: int | None = None,
) -> list[int]:  # fmt: skip
    """Equal but for the order of float32 sums: then at most a step of the element type apart, mostly none.

    All memory is compared. The token `beyond` has a slot that the cache lacks. Returns the status of the jobs.
    """
    tiles, _, _ = world.batch.laid.with_ranks(world.ranks)
    arguments = world.batch.arguments(world.cache, tiles, run)
    element, terms = world.cache.element, max(rank for ranks in world.ranks for rank in ranks)
    jobs, size = world.jobs(run)
    y = torch.randn(size, generator=torch.Generator().manual_seed(5)).to(dtype)
    config = config or synthesis_config(dtype, element, 1 << 16, max(world.batch.tokens), arguments["aligned"])
    means, (cos, sin) = world.means() if means is None else means, world.batch.rotations(False)
    beyond_all, slots = world.cache.units[0].shape[:2].numel(), arguments["slots"].clone()
    if beyond is not None:
        arguments["slots"] = slots.clone()
        arguments["slots"][beyond], slots[beyond] = beyond_all, -1
    want = world.synthesized(y, config.block_t, means, slots, rows, run)
    for memory in world.cache.raw:
        memory.fill_(0xAB)
    launch(
        synthesize, **arguments, **world.order(), y=y.to(world.batch.device), config=config, cos=cos, sin=sin,
        jobs=torch.from_numpy(jobs.copy()).to(world.batch.device), basis=world.basis(world.inverse, dtype),
        means=means, **({} if rows is None else {"center_rows": rows}),
    )  # fmt: skip
    used = arguments["slots"][(arguments["slots"] >= 0) & (arguments["slots"] != beyond_all)].cpu()
    for mine, theirs, scale in zip(world.cache.units, want.units, world.cache.scales.nan_to_num(1.0), strict=True):
        a, b = (unit.cpu().flatten(0, 1).float() for unit in (mine, theirs))
        # On a GPU products that become float16 round their factors to TF32.
        factor = 2**-11 if element == torch.float16 else 2e-7
        bound = factor * max(terms, 1) ** 0.5 * 8 * float(b.abs().max())
        bound += 1e-3 / float(scale) * (element.itemsize == 1)
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(element).eps, atol=bound)
        # A sum that lies at a tie of the element type may fall to either side. TF32 products differ everywhere.
        if element.itemsize < 4 and dtype != torch.float32:
            assert float((a != b).float().mean()) < 0.02
        free = torch.ones(len(a), dtype=torch.bool)
        free[used] = False
        assert bool(free.any()) and torch.equal(a[free], b[free])
    status: list[int] = arguments["status"].tolist()
    return status


@pytest.mark.parametrize(
    ("name", "group", "dtype"),
    [
        *((*case, torch.bfloat16) for case in CASES),
        *((name, "layer", torch.float32) for name in ("irregular", "80", "partial")),
        ("yarn", "unit", torch.float16),
    ],
)
def test_synthesize(name: str, group: str, dtype: torch.dtype, device: torch.device) -> None:
    assert not any(check_synthesis(make_world(name, group, device), dtype))


@pytest.mark.parametrize(("name", "group"), [("irregular", "layer"), ("64", "layers:2"), ("80", "head")])
def test_synthesize_with_centers(name: str, group: str, device: torch.device) -> None:
    world = make_world(name, group, device)
    means, rows = centered(world)
    check_synthesis(world, torch.bfloat16, means=means, rows=rows)


@pytest.mark.parametrize("config", SYNTHESIS_CONFIGS)
def test_synthesize_in_every_config(config: SynthesisConfig, device: torch.device) -> None:
    check_synthesis(make_world("64", "layer", device, (1, 63, 17, 257), max_rank=40), torch.bfloat16, config=config)


def test_synthesize_long_sums(device: torch.device) -> None:
    world = make_world("128", "layers:2", device, (63,), max_rank=301)
    assert world.ranks == [[301]]
    check_synthesis(world, torch.bfloat16)


def test_synthesize_only_means(device: torch.device) -> None:
    world = make_world("irregular", "unit", device, max_rank=0)
    assert not any(rank for ranks in world.ranks for rank in ranks)
    check_synthesis(world, torch.bfloat16)


@pytest.mark.parametrize("name", ["80", "yarn", "96"])  # of float16, bfloat16 and float32
def test_synthesize_stays_in_range(name: str, device: torch.device) -> None:
    world = make_world(name, "layer", device, (5,))
    means = world.means()
    means[:, ::11] = 3.4028e38  # one of a pair; `yarn` turns it and scales it
    check_synthesis(world, torch.bfloat16, means=means)
    rows = [world.cache.rows(unit, slice(None)) for unit in range(4)]
    limit = torch.finfo(rows[0].dtype).max
    assert all(bool(own.isfinite().all()) for own in rows)
    assert any(bool((own == limit).any()) for own in rows) or name == "96"


@pytest.mark.parametrize(("name", "kind", "element"), [case for case in PAGES if case[0] in ("32", "odd")])
def test_synthesize_into_pages(name: str, kind: str, element: torch.dtype, device: torch.device) -> None:
    world = make_world(name, "layer", device, (33, 15), kind=kind, element=element)
    world.cache.slots[5] = -1
    sections = len(world.batch.sections)
    assert check_synthesis(world, torch.bfloat16, beyond=40) == [0] * sections + [int(Status.SLOT)] * sections


def test_synthesize_a_run_of_sections(device: torch.device) -> None:
    check_synthesis(make_world("irregular", "layer", device), torch.float32, slice(1, 3))


def test_float16_takes_products_of_its_own_precision() -> None:
    assert product_precision(torch.float32, torch.float16) == "tf32"
    assert product_precision(torch.float32, torch.float32) == "ieee"
    wide, exact = (synthesis_config(torch.float32, element, 1400, 256) for element in (torch.float16, torch.float32))
    assert wide.block_t > exact.block_t


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_amd_is_never_asked_for_tf32(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """gfx1100 has no such precision, and its compiler refuses the word even where it means nothing."""
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert {product_precision(dtype, element) for element in (torch.float16, torch.bfloat16)} == {"ieee"}


def test_choice_of_config() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for rank in (0, 88, 128, 1400):
            for tokens in (1, 16, 17, 64, 128, 256):
                config = synthesis_config(dtype, torch.float16, rank, tokens)
                assert config in SYNTHESIS_CONFIGS and (tokens > 16 or config.block_t == 16)


def test_a_triton_without_the_fence_copies_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator finds the missing fence where such a Triton is installed; here, that the launch avoids it."""
    launched: list[int] = []
    for fenced in (True, False):
        monkeypatch.setattr(synthesize_module, "FENCED", fenced)
        launched += [synthesize_module._stages(config) for config in SYNTHESIS_CONFIGS]
    assert launched == [config.num_stages for config in SYNTHESIS_CONFIGS] + [1] * len(SYNTHESIS_CONFIGS)
