"""The two sides of the connector, each with a store that tests can break: `Desk` and `Bench`."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from tests.conftest import fitted_to
from tests.integrations.stores.dict_store import DictStore
from tests.waiting import wait_until

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.paged import PagedCache
from cuvee.codec.pages import PageOrder, PermutedPages
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.identity.lora_files import AdapterFiles, Adapters
from cuvee.integrations.identity.weights_name import WeightsName
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.messages import Blend, Entry, Load, Save, StepPlan
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.pages.layer_groups import LayerGroup
from cuvee.integrations.vllm.scheduler.request_record import RequestRecord
from cuvee.integrations.vllm.scheduler.side import SchedulerSide
from cuvee.integrations.vllm.setup import Setup
from cuvee.integrations.vllm.weights import Weights
from cuvee.integrations.vllm.worker.side import WorkerSide
from cuvee.naming.identity import Identity, PrefixChain, Scope, content_digest, store_key

BLOCK, CHUNK, BLOCKS = 8, 16, 24
LAYOUT = KVLayout("synthetic", (LayerLayout(2, 16, 16, Rope((1.0,) * 8)),) * 3, "bfloat16", 4096)
TENANT = "somebody"
_PATIENCE = 60.0  # seconds
IDENTITY = Identity("model", "tokenizer", b"l" * 16, b"", "lossless")


def patience() -> Iterator[None]:
    """Attempts for as long as threads may take that get no processor; the first ones follow at once."""
    until = time.monotonic() + _PATIENCE
    for number in itertools.count():
        yield
        if time.monotonic() > until:
            return
        if number >= 100:
            time.sleep(0.002)


def image(name: Any = "cat", start: Any = 0, tokens: Any = 4, content: str | None = None) -> SimpleNamespace:
    """A multimodal item by vLLM's name for it, with what the encoder is given: its content, by default the name."""
    pixels = torch.tensor([ord(letter) for letter in (repr(name) if content is None else content)])
    return SimpleNamespace(
        identifier=name, modality="image", mm_position=SimpleNamespace(offset=start, length=tokens),
        data={"pixel_values": SimpleNamespace(data=pixels)},
    )  # fmt: skip


LORA = SimpleNamespace(lora_int_id=1, lora_name="x", lora_path="p")


class NamedAdapters(Adapters):
    """Adapters whose names and paths tell their content; they have no files."""

    def find(self, number: int, name: str, path: str, since: float = 0.0) -> AdapterFiles | None:
        return AdapterFiles(path, f"{name}@{path}")


def make_request(
    name: str = "r", tokens: int = 100, ids: Sequence[int] | None = None, **changes: Any
) -> SimpleNamespace:
    """A request with the attributes that vLLM's have; its prompt is `ids`, or so many tokens that are always alike."""
    ids = [7 * index % 61 for index in range(tokens)] if ids is None else list(ids)
    tokens = len(ids)
    fields: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": ids,
        "prompt_embeds": None,
        "all_token_ids": list(ids),
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": 0,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "skip_reading_prefix_cache": False,
        "resumable": False,
        "kv_transfer_params": None,
        "arrival_time": time.time(),
        "block_hashes": [],
        "shared_prefix_boundary": 0,
    }
    request = SimpleNamespace(**{**fields, **changes})
    _hash_blocks(request)
    return request


def _hash_blocks(request: SimpleNamespace) -> None:
    """Name the request's full blocks that have no name yet, each by the one before it, as the engine does."""
    for start in range(BLOCK * len(request.block_hashes), request.num_tokens - BLOCK + 1, BLOCK):
        before = request.block_hashes[-1] if start else repr(request.cache_salt).encode()
        tokens = repr(request.all_token_ids[start : start + BLOCK]).encode()
        request.block_hashes.append(hashlib.sha256(before + tokens).digest())


def generate(request: SimpleNamespace, tokens: int) -> None:
    """The engine generates tokens for a request."""
    request.all_token_ids += [11] * tokens
    request.num_tokens += tokens
    _hash_blocks(request)


