"""Pages of sparse attention (DeepSeek V3.2: latents and an indexer's keys), stored and restored by ours.

vLLM's scheduler, its cache groups, its memory and its calls of a connector; no model, because vLLM has no sparse
attention for CPUs. Steps write what follows from the tokens, in the format of vLLM's kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.stores.dict_store import DictStore
from tests.integrations.stores.redis_server import wait_until
from tests.integrations.vllm.engines import need_vllm
from tests.integrations.vllm.sides import BLOCK, CHUNK, TENANT, Bench
from tests.integrations.vllm_tier.real_tiers import real

from cuvee.codec.codec import Codec
from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.vllm.draft_layers import Drafts
from cuvee.integrations.vllm.exact_pages import find_exact_pages
from cuvee.integrations.vllm.messages import Load
from cuvee.integrations.vllm.setup import Setup

LAYERS, LATENT, ROTATED, CODES, SCALES = 3, 64, 16, 128, 4
TABLE, ELSEWHERE = [5, 3, 9, 1], [20, 13, 17, 14]
TOKENS = len(TABLE) * BLOCK


@pytest.fixture(autouse=True)
def _needs_vllm() -> None:
    need_vllm()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a small model."""
    need_vllm()
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("v32")
    transformers.DeepseekV32Config(
        architectures=["DeepseekV32ForCausalLM"], vocab_size=256, hidden_size=64, intermediate_size=64,
        num_hidden_layers=LAYERS, first_k_dense_replace=LAYERS, num_attention_heads=4, num_key_value_heads=4,
        kv_lora_rank=LATENT, q_lora_rank=32, qk_rope_head_dim=ROTATED, qk_nope_head_dim=16, v_head_dim=16,
        index_topk=64, index_n_heads=4, index_head_dim=CODES, max_position_embeddings=4096,
    ).save_pretrained(folder)  # fmt: skip
    return folder


