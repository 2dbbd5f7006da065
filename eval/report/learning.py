"""The sequences that a report learns profiles and baselines from: texts, or cuvee's mixture of kinds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from cuvee.calibration.corpus import (
    Corpus,
    leading_ids,
    load_tokenizer,
    read_corpus,
    spread_sequences,
    token_ids,
)
from cuvee.calibration.kinds import KINDS, REREAD, SAMPLES, check_mixture_size, mixture, mixture_text, more_text
from cuvee.calibration.sequences import reread
from cuvee.codec.errors import InputError
from cuvee.eval.report.report_config import MIXTURE, ReportConfig
from cuvee.learning.moments import SINKS, held_out_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["all_sequences", "cached_tokens", "learning_corpora", "learning_sequences", "learning_text"]


def learning_corpora(config: ReportConfig) -> list[Corpus]:
    """The texts to learn from. Of the mixture these are the texts it is cut from, one document for each kind.

    Raises:
        InputError: the mixture is not alone, or fewer or shorter sequences are asked for than it needs.
    """
    names = config.learned_texts
    if MIXTURE not in names:
        return [read_corpus(name, config.model) for name in names]
    if len(names) > 1:
        raise InputError(
            f"calibration: {MIXTURE} comes alone; to add a text to it, learn a profile "
            "with `cuvee profile learn --text` and give it with --profile"
        )
    check_mixture_size(config.learned_sequences, config.length)
    tokenizer = load_tokenizer(config.model)
    leading = leading_ids(tokenizer)
    documents = []
    digest = hashlib.sha256()
    for kind in KINDS:
        if kind not in (REREAD, SAMPLES):
            text = "\n\n".join(mixture_text(kind, tokenizer))
            documents.append(token_ids(tokenizer, text, special=not leading))
            digest.update(f"{kind} {len(documents[-1])} ".encode() + documents[-1].numpy().tobytes())
    return [Corpus(MIXTURE, digest.hexdigest(), tuple(documents), tuple(leading))]


def learning_sequences(
    config: ReportConfig, corpora: Sequence[Corpus], model: PreTrainedModel, prefix: int
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The sequences to learn from.

    Args:
        config: of the report.
        corpora: of `learning_corpora`.
        model: draws the samples of the mixture.
        prefix: how many tokens of a sequence are cached.

    Returns:
        int64 `[N, length]`, or that many for each kind of the mixture.
    """
    if MIXTURE in config.learned_texts:
        tokenizer = load_tokenizer(config.model)
        return mixture(model, tokenizer, config.learned_sequences, config.length, config.seed)
    tokens = spread_sequences(corpora, config.length, config.learned_sequences)
    return reread(tokens, prefix, config.seed)


def learning_text(config: ReportConfig) -> torch.Tensor | None:
    """More sequences to learn prediction from tokens from: those of the bundled texts, with the mixture."""
    if MIXTURE not in config.learned_texts:
        return None
    return more_text(load_tokenizer(config.model), config.length)


def cached_tokens(config: ReportConfig, corpora: Sequence[Corpus], prefix: int) -> int:
    """About how many cached tokens a profile is learned from, which decides how large its groups may be."""
    if MIXTURE in config.learned_texts:
        sequences = config.learned_sequences
    else:
        sequences = len(spread_sequences(corpora, config.length, config.learned_sequences))
    return (sequences - held_out_count(sequences)) * max(prefix - SINKS, 0)


def all_sequences(sequences: torch.Tensor | Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The sequences of all kinds, `[N, length]`, but for the mixture's few longer ones."""
    if isinstance(sequences, torch.Tensor):
        return sequences
    length = min(rows.shape[1] for rows in sequences.values())
    return torch.cat([rows for rows in sequences.values() if rows.shape[1] == length])
