"""Models of a dozen kinds in every run, and of every type that transformers knows each night."""

from __future__ import annotations

import collections

import pytest
from tests.every_model import TYPES, judge

# One of each way to keep a cache: grouped heads, one head, biases, tables, latents, sections, windows, adjacent pairs.
WORKING = (
    "bloom", "deepseek_v3", "falcon", "gemma3", "glm4v", "gpt2", "gpt_oss", "gptj", "llama", "mistral", "phi",
    "qwen2_vl", "smollm3", "xglm",
)  # fmt: skip
REFUSED = {"qwen3_next": "holds conv_states", "deepseek_v32": "holds indexer_keys"}


@pytest.mark.parametrize("name", WORKING)
def test_a_model_continues_from_its_blobs(name: str) -> None:
    verdict = judge(name)
    assert verdict.name == "works", verdict.why


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layout_cannot_describe_is_refused_by_name(name: str) -> None:
    verdict = judge(name)
    assert verdict.name == "refused" and REFUSED[name] in verdict.why, verdict.why


@pytest.mark.nightly
def test_every_type_works_or_is_refused() -> None:
    verdicts = {name: judge(name) for name in TYPES}
    counts = collections.Counter(verdict.name for verdict in verdicts.values())
    assert not {name: verdict.why for name, verdict in verdicts.items() if verdict.name == "wrong"}
    # Names, of which several stand for one decoder: 114 decoders work with transformers 5.19.
    assert counts["works"] >= 114, counts
