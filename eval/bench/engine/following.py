"""Have an engine read a given text after a prompt, and keep all that it expects on the way.

vLLM reads nothing from a cache for requests that ask for the logprobs of their prompt, and logprobs of a whole
vocabulary take it longer to list than the prompt to load. So the text is generated: a processor of logits keeps them,
and leaves only the token that is to follow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from cuvee.codec.errors import CuveeError

__all__ = ["Follower", "save_read"]

_read: dict[int, torch.Tensor] = {}  # by position in the text, logits of the last request that followed one


class Follower(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Makes a request whose `extra_args` have a list `follow` generate these tokens. One such request at a time."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._followed: dict[int, tuple[list[int], list[int]]] = {}  # by row: the text, and what is generated so far

    def is_argmax_invariant(self) -> bool:
        """Greedy requests are not exempt."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keep track of the rows of requests."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._followed.pop(row, None)
        for row, params, _, generated in batch_update.added:
            self._followed.pop(row, None)
            if params.extra_args and "follow" in params.extra_args:
                _read.clear()
                self._followed[row] = list(params.extra_args["follow"]), generated
        for first, second, direction in batch_update.moved:
            one, other = self._followed.pop(first, None), self._followed.pop(second, None)
            if one is not None:
                self._followed[second] = one
            if other is not None and direction is MoveDirectionality.SWAP:
                self._followed[first] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Keep the logits of each request that follows a text, float32 `[requests, vocabulary]`, and replace them."""
        for row, (text, generated) in self._followed.items():
            at = len(generated)
            if at < len(text):
                # A part of a prompt comes by here as well. The last one, which counts, replaces what it left.
                _read[at] = logits[row].float().cpu().clone()
                logits[row] = float("-inf")
                logits[row, text[at]] = 0.0
        return logits


def save_read(count: int, path: str) -> None:
    """Write the log-probabilities of the last text that was followed, float32 `[count, vocabulary]`.

    Raises:
        CuveeError: it has another number of tokens.
    """
    if sorted(_read) != list(range(count)):
        raise CuveeError(f"the engine followed {len(_read)} tokens of a text, expected {count}")
    whole = torch.stack([_read[at] for at in range(count)])
    with open(path, "wb") as file:
        np.save(file, torch.log_softmax(whole, dim=-1).numpy())
