"""What lies in a real engine's pages, by value and by byte: what the model writes, what we read, what we restore.

    compute   the engine answers, and its full pages are stored: read as the model wrote them; their bytes are kept
    hit       the same prompts, found in the engine's own prefix cache
    load      all pages overwritten, the prefix cache emptied, the same prompts again: restored, byte for byte

A chunk is one block, so hit and load leave the same tokens to compute: a batch of the same size, in which even a
product of bfloat16 is rounded alike. So the answers must be equal to the last bit, whatever the CPU.

On a CPU with AMX the engine packs pages of bfloat16 in tiles; on any other these cases have pages like all others.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.vllm.engines import (
    Step,
    cuvee,
    import_vllm,
    need_vllm,
    run_script,
    run_steps,
    save_tiny_model,
    start_engine,
)

from cuvee.codec.paged import PagedCache
from cuvee.integrations.vllm.messages import Load, Save

pytestmark = pytest.mark.slow

# dtype, tokens of a block and of a chunk, model
CASES = {
    "bfloat16-32": ("bfloat16", 32, "llama"),
    "bfloat16-64": ("bfloat16", 64, "qwen2"),
    "bfloat16-128": ("bfloat16", 128, "qwen3"),
    "float32-32": ("float32", 32, "llama"),
}
LENGTHS = (300, 125, 257)  # of the prompts: the answer to the second fills its last block


@dataclass(frozen=True, slots=True)
class Seen:
    """What a case saw.

    Attributes:
        amx: whether the CPU has AMX.
        permuted: whether the connector found pages that no strides describe.
        misread: pages that the connector reads otherwise than the model wrote them.
        stored, loaded: how many pages were stored, and loaded.
        different: pages that a load left otherwise than they were when they were stored.
        answers: of each step.
    """

    amx: bool
    permuted: bool
    misread: list[str]
    stored: int
    loaded: int
    different: list[str]
    answers: list[Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """All cases, one engine after the other in one process."""
    need_vllm()
    folder = tmp_path_factory.mktemp("vllm_pages")
    for family in {family for _, _, family in CASES.values()}:
        save_tiny_model(family, folder / family)
    results = folder / "results.json"
    status, log = run_script(folder, __file__, str(folder), str(results))
    assert status == 0, log[-4000:]
    return {name: Seen(**one) for name, one in json.loads(results.read_text()).items()}


@pytest.mark.parametrize("case", CASES)
def test_the_connector_reads_what_the_model_wrote(case: str, seen: dict[str, Seen]) -> None:
    """In one piece, as of a prompt, and token by token, as of an answer."""
    _, block, _ = CASES[case]
    prompts, answered = (sum((length + more) // block for length in LENGTHS) for more in (0, Step().max_tokens - 1))
    assert prompts < answered == seen[case].stored
    assert seen[case].misread == []


@pytest.mark.parametrize("case", CASES)
def test_a_restored_page_is_the_engines_byte_for_byte(case: str, seen: dict[str, Seen]) -> None:
    _, block, _ = CASES[case]
    assert seen[case].loaded == sum((length - 1) // block for length in LENGTHS)
    assert seen[case].different == []


@pytest.mark.parametrize("case", CASES)
def test_what_is_loaded_is_as_good_as_the_engines_own_cache(case: str, seen: dict[str, Seen]) -> None:
    _, block, _ = CASES[case]
    computed, hit, loaded = seen[case].answers
    assert [answer["cached"] for answer in computed] == [0 for _ in LENGTHS]
    assert [answer["cached"] for answer in hit] == [(length - 1) // block * block for length in LENGTHS]
    assert loaded == hit


@pytest.mark.parametrize("case", CASES)
def test_pages_are_in_tiles_where_the_cpu_has_some(case: str, seen: dict[str, Seen]) -> None:
    """Or the others would not test what they say: vLLM 0.32 packs bfloat16 on every CPU that has AMX."""
    assert seen[case].permuted == (seen[case].amx and case.startswith("bfloat16"))


# What runs in the process ------------------------------------------------------------------------------------------


class Spy:
    """Stands between model and attention backend, and between a connector and its worker's side.

    Attributes:
        pages: the engine's tensors, by layer.
        cache: how the connector sees them.
        kept: bytes of the pages of each chunk that was stored, by digest.
        loaded: digest of what was loaded into a block.
        misread: pages that the connector reads otherwise than the model wrote them.
    """

    def __init__(self, block: int) -> None:
        self.pages: dict[str, torch.Tensor] = {}
        self.cache: PagedCache | None = None
        self.kept: dict[bytes, list[torch.Tensor]] = {}
        self.loaded: dict[int, bytes] = {}
        self.misread: list[str] = []
        self._block = block
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of each layer, by slot

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While an engine lives."""
        from cuvee.integrations.vllm.connector import CuveeConnector
        from cuvee.integrations.vllm.engine_pages import find_pages
        from cuvee.integrations.vllm.worker_load import WorkerLoads
        from cuvee.integrations.vllm.worker_save import WorkerSaves

        attach, save, start = CuveeConnector._attach, WorkerSaves.save, WorkerLoads.start

        def attaching(made: Any, worker: Any, kv_caches: dict[str, torch.Tensor]) -> None:
            self.pages = kv_caches
            attach(made, worker, kv_caches)
            self._watch(made._vllm_config)

        def finding(*arguments: Any) -> PagedCache:
            self.cache = find_pages(*arguments)
            return self.cache

        def saving(own: Any, saves: Sequence[Save]) -> None:
            for each in saves:
                (number,) = each.entry.blocks
                self.kept.setdefault(each.entry.digest, self.bytes_of(number))
                self._compare(number)
            save(own, saves)

        def starting(own: Any, loads: Sequence[Load]) -> None:
            for each in loads:
                self.loaded.update((entry.blocks[0], entry.digest) for entry in each.prefix)
            start(own, loads)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CuveeConnector, "_attach", attaching)
            patch.setattr("cuvee.integrations.vllm.connector.find_pages", finding)
            patch.setattr(WorkerSaves, "save", saving)
            patch.setattr(WorkerLoads, "start", starting)
            yield

    def bytes_of(self, number: int) -> list[torch.Tensor]:
        """Of a block, by layer: a copy."""
        return [tensor[number].contiguous().view(torch.uint8).clone() for tensor in self.pages.values()]

    def different(self) -> list[str]:
        """Loaded pages that are not what they were when they were stored."""
        return [
            f"block {number}, layer {layer}"
            for number, digest in self.loaded.items()
            for layer, (now, then) in enumerate(zip(self.bytes_of(number), self.kept[digest], strict=True))
            if not torch.equal(now, then)
        ]

    def _watch(self, vllm_config: Any) -> None:
        """Keep what the model writes from now on."""
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.models.utils import extract_layer_index

        layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, Attention)
        for name in sorted(self.pages, key=extract_layer_index):
            backend, pages = layers[name].impl, self.pages[name]
            shape = len(pages) * self._block, backend.num_kv_heads, backend.head_size
            held = pages.new_zeros(shape), pages.new_zeros(shape)
            self._written.append(held)
            backend.do_kv_cache_update = _recorded(backend.do_kv_cache_update, held)

    def _compare(self, number: int) -> None:
        """A block that the model has filled with what the connector reads there."""
        assert self.cache is not None
        slots = number * self._block + torch.arange(self._block)
        chunk = self.cache.read(slots, 0)
        for layer, (keys, values) in enumerate(self._written):
            if not (torch.equal(chunk.keys[layer], keys[slots]) and torch.equal(chunk.values[layer], values[slots])):
                self.misread.append(f"block {number}, layer {layer}")


