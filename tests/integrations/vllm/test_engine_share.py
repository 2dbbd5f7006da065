"""Storing with `store_share` in real engines: what a busy engine leaves waiting is stored when it stops.

reference   no connector              the answers
stored      a share of almost nothing the same, then it stops
loaded      another process           the same prompts again
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integrations.vllm.engines import Engine, cuvee, need_vllm, run_engines, save_tiny_model
from tests.integrations.vllm.test_engine_tails import AGAIN, BLOCK, CHUNK, FIRST

pytestmark = pytest.mark.slow


def test_what_waits_is_stored_when_the_engine_stops(tmp_path: Path) -> None:
    need_vllm()
    model = save_tiny_model("llama", tmp_path / "model")
    options = {"block_size": BLOCK, "max_model_len": 1024}
    usual = cuvee(f"file://{tmp_path / 'store'}", chunk_tokens=CHUNK, min_tokens=BLOCK)
    paced = cuvee(f"file://{tmp_path / 'store'}", chunk_tokens=CHUNK, min_tokens=BLOCK, store_share=1e-6)
    first = run_engines(
        tmp_path / "first",
        [
            Engine("reference", model, [FIRST], options),
            Engine("stored", model, [FIRST], {**options, "kv_transfer_config": paced}),
        ],
    )
    second = run_engines(
        tmp_path / "second", [Engine("loaded", model, [AGAIN], {**options, "kv_transfer_config": usual})]
    )
    ran = {**first, **second}
    answers = [[answer.tokens for answer in ran[name].steps[0]] for name in ("reference", "stored", "loaded")]
    assert answers[0] == answers[1] == answers[2]
    stored = ran["stored"]
    assert stored.metric("vllm:cuvee_stored_chunks") <= 1 and stored.metric("vllm:cuvee_stored_tails") == 0
    assert stored.metric("vllm:cuvee_tails_superseded") == 1, "511 tokens became 551"
    for name in ("failures", "contained", "stores_skipped", "tails_dropped"):
        assert stored.metric(f"vllm:cuvee_{name}") == 0, name
    # All but the tail in whose place the whole chunk is stored; a prompt that ends inside that chunk cannot load it.
    assert [answer.cached for answer in ran["loaded"].steps[0]] == [CHUNK, 288, 64]
