"""What blending takes from the engine's tokenizer: its separator, and line breaks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.tokenizers import cached_tokenizer_from_config

from cuvee.codec.errors import InputError

if TYPE_CHECKING:
    from cuvee.blend.segmentation import LineBreaks
    from cuvee.integrations.vllm.blending.blend_options import BlendOptions

logger = logging.getLogger(__name__)


def separator_tokens(blend: BlendOptions | None, model: Any) -> Sequence[int] | None:
    """Return the tokens of blending's separator, by the engine's tokenizer."""
    given = None if blend is None else blend.separator
    if not isinstance(given, str):
        return given
    if model.skip_tokenizer_init:
        raise InputError("blend.separator: must be token ids, got a text, because the engine has no tokenizer")
    ids: list[int] = cached_tokenizer_from_config(model).encode(given, add_special_tokens=False)
    if not ids:
        raise InputError(f"blend.separator: must be at least one token of the engine's tokenizer, got {given!r}")
    return ids


def line_breaks(blend: BlendOptions | None, model: Any) -> LineBreaks | None:
    """Return the line breaks of the engine's vocabulary; None if blending does not look for paragraphs."""
    if blend is None or blend.separator is not None:
        return None
    if model.skip_tokenizer_init:
        logger.info(
            "cuvee: the engine has no tokenizer, so parts of prompts are found by content and not by paragraphs"
        )
        return None
    from cuvee.blend.segmentation import LineBreaks

    return LineBreaks.of_tokenizer(cached_tokenizer_from_config(model))
