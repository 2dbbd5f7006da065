"""Specifications for compiling a kernel without a GPU: argument types, launch constants, budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Access = Literal["load8", "load16", "load32", "store8", "store16", "store32"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits of a compiled kernel's costs; None: no limit.

    Attributes:
        instructions_per_symbol: instructions of each lane per symbol, in the loop that handles most symbols.
        registers: registers per lane.
        spilled_bytes: bytes that a lane stores to local memory when registers run out.
    """

    instructions_per_symbol: float | None = None
    registers: int | None = None
    spilled_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel with the constants of its most common launch.

    Attributes:
        name: the kernel's name in reports.
        kernel: the `@triton.jit` function.
        signature: Triton type of each argument that is not a constexpr, e.g. `"*u8"`, `"i32"`, `"*fp32"`.
        constants: value of each constexpr argument.
        num_warps, num_stages: as in the launch.
        options: further compile options, e.g. `enable_fp_fusion`.
        divisible: arguments (pointers and sizes) that launches guarantee to be multiples of 16.
        symbol_access: the access to global memory that a lane makes exactly once per symbol in the loop over symbols,
            and nowhere else; None: the kernel has no such loop.
        budgets: by target (`"sm_90"`), the limits that must hold.
        changes: by target, the attributes that differ there; for `constants` and `options`, the entries that differ.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] | None = None
    divisible: tuple[str, ...] = ()
    symbol_access: Access | None = None
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def on(self, target: str) -> KernelSpec:
        """Return the spec for a target, with its `changes` applied."""
        changes = self.changes.get(target, {})
        merged = {
            "constants": {**self.constants, **changes.get("constants", {})},
            "options": {**(self.options or {}), **changes.get("options", {})},
        }
        return replace(self, **{**changes, **merged})
