"""The connector behind vLLM's OpenAI server: a store that others share, tenants, and what a stop leaves behind."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from tests.integrations.stores.redis_server import redis_server
from tests.integrations.vllm.engines import Engine, Server, Step, cuvee, run_engines, run_script

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "integrations" / "vllm" / "examples"
CHUNK = 64
TOKENS = 3 * CHUNK + 10
BLEND = {"segment_tokens": 24, "min_context": 0, "cost": 0.5}
CACHED = 3 * CHUNK


def prompt(seed: int, tokens: int = TOKENS) -> list[int]:
    """Random tokens of the bundled model."""
    return random.Random(seed).choices(range(1, 4096), k=tokens)


def test_what_a_server_stores_others_find_and_tenants_share_nothing(folder: Path) -> None:
    """A server stores, and is stopped; an engine elsewhere finds all of it, under the tenant it was stored for.

    The store takes nothing for 8 s while the server stops, which is longer than vLLM waits for workers by default.

    The server blends, too, which the example asks for; what tenants ask for has no part twice.
    Neither has a prefix cache of its own: what is cached, we have loaded. A second server would be the same engine
    behind HTTP, and take twice as long to start.
    """
    from cuvee.calibration.bundled import bundled_model_path

    first, second, third = prompt(1), prompt(2), prompt(3)
    with redis_server() as redis:
        patient = {"chunk_tokens": CHUNK, "lookup_timeout": 60.0, "load_timeout": 60.0, "close_timeout": 50.0}
        transfer = cuvee(f"{redis.url}?timeout=60", **patient)
        blending = cuvee(f"{redis.url}?timeout=60", **patient, blend=BLEND)
        with Server.started(folder / "server", bundled_model_path(), blending, "--no-enable-prefix-caching") as server:
            fresh = server.complete(first, cache_salt="alice")
            assert fresh.cached == 0
            server.wait_for_metric("vllm:cuvee_stored_total{kind=chunk}", 3)
            again = server.complete(first, cache_salt="alice")
            assert (again.cached, again.tokens) == (CACHED, fresh.tokens)
            # The same prompt of another tenant, and of none, is computed, and kept under a key of its own.
            for number, salt in ((2, "bob"), (3, None)):
                assert server.complete(first, cache_salt=salt).cached == 0
                server.wait_for_metric("vllm:cuvee_stored_total{kind=chunk}", 3 * number)
            assert server.complete(first, cache_salt="bob").cached == CACHED
            assert server.complete(first).cached == CACHED
            server.wait_for_metric("vllm:cuvee_load_seconds_count", 3)
            what_the_operator_sees(server)
            the_example_asks_about_a_folder_of_documents(server, folder)
            # Two prompts that are stored while the server is being stopped.
            redis.client().client_pause(8_000, all=False)
            answers = [server.complete(one, cache_salt="alice").tokens for one in (second, third)]
            log = server.text
        assert "they are lost" not in log()
        options = {"enable_prefix_caching": False, "skip_tokenizer_init": False, "kv_transfer_config": transfer}
        computed = Step([second], until=("vllm:cuvee_stored{kind=chunk}", 6))
        steps = [Step([first, second, third], salt="alice"), Step([second], salt="bob"), computed]
        ran = run_engines(folder / "engine", [Engine("engine", bundled_model_path(), steps, options)])["engine"]
    restored, of_bob, of_nobody = ran.steps
    for answer, tokens in zip(restored, (fresh.tokens, *answers), strict=True):
        assert (answer.cached, answer.tokens) == (CACHED, tokens)
    assert [answer.cached for answer in (*of_bob, *of_nobody)] == [0, 0]
    assert ran.metric("vllm:cuvee_loaded_tokens") == ran.metric("vllm:external_prefix_cache_hits") == 3 * CACHED
    assert ran.metric("vllm:cuvee_failures") == 0


def what_the_operator_sees(server: Server) -> None:
    """The metrics of a server that loaded a prompt for three tenants, and had computed it for each."""
    assert server.metric("vllm:cuvee_load_seconds_count") == 3
    assert server.metric("vllm:cuvee_loaded_tokens_total") == 3 * CACHED
    assert server.metric("vllm:cuvee_loaded_total{kind=chunk}") == 9
    assert server.metric("vllm:cuvee_lookups_total{result=hit}") == 3
    assert server.metric("vllm:cuvee_lookups_total{result=miss}") == 3
    assert server.metric("vllm:cuvee_store_operations_total{tier=redis,result=hit}") == 9
    assert server.metric("vllm:cuvee_hit_bytes_total{tier=redis}") > 0
    assert server.metric("vllm:external_prefix_cache_hits_total") == 3 * CACHED
    raw, coded = (server.metric(f"vllm:cuvee_{kind}_bytes_total") for kind in ("raw", "stored"))
    assert 0 < coded < raw
    assert server.metric("vllm:cuvee_failures_total") == 0


def the_example_asks_about_a_folder_of_documents(server: Server, folder: Path) -> None:
    """Through the OpenAI API, by content: the second question finds the documents in another order."""
    from cuvee.calibration.bundled import bundled_text

    documents = folder / "documents"
    documents.mkdir()
    text = bundled_text("orchard")
    for number, word in enumerate(("apples", "pears")):
        (documents / f"{word}.txt").write_text(f"{word} {text[2000 * number : 2000 * number + 600]}")
    url, stored, said = f"{server.url}/v1", "vllm:cuvee_stored_total{kind=segment}", []
    before = server.metric(stored)
    for question in ("apples?", "pears?"):
        status, text = run_script(folder, str(EXAMPLES / "rag.py"), url, str(documents), question, timeout=120)
        assert status == 0, text + server.text()[-4000:]
        said.append(text)
        server.wait_for_metric(stored, before + 4)
    (cached,) = re.findall(r"; (\d+) of \d+ prompt tokens were cached or blended", said[-1])
    kinds = ("reused", "recomputed", "new")
    reused, recomputed, new = (server.metric(f"vllm:cuvee_blend_tokens_total{{kind={kind}}}") for kind in kinds)
    assert int(cached) == reused + recomputed + new > CHUNK and new > 0
    assert server.metric("vllm:cuvee_blend_seconds_count") == 1
