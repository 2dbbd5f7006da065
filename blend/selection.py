"""What selectors of tokens must have; `selectors` has some, and `hkvd` another."""

from __future__ import annotations

from typing import Protocol

import torch

from cuvee.blend.segments import Prompt


class Selection(Protocol):
    """The choice of a selector for one prompt, read by the blender layer by layer."""

    def tokens(self, layer: int) -> torch.Tensor:
        """Return the cached tokens that go through `layer`: positions int64, rising, a subset of the layer before."""
        ...

    def watches(self, layer: int) -> bool:
        """Return whether to call `observe` after `layer` computed its keys and values."""
        ...

    def observe(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Observe how far the new keys and values of `tokens(layer)` are from the cached ones.

        Args:
            layer: the layer.
            keys: squared deviation of each token's keys, divided by the mean square of the new keys; float32.
            values: the same for values.
        """
        ...


class Selector(Protocol):
    """Chooses the tokens to recompute. It is immutable, and serves any number of prompts."""

    def begin(self, prompt: Prompt) -> Selection:
        """Start on a prompt.

        Raises:
            InputError: the cost does not pay for the selector's passes.
        """
        ...


class Scorer(Protocol):
    """Scores how important it is to recompute each token."""

    def score(self, prompt: Prompt) -> torch.Tensor:
        """Return scores above 0, float32 `[T]`. Only their ratios matter; those of text are ignored."""
        ...

    def overhead(self, prompt: Prompt) -> int:
        """Return the token-layers that `score` spends."""
        ...
