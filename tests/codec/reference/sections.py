"""Coded sections to coefficients, the reference: one whole section after the other, in plain NumPy.

    bytes --read_coded--> classes, streams --rANS--> planes --from_planes--> y [blocks, pad, t]

The columns of y are the tokens in coding order (`token_order.py`). Its rows are padded, so that all blocks have one
shape and one product serves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tests.codec.reference.coded_part import Reader, read_coded
from tests.codec.reference.rans import decode_classes, rans_decode
from tests.codec.reference.symbols import from_planes
from tests.codec.reference.token_order import coding_order

from cuvee.codec.entropy.token_classes import CLASSES, ClassedPlan
from cuvee.codec.format import rules
from cuvee.codec.format.coded_part import CodedPart
from cuvee.codec.format.rules import rule_error
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.stages.columns import Coefficients, class_runs, padded
from cuvee.codec.support.arrays import I64, U8


def read_part(data: memoryview, plan: ClassedPlan, tokens: int) -> CodedPart:
    """Read a section: all of `data`.

    Raises:
        FormatError: the bytes break a rule.
    """
    return read_coded(Reader(data), int(plan.planes.max()), int(plan.rows.max()), tokens)


def check_classes(classes: U8, plan: ClassedPlan) -> None:
    """Raise FormatError if a token has a class that the plan does not serve."""
    if classes.min(initial=CLASSES) < plan.finest or classes.max(initial=0) >= CLASSES:
        raise rule_error(rules.CLASS_RANGE, plan.finest)


@dataclass(frozen=True, slots=True)
class SectionIndex:
    """A section that was decoded.

    Attributes:
        class_ranks: `SectionCoding.class_ranks`.
        order: `[T]`, the token of each column.
        columns: `[T]` uint8, the class of each column.
        y: `[R, T]` float32, zero below a column's last component.
    """

    class_ranks: tuple[tuple[int, ...], ...]
    order: I64
    columns: U8
    y: torch.Tensor


def index_sections(coding: StepCoding, parts: Sequence[tuple[int, memoryview]], tokens: int) -> list[SectionIndex]:
    """See `cuvee.codec.stages.compiled.sections.index_sections`."""
    tables, quantizer = coding.family.tables, coding.family.quantizer
    indexed = []
    for number, data in parts:
        section = coding.sections[number]
        plan = section.classed
        part = read_part(data, plan, tokens)
        classes = decode_classes(part.classes, section.class_table, tokens)
        check_classes(classes, plan)
        order = coding_order(classes)
        columns = classes[order]
        planes = rans_decode(part.streams, columns, plan, tables, part.tokens_per_stream)
        y = from_planes(planes, columns, part.escapes, plan, quantizer)
        indexed.append(SectionIndex(section.class_ranks, order, columns, y))
    return indexed


def decode_sections(index: Sequence[SectionIndex], at: slice, dtype: torch.dtype) -> list[Coefficients]:
    """See `cuvee.codec.stages.compiled.sections.decode_sections`."""
    out = []
    for own in index:
        columns, ranks = own.columns[at], own.class_ranks
        runs = list(class_runs(columns))
        pad = padded(max(max(ranks[k], default=0) for _, k in runs))
        blocks = torch.zeros(len(ranks[0]), pad, len(columns), dtype=dtype)
        for run, k in runs:
            row = 0
            for block, rank in enumerate(ranks[k]):
                blocks[block, :rank, run] = own.y[row : row + rank, at][:, run].to(dtype)
                row += rank
        out.append(Coefficients(own.order[at] - at.start, columns, blocks))
    return out
