"""The number of tokens that a selector may recompute: a ratio of the cached tokens, or a cost in token-layers."""

from __future__ import annotations

from cuvee.blend.segments import Prompt
from cuvee.codec.errors import InputError

DEFAULT_RATIO = 0.15


def affordable(ratio: float | None, cost: float | None, prompt: Prompt, spent: int, what: str) -> int:
    """Return how many cached tokens may be recomputed.

    Args:
        ratio: share of the cached tokens; default 0.15. Exclusive with `cost`.
        cost: share of the token-layers, `spent` included.
        prompt: the prompt.
        spent: token-layers of the selection itself.
        what: purpose of `spent`, for the message.

    Raises:
        InputError: `cost` is below `spent`.
    """
    cached = prompt.cached_tokens
    if cost is None:
        return round((DEFAULT_RATIO if ratio is None else ratio) * cached)
    if not cached:
        return 0
    if cost == 1:
        return cached
    left = cost * cached * prompt.layers - spent
    if left < -1e-9:
        raise InputError(
            f"cost: must be at least {spent / cached / prompt.layers:.3f} to pay for {what} on this prompt, got "
            f"{cost:g}; raise it, or give ratio= instead"
        )
    return int(left / prompt.layers + 1e-9)


def check_budget(ratio: float | None, cost: float | None) -> None:
    """Raise InputError unless at most one of `ratio` and `cost` is given, as a share."""
    if ratio is not None and cost is not None:
        raise InputError("ratio: must not be given along with cost, got both")
    check_share("ratio", ratio)
    check_share("cost", cost)


def check_share(name: str, value: object) -> None:
    """Raise InputError unless `value` is None or a number from 0 to 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1):
        raise InputError(f"{name}: must be a number from 0 to 1, got {value!r}")
