"""The phases of a load, for the scheduler and on a rank, and which phase may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class RequestPhase(Enum):
    """What the scheduler's side does for a request."""

    EARLY = "early"  # it arrived before the weights had a name
    NAMING = "naming"  # a thread names its images and its adapter
    ASKING = "asking"  # the store is asked, and the engine may ask
    PROMISED = "promised"  # the engine was told of tokens to load
    LOADING = "loading"  # ranks restore them
    PLACED = "placed"  # all ranks have placed the segments of its blend, and compute the rest
    ENDING = "ending"  # ranks still load, and nothing is loaded after that
    OVER = "over"  # nothing is loaded for it any more


class LoadPhase(Enum):
    """What a rank does for a load."""

    RESTORING = "restoring"  # a thread fetches and decodes its entries, or will
    PLACED = "placed"  # everything is decoded; its blend waits for the other ranks
    BLENDING = "blending"  # its blend is computed, slice by slice
    OVER = "over"  # its outcome is booked


UNDER_WAY = (RequestPhase.LOADING, RequestPhase.PLACED, RequestPhase.ENDING)  # a tuple: to hash them takes longer
"""Phases in which ranks have a load."""

NEXT: Mapping[Enum, set[Enum]] = {
    RequestPhase.EARLY: {RequestPhase.NAMING, RequestPhase.OVER},
    RequestPhase.NAMING: {RequestPhase.ASKING, RequestPhase.OVER},
    RequestPhase.ASKING: {RequestPhase.PROMISED, RequestPhase.OVER},
    # Asking again: it asks anew or takes none, or there was a reset; from later phases, all ranks have ended the load.
    RequestPhase.PROMISED: {RequestPhase.ASKING, RequestPhase.LOADING, RequestPhase.OVER},
    RequestPhase.LOADING: {RequestPhase.ASKING, RequestPhase.PLACED, RequestPhase.ENDING},
    # Ending: a rank has failed or left tokens out for a deadline, or the request has ended.
    RequestPhase.PLACED: {RequestPhase.ASKING, RequestPhase.ENDING},
    RequestPhase.ENDING: {RequestPhase.OVER},
    RequestPhase.OVER: set(),
    LoadPhase.RESTORING: {LoadPhase.PLACED, LoadPhase.OVER},
    LoadPhase.PLACED: {LoadPhase.BLENDING, LoadPhase.OVER},
    LoadPhase.BLENDING: {LoadPhase.OVER},
    LoadPhase.OVER: set(),
}
"""The phases that may follow each phase."""

P = TypeVar("P", bound=Enum)


def following(before: P, after: P) -> P:
    """Return the phase `after`.

    Raises:
        RuntimeError: it does not follow `before`.
    """
    if after not in NEXT[before]:
        raise RuntimeError(f"phase: {after.value} cannot follow {before.value}")
    return after
