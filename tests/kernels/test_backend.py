"""The backend `triton` as a whole: it reads the blobs of the CPU and writes blobs that the CPU reads, in one batch."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.classed import with_classes
from tests.codec.test_paged import PERMUTED, poisoned
from tests.conftest import LAYOUTS, decoded_layers, fitted_profile, synthetic_chunk
from tests.forked import SECONDS
from tests.kernels import world
from tests.kernels.coding import (
    CPU,
    ROUNDING,
    Pages,
    apart,
    assert_close,
    chunk_of,
    classes_of,
    codecs,
    coded,
    ids_of,
    on,
    tensors,
)
from tests.kernels.emulation import KERNELS_RUN_ON, TARGET
from tests.ptx.driver import TARGETS, state
from triton import knobs

from cuvee.codec.backends import Backends
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.cpu.pool import Pool
from cuvee.codec.entropy.token_classes import CLASSES
from cuvee.codec.errors import CorruptError, InputError, ProfileError, UnsupportedModelError
from cuvee.codec.format.container import read_header
from cuvee.codec.paged import NOWHERE
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.kernels import backend, incoming, upload
from cuvee.kernels.chunks import CacheMemory
from cuvee.kernels.plans import TransformPlan

# Layout, scheme, and tokens, which rarely fill a tile. Heads of other sizes and RoPEs: `test_transform.py`.
CASES = [
    ("bfloat16", "layer", 129), ("no-rope", "head", 33), ("bfloat16", "layer classes", 300),
    ("mqa", "head classes", 257), ("gqa", "head predictor", 100), ("gqa", "heads:2 tokens", 127),
    ("irregular", "layer tokens", 250), ("gqa", "layer predictor tokens", 9), ("bfloat16", "layer parts", 33),
    ("irregular", "unit classes parts", 9),
]  # fmt: skip


@pytest.mark.parametrize(("name", "scheme", "tokens"), CASES, ids=[f"{name}-{scheme}" for name, scheme, _ in CASES])
def test_each_reads_what_the_other_wrote(device: torch.device, name: str, scheme: str, tokens: int) -> None:
    cpu, triton = codecs(name, scheme)
    chunk, rounding = chunk_of(name, scheme, tokens), ROUNDING[LAYOUTS[name].dtype]
    theirs, mine = coded(cpu, chunk), coded(triton, on(device, chunk))
    for own, wanted in zip(mine, theirs, strict=True):
        assert abs(len(own) - len(wanted)) <= 0.01 * len(wanted) + 8
        for a, b in zip(classes_of(own, cpu), classes_of(wanted, cpu), strict=True):
            assert np.abs(a.astype(int) - b.astype(int)).sum() <= 1  # an offset between two classes
    if "classes" in scheme or "predictor" in scheme:
        assert all(len(np.unique(own)) > 1 for i, own in enumerate(classes_of(theirs[0], cpu)) if i != 1)
    for base, *finer in (theirs, mine):
        for more in ([], finer) if finer else ([],):
            for to in (None, 1000) if LAYOUTS[name].relocatable else (None,):
                got = triton.decode(base, to, refinements=more, device=device)
                assert_close(got, cpu.decode(base, to, refinements=more))
                ids = [None if x.token_ids is None else x.token_ids.tolist() for x in (got, chunk)]
                assert ids[0] == ids[1]
    # The transforms differ in their last bits, so a level here and there is another one: by one step.
    want, got = (cpu.decode(base, refinements=finer) for base, *finer in (theirs, mine))
    differ = [float((a != b).double().mean()) for a, b in zip(tensors(got), tensors(want), strict=True)]
    assert max(differ) < 0.05 or "predictor" in scheme
    errors = [
        sum(float((a.float() - b.float()).square().sum()) for a, b in zip(tensors(x), tensors(chunk), strict=True))
        for x in (want, got)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)
    some = range(tokens // 3, tokens // 3 + tokens // 2)
    part = triton.decode(theirs[0], tokens=some, device=device)
    assert part.tokens == len(some)
    assert_close(part, cpu.decode(theirs[0], tokens=some))
    for layers in (range(1), range(1, LAYOUTS[name].num_layers)):
        alone = [decoded_layers(codec, theirs[0], layers, device=at) for codec, at in ((triton, device), (cpu, CPU))]
        assert apart([*alone[0][0], *alone[0][1]], [*alone[1][0], *alone[1][1]]) <= rounding


@pytest.mark.parametrize(("name", "tokens"), [("bfloat16", 129), ("yarn", 12)])
def test_lossless_is_the_same_bytes(device: torch.device, name: str, tokens: int) -> None:
    (cpu, triton), chunk = codecs(name, "lossless"), chunk_of(name, "lossless", tokens)
    blob = cpu.encode(chunk)
    assert triton.encode(on(device, chunk)) == blob
    for got, want in zip(tensors(triton.decode(blob, device=device)), tensors(chunk), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert_close(triton.decode(blob, 99, device=device), cpu.decode(blob, 99))
    # Moved so far down that the first tokens of the chunk, which are not wanted, would lie before position 0.
    tail = range(tokens - 3, tokens)
    assert_close(triton.decode(blob, 0, tokens=tail, device=device), cpu.decode(blob, 0, tokens=tail))
    for layers in (range(1), range(1, 3)):
        alone = [decoded_layers(codec, blob, layers, device=at) for codec, at in ((triton, device), (cpu, CPU))]
        assert apart([*alone[0][0], *alone[0][1]], [*alone[1][0], *alone[1][1]]) == 0


@pytest.mark.nightly
@pytest.mark.skipif(KERNELS_RUN_ON != "ptx", reason=f"kernels run on: {KERNELS_RUN_ON}")
@pytest.mark.parametrize("scheme", ["layer", "layer classes", "layer tokens", "lossless"])
@pytest.mark.parametrize("target", sorted({*TARGETS} - {TARGET}))
def test_on_every_target(monkeypatch: pytest.MonkeyPatch, target: str, scheme: str) -> None:
    monkeypatch.setattr(state(), "target", target)
    if scheme == "lossless":
        test_lossless_is_the_same_bytes(CPU, "bfloat16", 70)
    else:
        test_each_reads_what_the_other_wrote(CPU, "bfloat16", scheme, 70)


@pytest.mark.parametrize("scheme", ["head predictor", "layer predictor tokens"])
def test_tokens_near_the_end_are_coded_finer(device: torch.device, scheme: str) -> None:
    """By the same classes as on the CPU, whatever follows each chunk."""
    codecs_, layout, ids = codecs("gqa", scheme), LAYOUTS["gqa"], [ids_of(scheme, 12)] * 2
    found = []
    for codec, at in zip(codecs_, (CPU, device), strict=True):
        pages, slots = Pages(layout, at), [torch.arange(12, device=at), torch.arange(40, 52, device=at)]
        for where in slots:
            chunk = on(at, chunk_of("gqa", scheme, 12))
            pages.cache.write(chunk.keys, chunk.values, where)
        blobs = codec.encode(PagedChunks(pages.cache, slots, [2, 2], tokens=ids, following=[0, 90]))
        found.append([np.concatenate(classes_of(blob, codecs_[0])).astype(int) for blob in blobs])
    (near, far), mine = found
    assert all(np.abs(a - b).sum() <= 6 for a, b in zip(mine, (near, far), strict=True))
    assert np.abs(near - far).sum() > 6


@pytest.mark.parametrize("outliers", [False, True])
def test_more_than_a_window(device: torch.device, outliers: bool) -> None:
    """All classes there are; of a token whose weight is zero nothing may be coded."""
    weights = torch.tensor([1.0, 1e9, 0.0, 0.0]).repeat(75)[:128] if outliers else None
    profile = with_classes(world.profile_of("head" if outliers else "unit", 3 if outliers else 10), weights)
    cpu, triton = Codec(profile, step=1.0), Codec(profile, step=1.0, backend="triton")
    noise, layers = torch.Generator().manual_seed(0), world.LAYOUT.layers
    keys = [40 * torch.randn(300, n.kv_heads, n.head_dim, generator=noise) for n in layers]
    chunk = KVChunk(
        keys, [40 * torch.randn(300, n.kv_heads, n.value_dim, generator=noise) for n in layers], world.LAYOUT
    )
    blob, mine = cpu.encode(chunk), triton.encode(on(device, chunk))
    assert abs(len(mine) - len(blob)) <= 0.01 * len(blob)
    assert_close(triton.decode(mine, device=device), cpu.decode(mine))


def test_components_must_fall_with_the_class() -> None:
    scale = (-100 + 40 * np.arange(CLASSES)).astype(np.int16)
    rising = [replace(section, class_scale=scale) for section in world.profile_of("layer", top=6).learned]
    profile = Profile(world.LAYOUT, "layer", "fitted", world.FAMILY, tuple(rising), min_step_index=-640)
    with pytest.raises(ProfileError, match="coarser"):
        TransformPlan(profile, world.STEP, CPU, torch.float32)


def test_a_refinement_of_other_classes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of a refinement are those of its base: whoever wrote another one made no refinement of it."""
    _, triton = codecs("gqa", "layer classes parts")
    base, refinement = coded(triton, on(device, chunk_of("gqa", "layer classes parts", 9)))
    read = incoming.Incoming.read

    def other(*arguments: Any) -> Any:
        coded, classes = read(*arguments)
        last = np.flatnonzero(classes[len(classes) // 2 :])[-1] + len(classes) // 2
        classes[last] -= 1
        return coded, classes

    monkeypatch.setattr(incoming.Incoming, "read", other)
    with pytest.raises(CorruptError, match=r"refinement of blob 0: must have the token classes of its base"):
        triton.decode(base, refinements=[refinement], device=device)


# --- many chunks, pages


@pytest.fixture(params=[1, 1 << 30], ids=["a-chunk-a-batch", "one-batch"])
def workspace(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch for one chunk at a time, or for all."""
    monkeypatch.setattr(Backends("triton", 1).of(device.type), "workspace_bytes", request.param)


SIZES = [9, 1, 4]


def places(device: torch.device) -> list[torch.Tensor]:
    """Slots of three chunks of different lengths, in no order; those of one token nowhere."""
    mixed = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    mixed[5] = NOWHERE
    return [at.to(device) for at in mixed[: sum(SIZES)].split(SIZES)]


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("name", "scheme", "dtype"),
    [
        ("gqa", "layer predictor tokens", None), ("bfloat16", "lossless", torch.float8_e4m3fn),
        ("bfloat16", "layer classes", torch.float8_e4m3fn),
    ],
)  # fmt: skip
def test_many_chunks_from_and_into_pages(
    device: torch.device, name: str, scheme: str, dtype: torch.dtype | None
) -> None:
    """Chunks with ids and without them, sections with a predictor and without one, in one call."""
    (cpu, triton), layout, starts = codecs(name, scheme), LAYOUTS[name], [3, 0, 500]
    ids = [None if number == 1 else ids_of(scheme, size) for number, size in enumerate(SIZES)]
    source, reference = Pages(layout, device, dtype), Pages(layout, CPU, dtype)
    filled = torch.arange(128)
    for pages in (source, reference):
        chunk = on(pages.cache.device, synthetic_chunk(layout, 128))
        pages.cache.write(chunk.keys, chunk.values, filled.to(pages.cache.device))
    read = [at.clamp_min(0) for at in places(CPU)]
    wanted = cpu.encode(PagedChunks(reference.cache, read, starts, tokens=ids))
    blobs = triton.encode(PagedChunks(source.cache, [at.to(device) for at in read], starts, tokens=ids))
    for mine, theirs in zip(blobs, wanted, strict=True):
        assert mine == theirs or (scheme != "lossless" and abs(len(mine) - len(theirs)) <= 0.01 * len(theirs) + 8)
        assert read_header(mine).token_id_bytes == read_header(theirs).token_id_bytes
    target, expected = Pages(layout, device, dtype), Pages(layout, CPU, dtype)
    moved = [100, 0, 2000]
    triton.decode_paged(wanted, target.cache, places(device), moved).check()
    cpu.decode_paged(wanted, expected.cache, places(CPU), moved).check()
    rounding = 2**-3 if dtype else ROUNDING[layout.dtype]  # fp8: a last bit
    assert apart([u.float() for u in target.units], [u.float() for u in expected.units]) <= rounding
    used = [slot for at in places(CPU) for slot in at.tolist() if slot != NOWHERE]
    assert target.unharmed(used) and not any(target.unharmed(used[:k] + used[k + 1 :]) for k in range(len(used)))


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("cached", ["bfloat16", "float32"])
def test_blobs_of_several_dtypes_schemes_and_steps_in_one_call(cached: str, device: torch.device) -> None:
    layout = replace(LAYOUTS["gqa"], dtype=cached)
    profile = fitted_profile("gqa", "layer")
    kinds = [("transform", "bfloat16"), ("lossless", "float32"), ("transform", "float32"), ("lossless", "float16")]
    blobs = []
    for number, (scheme, dtype) in enumerate(kinds):
        quality: dict[str, Any] = {"quality": "lossless"} if scheme == "lossless" else {"step": 0.1 * (number + 1)}
        blobs.append(Codec(profile, **quality).encode(synthetic_chunk(replace(layout, dtype=dtype), 4, number)))
    at = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:16].split(4)
    starts = [3, 0, 100, 3000]
    pages, expected = Pages(layout, device), Pages(layout, CPU)
    Codec(profile, step=0.3, backend="triton").decode_paged(
        blobs, pages.cache, [a.to(device) for a in at], starts
    ).check()
    Codec(profile, step=0.3).decode_paged(blobs, expected.cache, at, starts).check()
    for number, (kind, own) in enumerate(zip(kinds, at, strict=True)):
        # A float32 cache gets what a bfloat16 blob says without the rounding of a bfloat16 chunk in between.
        rounding = 2.0**-6 if "bfloat16" in (cached, kind[1]) else 2.0**-9
        got, want = ([p.by_slot(unit)[own] for unit in range(6)] for p in (pages, expected))
        assert apart(got, want) <= (0 if kind == ("lossless", "float32") and cached == "float32" else rounding), number
    assert pages.unharmed(torch.cat(at).tolist())


def test_pages_that_no_strides_describe_are_refused() -> None:
    """Of the CPU, which in the emulator is a device; on a GPU such a cache cannot be described at all."""
    cache = poisoned(LAYOUTS["gqa"], PERMUTED)
    with pytest.raises(UnsupportedModelError, match="must have values at fixed strides for the backend 'triton'"):
        CacheMemory.of(cache)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedModelError, match="must have values at fixed strides for the backend 'triton'"):
            codecs("gqa", "lossless")[1].encode(PagedChunks(cache, [torch.arange(4)], [0]))


@pytest.mark.parametrize(
    ("name", "scheme"), [("bfloat16", "layer tokens"), ("bfloat16", "layer parts"), ("bfloat16", "lossless")]
)
def test_a_model_compiles_once(device: torch.device, name: str, scheme: str) -> None:
    """Neither the number of chunks nor their lengths are specialized on: serving must not stop to compile."""
    _, gpu = codecs(name, scheme)
    chunk, pages, compiled = chunk_of(name, scheme, 37, 0, 5), Pages(LAYOUTS[name], device), list[str]()
    base, *finer = coded(gpu, on(device, chunk))
    gpu.decode(base, 100, refinements=finer, device=device)
    slots = [at.to(device) for at in torch.arange(128).split([37, 50, 41])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "jit_cache_hook", lambda **compiles: compiled.append(compiles["fn"].name))
        source = PagedChunks(pages.cache, slots, [5, 5, 5], tokens=[ids_of(scheme, len(at)) for at in slots])
        parts = gpu.encode_parts(source) if gpu.refinements else [(blob,) for blob in gpu.encode(source)]
        blobs = [gpu.open(base, refinements=finer) for base, *finer in parts]
        gpu.decode_paged(blobs, pages.cache, slots, [90, 200, 300]).check()
    assert compiled == []


# --- errors and limits


@pytest.mark.parametrize(
    ("bad", "message"), [(float("nan"), "NaN"), (float("inf"), "NaN"), (1e30, "steps large")], ids=str
)
def test_values_that_cannot_be_coded(device: torch.device, bad: float, message: str) -> None:
    chunk = on(device, synthetic_chunk(LAYOUTS["gqa"], 5))
    chunk.values[1][4, 1, 3] = bad
    with pytest.raises(InputError, match=message):
        codecs("gqa", "layer")[1].encode(chunk)


def test_a_chunk_that_no_launch_takes_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MAX_TOKENS", 4)
    (cpu, triton), chunk = codecs("gqa", "layer"), synthetic_chunk(LAYOUTS["gqa"], 5)
    with pytest.raises(InputError, match="chunk: must have at most 4 tokens on a GPU, got 5"):
        triton.encode(on(device, chunk))
    with pytest.raises(InputError, match="chunk: must have at most 4 tokens on a GPU, got 5"):
        triton.decode(cpu.encode(chunk), device=device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch watches a GPU alone; test_waiting.py simulates one")
def test_decoding_waits_for_no_device() -> None:
    device, (_, triton) = torch.device("cuda"), codecs("bfloat16", "layer")
    pages, slots = Pages(LAYOUTS["bfloat16"], device), [at.clamp_min(0) for at in places(device)]
    blobs = triton.encode(PagedChunks(pages.cache, slots, [0, 0, 0]))
    triton.decode_paged(blobs, pages.cache, slots).check()  # learns the profile and uploads it, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = triton.decode_paged(blobs, pages.cache, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pending.check()


def test_many_bytes_go_through_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
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
