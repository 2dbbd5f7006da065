"""Products of small integers: exact, with the CPU's int8 instructions and without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import llvmlite.binding as llvm
import pytest
import torch

from cuvee.codec.support import integer_products
from cuvee.codec.support.integer_products import has_exact_instructions, multiply_integers


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Let each test ask the CPU anew."""
    has_exact_instructions.cache_clear()
    yield
    has_exact_instructions.cache_clear()


def saturated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply as CPUs without int8 instructions do: pairs of products are added in 16 bits."""
    pairs = ((a.int() + 128)[:, :, None] * b.int()).unflatten(1, (-1, 2)).sum(2).clamp(-(1 << 15), (1 << 15) - 1)
    sums: torch.Tensor = pairs.sum(1) - 128 * b.int().sum(0)
    return sums.int()


@pytest.mark.parametrize("instructions", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (31, 64, 33), (33, 577, 1)])
def test_a_product_is_exact(instructions: bool, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if instructions and not has_exact_instructions():
        pytest.skip("this CPU has no int8 instructions, or oneDNN does not use them")
    monkeypatch.setattr(integer_products, "has_exact_instructions", lambda: instructions)
    rows, features, columns = shape
    generator = torch.Generator().manual_seed(rows)
    a = torch.randint(-7, 8, (rows, features), dtype=torch.int8, generator=generator)
    b = torch.randint(-128, 128, (features, 2 * columns), dtype=torch.int8, generator=generator)
    for own in (b[:, :columns], b[:, columns:].contiguous(), torch.full_like(b, 127), torch.full_like(b, -128)):
        for factor in (a, torch.full_like(a, 7), torch.full_like(a, -7)):
            found = multiply_integers(factor, own)
            assert found.shape == (rows, own.shape[1])
            assert torch.equal(found.long(), factor.long() @ own.long())


def test_instructions_that_saturate_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"avx512vnni": True})
    monkeypatch.setattr(torch, "_int_mm", saturated)
    assert not has_exact_instructions()
    a, b = torch.full((2, 64), 7, dtype=torch.int8), torch.full((64, 3), 127, dtype=torch.int8)
    assert not torch.equal(torch._int_mm(a, b).long(), a.long() @ b.long())
    assert torch.equal(multiply_integers(a, b).long(), a.long() @ b.long())


@pytest.mark.parametrize(
    ("features", "expected"),
    [({}, False), ({"avx2": True, "avx512f": True}, False), ({"avx512vnni": True}, True), ({"avxvnni": True}, True)],
)
def test_instructions_are_those_of_the_cpu(
    features: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.long() @ b.long()).int())
    assert has_exact_instructions() is expected


def test_instructions_that_onednn_may_not_use_do_not_count() -> None:
    """Where oneDNN is held back, a product of int8 saturates, whatever the CPU could do."""
    script = (
        "import torch\n"
        "from cuvee.codec.support.integer_products import has_exact_instructions, multiply_integers\n"
        "a, b = torch.full((40, 64), 7, dtype=torch.int8), torch.full((64, 30), 127, dtype=torch.int8)\n"
        "assert torch.equal(multiply_integers(a, b).long(), a.long() @ b.long())\n"
        "print(has_exact_instructions())"
    )
    held_back = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=held_back)
    assert run.stdout.strip() == "False"


def test_few_shapes_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set()

    def recorded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes.add((*a.shape, *b.shape))
        return (a.long() @ b.long()).int()

    monkeypatch.setattr(integer_products, "has_exact_instructions", lambda: True)
    monkeypatch.setattr(torch, "_int_mm", recorded)
    for rows in range(1, 130):
        multiply_integers(torch.ones(rows, 8, dtype=torch.int8), torch.ones(8, 4, dtype=torch.int8))
    assert shapes == {(rows, 8, 8, 4) for rows in (32, 64, 96, 128, 160)}
