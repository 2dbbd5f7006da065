"""The selectors in a report on blending and what to call them, the kinds of chunks, and the costs to compare at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuvee.blend import HKVD, Boundary, Nothing, Overlap, Product, QueryGuided, Random, default_selector

__all__ = [
    "ALONE",
    "AVERAGED",
    "BEHIND",
    "COMPARED",
    "CORRECTED",
    "DEFAULT",
    "EXACT",
    "KINDS_OF_CHUNKS",
    "NOTHING",
    "ON_ALONE",
    "ON_DECODED",
    "ON_OTHERS",
    "SELECTORS",
    "UNCORRECTED",
]

EXACT = "exact"  # chunks as they were computed. The others go by the quality they were coded at.
ALONE, AVERAGED = "alone", "averaged"  # computed with nothing before them, or averaged over several contexts
BEHIND = "behind"  # cut out of a prompt where chunks of other prompts stood before them
NOTHING, DEFAULT = "nothing", "default"
KINDS_OF_CHUNKS = {ALONE: "each computed alone", AVERAGED: "averaged over contexts", BEHIND: "cut out of other prompts"}
UNCORRECTED = "default-uncorrected"
COMPARED = (0.15, 0.3, 0.45)  # costs at which selectors are compared


SELECTORS: dict[str, tuple[str, Callable[[float, int], Any]]] = {
    NOTHING: ("nothing recomputed", lambda cost, seed: Nothing()),
    "random": ("random", lambda cost, seed: Random(cost=cost, seed=seed)),
    "boundary": ("boundary", lambda cost, seed: Boundary(cost=cost)),
    "hkvd": ("HKVD", lambda cost, seed: HKVD(cost=cost)),
    "hkvd-gradual": ("HKVD, gradual", lambda cost, seed: HKVD(cost=cost, shrink=(1.5, 1.2))),
    "query": ("query-guided", lambda cost, seed: QueryGuided(cost=cost)),
    "overlap": ("overlap", lambda cost, seed: Overlap(cost=cost)),
    "overlap*boundary": ("overlap x boundary", lambda cost, seed: Product(Overlap(), Boundary(), cost=cost)),
    "hkvd*boundary": ("HKVD x boundary", lambda cost, seed: HKVD(cost=cost, weight=Boundary())),
    UNCORRECTED: ("query x boundary, not corrected", lambda cost, seed: default_selector(cost=cost)),
    DEFAULT: ("query x boundary", lambda cost, seed: default_selector(cost=cost)),
}
"""Key -> (label, how to make the selector for a cost and a seed)."""

CORRECTED = (DEFAULT,)
"""Selectors whose blends correct the other tokens (`cuvee.blend.correction`). Published ones do not."""

ON_ALONE = tuple(SELECTORS)
ON_OTHERS = (NOTHING, "boundary", "hkvd", "query", "overlap*boundary", UNCORRECTED, DEFAULT)
ON_DECODED = (NOTHING, "boundary", DEFAULT)
