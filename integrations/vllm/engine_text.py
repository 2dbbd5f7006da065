"""What blending takes from the engine's tokenizer: its line breaks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.tokenizers import cached_tokenizer_from_config

if TYPE_CHECKING:
    from cuvee.blend.segmentation import LineBreaks
    from cuvee.integrations.vllm.blending.blend_options import BlendOptions

logger = logging.getLogger(__name__)


def line_breaks(blend: BlendOptions | None, model: Any) -> LineBreaks | None:
    """Return the line breaks of the engine's vocabulary; None without blending, or without a tokenizer."""
    if blend is None:
        return None
    if model.skip_tokenizer_init:
        logger.info(
            "cuvee: the engine has no tokenizer, so parts of prompts are found by content and not by paragraphs"
        )
        return None
    from cuvee.blend.segmentation import LineBreaks

    return LineBreaks.of_tokenizer(cached_tokenizer_from_config(model))
