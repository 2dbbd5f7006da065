"""The learned scheme on the device: the launches that decode and encode batches of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import CodedChunk, Coding
from cuvee.codec.paged import PagedCache
from cuvee.kernels.batch import Incoming, Memory, join, of_layers, outgoing, place_jobs, stage, touched, zeros
from cuvee.kernels.coded import check_size, encode_planes, place_streams, streams_of
from cuvee.kernels.jobs import Block, Chunk, Job, Plan, Tile
from cuvee.kernels.pages import contiguity
from cuvee.kernels.plans import FamilyTables, TransformPlan
from cuvee.kernels.rans import rans_decode
from cuvee.kernels.staging import Packed, Upload
from cuvee.kernels.symbols import dequantize, list_escapes, quantize
from cuvee.kernels.transform import analyze, gather, synthesis_config, synthesize

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch of blobs, verified and packed, and the sizes of what decoding it needs."""

    cache: PagedCache
    incoming: Incoming
    sections: range
    packed: Packed
    tiles: tuple[int, I64] | None  # offset in `packed`, and contents; None: all tiles
    planes: int
    coefficients: int


class TransformDevice:
    """Codes chunks with a learned profile at one step.

    Args:
        coding: whose profile and step.
        plan: the same on the device.
        tables: the profile's entropy tables on the device.
    """

    def __init__(self, coding: Coding, plan: TransformPlan, tables: FamilyTables) -> None:
        self.sections = coding.profile.sections
        self._family = coding.profile.family
        self._plan = plan
        self._tables = tables

    # Decoding --------------------------------------------------------------------------------------------------

    def decode_bytes(self, tokens: int) -> int:
        """Scratch that decoding a chunk of so many tokens takes."""
        plans = self._plan.arrays.plans
        width = self._plan.product.itemsize
        return int(tokens * (plans[:, Plan.PLANES].sum() + width * plans[:, Plan.ROWS].sum()))

    def prepare(self, chunks: Sequence[CodedChunk], cache: PagedCache, layers: range) -> Prepared:
        """Verify the sections of these blobs that hold some of `layers`, and pack what goes to the device."""
        sections = touched(self.sections, layers)
        incoming = Incoming(chunks, sections)
        incoming.jobs[:, Job.PLAN] = np.tile(np.asarray(sections), len(chunks))
        tiles = None
        if len(layers) < cache.layout.num_layers:
            own = of_layers(self._plan.tiles, layers)
            tiles = (incoming.upload.add(own), own)
        packed, planes, coefficients = incoming.pack(self._plan.device, self._plan.arrays.plans)
        return Prepared(cache, incoming, sections, packed, tiles, planes, coefficients)

    def launch(self, batch: Prepared) -> torch.Tensor:
        """Decode a batch; returns the status of its jobs, int32 on the device."""
        plan, memory = self._plan, Memory.of(batch.cache)
        arrays, geometry, device = plan.device_arrays, plan.geometry, plan.device
        with stage("upload"):
            sent = batch.packed.send(device)
        incoming, host_jobs = batch.incoming, batch.incoming.jobs
        jobs = sent.view(incoming.at_jobs, host_jobs)
        chunks = sent.view(incoming.at_chunks, incoming.chunks)
        tiles = plan.device_tiles if batch.tiles is None else sent.view(*batch.tiles)
        status, found = zeros(2, len(host_jobs), device)
        planes = torch.empty(batch.planes, dtype=torch.uint8, device=device)
        y = torch.empty(batch.coefficients, dtype=plan.product, device=device)
        max_tokens = int(host_jobs[:, Job.TOKENS].max())
        host_tiles = plan.tiles if batch.tiles is None else batch.tiles[1]
        unit_stride, aligned = contiguity(memory.table, host_tiles, memory.element)
        with stage("rotation tables"):
            cos, sin = geometry.rotations(chunks, len(incoming.slots), max_tokens)
        with stage("rans"):
            rans_decode(
                sent.bytes, jobs, arrays.plans, arrays.tables, self._tables.slots, planes, status,
                max_streams=int(host_jobs[:, Job.STREAMS].max()),
            )  # fmt: skip
        with stage("dequantize"):
            dequantize(
                sent.bytes, jobs, arrays.plans, arrays.row_floats, arrays.row_ints, arrays.steps, planes, y,
                status=status, found=found, max_rows=int(plan.arrays.plans[:, Plan.ROWS].max()),
                max_tokens=max_tokens, predicted=bool(plan.arrays.plans[:, Plan.PREDICTION].any()),
            )  # fmt: skip
        with stage("synthesize"):
            synthesize(
                y, jobs, tiles, plan.inverse, plan.means, chunks, incoming.slots, cos, sin, memory.places,
                memory.scales, status, sections=len(batch.sections), first_section=batch.sections.start,
                max_tokens=max_tokens, element=memory.element, unit_stride=unit_stride, aligned=aligned,
                pairs=geometry.tiles.pairs,
                config=synthesis_config(
                    y.dtype, memory.element, int(host_tiles[:, Tile.RANK].max()), max_tokens, aligned
                ),
            )  # fmt: skip
        return status

    # Encoding --------------------------------------------------------------------------------------------------

    def encode_bytes(self, tokens: int) -> int:
        """Scratch that encoding a chunk of so many tokens takes."""
        plans = self._plan.arrays.plans
        rows, planes = int(plans[:, Plan.ROWS].sum()), int(plans[:, Plan.PLANES].sum())
        return tokens * (4 * self._plan.geometry.tiles.columns + 4 * rows + 3 * planes)

    def encode(
        self, cache: PagedCache, slots: Sequence[torch.Tensor], starts: Sequence[int], first_chunk: int
    ) -> list[list[bytes]]:
        """The sections of each chunk, of which the first has number `first_chunk`. Waits for the device twice."""
        plan, memory = self._plan, Memory.of(cache)
        arrays, geometry, device = plan.device_arrays, plan.geometry, plan.device
        count = len(self.sections)
        table, jobs = outgoing(slots, starts, count)
        host_plans = plan.arrays.plans
        check_size(jobs, host_plans)
        jobs[:, Job.PER_STREAM] = np.tile(streams_of(plan.coding, self._family), len(slots))
        plane_bytes, coefficients = place_jobs(jobs, host_plans)
        place_streams(jobs, host_plans)

        upload = Upload()
        at_jobs, at_chunks = upload.add(jobs), upload.add(table)
        sent = upload.pack(device).send(device)
        device_jobs, chunks = sent.view(at_jobs, jobs), sent.view(at_chunks, table)
        joined = join(slots)
        max_tokens, max_rows = int(table[:, Chunk.TOKENS].max()), int(host_plans[:, Plan.ROWS].max())
        status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
        x = torch.empty(len(joined), geometry.tiles.columns, dtype=torch.float32, device=device)
        y = torch.empty(coefficients, dtype=torch.float32, device=device)
        planes = torch.empty(plane_bytes, dtype=torch.uint8, device=device)
        counts = torch.empty(len(jobs), max_rows, dtype=torch.int32, device=device)
        with stage("rotation tables"):
            cos, sin = geometry.rotations(chunks, len(joined), max_tokens, use_source=True, inverse=True)
        unit_stride, aligned = contiguity(memory.table, plan.tiles, memory.element)
        with stage("gather"):
            gather(
                plan.device_tiles, plan.means, chunks, joined, cos, sin, memory.places, memory.scales, x, status,
                sections=count, first_section=0, max_tokens=max_tokens, element=memory.element,
                unit_stride=unit_stride, aligned=aligned, pairs=geometry.tiles.pairs,
            )  # fmt: skip
        with stage("analyze"):
            analyze(
                x, device_jobs, plan.device_blocks, plan.forward, chunks, y, sections=count,
                max_rank=int(plan.blocks[:, Block.RANK].max()), max_tokens=max_tokens,
            )  # fmt: skip
        with stage("quantize"):
            quantize(
                y, device_jobs, arrays.plans, arrays.row_floats, arrays.row_ints, arrays.inverses, arrays.limits,
                arrays.tables, self._tables.freq, planes, counts, status, max_rows=max_rows,
            )  # fmt: skip

        def escapes(starts: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
            list_escapes(
                y, device_jobs, arrays.plans, arrays.row_floats, arrays.row_ints, arrays.inverses, planes, starts,
                index, value, max_rows=max_rows,
            )  # fmt: skip

        parts = encode_planes(
            jobs, device_jobs, host_plans, arrays.plans, arrays.tables, self._tables.coding, planes, status,
            self.sections, first_chunk, counts, escapes,
        )  # fmt: skip
        return [parts[at : at + count] for at in range(0, len(parts), count)]
