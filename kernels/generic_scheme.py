"""The scheme without a profile on the device: a blob brings the statistics of its channels, so plans are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import CodedChunk, Coding
from cuvee.codec.container import Reader
from cuvee.codec.family import Family
from cuvee.codec.paged import PagedCache
from cuvee.codec.schemes.generic import Channels, read_channels, write_channels
from cuvee.kernels.batch import (
    Incoming,
    Memory,
    join,
    of_layers,
    outgoing,
    place_jobs,
    raise_status,
    stage,
    touched,
    zeros,
)
from cuvee.kernels.coded import check_size, encode_planes, place_streams, streams_of
from cuvee.kernels.generic import channel_statistics, normalize_channels, place_channels
from cuvee.kernels.jobs import Chunk, Job, Plan
from cuvee.kernels.pages import contiguity
from cuvee.kernels.plans import FamilyTables, Geometry, PlanArrays
from cuvee.kernels.rans import rans_decode
from cuvee.kernels.staging import Packed, Upload
from cuvee.kernels.symbols import dequantize, list_escapes, quantize
from cuvee.kernels.transform import gather

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch of blobs, verified and packed, and where in the buffer its arrays lie."""

    cache: PagedCache
    incoming: Incoming
    sections: range
    packed: Packed
    arrays: PlanArrays
    parts: dict[str, tuple[int, npt.NDArray[Any]]]
    planes: int
    coefficients: int


