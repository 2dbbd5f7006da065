"""The connector behind vLLM's OpenAI server: tenants, restarts, and two servers with one Redis."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from redis_server import redis_server
from vllm_engine import Server, cuvee, need_vllm

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


def test_tenants_share_nothing_and_a_restart_loses_nothing(folder: Path) -> None:
    store = f"file://{folder / 'tenants'}"
    first, second, third = prompt(1), prompt(2), prompt(3)
    with server(folder, "before", store) as before:
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
    with server(folder, "after", store) as after:
        for one, tokens in zip((first, second, third), (fresh.tokens, *answers), strict=True):
            restored = after.complete(one, cache_salt="alice")
            assert (restored.cached, restored.tokens) == (CACHED, tokens)
        assert after.complete(second, cache_salt="bob").cached == 0
        assert after.complete(second).cached == 0
        after.wait_for_metric("vllm:cuvee_stored_chunks_total", 6)
        # What the operator sees.
        assert after.metric("vllm:cuvee_loads_total") == 3
        assert after.metric("vllm:cuvee_loaded_tokens_total") == 3 * CACHED
        assert after.metric("vllm:cuvee_loaded_chunks_total") == 9
        assert after.metric("vllm:cuvee_lookups_total", 'result="hit"') == 3
        assert after.metric("vllm:cuvee_lookups_total", 'result="miss"') == 2
        assert after.metric("vllm:cuvee_hits_total", 'tier="disk"') == 9
        assert after.metric("vllm:cuvee_hit_bytes_total", 'tier="disk"') > 0
        assert after.metric("vllm:external_prefix_cache_hits_total") == 3 * CACHED
        raw, coded = (after.metric(f"vllm:cuvee_{kind}_bytes_total") for kind in ("raw", "stored"))
        assert 0 < coded < raw
        assert after.metric("vllm:cuvee_ratio") == pytest.approx(raw / coded)
        assert after.metric("vllm:cuvee_failures_total") == 0


def test_two_servers_share_one_redis(folder: Path) -> None:
    shared = prompt(4)
    with redis_server() as redis:
        one, other = (server(folder, name, redis.url) for name in ("one", "other"))
        for each in (one, other):
            each.launch()
        try:
            for each in (one, other):
                each.wait_until_up()
            assert other.complete(prompt(5)).cached == 0
            computed = one.complete(shared)
            assert computed.cached == 0
            one.wait_for_metric("vllm:cuvee_stored_chunks_total", 3)
            loaded = other.complete(shared)
            assert (loaded.cached, loaded.tokens) == (CACHED, computed.tokens)
            # And the other way round.
            assert one.complete(prompt(5)).cached == CACHED
            one.wait_for_metric("vllm:cuvee_hits_total", 3)
            assert one.metric("vllm:cuvee_hits_total", 'tier="redis"') == 3
            for each in (one, other):
                each.stop()
        finally:
            for each in (one, other):
                each.kill()
