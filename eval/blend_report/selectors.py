"""The selectors in a report on blending and what to call them, the kinds of chunks, and the costs to compare at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cuvee.blend import HKVD, Boundary, Nothing, Overlap, Product, Prompt, QueryGuided, Random, default_selector

__all__ = [
    "ALONE",
    "AVERAGED",
    "BEHIND",
    "COMPARED",
    "DEFAULT",
    "EXACT",
    "FORMER",
    "KINDS_OF_CHUNKS",
    "NOTHING",
    "ON_ALONE",
    "ON_DECODED",
    "ON_OTHERS",
    "SELECTORS",
]

EXACT = "exact"  # chunks as they were computed. The others go by the quality they were coded at.
ALONE, AVERAGED = "alone", "averaged"  # computed with nothing before them, or averaged over several contexts
BEHIND = "behind"  # cut out of a prompt where chunks of other prompts stood before them
NOTHING, DEFAULT = "nothing", "default"
KINDS_OF_CHUNKS = {ALONE: "each computed alone", AVERAGED: "averaged over contexts", BEHIND: "cut out of other prompts"}
FORMER = "(overlap+query)*boundary"
COMPARED = (0.15, 0.3, 0.45)  # costs at which selectors are compared


@dataclass(frozen=True, slots=True)
class _NamedOrAttended:
    """Half of what the default of cuvee 0.2.0 was, which was chosen on the bundled model; the other is `Boundary`.

    Attributes:
        most: share of the token-layers that the pass of the query may take.
    """

    most: float

    def score(self, prompt: Prompt) -> torch.Tensor:
        return Overlap().score(prompt) + self._query(prompt).score(prompt) + 0.6

    def overhead(self, prompt: Prompt) -> int:
        return self._query(prompt).overhead(prompt)

    def _query(self, prompt: Prompt) -> QueryGuided:
        return QueryGuided(queries=16, layers=(2 * prompt.layers // 3,), most=self.most)


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
    FORMER: (
        "(overlap + query) x boundary",
        lambda cost, seed: Product(_NamedOrAttended(0.1 * cost), Boundary(), cost=cost),
    ),
    DEFAULT: ("query x boundary", lambda cost, seed: default_selector(cost=cost)),
}
"""Key -> (label, how to make the selector for a cost and a seed)."""

ON_ALONE = tuple(SELECTORS)
ON_OTHERS = (NOTHING, "boundary", "hkvd", "query", "overlap*boundary", FORMER, DEFAULT)
ON_DECODED = (NOTHING, "boundary", DEFAULT)
