"""Profiles on the device: coding plans, packed bases, means and rotation frequencies as flat arrays."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.family import Family, coding_plan
from cuvee.codec.entropy.residuals import FINER
from cuvee.codec.entropy.tables import TOTAL
from cuvee.codec.entropy.token_classes import CLASSES
from cuvee.codec.errors import ProfileError
from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.profiles.sections import Section
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.support.lazy import lazy
from cuvee.kernels.centers import TokenCenters
from cuvee.kernels.jobs import I64
from cuvee.kernels.ops.arguments import DevicePlans
from cuvee.kernels.ops.rans import coding_table, decoding_table
from cuvee.kernels.ops.symbols import level_limit
from cuvee.kernels.ops.transform import rotation_tables
from cuvee.kernels.tiles import TileLayout, lay_out_tiles

Numbers = TypeVar("Numbers", int, I64)

COMMON_FREQUENCY = TOTAL // 100  # classes of at least this frequency are not rare
ANGLE_ALIGNMENT = 4  # columns of a rotation table: the widest load of a thread
_UNSERVED = coding_plan(np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class FamilyTables:
    """The entropy tables of a family on the device.

    `decoding` is uint32 `[K, WIDTH]` of `rans.decoding_table`; `entries` are uint32 `[K, 256, 2]`, for encoding
    (`rans.coding_table`); `reach` is int32 `[K, 2]`, for quantizing.
    """

    decoding: torch.Tensor
    entries: torch.Tensor
    reach: torch.Tensor

    @classmethod
    def of(cls, family: Family, device: torch.device) -> FamilyTables:
        """Copy the tables of a family to a device."""
        tables = family.tables
        arrays = decoding_table(tables), coding_table(tables), tables.reach
        decoding, entries, reach = (torch.from_numpy(array).to(device) for array in arrays)
        return cls(decoding, entries, reach)


def pack_plans(
    parts: Sequence[StepCoding],
    by_class: Sequence[npt.NDArray[np.intp]],
    deepest: Sequence[npt.NDArray[np.intp]],
    family: Family,
    device: torch.device,
) -> tuple[I64, DevicePlans]:
    """Return the plans of all classes of all sections of all parts, which share a family: `plans` on the host, and all.

    Of each section, `by_class` `[16, blocks]` has the components that a column of each class has in some part, and
    `deepest` `[blocks]` the most of them.
    """
    table: list[tuple[int, ...]] = []
    tables: list[npt.NDArray[Any]] = []
    components: list[npt.NDArray[np.int32]] = []
    maps: list[npt.NDArray[np.int32]] = []
    quantizer = family.quantizer
    plane = row = map_at = 0
    for section, extents, most in (one for part in parts for one in zip(part.sections, by_class, deepest, strict=True)):
        begin, width = np.cumsum(most) - most, int(most.sum())
        for k, (ranks, extent, step) in enumerate(
            zip(section.class_ranks, extents, section.classed.steps.tolist(), strict=True)
        ):
            plan = section.classed.plans[k] or _UNSERVED
            rows, y_rows = len(plan.shift), _runs(begin, np.array(ranks))
            last = int(_runs(begin, extent).max(initial=-1)) + 1
            floats = np.array([step, 1.0 / step, level_limit(step), 0], np.float32).view(np.int64)
            table.append((plan.planes, rows, plane, row, last, map_at, *floats.tolist()))
            tables.append(plan.tables)
            low = np.full(rows, -1, np.int32)
            low[plan.wide] = rows + np.arange(len(plan.wide))
            at = plan.level_table
            sizes = np.column_stack([quantizer.shrink[at], quantizer.dead_zone[at], quantizer.rounding[at]])
            numbers = np.column_stack([plan.shift, low, y_rows, np.zeros(rows)])
            components.append(np.hstack([sizes.astype(np.float32).view(np.int32), numbers.astype(np.int32)]))
            row_map = np.full(width, -1, np.int32)
            row_map[y_rows] = np.arange(rows)
            maps.append(row_map)
            plane, row, map_at = plane + plan.planes, row + rows, map_at + width
    plans = np.array(table, np.int64)
    arrays = plans, np.concatenate(tables).astype(np.int32), np.concatenate(components), np.concatenate(maps)
    return plans, DevicePlans(*(torch.from_numpy(array).to(device) for array in arrays))


class Geometry:
    """The tiles of a layout's heads, for one partition into sections, and the layout's RoPEs side by side.

    `inv_freq` and `scaling` are float32 `[A]` on the device, one value per column of the rotation tables.
    """

    def __init__(self, layout: KVLayout, sections: Sequence[Section], device: torch.device) -> None:
        columns: dict[Rope, int] = {}
        inv_freq: list[float] = []
        scaling: list[float] = []
        for layer in layout.layers:
            if layer.rope is not None and layer.rope not in columns:
                columns[layer.rope] = len(inv_freq)
                padding = -len(layer.rope.inv_freq) % ANGLE_ALIGNMENT
                inv_freq += [*layer.rope.inv_freq, *[0.0] * padding]
                scaling += [layer.rope.attention_scaling] * (len(inv_freq) - len(scaling))
        # Without any RoPE there is one unused column, because a kernel's pointer must be valid.
        self.inv_freq = torch.tensor(inv_freq or [0.0], dtype=torch.float32).to(device)
        self.scaling = torch.tensor(scaling or [1.0], dtype=torch.float32).to(device)
        self.tiles = lay_out_tiles(layout, sections, columns)

    def turns(self, chunks: torch.Tensor, rows: int, max_tokens: int, source: bool = False) -> torch.Tensor:
        """Return a table of `rows` rows for all tokens of these chunks; see `rotation_tables`."""
        turns = self.inv_freq.new_empty(rows, 2, len(self.inv_freq))
        rotation_tables(chunks, self.inv_freq, self.scaling, turns, source=source, max_tokens=max_tokens)
        return turns


class PackedBases:
    """The bases of a profile on a device, in the order of tiles: once, whatever steps and blobs are coded.

    Args:
        tiles: of the profile's layout and sections.
        learned: its sections, with token ids or without.
        device: of the bases.
    """

    def __init__(self, tiles: TileLayout, learned: Sequence[SectionProfile], device: torch.device) -> None:
        self._tiles, self._device = tiles, device
        self._bases = [section.basis for section in learned]
        self._inverses: dict[torch.dtype, torch.Tensor] = {}

    @property
    def ranks(self) -> list[tuple[int, ...]]:
        """Components per section and block."""
        return [basis.block_ranks for basis in self._bases]

    def inverse(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the inverse bases, of the dtype of their products."""
        if dtype not in self._inverses:
            self._inverses[dtype] = self._packed([[each.T for each in basis.inverse] for basis in self._bases], dtype)
        return self._inverses[dtype]

    @lazy
    def forward(self) -> torch.Tensor:
        """The forward bases, float32."""
        return self._packed([basis.forward for basis in self._bases], torch.float32)

    def _packed(self, bases: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
        packed = [
            matrix.reshape(-1).to(dtype)
            for index, matrices in enumerate(bases)
            for matrix in self._tiles.pack_basis(matrices, index)
        ]
        # Converted on the host, so the copy has ended when this returns, and any stream may use it.
        return torch.cat(packed).to(self._device)


_packed: WeakKeyDictionary[Profile, dict[torch.device, PackedBases]] = WeakKeyDictionary()
_packing = threading.Lock()


def packed_bases(profile: Profile, tiles: TileLayout, device: torch.device) -> PackedBases:
    """Return the bases of a profile on a device; they live as long as the profile."""
    with _packing:
        of_profile = _packed.setdefault(profile, {})
        if device not in of_profile:
            of_profile[device] = PackedBases(tiles, profile.learned, device)
        return of_profile[device]


class LinearMaps:
    """The bases of a learned profile, cut to leading components (`ranks`, per section and block) in the order of tiles.

    `tiles` and `blocks` are int64 tables on the host, with ranks and bases filled in.
    """

    def __init__(
        self, geometry: Geometry, bases: PackedBases, ranks: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self.bases = bases
        self.tiles, self.blocks = geometry.tiles.with_ranks(ranks, bases.ranks)
        self.device_tiles = torch.from_numpy(self.tiles).to(device)
        self.device_blocks = torch.from_numpy(self.blocks).to(device)


class TransformPlan:
    """Everything on the device that coding at one step of a learned profile needs.

    A class has the leading components of each block. To keep the components of all classes in the same rows, the
    coefficients of a section are laid out for the finest class that is served; coarser classes leave rows unused. A
    base and its refinement share the rows.

    Args:
        product: dtype of the inverse transform's matrix product, bfloat16 or float32.
        predicted: whether the blobs hold token ids.
        refined: whether a refinement follows each blob.

    Attributes:
        learned: how the profile's sections are coded.
        family: whose tables and quantizer the blobs have; `tables` on the device.
        coding: on the host, of each part: of the blobs, and of their refinements.
        plans: the plan of class k of section s in a part p, in row 16 (S p + s) + k, on the host; `device_plans` on the
            device. Classes that are not served have no planes.
        block_ranks: int32 `[blocks, 16]` components of each block by class.
        maps: the bases, as deep as the finest class needs them.
        finest: int64 `[parts, S]` finest class of each section that is served.
        planes: int64 `[parts, S, 16]`; the maximum over the classes is P of the format, `most_planes`.
        bits: float64 `[parts, S, 16]` that a token of each class is expected to take.
        usual: int64 `[S]` the finest common class, which tells how large a chunk usually is.
        freq: uint16 `[S, 256]` of the tables that code the classes.

    Raises:
        ProfileError: coarser tokens have more components than finer ones.
    """

    def __init__(
        self,
        profile: Profile,
        step_index: int,
        device: torch.device,
        product: torch.dtype,
        predicted: bool = False,
        refined: bool = False,
    ) -> None:
        self.profile, self.predicted = profile, predicted
        self.learned, self.family = profile.learned_for(predicted), profile.family
        self.coding = [StepCoding(self.learned, self.family, step_index)]
        if refined:
            self.coding.append(StepCoding(self.learned, self.family, step_index - FINER, residual=True))
        self.parts = len(self.coding)
        self.device, self.product = device, product
        self.geometry = Geometry(profile.layout, profile.sections, device)
        all_parts = [section for part in self.coding for section in part.sections]
        for section in all_parts:
            # The kernels rely on this: they size their scratch for the finest class that occurs.
            served = slice(section.classed.finest, None)
            if any(np.any(np.diff(falling[served]) > 0) for falling in (section.classed.rows, section.classed.planes)):
                raise ProfileError("profile: codes more components of coarser tokens than of finer ones")
        codings = [part.sections for part in self.coding]
        # `[16, blocks]` of each section: components in the part that has most.
        by_class = [np.max([section.class_ranks for section in of], axis=0) for of in zip(*codings, strict=True)]
        deepest = [ranks.max(0) for ranks in by_class]
        self.plans, self.device_plans = pack_plans(self.coding, by_class, deepest, self.family, device)
        self.tables = FamilyTables.of(self.family, device)
        block_ranks = np.ascontiguousarray(np.concatenate(by_class, axis=1, dtype=np.int32).T)
        self.block_ranks = torch.from_numpy(block_ranks).to(device)
        bases = packed_bases(profile, self.geometry.tiles, device)
        self.maps = LinearMaps(self.geometry, bases, [list(ranks) for ranks in deepest], device)
        shape = self.parts, len(self.learned)
        self.finest = np.array([each.classed.finest for each in all_parts], np.int64).reshape(shape)
        self.planes = np.stack([each.classed.planes for each in all_parts]).astype(np.int64).reshape(*shape, CLASSES)
        self.most_planes = self.planes.max(2)
        self.bits = np.stack([each.classed.entropy(self.family.tables) for each in all_parts]).reshape(*shape, CLASSES)
        self.freq = np.concatenate([each.class_table.freq for each in codings[0]])
        self.common_class = np.maximum((self.freq[:, :CLASSES] >= COMMON_FREQUENCY).argmax(1), self.finest[0])

    def rows(self, sections: Numbers, classes: Numbers | int = 0, part: Numbers | int = 0) -> Numbers:
        """Return the rows of `plans` for class `classes` of each of `sections`, in a part of them."""
        rows: Numbers = (len(self.learned) * part + sections) * CLASSES + classes
        return rows

    @lazy
    def means(self) -> torch.Tensor:
        """float32 `[S + 1, M]`: means of the first S positions, then of all others."""
        learned = self.learned
        sinks = max(len(section.basis.sinks) for section in learned)
        rows = []
        for index, section in enumerate(learned):
            sink_means, mean = section.basis.sinks, section.basis.mean[None]
            table = torch.cat([sink_means, mean.expand(sinks + 1 - len(sink_means), -1)])
            rows.append(self.geometry.tiles.pack(table, index))
        return torch.cat(rows, dim=1).contiguous().to(self.device)

    @lazy
    def token_centers(self) -> TokenCenters | None:
        """Computes the centers of tokens with ids; None if nothing is predicted."""
        table = self.profile.token_table
        if table is None or not self.predicted:
            return None
        return TokenCenters(self.profile, table, self.geometry.tiles, self.means)


def _runs(begin: npt.NDArray[np.intp], counts: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return runs of consecutive numbers, given where each begins and how many it has."""
    return np.concatenate([first + np.arange(count) for first, count in zip(begin, counts, strict=True)])
