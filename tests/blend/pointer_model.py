"""A Llama whose weights are set by hand, so that what a chunk loses without its prefix is known.

    chunk A   sink · · fact(slot 0, value) · · · fact(slot 1, value) · ·    a fact holds the value of a slot
    chunk B   sink · · · · · pointer(slot 1) · · · pointer(slot 0) · ·      layer 0: a pointer copies it from its fact
    text      sink · question(slot 0) question(slot 1)                      layer READING: a question from its pointer

All other tokens, and pointers that find no fact, look at the sinks, whose values are zero. So nothing but the pointers'
KV changes with what stands before chunk B, in all layers above the first; and a question is answered, with logits of
GAIN for its value, just where its pointer was recomputed in all layers up to READING.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 16
READING = 12
SLOTS = 4
VALUES = 8
ORDINARY = 60
GAIN = 8.0

# The vocabulary.
SINK = 0
ANSWER = 1  # one per value
FACT = ANSWER + VALUES  # SLOTS · VALUES of them
POINTER = FACT + SLOTS * VALUES
QUESTION = POINTER + SLOTS
COMMON = QUESTION + SLOTS
VOCABULARY = COMMON + ORDINARY

# Channels of the hidden states. The first is constant and so large that the norm before each layer changes nothing.
_CONSTANT, _IS_SINK, _OF_FACT, _OF_POINTER, _OF_QUESTION = 0, 1, 2, 2 + SLOTS, 2 + 2 * SLOTS
_VALUE = 2 + 3 * SLOTS
_COPIED = _VALUE + VALUES
_ANSWERED = _COPIED + VALUES
_FEATURES = _ANSWERED + VALUES
_WIDTH = 64
_LARGE = 64.0

# Dimensions of a head of 32. Content is matched in pairs that RoPE turns by less than 1e-5 in a thousand positions.
_HEAD = 32
_SLOT, _SINK = 11, 15
_MATCH, _REST = 15.0, 10.6  # scores: 40 where a slot matches, 20 at a sink, 0 elsewhere


@torch.no_grad()
def pointer_model() -> Any:
    """The model: 16 layers of two heads, the first of which does what is written above."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=_WIDTH, intermediate_size=4, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, head_dim=_HEAD, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12}, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.zero_()
    noise = torch.Generator().manual_seed(0)
    flat = _LARGE / _WIDTH**0.5
    model.model.norm.weight.fill_(flat)
    slots, values = torch.arange(SLOTS), torch.arange(VALUES)
    features = slice(_FEATURES, _WIDTH)

    embedding = model.get_input_embeddings().weight
    embedding[:, _CONSTANT] = _LARGE
    embedding[SINK, _IS_SINK] = 1
    embedding[1:, features] = torch.randn(VOCABULARY - 1, _WIDTH - _FEATURES, generator=noise) / 4
    for slot in range(SLOTS):
        embedding[FACT + slot * VALUES + values, _OF_FACT + slot] = 1
        embedding[FACT + slot * VALUES + values, _VALUE + values] = 1
    embedding[POINTER + slots, _OF_POINTER + slots] = 1
    embedding[QUESTION + slots, _OF_QUESTION + slots] = 1
    model.lm_head.weight[ANSWER + values, _ANSWERED + values] = GAIN

    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        layer.input_layernorm.weight.fill_(flat)
        layer.post_attention_layernorm.weight.fill_(flat)
        for head in range(2):
            attention.q_proj.weight[head * _HEAD + _SINK, _CONSTANT] = _REST / _LARGE
            attention.k_proj.weight[head * _HEAD + _SINK, _IS_SINK] = _REST
        if index in (0, READING):
            asking, asked = (_OF_POINTER, _OF_FACT) if index == 0 else (_OF_QUESTION, _OF_POINTER)
            attention.q_proj.weight[_SLOT + slots, asking + slots] = _MATCH
            attention.k_proj.weight[_SLOT + slots, asked + slots] = _MATCH
        source, target = (_VALUE, _COPIED) if index == 0 else (_COPIED, _ANSWERED)
        attention.v_proj.weight[values, source + values] = 1
        attention.o_proj.weight[target + values, values] = 1
        # The second head holds keys and values of every token's own, as any head does.
        for projection, rows in (
            (attention.k_proj, slice(_HEAD, _HEAD + _SLOT)),
            (attention.v_proj, slice(_HEAD, None)),
        ):
            part = projection.weight[rows, features]
            projection.weight[rows, features] = torch.randn(part.shape, generator=noise) / part.shape[1] ** 0.5
        attention.o_proj.weight[features, _HEAD:] = torch.randn(_WIDTH - _FEATURES, _HEAD, generator=noise) / _HEAD**0.5
    return model


@dataclass(frozen=True)
class PointerPrompt:
    """A prompt, part by part.

    Attributes:
        opening, facts, pointers, questions: tokens of each part, in this order; those in the middle are chunks.
        pointer_positions: in the prompt, rising.
        answers: the token that is right after each question.
    """

    opening: torch.Tensor
    facts: torch.Tensor
    pointers: torch.Tensor
    questions: torch.Tensor
    pointer_positions: list[int]
    answers: list[int]


def pointer_prompt(seed: int, size: int = 100) -> PointerPrompt:
    """Two chunks of `size` tokens whose facts and pointers lie anywhere but in the first half of pointers' chunk."""
    noise = torch.Generator().manual_seed(seed)

    def common(count: int) -> torch.Tensor:
        return torch.cat((torch.tensor([SINK]), torch.randint(COMMON, VOCABULARY, (count - 1,), generator=noise)))

    opening, facts, pointers, questions = common(4), common(size), common(size), common(4 + SLOTS)
    held = torch.randint(VALUES, (SLOTS,), generator=noise)
    slots = torch.arange(SLOTS)
    facts[1 + torch.randperm(size - 1, generator=noise)[:SLOTS]] = FACT + slots * VALUES + held
    at = size // 2 + torch.randperm(size - size // 2, generator=noise)[:SLOTS]
    pointers[at] = POINTER + slots
    questions[-SLOTS:] = QUESTION + slots
    positions = sorted((len(opening) + size + at).tolist())
    return PointerPrompt(opening, facts, pointers, questions, positions, (ANSWER + held).tolist())
