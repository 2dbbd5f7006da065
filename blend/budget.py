"""The number of tokens that a selector may recompute: a ratio of the cached tokens, or a cost in token-layers."""

from __future__ import annotations

from cuvee.blend.segments import Prompt
from cuvee.codec.errors import InputError

DEFAULT_RATIO = 0.15


def affordable(ratio: float | None, cost: float | None, prompt: Prompt, spent: int) -> int:
    """Return how many cached tokens may be recomputed.

    Args:
        ratio: share of the cached tokens; default 0.15. Exclusive with `cost`.
        cost: share of the token-layers, `spent` included.
        prompt: the prompt.
        spent: token-layers of the selection itself: of the query's pass.

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
            f"cost: must be at least {spent / cached / prompt.layers:.3f} to pay for the pass of the query on this "
            f"prompt, got {cost:g}; raise it, or give ratio= instead"
        )
    return int(left / prompt.layers + 1e-9)


def check_budget(ratio: float | None, cost: float | None) -> None:
    """Raise InputError unless at most one of `ratio` and `cost` is given, as a share."""
    if ratio is not None and cost is not None:
        raise InputError("ratio: must not be given along with cost, got both")
    for name, value in (("ratio", ratio), ("cost", cost)):
        given: object = value
        if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1):
            raise InputError(f"{name}: must be a number from 0 to 1, got {given!r}")
