"""Arguments that launchers share: each class groups arrays and sizes that belong together.

They hold references and are cheap to make: a launch packs them on the host and unpacks them at once, and no kernel sees
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """The chunks of a launch, and the run of sections that it handles of each: one job per section of a chunk.

    Jobs are chunk-major, so the job of section i of the run and chunk c is `c * sections + i`.

    Attributes:
        chunks: int64 `[C, len(ChunkField)]`.
        status: int32 `[C * sections]`, one per job; kernels add bits of `Status`.
    """

    chunks: torch.Tensor
    status: torch.Tensor
    sections: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TileTable:
    """Tiles that a launch handles of each chunk, int64 `[tiles, len(TileField)]`; half a tile has `pairs` columns."""

    tiles: torch.Tensor
    pairs: int

    def grid(self, batch: ChunkBatch, tokens: int) -> tuple[int, int, int]:
        """Return the grid of programs that take this many tokens of one tile: blocks of tokens, tiles, chunks."""
        return -(-batch.max_tokens // tokens), len(self.tiles), len(batch.chunks)


@dataclass(frozen=True, slots=True)
class CacheView:
    """Places of a launch's tokens in a cache.

    Attributes:
        units: int64 `[units, len(UnitField)]`.
        slots: int64 `[tokens]`: slot of each token of each chunk, from `ChunkField.FIRST` on; -1: nowhere.
        unit_stride: whether pairs lie one element apart; see `pages.contiguity`.
        aligned: whether 16 bytes can be moved at a time; see `pages.contiguity`.
    """

    units: torch.Tensor
    slots: torch.Tensor
    element: torch.dtype
    unit_stride: bool
    aligned: bool


@dataclass(frozen=True, slots=True)
class CenterTable:
    """What is subtracted from the values of each token before they are coded, and added to decoded ones.

    Attributes:
        table: float32 `[S + 1, M]`: means of the first S positions of a sequence, then that of all others; or the rows
            that `rows` names.
        rows: int32 `[tokens]`, the row of each token, from `ChunkField.FIRST` on; None: that of its position.
    """

    table: torch.Tensor
    rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class JobCoefficients:
    """The coefficients of a launch's jobs.

    Attributes:
        values: of each job `[R, JobField.STRIDE]` at JobField.COEFFICIENTS.
        jobs: int64 `[chunks * sections, len(JobField)]`, chunk-major.
    """

    values: torch.Tensor
    jobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """The order in which the coefficients of a job lie, and how many a column has.

    Attributes:
        classes: uint8 below 16, at `JobField.COLUMNS` of each job: class of each of its T columns, never falling within
            a window.
        order: uint8, likewise: token of each column, counted from the first of its window.
        block_ranks: int32 `[blocks, 16]`: components of each block of the bases by class, never rising with the class.
    """

    classes: torch.Tensor
    order: torch.Tensor
    block_ranks: torch.Tensor


@dataclass(frozen=True, slots=True)
class DevicePlans:
    """Coding plans on the device.

    Attributes:
        plans: int64 `[Q, len(PlanField)]`.
        tables: int32: entropy table of each plane, at `PlanField.TABLES`.
        rows: int32 `[components, 8]`, from `PlanField.ROW` on: the bits of four float32, shrinkage of level 1, that of
            higher levels, dead zone, rounding, the last two in steps; then shift, plane of the low bits or -1, row of
            coefficients, and zero.
        row_maps: int32, from `PlanField.ROW_MAP` on: which component each row of coefficients holds, or -1.
    """

    plans: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    row_maps: torch.Tensor


@dataclass(frozen=True, slots=True)
class PlaneJobs:
    """The jobs of a launch between coefficients and byte planes.

    Attributes:
        jobs: int64 `[J, len(JobField)]`.
        plans: how each class is coded; components, planes and extent never rise with the class.
        classes: uint8 below 16: `TokenOrder.classes`.
        planes: uint8, `[P, T]` of each job.
    """

    jobs: torch.Tensor
    plans: DevicePlans
    classes: torch.Tensor
    planes: torch.Tensor


@dataclass(frozen=True, slots=True)
class StreamJobs:
    """The jobs of a launch of the entropy coder.

    Attributes:
        jobs: int64 `[J, len(JobField)]`.
        plans: int64 `[Q, len(PlanField)]`; PLANES and TABLES are read.
        tables: int32: entropy table of each plane, at `PlanField.TABLES`.
        max_streams: STREAMS of the job that has most.
    """

    jobs: torch.Tensor
    plans: torch.Tensor
    tables: torch.Tensor
    max_streams: int


@dataclass(frozen=True, slots=True)
class EncodedStreams:
    """Output of the encoder: the words of each stream in a separate region.

    Attributes:
        words: uint16 scratch. Stream s of a job with P planes and n tokens per stream owns P n words from
            `JobField.WORDS` + s P n on, and fills them from the end backwards.
        states: uint32: the decoder's initial state of stream s at `JobField.STATES` + s.
        lengths: uint32: words of stream s at `JobField.LENGTHS` + s.
    """

    words: torch.Tensor
    states: torch.Tensor
    lengths: torch.Tensor
