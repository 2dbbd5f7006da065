"""The kernels of the generic scheme against the codec's arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.packing import launch

from cuvee.codec.entropy.family import scale_codes, scale_index, step_value
from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.models.rope import cos_sin
from cuvee.codec.profiles.sections import partition
from cuvee.codec.stages.reference.transform import place
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import dense_rows
from cuvee.kernels.jobs import ChunkField, JobField, Status, TileField
from cuvee.kernels.ops import generic
from cuvee.kernels.ops.naive import generic as naive
from cuvee.kernels.ops.pages import contiguity, place_row
from cuvee.kernels.tiles import TileLayout, lay_out_tiles

POISON = 0xAB
TARGETS = (40, 7, 300)


@dataclass(frozen=True)
class Setting:
    """Chunks of a layout, with random coefficients and channels of which some are not coded."""

    layout: KVLayout
    laid: TileLayout
    tokens: tuple[int, ...]
    rows: torch.Tensor
    scale: torch.Tensor
    means: torch.Tensor
    jobs: torch.Tensor
    chunks: torch.Tensor
    y: torch.Tensor

    @property
    def sections(self) -> int:
        return len(self.laid.bounds) - 1

    def at(self, chunk: int) -> slice:
        first = sum(self.tokens[:chunk])
        return slice(first, first + self.tokens[chunk])

    def columns(self, section: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of a section that hold a value, and which of its values each holds."""
        bounds = self.laid.bounds[section : section + 2]
        order = torch.from_numpy(self.laid.order[bounds[0] : bounds[1]]).long()
        filled = torch.nonzero(order >= 0).flatten()
        return filled + int(bounds[0]), order[filled]

    def tables(self, device: torch.device) -> dict[str, Any]:
        arrays = {"rows": self.rows, "scale": self.scale, "means": self.means}
        tiles = torch.from_numpy(self.laid.tiles)
        return {
            key: value.to(device)
            for key, value in {**arrays, "jobs": self.jobs, "chunks": self.chunks, "tiles": tiles}.items()
        }

    def sizes(self) -> dict[str, Any]:
        return {
            "sections": self.sections, "first_section": 0, "max_tokens": max(self.tokens), "pairs": self.laid.pairs
        }  # fmt: skip


