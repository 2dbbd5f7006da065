"""Encode and decode with every launch compiled for a target instead of run: a script for `test_launches.py`.

The interpreter accepts what a compiler refuses: types that do not match, options a target does not have. Here the
arguments of real launches go through Triton's own specialization and compiler, and the plain reference of the same
signature computes what the kernel would have. Prints JSON: what was compiled, by scenario.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

TARGETS = {"sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64), "gfx1100": ("hip", "gfx1100", 32)}


def take_over(target: str) -> list[str]:
    """Make Triton compile for `target` and launch nothing. Return the list that collects compiled kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget(*TARGETS[target])

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    compiled: list[str] = []

    def getitem(self: Any, grid: Any) -> Any:
        def compile_only(*args: Any, **kwargs: Any) -> Any:
            known = sum(len(cache[0]) for cache in self.device_caches.values())
            kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
            if sum(len(cache[0]) for cache in self.device_caches.values()) > known:
                compiled.append(self.fn.__name__)
            return kernel

        return compile_only

    driver.set_active(Driver())
    JITFunction.__getitem__ = getitem
    return compiled


def add_references() -> int:
    """Let every launcher call its reference afterwards. Return the number of launchers."""
    from tests.late_device import launchers

    wrapped: set[str] = set()
    for user, name, reference in launchers(lambda name, reference: reference):
        setattr(user, name, both(getattr(user, name), reference))
        wrapped.add(name)
    return len(wrapped)


def both(launcher: Any, reference: Any) -> Any:
    """Return a function that calls a launcher, then its reference."""

    def call(*args: Any, **kwargs: Any) -> None:
        launcher(*args, **kwargs)
        reference(*args, **kwargs)

    return call


def main(target: str) -> None:
    """Run the scenarios."""
    if TARGETS[target][0] == "hip":
        torch.version.hip = "6.3"  # what a build for AMD says of itself; before any kernel is defined
    compiled = take_over(target)
    from cuvee.kernels import backend

    report: dict[str, Any] = {"launchers": add_references(), "compiled": {}, "right": {}, "again": {}}
    backend.shared = backend.TritonBackend(interpreted=True)

    from tests import conftest
    from tests.kernels.coding import chunk_of, codecs, coded, ids_of

    from cuvee.codec.paged_chunks import PagedChunks

    os.environ.pop("TRITON_INTERPRET", None)
    for name, scheme in (
        ("bfloat16", "layer"),
        ("float16", "head"),
        ("irregular", "layers:2"),
        ("bfloat16", "layer classes"),
        ("float16", "head classes"),
        ("bfloat16", "layer tokens"),
        ("bfloat16", "layer parts"),
        ("bfloat16", "lossless"),
        ("interleaved", "lossless"),
    ):
        layout, (cpu, gpu) = conftest.LAYOUTS[name], codecs(name, scheme)
        first = len(compiled)
        chunks = [chunk_of(name, scheme, tokens, seed, 5) for seed, tokens in enumerate((37, 50, 41))]
        ids = [ids_of(scheme, chunk.tokens) for chunk in chunks]
        blob, *finer = coded(gpu, chunks[0])
        want, got = (codec.decode(blob, 100, refinements=finer) for codec in (cpu, gpu))
        error = max(
            float((a.float() - b.float()).abs().max() / a.float().abs().max())
            for a, b in zip([*want.keys, *want.values], [*got.keys, *got.values], strict=True)
        )
        case = f"{name} {scheme}"
        report["right"][case] = error
        report["compiled"][case] = compiled[first:]
        # Other tokens, another number of chunks: nothing is left to compile.
        before = len(compiled)
        pages = conftest.dense_pages(layout, chunks)
        slots = list(torch.arange(128).split([37, 50, 41]))
        source = PagedChunks(pages, slots, [5, 5, 5], tokens=ids)
        blobs: list[Any] = []
        if gpu.refinements:
            blobs += [gpu.open(base, refinements=finer) for base, *finer in gpu.encode_parts(source)]
        else:
            blobs += gpu.encode(source)
        gpu.decode_paged(blobs, pages, slots, [90, 200, 300]).check()
        report["again"][case] = compiled[before:]
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
