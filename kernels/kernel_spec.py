"""How a kernel is compiled where there is no GPU: its argument types, the constants it is launched with, its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Access = Literal["load8", "load16", "load32", "store8", "store16", "store32"]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a compiled kernel may cost at most; None: no limit.

    Attributes:
        instructions_per_symbol: of the loop that handles most symbols, each lane's instructions for one symbol.
        registers: of a lane.
        spilled_bytes: that a lane stores to local memory for want of registers.
    """

    instructions_per_symbol: float | None = None
    registers: int | None = None
    spilled_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel with the constants of its most common launch.

    Attributes:
        name: shown in reports.
        kernel: the `@triton.jit` function.
        signature: Triton type of each argument that is not a constexpr, e.g. `"*u8"`, `"i32"`, `"*fp32"`.
        constants: value of each constexpr argument.
        num_warps, num_stages: as launched.
        options: further compile options, e.g. `enable_fp_fusion`.
        divisible: arguments (pointers and sizes) that launches guarantee to be multiples of 16.
        symbol_access: of a loop over symbols, the access to global memory that a lane makes exactly once for each
            `symbols_per_access` symbols, and for nothing else; None: not a loop over symbols.
        symbols_per_access: symbols that one such access covers.
        budgets: by target (`"sm_90"`), what must hold.
        changes: by target, which of these attributes are others there; of `constants` and `options`, those that are.
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
    symbols_per_access: int = 1
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def on(self, target: str) -> KernelSpec:
        """The spec as it is for a target."""
        changes = self.changes.get(target, {})
        merged = {
            "constants": {**self.constants, **changes.get("constants", {})},
            "options": {**(self.options or {}), **changes.get("options", {})},
        }
        return replace(self, **{**changes, **merged})
