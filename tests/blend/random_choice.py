"""A selector of random tokens: it fits every prompt, and stands for selectors that users write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cuvee.blend import Prompt
from cuvee.blend.selectors import _Scored


@dataclass(frozen=True, slots=True, repr=False)
class Random(_Scored):
    """Selects random tokens, the same for every prompt of one length."""

    seed: int = 0

    def score(self, prompt: Prompt) -> torch.Tensor:
        """See `Scorer`."""
        return torch.rand(len(prompt.tokens), generator=torch.Generator().manual_seed(self.seed)) + 0.5