def scheduled(
    steps: Sequence[tuple[SimpleNamespace, int, int]],
    blocks: Callable[[str], tuple[list[int], ...]],
    new: bool = True,
    overwritten: Sequence[int] | None = None,
    copies: Sequence[tuple[int, int]] | None = None,
) -> SimpleNamespace:
    """vLLM's `SchedulerOutput`, of `Desk.plan`'s arguments and the blocks of each request."""
    fresh = [SimpleNamespace(req_id=r.request_id, num_computed_tokens=before) for r, before, _ in steps if new]
    old = [(r.request_id, before) for r, before, _ in steps if not new]
    return SimpleNamespace(
        scheduled_new_reqs=fresh,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in old], num_computed_tokens=[before for _, before in old]
        ),
        num_scheduled_tokens={r.request_id: count for r, _, count in steps},
        total_num_scheduled_tokens=sum(count for _, _, count in steps),
        kv_connector_block_state=SimpleNamespace(get_block_ids=blocks),
        new_block_ids_to_zero=overwritten,
        kv_cache_block_copies=copies,
    )


def _profile_for(asked: Mapping[str, Any]) -> Profile:
    """A profile with which a codec has this quality."""
    return Profile.unlearned(LAYOUT) if asked.get("quality") == "lossless" else fitted_to(LAYOUT)


