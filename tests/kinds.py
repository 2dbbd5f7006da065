"""One tiny random model of each kind of cache, the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tests.every_model import build

IMAGE = 60  # id of a part of an image
NEW = 8  # generated tokens


@dataclass
class Kind:
    """A model with what it has read.

    Attributes:
        ids: `[1, T]`, the tokens of the cache.
        inputs: what it reads beside them.
        cache: what it computed of them.
    """

    model: Any
    ids: torch.Tensor
    cache: Any
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> torch.Tensor:
        import cuvee

        return self.ids.masked_fill(self.ids == IMAGE, cuvee.NO_TOKEN) if "pixel_values" in self.inputs else self.ids

    def generated(self, cache: Any) -> list[int]:
        """Generate after a cache, which is used up, and one more token."""
        prompt = torch.cat([self.ids, self.ids[:, :1]], 1)
        name = "decoder_input_ids" if self.model.config.is_encoder_decoder else "input_ids"
        inputs = {name: prompt, **self.inputs}
        inputs.pop("pixel_values", None)  # the cache holds the image
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = (prompt == IMAGE).long()
        out = self.model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        tokens: list[int] = out[0].tolist()
        return tokens

    def predicted(self, cache: Any) -> torch.Tensor:
        """Log-probabilities `[1, 6, V]` of six more tokens after a cache, which is used up."""
        following = torch.randint(3, 60, (1, 6), generator=torch.Generator().manual_seed(1))
        if self.model.config.is_encoder_decoder:
            inputs = {"decoder_input_ids": following, **self.inputs}
        else:
            inputs = {"input_ids": following}
        with torch.no_grad():
            logits: torch.Tensor = self.model(**inputs, past_key_values=cache).logits
        return logits.float().log_softmax(-1)


def _image() -> Kind:
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
        "temporal_patch_size": 1, "spatial_merge_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=61, vision_start_token_id=62,
        vision_end_token_id=63,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, 6, 7, 62, *[IMAGE] * 4, 63, *range(8, 40)]])
    inputs = {
        "pixel_values": torch.randn(16, 48), "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }  # fmt: skip
    with torch.no_grad():
        return Kind(model, ids, model(input_ids=ids, **inputs, use_cache=True).past_key_values, inputs)


def _encoder_decoder() -> Kind:
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    inputs, ids = {"input_ids": torch.randint(3, 60, (1, 9))}, torch.randint(3, 60, (1, 40))
    with torch.no_grad():
        output = model(**inputs, decoder_input_ids=ids, use_cache=True)
    # What the encoder said is in the cache; a decoder that looks elsewhere finds nothing.
    silence: Any = torch.zeros_like(output.encoder_last_hidden_state)
    nothing = transformers.modeling_outputs.BaseModelOutput(silence)
    return Kind(model, ids, output.past_key_values, {"encoder_outputs": nothing})


def _of_type(name: str) -> Callable[[], Kind]:
    return lambda: Kind(*build(name))


KINDS: dict[str, Callable[[], Kind]] = {
    "hybrid": _of_type("qwen3_next"),
    "latents": _of_type("deepseek_v3"),
    "latents with index keys": _of_type("deepseek_v32"),
    "windows": _of_type("gemma3_text"),
    "windows in all layers": _of_type("mistral"),
    "windows and sinks": _of_type("gpt_oss"),
    "shared layers": _of_type("gemma3n_text"),
    "chunked attention": _of_type("llama4_text"),
    "sections with an image": _image,
    "absolute positions": _of_type("gpt2"),
    "biases": _of_type("bloom"),
    "encoder-decoder": _encoder_decoder,
}
