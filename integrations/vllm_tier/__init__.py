"""A secondary tier of vLLM that keeps offloaded chunks compressed: `CuveeTier`. See README.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuvee.integrations.vllm_tier.tier import CuveeTier

__all__ = ["CuveeTier"]


# Imported on first use: the other modules here work without vLLM. Hidden from type checkers: they would accept any
# name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "CuveeTier":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from cuvee.integrations.vllm_tier.tier import CuveeTier
        except ImportError as error:
            raise ImportError(f"CuveeTier needs vLLM 0.32 or newer: {error}") from error
        return CuveeTier
