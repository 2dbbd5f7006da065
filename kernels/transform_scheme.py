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
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import CodedChunk, Coding
from cuvee.codec.coefficients import tokens_per_stream
from cuvee.codec.importance import choose_classes
from cuvee.codec.paged import PagedCache
from cuvee.codec.symbols import U8, U16
from cuvee.kernels.batch import (
    Incoming,
    Memory,
    join,
    of_layers,
    outgoing,
    place_jobs,
    raise_status,
    running_offsets,
    stage,
    touched,
    zeros,
)
from cuvee.kernels.classes import read_classes, sort_columns, write_classes
from cuvee.kernels.coded import check_size, encode_planes, place_streams, streams_of
from cuvee.kernels.jobs import Block, Chunk, Job, Plan, Tile
from cuvee.kernels.pages import contiguity
from cuvee.kernels.plans import FamilyTables, LinearMaps, TransformPlan
from cuvee.kernels.predictor import ARRAYS, DevicePredictor
from cuvee.kernels.rans import rans_decode
from cuvee.kernels.rans_classes import rans_decode_classes
from cuvee.kernels.staging import Packed, Upload
from cuvee.kernels.symbols import dequantize, list_escapes, quantize
from cuvee.kernels.symbols_classes import MIN_DEPTH, dequantize_classes, list_escapes_classes, quantize_classes
from cuvee.kernels.transform import Columns, SynthesisConfig, analyze, gather, synthesis_config, synthesize

I64 = npt.NDArray[np.int64]

