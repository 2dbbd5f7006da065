"""Prompts of cached chunks: what is blended, what is scored, and that nothing is lost where everything is computed."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from tests.conftest import BOS, Books
from tokenizers.processors import TemplateProcessing

from cuvee.blend import Blender, Nothing, Segment
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import prefill
from cuvee.eval.report.blending import BlendPrompt, blend_prompts, measure_blends, share_recovered
from cuvee.eval.report.schema import BlendEntry
from cuvee.eval.tasks import TASKS_PATH


@pytest.fixture(scope="module")
def prompts(bundled: tuple[Any, Any]) -> list[BlendPrompt]:
    return blend_prompts(bundled[1], 2)


def entries(found: list[BlendEntry]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(one.kv, one.selector, one.cost): asdict(one) for one in found}


@pytest.fixture(scope="module")
def found(bundled: tuple[Any, Any], books: Books, prompts: list[BlendPrompt]) -> dict[tuple[Any, ...], dict[str, Any]]:
    model = bundled[0]
    layout = KVLayout.from_config(model.config, dtype=model.dtype)
    codecs = {"balanced": Codec(books.profile, "balanced")}
    return entries(measure_blends(model, layout, prompts, codecs, (0.0, 0.3, 1.0)))


def test_nothing_is_the_floor_and_everything_is_the_full_prefill(found: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    floor = found["exact", "nothing", None]
    assert floor["share"] == 0 and floor["kl"] > 0.001 and floor["spent"] == 0 and floor["bits_per_value"] is None
    for selector in ("boundary", "default"):
        whole = found["exact", selector, 1.0]
        assert whole["kl"] < 1e-6 and whole["share"] == pytest.approx(1, abs=1e-3) and whole["top1"] == 1
    assert 0 < found["exact", "default", 0.3]["spent"] <= 0.3 + 1e-9


def test_decoded_chunks_are_measured_beside_exact_ones(found: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    decoded = found["balanced", "nothing", None]
    assert 0.1 < decoded["bits_per_value"] < 6 and decoded["kl"] != found["exact", "nothing", None]["kl"]
    assert {kv for kv, _, _ in found} == {"exact", "balanced"}


def test_a_cost_that_pays_for_nothing_is_the_floor(found: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    nothing = found["exact", "default", 0.0]
    assert nothing["spent"] == 0 and nothing["kl"] == found["exact", "nothing", None]["kl"]


def test_a_value_is_that_of_the_blender(
    bundled: tuple[Any, Any], found: dict[tuple[Any, ...], dict[str, Any]], prompts: list[BlendPrompt]
) -> None:
    model = bundled[0]
    layout = KVLayout.from_config(model.config, dtype=model.dtype)
    kls = []
    for prompt in prompts:
        with torch.no_grad():
            whole = torch.cat([prompt.tokens, prompt.continuation])
            scored = slice(len(prompt.tokens) - 1, len(whole) - 1)
            exact = model(whole[None]).logits[0, scored].float().log_softmax(-1)
            chunks = [prefill(model, tokens[None], layout)[0] for tokens in prompt.chunks]
            segments = [Segment(tokens, chunk) for tokens, chunk in zip(prompt.chunks, chunks, strict=True)]
            text = torch.cat([prompt.text, prompt.continuation])
            kept = len(prompt.continuation) + 1
            result = Blender(model).blend([*segments, Segment(text)], logits_to_keep=kept, selector=Nothing())
            own = result.logits[:-1].float().log_softmax(-1)
        kls.append(float((exact.exp() * (exact - own)).sum(-1).mean()))
    assert found["exact", "nothing", None]["kl"] == pytest.approx(sum(kls) / len(kls), rel=0.02)


def test_passages_are_what_lm_eval_asks(bundled: tuple[Any, Any]) -> None:
    tokenizer = bundled[1]
    prompt = blend_prompts(tokenizer, 1)[0]
    lines = (TASKS_PATH / "cuvee_passages.jsonl").read_text().splitlines()
    asked = [json.loads(line) for line in lines]
    text = tokenizer.decode(torch.cat([prompt.tokens, prompt.continuation]))
    assert len(prompt.chunks) == 6
    assert any(text.endswith(f"{one['context']} {one['choices'][one['answer']]}") for one in asked)


def test_a_prompt_that_is_too_long_is_refused(bundled: tuple[Any, Any], prompts: list[BlendPrompt]) -> None:
    longest = max(prompt.length for prompt in prompts)
    layout = replace(KVLayout.from_config(bundled[0].config, dtype=bundled[0].dtype), max_positions=longest - 1)
    message = f"blend: has a prompt of {longest} tokens, and the model has {longest - 1} positions"
    with pytest.raises(InputError, match=message):
        measure_blends(bundled[0], layout, prompts, {})


def test_shares_where_there_is_nothing_to_recover() -> None:
    assert share_recovered([0.0, 0.0], [0.0, 0.0]) == (None, None)
    assert share_recovered([0.1], [0.4]) == (0.75, None)
    share, error = share_recovered([0.1, 0.3], [0.4, 0.4])
    assert share == pytest.approx(0.5) and error == pytest.approx(0.25)


def test_a_prompt_begins_as_the_tokenizer_begins_a_text(with_bos: Any) -> None:
    """With BOS, and without what it puts at a text's end."""
    special = [(with_bos.convert_ids_to_tokens(token), token) for token in (BOS, BOS + 1)]
    ends = copy.deepcopy(with_bos)
    template = f"{special[0][0]} $A {special[1][0]}"
    ends.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    (prompt,) = blend_prompts(ends, 1)
    assert prompt.tokens[0] == BOS and (prompt.tokens[1:] > BOS + 1).all()
