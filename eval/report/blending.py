"""What blending cached chunks loses, and what recomputing some tokens recovers: `cuvee report --blend`.

    prompts: chunks, text, continuation --full prefill--> the reference
         |
    chunks cached alone; exact, or decoded at a quality
         |
    blend: selector x cost --KL to the reference over the continuation--> share recovered

The floor is the blend of exact chunks with nothing recomputed. The share recovered is one minus the mean KL over the
mean KL of the floor: 0 at the floor, 1 for a full prefill. Costs are in token-layers and include what a selector spends
on its choice. Standard errors are over prompts, by the delta method, because both means come from the same prompts.

Prompts are documents of the task cuvee_passages: each passage is a chunk, and a sentence of one is begun again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from cuvee.blend import Blender, Boundary, ChunkCache, Guided, Nothing, Segment
from cuvee.calibration.corpus import leading_ids, pick_evenly
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import cache_argument, empty_cache
from cuvee.eval.report.schema import BlendEntry
from cuvee.eval.tasks import TASKS_PATH
from cuvee.integrations.stores.memory import MemoryStore
from cuvee.learning.divergence import compare, stderr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "BLEND_COSTS",
    "EXACT",
    "SELECTORS",
    "BlendPrompt",
    "blend_prompts",
    "measure_blends",
    "share_recovered",
]

EXACT = "exact"  # chunks as they were computed; others go by the quality they were coded at
NOTHING = "nothing"
BLEND_COSTS = (0.15, 0.3)
SELECTORS: dict[str, tuple[str, Callable[[float], Any]]] = {
    NOTHING: ("nothing recomputed", lambda cost: Nothing()),
    "boundary": ("boundary", lambda cost: Boundary(cost=cost)),
    "default": ("query x boundary (default)", lambda cost: Guided(cost=cost)),
}
"""Key -> (label, how to make the selector for a cost). The default's blends correct the other tokens."""

_STORE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, eq=False)
class BlendPrompt:
    """Cached chunks, each int64 `[T_i]`, the text after them `[S]`, and the continuation `[C]` that is scored."""

    chunks: tuple[torch.Tensor, ...]
    text: torch.Tensor
    continuation: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """All tokens before the continuation, `[T]`."""
        return torch.cat([*self.chunks, self.text])

    @property
    def length(self) -> int:
        """The number of tokens, with the continuation."""
        return len(self.tokens) + len(self.continuation)


def blend_prompts(tokenizer: Any, count: int) -> list[BlendPrompt]:
    """Make at most `count` prompts, spread over the documents of cuvee_passages, with a model's tokenizer."""
    lines = (TASKS_PATH / "cuvee_passages.jsonl").read_text(encoding="ascii").splitlines()
    prompts = []
    for line in pick_evenly(lines, count):
        document = json.loads(line)
        *passages, query = document["context"].split("\n\n")
        # As in lm-eval: the tokens of the whole, without the tokens of the context.
        prompts.append(_prompt(tokenizer, passages, query, f"{query} {document['choices'][document['answer']]}"))
    return prompts


def _prompt(tokenizer: Any, passages: Sequence[str], text: str, whole: str) -> BlendPrompt:
    """Passages, each with the blank line after it, a text, and what `whole` adds to it."""
    chunks = [_ids(tokenizer, passage + "\n\n") for passage in passages]
    chunks[0] = [*leading_ids(tokenizer), *chunks[0]]  # as the tokenizer begins a text
    ids = _ids(tokenizer, text)
    return BlendPrompt(
        tuple(map(torch.tensor, chunks)), torch.tensor(ids), torch.tensor(_ids(tokenizer, whole)[len(ids) :])
    )


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