MODE_BYTE = 9  # of a section: whether its tokens have classes


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch of blobs, verified and packed, and the sizes of what decoding it needs.

    Attributes:
        tiles, class_tiles: offset in `packed`, and contents; None: all tiles.
        columns: offsets in `packed` of the columns' classes and of their order, and what is as long.
        classed: `[J]` which jobs' tokens have classes.
    """

    cache: PagedCache
    incoming: Incoming
    sections: range
    packed: Packed
    tiles: tuple[int, I64] | None
    class_tiles: tuple[int, I64] | None
    columns: tuple[int, int, U8]
    classed: npt.NDArray[np.bool_]
    planes: int
    coefficients: int


@dataclass(frozen=True, slots=True)
class Placing:
    """How `synthesize` is launched for a cache and some tiles."""

    unit_stride: bool
    aligned: bool
    config: SynthesisConfig


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

    @cached_property
    def _predictor(self) -> DevicePredictor | None:
        learned = self._plan.profile.learned
        if all(section.predictor is None for section in learned):
            return None
        return DevicePredictor(learned, self._plan.geometry.tiles, self._plan.device)

    # Decoding --------------------------------------------------------------------------------------------------

    def decode_bytes(self, tokens: int) -> int:
        """Scratch that decoding a chunk of so many tokens takes, as a rule."""
        plans, _ = self._usual_plans()
        width = self._plan.product.itemsize
        return int(tokens * (plans[:, Plan.PLANES].sum() + width * plans[:, Plan.EXTENT].sum()))

    def _usual_plans(self) -> tuple[I64, int]:
        """A plan for each section, and the components that are read to choose classes, all of a token's together."""
        plan = self._plan
        if self._predictor is None:
            return plan.arrays.plans, 0
        rows = plan.classes.rows(np.arange(len(self.sections)), plan.classes.usual)
        return plan.classes.arrays.plans[rows], len(self._predictor.sections) * self._predictor.components

    def prepare(self, chunks: Sequence[CodedChunk], cache: PagedCache, layers: range) -> Prepared:
        """Verify the sections of these blobs that hold some of `layers`, and pack what goes to the device."""
        plan, sections = self._plan, touched(self.sections, layers)
        incoming = Incoming(chunks, sections)
        jobs, index = incoming.jobs, np.tile(np.asarray(sections), len(chunks))
        jobs[:, Job.PLAN] = index
        classed = np.array([len(view) > MODE_BYTE and view[MODE_BYTE] != 0 for view in incoming.views])
        jobs[classed, Job.COLUMNS], count = running_offsets(jobs[classed, Job.TOKENS])
        # Each begins at a multiple of 16 bytes, whatever their number: kernels are compiled for that.
        blank = np.zeros(count, np.uint8)
        columns = (incoming.upload.add(blank), incoming.upload.add(blank), blank)
        some = len(layers) < cache.layout.num_layers
        own = of_layers(plan.maps.tiles, layers)
        tiles = (incoming.upload.add(own), own) if some else None
        class_tiles = None
        class_planes = None
        if classed.any():
            class_planes = plan.classes.planes.max(1)[index]
            if some:
                own = of_layers(plan.classes.maps.tiles, layers)
                class_tiles = (incoming.upload.add(own), own)
        packed, classed = incoming.read(plan.device, plan.arrays.plans[index, Plan.PLANES], None, None, class_planes)
        plans = plan.arrays.plans
        if classed.any():
            plans = plan.classes.arrays.plans
            which, data = np.flatnonzero(classed), packed.bytes.numpy()
            sorted_columns = self._read_classes(data.view(np.uint16), jobs, which, index[which], incoming)
            for offset, array in zip(columns[:2], sorted_columns, strict=True):
                packed.host(offset, array)[:] = array
        planes, coefficients = incoming.place(packed, plans)
        return Prepared(
            cache, incoming, sections, packed, tiles, class_tiles, columns, classed, planes, coefficients
        )  # fmt: skip

    def _read_classes(self, words: U16, jobs: I64, which: I64, sections: I64, incoming: Incoming) -> tuple[U8, U8]:
        """Classes and order of the columns of the jobs `which`, whose plans are filled in."""
        tables, own = self._plan.classes, jobs[which]
        names = [incoming.name(job) for job in which]
        classes = read_classes(words, own, tables.slots, sections, tables.finest[sections], names)
        columns, order, counts = sort_columns(classes, own)
        jobs[which, Job.CLASS_PLAN] = tables.rows(sections)
        jobs[which, Job.PLAN] = tables.rows(sections, (counts > 0).argmax(1))
        return columns, order

    def launch(self, batch: Prepared) -> torch.Tensor:
        """Decode a batch; returns the status of its jobs, int32 on the device."""
        plan, memory = self._plan, Memory.of(batch.cache)
        geometry, device = plan.geometry, plan.device
        plain, classed = not batch.classed.all(), bool(batch.classed.any())
        arrays = plan.classes.device_arrays if classed else plan.device_arrays
        with stage("upload"):
            sent = batch.packed.send(device)
        incoming, host_jobs = batch.incoming, batch.incoming.jobs
        jobs = sent.view(incoming.at_jobs, host_jobs)
        chunks = sent.view(incoming.at_chunks, incoming.chunks)
        status, found = zeros(2, len(host_jobs), device)
        planes = torch.empty(batch.planes, dtype=torch.uint8, device=device)
        y = torch.empty(batch.coefficients, dtype=plan.product, device=device)
        max_tokens, max_streams = (int(host_jobs[:, field].max()) for field in (Job.TOKENS, Job.STREAMS))
        used: list[tuple[LinearMaps, tuple[int, I64] | None, Columns | None]] = []
        if plain:
            used.append((plan.maps, batch.tiles, None))
        columns = None
        if classed:
            classes, order = (sent.view(offset, batch.columns[2]) for offset in batch.columns[:2])
            columns = Columns(classes, order, plan.classes.block_ranks)
            used.append((plan.classes.maps, batch.class_tiles, columns))
        placing = [(*own, self._placing(memory, own[0], own[1], max_tokens)) for own in used]
        with stage("rotation tables"):
            cos, sin = geometry.rotations(chunks, len(incoming.slots), max_tokens)
        with stage("rans"):
            if plain:
                rans_decode(
                    sent.bytes, jobs, arrays.plans, arrays.tables, self._tables.slots, planes, status, max_streams
                )
            if columns is not None:
                rans_decode_classes(
                    sent.bytes, jobs, arrays.plans, arrays.tables, self._tables.slots, columns.classes, planes, status,
                    max_streams,
                )  # fmt: skip
        with stage("dequantize"):
            if plain:
                dequantize(
                    sent.bytes, jobs, arrays.plans, arrays.row_floats, arrays.row_ints, arrays.steps, planes, y,
                    status=status, found=found, max_rows=int(plan.arrays.plans[:, Plan.ROWS].max()),
                    max_tokens=max_tokens, predicted=bool(plan.arrays.plans[:, Plan.PREDICTION].any()),
                )  # fmt: skip
            if columns is not None:
                deepest = plan.classes.arrays.plans[host_jobs[batch.classed, Job.PLAN], Plan.EXTENT]
                dequantize_classes(
                    sent.bytes, jobs, arrays.plans, plan.classes.row_maps, arrays.row_floats, arrays.row_ints,
                    arrays.steps, columns.classes, planes, y, status=status, found=found, max_rows=int(deepest.max()),
                    max_tokens=max_tokens, depth=max(placing[-1][-1].config.block_t, MIN_DEPTH),
                )  # fmt: skip
        with stage("synthesize"):
            for maps, tiles, own, how in placing:
                synthesize(
                    y, jobs, maps.device_tiles if tiles is None else sent.view(*tiles), maps.inverse, plan.means,
                    chunks, incoming.slots, cos, sin, memory.places, memory.scales, status,
                    sections=len(batch.sections), first_section=batch.sections.start, max_tokens=max_tokens,
                    element=memory.element, unit_stride=how.unit_stride, aligned=how.aligned,
                    pairs=geometry.tiles.pairs, config=how.config, columns=own,
                )  # fmt: skip
        return status

    def _placing(self, memory: Memory, maps: LinearMaps, tiles: tuple[int, I64] | None, max_tokens: int) -> Placing:
        own = maps.tiles if tiles is None else tiles[1]
        unit_stride, aligned = contiguity(memory.table, own, memory.element)
        max_rank = int(own[:, Tile.RANK].max())
        config = synthesis_config(self._plan.product, memory.element, max_rank, max_tokens, aligned)
        return Placing(unit_stride, aligned, config)

    # Encoding --------------------------------------------------------------------------------------------------

    def encode_bytes(self, tokens: int) -> int:
        """Scratch that encoding a chunk of so many tokens takes, as a rule."""
        plans, leading = self._usual_plans()
        rows, planes = int(plans[:, Plan.EXTENT].sum()), int(plans[:, Plan.PLANES].sum())
        return tokens * (4 * (self._plan.geometry.tiles.columns + rows + ARRAYS * leading) + 3 * planes)

    def encode(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int],
        offsets: Sequence[torch.Tensor | None],
        first_chunk: int,
    ) -> list[list[bytes]]:
        """The sections of each chunk, of which the first has number `first_chunk`.

        `offsets` as in `DeviceBackend.encode`. Waits for the device twice, and once more where a predictor is asked.
        """
        plan, memory = self._plan, Memory.of(cache)
        geometry, device = plan.geometry, plan.device
        count = len(self.sections)
        table, jobs = outgoing(slots, starts, count)
        # A caller's offsets take the place of the predictor's.
        predictor = None if all(own is not None for own in offsets) else self._predictor
        upload = Upload()
        host = {"chunks": table}
        if predictor is not None:
            host["jobs"], host["positions"] = predictor.place(table)
        at = {name: upload.add(array) for name, array in host.items()}
        sent = upload.pack(device).send(device)
        part = {name: sent.view(at[name], array) for name, array in host.items()}
        chunks, joined = part["chunks"], join(slots)
        max_tokens = int(table[:, Chunk.TOKENS].max())
        status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
        x = torch.empty(len(joined), geometry.tiles.columns, dtype=torch.float32, device=device)
        with stage("rotation tables"):
            cos, sin = geometry.rotations(chunks, len(joined), max_tokens, use_source=True, inverse=True)
        unit_stride, aligned = contiguity(memory.table, plan.maps.tiles, memory.element)
        with stage("gather"):
            gather(
                plan.maps.device_tiles, plan.means, chunks, joined, cos, sin, memory.places, memory.scales, x, status,
                sections=count, first_section=0, max_tokens=max_tokens, element=memory.element,
                unit_stride=unit_stride, aligned=aligned, pairs=geometry.tiles.pairs,
            )  # fmt: skip
        predicted = None
        if predictor is not None:
            with stage("predict"):
                asked = predictor.offsets(x, part["jobs"], chunks, part["positions"], max_tokens)
            answer = torch.cat([asked.flatten(), status.float()]).cpu().numpy()
            numbers = range(first_chunk, first_chunk + len(slots))
            raise_status(answer[asked.numel() :].astype(np.int32), self.sections, numbers)
            predicted = torch.from_numpy(answer[: asked.numel()]).view(asked.shape)

        host_plans, arrays = plan.arrays.plans, plan.device_arrays
        jobs[:, Job.PER_STREAM] = np.tile(streams_of([own.plan for own in plan.coding], self._family), len(slots))
        classes = self._choose(jobs, table, predictor, predicted, offsets)
        class_planes = None
        host = {"jobs": jobs}
        if classes is not None:
            host_plans, arrays = plan.classes.arrays.plans, plan.classes.device_arrays
            host |= self._set_classes(jobs, classes)
            class_planes = np.tile(plan.classes.planes.max(1), len(slots))
        check_size(jobs, host_plans)
        plane_bytes, coefficients = place_jobs(jobs, host_plans)
        place_streams(jobs, host_plans, class_planes)
        upload = Upload()
        at = {name: upload.add(array) for name, array in host.items()}
        sent = upload.pack(device).send(device)
        part = {name: sent.view(at[name], array) for name, array in host.items()}
        device_jobs, own_classes = part["jobs"], part.get("classes")
        columns = None
        if own_classes is not None:
            columns = Columns(own_classes, part["order"], plan.classes.block_ranks)
        plain = bool((jobs[:, Job.CLASS_PLAN] <= 0).any())
        max_rows = int(host_plans[jobs[:, Job.PLAN], Plan.ROWS].max())
        y = torch.empty(coefficients, dtype=torch.float32, device=device)
        planes = torch.empty(plane_bytes, dtype=torch.uint8, device=device)
        counts = torch.empty(len(jobs), max_rows, dtype=torch.int32, device=device)
        used: list[tuple[LinearMaps, Columns | None]] = [(plan.maps, None)] if plain else []
        if columns is not None:
            used.append((plan.classes.maps, columns))
        with stage("analyze"):
            for maps, own in used:
                analyze(
                    x, device_jobs, maps.device_blocks, maps.forward, chunks, y, sections=count,
                    max_rank=int(maps.blocks[:, Block.RANK].max()), max_tokens=max_tokens, columns=own,
                )  # fmt: skip
        with stage("quantize"):
            if plain:
                quantize(
                    y, device_jobs, arrays.plans, arrays.row_floats, arrays.row_ints, arrays.inverses, arrays.limits,
                    arrays.tables, self._tables.freq, planes, counts, status, max_rows=max_rows,
                )  # fmt: skip
            if own_classes is not None:
                quantize_classes(
                    y, device_jobs, arrays.plans, arrays.row_floats, arrays.row_ints, arrays.inverses, arrays.limits,
                    arrays.tables, self._tables.freq, own_classes, planes, counts, status, max_rows=max_rows,
                )  # fmt: skip

        def escapes(starts: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
            if plain:
                list_escapes(
                    y, device_jobs, arrays.plans, arrays.row_floats, arrays.row_ints, arrays.inverses, planes, starts,
                    index, value, max_rows=max_rows,
                )  # fmt: skip
            if own_classes is not None:
                list_escapes_classes(
                    y, device_jobs, arrays.plans, arrays.row_floats, arrays.row_ints, arrays.inverses, own_classes,
                    planes, starts, index, value, max_rows=max_rows,
                )  # fmt: skip

        parts = encode_planes(
            jobs, device_jobs, host_plans, arrays.plans, arrays.tables, self._tables.coding, planes, status,
            self.sections, first_chunk, counts, escapes, own_classes, part.get("class_words"),
        )  # fmt: skip
        return [parts[at : at + count] for at in range(0, len(parts), count)]

    def _choose(
        self,
        jobs: I64,
        chunks: I64,
        predictor: DevicePredictor | None,
        predicted: torch.Tensor | None,
        offsets: Sequence[torch.Tensor | None],
    ) -> U8 | None:
        """Classes of all tokens of those jobs that have some, and the jobs' CLASS_PLAN and COLUMNS; None: no job has.

        Args:
            jobs: of all sections of all chunks.
            chunks: likewise.
            predictor: of the profile, if any chunk needs it.
            predicted: its answer, `[S, tokens]` on the host.
            offsets: a caller's, of each chunk.
        """
        asked = {} if predictor is None else {int(section): i for i, section in enumerate(predictor.sections)}
        told = None if predicted is None else choose_classes(predicted, 0)
        given = [None if own is None else choose_classes(own, 0) for own in offsets]
        chosen: list[U8] = []
        at = 0
        for job, row in enumerate(jobs):
            chunk, section = divmod(job, len(self.sections))
            own = given[chunk]
            if own is None and told is not None and section in asked:
                first = int(chunks[chunk, Chunk.FIRST])
                own = told[asked[section], first : first + int(chunks[chunk, Chunk.TOKENS])]
            if own is None:
                continue
            tables = self._plan.classes
            row[Job.CLASS_PLAN], row[Job.COLUMNS] = tables.rows(section), at
            chosen.append(np.maximum(own, np.uint8(tables.finest[section])))
            at += len(own)
        return np.concatenate(chosen) if chosen else None

    def _set_classes(self, jobs: I64, classes: U8) -> dict[str, npt.NDArray[Any]]:
        """Fill in what classes change in their jobs; what goes to the device: classes and order of columns, words."""
        tables, which = self._plan.classes, np.flatnonzero(jobs[:, Job.CLASS_PLAN] > 0)
        own, sections = jobs[which], which % len(self.sections)
        columns, order, counts = sort_columns(classes, own)
        own[:, Job.PLAN] = tables.rows(sections, (counts > 0).argmax(1))
        share = counts / own[:, Job.TOKENS, None]
        planes = (share * tables.planes[sections]).sum(1)
        bits = (share * tables.bits[sections]).sum(1)
        own[:, Job.PER_STREAM] = [tokens_per_stream(int(p), b) for p, b in zip(planes, bits, strict=True)]
        words = write_classes(classes, own, tables.freq, sections)
        jobs[which] = own
        return {"classes": columns, "order": order, "class_words": words}
