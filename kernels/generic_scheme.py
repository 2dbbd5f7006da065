"""The scheme without a profile on the device: each blob has statistics of its channels, and plans made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import Coding, DecodeRequest, EncodeRequest
from cuvee.codec.entropy.channels import Channels, read_channels, write_channels
from cuvee.codec.entropy.family import Family
from cuvee.codec.format.container import Reader
from cuvee.codec.paged import PagedCache
from cuvee.kernels.chunks import CacheMemory, encoding_tables, join, of_layers, raise_status, touched
from cuvee.kernels.devices import Download
from cuvee.kernels.incoming import Incoming
from cuvee.kernels.jobs import ChunkField, JobField, PlanField
from cuvee.kernels.ops.analyze import gather
from cuvee.kernels.ops.arguments import ChannelArrays, ChunkBatch, DevicePlans, TileTable, picked
from cuvee.kernels.ops.dequantize import dequantize
from cuvee.kernels.ops.generic import channel_statistics, normalize_channels, place_channels
from cuvee.kernels.ops.quantize import list_escapes, quantize
from cuvee.kernels.ops.rans import rans_decode
from cuvee.kernels.outgoing import check_size, encode_planes, place_streams, stream_jobs, tokens_per_stream_of
from cuvee.kernels.plans import FamilyTables, Geometry, PlanArrays
from cuvee.kernels.tracing import stage
from cuvee.kernels.upload import Packed, send_arrays
from cuvee.kernels.workspace import place_jobs, zeros


@dataclass(frozen=True, slots=True)
class GenericBatch:
    """A batch of verified and packed blobs, and the places of its arrays in the buffer."""

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
        coding: gives the step.
        geometry: tiles of the model, one section per layer.
        tables: the built-in entropy tables on the device.
        device: where tensors go.
    """

    def __init__(self, coding: Coding, geometry: Geometry, tables: FamilyTables, device: torch.device) -> None:
        self.sections = coding.profile.sections
        self._family: Family = coding.profile.family
        self._step = coding.step_index
        self._geometry = geometry
        self._tables = tables
        self._device = device
        # For each packed column of all sections: the number of its value among all values of a token, or -1.
        first = np.cumsum([0, *(section.values for section in self.sections)])
        tiles = geometry.tiles
        self._value = np.full(tiles.columns, -1, np.int64)
        for index in range(len(self.sections)):
            own = slice(tiles.bounds[index], tiles.bounds[index + 1])
            self._value[own] = np.where(tiles.order[own] >= 0, tiles.order[own] + first[index], -1)
        self._first = first

    def _columns(self, values: npt.NDArray[Any], padding: float) -> npt.NDArray[Any]:
        """Arrange `[chunks, values of a token]` as `[chunks, M]`."""
        picked = np.where(self._value >= 0, values[:, self._value], padding)
        return np.ascontiguousarray(picked, values.dtype)

    def _channel_arrays(self, channels: Sequence[Sequence[Channels | None]]) -> dict[str, npt.NDArray[Any]]:
        """Return rows, scales and means by chunk and column; unwanted sections are None."""
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
            "scale": self._columns(scale, 1),
            "means": self._columns(mean, 0),
        }

    # Decoding --------------------------------------------------------------------------------------------------

    def decode_bytes(self, tokens: int) -> int:
        """Return the most scratch memory that decoding a chunk of this many tokens takes, in bytes."""
        return 6 * tokens * int(self._first[-1])

    def prepare(self, chunks: Sequence[DecodeRequest], cache: PagedCache, layers: range) -> GenericBatch:
        """Verify the sections of these blobs that contain any of `layers`, and pack the arrays for the device."""
        sections = touched(self.sections, layers)
        incoming = Incoming(chunks, sections, cache)
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
        incoming.jobs[:, JobField.PLAN] = np.arange(len(plans))
        tiles = of_layers(self._geometry.tiles.tiles, layers)
        parts: dict[str, tuple[int, npt.NDArray[Any]]] = {}
        for name, array in {**arrays.named(), **self._channel_arrays(read), "tiles": tiles}.items():
            parts[name] = (incoming.upload.add(array), array)
        packed, planes, coefficients = incoming.pack(self._device, arrays.plans, coded)
        return GenericBatch(incoming, sections, packed, arrays, parts, planes, coefficients)

    def launch(self, batch: GenericBatch) -> torch.Tensor:
        """Decode a batch. Return the status of its jobs, int32 on the device."""
        incoming, geometry = batch.incoming, self._geometry
        with stage("upload"):
            sent = batch.packed.send(self._device)
        part = {name: sent.view(*where) for name, where in batch.parts.items()}
        jobs = incoming.device_jobs(sent)
        status, found = zeros(2, len(incoming.jobs), self._device)
        planes = torch.empty(batch.planes, dtype=torch.uint8, device=self._device)
        y = torch.empty(batch.coefficients, dtype=torch.float32, device=self._device)
        max_tokens = incoming.max_tokens
        chunks = incoming.chunk_batch(sent, status)
        plans, channels = picked(DevicePlans, part), picked(ChannelArrays, part)
        with stage("rotation tables"):
            rotations = geometry.rotations(chunks.chunks, len(incoming.slots), max_tokens)
        with stage("rans"):
            coding = stream_jobs(incoming.jobs, jobs, plans.plans, plans.tables)
            rans_decode(sent.bytes, coding, self._tables.decoding, planes, status)
        with stage("dequantize"):
            dequantize(
                sent.bytes, jobs, plans, planes, y, status, found,
                max_rows=int(batch.arrays.plans[:, PlanField.ROWS].max()), max_tokens=max_tokens,
            )  # fmt: skip
        view = incoming.cache_view(sent, batch.parts["tiles"][1])
        with stage("place"):
            tiles = TileTable(part["tiles"], geometry.tiles.pairs)
            place_channels(y, channels, jobs, tiles, chunks, rotations, view)
        return status

    # Encoding --------------------------------------------------------------------------------------------------

    def encode_bytes(self, tokens: int) -> int:
        """Return the most scratch memory that encoding a chunk of this many tokens takes, in bytes."""
        return tokens * (4 * self._geometry.tiles.columns + 7 * int(self._first[-1]))

    def encode(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        requests: Sequence[EncodeRequest],
        first_chunk: int,
    ) -> list[list[bytes]]:
        """Return the encoded sections of each chunk. Waits for the device three times, first for the statistics."""
        memory, geometry, device = CacheMemory.of(cache), self._geometry, self._device
        count, joined = len(self.sections), join(slots)
        table, jobs = encoding_tables(slots, [request.start for request in requests], count)
        max_tokens = int(table[:, ChunkField.TOKENS].max())
        sent = send_arrays({"chunks": table, "tiles": geometry.tiles.tiles, **memory.named()}, device)
        status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
        chunks = ChunkBatch(sent["chunks"], status, count, 0, max_tokens)
        tiles = TileTable(sent["tiles"], geometry.tiles.pairs)
        columns = geometry.tiles.columns
        x = torch.empty(len(joined), columns, dtype=torch.float32, device=device)
        with stage("rotation tables"):
            rotations = geometry.rotations(chunks.chunks, len(joined), max_tokens, use_source=True, inverse=True)
        view = memory.view(sent, joined, geometry.tiles.tiles)
        with stage("gather"):
            gather(view, tiles, chunks, rotations, torch.zeros(1, columns, device=device), x)
        means = torch.empty(len(slots), columns, dtype=torch.float32, device=device)
        squares = torch.empty(len(slots), columns, dtype=torch.float64, device=device)
        with stage("statistics"):
            channel_statistics(x, chunks.chunks, means, squares)
        measured = Download(torch.cat([means.double().flatten(), squares.flatten(), status.double()])).wait()
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
        jobs[:, JobField.PLAN] = np.arange(len(jobs))
        jobs[:, JobField.PER_STREAM] = tokens_per_stream_of(plans, self._family)
        check_size(jobs, arrays.plans)
        plane_bytes, coefficients = place_jobs(jobs, arrays.plans)
        place_streams(jobs, arrays.plans)

        named = {**arrays.named(), **self._channel_arrays(channels), "jobs": jobs}
        part = send_arrays(named, device)
        max_rows = int(arrays.plans[:, PlanField.ROWS].max())
        y = torch.empty(coefficients, dtype=torch.float32, device=device)
        planes = torch.empty(plane_bytes, dtype=torch.uint8, device=device)
        counts = torch.empty(len(jobs), max_rows, dtype=torch.int32, device=device)
        device_plans = picked(DevicePlans, part)
        with stage("normalize"):
            normalize_channels(x, picked(ChannelArrays, part), part["jobs"], tiles, chunks, y)
        with stage("quantize"):
            quantize(y, part["jobs"], device_plans, self._tables.codable, planes, counts, status, max_rows)

        def escapes(starts: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
            list_escapes(y, part["jobs"], device_plans, planes, starts, index, value, max_rows)

        parts = encode_planes(
            jobs, arrays.plans, stream_jobs(jobs, part["jobs"], device_plans.plans, device_plans.tables),
            self._tables.entries, planes, status, self.sections, first_chunk, counts, escapes,
        )  # fmt: skip
        whole = [side + body for side, body in zip(sides, parts, strict=True)]
        return [whole[at : at + count] for at in range(0, len(whole), count)]