class Desk:
    """A scheduler's side with its store and a clock that tests turn."""

    def __init__(
        self,
        shards: int = 1,
        loads: bool = True,
        stores: bool = True,
        prefix_caching: bool = True,
        profile: Profile | None = None,
        groups: tuple[LayerGroup, ...] = (),
        setup: Mapping[str, Any] | None = None,
        weights: WeightsName | None = None,
        **options: Any,
    ) -> None:
        self.now = 1000.0
        self.store = DictStore()
        self.recorder = Recorder()
        self.shards = shards
        opts = Options.from_dict(
            {"chunk_tokens": CHUNK, "profile": "P", "quality": "lossless", "decide": "always", **options}
        )
        self.chunk = opts.chunk_tokens
        profile = profile or _profile_for(opts.codec_quality)
        codec = Codec(profile, **opts.codec_quality)
        if codec.lossless:
            self.identity, quality = IDENTITY, "lossless"
        else:
            quality = f"step:{codec.step_index}"
            self.identity = replace(IDENTITY, profile=profile.id, quality=quality)
        engine = Setup(
            opts, LAYOUT, profile, quality, BLOCK, shards, loads, stores, prefix_caching, groups=groups, **(setup or {})
        )
        self.tables: tuple[list[int], ...] = (list(range(100, 200)),)  # the engine's blocks of every request
        self.side = SchedulerSide(
            engine, self.identity, self.store, self.recorder, NamedAdapters(), lambda: self.now,
            weights=weights,
        )  # fmt: skip

    def digests(self, request: SimpleNamespace, scope: Scope | None = None) -> list[bytes]:
        chain = PrefixChain(self.identity, scope or Scope(), self.chunk)
        return chain.digests(request.all_token_ids, request.num_tokens // self.chunk)

    def tail(self, request: SimpleNamespace, end: int, scope: Scope | None = None) -> bytes:
        """Digest of the tail of a request's first `end` tokens."""
        chain = PrefixChain(self.identity, scope or Scope(), self.chunk)
        chain.digests(request.all_token_ids, end // self.chunk)
        return chain.tails(request.all_token_ids, end // self.chunk, [end % self.chunk])[0]

    def put_tails(self, request: SimpleNamespace, *ends: int, tenant: str = "") -> None:
        for end in ends:
            for rank in range(self.shards):
                key = store_key(tenant, self.tail(request, end, Scope(tenant)), rank)
                self.store.entries[key] = b"blob"

    def put(self, request: SimpleNamespace, chunks: int, tenant: str = "", key_id: bytes = b"", first: int = 0) -> None:
        for digest in self.digests(request, Scope(tenant))[first:chunks]:
            for rank in range(self.shards):
                self.store.entries[store_key(tenant, digest, rank, key_id)] = b"blob"

    def segment(self, tokens: Sequence[int], tenant: str = "") -> bytes:
        """Digest of a segment."""
        return content_digest(self.identity, Scope(tenant), tokens)

    def put_segments(self, *segments: Sequence[int], tenant: str = "") -> None:
        for tokens in segments:
            for rank in range(self.shards):
                self.store.entries[store_key(tenant, self.segment(tokens, tenant), rank)] = b"blob"

    def write(self, plan: StepPlan) -> None:
        """What the workers do with a plan's saves."""
        for save in plan.last_saves + plan.saves:
            for rank in range(self.shards):
                self.store.entries[store_key(save.tenant, save.entry.digest, rank)] = b"blob"

    def matched(self, request: SimpleNamespace, computed: int = 0) -> tuple[int, bool]:
        """Ask as the engine does until there is an answer."""
        for _ in patience():
            tokens, later = self.side.matched_tokens(request, computed)
            if tokens is not None:
                return tokens, later
            self.plan()  # another request's step
        raise AssertionError("no answer")

    def plan(
        self, *steps: tuple[SimpleNamespace, int, int], new: bool = True, overwritten: Sequence[int] | None = None,
        copies: Sequence[tuple[int, int]] | None = None,
    ) -> StepPlan:  # fmt: skip
        """The plan of a step that computes `(request, tokens before, tokens in this step)`.

        Args:
            steps: request by request.
            new: whether the engine runs these requests for the first time.
            overwritten: blocks that the engine fills with zeros before the step.
            copies: pairs of blocks, of which it copies the first to the second before the step.
        """
        for request, before, count in steps:
            request.num_computed_tokens = before + count  # as the engine does once it has planned a step
        return self.side.plan(scheduled(steps, lambda name: self.tables, new, overwritten, copies))

    def record(self, name: str = "r") -> RequestRecord:
        """What is known of a request."""
        record = self.side._records.get(name)
        assert record is not None
        return record

    def unstored(self) -> dict[str, float]:
        """Tokens that are not stored, by reason."""
        return {label: value for (name, label), value in self.recorder.totals().items() if name == "unstored_tokens"}

    def lookups(self) -> dict[str, float]:
        return {label: value for (name, label), value in self.recorder.totals().items() if name == "lookups"}

    def close(self) -> None:
        """Stop its threads."""
        self.store.before = lambda operation: None
        self.side.close()


def make_pages(layout: KVLayout, device: torch.device, permuted: bool) -> PagedCache:
    """Pages of NaN: whatever is not restored shows. If `permuted`, a layer's K and V lie in one memory, in no order."""

    def page(heads: int, size: int) -> torch.Tensor:
        return torch.full((BLOCKS, BLOCK, heads, size), torch.nan, dtype=layout.torch_dtype, device=device)

    def mixed(layer: LayerLayout) -> list[PermutedPages]:
        sizes = [BLOCK * layer.kv_heads * size for size in (layer.head_dim, layer.value_dim)]
        places = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(3)).split(sizes)
        memory = torch.full([BLOCKS * sum(sizes)], torch.nan, dtype=layout.torch_dtype)
        orders = [PageOrder(part.view(BLOCK, layer.kv_heads, -1), BLOCKS, sum(sizes)) for part in places]
        return [PermutedPages(memory[: order.span], order) for order in orders]

    if permuted:
        pairs = [mixed(layer) for layer in layout.layers]
        return PagedCache(layout, [keys for keys, _ in pairs], [values for _, values in pairs])
    return PagedCache(
        layout,
        [page(layer.kv_heads, layer.head_dim) for layer in layout.layers],
        [page(layer.kv_heads, layer.value_dim) for layer in layout.layers],
    )


def poison(cache: PagedCache) -> None:
    """Fill all pages with NaN."""
    layout, slots = cache.layout, torch.arange(BLOCKS * BLOCK, device=cache.device)

    def unit(heads: int, size: int) -> torch.Tensor:
        return torch.full((len(slots), heads, size), torch.nan, dtype=layout.torch_dtype, device=cache.device)

    cache.write(
        [unit(layer.kv_heads, layer.head_dim) for layer in layout.layers],
        [unit(layer.kv_heads, layer.value_dim) for layer in layout.layers],
        slots,
    )


class Served(torch.nn.Module):
    """A model whose weights tests change while a worker looks at them: at every call, as if time flew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8, bias=False)
        self.known = True
        self.set("a")
        time = itertools.count()
        self.weights = Weights(self.layer, self._read, lambda: float(next(time)))

    def compute_logits(self) -> None:
        """By which a model of vLLM is known."""

    def set(self, name: str) -> None:
        """Change the weights in place."""
        torch.nn.init.constant_(self.layer.weight, ord(name))

    def _read(self, model: torch.nn.Module) -> Any:
        if not self.known:
            raise LookupError("packed")
        return model.named_parameters()


class Bench:
    """A worker, its store, its pages, and a sequence of 8 chunks."""

    def __init__(
        self,
        rank: int = 0,
        codec: dict[str, Any] | None = None,
        store: DictStore | None = None,
        sequence: KVChunk | None = None,
        device: torch.device | None = None,
        profile: Profile | None = None,
        permuted: bool = False,
        groups: tuple[LayerGroup, ...] = (),
        shards: int = 1,
        weights: Weights | None = None,
        cache: PagedCache | None = None,
        setup: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.options = Options.from_dict({"chunk_tokens": CHUNK, "profile": "P", "quality": "lossless", **options})
        asked = {"quality": "lossless", **(codec or {})}
        profile = profile or _profile_for(asked)
        self.codec = Codec(profile, **asked)
        self.setup = Setup(
            self.options, self.codec.profile.layout, profile, self.codec.quality_name, BLOCK, shards, True, True, True,
            groups=groups, alone=shards == 1, **(setup or {}),
        )  # fmt: skip
        self.store = store or DictStore()
        self.recorder = Recorder(rank)
        self.worker = WorkerSide(self.setup, rank, self.codec, self.store, self.recorder, weights)
        self.cache = cache or make_pages(LAYOUT, device or torch.device("cpu"), permuted)
        self.worker.attach(self.cache)
        noise = torch.randn(2, 3, 8 * CHUNK, 2, 16).bfloat16()
        self.sequence = sequence or KVChunk(noise[0], noise[1], LAYOUT)
        self.digests = [bytes([index]) * 32 for index in range(8)]
        self.rank = rank

    def key(self, chunk: int) -> str:
        return store_key(TENANT, self.digests[chunk], self.rank, *self.codec.key_ids[:1])

    def fill(self, blocks: list[int], tokens: int) -> None:
        """The engine computes the sequence's first tokens into `blocks`."""
        self.cache.write(
            [keys[:tokens].to(self.cache.device) for keys in self.sequence.keys],
            [values[:tokens].to(self.cache.device) for values in self.sequence.values],
            slots(blocks, 0, tokens).to(self.cache.device),
        )

    def saves(self, blocks: list[int], chunks: range) -> list[Save]:
        return [Save(TENANT, self.chunk(c).within([blocks], [BLOCK])) for c in chunks]

    def step(
        self, number: int, saves: list[Save], last: Sequence[Save] = (), error: BaseException | None = None,
        confirmed: int = 0,
    ) -> None:  # fmt: skip
        """A step in the order of vLLM's `_get_kv_connector_output`, with a forward that raises `error`."""
        self.worker.begin_step(number, confirmed)
        self.worker.saves.save(list(last))
        try:
            if error is not None:
                raise error
        finally:
            self.worker.end_step()
            self.worker.saves.save(saves)

    def chunk(self, at: int) -> Entry:
        """Chunk number `at` of the sequence."""
        return Entry("chunk", self.digests[at], at * CHUNK, CHUNK)

    def save_tail(self, blocks: list[int], end: int) -> Save:
        """The tail of the sequence's first `end` tokens, which lie in `blocks`."""
        start = end // CHUNK * CHUNK
        return Save(TENANT, Entry("tail", bytes([100 + end]) * 32, start, end - start).within([blocks], [BLOCK]))

    def save_segment(self, blocks: list[int], start: int, tokens: int) -> Save:
        """Some tokens of the sequence, which lies in `blocks`, as a segment."""
        return Save(TENANT, replace(self.piece(start, tokens, 0), start=start).within([blocks], [BLOCK]))

    def piece(self, start: int, tokens: int, at: int) -> Entry:
        """Tokens of the sequence from `start` on, for a prompt that has them from position `at` on."""
        return Entry("segment", bytes([start, tokens]) * 16, at, tokens)

    def segment_key(self, start: int, tokens: int) -> str:
        return store_key(TENANT, self.piece(start, tokens, 0).digest, self.rank, *self.codec.key_ids[:1])

    def load_blend(
        self, blocks: list[int], pieces: list[Entry], end: int, start: int = 0, exact: int = 0, request: str = "r"
    ) -> Load:
        """A load of the sequence's tokens `start … exact`, whole chunks, and of pieces behind them."""
        held = blocks[: -(-end // BLOCK)]
        placed = [piece.within([held], [BLOCK]) for piece in pieces]
        blend = Blend(list(range(end + 1)), max(start, exact), placed, 0.5, held)
        prefix = [self.chunk(at).within([held], [BLOCK]) for at in range(start // CHUNK, exact // CHUNK)]
        return Load(request, TENANT, prefix, start, end, held[start // BLOCK :], blend)

    def _load(self, request: str, prefix: list[Entry], blocks: list[int], start: int, end: int) -> Load:
        first = start // CHUNK * CHUNK // BLOCK
        held = [*[-1] * first, *blocks][: -(-end // BLOCK)]
        placed = [entry.within([held], [BLOCK]) for entry in prefix]
        return Load(request, TENANT, placed, start, end, held[start // BLOCK :])

    def store_all(self, chunks: int = 8) -> None:
        blocks = list(range(2 * chunks))
        self.fill(blocks, chunks * CHUNK)
        self.worker.saves.save(self.saves(blocks, range(chunks)))
        self.drain()
        poison(self.cache)

    def drain(self) -> None:
        """Wait until nothing is being stored."""
        wait_until(lambda: not self.worker.saves._sizes, "chunks are stored")

    def load(self, blocks: list[int], start: int, end: int, request: str = "r") -> Load:
        """A load of whole chunks into `blocks`, from the first chunk's first block on."""
        return self._load(request, [*map(self.chunk, range(start // CHUNK, end // CHUNK))], blocks, start, end)

    def load_now(self, loads: Sequence[Load]) -> None:
        """Start loads, and wait until those without a blend have ended or are given up. The engine has not heard."""
        self.worker.loads.start(loads)
        state, own = self.worker._state, self.worker.loads
        names = {load.request for load in loads if load.blend is None}
        with state.progress:
            state.progress.wait_for(lambda: not names & own._jobs.keys(), state.timeout + 0.05)
        for job in own._jobs.copy().values():
            if job.load.request in names:
                with job.lock:  # its pages may be being written
                    pass
                own._give_up(job)

    def ended(self) -> dict[str, bool]:
        """The requests whose loads have ended since the last call, and whether each failed as a whole."""
        return {job.load.request: job.failed for job in self.worker.loads.take_ended()}

    def wait(self, *requests: str) -> None:
        """Poll as the engine does until the loads have arrived."""
        missing = set(requests or ("r",))
        for _ in patience():
            missing -= self.worker.loads.take_arrived()
            if not missing:
                return
        raise AssertionError(f"{missing} never arrived")

    def held(self, blocks: list[int], start: int, end: int, first: int = 0) -> bool:
        """Whether the pages hold tokens `start … end` of the sequence; `blocks` begin at token `first`."""
        chunk = self.cache.read(slots(blocks, start - first, end - first).to(self.cache.device), start)
        return _same(chunk, self.sequence, start, end)

    def counts(self) -> dict[str, Any]:
        """What was counted, by `name{label}`; of histograms, how often."""
        totals = self.recorder.totals().items()
        return {f"{name}{{{label}}}" if label else name: value for (name, label), value in totals}

    def close(self) -> None:
        """Stop its threads."""
        self.store.before = lambda operation: None
        self.worker.close()


def slots(blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
    """The slots of these tokens of a request that has these blocks."""
    tokens = torch.arange(start, end)
    return torch.tensor(blocks)[tokens // BLOCK] * BLOCK + tokens % BLOCK


def _same(chunk: KVChunk, sequence: KVChunk, start: int, end: int) -> bool:
    return all(
        torch.equal(mine.cpu(), theirs[start:end])
        for mine, theirs in zip(chunk.keys + chunk.values, sequence.keys + sequence.values, strict=True)
    )
