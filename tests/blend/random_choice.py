"""A selector of random tokens: it fits every prompt, and stands for selectors that users write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cuvee.blend import Prompt


@dataclass(frozen=True)
class Random:
    """Selects a share of the cached tokens at random, the same for every prompt of one length."""

    share: float
    seed: int = 0

    def select(self, prompt: Prompt) -> torch.Tensor:
        score = torch.rand(len(prompt.tokens), generator=torch.Generator().manual_seed(self.seed))
        return prompt.best(score, round(self.share * prompt.cached_tokens))
