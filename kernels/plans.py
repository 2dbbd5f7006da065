"""What a profile becomes on the device: coding plans, packed bases, means and rotation frequencies as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.family import Family, step_value
from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.profile import Profile
from cuvee.codec.symbols import CodingPlan, Prediction
from cuvee.codec.transform import Section
from cuvee.kernels.jobs import Plan
from cuvee.kernels.rans import coding_table
from cuvee.kernels.symbols import level_limit
from cuvee.kernels.transform import lay_out_tiles, rotation_tables

I64 = npt.NDArray[np.int64]

ANGLE_ALIGNMENT = 4  # columns of a rotation table: the widest load of a thread


@dataclass(frozen=True, slots=True)
class FamilyTables:
    """The entropy tables of a family on the device.

    Attributes:
        slots: uint32 `[K, 2**prob_bits]`, for decoding.
        coding: uint32 `[K, 256, 2]`, for encoding (`rans.coding_table`).
        freq: uint16 `[K, 256]`.
    """

    slots: torch.Tensor
    coding: torch.Tensor
    freq: torch.Tensor

    @classmethod
    def of(cls, family: Family, device: torch.device) -> FamilyTables:
        """Copy the tables of a family."""
        tables = family.tables
        arrays = (tables.slots, coding_table(tables), tables.freq)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


@dataclass(frozen=True, slots=True)
class PlanArrays:
    """Coding plans as the kernels read them, on the host: a row of `plans` each, and arrays by plane and component.

    Attributes:
        plans: int64 `[Q, len(Plan)]`.
        tables: int32 table of each plane; `Plan.FIRST` and `Plan.REST` point into it.
        row_floats: float32 `[rows, 4]`: shrinkage of level 1, of those above, dead zone, rounding.
        row_ints: int32 `[rows, 3]`: shift, plane of the low bits or -1, predictor gain.
        steps: float32 `[Q]`.
        inverses: float32 `[Q]`, their inverses.
        limits: float32 `[Q]`: a coefficient must lie below (`symbols.level_limit`).
    """

    plans: I64
    tables: npt.NDArray[np.int32]
    row_floats: npt.NDArray[np.float32]
    row_ints: npt.NDArray[np.int32]
    steps: npt.NDArray[np.float32]
    inverses: npt.NDArray[np.float32]
    limits: npt.NDArray[np.float32]

    @classmethod
    def of(cls, plans: Sequence[CodingPlan], family: Family, step: int) -> PlanArrays:
        """The arrays of plans that share a family and a step index."""
        table = np.zeros((len(plans), len(Plan)), np.int64)
        tables: list[npt.NDArray[Any]] = []
        floats: list[npt.NDArray[Any]] = []
        ints: list[npt.NDArray[Any]] = []
        quantizer = family.quantizer
        plane = row = 0
        for index, plan in enumerate(plans):
            rows = len(plan.shift)
            same = plan.prediction is Prediction.NONE
            rest = plane if same else plane + plan.planes
            table[index] = (plan.planes, rows, plane, rest, row, plan.prediction)
            tables += [plan.first] if same else [plan.first, plan.rest]
            low = np.full(rows, -1, np.int32)
            low[plan.wide] = rows + np.arange(len(plan.wide))
            ints.append(np.stack([plan.shift, low, plan.rho], axis=1).astype(np.int32))
            at = plan.level_table
            floats.append(np.column_stack([quantizer.shrink[at], quantizer.dead_zone[at], quantizer.rounding[at]]))
            plane = rest + plan.planes
            row += rows
        steps = np.full(len(plans), step_value(step), np.float32)
        inverses = np.full(len(plans), 1.0 / step_value(step), np.float32)
        limits = np.full(len(plans), level_limit(step_value(step)), np.float32)
        return cls(
            table,
            np.concatenate(tables).astype(np.int32),
            np.concatenate(floats).astype(np.float32),
            np.concatenate(ints),
            steps,
            inverses,
            limits,
        )

    def named(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Geometry:
    """How the heads of a layout are cut into tiles, for one partition into sections, and its RoPEs side by side.

    Attributes:
        tiles: the cut.
        inv_freq, scaling: float32 `[A]` on the device: a column of the rotation tables each.
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
        # Without any RoPE one unused column: a kernel's pointer must point somewhere.
        self.inv_freq = torch.tensor(inv_freq or [0.0], dtype=torch.float32, device=device)
        self.scaling = torch.tensor(scaling or [1.0], dtype=torch.float32, device=device)
        self.tiles = lay_out_tiles(layout, sections, columns)

    def rotations(
        self, chunks: torch.Tensor, rows: int, max_tokens: int, *, use_source: bool = False, inverse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables of cos and sin, float32 `[rows, A]`, of all tokens of these chunks; see `rotation_tables`."""
        cos = self.inv_freq.new_empty(rows, len(self.inv_freq))
        sin = torch.empty_like(cos)
        rotation_tables(
            chunks, self.inv_freq, self.scaling, cos, sin, use_source=use_source, inverse=inverse,
            max_tokens=max_tokens,
        )  # fmt: skip
        return cos, sin


class TransformPlan:
    """All that coding at one step of a learned profile needs on the device.

    Args:
        profile: a learned profile.
        step: step index.
        device: where the arrays go.
        product: dtype of the inverse transform's matrix product, bfloat16 or float32.

    Attributes:
        geometry: the tiles of its sections.
        coding: the `CodingPlan` of each section, on the host.
        arrays: the same as flat arrays, on the host; `device_arrays` on the device.
        tiles, blocks: int64 tables on the host, ranks and bases filled in.
        inverse: packed inverse bases, of dtype `product`.
    """

    def __init__(self, profile: Profile, step: int, device: torch.device, product: torch.dtype) -> None:
        self.device, self.product = device, product
        self.geometry = Geometry(profile.layout, profile.sections, device)
        self._learned = profile.learned
        chosen = [section.plan(step) for section in profile.learned]
        self._ranks = [ranks for ranks, _ in chosen]
        self.coding = [plan for _, plan in chosen]
        self.arrays = PlanArrays.of(self.coding, profile.family, step)
        self.device_arrays = DeviceArrays.of(self.arrays, device)
        self.tiles, self.blocks, self._elements = self.geometry.tiles.with_ranks(self._ranks)
        self.device_tiles = torch.from_numpy(self.tiles).to(device)
        self.device_blocks = torch.from_numpy(self.blocks).to(device)
        self.inverse = self._packed([section.basis.inverse for section in profile.learned], transpose=True).to(product)

    @cached_property
    def means(self) -> torch.Tensor:
        """float32 `[S + 1, M]`: means of the first S positions, then of all others."""
        sinks = max(len(section.basis.sinks) for section in self._learned)
        rows = []
        for index, section in enumerate(self._learned):
            own, usual = section.basis.sinks, section.basis.mean[None]
            table = torch.cat([own, usual.expand(sinks + 1 - len(own), -1)])
            rows.append(self.geometry.tiles.pack(table, index))
        return torch.cat(rows, dim=1).contiguous().to(self.device)

    @cached_property
    def forward(self) -> torch.Tensor:
        """Packed forward bases, float32. Made when first encoding."""
        return self._packed([section.basis.forward for section in self._learned], transpose=False)

    def _packed(self, bases: Sequence[Sequence[torch.Tensor]], transpose: bool) -> torch.Tensor:
        packed = torch.empty(self._elements, dtype=torch.float32)
        at = 0
        for index, (matrices, ranks) in enumerate(zip(bases, self._ranks, strict=True)):
            rows = [m[:, :rank].T if transpose else m[:rank] for m, rank in zip(matrices, ranks, strict=True)]
            for matrix in self.geometry.tiles.pack_basis(rows, index):
                packed[at : at + matrix.numel()] = matrix.reshape(-1)
                at += matrix.numel()
        return packed.to(self.device)


@dataclass(frozen=True, slots=True)
class DeviceArrays:
    """`PlanArrays` on the device."""

    plans: torch.Tensor
    tables: torch.Tensor
    row_floats: torch.Tensor
    row_ints: torch.Tensor
    steps: torch.Tensor
    inverses: torch.Tensor
    limits: torch.Tensor

    @classmethod
    def of(cls, arrays: PlanArrays, device: torch.device) -> DeviceArrays:
        """Copy them."""
        return cls(**{name: torch.from_numpy(array).to(device) for name, array in arrays.named().items()})
