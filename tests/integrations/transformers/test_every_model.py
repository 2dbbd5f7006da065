"""Models of a dozen kinds in every run, and of every type that transformers knows each night."""

from __future__ import annotations

import collections

import pytest
from tests.every_model import TYPES, judge

# Ways to keep a cache that test_kinds.py has not: grouped heads, one head, tables, adjacent pairs, compressed keys,
# recurrent states in layers of attention, entries without tokens.
WORKING = (
    "cpmant", "deepseek_v4", "falcon", "glm4v", "gptj", "inkling_mm_model", "llama", "phi", "qwen2_vl", "rembert",
    "smollm3", "xglm", "zaya",
)  # fmt: skip


@pytest.mark.parametrize("name", WORKING)
def test_a_model_continues_from_its_blobs(name: str) -> None:
    verdict = judge(name)
    assert verdict.name == "works", verdict.why


@pytest.mark.nightly
def test_every_type_works_or_is_refused() -> None:
    verdicts = {name: judge(name) for name in TYPES}
    counts = collections.Counter(verdict.name for verdict in verdicts.values())
    assert not {name: verdict.why for name, verdict in verdicts.items() if verdict.name == "wrong"}
    # Names, of which several stand for one decoder: 152 decoders work with transformers 5.19.
    assert counts["works"] >= 152, counts
