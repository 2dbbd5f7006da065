"""The worker's side on a device: what the engine's thread waits for, and in which order the streams do their work.

Each test runs on a device that does everything as late as it may, and on devices where the engine's stream, the
connector's streams or all of them run ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.codec.forging import sections_of, with_section
from tests.integrations.vllm.sides import BLOCKS, CHUNK, TENANT, Bench
from tests.kernels.late_device import CUDA, DeviceTensor, LateDevice, late_device
from tests.waiting import wait_until

from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError
from cuvee.naming.identity import store_key

POOL = set(range(2, 40))
HASTY: dict[str, set[int]] = {"none": set(), "engine": {1}, "connector": POOL, "all": {1, *POOL}}
LOSSLESS_WAITS = 3


@pytest.fixture(params=HASTY)
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    with late_device(monkeypatch, HASTY[request.param]) as device:
        yield device


@pytest.fixture
def latest(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """Only the one where nothing runs ahead."""
    with late_device(monkeypatch) as device:
        yield device


@pytest.fixture
def bench(bench: Callable[..., Bench]) -> Callable[..., Bench]:
    """With pages on a device."""
    return lambda **options: bench(device=CUDA, **options)


def overwrite(bench: Bench, value: float) -> None:
    """The engine's next step writes to all pages."""
    for tensor in bench.cache.keys + bench.cache.values:
        tensor.fill_(value)


def expected(bench: Bench, chunk: int) -> bytes:
    """The blob that the CPU makes of a chunk."""
    codec = Codec(bench.codec.profile, "lossless", threads=1)
    return codec.encode(bench.sequence.slice(chunk * CHUNK, (chunk + 1) * CHUNK))


def test_what_is_stored_is_what_the_step_computed(late: LateDevice, bench: Callable[..., Bench]) -> None:
    own = bench()
    blocks = list(range(BLOCKS))[::-1][:16]
    own.fill(blocks, 8 * CHUNK)
    own.worker.saves.save(own.saves(blocks, range(4)))
    overwrite(own, 5.0)
    own.fill(blocks, 8 * CHUNK)
    own.worker.saves.save(own.saves(blocks, range(4, 8))[:3])
    overwrite(own, 6.0)
    taken = [torch.full((1 << 14,), 7, dtype=torch.uint8, device=CUDA) for _ in range(40)]  # what copies were in
    own.drain()
    wait_until(lambda: len(own.store.entries) == 7, "chunks are stored")
    del taken
    for chunk in range(7):
        assert own.store.entries[own.key(chunk)] == expected(own, chunk), chunk


def test_what_is_restored_is_there_when_the_engine_hears_of_it(late: LateDevice, bench: Callable[..., Bench]) -> None:
    own = bench()
    blocks = list(range(BLOCKS))[::-1][:16]
    for chunk in range(8):
        own.store.entries[own.key(chunk)] = expected(own, chunk)
    overwrite(own, 5.0)  # by those that had the blocks before, and not done yet
    own.worker.loads.start([own.load(blocks, 0, 8 * CHUNK)])
    own.wait()
    seen = [tensor[:] * 1 for tensor in own.cache.keys + own.cache.values]  # the engine's step reads
    late.engine.run(late.engine.given)
    for part, wanted in zip(seen, own.sequence.keys + own.sequence.values, strict=True):
        assert isinstance(part, DeviceTensor)
        read = part.held[torch.tensor(blocks)].flatten(0, 1)
        assert torch.equal(read, wanted)
    late.finish()
    assert own.held(blocks, 0, 8 * CHUNK)


