"""The learned scheme on the device: the launches that decode and encode batches of chunks.

    decode   class streams --host--> classes, columns        encode   gather --> leading components --> offsets
             rans_decode --> dequantize --> synthesize                offsets --host--> classes, columns
                                                                      analyze --> quantize --> rans_encode --> blobs

A job is one section of one chunk; where chunks have refinements, the jobs of these follow. A base and its refinement
share the rows of coefficients: the refinement codes what quantizing the base left over, and a decoder adds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import DecodeRequest, EncodeRequest
from cuvee.codec.entropy.token_classes import NEUTRAL
from cuvee.codec.errors import CorruptError
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.class_predictor import choose_classes
from cuvee.codec.schemes.coefficients import check_escape_numbers, streams_of_classes
from cuvee.codec.support.arrays import U8
from cuvee.codec.support.lazy import lazy
from cuvee.kernels.centers import CENTER_BYTES, Centers
from cuvee.kernels.chunks import CacheMemory, chunk_table, join, of_layers, raise_status, touched
from cuvee.kernels.class_predictor import ARRAYS, DevicePredictor
from cuvee.kernels.class_streams import sort_columns, write_classes
from cuvee.kernels.devices import Download
from cuvee.kernels.incoming import Incoming
from cuvee.kernels.jobs import I64, BlockField, ChunkField, JobField, PlanField, TileField, job_table
from cuvee.kernels.ops.analyze import analyze, gather
from cuvee.kernels.ops.arguments import CenterTable, ChunkBatch, JobCoefficients, PlaneJobs, TileTable, TokenOrder
from cuvee.kernels.ops.dequantize import MIN_DEPTH, dequantize
from cuvee.kernels.ops.quantize import list_escapes, quantize
from cuvee.kernels.ops.rans import rans_decode
from cuvee.kernels.ops.synthesize import synthesis_config, synthesize
from cuvee.kernels.outgoing import code_streams, measure, stream_fields, stream_jobs, write_parts
from cuvee.kernels.plans import TransformPlan
from cuvee.kernels.upload import send_arrays
from cuvee.kernels.workspace import coefficient_offsets, plane_offsets, running_offsets, zeros


class TransformKernels:
    """Codes chunks with a learned profile at one step, or as bases and refinements."""

    def __init__(self, plan: TransformPlan) -> None:
        self.sections = plan.profile.sections
        self._plan = plan

    @lazy
    def _predictor(self) -> DevicePredictor | None:
        if all(section.predictor is None for section in self._plan.learned):
            return None
        return DevicePredictor(self._plan.coding[0].sections, self._plan.geometry.tiles, self._plan.device)

    # Decoding --------------------------------------------------------------------------------------------------

    def decode_bytes(self, tokens: int) -> int:
        """Return the scratch memory that decoding a chunk of this many tokens usually takes, in bytes."""
        planes, rows = self._common_sizes()
        width = self._plan.product.itemsize + (4 if self._plan.parts > 1 else 0)
        return tokens * (planes + width * rows) + self._center_bytes(tokens)

    def _center_bytes(self, tokens: int) -> int:
        """Return the scratch memory that the centers of tokens take, in bytes, if no two of the tokens are alike."""
        return 0 if self._plan.token_centers is None else CENTER_BYTES * tokens * self._plan.geometry.tiles.columns

    def _common_sizes(self) -> tuple[int, int]:
        """Return the planes of all parts and the rows of coefficients that a token usually has, in all sections."""
        plan, sections = self._plan, np.arange(len(self.sections))
        plans = np.stack([plan.plans[plan.rows(sections, plan.common_class, part)] for part in range(plan.parts)])
        return int(plans[:, :, PlanField.PLANES].sum()), int(plans[0, :, PlanField.EXTENT].sum())

    def decode(self, chunks: Sequence[DecodeRequest], cache: PagedCache, layers: range) -> torch.Tensor:
        """Verify the sections of these blobs that contain any of `layers`, and start to decode them into the cache.

        Returns the status of their jobs, int32 on the device.
        """
        plan, sections = self._plan, touched(self.sections, layers)
        geometry, device, centers_of = plan.geometry, plan.device, plan.token_centers
        incoming = Incoming(chunks, sections, cache)
        upload, max_tokens, count = incoming.upload, incoming.max_tokens, incoming.count
        jobs, planes_size, coefficients, max_rows = self._incoming_jobs(incoming, sections, len(chunks))
        if centers_of is not None:
            starts = [chunk.opened.start for chunk in chunks]
            upload.add_arrays(centers_of.lay_out([chunk.token_ids for chunk in chunks], starts))
        tiles, partial = plan.maps.tiles, len(layers) < cache.layout.num_layers
        if partial:
            tiles = of_layers(tiles, layers, sections)
            upload.add_arrays({"tiles": tiles})
        data, sent = upload.send()
        status, *escape_counts = zeros(1 + plan.parts, count, device)
        planes = torch.empty(planes_size, dtype=torch.uint8, device=device)
        y = torch.empty(coefficients, dtype=plan.product, device=device)
        batch, order = incoming.chunk_batch(sent, status), TokenOrder(sent["classes"], sent["order"], plan.block_ranks)
        view = incoming.cache_view(sent, tiles)
        max_rank = int(tiles[:, TileField.RANK].max())
        config = synthesis_config(plan.product, view.element, max_rank, max_tokens, view.aligned)
        turns = geometry.turns(batch.chunks, len(incoming.slots), max_tokens)
        base = None
        for part in range(plan.parts):
            rows, last = slice(part * count, (part + 1) * count), part == plan.parts - 1
            coding = stream_jobs(jobs[rows], sent["jobs"][rows], plan.device_plans.plans, plan.device_plans.tables)
            rans_decode(data, coding, plan.tables.decoding, order.classes, planes, status)
            out = y if last else torch.empty(coefficients, dtype=torch.float32, device=device)
            dequantize(
                data, PlaneJobs(sent["jobs"][rows], plan.device_plans, order.classes, planes), out, status,
                escape_counts[part], max_rows, max_tokens, max(config.block_t, MIN_DEPTH), base,
            )  # fmt: skip
            base = out
        centers = None if centers_of is None else centers_of.centers(sent, sections)
        device_tiles = TileTable(sent["tiles"] if partial else plan.maps.device_tiles, geometry.tiles.pairs)
        synthesize(
            JobCoefficients(y, sent["jobs"]), device_tiles, plan.maps.bases.inverse(plan.product),
            self._center_table(centers), batch, turns, view, order, config,
        )  # fmt: skip
        return status

    def _center_table(self, centers: Centers | None) -> CenterTable:
        return CenterTable(self._plan.means) if centers is None else CenterTable(centers.table, centers.rows)

    def _incoming_jobs(self, incoming: Incoming, sections: range, chunks: int) -> tuple[I64, int, int, int]:
        """Decode the classes of all jobs, and add to the upload what follows from them.

        Returns the jobs, the sizes of planes and of coefficients, and the rows of coefficients of the deepest job.
        """
        plan = self._plan
        first, count = running_offsets(incoming.tokens)
        part, index, tokens = self._of_jobs(np.tile(np.asarray(sections), chunks), incoming.tokens)
        coded, classes = incoming.read(plan.coding)
        if np.any(other := classes[count:] != np.tile(classes[:count], plan.parts - 1)):
            job = int(np.searchsorted(tokens.cumsum(), count + np.argmax(other), side="right"))
            raise CorruptError(
                f"{incoming.names[job]}: must have the token classes of its base, got other ones: the bytes are damaged"
            )
        by_class, order, counts = sort_columns(classes[:count], first, incoming.tokens)
        deepest = plan.rows(index, np.tile((counts > 0).argmax(1), plan.parts), part)
        plans = plan.plans[deepest]
        planes_at, planes = plane_offsets(plans[:, PlanField.PLANES], tokens)
        extents = plans[: incoming.count, PlanField.EXTENT]
        at, stride, coefficients = coefficient_offsets(extents, incoming.tokens)
        jobs = job_table(
            len(index), tokens=tokens, plan=plan.rows(index, 0, part), deepest=deepest,
            columns=np.tile(first, plan.parts), planes=planes_at, coefficients=np.tile(at, plan.parts),
            stride=np.tile(stride, plan.parts), **coded,
        )  # fmt: skip
        # Each array begins at a multiple of 16 bytes, because kernels are compiled for that alignment.
        incoming.upload.add_arrays({"jobs": jobs, "classes": by_class, "order": order})
        return jobs, planes, coefficients, int(extents.max())

    def _of_jobs(self, index: I64, tokens: I64) -> tuple[I64, I64, I64]:
        """Return part, section and tokens of each job, given the sections and tokens of those of one part."""
        parts = self._plan.parts
        return np.repeat(np.arange(parts), len(index)), np.tile(index, parts), np.tile(tokens, parts)

    # Encoding --------------------------------------------------------------------------------------------------

    def encode_bytes(self, tokens: int) -> int:
        """Return the scratch memory that encoding a chunk of this many tokens usually takes, in bytes."""
        planes, rows = self._common_sizes()
        predictor = self._predictor
        leading = 0 if predictor is None else len(predictor.sections) * predictor.components
        sizes = 4 * (self._plan.geometry.tiles.columns + self._plan.parts * rows + ARRAYS * leading) + 3 * planes
        return tokens * sizes + self._center_bytes(tokens)

    def encode(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        requests: Sequence[EncodeRequest],
        first_chunk: int,
    ) -> list[list[bytes]]:
        """Return the encoded sections of each chunk, part by part; chunks count from `first_chunk`.

        Waits for the device twice, and once more where a predictor is asked.
        """
        plan, count = self._plan, len(self.sections)
        starts = [request.source.start for request in requests]
        table = chunk_table([len(at) for at in slots], starts, starts)
        x, classes, chunks = self._gather(table, CacheMemory.of(cache), join(slots), requests, first_chunk)
        jobs, planes_size, coefficients, arrays_of_classes = self._plan_jobs(table, classes)
        sent = send_arrays({"jobs": jobs, **arrays_of_classes}, plan.device)
        order = TokenOrder(sent["classes"], sent["order"], plan.block_ranks)
        y = torch.empty(plan.parts * coefficients, dtype=torch.float32, device=plan.device)
        of_part = len(chunks.status)
        analyze(
            x, plan.maps.device_blocks, plan.maps.bases.forward, chunks, JobCoefficients(y, sent["jobs"][:of_part]),
            max_rank=int(plan.maps.blocks[:, BlockField.RANK].max()), order=order,
        )  # fmt: skip
        planes = torch.empty(planes_size, dtype=torch.uint8, device=plan.device)
        coded = PlaneJobs(sent["jobs"], plan.device_plans, order.classes, planes)
        counts = self._quantize(y, coefficients, coded, plan.plans[jobs[:, JobField.DEEPEST]], chunks.status)
        parts = self._code(y, jobs, coded, counts, sent["class_words"], chunks.status, first_chunk)
        return [
            [section for first in range(at, len(parts), of_part) for section in parts[first : first + count]]
            for at in range(0, of_part, count)
        ]

    def _gather(
        self, table: I64, memory: CacheMemory, slots: torch.Tensor, requests: Sequence[EncodeRequest], first_chunk: int
    ) -> tuple[torch.Tensor, U8, ChunkBatch]:
        """Return the centered values of all chunks of a `table`, the classes of their tokens, and the batch."""
        plan, geometry, device, predictor = self._plan, self._plan.geometry, self._plan.device, self._predictor
        host: dict[str, npt.NDArray[Any]] = {"chunks": table, **memory.arrays()}
        if predictor is not None:
            following = [request.source.following for request in requests]
            host["jobs"], host["positions"], host["levels"] = predictor.inputs(table, following)
        if plan.token_centers is not None:
            starts = [request.source.start for request in requests]
            host |= plan.token_centers.lay_out([request.token_ids for request in requests], starts)
        sent = send_arrays(host, device)
        count, max_tokens = len(self.sections), int(table[:, ChunkField.TOKENS].max())
        status = torch.zeros(len(table) * count, dtype=torch.int32, device=device)
        chunks = ChunkBatch(sent["chunks"], status, count, max_tokens)
        x = torch.empty(len(slots), geometry.tiles.columns, dtype=torch.float32, device=device)
        turns = geometry.turns(chunks.chunks, len(slots), max_tokens, source=True)
        view = memory.view(sent, slots, plan.maps.tiles)
        centers = None if plan.token_centers is None else plan.token_centers.centers(sent, range(count))
        tiles = TileTable(plan.maps.device_tiles, geometry.tiles.pairs)
        gather(view, tiles, chunks, turns, self._center_table(centers), x)
        numbers = range(first_chunk, first_chunk + len(table))
        return x, self._choose(table, predictor, x, sent, chunks, centers, numbers), chunks

    def _quantize(
        self, y: torch.Tensor, coefficients: int, coded: PlaneJobs, plans: I64, status: torch.Tensor
    ) -> torch.Tensor:
        """Quantize the coefficients of all parts; return the number of escapes of each row, `[J, rows]`."""
        plan, of_part = self._plan, len(status)
        # A multiple of four, so that the rows of each part begin at a multiple of 16 bytes.
        max_rows = -(-int(plans[:, PlanField.ROWS].max()) // 4) * 4
        counts = torch.empty(len(plans), max_rows, dtype=torch.int32, device=plan.device)
        for part in range(plan.parts):
            rows, left = slice(part * of_part, (part + 1) * of_part), None
            if part < plan.parts - 1:
                # Of the components that a base does not have, all is left.
                left = y[coefficients:].copy_(y[:coefficients])
            of_jobs = replace(coded, jobs=coded.jobs[rows])
            quantize(y, of_jobs, plan.tables.reach, counts[rows], status, max_rows, left)
        return counts

    def _code(
        self,
        y: torch.Tensor,
        jobs: I64,
        coded: PlaneJobs,
        counts: torch.Tensor,
        class_words: torch.Tensor,
        status: torch.Tensor,
        first_chunk: int,
    ) -> list[bytes]:
        """Entropy-code the planes of all jobs, and write their sections."""
        plan, device = self._plan, self._plan.device
        coding = stream_jobs(jobs, coded.jobs, plan.device_plans.plans, plan.device_plans.tables)
        of_planes = plan.plans[jobs[:, JobField.DEEPEST], PlanField.PLANES]
        streams, totals = code_streams(jobs, coding, plan.tables.entries, coded.planes, of_planes, coded.classes)
        sizes = measure(jobs, totals, counts.sum(1, dtype=torch.int64), status, self.sections, first_chunk)
        index = torch.empty(sizes.escapes, dtype=torch.uint32, device=device)
        value = torch.empty(sizes.escapes, dtype=torch.int32, device=device)
        flat = counts.flatten().to(torch.int64)
        starts_at = (flat.cumsum(0) - flat).view(counts.shape)
        list_escapes(y, coded, starts_at, index, value, counts.shape[1])
        return write_parts(coding, sizes, streams, index, value, class_words)

    def _choose(
        self,
        chunks: I64,
        predictor: DevicePredictor | None,
        x: torch.Tensor,
        sent: dict[str, torch.Tensor],
        batch: ChunkBatch,
        centers: Centers | None,
        numbers: range,
    ) -> U8:
        """Return the classes of all tokens of all jobs of a part: what the predictor says, or the neutral one.

        Waits for the device if there is a predictor; then it raises what the kernels have found wrong so far.
        """
        finest = self._plan.finest[0].astype(np.uint8)
        out = np.full((len(self.sections), len(x)), NEUTRAL, np.uint8)
        if predictor is not None:
            offsets = predictor.offsets(x, sent["jobs"], batch, sent["positions"], sent["levels"], centers)
            answer = Download(torch.cat([offsets.flatten(), batch.status.float()])).wait()
            raise_status(answer[offsets.numel() :].astype(np.int32), self.sections, numbers)
            out[predictor.sections] = choose_classes(torch.from_numpy(answer[: offsets.numel()]).view(offsets.shape), 0)
        out = np.maximum(out, finest[:, None])
        ends = chunks[:, ChunkField.FIRST] + chunks[:, ChunkField.TOKENS]
        runs = zip(chunks[:, ChunkField.FIRST].tolist(), ends.tolist(), strict=True)
        return np.concatenate([out[:, first:end].ravel() for first, end in runs])

    def _plan_jobs(self, chunks: I64, classes: U8) -> tuple[I64, int, int, dict[str, npt.NDArray[Any]]]:
        """Return the table of jobs, the sizes of planes and of coefficients, and further arrays for the device."""
        plan, count = self._plan, len(self.sections)
        one_tokens = np.repeat(chunks[:, ChunkField.TOKENS], count)
        sections = np.tile(np.arange(count), len(chunks))
        part, index, tokens = self._of_jobs(sections, one_tokens)
        first, _ = running_offsets(one_tokens)
        by_class, order, counts = sort_columns(classes, first, one_tokens)
        words, class_fields = write_classes(classes, first, one_tokens, plan.freq, sections)
        rows = zip(np.tile(counts, (plan.parts, 1)), plan.planes[part, index], plan.bits[part, index], strict=True)
        per_stream = np.array([streams_of_classes(*row) for row in rows], np.int64)
        deepest = plan.rows(index, np.tile((counts > 0).argmax(1), plan.parts), part)
        plans = plan.plans[deepest]
        most = int((plans[:, PlanField.ROWS] * tokens).argmax())
        check_escape_numbers(int(plans[most, PlanField.ROWS]), int(tokens[most]))
        planes_at, plane_bytes = plane_offsets(plans[:, PlanField.PLANES], tokens)
        at, stride, coefficients = coefficient_offsets(plans[: len(sections), PlanField.EXTENT], one_tokens)
        jobs = job_table(
            len(index), tokens=tokens, plan=plan.rows(index, 0, part), deepest=deepest,
            columns=np.tile(first, plan.parts), planes=planes_at, stride=np.tile(stride, plan.parts),
            coefficients=np.tile(at, plan.parts) + part * coefficients,
            **{name: np.tile(values, plan.parts) for name, values in class_fields.items()},
            **stream_fields(tokens, per_stream, plans[:, PlanField.PLANES], plan.most_planes[part, index]),
        )  # fmt: skip
        return jobs, plane_bytes, coefficients, {"classes": by_class, "order": order, "class_words": words}