def angles_of(layout: KVLayout) -> dict[Rope, int]:
    columns: dict[Rope, int] = {}
    for layer in layout.layers:
        if layer.rope is not None and layer.rope not in columns:
            columns[layer.rope] = sum(rope.rotary_dim // 2 for rope in columns)
    return columns


def make_setting(layout: KVLayout, tokens: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Setting:
    generator = torch.Generator().manual_seed(1)
    laid = lay_out_tiles(layout, partition(layout, "unit"), angles_of(layout))
    sections, columns = len(laid.bounds) - 1, laid.columns
    rows = torch.full((len(tokens), columns), -1, dtype=torch.int32)
    jobs = np.full((len(tokens) * sections, len(JobField)), -(1 << 40), np.int64)
    levels = 3
    for chunk, count in enumerate(tokens):
        for section in range(sections):
            # Only columns that hold a value are coded, in any order.
            first, end = laid.bounds[section : section + 2]
            filled = np.flatnonzero(laid.order[first:end] >= 0) + int(first)
            live = filled[torch.rand(len(filled), generator=generator).numpy() < 0.7]
            rows[chunk, live] = torch.randperm(len(live), generator=generator).int()
            job = jobs[chunk * sections + section]
            job[[JobField.TOKENS, JobField.CHUNK, JobField.LEVELS, JobField.STRIDE]] = count, chunk, levels, count + 5
            levels += len(live) * (count + 5)
    chunks = np.zeros((len(tokens), len(ChunkField)), np.int64)
    chunks[:, ChunkField.TOKENS] = tokens
    chunks[:, ChunkField.FIRST] = np.cumsum(tokens) - tokens
    chunks[:, ChunkField.TARGET] = TARGETS[: len(tokens)]
    scale = torch.rand(rows.shape, generator=generator) + 0.1
    scale[rows < 0] = float("nan")
    means = 3 * torch.randn(rows.shape, generator=generator).bfloat16().float()
    y = torch.randn(levels, generator=generator).to(dtype)
    return Setting(
        layout, laid, tokens, rows, scale, means, torch.from_numpy(jobs), torch.from_numpy(chunks), y
    )  # fmt: skip


def rotations(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.cat([torch.arange(s, s + t) for s, t in zip(TARGETS, setting.tokens, strict=False)])
    tables = [torch.stack(cos_sin(rope, positions)) for rope in angles_of(setting.layout)]
    cos, sin = torch.cat(tables or [torch.zeros(2, len(positions), 1)], dim=2).unbind()
    return cos.contiguous(), sin.contiguous()


def caches(
    layout: KVLayout, total: int, element: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Poisoned pages of 16 tokens for every unit, their places, and slots in no order."""
    blocks = -(-total // 16) + 1
    units = [
        torch.full((blocks, 16, layer.kv_heads, size * element.itemsize), POISON, dtype=torch.uint8, device=device)
        for layer in layout.layers
        for size in (layer.head_dim, layer.value_dim)
    ]
    places = torch.tensor([place_row(unit.view(element)) for unit in units], device=device)
    slots = torch.randperm(blocks * 16, generator=torch.Generator().manual_seed(3))[:total].to(device)
    return units, places, slots


@pytest.mark.parametrize(
    ("name", "tokens", "element", "dtype"),
    [
        ("irregular", (1, 63, 70), torch.float32, torch.float32),
        ("partial", (15, 64, 8), torch.bfloat16, torch.float32),
        ("interleaved", (15, 20), torch.float16, torch.bfloat16),
        ("no-rope", (9,), torch.float8_e4m3fn, torch.float32),
        ("yarn", (2, 130), torch.float8_e5m2, torch.float32),
    ],
)
def test_place_channels(
    layouts: dict[str, KVLayout], device: torch.device, name: str, tokens: tuple[int, ...], element: torch.dtype,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    setting = make_setting(layouts[name], tokens, dtype)
    cos, sin = (table.to(device) for table in rotations(setting))
    results = []
    for run in (generic.place_channels, naive.place_channels_reference):
        units, places, slots = caches(setting.layout, sum(tokens), element, device)
        unit_stride, aligned = contiguity(places.cpu().numpy(), setting.laid.tiles, element)
        slots[2:4] = -1
        slots[-1] = 1 << 33
        status = torch.zeros(len(setting.jobs), dtype=torch.int32, device=device)
        launch(
            run, y=setting.y.to(device), **setting.tables(device), places=places,
            scales=torch.full((len(units),), 0.05).to(device), slots=slots, cos=cos, sin=sin,
            status=status, **setting.sizes(), element=element, unit_stride=unit_stride, aligned=aligned,
        )  # fmt: skip
        results.append((units, slots, status))
    (units, slots, status), (others, _, expected) = results
    assert all(torch.equal(a, b) for a, b in zip(units, others, strict=True))
    assert (
        torch.equal(status, expected)
        and status.tolist() == [0] * (len(status) - setting.sections) + [int(Status.SLOT)] * setting.sections
    )
    if element.itemsize == 1:
        return
    # The codec's own way: values in their own order, placed by `transform.place`.
    for chunk, count in enumerate(tokens):
        keys = [torch.zeros(count, x.kv_heads, x.head_dim, dtype=element) for x in setting.layout.layers]
        values = [torch.zeros(count, x.kv_heads, x.value_dim, dtype=element) for x in setting.layout.layers]
        rotation = Rotation(TARGETS[chunk], count, torch.device("cpu"))
        for index, section in enumerate(partition(setting.layout, "unit")):
            job = setting.jobs[chunk * setting.sections + index].tolist()
            x, mean = torch.zeros(count, section.values), torch.zeros(1, section.values)
            for column, value in zip(*setting.columns(index), strict=True):
                mean[0, value] = setting.means[chunk, column]
                row = int(setting.rows[chunk, column])
                if row >= 0:
                    at = job[JobField.LEVELS] + row * job[JobField.STRIDE]
                    x[:, value] = setting.y[at : at + count].float() * setting.scale[chunk, column]
            rows = (list(map(dense_rows, keys)), list(map(dense_rows, values)))
            place(x, mean, section, setting.layout, rotation, slice(0, count), *rows)
        slot = slots[setting.at(chunk)].cpu()
        kept = (slot >= 0) & (slot < 1 << 30)
        for layer in range(len(keys)):
            for unit, tensor in ((2 * layer, keys[layer]), (2 * layer + 1, values[layer])):
                got = units[unit].view(element).flatten(0, 1).cpu()[slot[kept]]
                assert torch.equal(got, tensor[kept])


def test_place_a_run_of_layers(layouts: dict[str, KVLayout], device: torch.device) -> None:
    setting = make_setting(layouts["irregular"], (9, 18))
    cos, sin = (table.to(device) for table in rotations(setting))
    results = []
    for first in (0, 1):
        units, places, slots = caches(setting.layout, 27, torch.float32, device)
        tables = setting.tables(device)
        column = int(setting.laid.bounds[first])
        tables["tiles"] = tables["tiles"][tables["tiles"][:, TileField.SECTION] >= first]
        tables["jobs"] = tables["jobs"].view(2, 3, -1)[:, first:].reshape(2 * (3 - first), -1)
        for name in ("rows", "scale", "means"):
            tables[name] = tables[name][:, column:].contiguous()
        sizes: dict[str, Any] = {**setting.sizes(), "sections": 3 - first, "first_section": first}
        status = torch.zeros(len(tables["jobs"]), dtype=torch.int32, device=device)
        launch(
            generic.place_channels, y=setting.y.to(device), **tables, places=places,
            scales=torch.ones(len(units), device=device), slots=slots,
            cos=cos, sin=sin, status=status, **sizes, first_column=column, element=torch.float32,
            unit_stride=False, aligned=False,
        )  # fmt: skip
        results.append(units)
    assert bool((results[1][0] == POISON).all()) and bool((results[1][1] == POISON).all())
    assert all(torch.equal(a, b) for a, b in zip(results[0][2:], results[1][2:], strict=True))


@pytest.mark.parametrize("tokens", [(1, 15, 63), (257, 2)])
def test_channel_statistics(device: torch.device, tokens: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(tokens) + 4, 70, generator=generator) * torch.linspace(-3, 3, 70).exp2() + 5
    x[:, 0], x[:, 1], x[:, 2] = 0, 7.3, 1e30 * x[:, 2]
    chunks = np.zeros((len(tokens), len(ChunkField)), np.int64)
    chunks[:, ChunkField.TOKENS], chunks[:, ChunkField.FIRST] = tokens, 4 + np.cumsum(tokens) - tokens
    results = []
    for run in (generic.channel_statistics, naive.channel_statistics_reference):
        means = torch.full((len(tokens) + 1, 70), float("nan"), device=device)
        squares = torch.full((len(tokens) + 1, 70), float("nan"), dtype=torch.float64, device=device)
        run(x.to(device), torch.from_numpy(chunks).to(device), means[:-1], squares[:-1])
        assert bool(means[-1].isnan().all()) and bool(squares[-1].isnan().all())
        results.append((means[:-1].cpu(), squares[:-1].cpu()))
    (means, squares), (other_means, other_squares) = results
    assert torch.equal(means, other_means)
    # n additions of non-negative numbers in another order.
    torch.testing.assert_close(squares, other_squares, rtol=2 * max(tokens) * 2.0**-53, atol=0)
    for chunk, count in enumerate(tokens):
        part = x[chunks[chunk, ChunkField.FIRST] : chunks[chunk, ChunkField.FIRST] + count]
        expected = part.mean(0, dtype=torch.float64).bfloat16()
        assert torch.equal(means[chunk].bfloat16(), expected)
        deviation = torch.linalg.vector_norm(part - expected.float(), dim=0, dtype=torch.float64) / count**0.5
        ours, theirs = (scale_codes(scale_index(d.numpy()), -64) for d in ((squares[chunk] / count).sqrt(), deviation))
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(("name", "tokens"), [("irregular", (1, 63, 70)), ("gqa", (64, 8))])
def test_normalize_channels(
    layouts: dict[str, KVLayout], device: torch.device, name: str, tokens: tuple[int, ...]
) -> None:  # fmt: skip
    setting = make_setting(layouts[name], tokens)
    x = torch.randn(sum(tokens), setting.laid.columns, generator=torch.Generator().manual_seed(4))
    setting.scale[setting.rows >= 0] = step_value(-37)
    results = []
    for run in (generic.normalize_channels, naive.normalize_channels_reference):
        y = torch.full_like(setting.y, float("nan")).to(device)
        status = torch.zeros(len(setting.jobs), dtype=torch.int32, device=device)
        launch(run, x=x.to(device), **setting.tables(device), y=y, status=status, **setting.sizes())
        results.append(y.cpu())
    assert torch.equal(results[0].view(torch.int32), results[1].view(torch.int32))
    # The codec's own arithmetic.
    for chunk, column in torch.nonzero(setting.rows >= 0)[::17].tolist():
        section = int(np.searchsorted(setting.laid.bounds, column, side="right")) - 1
        job = setting.jobs[chunk * setting.sections + section].tolist()
        part = x[setting.at(chunk), column].clone()
        part -= setting.means[chunk, column]
        part /= step_value(-37)
        at = job[JobField.LEVELS] + int(setting.rows[chunk, column]) * job[JobField.STRIDE]
        assert torch.equal(results[0][at : at + len(part)], part)
        assert bool(results[0][at + len(part) : at + job[JobField.STRIDE]].isnan().all())
