"""Proof, before anything is timed, that GPU and CPU agree: equal bytes after the integers, values within rounding."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import torch

from cuvee.codec.codec import Codec
from cuvee.codec.entropy.coding_plan import Quantizer
from cuvee.codec.entropy.token_classes import SectionPlanes
from cuvee.codec.errors import CuveeError
from cuvee.codec.format.coded_part import CodedPart, write_coded
from cuvee.codec.format.container import read_header, read_section
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.stages.reference import rans, symbols
from cuvee.codec.stages.reference.sections import read_part
from cuvee.codec.stages.reference.token_order import coding_order
from cuvee.codec.support.arrays import F32
from cuvee.eval.bench.gpu.cases import GpuScope, Pages, stack, synthetic_chunks, synthetic_profile
from cuvee.eval.bench.shapes import CacheShape

__all__ = ["MOST_DIFFERENCE", "check_difference", "prove_codec", "recode"]

MOST_DIFFERENCE = 2.0**-7  # relative, between two decoders that round operands and results to bfloat16


def prove_codec(shape: CacheShape, group: str, scope: GpuScope, device: torch.device) -> dict[str, Any]:
    """Send two layers through GPU and CPU: bytes must be equal after the integers, and values within rounding.

    Raises:
        CuveeError: they disagree.
    """
    layout = shape.layout(min(shape.layers, 2))
    profile = synthetic_profile(layout, group, device)
    (chunk,) = synthetic_chunks(profile, 1, scope.proof_tokens, torch.device("cpu"), seed=9)
    ours, reference = Codec(profile, step=1.0, backend="triton"), Codec(profile, step=1.0, backend="numba")
    pages = Pages(layout, 2, chunk.tokens, scope.block_tokens, device)
    pages.poison()
    at = pages.slots[1]
    pages.rows[:, at] = stack(chunk).to(device)
    (blob,) = ours.encode(PagedChunks(pages.cache, [at], [chunk.start]))
    theirs = reference.encode(chunk)
    levels = [recode(coded, profile) for coded in (blob, theirs)]
    # The coefficients are float32 sums in another order, so now and then one ends up beyond a threshold.
    distances = [np.abs(a - b) for a, b in zip(*levels, strict=True)]
    moved = float(np.mean(np.concatenate([d.ravel() for d in distances]) > 0))
    if max(int(d.max(initial=0)) for d in distances) > 1 or moved > 0.02:
        raise CuveeError(f"{shape}, group {group}: GPU and CPU quantize {moved:.1%} of the levels differently")
    worst = 0.0
    for coded in (blob, theirs):
        want = stack(reference.decode(coded))
        pages.poison()
        ours.decode_paged([coded], pages.cache, [at], [chunk.start]).check()
        got = pages.rows[:, at].cpu()
        rest = torch.ones(pages.rows.shape[1], dtype=torch.bool)
        rest[at.cpu()] = False
        if not bool(pages.rows[:, rest.to(device)].isnan().all()):
            raise CuveeError(f"{shape}, group {group}: the decoder wrote to slots that are not the chunk's")
        worst = max(worst, check_difference(got, want, f"{shape}, group {group}, GPU and CPU"))
    return {"tokens": chunk.tokens, "levels_moved": moved, "difference": worst}


def check_difference(got: torch.Tensor, want: torch.Tensor, what: str) -> float:
    """The relative difference of two caches `[units, T, C]` in the worst unit.

    Raises:
        CuveeError: rounding does not explain it.
    """
    got, want = got.float(), want.float()
    apart = (got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))
    most = (got - want).abs().amax((1, 2)) / want.abs().amax((1, 2))
    if not bool((apart <= MOST_DIFFERENCE).all() and (most <= 4 * MOST_DIFFERENCE).all()):
        raise CuveeError(f"{what}: values lie {float(apart.max()):.3g} apart (relative)")
    return float(apart.max())


def recode(blob: bytes, profile: Profile) -> list[F32]:
    """The levels `[R, T]` of each section, provided that coding them again on the CPU gives the same bytes.

    Raises:
        CuveeError: it does not.
    """
    header, tables, out = read_header(blob), profile.family.tables, []
    half = np.full(len(profile.family.quantizer.dead_zone), 0.5, np.float32)
    exact = Quantizer(half, half, np.zeros((len(half), 2), np.float32))  # coefficients are levels
    coding = StepCoding(profile.learned_for(header.token_id_bytes > 0), profile.family, header.step_index)
    for index, section in enumerate(coding.sections):
        data, plan = read_section(blob, header, index), copy(section.classed)
        plan.steps = np.ones_like(plan.steps)
        part = read_part(data, plan, header.tokens)
        n, classes = part.tokens_per_stream, rans.decode_classes(part.classes, section.class_table, header.tokens)
        columns = classes[coding_order(classes)]
        planes = rans.rans_decode(part.streams, columns, plan, tables, n)
        y = symbols.from_planes(planes, columns, part.escapes, plan, exact)
        packed, escapes = symbols.to_planes(y.numpy(), columns, plan, exact, tables)
        (streams,) = rans.rans_encode([SectionPlanes(packed, columns, plan, n)], tables)
        again = CodedPart(streams, escapes, n, rans.encode_classes(classes, section.class_table))
        if write_coded(again, int(plan.planes.max())) != data:
            raise CuveeError(f"section {index}: coding its levels again on the CPU gives other bytes")
        out.append(y.numpy())
    return out
