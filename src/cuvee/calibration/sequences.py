"""Token sequences on which cuvee measures the loss of compression: re-reading, or sampled.

A sequence has `LENGTH` tokens. The KV cache of the first `PREFIX` tokens is coded, and the other tokens are scored with
the decoded cache. In every second sequence, the scored part repeats a span of the cached part:

    even row   [ . . . . a b c d . . . . | a b c d ]    the model must read its cache to predict the tail
    odd row    [ . . . . . . . . . . . . | . . . . ]    ordinary text
                      cached and coded      scored

Without the repeats, a small model hardly reads its cache, and every codec looks perfect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cuvee.codec.errors import InputError
from cuvee.learning.rereading import SEED, reread
from cuvee.learning.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LENGTH", "PREFIX", "SEED", "reread", "sample_text"]

LENGTH = 512
PREFIX = 384

# Rows sampled at once: enough for efficient matrix products, few enough to bound the KV cache.
_SAMPLE_ROWS = 64


def sample_text(
    model: PreTrainedModel, count: int, length: int, seed: int, starts: Tensor | None = None, run: Run | None = None
) -> Tensor:
    """Sample sequences from the model itself, as calibration text when there is no other.

    Each row starts with its tokens in `starts`, else with the model's BOS token, or EOS if it has no BOS. A later
    end-of-text token does not end the row; the model's next text follows.

    Args:
        model: a Hugging Face causal LM, in evaluation mode.
        count: rows, N.
        length: tokens per row, T, including the first.
        seed: seed of the draws. Equal arguments give equal rows on the same machine with the same number of threads.
        starts: integer [N, S], the first tokens of each row; None for the model's own first token.
        run: shows progress.

    Returns:
        int64 [N, T] on the CPU.

    Raises:
        InputError: an argument is out of range, or the model names neither a BOS nor an EOS token.
    """
    from transformers import GenerationConfig

    for name, value in (("count", count), ("length", length)):
        if value < 1:
            raise InputError(f"{name}: must be at least 1, got {value}")
    if starts is None:
        starts = torch.full((count, 1), _first_token(model))
    if starts.ndim != 2 or len(starts) != count or not 1 <= starts.shape[1] <= length:
        raise InputError(f"starts: must be [{count}, 1 … {length}] tokens, got shape {list(starts.shape)}")
    starts = starts.to(model.device, torch.long)
    if starts.shape[1] == length:
        return starts.cpu()
    sampler: Any = model  # of `generate`, which has no types
    original = sampler.generation_config
    # What the model predicts, with nothing of its own settings, such as a temperature or an end.
    sampler.generation_config = GenerationConfig(do_sample=True, top_k=0, max_length=length, pad_token_id=0)
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            parts = starts.split(_SAMPLE_ROWS)
            steps = _Steps(run or Run(shown=False), len(parts) * (length - starts.shape[1]))
            made = [sampler.generate(rows, attention_mask=torch.ones_like(rows), streamer=steps) for rows in parts]
    finally:
        sampler.generation_config = original
    return torch.cat([rows.cpu() for rows in made])


class _Steps:
    """What `generate` tells of each step: first of the tokens that it begins with, then of each that it drew."""

    def __init__(self, run: Run, count: int) -> None:
        self._count = iter(run.stage("sampling", range(count)))
        self._begun = False

    def put(self, _: Tensor) -> None:
        """Count a step."""
        if self._begun:
            next(self._count, None)
        self._begun = True

    def end(self) -> None:
        """Come to the end of the rows."""
        self._begun = False


def _first_token(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    for token in (config.bos_token_id, config.eos_token_id):
        # Some models name several EOS tokens; the first is the end of text.
        candidate = token[0] if isinstance(token, list) and token else token
        if isinstance(candidate, int):
            return candidate
    raise InputError("model: must have a bos_token_id or eos_token_id in its configuration to start from")
