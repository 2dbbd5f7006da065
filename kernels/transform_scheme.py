"""The learned scheme on the device: the launches that decode and encode batches of chunks.

    decode   class streams --host--> classes, columns        encode   gather --> leading components --> offsets
             rans_decode --> dequantize --> synthesize                offsets --host--> classes, columns
                                                                      analyze --> quantize --> rans_encode --> blobs

Sections whose tokens have classes and sections whose tokens have none go through kernels of their own, each of which
leaves the other's jobs out; a batch may hold both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import Coding, DecodeRequest, EncodeRequest
from cuvee.codec.errors import InputError
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.class_predictor import choose_classes
from cuvee.codec.schemes.coefficients import tokens_per_stream
from cuvee.codec.support.arrays import U8, U16
from cuvee.codec.support.lazy import lazy
from cuvee.kernels.centers import CENTER_BYTES, SentArrays, TokenRun
from cuvee.kernels.chunks import CacheMemory, encoding_tables, join, of_layers, raise_status, touched
from cuvee.kernels.class_predictor import ARRAYS, DevicePredictor
from cuvee.kernels.class_streams import read_classes, sort_columns, write_classes
from cuvee.kernels.devices import Download
from cuvee.kernels.incoming import Incoming
from cuvee.kernels.jobs import I64, BlockField, ChunkField, JobField, PlanField, TileField
from cuvee.kernels.ops.analyze import analyze, gather
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, TileTable, TokenOrder
from cuvee.kernels.ops.dequantize import dequantize
from cuvee.kernels.ops.quantize import list_escapes, quantize
from cuvee.kernels.ops.rans import rans_decode
from cuvee.kernels.ops.rans_by_class import rans_decode_classes
from cuvee.kernels.ops.symbols_by_class import MIN_DEPTH, dequantize_classes, list_escapes_classes, quantize_classes
from cuvee.kernels.ops.synthesize import SynthesisConfig, synthesis_config, synthesize
from cuvee.kernels.outgoing import check_size, encode_planes, place_streams, stream_jobs, tokens_per_stream_of
from cuvee.kernels.plans import FamilyTables, LinearMaps, TransformPlan
from cuvee.kernels.tracing import stage
from cuvee.kernels.upload import Packed, send_arrays
from cuvee.kernels.workspace import place_jobs, running_offsets, zeros

MODE_BYTE = 9  # offset in a section of the byte that tells whether its tokens have classes


@dataclass(frozen=True, slots=True)
class TransformBatch:
    """A batch of verified and packed blobs, and the sizes of the arrays that decoding it needs.

    Attributes:
        tiles, class_tiles: offset in `packed`, and contents; None: all tiles.
        columns: offsets in `packed` of the columns' classes and of their order, and what is as long.
        centers: offset in `packed`, and contents, of each of `CenterArrays`; None: nothing is predicted.
        classed: `[J]` which jobs' tokens have classes.
    """

    incoming: Incoming
    sections: range
    packed: Packed
    tiles: tuple[int, I64] | None
    class_tiles: tuple[int, I64] | None
    columns: tuple[int, int, U8]
    centers: Sequence[tuple[int, npt.NDArray[Any]]] | None
    classed: npt.NDArray[np.bool_]
    planes: int
    coefficients: int


@dataclass(frozen=True, slots=True)
class SynthesisLaunch:
    """A launch of `synthesize`, for the jobs whose tokens have classes or for the others."""

    maps: LinearMaps
    tiles: TileTable
    cache: CacheView
    config: SynthesisConfig
    order: TokenOrder | None


class TransformDevice:
    """Codes chunks with a learned profile at one step.

    Args:
        coding: whose profile and step.
        plan: the same on the device.
        tables: the entropy tables on the device, of the plan's family.
    """

    def __init__(self, coding: Coding, plan: TransformPlan, tables: FamilyTables) -> None:
        self.sections = coding.profile.sections
        self._plan = plan
        self._tables = tables

    @lazy
    def _predictor(self) -> DevicePredictor | None:
        learned = self._plan.learned
        if all(section.predictor is None for section in learned):
            return None
        return DevicePredictor(self._plan.coding, self._plan.geometry.tiles, self._plan.device)

    # Decoding --------------------------------------------------------------------------------------------------

    def decode_bytes(self, tokens: int) -> int:
        """Return the scratch memory that decoding a chunk of this many tokens usually takes, in bytes."""
        plans, _ = self._usual_plans()
        sizes = plans[:, PlanField.PLANES].sum() + self._plan.product.itemsize * plans[:, PlanField.EXTENT].sum()
        return int(tokens * sizes) + self._center_bytes(tokens)

    def _center_bytes(self, tokens: int) -> int:
        """Return the scratch memory that the centers of tokens take, in bytes, if no two of the tokens are alike."""
        return 0 if self._plan.token_centers is None else CENTER_BYTES * tokens * self._plan.geometry.tiles.columns

    def _usual_plans(self) -> tuple[I64, int]:
        """Return a usual plan per section, and how many components per token choosing classes reads."""
        plan, predictor = self._plan, self._predictor
        if predictor is None:
            return plan.arrays.plans, 0
        tables, sections = plan.classes, np.arange(len(self.sections))
        plans = tables.arrays.plans[tables.rows(sections, tables.usual)]
        return plans, len(predictor.sections) * predictor.components

    def prepare(self, chunks: Sequence[DecodeRequest], cache: PagedCache, layers: range) -> TransformBatch:
        """Verify the sections of these blobs that contain any of `layers`, and pack the arrays for the device."""
        plan, sections = self._plan, touched(self.sections, layers)
        incoming = Incoming(chunks, sections, cache)
        jobs, index = incoming.jobs, np.tile(np.asarray(sections), len(chunks))
        jobs[:, JobField.PLAN] = index
        classed = np.array([len(view) > MODE_BYTE and view[MODE_BYTE] != 0 for view in incoming.views])
        jobs[classed, JobField.COLUMNS], count = running_offsets(jobs[classed, JobField.TOKENS])
        # Each array begins at a multiple of 16 bytes, because kernels are compiled for that alignment.
        blank = np.zeros(count, np.uint8)
        columns = (incoming.upload.add(blank), incoming.upload.add(blank), blank)
        centers = None
        if plan.token_centers is not None:
            runs = [TokenRun(_ids(chunk.token_ids), chunk.header.start) for chunk in chunks]
            centers = [(incoming.upload.add(array), array) for array in plan.token_centers.lay_out(runs)]
        some = len(layers) < cache.layout.num_layers
        own = of_layers(plan.maps.tiles, layers)
        tiles = (incoming.upload.add(own), own) if some else None
        class_tiles = None
        class_planes: I64 | None = None
        if classed.any():
            class_planes = plan.classes.planes[index].max(1)
            if some:
                own = of_layers(plan.classes.maps.tiles, layers)
                class_tiles = (incoming.upload.add(own), own)
        planes_of = plan.arrays.plans[index, PlanField.PLANES]
        packed, classed = incoming.read(plan.device, planes_of, None, None, class_planes)
        plans = plan.arrays.plans
        if classed.any():
            plans = plan.classes.arrays.plans
            which, data = np.flatnonzero(classed), packed.bytes.numpy()
            sorted_columns = self._read_classes(data.view(np.uint16), jobs, which, index[which], incoming)
            for offset, array in zip(columns[:2], sorted_columns, strict=True):
                packed.host(offset, array)[:] = array
        planes, coefficients = incoming.place(packed, plans)
        return TransformBatch(
            incoming, sections, packed, tiles, class_tiles, columns, centers, classed, planes, coefficients
        )

    def _read_classes(self, words: U16, jobs: I64, which: I64, sections: I64, incoming: Incoming) -> tuple[U8, U8]:
        """Return classes and order of the columns of the jobs `which`, and fill in the plans of these jobs."""
        tables, own = self._plan.classes, jobs[which]
        names = [incoming.name(job) for job in which]
        classes = read_classes(words, own, tables.slots, sections, tables.finest[sections], names)
        columns, order, counts = sort_columns(classes, own)
        jobs[which, JobField.CLASS_PLAN] = tables.rows(sections)
        jobs[which, JobField.PLAN] = tables.rows(sections, (counts > 0).argmax(1))
        return columns, order

    def launch(self, batch: TransformBatch) -> torch.Tensor:
        """Decode a batch. Return the status of its jobs, int32 on the device."""
        plan = self._plan
        geometry, device = plan.geometry, plan.device
        plain, classed = not batch.classed.all(), bool(batch.classed.any())
        plans = plan.classes.device_plans if classed else plan.device_plans
        with stage("upload"):
            sent = batch.packed.send(device)
        incoming, host_jobs = batch.incoming, batch.incoming.jobs
        jobs = incoming.device_jobs(sent)
        status, found = zeros(2, len(host_jobs), device)
        planes = torch.empty(batch.planes, dtype=torch.uint8, device=device)
        y = torch.empty(batch.coefficients, dtype=plan.product, device=device)
        max_tokens = incoming.max_tokens
        chunks = incoming.chunk_batch(sent, status)
        launches: list[SynthesisLaunch] = []
        if plain:
            launches.append(self._synthesis(batch, sent, max_tokens))
        order = None
        if classed:
            classes, tokens = (sent.view(offset, batch.columns[2]) for offset in batch.columns[:2])
            order = TokenOrder(classes, tokens, plan.classes.block_ranks)
            launches.append(self._synthesis(batch, sent, max_tokens, order))
        with stage("rotation tables"):
            rotations = geometry.rotations(chunks.chunks, len(incoming.slots), max_tokens)
        coding = stream_jobs(host_jobs, jobs, plans.plans, plans.tables)
        with stage("rans"):
            if plain:
                rans_decode(sent.bytes, coding, self._tables.decoding, planes, status)
            if order is not None:
                rans_decode_classes(sent.bytes, coding, self._tables.decoding, order.classes, planes, status)
        with stage("dequantize"):
            if plain:
                dequantize(
                    sent.bytes, jobs, plans, planes, y, status, found,
                    max_rows=int(plan.arrays.plans[:, PlanField.ROWS].max()), max_tokens=max_tokens,
                )  # fmt: skip
            if order is not None:
                deepest = plan.classes.arrays.plans[host_jobs[batch.classed, JobField.PLAN], PlanField.EXTENT]
                max_rows, depth = int(deepest.max()), max(launches[-1].config.block_t, MIN_DEPTH)
                dequantize_classes(
                    sent.bytes, jobs, plans, plan.classes.row_maps, order.classes, planes, y, status, found,
                    max_rows, max_tokens, depth,
                )  # fmt: skip
        means, center_rows = plan.means, None
        if batch.centers is not None and plan.token_centers is not None:
            with stage("predict"):
                arrays = SentArrays(*(sent.view(*part) for part in batch.centers))
                centers = plan.token_centers.centers(arrays, batch.sections)
            means, center_rows = centers.table, centers.rows
        with stage("synthesize"):
            for own in launches:
                synthesize(
                    y, jobs, own.tiles, own.maps.inverse, means, chunks, rotations, own.cache, own.config, own.order,
                    center_rows,
                )  # fmt: skip
        return status

    def _synthesis(
        self, batch: TransformBatch, sent: Packed, max_tokens: int, order: TokenOrder | None = None
    ) -> SynthesisLaunch:
        plan = self._plan
        maps, some = (plan.maps, batch.tiles) if order is None else (plan.classes.maps, batch.class_tiles)
        own = maps.tiles if some is None else some[1]
        tiles = TileTable(maps.device_tiles if some is None else sent.view(*some), plan.geometry.tiles.pairs)
        cache = batch.incoming.cache_view(sent, own)
        max_rank = int(own[:, TileField.RANK].max())
        config = synthesis_config(plan.product, cache.element, max_rank, max_tokens, cache.aligned)
        return SynthesisLaunch(maps, tiles, cache, config, order)

    # Encoding --------------------------------------------------------------------------------------------------

    def encode_bytes(self, tokens: int) -> int:
        """Return the scratch memory that encoding a chunk of this many tokens usually takes, in bytes."""
        plans, leading = self._usual_plans()
        rows, planes = int(plans[:, PlanField.EXTENT].sum()), int(plans[:, PlanField.PLANES].sum())
        sizes = 4 * (self._plan.geometry.tiles.columns + rows + ARRAYS * leading) + 3 * planes
        return tokens * sizes + self._center_bytes(tokens)

    def encode(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        requests: Sequence[EncodeRequest],
        first_chunk: int,
    ) -> list[list[bytes]]:
        """Return the encoded sections of each chunk; chunks count from `first_chunk`.

        Waits for the device twice, and once more where a predictor is asked.
        """
        plan, memory = self._plan, CacheMemory.of(cache)
        geometry, device = plan.geometry, plan.device
        count = len(self.sections)
        table, jobs = encoding_tables(slots, [request.start for request in requests], count)
        predictor = self._predictor
        host = {"chunks": table, **memory.named()}
        if predictor is not None:
            following = [request.following for request in requests]
            host["jobs"], host["positions"], host["levels"] = predictor.place(table, following)
        if plan.token_centers is not None:
            runs = [TokenRun(_ids(request.token_ids), request.start) for request in requests]
            host |= plan.token_centers.lay_out(runs)._asdict()
        part = send_arrays(host, device)
        joined = join(slots)
        max_tokens = int(table[:, ChunkField.TOKENS].max())
        status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
        chunks = ChunkBatch(part["chunks"], status, count, 0, max_tokens)
        x = torch.empty(len(joined), geometry.tiles.columns, dtype=torch.float32, device=device)
        with stage("rotation tables"):
            rotations = geometry.rotations(chunks.chunks, len(joined), max_tokens, use_source=True, inverse=True)
        view = memory.view(part, joined, plan.maps.tiles)
        tiles = TileTable(plan.maps.device_tiles, geometry.tiles.pairs)
        centers = None
        if plan.token_centers is not None:
            with stage("predict"):
                arrays = SentArrays(*(part[name] for name in SentArrays._fields))
                centers = plan.token_centers.centers(arrays, range(count))
        with stage("gather"):
            if centers is None:
                gather(view, tiles, chunks, rotations, plan.means, x)
            else:
                gather(view, tiles, chunks, rotations, centers.table, x, centers.rows)
        predicted = None
        if predictor is not None:
            with stage("predict"):
                asked = predictor.offsets(x, part["jobs"], chunks, part["positions"], part["levels"], centers)
            answer = Download(torch.cat([asked.flatten(), status.float()])).wait()
            numbers = range(first_chunk, first_chunk + len(slots))
            raise_status(answer[asked.numel() :].astype(np.int32), self.sections, numbers)
            predicted = torch.from_numpy(answer[: asked.numel()]).view(asked.shape)

        host_plans, plans = plan.arrays.plans, plan.device_plans
        per_stream = tokens_per_stream_of([own.plan for own in plan.coding], plan.family)
        jobs[:, JobField.PER_STREAM] = np.tile(per_stream, len(slots))
        classes = self._choose(jobs, table, predictor, predicted)
        class_planes = None
        host = {}
        if classes is not None:
            host_plans, plans = plan.classes.arrays.plans, plan.classes.device_plans
            host |= self._set_classes(jobs, classes)
            class_planes = np.tile(plan.classes.planes.max(1), len(slots))
        host["jobs"] = jobs
        check_size(jobs, host_plans)
        plane_bytes, coefficients = place_jobs(jobs, host_plans)
        place_streams(jobs, host_plans, class_planes)
        part = send_arrays(host, device)
        device_jobs, own_classes = part["jobs"], part.get("classes")
        order = None
        if own_classes is not None:
            order = TokenOrder(own_classes, part["order"], plan.classes.block_ranks)
        plain = bool((jobs[:, JobField.CLASS_PLAN] <= 0).any())
        max_rows = int(host_plans[jobs[:, JobField.PLAN], PlanField.ROWS].max())
        y = torch.empty(coefficients, dtype=torch.float32, device=device)
        planes = torch.empty(plane_bytes, dtype=torch.uint8, device=device)
        counts = torch.empty(len(jobs), max_rows, dtype=torch.int32, device=device)
        used: list[tuple[LinearMaps, TokenOrder | None]] = [(plan.maps, None)] if plain else []
        if order is not None:
            used.append((plan.classes.maps, order))
        with stage("analyze"):
            for maps, own in used:
                analyze(
                    x, device_jobs, maps.device_blocks, maps.forward, chunks, y,
                    max_rank=int(maps.blocks[:, BlockField.RANK].max()), order=own,
                )  # fmt: skip
        with stage("quantize"):
            if plain:
                quantize(
                    y, device_jobs, plans, self._tables.codable, planes, counts, status, max_rows,
                )  # fmt: skip
            if own_classes is not None:
                quantize_classes(
                    y, device_jobs, plans, self._tables.codable, own_classes, planes, counts, status, max_rows
                )

        def escapes(starts: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
            if plain:
                list_escapes(y, device_jobs, plans, planes, starts, index, value, max_rows)
            if own_classes is not None:
                list_escapes_classes(y, device_jobs, plans, own_classes, planes, starts, index, value, max_rows)

        parts = encode_planes(
            jobs, host_plans, stream_jobs(jobs, device_jobs, plans.plans, plans.tables), self._tables.entries, planes,
            status, self.sections, first_chunk, counts, escapes, own_classes, part.get("class_words"),
        )  # fmt: skip
        return [parts[at : at + count] for at in range(0, len(parts), count)]

    def _choose(
        self,
        jobs: I64,
        chunks: I64,
        predictor: DevicePredictor | None,
        predicted: torch.Tensor | None,
    ) -> U8 | None:
        """Return the classes of all tokens that have one, or None; fill in CLASS_PLAN and COLUMNS of their jobs.

        Args:
            jobs: of all sections of all chunks.
            chunks: likewise.
            predictor: of the profile, if it has one.
            predicted: its answer, `[S, tokens]` on the host.
        """
        asked = {} if predictor is None else {int(section): i for i, section in enumerate(predictor.sections)}
        told = None if predicted is None else choose_classes(predicted, 0)
        chosen: list[U8] = []
        at = 0
        for job, row in enumerate(jobs):
            chunk, section = divmod(job, len(self.sections))
            own = None
            if told is not None and section in asked:
                first = int(chunks[chunk, ChunkField.FIRST])
                own = told[asked[section], first : first + int(chunks[chunk, ChunkField.TOKENS])]
            if own is None:
                continue
            tables = self._plan.classes
            row[JobField.CLASS_PLAN], row[JobField.COLUMNS] = tables.rows(section), at
            chosen.append(np.maximum(own, np.uint8(tables.finest[section])))
            at += len(own)
        return np.concatenate(chosen) if chosen else None

    def _set_classes(self, jobs: I64, classes: U8) -> dict[str, npt.NDArray[Any]]:
        """Fill in the fields of jobs that depend on classes. Return the arrays for the device, by name."""
        tables, which = self._plan.classes, np.flatnonzero(jobs[:, JobField.CLASS_PLAN] > 0)
        own, sections = jobs[which], which % len(self.sections)
        columns, order, counts = sort_columns(classes, own)
        own[:, JobField.PLAN] = tables.rows(sections, (counts > 0).argmax(1))
        share = counts / own[:, JobField.TOKENS, None]
        planes = (share * tables.planes[sections]).sum(1)
        bits = (share * tables.bits[sections]).sum(1)
        own[:, JobField.PER_STREAM] = [tokens_per_stream(int(p), b) for p, b in zip(planes, bits, strict=True)]
        words = write_classes(classes, own, tables.freq, sections)
        jobs[which] = own
        return {"classes": columns, "order": order, "class_words": words}


def _ids(token_ids: I64 | None) -> I64:
    """Return the ids of a chunk whose tokens have some."""
    if token_ids is None:
        raise InputError("token_ids: must be known in all chunks of a batch with predictions, got none")
    return token_ids
