"""The entropy decoder alone, with tables of several resolutions."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from cuvee.codec.entropy.coefficients import tokens_per_stream
from cuvee.codec.entropy.family import coding_plan, default_family, scale_codes
from cuvee.codec.entropy.tables import EntropyTables, normalize_counts
from cuvee.codec.errors import CuveeError
from cuvee.codec.stages.compiled import rans
from cuvee.eval.bench.gpu.cases import GpuScope, spectrum
from cuvee.eval.bench.gpu.clock import Clock
from cuvee.kernels.jobs import JobField, PlanField
from cuvee.kernels.ops.arguments import DecodingTables, StreamJobs
from cuvee.kernels.ops.rans import decoding_table, rans_decode

__all__ = ["measure_rans"]


def measure_rans(clock: Clock, scope: GpuScope) -> list[dict[str, Any]]:
    """Time the entropy decoder on symbols of the first shape, group `layer`, coded with tables of several resolutions.

    Raises:
        CuveeError: it does not give back what was coded.
    """
    layout = next(iter(scope.shapes.values())).layout()
    family = default_family()
    plan = coding_plan(scale_codes(spectrum(layout.values_per_token // layout.num_layers), 0))
    slot = np.random.default_rng(0).integers(0, 1 << family.tables.prob_bits, (plan.planes, scope.tokens))
    data = (family.tables.slots[plan.tables[:, None], slot] >> 24).astype(np.uint8)
    per_stream = tokens_per_stream(plan.planes, float(family.tables.entropy[plan.tables].sum()))
    count = scope.rans_jobs
    plans = np.zeros((1, len(PlanField)), np.int64)
    plans[0, [PlanField.PLANES, PlanField.ROWS]] = plan.planes, len(plan.shift)
    which = torch.from_numpy(plan.tables.astype(np.int32)).to(clock.device)
    want = torch.from_numpy(data).flatten().to(clock.device)
    out: list[dict[str, Any]] = []
    for bits in scope.prob_bits:
        tables = EntropyTables(np.stack([normalize_counts(row, bits) for row in family.tables.freq]), bits)
        streams = rans.rans_encode(data, plan.tables, tables, per_stream)
        parts = (streams.states, streams.lengths.astype(np.uint16), streams.words)
        raw = np.concatenate([part.view(np.uint8) for part in parts])
        size = -(-len(raw) // 16) * 16
        at = size * np.arange(count)
        jobs = np.zeros((count, len(JobField)), np.int64)
        jobs[:, JobField.STATES] = at // 4
        jobs[:, JobField.LENGTHS] = (at + streams.states.nbytes) // 2
        jobs[:, JobField.WORDS] = jobs[:, JobField.LENGTHS] + len(streams.lengths)
        jobs[:, JobField.WORD_COUNT] = len(streams.words)
        jobs[:, JobField.STREAMS] = len(streams.states)
        jobs[:, JobField.TOKENS] = scope.tokens
        jobs[:, JobField.PER_STREAM] = per_stream
        jobs[:, JobField.PLANES] = data.size * np.arange(count)
        jobs[:, JobField.STRIDE] = scope.tokens
        source = np.tile(np.pad(raw, (0, size - len(raw))), count)
        coded, job_table, plan_table, decoding = (
            torch.from_numpy(array).to(clock.device) for array in (source, jobs, plans, decoding_table(tables))
        )
        planes = torch.full((count * data.size,), 0xAB, dtype=torch.uint8, device=clock.device)
        status = torch.zeros(count, dtype=torch.int32, device=clock.device)
        coding = StreamJobs(job_table, plan_table, which, len(streams.states))
        decode = partial(rans_decode, coded, coding, DecodingTables(decoding, bits), planes, status)
        decode()
        if bool(status.any()) or not bool((planes.view(count, -1) == want).all()):
            raise CuveeError(f"the rANS decoder does not reproduce the symbols coded with {bits} bits")
        timing = clock.inside([decode])
        size = 8 * (streams.states.nbytes + 2 * len(streams.lengths) + streams.words.nbytes)
        out.append(
            {
                "prob_bits": bits,
                "table_bytes": 4 * decoding.shape[1],
                "tables": len(np.unique(plan.tables)),
                "symbols": count * data.size,
                "streams": count * len(streams.states),
                "bits_per_symbol": size / data.size,
                "seconds": timing.to_dict(),
                "gsymbols_per_s": timing.per_second(count * data.size / 1e9),
            }
        )
    return out
