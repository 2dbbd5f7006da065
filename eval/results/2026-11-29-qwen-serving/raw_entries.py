"""The serving benchmark with a connector that has no codec: entries hold the bytes of the pages.

python raw_entries.py traffic -m MODEL --text TEXT --arm lossless
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

SERVED = "cuvee.eval.bench.engine_served"
WHOLE = SimpleNamespace(header=SimpleNamespace(lossless=True), refinements=())


def encode(self: Any, cache: Any, chunks: Sequence[Any]) -> list[tuple[bytes]]:
    """Return what `ChunkIO.encode` does: the parts of each chunk."""
    parts = []
    for chunk in chunks:
        read = cache.reader(chunk.slots)
        units = [unit.contiguous() for layer in range(cache.layout.num_layers) for unit in read(layer)]
        parts.append((b"".join(unit.view(torch.uint8).numpy().tobytes() for unit in units),))
    return parts


def restore(self: Any, cache: Any, entries: Sequence[Any], slots: Sequence[Any], *_: Any) -> tuple[list[Any], None]:
    """Write entries to their slots, as `ChunkIO.restore` does."""
    for entry, (at,) in zip(entries, slots, strict=True):
        write, begin = cache.writer(at), 0
        for index, layer in enumerate(cache.layout.layers):
            units = []
            for dim in (layer.head_dim, layer.value_dim):
                count = len(at) * layer.kv_heads * dim
                unit = torch.frombuffer(entry.parts[0], dtype=cache.dtype, count=count, offset=begin)
                units.append(unit.view(len(at), layer.kv_heads, dim))
                begin += unit.nbytes
            write(index, *units)
        if begin != len(entry.parts[0]):
            raise ValueError(f"entry: must have {begin} bytes, got {len(entry.parts[0])}")
    return [WHOLE] * len(entries), None


def serve() -> None:
    """Be the engine of a benchmark."""
    from cuvee.codec.profiles.setting import Settings
    from cuvee.integrations.core.chunk_io import ChunkIO
    from cuvee.integrations.vllm.worker import saves

    for where, name, new in (
        (ChunkIO, "encode", encode),
        (ChunkIO, "restore", restore),
        (saves, "read_header", lambda _: None),
        (Settings, "misfits", lambda *_: False),
    ):
        patch.object(where, name, new).start()
    runpy.run_module(SERVED, run_name="__main__")


def measure() -> None:
    """Run the benchmark with this file as its engine."""

    def start(_: object, **given: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, __file__, "engine"], **given)

    patch("cuvee.eval.bench.engine_process.subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)).start()
    runpy.run_module("cuvee.eval.bench.serving", run_name="__main__")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["engine"] else measure()