def test_a_damaged_chunk_leaves_those_before_it(late: LateDevice, bench: Callable[..., Bench]) -> None:
    """The batch is decoded a second time, chunk by chunk, while nothing of the first time is under way."""
    own = bench()
    blocks = list(range(16))
    for chunk in range(8):
        own.store.entries[own.key(chunk)] = expected(own, chunk)
    blob = expected(own, 5)
    section = bytearray(sections_of(blob)[0])
    section[-30] ^= 0x55  # in its words: only the kernels can tell
    own.store.entries[own.key(5)] = with_section(blob, bytes(section))
    overwrite(own, 5.0)
    late.entries.clear()
    own.worker.loads.start([own.load(blocks, 0, 8 * CHUNK)])
    own.wait()
    assert {entry.stream for entry in late.entries if entry.thread != "MainThread"} == {len(late.streams) - 1}
    assert own.worker.loads.take_invalid_blocks() == set(blocks[10:])
    assert own.held(blocks[:10], 0, 5 * CHUNK)
    for tensor in own.cache.keys + own.cache.values:  # the engine computes the rest, at once
        tensor[10:16].fill_(9.0)
    late.finish()
    assert own.held(blocks[:10], 0, 5 * CHUNK)
    assert all(bool((tensor[10:16].cpu() == 9).all()) for tensor in own.cache.keys + own.cache.values)
    assert not own.store.entries.get(store_key(TENANT, own.digests[5], 0))


@pytest.mark.parametrize("chunks", [1, 8])
def test_what_a_step_costs(latest: LateDevice, bench: Callable[..., Bench], chunks: int) -> None:
    """The engine's thread waits for nothing; the pool's threads for their own work, on streams of their own."""
    own = bench()
    blocks = list(range(16))
    for _ in range(2):  # once to warm up
        own.fill(blocks, 8 * CHUNK)
        own.store.entries.clear()
        latest.entries.clear()
        own.worker.saves.save(own.saves(blocks, range(chunks)))
        own.drain()
    engine = [entry for entry in latest.entries if entry.thread == "MainThread"]
    pool = [entry for entry in latest.entries if entry.thread != "MainThread"]
    # One upload of the slots; they become blocks and tokens; each unit is copied by one launch.
    units = 2 * own.cache.layout.num_layers
    assert [entry.kind for entry in engine if entry.kind not in ("operation", "allocate")] == [
        "pin", "to device", "record",
    ]  # fmt: skip
    assert len([entry for entry in engine if entry.kind == "operation"]) == units + 3
    assert len([entry for entry in pool if entry.kind == "wait"]) == LOSSLESS_WAITS
    assert {entry.stream for entry in engine} == {1}
    assert min(entry.stream for entry in pool if entry.kind != "wait") >= 2  # 0 is the default stream

    latest.entries.clear()
    own.load_now([own.load(blocks, 0, chunks * CHUNK)])
    engine = [entry for entry in latest.entries if entry.thread == "MainThread"]
    pool = [entry for entry in latest.entries if entry.thread != "MainThread"]
    assert [entry.kind for entry in engine] == ["record"]
    kinds = [entry.kind for entry in pool]
    assert (kinds.count("wait"), kinds.count("to device"), kinds.count("to host")) == (1, 2, 1)
    assert min(entry.stream for entry in pool) >= 2
    copies = [entry for entry in latest.entries if entry.kind in ("to device", "to host")]
    assert all(copy.pinned and not copy.blocking for copy in copies)


def test_nothing_is_loaded_or_stored_while_a_graph_is_captured(
    latest: LateDevice, bench: Callable[..., Bench], contained: list[tuple[str, BaseException]]
) -> None:
    own = bench()
    blocks = list(range(16))
    own.store_all()
    latest.entries.clear()
    latest.engine.capturing = True
    own.worker.saves.save([])
    own.load_now([])
    assert latest.entries == []  # a step with nothing to do
    own.worker.saves.save(own.saves(blocks, range(2)))
    own.load_now([own.load(blocks, 0, CHUNK)])
    assert latest.entries == []
    assert [entry for entry, _ in contained] == ["save", "start_loads"]
    assert all(isinstance(error, InputError) and "captured into a CUDA graph" in str(error) for _, error in contained)
    assert not own.worker.saves._sizes and own.worker.saves._pending == 0
    assert own.worker.loads.take_arrived() == {"r"} and own.worker.loads.take_invalid_blocks() == {0, 1}  # of the chunk
    latest.engine.capturing = False
