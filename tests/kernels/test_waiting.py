"""Waits, copies and allocations are counted, and their order is checked, on a device that delays all work.

Batches of one chunk and of many, of two layers and of three, must cost the same number of waits, copies, allocations
and launches.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from tests.conftest import LAYOUTS, synthetic_chunk
from tests.kernels.coding import with_predictors
from tests.kernels.late_device import CUDA, LateDevice, late_device
from tests.predicting import VOCABULARY
from tests.predicting import predicting as with_token_table

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.coding import encoding
from cuvee.codec.errors import CorruptError, InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.kernels.devices import Mark, send
from cuvee.learning.calibrate import fit

SCHEMES = ["learned", "predicted", "tokens", "lossless"]
BLOCKS, BLOCK = 24, 16
SIZES = [9, 30, 1, 17, 40, 8]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    # Chunks as small as these take a large share of their raw bytes, and would be coded a second time.
    monkeypatch.setattr(encoding, "SUSPICIOUS_SHARE", 10)
    monkeypatch.setattr(encoding, "may_be_smaller", lambda *_: False)
    with late_device(monkeypatch) as device:
        yield device


@cache
def layout_of(layers: int) -> KVLayout:
    usual = LAYOUTS["bfloat16"]
    return KVLayout(usual.model_type, usual.layers[:1] * layers, usual.dtype, usual.max_positions)


@cache
def profile_of(layers: int, scheme: str) -> Profile:
    layout = layout_of(layers)
    if scheme == "lossless":
        return Profile.unlearned(layout)
    learned = fit(layout, [synthetic_chunk(layout, 100, seed) for seed in range(100, 107)], "layer")
    if scheme == "tokens":
        return with_token_table(learned)
    return with_predictors(learned) if scheme == "predicted" else learned


def codec_of(scheme: str, layers: int, **arguments: Any) -> Codec:
    quality = {"quality": "lossless"} if scheme == "lossless" else {"step": 0.25}
    return Codec(profile_of(layers, scheme), **quality, threads=1, **arguments)


def pages(layout: KVLayout, device: torch.device) -> PagedCache:
    layer = layout.layers[0]
    keys, values = (
        [
            torch.zeros(BLOCKS, BLOCK, layer.kv_heads, layer.head_dim, dtype=torch.bfloat16, device=device)
            for _ in layout.layers
        ]
        for _ in range(2)
    )
    return PagedCache(layout, keys, values)


@dataclass
class Case:
    """Some chunks in pages of the device and in pages of the CPU, and codecs of both."""

    scheme: str
    layers: int
    count: int

    def __post_init__(self) -> None:
        self.layout = layout_of(self.layers)
        self.gpu, self.cpu = codec_of(self.scheme, self.layers), codec_of(self.scheme, self.layers)
        mixed = torch.randperm(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(0))
        self.host_slots = list(mixed[: sum(SIZES[: self.count])].split(SIZES[: self.count]))
        self.chunks = [outlying(self.layout, len(at), seed) for seed, at in enumerate(self.host_slots)]
        self.here, self.there = pages(self.layout, torch.device("cpu")), pages(self.layout, CUDA)
        for chunk, at in zip(self.chunks, self.host_slots, strict=True):
            self.here.write(chunk.keys, chunk.values, at)
        for mine, theirs in zip(self.units(self.there), self.units(self.here), strict=True):
            mine.copy_(theirs)
        self.slots = [at.to(CUDA) for at in self.host_slots]
        self.ids = [torch.arange(len(at)) % VOCABULARY for at in self.slots] if self.scheme == "tokens" else None
        self.starts = [5 * number for number in range(self.count)]

    @staticmethod
    def units(cache: PagedCache) -> list[torch.Tensor]:
        return [*cache.keys, *cache.values]

    def encode(self) -> list[bytes]:
        return self.gpu.encode(PagedChunks(self.there, self.slots, self.starts, tokens=self.ids))

    def wanted(self) -> list[bytes]:
        return self.cpu.encode(PagedChunks(self.here, self.host_slots, self.starts, tokens=self.ids))

    def decoded(self, blobs: list[bytes]) -> PagedCache:
        """What the CPU makes of them."""
        target = pages(self.layout, torch.device("cpu"))
        self.cpu.decode_paged(blobs, target, self.host_slots).check()
        return target


def outlying(layout: KVLayout, tokens: int, seed: int) -> KVChunk:
    """A chunk with values that escape, so that every launch is made that there is."""
    chunk = synthetic_chunk(layout, tokens, seed)
    for part in chunk.keys + chunk.values:
        part[tokens // 2, 0, 0] = 4000.0
    return chunk


def assert_same(got: PagedCache, want: PagedCache) -> None:
    """Equal but for the rounding of bfloat16 products."""
    for mine, theirs in zip(Case.units(got), Case.units(want), strict=True):
        limit = 2**-6 * float(theirs.abs().max())
        assert float((mine.cpu().float() - theirs.float()).abs().max()) <= limit


# How often --------------------------------------------------------------------------------------------------------

# Of a batch of several chunks. A batch of one joins nothing, and may have no escapes to list.
ENCODING: dict[str, Mapping[str, int]] = {
    "learned": {"wait": 2, "to device": 3, "to host": 2, "launch": 8, "operation": 8, "allocate": 23, "pin": 5},
    "predicted": {"wait": 3, "to device": 3, "to host": 3, "launch": 9, "operation": 28, "allocate": 41, "pin": 6},
    "tokens": {"wait": 2, "to device": 3, "to host": 2, "launch": 8, "operation": 20, "allocate": 32, "pin": 5},
    "lossless": {"wait": 3, "to device": 3, "to host": 4, "launch": 6, "operation": 9, "allocate": 22, "pin": 7},
}
# Of a batch that may lose something: the sample that tells which chunks are smaller without loss.
_SAMPLE = Counter({"wait": 1, "to host": 1, "operation": 13, "allocate": 13, "pin": 1})
for _scheme in SCHEMES[:3]:
    ENCODING[_scheme] = Counter(ENCODING[_scheme]) + _SAMPLE
_DECODING = {"to device": 1, "to host": 1, "launch": 4, "operation": 2, "allocate": 6, "pin": 2}
DECODING = dict.fromkeys(SCHEMES, _DECODING) | {
    "tokens": {**_DECODING, "operation": 14, "allocate": 15},
    "lossless": {**_DECODING, "launch": 3, "allocate": 5},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_batch_costs(late: LateDevice, scheme: str) -> None:
    """The second batch of its kind, when what the profile needs is on the device."""
    for count in (1, 6):
        for layers in (2, 3):
            case, target = Case(scheme, layers, count), pages(layout_of(layers), CUDA)
            for _ in range(2):
                late.entries.clear()
                blobs = case.encode()
            encoding, copies = late.counts(), late.of("to device", "to host")
            for _ in range(2):
                late.entries.clear()
                pending = case.gpu.decode_paged(blobs, target, case.slots)
                decoding, more = late.counts(), late.of("to device", "to host")
                late.entries.clear()
                pending.check()
                assert [entry.kind for entry in late.entries] == ["wait"]
            assert all(copy.pinned and not copy.blocking for copy in copies + more)
            assert_same(target, case.decoded(blobs))
            for found, budget in ((encoding, ENCODING[scheme]), (decoding, DECODING[scheme])):
                del found["record"]
                if count > 1:
                    assert found == budget
                else:
                    assert found <= Counter(budget) and found["wait"] == budget.get("wait", 0)


def test_a_decode_in_batches_is_checked_with_one_wait(late: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    case, target = Case("learned", 2, 6), pages(layout_of(2), CUDA)
    blobs = case.wanted()
    monkeypatch.setattr(case.gpu._backends.of("cuda"), "workspace_bytes", 1)
    for _ in range(2):
        pending = case.gpu.decode_paged(blobs, target, case.slots)
        late.entries.clear()
        pending.check()
    assert late.counts() == {"wait": 1}
    assert_same(target, case.decoded(blobs))


# In which order ---------------------------------------------------------------------------------------------------


def elsewhere(work: Callable[[], object]) -> Exception | None:
    """Run it in a thread of its own, on the default stream; what it raised."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_thread_may_check(late: LateDevice, scheme: str) -> None:
    """Without a stream of its own: what was found wrong must not be read before it was written."""
    case, target = Case(scheme, 2, 3), pages(layout_of(2), CUDA)
    blobs = case.wanted()
    pending = case.gpu.decode_paged(blobs, target, case.slots)
    assert elsewhere(pending.check) is None
    late.engine.queue.clear()  # what is not done by now
    late.engine.done = late.engine.given
    assert_same(target, case.decoded(blobs))
    beyond = [*case.slots[:2], torch.full_like(case.slots[2], BLOCKS * BLOCK)]
    pending = case.gpu.decode_paged(blobs, target, beyond)
    error = elsewhere(pending.check)
    assert isinstance(error, InputError) and "beyond the cache" in str(error)


