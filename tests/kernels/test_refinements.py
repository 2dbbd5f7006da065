"""Bases and refinements on the device: whole chunks both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.classed import with_classes
from tests.kernels.naive.rans import rans_encode_reference
from tests.kernels.naive.symbols import list_escapes_reference, quantize_reference
from tests.kernels.test_classes import BACK, assert_close, on

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError
from cuvee.codec.layout import KVLayout
from cuvee.kernels import class_streams, outgoing, transform_scheme


def codecs(profile: Any) -> tuple[Codec, Codec]:
    return Codec(profile, step=1.0, refinements=1), Codec(profile, step=1.0, refinements=1, backend="triton")


CASES = [("bfloat16", "layer", True), ("irregular", "unit", False), ("mqa", "head", True)]


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize(("name", "group", "classes"), CASES)
def test_both_backends_read_what_the_other_wrote(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any, name: str, group: str,
    classes: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    profile = with_classes(fitted(name, group)) if classes else fitted(name, group)
    cpu, triton = codecs(profile)
    chunk = make_chunk(layouts[name], 9, start=2)
    chunk.values[0][4, 0, :2] += 300.0  # a value or two that escape
    theirs, mine = cpu.encode_parts(chunk), triton.encode_parts(on(device, chunk))
    for ours, wanted in zip(mine, theirs, strict=True):
        assert abs(len(ours) - len(wanted)) <= 0.02 * len(wanted)
    for base, refinement in (theirs, mine):
        want = cpu.decode(base, 500, refinements=[refinement])
        assert_close(triton.decode(base, 500, refinements=[refinement], device=device), want, BACK[layouts[name].dtype])
        coarse = cpu.decode(base, 500)
        assert_close(triton.decode(base, 500, device=device), coarse, BACK[layouts[name].dtype])
    # Outliers apart, a refinement quarters the step.
    errors = []
    for more in ((), (mine[1],)):
        got = cpu.decode(mine[0], 2, refinements=more)
        errors.append(
            sum(float((a.float() - b.float()).square().sum()) for a, b in zip(got.keys, chunk.keys, strict=True))
        )
    assert errors[1] < 0.5 * errors[0]
    # Behind the transform, all is the same bytes as from the references.
    monkeypatch.setattr(transform_scheme, "quantize", quantize_reference)
    monkeypatch.setattr(transform_scheme, "list_escapes", list_escapes_reference)
    monkeypatch.setattr(outgoing, "rans_encode", rans_encode_reference)
    assert triton.encode_parts(on(device, chunk)) == mine


@pytest.mark.usefixtures("plain_coder")
def test_a_refinement_of_other_classes(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classes of a refinement are those of its base: whoever wrote another one made no refinement of it."""
    _, triton = codecs(with_classes(fitted("gqa", "layer")))
    chunk = on(device, make_chunk(layouts["gqa"], 9))
    base, refinement = triton.encode_parts(chunk)
    read = class_streams.read_classes

    def other(*arguments: Any) -> Any:
        classes = read(*arguments)
        last = np.flatnonzero(classes[len(classes) // 2 :])[-1] + len(classes) // 2
        classes[last] -= 1
        return classes

    monkeypatch.setattr("cuvee.kernels.transform_scheme.read_classes", other)
    with pytest.raises(CorruptError, match=r"refinement of blob 0: must have the token classes of its base"):
        triton.decode(base, refinements=[refinement], device=device)
