"""The workers' side of blending: recompute tokens among the segments placed in the engine's pages.

Blend --> Placed --cuvee.blend.Recompute--> the engine's layers write what they compute into its pages

A blend is computed in slices, one per step of the engine, so that other requests go on in between (`PageBlend`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch

from cuvee.blend import Guided
from cuvee.blend.recompute import MOST_ROWS, Placed, PromptKV, Recompute
from cuvee.blend.recompute_model import RecomputeModel
from cuvee.codec.errors import CuveeError
from cuvee.codec.paged import PagedCache
from cuvee.integrations.vllm.messages import Blend

# On a CPU without AMX a run costs a third of a token (SmolLM2-135M, 4,096 tokens); where computing is faster, it costs
# more. At 2 tokens the KL does not suffer yet.
RUN_OVERHEAD = 2.0


class RankFailedError(CuveeError):
    """Another rank cannot go on with a blend, so this rank stops as well."""

    blames_blob = False


@dataclass(frozen=True, slots=True)
class PageBlender:
    """Recomputes prompts in the pages of one rank.

    Attributes:
        cache: the engine's pages.
        block_tokens: tokens per block.
        open_model: makes the model for a prompt, from its block table.
        context_overhead: of the model, the same on all ranks (`cuvee.blend.Guided`).
        total: adds up tensors over the ranks (`Recompute`).
        agree: tells each rank whether all ranks can go on. All ranks call it equally often, in the same order.
        rows: most tokens that are computed at a time.
    """

    cache: PagedCache
    block_tokens: int
    open_model: Callable[[Sequence[int]], RecomputeModel]
    context_overhead: float
    total: Callable[[torch.Tensor], torch.Tensor]
    agree: Callable[[bool], bool]
    rows: int = MOST_ROWS

    def begin(self, blend: Blend, end: int) -> PageBlend:
        """Return the blend of the tokens `blend.start … end`, of which nothing is computed yet."""
        return PageBlend(self, blend, end)

    def slots(self, blocks: Sequence[int], end: int) -> torch.Tensor:
        """Return the slots of the first `end` tokens of a prompt with this block table, on the pages' device."""
        at, block = torch.arange(end), self.block_tokens
        return (torch.tensor(blocks)[at // block] * block + at % block).to(self.cache.device)


class PageBlend:
    """One blend, computed in slices: the tokens that are not reused, and some of the reused ones.

    A slice consists of units, each of which goes through the model in one piece. Before and after each unit all ranks
    agree that they can go on, because a rank that entered a unit alone would wait for the others forever. Each unit is
    prepared before the ranks agree on it. If a rank fails inside a unit, the other ranks hang, as in the engine's own
    passes.

    Attributes:
        done: everything is computed.
        tokens: computed or reused, by kind as in the metric `blend_tokens`; complete once the blend is done.
    """

    def __init__(self, blender: PageBlender, blend: Blend, end: int) -> None:
        self._blender = blender
        self._blend = blend
        self._end = end
        self._layers = blender.cache.layout.num_layers
        self._units = self._compute()
        self._following = 0.0  # tokens that the next unit computes; preparing the first unit costs almost nothing
        self.done = False
        self.tokens: dict[str, int] = {}

    def advance(self, budget: float) -> float:
        """Compute a slice: as many units as fit the budget, and at least one.

        Args:
            budget: most tokens to compute. A token that goes through half of the layers counts half.

        Returns:
            number of computed tokens, the same on all ranks.

        Raises:
            RankFailedError: another rank cannot go on.
            Exception: this rank's error; the other ranks learn of it.
        """
        spent = 0.0
        while not self.done and (not spent or spent + self._following <= budget):
            spent += self._following
            self._step()
        return spent

    def _step(self) -> None:
        """Compute a unit, and prepare the next."""
        problem: Exception | None = None
        finished = False
        try:
            with torch.inference_mode():
                self._following = next(self._units) / self._layers
        except StopIteration:
            finished = True
        except Exception as error:
            problem = error
        well = self._blender.agree(problem is None)
        if problem is not None:
            raise problem
        if not well:
            raise RankFailedError("another rank could not go on with this blend")
        self.done = finished

    def _compute(self) -> Generator[int, None, None]:
        """Compute the blend; before each unit, yield the number of token-layers it takes."""
        blender, blend = self._blender, self._blend
        placed = place(blend, self._end)
        slots = blender.slots(blend.blocks, self._end)
        kv = PromptKV(blender.cache, slots, placed.cached | placed.exact)
        model = blender.open_model(blend.blocks)
        selector = Guided(blend.cost, run_overhead=RUN_OVERHEAD, context_overhead=blender.context_overhead)
        yield 0  # the selector may ask all ranks
        done = yield from Recompute(model, kv, placed, blender.total, blender.rows).blocks(selector)
        cached, recomputed = int(placed.cached.sum()), int(done.computed[placed.cached].sum())
        self.tokens = {
            "reused": cached - recomputed, "recomputed": recomputed, "new": self._end - blend.start - cached,
        }  # fmt: skip


def place(blend: Blend, end: int) -> Placed:
    """Describe a blend to `cuvee.blend`: exact tokens, pieces, and text between and after them.

    The first tokens of a prompt count as text even where a piece holds them (`Blend.first`).
    """
    tokens = torch.tensor(blend.tokens)
    count = len(tokens)
    # Clients choose the number of pieces, so the work per piece must not depend on the prompt's length.
    begins = torch.tensor([piece.start for piece in blend.pieces], dtype=torch.int64)
    ends = begins + torch.tensor([piece.tokens for piece in blend.pieces], dtype=torch.int64)
    firsts = begins.clamp(min=blend.start)
    # A piece at the end of the prompt extends beyond `end` by the prompt's last token, which is always computed.
    cached = _added(count, firsts, ends.clamp(max=end), torch.ones_like(firsts)) > 0
    cached[: blend.first] = False
    bounds = torch.cat((torch.tensor([0, blend.start]), firsts, ends)).unique()
    bounds = bounds[bounds < count]
    segment = torch.zeros(count, dtype=torch.int64)
    segment[bounds[1:]] = 1
    segment = segment.cumsum(0)
    # Offsets count from a piece's beginning, even if that lies in the exact part.
    offset = torch.arange(count) - bounds[segment] + _added(count, firsts, ends, firsts - begins)
    known = torch.arange(count) < blend.start
    return Placed(tokens, segment, offset, cached, torch.zeros_like(cached), known, end)


def _added(count: int, firsts: torch.Tensor, ends: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return zeros `[count]` plus `values[i]` at positions `firsts[i] … ends[i]`; an inverted range adds nothing."""
    steps = torch.zeros(count + 1, dtype=torch.int64)
    steps.index_add_(0, firsts.clamp(max=count), values)
    steps.index_add_(0, torch.maximum(firsts, ends).clamp(max=count), -values)
    return steps[:count].cumsum(0)