class GenericDevice:
    """Codes chunks of any model at one relative step.

    Args:
        coding: whose step.
        geometry: of the model, one section per layer.
        tables: the built-in entropy tables on the device.
        device: where.
    """

    def __init__(self, coding: Coding, geometry: Geometry, tables: FamilyTables, device: torch.device) -> None:
        self.sections = coding.profile.sections
        self._family: Family = coding.profile.family
        self._step = coding.step
        self._geometry = geometry
        self._tables = tables
        self._device = device
        # Of the packed columns of all sections: the value that each holds, among all values of a token, or -1.
        first = np.cumsum([0, *(section.values for section in self.sections)])
        tiles = geometry.tiles
        self._value = np.full(tiles.columns, -1, np.int64)
        for index in range(len(self.sections)):
            own = slice(tiles.bounds[index], tiles.bounds[index + 1])
            self._value[own] = np.where(tiles.order[own] >= 0, tiles.order[own] + first[index], -1)
        self._first = first

    def _columns(self, values: npt.NDArray[Any], padding: float) -> npt.NDArray[Any]:
        """`[chunks, values of a token]` -> `[chunks, M]`."""
        picked = np.where(self._value >= 0, values[:, self._value], padding)
        return np.ascontiguousarray(picked, values.dtype)

    def _channel_arrays(self, channels: Sequence[Sequence[Channels | None]]) -> dict[str, npt.NDArray[Any]]:
        """Rows, scales and means by chunk and column; sections that are not wanted are None."""
        shape = (len(channels), int(self._first[-1]))
        rows, scale, mean = np.full(shape, -1, np.int32), np.ones(shape, np.float32), np.zeros(shape, np.float32)
        for chunk, sections in enumerate(channels):
            for index, own in enumerate(sections):
                if own is not None:
                    at = slice(self._first[index], self._first[index + 1])
                    rows[chunk, at][own.live] = np.arange(len(own.live))
                    scale[chunk, at], mean[chunk, at] = own.scale, own.mean
        return {
            "rows": self._columns(rows, -1),
            "channel_scale": self._columns(scale, 1),
            "means": self._columns(mean, 0),
        }

    # Decoding --------------------------------------------------------------------------------------------------

    def decode_bytes(self, tokens: int) -> int:
        """Scratch that decoding a chunk of so many tokens takes, at most."""
        return 6 * tokens * int(self._first[-1])

    def prepare(self, chunks: Sequence[CodedChunk], cache: PagedCache, layers: range) -> Prepared:
        """Verify the sections of these blobs that hold some of `layers`, and pack what goes to the device."""
        sections = touched(self.sections, layers)
        incoming = Incoming(chunks, sections)
        read: list[list[Channels | None]] = [[None] * len(self.sections) for _ in chunks]
        plans, coded = [], []
        for job, view in enumerate(incoming.views):
            chunk, index = divmod(job, len(sections))
            reader = Reader(view)
            channels = read_channels(reader, self.sections[sections[index]].blocks, sections[index])
            read[chunk][sections[index]] = channels
            plans.append(channels.plan())
            coded.append(reader.position)
        arrays = PlanArrays.of(plans, self._family, self._step)
        incoming.jobs[:, Job.PLAN] = np.arange(len(plans))
        tiles = of_layers(self._geometry.tiles.tiles, layers)
        parts: dict[str, tuple[int, npt.NDArray[Any]]] = {}
        for name, array in {**arrays.named(), **self._channel_arrays(read), "tiles": tiles}.items():
            parts[name] = (incoming.upload.add(array), array)
        packed, planes, coefficients = incoming.pack(self._device, arrays.plans, coded)
        return Prepared(cache, incoming, sections, packed, arrays, parts, planes, coefficients)

    def launch(self, batch: Prepared) -> torch.Tensor:
        """Decode a batch; returns the status of its jobs, int32 on the device."""
        memory, incoming, geometry = Memory.of(batch.cache), batch.incoming, self._geometry
        with stage("upload"):
            sent = batch.packed.send(self._device)
        part = {name: sent.view(*where) for name, where in batch.parts.items()}
        jobs = sent.view(incoming.at_jobs, incoming.jobs)
        chunks = sent.view(incoming.at_chunks, incoming.chunks)
        status, found = zeros(2, len(incoming.jobs), self._device)
        planes = torch.empty(batch.planes, dtype=torch.uint8, device=self._device)
        y = torch.empty(batch.coefficients, dtype=torch.float32, device=self._device)
        max_tokens = int(incoming.jobs[:, Job.TOKENS].max())
        with stage("rotation tables"):
            cos, sin = geometry.rotations(chunks, len(incoming.slots), max_tokens)
        with stage("rans"):
            rans_decode(
                sent.bytes, jobs, part["plans"], part["tables"], self._tables.slots, planes, status,
                max_streams=int(incoming.jobs[:, Job.STREAMS].max()),
            )  # fmt: skip
        with stage("dequantize"):
            dequantize(
                sent.bytes, jobs, part["plans"], part["row_floats"], part["row_ints"], part["steps"], planes, y,
                status=status, found=found, max_rows=int(batch.arrays.plans[:, Plan.ROWS].max()),
                max_tokens=max_tokens, predicted=False,
            )  # fmt: skip
        unit_stride, aligned = contiguity(memory.table, batch.parts["tiles"][1], memory.element)
        with stage("place"):
            place_channels(
                y, part["rows"], part["channel_scale"], part["means"], jobs, chunks, part["tiles"], memory.places,
                memory.scales, incoming.slots, cos, sin, status, sections=len(batch.sections),
                first_section=batch.sections.start, max_tokens=max_tokens, pairs=geometry.tiles.pairs,
                element=memory.element, unit_stride=unit_stride, aligned=aligned,
            )  # fmt: skip
        return status

    # Encoding --------------------------------------------------------------------------------------------------

    def encode_bytes(self, tokens: int) -> int:
        """Scratch that encoding a chunk of so many tokens takes, at most."""
        return tokens * (4 * self._geometry.tiles.columns + 7 * int(self._first[-1]))

    def encode(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int],
        offsets: Sequence[torch.Tensor | None],
        first_chunk: int,
    ) -> list[list[bytes]]:
        """The sections of each chunk. Waits for the device three times: the first is for the statistics."""
        memory, geometry, device = Memory.of(cache), self._geometry, self._device
        count, joined = len(self.sections), join(slots)
        table, jobs = outgoing(slots, starts, count)
        max_tokens = int(table[:, Chunk.TOKENS].max())
        upload = Upload()
        at_chunks, at_tiles = upload.add(table), upload.add(geometry.tiles.tiles)
        sent = upload.pack(device).send(device)
        chunks, tiles = sent.view(at_chunks, table), sent.view(at_tiles, geometry.tiles.tiles)
        status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
        columns = geometry.tiles.columns
        x = torch.empty(len(joined), columns, dtype=torch.float32, device=device)
        with stage("rotation tables"):
            cos, sin = geometry.rotations(chunks, len(joined), max_tokens, use_source=True, inverse=True)
        unit_stride, aligned = contiguity(memory.table, geometry.tiles.tiles, memory.element)
        with stage("gather"):
            gather(
                tiles, torch.zeros(1, columns, device=device), chunks, joined, cos, sin, memory.places, memory.scales,
                x, status, sections=count, first_section=0, max_tokens=max_tokens, element=memory.element,
                unit_stride=unit_stride, aligned=aligned, pairs=geometry.tiles.pairs,
            )  # fmt: skip
        means = torch.empty(len(slots), columns, dtype=torch.float32, device=device)
        squares = torch.empty(len(slots), columns, dtype=torch.float64, device=device)
        with stage("statistics"):
            channel_statistics(x, chunks, means, squares)
        measured = torch.cat([means.double().flatten(), squares.flatten(), status.double()]).cpu().numpy()
        numbers = range(first_chunk, first_chunk + len(slots))
        raise_status(measured[2 * means.numel() :].astype(np.int32), self.sections, numbers)
        mean, square = measured[: 2 * means.numel()].reshape(2, len(slots), columns)

        sides: list[bytes] = []
        channels: list[list[Channels | None]] = []
        packed = np.flatnonzero(self._value >= 0)
        for chunk in range(len(slots)):
            by_value = np.empty((2, int(self._first[-1])))
            by_value[:, self._value[packed]] = mean[chunk, packed], square[chunk, packed]
            own: list[Channels | None] = []
            for index, section in enumerate(self.sections):
                at = slice(self._first[index], self._first[index + 1])
                deviation = np.sqrt(by_value[1, at]) / len(slots[chunk]) ** 0.5
                side, made = write_channels(section.blocks, by_value[0, at].astype(np.float32), deviation, self._step)
                sides.append(side)
                own.append(made)
            channels.append(own)
        plans = [made.plan() for own in channels for made in own if made is not None]
        arrays = PlanArrays.of(plans, self._family, self._step)
        jobs[:, Job.PLAN] = np.arange(len(jobs))
        jobs[:, Job.PER_STREAM] = streams_of(plans, self._family)
        check_size(jobs, arrays.plans)
        plane_bytes, coefficients = place_jobs(jobs, arrays.plans)
        place_streams(jobs, arrays.plans)

        upload = Upload()
        named = {**arrays.named(), **self._channel_arrays(channels), "jobs": jobs}
        where = {name: upload.add(array) for name, array in named.items()}
        sent = upload.pack(device).send(device)
        part = {name: sent.view(where[name], array) for name, array in named.items()}
        max_rows = int(arrays.plans[:, Plan.ROWS].max())
        y = torch.empty(coefficients, dtype=torch.float32, device=device)
        planes = torch.empty(plane_bytes, dtype=torch.uint8, device=device)
        counts = torch.empty(len(jobs), max_rows, dtype=torch.int32, device=device)
        with stage("normalize"):
            normalize_channels(
                x, part["rows"], part["channel_scale"], part["means"], part["jobs"], chunks, tiles, y, sections=count,
                first_section=0, max_tokens=max_tokens, pairs=geometry.tiles.pairs,
            )  # fmt: skip
        with stage("quantize"):
            quantize(
                y, part["jobs"], part["plans"], part["row_floats"], part["row_ints"], part["inverses"],
                part["limits"], part["tables"], self._tables.freq, planes, counts, status, max_rows=max_rows,
            )  # fmt: skip

        def escapes(starts: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
            list_escapes(
                y, part["jobs"], part["plans"], part["row_floats"], part["row_ints"], part["inverses"], planes,
                starts, index, value, max_rows=max_rows,
            )  # fmt: skip

        parts = encode_planes(
            jobs, part["jobs"], arrays.plans, part["plans"], part["tables"], self._tables.coding, planes, status,
            self.sections, first_chunk, counts, escapes,
        )  # fmt: skip
        whole = [side + body for side, body in zip(sides, parts, strict=True)]
        return [whole[at : at + count] for at in range(0, len(whole), count)]
