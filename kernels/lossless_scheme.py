"""The lossless scheme on the device: each blob has its own tables, and tells which byte planes it stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import DecodeRequest, EncodeRequest
from cuvee.codec.entropy.tables import SYMBOLS, EntropyTables, raw_bit_tables
from cuvee.codec.format.streams import LOWER_BOUND
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.sections import partition
from cuvee.codec.schemes.coefficients import tokens_per_stream
from cuvee.codec.stages.byte_planes import choose_tables, write_model
from cuvee.codec.stages.compiled import byte_plane_parts
from cuvee.codec.support.arrays import U8
from cuvee.kernels.chunks import CacheMemory, chunk_table, join, of_layers, raise_status, touched
from cuvee.kernels.devices import Download
from cuvee.kernels.incoming import Incoming
from cuvee.kernels.jobs import I64, ChunkField, PlanField, job_table
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, TileTable
from cuvee.kernels.ops.lossless import BytePlaneField
from cuvee.kernels.ops.merge_planes import decoding_tables, merge_planes
from cuvee.kernels.ops.rans import WIDTH, coding_table, rans_decode
from cuvee.kernels.ops.split_planes import count_symbols, split_planes, sum_bytes
from cuvee.kernels.outgoing import code_streams, measure, stream_fields, stream_jobs, write_parts
from cuvee.kernels.plans import Geometry
from cuvee.kernels.upload import ALIGNMENT, send_arrays
from cuvee.kernels.workspace import plane_offsets, running_offsets

STORED = -1  # BytePlaneField.REFERENCE of a plane that is not coded


def _plans(planes: I64) -> I64:
    """Build plans for jobs with this many coded planes of channels each; their tables are consecutive."""
    plans = np.zeros((len(planes), len(PlanField)), np.int64)
    plans[:, PlanField.PLANES] = planes
    plans[:, PlanField.TABLES] = np.cumsum(planes) - planes
    return plans


def _one_class(jobs: int) -> dict[str, npt.ArrayLike]:
    """Return the fields of jobs whose tokens have one class each: its plan has the number of the job."""
    numbers = np.arange(jobs)
    return {"plan": numbers, "deepest": numbers, "columns": 0, "class_state": LOWER_BOUND}


class LosslessKernels:
    """Codes chunks of any model losslessly; `layout` has the dtype of the blobs."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self.sections = partition(layout, "unit")
        self._layout, self._device, self._dtype = layout, device, layout.torch_dtype
        self._geometry = Geometry(layout, self.sections, device)

    def _empty_table(self, jobs: int, sections: range) -> I64:
        """Return a table of `BytePlaneField` for this many jobs, with HEAD_DIM filled in."""
        heads = [
            size
            for layer in self._layout.layers[sections.start : sections.stop]
            for size in (layer.head_dim, layer.value_dim)
        ]
        table = np.zeros((2 * jobs * self._dtype.itemsize, len(BytePlaneField)), np.int64)
        table[:, BytePlaneField.HEAD_DIM] = np.tile(np.repeat(heads, self._dtype.itemsize), jobs // len(sections))
        return table

    def _even(self, table: I64, tokens: npt.NDArray[np.int64]) -> bool:
        return not (np.any(table[:, BytePlaneField.PLANE] % 4) or np.any(tokens % 4))

    # Decoding --------------------------------------------------------------------------------------------------

    def decode_bytes(self, tokens: int) -> int:
        """Return the most scratch memory that decoding a chunk of this many tokens takes, in bytes."""
        return tokens * self._layout.bytes_per_token

    def decode(self, chunks: Sequence[DecodeRequest], cache: PagedCache, layers: range) -> torch.Tensor:
        """Verify the sections of these layers, and start to decode them into the cache.

        Returns the status of their jobs, int32 on the device.
        """
        geometry, sections = self._geometry, touched(self.sections, layers)
        incoming = Incoming(chunks, sections, cache)
        tiles, max_tokens = of_layers(geometry.tiles.tiles, layers, sections), incoming.max_tokens
        jobs, table, planes_size = self._incoming_jobs(incoming, sections, tiles)
        data, sent = incoming.upload.send()
        status = torch.zeros(incoming.count, dtype=torch.int32, device=self._device)
        planes = torch.empty(planes_size, dtype=torch.uint8, device=self._device)
        decoding = torch.empty(len(sent["freq"]), WIDTH, dtype=torch.uint32, device=self._device)
        batch = incoming.chunk_batch(sent, status)
        turns = None
        if np.any(incoming.chunks[:, ChunkField.SOURCE] != incoming.chunks[:, ChunkField.TARGET]):
            moved = batch.chunks, len(incoming.slots), max_tokens
            turns = geometry.turns(*moved, source=True), geometry.turns(*moved)
        decoding_tables(sent["freq"], decoding)
        coding = stream_jobs(jobs, sent["jobs"], sent["plans"], sent["tables"])
        rans_decode(data, coding, decoding, sent["classes"], planes, status)
        merge_planes(
            data, planes, sent["table"], TileTable(sent["tiles"], geometry.tiles.pairs), batch,
            incoming.cache_view(sent, tiles), turns, dtype=self._dtype,
            even=self._even(table, incoming.chunks[:, ChunkField.TOKENS]),
        )  # fmt: skip
        return status

    def _incoming_jobs(self, incoming: Incoming, sections: range, tiles: I64) -> tuple[I64, I64, int]:
        """Read what precedes the coded parts, and complete the upload.

        Returns the jobs, the table of `BytePlaneField`, and the size of all coded planes.
        """
        blocks = np.array([self.sections[index].blocks for index in sections], np.int64)
        channels = blocks.repeat(self._dtype.itemsize, 1)
        plane_fields, counts, fields, freq = incoming.read_layers(channels)
        offsets, size = plane_offsets(counts, incoming.tokens)
        coded, at = plane_fields[:, :, byte_plane_parts.CODED] > 0, plane_fields[:, :, byte_plane_parts.AT]
        first = offsets[:, None] + plane_fields[:, :, byte_plane_parts.ROW] * incoming.tokens[:, None]
        table = self._empty_table(incoming.count, sections)
        table[:, BytePlaneField.REFERENCE] = np.where(coded, at, STORED).ravel()
        table[:, BytePlaneField.PLANE] = np.where(coded, first, at).ravel()
        of_planes = np.tile(channels, (incoming.count // len(sections), 1))[coded]
        fields |= {"tokens": incoming.tokens, "planes": offsets}
        jobs = job_table(incoming.count, **{**fields, **_one_class(incoming.count)})
        incoming.upload.add_arrays(
            {
                "jobs": jobs, "plans": _plans(counts), "freq": freq, "tiles": tiles, "table": table,
                "tables": np.repeat(np.arange(len(freq), dtype=np.int32), of_planes),
                "classes": np.zeros(incoming.max_tokens, np.uint8),
            }
        )  # fmt: skip
        return jobs, table, size

    # Encoding --------------------------------------------------------------------------------------------------

    def encode_bytes(self, tokens: int) -> int:
        """Return the most scratch memory that encoding a chunk of this many tokens takes, in bytes."""
        return 3 * tokens * self._layout.bytes_per_token

    def encode(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        requests: Sequence[EncodeRequest],
        first_chunk: int,
    ) -> list[list[bytes]]:
        """Return the encoded sections of each chunk. Waits for the device three times, first for symbol counts."""
        memory, geometry, device = CacheMemory.of(cache), self._geometry, self._device
        count, joined = len(self.sections), join(slots)
        starts = [request.source.start for request in requests]
        chunks = chunk_table([len(at) for at in slots], starts, starts)
        tokens = np.repeat(chunks[:, ChunkField.TOKENS], count)  # of each job
        table = self._empty_table(len(tokens), range(count))
        width = self._dtype.itemsize
        channels = np.tile([size for s in self.sections for size in s.blocks for _ in range(width)], len(slots))
        table[:, BytePlaneField.REFERENCE] = np.cumsum(channels) - channels
        tiles = geometry.tiles.tiles
        sent = send_arrays({"table": table, "chunks": chunks, "tiles": tiles, **memory.arrays()}, device)
        status = torch.zeros(len(tokens), dtype=torch.int32, device=device)
        source = (
            TileTable(sent["tiles"], geometry.tiles.pairs),
            ChunkBatch(sent["chunks"], status, count, int(tokens.max())),
            memory.view(sent, joined, tiles),
        )
        references, counts, host_references = self._count_symbols(sent["table"], source, channels, first_chunk)
        planned = self._plan_jobs(table, tokens, channels, counts, host_references)
        part = sent | send_arrays(planned.arrays, device)
        out, kept_out = (
            torch.empty(size, dtype=torch.uint8, device=device) for size in (planned.coded, planned.stored)
        )
        split_planes(
            part["table"], *source, references, out, kept_out, dtype=self._dtype, even=self._even(table, tokens)
        )
        download = Download(kept_out)
        coding = stream_jobs(planned.jobs, part["jobs"], part["plans"], part["tables"])
        streams, totals = code_streams(
            planned.jobs, coding, part["entries"], out, planned.planes, part["classes"]
        )  # fmt: skip
        sizes = measure(planned.jobs, totals, torch.zeros_like(totals), status, self.sections, first_chunk)
        index, value = (torch.empty(0, dtype=kind, device=device) for kind in (torch.uint32, torch.int32))
        bodies = write_parts(coding, sizes, streams, index, value, streams.words)
        whole = planned.join(download.wait(), bodies)  # the download has ended, as the bodies came later on its stream
        return [whole[first : first + count] for first in range(0, len(whole), count)]

    def _count_symbols(
        self, table: torch.Tensor, source: tuple[TileTable, ChunkBatch, CacheView], channels: I64, first_chunk: int
    ) -> tuple[torch.Tensor, npt.NDArray[np.int32], U8]:
        """Return the references of all channels on the device, the symbol counts of each plane, and the references.

        Raises:
            CuveeError: the kernels have found something wrong.
        """
        total, device, status = int(channels.sum()), self._device, source[1].status
        sums = torch.zeros(total, dtype=torch.int64, device=device)
        references = torch.empty(total, dtype=torch.uint8, device=device)
        counts = torch.zeros(len(table), SYMBOLS, dtype=torch.int32, device=device)
        sum_bytes(table, *source, sums, dtype=self._dtype)
        count_symbols(table, *source, sums, references, counts, dtype=self._dtype)
        downloaded = Download(torch.cat([counts.flatten(), status, references.int()])).wait()
        of_counts, of_status, of_references = np.split(downloaded, [counts.numel(), counts.numel() + len(status)])
        numbers = range(first_chunk, first_chunk + len(status) // len(self.sections))
        raise_status(of_status, self.sections, numbers)
        return references, of_counts.reshape(counts.shape), of_references.astype(np.uint8)

    def _plan_jobs(
        self, table: I64, tokens: I64, channels: I64, counts: npt.NDArray[np.int32], references: U8
    ) -> _Planned:
        """Choose the planes to code and their tables, and complete the table of `BytePlaneField`."""
        chosen, at = choose_tables(counts, channels), table[:, BytePlaneField.REFERENCE]
        of_job = 2 * self._dtype.itemsize
        models = [
            bytes(1) if model is None else b"\1" + write_model(references[first : first + size], model)
            for model, first, size in zip(chosen, at.tolist(), channels.tolist(), strict=True)
        ]
        heads = [b"".join(models[first : first + of_job]) for first in range(0, len(models), of_job)]
        freq = [model for model in chosen if model is not None]
        coded = np.array([model is not None for model in chosen])
        used = np.repeat(np.arange(len(freq), dtype=np.int32), channels[coded])
        lines = np.where(coded, channels, 0).reshape(-1, of_job)  # of each byte plane, those that are coded
        kept = (channels.reshape(-1, of_job) - lines) * tokens[:, None]  # and the bytes that are stored
        planes, kept_bytes = lines.sum(1), kept.sum(1)
        offsets, plane_bytes = plane_offsets(planes, tokens)
        kept_at, stored = running_offsets(kept_bytes, ALIGNMENT)
        coded_at = offsets[:, None] + (np.cumsum(lines, 1) - lines) * tokens[:, None]
        stored_at = kept_at[:, None] + np.cumsum(kept, 1) - kept
        table[:, BytePlaneField.PLANE] = np.where(coded, coded_at.ravel(), stored_at.ravel())
        table[~coded, BytePlaneField.REFERENCE] = STORED
        tables = EntropyTables(np.stack(freq)) if freq else None
        of_jobs = np.split(used, np.cumsum(planes)[:-1])
        bits = [0.0 if tables is None else float(tables.entropy[job].sum()) for job in of_jobs]
        per_stream = np.array([tokens_per_stream(len(job), each) for job, each in zip(of_jobs, bits, strict=True)])
        fields = {"tokens": tokens, "planes": offsets, **stream_fields(tokens, per_stream, planes, planes)}
        jobs = job_table(len(tokens), **fields, **_one_class(len(tokens)))
        arrays: dict[str, npt.NDArray[Any]] = {
            "plans": _plans(planes), "tables": used, "table": table, "jobs": jobs,
            "entries": coding_table(tables or raw_bit_tables()),  # some table, even where no plane is coded
            "classes": np.zeros(int(tokens.max()), np.uint8),
        }  # fmt: skip
        return _Planned(jobs, arrays, heads, planes, plane_bytes, stored, kept_at, kept_bytes)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What the host decides about a batch to encode.

    Attributes:
        jobs: of the entropy coder.
        arrays: to send, by name.
        heads: of each section, what precedes its planes.
        planes: of each job, the coded planes of a token.
        coded: bytes of all coded planes.
        stored: bytes of all stored planes, with gaps.
        kept_at, kept: where the stored planes of each job begin, and their bytes.
    """

    jobs: I64
    arrays: dict[str, npt.NDArray[Any]]
    heads: list[bytes]
    planes: I64
    coded: int
    stored: int
    kept_at: I64
    kept: I64

    def join(self, stored: npt.NDArray[np.uint8], bodies: Sequence[bytes]) -> list[bytes]:
        """Return the sections, given the stored planes and the coded parts."""
        out = []
        for head, body, planes, first, size in zip(
            self.heads, bodies, self.planes.tolist(), self.kept_at.tolist(), self.kept.tolist(), strict=True
        ):
            padded = [part + bytes(-len(part) % 4) for part in (head, stored[first : first + size].tobytes())]
            out.append(b"".join([*padded, body] if planes else padded))
        return out