@torch.no_grad()
def measure_blends(
    model: PreTrainedModel,
    layout: KVLayout,
    prompts: Sequence[BlendPrompt],
    codecs: Mapping[str, Codec],
    costs: Sequence[float] = BLEND_COSTS,
) -> list[BlendEntry]:
    """Measure every selector at every cost, on exact chunks and on those that come back from each codec.

    Args:
        model: computes chunks, references and blends.
        layout: of its caches.
        prompts: what to blend.
        codecs: by name of the quality.
        costs: shares of the token-layers, above 0 and at most 1.

    Returns:
        One entry for each kind of chunks, selector and cost: the `share` of the floor's KL that is recovered, and what
        was `spent`.

    Raises:
        InputError: a prompt is longer than the model's positions.
    """
    longest, limit = max(prompt.length for prompt in prompts), layout.max_positions
    if limit is not None and longest > limit:
        raise InputError(f"blend: has a prompt of {longest} tokens, and the model has {limit} positions")
    exact = Codec.without_profile(layout)
    library = ChunkCache(model, exact, MemoryStore(_STORE_BYTES))
    blenders = {correct: Blender(model, correct=correct) for correct in (False, True)}
    asked = [
        _Measured(kv, selector, cost)
        for kv in (EXACT, *codecs)
        for selector in SELECTORS
        for cost in ((None,) if selector == NOTHING else costs)
    ]
    coded = dict.fromkeys(codecs, 0)
    for prompt in prompts:
        reference = _reference(model, prompt)
        chunks = {
            EXACT: [
                exact.decode(cast(bytes, library.segment(tokens, leading=index == 0).chunk))
                for index, tokens in enumerate(prompt.chunks)
            ]
        }
        for name, codec in codecs.items():
            blobs = [codec.encode(chunk) for chunk in chunks[EXACT]]
            coded[name] += sum(map(len, blobs))
            chunks[name] = [codec.decode(blob) for blob in blobs]
        for one in asked:
            _blend(model, blenders[one.selector == "default"], one, prompt, chunks[one.kv], reference)
    values = layout.values_per_token * sum(len(chunk) for prompt in prompts for chunk in prompt.chunks)
    sizes = {EXACT: None, **{name: 8 * size / values for name, size in coded.items()}}
    return [one.entry(asked[0].kl, sizes[one.kv]) for one in asked]


class _Measured:
    """One selector at one cost on one kind of chunks, with one number for each prompt."""

    def __init__(self, kv: str, selector: str, cost: float | None) -> None:
        self.kv, self.selector, self.cost = kv, selector, cost
        self.kl: list[float] = []
        self.top1: list[float] = []
        self.spent: list[float] = []

    def entry(self, floor: Sequence[float], bits: float | None) -> BlendEntry:
        label = SELECTORS[self.selector][0]
        kl, top1 = float(np.mean(self.kl)), float(np.mean(self.top1))
        return BlendEntry(
            self.kv, self.selector, label, self.cost, bits, float(np.mean(self.spent)), kl, stderr(self.kl), top1,
            stderr(self.top1), *share_recovered(self.kl, floor),
        )  # fmt: skip


def _reference(model: PreTrainedModel, prompt: BlendPrompt) -> torch.Tensor:
    """Log-probabilities `[1, C, V]` of the continuation after a full prefill."""
    cache = empty_cache()
    last = model(
        input_ids=prompt.tokens[None], **cache_argument(model, cache), use_cache=True, logits_to_keep=1
    ).logits[0]  # fmt: skip
    return _continued(model, prompt, last, cache)


def _continued(model: PreTrainedModel, prompt: BlendPrompt, last: torch.Tensor, cache: Any) -> torch.Tensor:
    """Log-probabilities `[1, C, V]` of the continuation, from the logits `[1, V]` of the prompt's last token."""
    steps = [last]
    if len(prompt.continuation) > 1:
        tokens = prompt.continuation[None, :-1]
        steps.append(model(input_ids=tokens, **cache_argument(model, cache), use_cache=True).logits[0])
    return torch.cat(steps).float().log_softmax(-1)[None]


def _blend(
    model: PreTrainedModel, blender: Blender, one: _Measured, prompt: BlendPrompt, chunks: Sequence[KVChunk],
    reference: torch.Tensor,
) -> None:  # fmt: skip
    segments = [Segment(tokens, chunk) for tokens, chunk in zip(prompt.chunks, chunks, strict=True)]
    selector = SELECTORS[one.selector][1](one.cost or 0.0)
    result = blender.blend([*segments, Segment(prompt.text)], logits_to_keep=1, selector=selector)
    predicted = _continued(model, prompt, result.logits, result.cache)
    kl, _, same = compare(reference, predicted, prompt.continuation[None])
    one.kl += kl
    one.top1 += same
    one.spent.append(result.record.cost)


def share_recovered(kl: Sequence[float], floor: Sequence[float]) -> tuple[float | None, float | None]:
    """One minus the mean KL over the mean KL of the floor, and its standard error over prompts (delta method).

    Args:
        kl: nats per token, one number per prompt.
        floor: the same if nothing is recomputed.

    Returns:
        The share, which is None if the floor is no worse than the reference; and its error, None for a single prompt.

    Example:
        >>> share_recovered([0.1, 0.1], [0.4, 0.4])
        (0.75, 0.0)
    """
    above, below = np.asarray(kl, np.float64), np.asarray(floor, np.float64)
    if below.mean() <= 0:
        return None, None
    ratio = above.mean() / below.mean()
    error = stderr(((above - ratio * below) / below.mean()).tolist())
    return float(1 - ratio), error
