"""Plain references of `ops/refinements.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

import numpy as np
import torch
from tests.kernels.naive.symbols import host_array
from tests.kernels.naive.symbols_by_class import ClassedPart

from cuvee.codec.entropy.coding_plan import MAX_LEVEL
from cuvee.codec.entropy.nested import CONTEXT_BITS, CONTEXTS, ESCAPED, MOST, base_cell, first_level, refine
from cuvee.codec.stages.reference import refinements as codec
from cuvee.codec.stages.reference import symbols
from cuvee.codec.stages.reference.symbols_by_class import class_runs
from cuvee.kernels.jobs import JobField, PlanField, Status
from cuvee.kernels.ops.arguments import DevicePlans


def quantize_refinements_reference(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    row_maps: torch.Tensor,
    zones: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor,
    parts: int,
    max_extent: int,
    max_tokens: int,
) -> None:
    """See `quantize_refinements`."""
    count = len(jobs) // parts
    for index in range(count):
        own = [ClassedPart(jobs, plans, classes, index + count * part) for part in range(parts)]
        targets = [part.planes(planes) for part in own]
        for at, k in class_runs(own[0].columns):
            source = host_array(own[0].coefficients(y)[:, at])
            base = own[0].of(k)
            shape, rows = source.shape, base.y_rows.numpy()
            magnitude = np.abs(source) * np.float32(plans.inverses[base.plan_index])
            if not magnitude[own[-1].of(k).y_rows.numpy()].max(initial=0) < MAX_LEVEL:
                status[index] |= int(Status.TOO_LARGE)
                continue
            level, low, high = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
            level[rows] = np.abs(symbols.quantize(source[rows], base.coding_step, base.plan(), base.quantizer))
            low[rows], high[rows] = base_cell(level[rows], base.quantizer.dead_zone[:, None])
            known = np.isin(np.arange(len(source)), rows)
            for number in range(1, parts):
                unit, finer = np.float32(2.0**-number), own[number].of(k)
                rows = finer.y_rows.numpy()
                first = int(plans.plans[finer.plan_index, PlanField.ROW])
                zone = host_array(zones[first : first + len(rows)])[:, None]
                coarse = level[rows]
                cells = (low[rows], high[rows])
                fine, (own_low, own_high) = refine(coarse, magnitude[rows], cells, zone * unit)
                new = ~known[rows]
                fine[new] = first_level(magnitude[rows][new] / unit, zone[new])
                own_low[new], own_high[new] = (edge * unit for edge in base_cell(fine[new], zone[new]))
                symbol = np.where(coarse == 0, np.where(source[rows] < 0, -fine, fine), fine - 2 * coarse)
                escaped = np.abs(symbol) > MOST
                counts[index + count * number, : len(rows)] += torch.from_numpy(escaped.sum(1)).to(counts)
                symbol[escaped] = ESCAPED
                byte = np.minimum(coarse, CONTEXTS - 1) << CONTEXT_BITS | symbol & ((1 << CONTEXT_BITS) - 1)
                targets[number][: len(rows), at] = torch.from_numpy(byte.astype(np.uint8)).to(planes.device)
                level[rows], low[rows], high[rows], known[rows] = fine, own_low, own_high, True


def place_levels_reference(
    data: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    row_maps: torch.Tensor,
    classes: torch.Tensor,
    levels: torch.Tensor,
    status: torch.Tensor,
    found: torch.Tensor,
    apart: int,
    part: int,
    max_rows: int,
    max_tokens: int,
) -> None:
    """See `place_levels`."""
    words, maps, table = host_array(data).view(np.uint32), host_array(row_maps), host_array(plans.plans)
    ints = host_array(plans.row_ints)
    for index in range(len(jobs)):
        own = ClassedPart(jobs, plans, classes, index)
        count, listed = own.job[JobField.ESCAPE_COUNT], words[own.job[JobField.ESCAPES] :]
        right = int(found[index]) == count
        target, before = own.coefficients(levels), -1
        for cell, value in zip(listed[:count].tolist(), listed[count : 2 * count].view(np.int32).tolist(), strict=True):
            row, column = divmod(cell, own.tokens)
            rising, before = cell > before, cell
            k = int(own.columns[column]) if row < table[own.job[JobField.PLAN], PlanField.ROWS] else 0
            plan, coarser = table[own.job[JobField.CLASS_PLAN] + k], table[own.job[JobField.CLASS_PLAN] + k - apart]
            good = rising and row < plan[PlanField.ROWS] and abs(value) <= MAX_LEVEL << part
            if good:
                y_row = int(ints[plan[PlanField.ROW] + row, 2])
                good = maps[coarser[PlanField.ROW_MAP] + y_row] < 0 and int(target[y_row, column]) == ESCAPED
            if good:
                target[y_row, column] = value
            right &= bool(good)
        if not right:
            status[index] |= int(Status.ESCAPES)


def reconstruct_reference(
    levels: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    row_maps: torch.Tensor,
    classes: torch.Tensor,
    y: torch.Tensor,
    max_rows: int,
    max_tokens: int,
    depth: int,
) -> None:
    """See `reconstruct`."""
    for index in range(len(jobs)):
        part = ClassedPart(jobs, plans, classes, index)
        source, target = part.coefficients(levels), part.coefficients(y)
        for start in range(0, part.tokens, depth):
            target[: part.extent(int(part.columns[start])), start : start + depth] = 0
        for at, k in class_runs(part.columns):
            own = part.of(k)
            back = codec.reconstruct(host_array(source[own.y_rows, at]), own.floats, own.step)
            target[own.y_rows, at] = torch.from_numpy(back).to(y)