class Engine:
    """vLLM's configuration, cache groups and memory; `scheduled` adds its scheduler, and a worker's connector.

    Args:
        checkpoint: of the model.
        block: tokens per block.
        dtype: of the latents.
        ranks: tensor-parallel.
        codes: bytes of an indexer's key without its scale.
        kernel: tokens per block of the kernels.
        layout: vLLM's name of how layers share its memory.
        drafter: whether the engine drafts tokens by the model's next layer.
        first: layer of the process, if a pipeline's earlier stage has those in front of it.
        options: of the connector.
    """

    def __init__(
        self, checkpoint: Path, block: int = BLOCK, dtype: str = "auto", ranks: int = 1, codes: int = CODES,
        kernel: int | None = None, layout: str = "LBHNC", drafter: bool = False, first: int = 0,
        options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        kinds, utils = real("vllm.v1.kv_cache_interface"), real("vllm.v1.core.kv_cache_utils")
        extra = {"chunk_tokens": 2 * block, "decide": "always", "min_tokens": block, "model_id": "m", **(options or {})}
        transfer = real("vllm.config").KVTransferConfig(
            kv_connector="CuveeConnector", kv_role="kv_both", kv_connector_extra_config=extra,
            kv_connector_module_path="cuvee.integrations.vllm.connector",
        )  # fmt: skip
        args = real("vllm.engine.arg_utils").EngineArgs(
            model=str(checkpoint), skip_tokenizer_init=True, load_format="dummy", max_model_len=2048, dtype="bfloat16",
            kv_transfer_config=transfer, tensor_parallel_size=ranks, max_num_batched_tokens=192,
        )  # fmt: skip
        self.config = args.create_engine_config()
        cache = self.config.cache_config
        self.config.parallel_config.distributed_executor_backend = "uni" if ranks == 1 else "mp"
        # What vLLM's CPU platform changes for MLA, as it is on a GPU.
        cache.block_size, cache.cache_dtype, cache.enable_prefix_caching = block, dtype, True
        self.config.scheduler_config.enable_chunked_prefill = True
        cache.kv_cache_layout = layout
        self.config.parallel_config.pipeline_parallel_size = 1 + (first > 0)
        if drafter:
            self.config.speculative_config = SimpleNamespace(
                method="mtp", draft_model_config=self.config.model_config, num_speculative_tokens=1
            )
        self.block, self.codes = block, codes
        attention = real("vllm.model_executor.layers.attention.mla_attention").MLAAttention
        model = real("vllm.model_executor.models.deepseek_v2")
        specs: dict[str, Any] = {}
        with real("vllm.config").set_current_vllm_config(self.config):
            for at in range(first, LAYERS + drafter):
                prefix = f"model.layers.{at}.self_attn"
                layer = SimpleNamespace(
                    kv_cache_dtype=dtype, head_size=LATENT + ROTATED, sliding_window=None, indexer=object(),
                    non_causal_multi_token_decode=False, topk_buffer_width=2048,
                )  # fmt: skip
                key = model.DeepseekV32IndexerCache(
                    head_dim=codes + SCALES, dtype=torch.uint8, prefix=f"{prefix}.indexer.k_cache", cache_config=cache
                )
                specs[key.prefix] = key.get_kv_cache_spec(self.config)
                specs[f"{prefix}.attn"] = attention.get_kv_cache_spec(layer, self.config)
        planning = utils if hasattr(utils, "get_kv_cache_groups") else real("vllm.v1.core.kv_cache_planning")  # 0.33
        groups = planning.get_kv_cache_groups(self.config, specs)
        assert len(groups) == 1 and isinstance(groups[0].kv_cache_spec, kinds.UniformTypeKVCacheSpecs)
        size = sum(spec.page_size_bytes for spec in specs.values())
        self.own = planning.get_kv_cache_config_from_groups(self.config, groups, 24 * size)
        self.schedulers = utils.generate_scheduler_kv_cache_config([self.own])
        self.pages: dict[str, torch.Tensor] = real("vllm.v1.worker.utils").allocate_kv_cache(
            self.own, torch.device("cpu"), cache.get_resolved_kv_cache_layout(), None if kernel is None else [kernel]
        )
        for pages in self.pages.values():
            pages.view(torch.uint8).random_(0, 256)

    def setup(self, scheduler: bool = False) -> Setup:
        """The connector's view, as of a worker or of the scheduler."""
        return Setup.of_engine(self.config, self.schedulers if scheduler else self.own)

    def name(self) -> bytes:
        """What names its entries."""
        return self.setup(scheduler=True).identity(self.config).layout

    def found(self) -> PagedCache:
        """The pages as cuvee finds them."""
        made = self.setup()
        assert made.layers is not None
        return find_exact_pages(
            made.layout_of_pages(0), {name: self.pages[name] for name in made.layers.names}, self.block
        )

    def held(self, name: str, block: int) -> torch.Tensor:
        """All bytes of a block of a layer."""
        ratio = len(self.pages[name]) // self.own.num_blocks
        own = self.pages[name][block * ratio : (block + 1) * ratio]
        return own.view(torch.uint8).flatten()


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(checkpoint: Path) -> MakeEngine:
    return lambda **changes: Engine(checkpoint, **changes)


@pytest.fixture
def make_bench(bench: Callable[..., Bench]) -> Callable[..., Bench]:
    def make(engine: Engine, **changes: Any) -> Bench:
        setup = engine.setup()
        own = {"cache": engine.found(), "setup": {"layers": setup.layers, "replicated": setup.replicated}}
        return bench(profile=Profile.unlearned(setup.layout), **own, **changes)

    return make


def save(bench: Bench) -> None:
    bench.worker.saves.save(bench.saves(TABLE, range(TOKENS // CHUNK)))
    bench.drain()


def load(bench: Bench, start: int = 0) -> set[int]:
    """Load into `ELSEWHERE`; return the blocks that are to be computed."""
    entries = [bench.chunk(at).within([ELSEWHERE], [BLOCK]) for at in range(start // CHUNK, TOKENS // CHUNK)]
    bench.load_now([Load("r", TENANT, entries, start, TOKENS, ELSEWHERE[start // BLOCK :])])
    assert bench.worker.loads.take_arrived() == {"r"}
    return bench.worker.loads.take_invalid_blocks()


@pytest.mark.parametrize(("dtype", "kernel"), [("auto", None), ("fp8_ds_mla", 4), ("nvfp4_ds_mla", None)])
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.serves(model="latents (MLA) with a sparse indexer", where="classes")
@pytest.mark.serves(model="latents (MLA) with a sparse indexer", cache="fp8_ds_mla", where="classes")
@pytest.mark.serves(model="latents (MLA) with a sparse indexer", cache="nvfp4_ds_mla", where="classes")
def test_pages_are_restored_byte_for_byte(
    make_engine: MakeEngine, make_bench: Callable[..., Bench], dtype: str, kernel: int | None, layout: str
) -> None:
    """In blocks that lie together or one layer's after the other's, of one or several of the kernels'."""
    engine = make_engine(dtype=dtype, kernel=None if layout == "BLHNC" else kernel, layout=layout)
    bench = make_bench(engine)
    was = {name: [engine.held(name, at).clone() for at in range(24)] for name in engine.pages}
    save(bench)
    size = sum(spec.page_size_bytes for spec in engine.own.kv_cache_groups[0].kv_cache_spec.kv_cache_specs.values())
    assert bench.counts()["raw_bytes"] == len(TABLE) * size
    assert not load(bench)
    for name, pages in was.items():
        for at in range(24):
            expected = pages[TABLE[ELSEWHERE.index(at)] if at in ELSEWHERE else at]
            assert torch.equal(engine.held(name, at), expected), f"{name}, block {at}"


def missing(bench: Bench, engine: Engine, make: MakeEngine) -> None:
    del bench.store.entries[bench.key(1)]


def damaged(bench: Bench, engine: Engine, make: MakeEngine) -> None:
    """In the section of the last layer, an indexer's: sections follow the header in the order of the layers."""
    assert engine.setup().layers.names[-1].endswith("indexer.k_cache")  # type: ignore[union-attr]
    blob = bytearray(bench.store.entries[bench.key(1)])
    blob[-100] ^= 1
    bench.store.entries[bench.key(1)] = bytes(blob)


def of_another_indexer(bench: Bench, engine: Engine, make: MakeEngine) -> None:
    other = Codec(Profile.unlearned(make(codes=CODES // 2).setup().layout), "lossless")
    empty = PagedCache.empty(other.profile.layout, CHUNK, range(2 * LAYERS), torch.device("cpu"))
    for tensor in (*empty.keys, *empty.values):
        tensor.zero_()
    (bench.store.entries[bench.key(1)],) = other.encode(PagedChunks(empty, [torch.arange(CHUNK)], [CHUNK]))


def without_an_indexer(bench: Bench, engine: Engine, make: MakeEngine) -> None:
    """Latents alone, as if the indexer's keys had been left out."""
    whole = engine.setup().layout
    layout = replace(whole, layers=whole.layers[::2])
    slots = torch.arange(CHUNK) % BLOCK + BLOCK * torch.tensor(TABLE[2:]).repeat_interleave(BLOCK)
    found = engine.found()
    latents = PagedCache(layout, found.keys[::2], found.values[::2])
    codec = Codec(Profile.unlearned(layout), "lossless")
    (bench.store.entries[bench.key(1)],) = codec.encode(PagedChunks(latents, [slots], [CHUNK]))


@pytest.mark.parametrize("fault", [missing, damaged, of_another_indexer, without_an_indexer])
def test_without_its_indexers_keys_a_chunk_is_computed(
    make_engine: MakeEngine, make_bench: Callable[..., Bench], fault: Callable[[Bench, Engine, MakeEngine], None]
) -> None:
    """And those in front of it are loaded."""
    engine = make_engine()
    bench = make_bench(engine)
    save(bench)
    fault(bench, engine, make_engine)
    assert load(bench) == set(ELSEWHERE[CHUNK // BLOCK :])
    counts = bench.counts()
    assert (counts["loaded_tokens"], counts["recomputed_tokens"]) == (CHUNK, TOKENS - CHUNK)
    assert sum(value for name, value in counts.items() if name.startswith("failures")) == 1
    for name in engine.pages:
        assert torch.equal(engine.held(name, ELSEWHERE[0]), engine.held(name, TABLE[0]))


@pytest.mark.serves(model="latents (MLA) with a sparse indexer", parallel="tensor parallelism", where="classes")
def test_one_rank_stores_what_all_hold(make_engine: MakeEngine, make_bench: Callable[..., Bench]) -> None:
    """vLLM keeps all of it on every rank."""
    engine = make_engine(ranks=2)
    made = engine.setup()
    assert (
        made.shards == 2 and made.holders == (0,) and made.layout_of_pages(1) == made.layout_of_pages(0) == made.layout
    )
    assert made.codec(1).profile.layout == made.layout
    store = DictStore()
    first, second = (make_bench(engine, rank=rank, shards=2, store=store) for rank in range(2))
    save(second)
    assert not store.entries
    save(first)
    assert {*store.entries} == {first.key(0), first.key(1)} and not load(first) and not load(second)
    damaged(first, engine, make_engine)
    assert load(second) == set(ELSEWHERE[CHUNK // BLOCK :])


def test_other_pages_have_other_names(make_engine: MakeEngine) -> None:
    """The scheduler is told one layer's description for all, and names what the worker stores nevertheless."""
    engines = [
        make_engine(), make_engine(codes=CODES // 2), make_engine(block=2 * BLOCK), make_engine(dtype="fp8_ds_mla"),
        make_engine(dtype="nvfp4_ds_mla"),
    ]  # fmt: skip
    for engine in engines:
        assert engine.setup(scheduler=True).layout == engine.setup().layout
    assert len({engine.name() for engine in engines}) == len(engines)
    one = make_engine(dtype="fp8_ds_mla")
    one.config.cache_config.cache_dtype = "fp8"  # until vLLM makes the layers, in the worker's process
    assert one.name() == engines[3].name()
    one.config.attention_config.backend = "FLASHMLA_SPARSE"
    assert one.name() != engines[3].name()


@pytest.mark.serves(model="latents (MLA) with a sparse indexer", drafts="mtp", where="classes")
def test_a_drafters_pages_lie_beside_the_models(make_engine: MakeEngine, make_bench: Callable[..., Bench]) -> None:
    """Of the next layer (MTP), with an indexer of its own."""
    engine = make_engine(drafter=True)
    bench = make_bench(engine)
    drafts = Drafts.of_engine(engine.config, engine.own, engine.setup())
    assert drafts is not None
    assert drafts.layers.names == (
        f"model.layers.{LAYERS}.self_attn.attn",
        f"model.layers.{LAYERS}.self_attn.indexer.k_cache",
    )
    bench.worker.attach(engine.found(), drafts.found({}, engine.pages))
    save(bench)
    assert not load(bench)
    for name in engine.pages:
        for source, target in zip(TABLE, ELSEWHERE, strict=True):
            assert torch.equal(engine.held(name, target), engine.held(name, source)), name
    counts = bench.counts()
    assert (counts["stored{chunk}"], counts["stored{drafts}"], counts["loaded{drafts}"]) == (2, 2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"profile": "p"}}, "sparse indexers with option 'profile': remove it"),
        ({"options": {"blend": {}}}, "sparse indexers with option 'blend': remove it"),
        ({"codes": CODES + 1}, "indexer.k_cache: pages of 1064 bytes for 8 tokens"),
        ({"dtype": "fp8_inc"}, "kv_cache_dtype='fp8_inc'"),
    ],
)
def test_what_is_refused(make_engine: MakeEngine, change: dict[str, Any], message: str) -> None:
    engine = make_engine(**change)
    with pytest.raises(UnsupportedModelError, match=message):
        engine.setup()


def test_layers_that_are_not_known_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.config.model_config.hf_text_config.num_hidden_layers -= 1
    with pytest.raises(UnsupportedModelError, match="latents of 3 layers, the model has 2"):
        engine.setup()
    engine = make_engine()
    specs = engine.own.kv_cache_groups[0].kv_cache_spec.kv_cache_specs
    specs["model.layers.0.self_attn.attn"] = replace(specs["model.layers.0.self_attn.attn"], tokens_per_state=4)
    with pytest.raises(UnsupportedModelError, match="several tokens in one latent"):
        engine.setup()


def test_blocks_that_are_not_whole_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    name = "model.layers.1.self_attn.indexer.k_cache"
    pages = engine.pages[name]
    for other in (pages[..., :-2], pages[..., :-2].contiguous(), pages.transpose(2, 3), pages[:, :, : BLOCK // 2]):
        engine.pages[name] = other
        with pytest.raises(UnsupportedModelError, match=f"{name}: the engine's blocks .*this attention backend"):
            engine.found()


class Served(Engine):
    """vLLM's scheduler and its calls of a worker's connector, around steps that write what follows from the tokens."""

    def __init__(self, checkpoint: Path, store: DictStore, patch: pytest.MonkeyPatch, **changes: Any) -> None:
        super().__init__(checkpoint, **changes)
        ours = real("cuvee.integrations.vllm.connector")
        patch.setattr(ours, "borrow_store", lambda urls, unnamed: store)
        patch.setattr(ours, "return_store", lambda urls: None)
        structured = real("vllm.v1.structured_output").StructuredOutputManager(self.config)
        self.config.cache_config.num_gpu_blocks = self.own.num_blocks
        kind = real("vllm.v1.core.sched.scheduler").Scheduler
        self.scheduler = kind(self.config, self.schedulers, structured, block_size=self.block)
        self.transfer = real("vllm.distributed.kv_transfer.kv_transfer_state")
        self.transfer.ensure_kv_transfer_initialized(self.config, self.own)
        self.worker = self.transfer.get_kv_transfer_group()
        self.worker.register_kv_caches(self.pages)
        self.computed = 0

    def close(self) -> None:
        self.transfer.ensure_kv_transfer_shutdown()
        self.scheduler.shutdown()

    def answer(self, name: str, prompt: Sequence[int]) -> int:
        """Serve a prompt; return how many tokens were computed for it."""
        utils = real("vllm.v1.core.kv_cache_utils")
        hasher = utils.get_request_block_hasher(self.block, real("vllm.utils.hashing").sha256)
        utils.init_none_hash(real("vllm.utils.hashing").sha256)
        params = real("vllm").SamplingParams(max_tokens=4)
        self.scheduler.add_request(
            real("vllm.v1.request").Request(name, list(prompt), params, None, block_hasher=hasher)
        )
        before = self.computed
        for _ in range(3000):
            if not self.scheduler.has_unfinished_requests():
                break
            self._step()
        else:
            raise AssertionError("never answered")
        self._step()  # what the request leaves behind
        wait_until(lambda: not self.worker._worker.saves._sizes, "all is stored")
        return self.computed - before

    def _step(self) -> None:
        output = self.scheduler.schedule()
        self.worker.handle_preemptions(output.kv_connector_metadata)
        mixin = real("vllm.v1.worker.kv_connector_model_runner_mixin").KVConnectorModelRunnerMixin
        context = real("vllm.forward_context").set_forward_context
        with context(None, self.config), mixin._get_kv_connector_output(output) as told:
            sampled = [self._compute(name, count) for name, count in output.num_scheduled_tokens.items()]
        names = list(output.num_scheduled_tokens)
        made = real("vllm.v1.outputs").ModelRunnerOutput(
            names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=told
        )
        self.scheduler.update_from_output(output, made)

    def _compute(self, name: str, count: int) -> list[int]:
        """Compute so many tokens of a request, having checked all before them; return what is sampled."""
        request = self.scheduler.requests[name]
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        ids, end = list(request.all_token_ids), request.num_computed_tokens
        for at in range(end):
            wrong = self._visit(table, at, _truth(ids[: at + 1]), write=at >= end - count)
            assert not wrong, f"{name}: token {at} of {wrong}"
        self.computed += count
        return [sum(ids) % 256] if end == len(ids) else []

    def _visit(self, table: Sequence[int], at: int, noise: torch.Tensor, write: bool) -> list[str]:
        """Write a token as vLLM's kernels do, or return the layers which hold another one."""
        wrong = []
        row = at % self.block
        for name in self.pages:
            page = self.held(name, table[at // self.block])
            if name.endswith("k_cache"):
                scales = self.block * self.codes
                parts = [page[row * self.codes : (row + 1) * self.codes], page[scales:].view(self.block, SCALES)[row]]
            else:
                parts = [page.view(self.block, -1)[row]]
            for part in parts:
                if write:
                    part.copy_(noise[: len(part)])
                elif not torch.equal(part, noise[: len(part)]):
                    wrong.append(name)
        return wrong


def _truth(ids: Sequence[int]) -> torch.Tensor:
    """Bytes of a token's pages, which follow from all tokens up to it."""
    seed = int.from_bytes(hashlib.sha256(repr(ids).encode()).digest()[:7], "little")
    return torch.randint(0, 256, (1152,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def served(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    """Makes engines, one after the other, in a group of one rank."""
    state = real("vllm.distributed.parallel_state")
    made: list[Served] = []

    def make(store: DictStore, **changes: Any) -> Served:
        while made:
            made.pop().close()
        made.append(Served(checkpoint, store, monkeypatch, **changes))
        return made[-1]

    config = Engine(checkpoint).config
    with real("vllm.config").set_current_vllm_config(config):
        state.init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, "gloo")
        state.initialize_model_parallel(1, 1)
    yield make
    while made:
        made.pop().close()
    state.destroy_model_parallel()
    state.destroy_distributed_environment()


@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
def test_a_prompt_is_restored_after_a_restart(served: Callable[..., Served], dtype: str) -> None:
    """By vLLM's scheduler: its chunks and its tail, in whole blocks; and a damaged chunk is computed."""
    prompt = [at * 37 % 251 for at in range(5 * BLOCK + 3)]
    store = DictStore()
    first = served(store, dtype=dtype)
    computed = first.answer("first", prompt)
    assert computed == len(prompt) + 3
    entries = dict(store.entries)
    again = served(store, dtype=dtype)
    assert again.answer("again", prompt) == computed - 5 * BLOCK
    assert again.answer("other", [1, *prompt]) == computed + 1, "another prompt"
    for key in entries:
        store.entries = dict(entries)
        store.entries[key] = store.entries[key][:-50] + bytes(50)
        left = served(store, dtype=dtype).answer("again", prompt)
        assert computed - 5 * BLOCK <= left <= computed
    other = served(store, dtype=dtype, codes=CODES // 2)
    assert other.answer("first", prompt) == computed, "another indexer"
