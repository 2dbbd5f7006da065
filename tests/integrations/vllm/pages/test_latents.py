"""Latents (MLA) in vLLM's pages: written by vLLM's own class, stored and restored by ours.

No engine runs here: on a CPU without AMX, vLLM attends to nothing in front of what it computes, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.latent_models import Latents
from tests.integrations.vllm.sides import BLOCK, BLOCKS, CHUNK, TENANT, Bench

from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.vllm.messages import Load
from cuvee.integrations.vllm.pages.engine_pages import find_pages

TABLE, ELSEWHERE = [5, 3, 9, 1], [20, 13, 17, 14]


class Engine:
    """The pages of an engine with latents, and its writer."""

    def __init__(self, latents: Latents) -> None:
        backend = pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla")
        self.layout = latents.layout
        width = latents.latent + latents.rotated
        names = [f"model.layers.{at}.self_attn.attn" for at in range(self.layout.num_layers)]
        self.pages = {name: torch.randn(BLOCKS, BLOCK, width, dtype=self.layout.torch_dtype) for name in names}
        impl = backend.CPUMLAImpl.__new__(backend.CPUMLAImpl)
        attention = SimpleNamespace(impl=impl, kv_cache_dtype="auto", _k_scale=torch.ones(()))
        self.layers = dict.fromkeys(names, attention)

    def found(self) -> PagedCache:
        """The pages as cuvee finds them."""
        return find_pages(self.layout, self.layers, self.pages)

    def compute(self, slots: torch.Tensor) -> None:
        """Write random tokens as the model's forward does."""
        for name, layer in self.layers.items():
            latent = torch.randn(len(slots), self.layout.layers[0].value_dim).to(self.layout.torch_dtype)
            rotated = torch.randn(len(slots), 1, self.layout.layers[0].head_dim).to(self.layout.torch_dtype)
            layer.impl.do_kv_cache_update(latent, rotated, self.pages[name], slots, "auto", layer._k_scale)


@pytest.fixture
def engine(latents: Latents) -> Engine:
    return Engine(latents)


@pytest.fixture
def bench(engine: Engine, bench: Callable[..., Bench]) -> Bench:
    return bench(profile=Profile.unlearned(engine.layout), cache=engine.found())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
@pytest.mark.parametrize("latents", ["deepseek_v2", "deepseek_v3"], indirect=True)
@pytest.mark.serves(model="latents (MLA)", where="classes")
def test_latents_are_restored_bit_for_bit(engine: Engine, bench: Bench) -> None:
    tokens = len(TABLE) * BLOCK
    offsets = torch.arange(tokens)
    engine.compute(torch.tensor(TABLE)[offsets // BLOCK] * BLOCK + offsets % BLOCK)
    was: dict[str, Any] = {name: pages.clone() for name, pages in engine.pages.items()}
    bench.worker.saves.save(bench.saves(TABLE, range(tokens // CHUNK)))
    bench.drain()
    assert bench.counts()["raw_bytes"] == tokens * engine.layout.bytes_per_token
    entries = [bench.chunk(at).within([ELSEWHERE], [BLOCK]) for at in range(tokens // CHUNK)]
    bench.load_now([Load("r", TENANT, entries, 0, tokens, ELSEWHERE)])
    assert bench.worker.loads.take_arrived() == {"r"} and not bench.worker.loads.take_invalid_blocks()
    others = sorted(set(range(BLOCKS)) - set(ELSEWHERE))
    for name, pages in engine.pages.items():
        assert torch.equal(pages[ELSEWHERE], was[name][TABLE])
        assert torch.equal(pages[others], was[name][others]), "left alone"
