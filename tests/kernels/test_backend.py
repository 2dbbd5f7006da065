"""The backend `triton` as a whole: it reads the blobs of the CPU and writes blobs that the CPU reads, in one batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.codec.test_paged import PERMUTED, poisoned
from tests.conftest import decoded_layers
from tests.forked import SECONDS, works_in_child, works_in_child_while_held
from tests.predicting import VOCABULARY, predicting, with_sinks

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.cpu.pool import Pool
from cuvee.codec.errors import CorruptError, FormatError, InputError, UnsupportedModelError
from cuvee.codec.format.container import read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.kernels.devices import Mark

MakeCodec = Callable[..., Codec]
CASES = [
    ("bfloat16", "layer"),
    ("float16", "unit"),
    ("interleaved", "all"),
    ("irregular", "layers:2"),
    ("mqa", "head"),
    ("narrow-values", "layer"),
    ("no-rope", "head"),
    ("partial", "unit"),
    ("yarn", "layer"),
]
# Of these the kernels of the entropy coder run too; elsewhere `plain_coder` stands in for them.
WHOLE = {("partial", "unit")}
BLOCK_TOKENS = 16


def tensors(chunk: KVChunk) -> list[torch.Tensor]:
    return [unit.cpu() for pair in zip(chunk.keys, chunk.values, strict=True) for unit in pair]


def on(device: torch.device, chunk: KVChunk) -> KVChunk:
    return KVChunk([k.to(device) for k in chunk.keys], [v.to(device) for v in chunk.values], chunk.layout, chunk.start)


def assert_close(got: KVChunk, want: KVChunk, rounding: float) -> None:
    """Equal but for the rounding of sums and products, relative to the largest value of a unit."""
    assert got.start == want.start and got.layout == want.layout
    for a, b in zip(tensors(got), tensors(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        limit = rounding * float(b.float().abs().max())
        assert float((a.float() - b.float()).abs().max()) <= limit


# A bfloat16 product rounds both factors (2**-9 each, relative) and the result; a float32 one is far finer.
ROUNDING = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-16}


@pytest.fixture
def coder(request: pytest.FixtureRequest) -> None:
    """The kernels of the entropy coder for the cases of WHOLE, their references for the others."""
    if (request.getfixturevalue("name"), request.getfixturevalue("group")) not in WHOLE:
        request.getfixturevalue("plain_coder")


@pytest.mark.usefixtures("coder")
@pytest.mark.parametrize(("name", "group"), CASES)
def test_reads_the_blobs_of_the_cpu(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, make_codec: MakeCodec, name: str, group: str
) -> None:
    cpu, triton = make_codec(name, group, step=0.25), make_codec(name, group, step=0.25, backend="triton")
    blob = cpu.encode(make_chunk(layouts[name], 7, start=5))
    for start in (None, 1000) if layouts[name].relocatable else (None,):
        got, want = triton.decode(blob, start, device=device), cpu.decode(blob, start)
        assert_close(got, want, ROUNDING[layouts[name].dtype])


@pytest.mark.usefixtures("coder")
@pytest.mark.parametrize(("name", "group"), CASES)
def test_the_cpu_reads_its_blobs(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, make_codec: MakeCodec, name: str, group: str
) -> None:
    chunk = make_chunk(layouts[name], 7, start=5)
    cpu, triton = make_codec(name, group, step=0.25), make_codec(name, group, step=0.25, backend="triton")
    blob, mine = cpu.encode(chunk), triton.encode(on(device, chunk))
    assert abs(len(mine) - len(blob)) <= 0.002 * len(blob) + 8
    want, got = cpu.decode(blob), cpu.decode(mine)
    # The transforms differ in their last bits, so a level here and there is another one: by one step.
    differ = [float((a != b).double().mean()) for a, b in zip(tensors(got), tensors(want), strict=True)]
    error = [float((a.float() - b.float()).norm()) for a, b in zip(tensors(want), tensors(chunk), strict=True)]
    mine_error = [float((a.float() - b.float()).norm()) for a, b in zip(tensors(got), tensors(chunk), strict=True)]
    assert max(differ) < 0.05
    np.testing.assert_allclose(mine_error, error, rtol=0.01)


@pytest.mark.parametrize("name", ["bfloat16", "irregular", "yarn"])
def test_lossless_is_the_same_bytes(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, make_codec: MakeCodec, name: str,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if name != "yarn":
        request.getfixturevalue("plain_coder")
    chunk = make_chunk(layouts[name], 5, start=5)
    cpu, triton = make_codec(name, "lossless"), make_codec(name, "lossless", backend="triton")
    blob = cpu.encode(chunk)
    assert triton.encode(on(device, chunk)) == blob
    for got, want in zip(tensors(triton.decode(blob, device=device)), tensors(chunk), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert_close(triton.decode(blob, 99, device=device), cpu.decode(blob, 99), ROUNDING[layouts[name].dtype])


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("group", ["layer", "lossless"])
def test_a_run_of_tokens(
    device: torch.device,
    layouts: dict[str, KVLayout],
    make_chunk: Any,
    make_codec: MakeCodec,
    group: str,
) -> None:
    quality = {} if group == "lossless" else {"step": 0.25}
    cpu, triton = make_codec("gqa", group, **quality), make_codec("gqa", group, backend="triton", **quality)
    blob = cpu.encode(make_chunk(layouts["gqa"], 12, start=5))
    got = triton.decode(blob, tokens=range(3, 8), device=device)
    assert_close(got, cpu.decode(blob, tokens=range(3, 8)), 2**-15)
    assert got.tokens == 5
    # Moved so far down that the first tokens of the chunk, which are not wanted, would lie before position 0.
    assert_close(
        triton.decode(blob, 0, tokens=range(9, 12), device=device), cpu.decode(blob, 0, tokens=range(9, 12)), 2**-15
    )


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("group", ["head", "heads:2", "layers:2", "lossless"])
def test_layers_alone(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, make_codec: MakeCodec, group: str
) -> None:
    quality = {} if group == "lossless" else {"step": 0.25}
    cpu, triton = make_codec("gqa", group, **quality), make_codec("gqa", group, backend="triton", **quality)
    blob = cpu.encode(make_chunk(layouts["gqa"], 4))
    for first, end in ((0, 1), (1, 3)):
        want, got = (
            decoded_layers(cpu, blob, range(first, end), 50),
            decoded_layers(triton, blob, range(first, end), 50, device=device),
        )
        for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=2**-14 * float(b.abs().max()))


@pytest.fixture
def predicting_codecs(fitted: Callable[[str, str], Profile]) -> Callable[[str, str], tuple[Codec, Codec]]:
    """predicting_codecs(layout name, group) -> codecs of the CPU and of the device, whose profile has a token table."""

    def make(name: str, group: str) -> tuple[Codec, Codec]:
        profile = with_sinks(predicting(fitted(name, group)))
        return Codec(profile, step=0.25), Codec(profile, step=0.25, backend="triton")

    return make


def ids_of(tokens: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(tokens).integers(0, VOCABULARY, tokens)


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("gqa", "layers:2"),
        ("gqa", "heads:2"),
        ("irregular", "layer"),
        ("bfloat16", "head"),
        ("float16", "all"),
        ("yarn", "unit"),
    ],
)
def test_predictions_are_those_of_the_cpu(
    device: torch.device,
    layouts: dict[str, KVLayout],
    make_chunk: Any,
    predicting_codecs: Callable[[str, str], tuple[Codec, Codec]],
    name: str,
    group: str,
) -> None:
    cpu, triton = predicting_codecs(name, group)
    for start, tokens in ((0, 9), (2, 5), (100, 7)):
        chunk, ids = make_chunk(layouts[name], tokens, start=start), ids_of(tokens)
        blob = cpu.encode(chunk, tokens=ids)
        assert read_header(blob).token_id_bytes and blob != cpu.encode(chunk)
        for to in (None, 1000) if layouts[name].relocatable else (None,):
            got = triton.decode(blob, to, device=device)
            assert_close(got, cpu.decode(blob, to), ROUNDING[layouts[name].dtype])
            assert got.token_ids is not None and np.array_equal(got.token_ids, ids)
        mine = triton.encode(on(device, chunk), tokens=ids)
        assert abs(len(mine) - len(blob)) <= 0.002 * len(blob) + 8
        want, got = cpu.decode(blob), cpu.decode(mine)
        differ = [float((a != b).double().mean()) for a, b in zip(tensors(got), tensors(want), strict=True)]
        assert max(differ) < 0.05
        part = triton.decode(blob, tokens=range(1, 4), device=device)
        assert_close(part, cpu.decode(blob, tokens=range(1, 4)), ROUNDING[layouts[name].dtype])
    for first, end in ((0, 1), (1, layouts[name].num_layers)):
        keys, values = decoded_layers(cpu, blob, range(first, end))
        theirs = decoded_layers(triton, blob, range(first, end), device=device)
        for a, b in zip([*theirs[0], *theirs[1]], [*keys, *values], strict=True):
            torch.testing.assert_close(
                a.cpu().float(), b.float(), rtol=0, atol=ROUNDING[layouts[name].dtype] * float(b.abs().max())
            )


@pytest.mark.usefixtures("plain_coder")
def test_chunks_with_and_without_ids_in_one_call(
    device: torch.device,
    layouts: dict[str, KVLayout],
    make_chunk: Any,
    predicting_codecs: Callable[[str, str], tuple[Codec, Codec]],
) -> None:
    cpu, triton = predicting_codecs("gqa", "layer")
    chunk = make_chunk(layouts["gqa"], 12)
    cache = PagedCache.of_chunk(on(device, chunk))
    slots = [torch.arange(0, 5, device=device), torch.arange(5, 12, device=device), torch.arange(2, 6, device=device)]
    ids = [ids_of(5), None, ids_of(4)]
    blobs = triton.encode(PagedChunks(cache, slots, [0, 5, 2], tokens=ids))
    assert [read_header(blob).token_id_bytes for blob in blobs] == [10, 0, 8]
    target = PagedCache.empty(layouts["gqa"], 16, range(layouts["gqa"].num_layers), device)
    into = [torch.arange(a, b, device=device) for a, b in ((0, 5), (5, 12), (12, 16))]
    triton.decode_paged(blobs, target, into).check()
    for blob, at, start in zip(blobs, into, (0, 5, 2), strict=True):
        got = target.chunk(at, start)
        assert_close(got, cpu.decode(blob), ROUNDING[layouts["gqa"].dtype])


class Pages:
    """A cache of sevens on the device, K and V packed in one tensor per layer, with room for several chunks."""

    def __init__(self, layout: KVLayout, device: torch.device, dtype: torch.dtype | None = None, blocks: int = 8):
        layer = layout.layers[0]
        assert layer.head_dim == layer.value_dim
        shape = (blocks, layer.kv_heads, BLOCK_TOKENS, 2 * layer.head_dim)
        self.memory = [torch.full(shape, 7.0).to(dtype or layout.torch_dtype).to(device) for _ in layout.layers]
        views = [memory.transpose(1, 2) for memory in self.memory]
        scales = [0.5] * layout.num_layers if dtype else None
        self.cache = PagedCache(
            layout,
            [view[..., : layer.head_dim] for view in views],
            [view[..., layer.head_dim :] for view in views],
            scales,
            scales,
        )


def test_pages_that_no_strides_describe_are_refused(layouts: dict[str, KVLayout], make_codec: MakeCodec) -> None:
    """Of the CPU, which under the interpreter is a device; on a GPU such a cache cannot be described at all."""
    from cuvee.kernels.chunks import CacheMemory

    cache = poisoned(layouts["gqa"], PERMUTED)
    with pytest.raises(UnsupportedModelError, match="must have values at fixed strides for the backend 'triton'"):
        CacheMemory.of(cache)
    if not torch.cuda.is_available():
        codec = make_codec("gqa", "lossless", backend="triton")
        with pytest.raises(UnsupportedModelError, match="must have values at fixed strides for the backend 'triton'"):
            codec.encode(PagedChunks(cache, [torch.arange(4)], [0]))


@pytest.fixture
def slots(device: torch.device) -> list[torch.Tensor]:
    """Three chunks of different lengths in no order."""
    mixed = torch.randperm(8 * BLOCK_TOKENS, generator=torch.Generator().manual_seed(0)).to(device)
    return [mixed[:9], mixed[40:41], mixed[50:54]]


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize(
    ("group", "workspace", "dtype"),
    [
        ("layer", 1, None),  # a chunk per batch
        ("layer", 1 << 30, None),
        ("lossless", 1, None),
        ("lossless", 1 << 30, torch.float8_e4m3fn),
    ],
)
def test_many_chunks_from_and_into_pages(
    device: torch.device,
    layouts: dict[str, KVLayout],
    make_chunk: Any,
    make_codec: MakeCodec,
    slots: list[torch.Tensor],
    group: str,
    workspace: int,
    dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cuvee.codec.backends import get_backend

    backend = get_backend("triton", device.type)
    monkeypatch.setattr(backend, "workspace_bytes", workspace)
    layout, starts = layouts["bfloat16"], [3, 0, 500]
    quality = {} if group == "lossless" else {"step": 0.25}
    cpu, triton = make_codec("bfloat16", group, **quality), make_codec("bfloat16", group, backend="triton", **quality)
    source, reference = Pages(layout, device, dtype), Pages(layout, torch.device("cpu"), dtype)
    for number, (at, start) in enumerate(zip(slots, starts, strict=True)):
        chunk = make_chunk(layout, len(at), number, start)
        for pages in (source, reference):
            here = on(pages.cache.device, chunk)
            pages.cache.write(here.keys, here.values, at.to(pages.cache.device))
    blobs = triton.encode(PagedChunks(source.cache, slots, starts))
    host_slots = [at.cpu() for at in slots]
    wanted = cpu.encode(PagedChunks(reference.cache, host_slots, starts))
    if group == "lossless":
        assert blobs == wanted
    for mine, theirs in zip(blobs, wanted, strict=True):
        assert abs(len(mine) - len(theirs)) <= 0.01 * len(theirs) + 8

    target, expected = Pages(layout, device, dtype), Pages(layout, torch.device("cpu"), dtype)
    moved = [100, 0, 2000]
    triton.decode_paged(wanted, target.cache, slots, moved).check()
    cpu.decode_paged(wanted, expected.cache, host_slots, moved).check()
    rounding = 2**-3 if dtype else 2**-6  # fp8: a last bit
    for got, want in zip(target.memory, expected.memory, strict=True):
        a, b = got.cpu().float(), want.float()
        assert bool(((a == 7) == (b == 7)).all()) or dtype is not None
        assert float((a - b).abs().max()) <= rounding * float(b.abs().max())
    free = torch.ones(8 * BLOCK_TOKENS, dtype=torch.bool)
    free[torch.cat(host_slots)] = False
    for got in target.memory:
        by_slot = got.cpu().float().transpose(1, 2).flatten(0, 1)
        assert bool((by_slot[free] == 7).all())


@pytest.mark.usefixtures("plain_coder")
def test_blobs_of_several_qualities_in_one_call(
    device: torch.device,
    layouts: dict[str, KVLayout],
    make_chunk: Any,
    make_codec: MakeCodec,
    slots: list[torch.Tensor],
) -> None:
    layout = layouts["bfloat16"]
    codecs = [make_codec("bfloat16", "layer", step=step) for step in (0.1, 0.5)]
    profile = codecs[0].profile
    codecs.append(Codec(profile, "lossless"))
    blobs = [codec.encode(make_chunk(layout, len(at))) for codec, at in zip(codecs, slots, strict=True)]
    target, expected = Pages(layout, device), Pages(layout, torch.device("cpu"))
    Codec(profile, step=0.3, backend="triton").decode_paged(blobs, target.cache, slots).check()
    codecs[0].decode_paged(blobs, expected.cache, [at.cpu() for at in slots]).check()
    for got, want in zip(target.memory, expected.memory, strict=True):
        assert float((got.cpu().float() - want.float()).abs().max()) <= 2**-6 * float(want.float().abs().max())


@pytest.mark.usefixtures("plain_coder")
def test_a_slot_beyond_the_cache_is_an_error(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, make_codec: MakeCodec
) -> None:
    layout = layouts["bfloat16"]
    triton = make_codec("bfloat16", "layer", step=0.25, backend="triton")
    chunk = on(device, make_chunk(layout, 4))
    pages = Pages(layout, device)
    beyond = torch.tensor([0, 1, 8 * BLOCK_TOKENS, 3], device=device)
    pending = triton.decode_paged([triton.encode(chunk)], pages.cache, [beyond])
    with pytest.raises(InputError, match="beyond the cache"):
        pending.check()
    with pytest.raises(InputError, match="beyond the cache"):
        triton.encode(PagedChunks(pages.cache, [beyond], [0]))


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
@pytest.mark.parametrize(
    ("group", "bad", "message"),
    [
        ("layer", float("nan"), "NaN"),
        ("layer", float("inf"), "NaN"),
        ("layer", 1e30, "steps large"),
    ],
)
def test_values_that_cannot_be_coded(
    device: torch.device,
    layouts: dict[str, KVLayout],
    make_chunk: Any,
    make_codec: MakeCodec,
    group: str,
    bad: float,
    message: str,
) -> None:
    chunk = on(device, make_chunk(layouts["gqa"], 5))
    chunk.values[1][4, 1, 3] = bad
    with pytest.raises(InputError, match=message):
        make_codec("gqa", group, step=0.25, backend="triton").encode(chunk)


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("group", ["layer", "lossless"])
def test_damage_is_found(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, make_codec: MakeCodec, group: str
) -> None:
    quality = {} if group == "lossless" else {"step": 0.25}
    triton = make_codec("gqa", group, backend="triton", **quality)
    blob = make_codec("gqa", group, **quality).encode(make_chunk(layouts["gqa"], 20))
    for at in range(0, len(blob), max(len(blob) // 60, 1)):
        with pytest.raises((CorruptError, FormatError)):
            triton.decode(blob[:at] + bytes([blob[at] ^ 0x10]) + blob[at + 1 :], device=device)


def test_nothing_waits_but_what_says_so(
    device: torch.device,
    layouts: dict[str, KVLayout],
    make_chunk: Any,
    make_codec: MakeCodec,
    slots: list[torch.Tensor],
    waits: list[str],
) -> None:
    layout = layouts["bfloat16"]
    triton = make_codec("bfloat16", "layer", step=0.25, backend="triton")
    pages = Pages(layout, device)
    triton.encode(PagedChunks(pages.cache, slots, [0, 0, 0]))  # learns the profile and uploads it, which waits
    waits.clear()
    blobs = triton.encode(PagedChunks(pages.cache, slots, [0, 0, 0]))
    assert len(waits) == 2, waits  # the sizes, the bytes
    waits.clear()
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")  # torch's own watch over what waits
    try:
        pending = triton.decode_paged(blobs, pages.cache, slots)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert waits == []
    pending.check()
    assert len(waits) == 1


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls made that wait for a device: copies to the host, decisions on a tensor's value, synchronization."""
    found: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in ("cpu", "item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
        watch(torch.Tensor, name)
    watch(Mark, "wait")
    return found


@pytest.mark.usefixtures("plain_coder")
def test_unwanted_tokens_stay_out(
    device: torch.device,
    layouts: dict[str, KVLayout],
    make_chunk: Any,
    make_codec: MakeCodec,
    slots: list[torch.Tensor],
) -> None:
    layout = layouts["bfloat16"]
    triton = make_codec("bfloat16", "layer", step=0.25, backend="triton")
    blob = triton.encode(on(device, make_chunk(layout, 9)))
    at = slots[0].clone()
    at[::2] = NOWHERE
    pages = Pages(layout, device)
    triton.decode_paged([blob], pages.cache, [at]).check()
    by_slot = pages.memory[0].cpu().float().transpose(1, 2).flatten(0, 1)
    assert bool((by_slot[slots[0][::2].cpu()] == 7).all())
    assert not bool((by_slot[slots[0][1::2].cpu()] == 7).all(dim=(1, 2)).any())


def test_a_chunk_that_no_launch_takes_is_refused(
    device: torch.device,
    layouts: dict[str, KVLayout],
    make_chunk: Any,
    make_codec: MakeCodec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cuvee.kernels import backend

    monkeypatch.setattr(backend, "MAX_TOKENS", 4)
    triton = make_codec("gqa", "layer", step=0.25, backend="triton")
    chunk = make_chunk(layouts["gqa"], 5)
    with pytest.raises(InputError, match="chunk: must have at most 4 tokens on a GPU, got 5"):
        triton.encode(on(device, chunk))
    with pytest.raises(InputError, match="chunk: must have at most 4 tokens on a GPU, got 5"):
        triton.decode(make_codec("gqa", "layer", step=0.25).encode(chunk), device=device)


def test_batches_keep_to_both_limits() -> None:
    from cuvee.kernels.workspace import batches

    runs = list(batches([3, 3, 3, 9, 1, 1, 1], 6, 2))
    assert [(run.start, run.stop) for run in runs] == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
    assert list(batches([], 6, 2)) == []


def test_many_bytes_go_through_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuvee.kernels import upload

    def thread(item: int) -> tuple[int, int]:
        if item == 7:
            raise CorruptError("the seventh")
        return item, threading.get_ident()

    own = threading.get_ident()
    assert upload.for_each(thread, range(5), upload.PARALLEL_BYTES - 1) == [(item, own) for item in range(5)]
    items, _ = zip(*upload.for_each(thread, range(5), upload.PARALLEL_BYTES), strict=True)
    assert items == (0, 1, 2, 3, 4)
    monkeypatch.setattr(upload, "_pool", Pool(2))
    together = threading.Barrier(2)  # two jobs that wait for each other, so two threads
    assert sorted(upload.for_each(lambda _: together.wait(SECONDS), range(2), upload.PARALLEL_BYTES)) == [0, 1]
    with pytest.raises(CorruptError, match="the seventh"):
        upload.for_each(thread, range(9), upload.PARALLEL_BYTES)
    sent = upload.Upload()
    parts = [np.arange(size, dtype=np.uint8) for size in (5, 16, 1, 33)]
    offsets = [sent.add(part) for part in parts]
    monkeypatch.setattr(upload, "PARALLEL_BYTES", 0)
    raw = sent.pack(torch.device("cpu")).bytes.numpy()
    assert offsets == [0, 16, 32, 48] and len(raw) == 96
    expected = np.zeros(96, np.uint8)
    for offset, part in zip(offsets, parts, strict=True):
        expected[offset : offset + len(part)] = part
    np.testing.assert_array_equal(raw, expected)


def test_a_forked_process_stages_on_threads_of_its_own() -> None:
    from cuvee.kernels import upload

    upload.for_each(time.sleep, [0.02] * 32, upload.PARALLEL_BYTES)  # long enough to start all threads there may be
    assert works_in_child(lambda: upload.for_each(abs, [-1, -2], upload.PARALLEL_BYTES) == [1, 2])


def test_a_forked_process_makes_schemes_while_a_thread_of_its_parent_does(
    layouts: dict[str, KVLayout], make_chunk: Any
) -> None:
    from cuvee.codec.backends import Coding
    from cuvee.codec.format.container import Scheme
    from cuvee.kernels.backend import TritonBackend

    backend, chunk = TritonBackend(interpreted=True), make_chunk(layouts["gqa"], 5)
    cache = PagedCache.dense(chunk.layout, chunk.keys, chunk.values)
    coding = Coding(Profile.unlearned(chunk.layout), Scheme.LOSSLESS, 0, chunk.layout.dtype)
    assert works_in_child_while_held(backend._making, lambda: backend._scheme(coding, cache) is not None)
