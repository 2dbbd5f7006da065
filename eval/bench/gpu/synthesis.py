"""The inverse transform in every configuration of its kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from cuvee.eval.bench.gpu.cases import GpuCase, GpuScope, Pages
from cuvee.eval.bench.gpu.ceilings import synthesis_flop
from cuvee.eval.bench.gpu.clock import Clock, turns
from cuvee.eval.bench.gpu.proofs import check_difference
from cuvee.kernels.chunks import CacheMemory, encoding_tables, join
from cuvee.kernels.jobs import TileField
from cuvee.kernels.ops.arguments import ChunkBatch, TileTable
from cuvee.kernels.ops.synthesize import SYNTHESIS_CONFIGS, SynthesisConfig, synthesis_config, synthesize
from cuvee.kernels.plans import TransformPlan
from cuvee.kernels.workspace import place_jobs

__all__ = ["Synthesis", "measure_synthesis"]


class Synthesis:
    """Inverse transforms of random coefficients, the same for all chunks, into the first regions of a paged cache.

    Args:
        case: for its profile.
        pages: where the values go.
        tokens: in a chunk.
        count: chunks per launch.
        sets: how many launches write to regions of their own.
    """

    def __init__(self, case: GpuCase, pages: Pages, tokens: int, count: int, sets: int) -> None:
        device, sections = pages.rows.device, len(case.profile.sections)
        plan, memory = TransformPlan(case.profile, 0, device, torch.bfloat16), CacheMemory.of(pages.cache)
        self.regions = [pages.slots[index * count : (index + 1) * count] for index in range(sets)]
        table, jobs = encoding_tables(self.regions[0], [0] * count, sections)
        _, size = place_jobs(jobs, plan.arrays.plans)
        y = torch.randn(size // count, generator=torch.Generator(device).manual_seed(0), device=device)
        job_table = torch.from_numpy(jobs).to(device)
        places = {name: torch.from_numpy(array).to(device) for name, array in memory.named().items()}
        self._parts = [
            (part, memory.view(places, join(own), plan.maps.tiles))
            for part, own in zip(y.to(plan.product).repeat(sets, count), self.regions, strict=True)
        ]
        status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
        self._batch = ChunkBatch(torch.from_numpy(table).to(device), status, sections, 0, tokens)
        self._rotations = plan.geometry.rotations(self._batch.chunks, count * tokens, tokens)
        tiles = TileTable(plan.maps.device_tiles, plan.geometry.tiles.pairs)
        self._maps = (job_table, tiles, plan.maps.inverse, plan.means)
        self.chosen = synthesis_config(
            plan.product, memory.element, int(plan.maps.tiles[:, TileField.RANK].max()), tokens,
            self._parts[0][1].aligned,
        )  # fmt: skip

    def reference(self) -> None:
        """Write the first region as decoding does, which `proofs` compares with the CPU."""
        y, cache = self._parts[0]
        first = replace(self._batch, chunks=self._batch.chunks[:1])
        synthesize(y, *self._maps, first, self._rotations, cache, config=self.chosen)

    def calls(self, config: SynthesisConfig) -> list[Callable[[], None]]:
        """The launches that take turns, with this configuration."""
        return [
            partial(synthesize, y, *self._maps, self._batch, self._rotations, cache, config=config)
            for y, cache in self._parts
        ]


def measure_synthesis(
    clock: Clock, case: GpuCase, scope: GpuScope, pages: Pages, l2: int, late: Callable[[], bool]
) -> list[dict[str, Any]]:
    """Time the inverse transform in every configuration, until `late` says that time is up.

    Raises:
        CuveeError: a configuration does not give what the one that decoding chooses gives.
    """
    each = case.chunks[0].nbytes
    out: list[dict[str, Any]] = []
    for count in scope.synthesis_chunks:
        sets = turns(count * each, l2, len(pages.slots) // count)
        synthesis = Synthesis(case, pages, scope.tokens, count, sets)
        synthesis.reference()
        expected = pages.rows[:, pages.slots[0]].clone()
        for config in SYNTHESIS_CONFIGS:
            if late():
                return out
            entry = {
                "shape": case.shape, "group": case.group, "chunks": count, "config": asdict(config),
                "chosen": config == synthesis.chosen,
            }  # fmt: skip
            calls = synthesis.calls(config)
            pages.poison()
            try:
                calls[0]()
            except (OutOfResources, PTXASError) as error:
                out.append({**entry, "error": str(error)})
                continue
            timing = clock.inside(calls)
            for call in calls:  # a few runs may not have reached all of them
                call()
            for at in (at for part in synthesis.regions for at in part):
                check_difference(pages.rows[:, at], expected, f"{case.shape}, group {case.group}, {config}")
            flop = synthesis_flop(case.profile, scope.tokens) * count
            out.append(
                {
                    **entry,
                    "seconds": timing.to_dict(),
                    "tflop_per_s": timing.per_second(flop / 1e12)["median"],
                    "gb_per_s": timing.per_second(count * each / 1e9)["median"],
                }
            )
    return out
