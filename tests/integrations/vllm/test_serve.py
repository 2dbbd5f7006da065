"""The connector behind vLLM's OpenAI server: two servers with one Redis, tenants, and what a stop leaves behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.integrations.stores.redis_server import redis_server
from tests.integrations.vllm.vllm_engine import Server, cuvee, need_vllm

pytestmark = pytest.mark.slow

CHUNK = 64
TOKENS = 3 * CHUNK + 10
CACHED = 3 * CHUNK


def prompt(seed: int, tokens: int = TOKENS) -> list[int]:
    """Random tokens of the bundled model."""
    return random.Random(seed).choices(range(1, 4096), k=tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_vllm()
    return tmp_path_factory.mktemp("vllm_serve")


def server(folder: Path, name: str, store: str) -> Server:
    """A server of the bundled model. Its own prefix cache is off: what is cached, we have loaded."""
    from cuvee.eval.data import bundled_model_path

    transfer = cuvee(store, chunk_tokens=CHUNK)
    return Server(folder / name, bundled_model_path(), transfer, "--no-enable-prefix-caching")


def test_servers_share_a_store_and_tenants_share_nothing(folder: Path) -> None:
    """One server stores, and is stopped; the other finds all that it stored, under the tenant it was stored for."""
    first, second, third = prompt(1), prompt(2), prompt(3)
    with redis_server() as redis:
        before, after = (server(folder, name, redis.url) for name in ("before", "after"))
        for each in (before, after):  # together: each takes half a minute
            each.launch()
        try:
            for each in (before, after):
                each.wait_until_up()
            fresh = before.complete(first, cache_salt="alice")
            assert fresh.cached == 0
            before.wait_for_metric("vllm:cuvee_stored_chunks_total", 3)
            again = before.complete(first, cache_salt="alice")
            assert (again.cached, again.tokens) == (CACHED, fresh.tokens)
            # The same prompt of another tenant, and of none, is computed, and kept under a key of its own.
            for number, salt in ((2, "bob"), (3, None)):
                assert before.complete(first, cache_salt=salt).cached == 0
                before.wait_for_metric("vllm:cuvee_stored_chunks_total", 3 * number)
            assert before.complete(first, cache_salt="bob").cached == CACHED
            assert before.complete(first).cached == CACHED
            # Two prompts that are stored while the server is being stopped.
            answers = [before.complete(one, cache_salt="alice").tokens for one in (second, third)]
            before.stop()
            for one, tokens in zip((first, second, third), (fresh.tokens, *answers), strict=True):
                restored = after.complete(one, cache_salt="alice")
                assert (restored.cached, restored.tokens) == (CACHED, tokens)
            assert after.complete(second, cache_salt="bob").cached == 0
            assert after.complete(second).cached == 0
            after.wait_for_metric("vllm:cuvee_stored_chunks_total", 6)
            what_the_operator_sees(after)
            after.stop()
        finally:
            for each in (before, after):
                each.kill()


def what_the_operator_sees(server: Server) -> None:
    """The metrics of a server that loaded three prompts and computed two."""
    assert server.metric("vllm:cuvee_loads_total") == 3
    assert server.metric("vllm:cuvee_loaded_tokens_total") == 3 * CACHED
    assert server.metric("vllm:cuvee_loaded_chunks_total") == 9
    assert server.metric("vllm:cuvee_lookups_total", 'result="hit"') == 3
    assert server.metric("vllm:cuvee_lookups_total", 'result="miss"') == 2
    assert server.metric("vllm:cuvee_hits_total", 'tier="redis"') == 9
    assert server.metric("vllm:cuvee_hit_bytes_total", 'tier="redis"') > 0
    assert server.metric("vllm:external_prefix_cache_hits_total") == 3 * CACHED
    raw, coded = (server.metric(f"vllm:cuvee_{kind}_bytes_total") for kind in ("raw", "stored"))
    assert 0 < coded < raw
    assert server.metric("vllm:cuvee_ratio") == pytest.approx(raw / coded)
    assert server.metric("vllm:cuvee_failures_total") == 0