def test_what_was_launched_is_over_when_a_decode_raises(late: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets its blocks back: nothing may write to them any more."""
    case, target = Case("learned", 2, 3), pages(layout_of(2), CUDA)
    blobs = case.wanted()
    monkeypatch.setattr(case.gpu._backends.of("cuda"), "workspace_bytes", 1)  # a chunk per batch
    broken = blobs[2][:-1] + bytes([blobs[2][-1] ^ 1])  # its checksum tells, after the others were launched
    with pytest.raises(CorruptError):
        case.gpu.decode_paged([*blobs[:2], broken], target, case.slots)
    assert late.engine.done == late.engine.given

    codecs = [Codec(profile_of(2, "learned"), step=step, threads=1) for step in (0.1, 0.5)]
    mixed = [codec.encode(chunk) for codec, chunk in zip(codecs, case.chunks[:2], strict=True)]
    slots = [torch.full_like(case.slots[0], -2), case.slots[1]]
    pending = codecs[0].decode_paged(mixed, target, slots)  # two launches, of which the first is wrong
    with pytest.raises(InputError, match="beyond the cache"):
        pending.check()
    assert late.engine.done == late.engine.given


def test_what_was_launched_is_over_when_an_encode_raises(late: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuvee.kernels import lossless_scheme

    case = Case("lossless", 2, 2)
    case.encode()

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lossless_scheme, "code_streams", fail)  # the planes are being split by now
    with pytest.raises(torch.OutOfMemoryError):
        case.encode()
    assert late.engine.done == late.engine.given


def test_work_in_flight_keeps_its_tables(late: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were made for another stream, and nobody waits for the decode or remembers the codec."""
    from cuvee.kernels import backend

    monkeypatch.setattr(backend, "MAX_SCHEMES", 1)
    case, target = Case("learned", 2, 2), pages(layout_of(2), CUDA)
    blobs = case.wanted()
    want = case.decoded(blobs)
    case.gpu.decode_paged(blobs, target, case.slots).check()  # makes the tables on the engine's stream
    for unit in Case.units(target):
        unit.zero_()
    made, moved = Mark(CUDA), [at.clone() for at in case.slots]
    with made.followed():
        case.gpu.decode_paged(blobs, target, moved)
        own = late.stream
    del moved
    other = Codec(profile_of(2, "learned"), step=0.125, threads=1)  # takes the place of the tables
    other.decode_paged(other_blobs(other, case), pages(layout_of(2), CUDA), case.slots).check()
    overwrite(late)
    own.run(own.given)
    assert_same(target, want)


def other_blobs(codec: Codec, case: Case) -> list[bytes]:
    return codec.encode(PagedChunks(case.here, case.host_slots, case.starts))


def overwrite(late: LateDevice) -> None:
    """Let the engine's stream take all memory that it is lent, and fill it."""
    sizes = [len(memory) for memory in late.free.get(late.engine.number, [])]
    taken = [torch.empty(size, dtype=torch.uint8, device=CUDA) for size in sizes]
    for each in taken:
        each.fill_(0x3C)
    late.engine.run(late.engine.given)


def test_a_host_buffer_is_not_written_again_before_it_was_copied(late: LateDevice) -> None:
    """Uploads follow each other faster than the device copies them."""
    values = [torch.full((64,), number) for number in range(8)]
    sent = [send(value, CUDA) for value in values]
    for value in values:
        value.fill_(-1)
    assert [int(each.min()) for each in sent] == list(range(8))


def test_nothing_is_coded_while_a_graph_is_captured(late: LateDevice) -> None:
    case, target = Case("learned", 2, 2), pages(layout_of(2), CUDA)
    blobs = case.encode()
    case.gpu.decode_paged(blobs, target, case.slots).check()
    late.entries.clear()
    late.engine.capturing = True
    for work in (case.encode, lambda: case.gpu.decode_paged(blobs, target, case.slots), lambda: Mark(CUDA)):
        with pytest.raises(InputError, match="captured into a CUDA graph"):
            work()
    assert late.entries == []