def _recorded(write: Any, held: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """The backend's writer, which also puts keys and values by slot into `held`."""

    def writing(layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: Any, slots: torch.Tensor) -> None:
        write(layer, keys, values, cache, slots)
        there = slots >= 0
        for kept, new in zip(held, (keys, values), strict=True):
            kept[slots[there]] = new[: len(slots)][there]

    return writing


def _run(folder: Path, dtype: str, block: int, family: str) -> Seen:
    prompts = [random.Random(length).choices(range(1, 256), k=length) for length in LENGTHS]
    full = sum(length // block for length in LENGTHS)
    first = [Step(prompts, until=("vllm:cuvee_stored{kind=chunk}", full)), Step(prompts)]
    spy = Spy(block)
    with spy.watching():
        llm = start_engine(
            folder / family, dtype=dtype, block_size=block, enforce_eager=True, max_model_len=512,
            max_num_seqs=8, skip_tokenizer_init=True, kv_cache_memory_bytes=16 << 20, disable_log_stats=False, seed=0,
            kv_transfer_config=cuvee("memory://?max_gb=1", chunk_tokens=block),
        )  # fmt: skip
        try:
            answers = run_steps(llm, {"steps": [asdict(step) for step in first]})["steps"]
            for tensor in spy.pages.values():
                tensor.fill_(3.0)
            llm.reset_prefix_cache()
            answers += run_steps(llm, {"steps": [asdict(Step(prompts))]})["steps"]
        finally:
            llm.llm_engine.engine_core.shutdown()
    assert spy.cache is not None
    amx = torch.cpu._is_amx_tile_supported()
    return Seen(amx, spy.cache.permuted, spy.misread, len(spy.kept), len(spy.loaded), spy.different(), answers)


def _main(folder: Path, results: Path) -> None:
    import_vllm()
    results.write_text(json.dumps({name: asdict(_run(folder, *case)) for name, case in CASES.items()}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
