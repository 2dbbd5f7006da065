"""What is to be loaded: the chunks of a prompt, the parts that a store has of each, and what is asked of the load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from cuvee.codec.errors import InputError
from cuvee.integrations.loading.costs import check_number


class Compute(Enum):
    """When to compute tokens whose cache could be loaded.

    Attributes:
        NEEDED: if the deadline or the floor demands it, so that the engine keeps its time for other requests.
        EXACT: also if it fits into the deadline and the prompt is more exact for it.
    """

    NEEDED = "needed"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Part:
    """A base or a refinement in a store.

    Attributes:
        nbytes: its size.
        kl: nats per token to expect of a chunk that is decoded from the parts up to this one.
        tier: name of the tier that has it.
    """

    nbytes: int
    kl: float
    tier: str


@dataclass(frozen=True, slots=True)
class ChunkParts:
    """A chunk of a prompt, and its parts that a store has: the base, then refinements in order. No parts: no cache.

    Raises:
        InputError: a number is out of range, or a refinement does not lower the KL.
    """

    tokens: int
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError(f"tokens: must be at least 1, got {self.tokens}")
        best = math.inf
        for number, part in enumerate(self.parts):
            if part.nbytes < 1:
                raise InputError(f"parts[{number}].nbytes: must be at least 1, got {part.nbytes}")
            check_number(f"parts[{number}].kl", part.kl, positive=False)
            if part.kl >= best:
                raise InputError(f"parts[{number}].kl: must be below that of the part before, {best}, got {part.kl}")
            best = part.kl


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt whose cache is to be in place, and its first token there, by a deadline.

    Attributes:
        chunks: those that follow the tokens whose cache the engine holds, in order.
        deadline: of the first token, in seconds on the planner's clock. It may have passed.
        kl_max: the floor of quality: nats per token that the chunks may lose in the mean over their tokens, computed
            ones counting as 0. 0: nothing is loaded unless it is exact; infinite: there is no floor.
        start: tokens of the prompt before the first chunk, which the engine holds.
        rest: tokens behind the last chunk, which are computed in any case.
        compute: when to compute chunks that could be loaded.
        engine_free: when the engine can begin with this prompt, on the planner's clock: what waits before it.

    Raises:
        InputError: a number is out of range, or there are no chunks.
    """

    chunks: tuple[ChunkParts, ...]
    deadline: float
    kl_max: float
    start: int = 0
    rest: int = 1
    compute: Compute = Compute.NEEDED
    engine_free: float = -math.inf

    def __post_init__(self) -> None:
        if not self.chunks:
            raise InputError("chunks: must not be empty: a prompt without chunks needs no plan")
        if not self.kl_max >= 0:
            raise InputError(f"kl_max: must be at least 0, got {self.kl_max}")
        for name, number, least in (("start", self.start, 0), ("rest", self.rest, 0)):
            if number < least:
                raise InputError(f"{name}: must be at least {least}, got {number}")
        if not math.isfinite(self.deadline):
            raise InputError(
                f"deadline: must be a time, got {self.deadline}; without a deadline there is nothing to plan"
            )
        if math.isnan(self.engine_free) or self.engine_free == math.inf:
            raise InputError(f"engine_free: must be a time, got {self.engine_free}")
