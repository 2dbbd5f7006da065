"""CacheGen's decoder as LMCache 0.5.6 ships it, so that the GPU bench can time it and ours in the same run.

This is our own code, written from the description of the format. It quantizes as `quantizers.CacheGen` does, and turns
the levels into bytes. For each chunk and unit (K or V of a layer) they are:

    bfloat16 [T]       the largest magnitude of each token, over all channels
    uint16 [C, 33]     cumulative frequencies of each channel's 32 symbols; the last, 2**16, is written as 0
    uint32 [C]         bytes of each channel's stream
    bytes              the streams: all tokens of a channel, binary arithmetic coding with 32-bit bounds that are
                       renormalized bit by bit (Witten, Neal, Cleary, CACM 30(6), 1987)

The decoder has a lane for each channel. Every symbol takes a 64-bit division and a binary search in the lane's own
table, and every bit takes a step. A second kernel scales the levels and writes them to their slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.eval.baselines.quantizers import cachegen_bins

__all__ = [
    "CodedChunks",
    "decode",
    "decode_reference",
    "dequantize",
    "dequantize_reference",
    "encode",
    "encode_symbols",
    "quantize",
]

MOST_SYMBOLS = 32
CDF_ENTRIES = MOST_SYMBOLS + 1
_TOTAL = 1 << 16
_AHEAD = 8  # bytes that a decoder may read beyond the last stream

_MOST_SYMBOLS = tl.constexpr(MOST_SYMBOLS)
_CDF_ENTRIES = tl.constexpr(CDF_ENTRIES)
_LANES = 32  # one warp per program, so a lane that needs fewer bits waits for its own warp only


@dataclass(frozen=True, slots=True)
class CodedChunks:
    """Coded chunks of equal size, in S = chunks * units * channels streams, in that order.

    Attributes:
        chunks, units, channels, tokens: how many there are. Unit 2 * l is K and unit 2 * l + 1 is V of layer l.
        tops: `[units]` int32, the largest level M of each unit. Symbol s stands for level s - M.
        peaks: `[chunks, units, tokens]` bfloat16.
        cdf: `[S, 33]` uint16.
        lengths: `[S]` int32, bytes of each stream.
        starts: `[S]` int64, where each stream begins in `data`. This is not stored.
        data: `[bytes]` uint8, all streams in a row, then padding.
    """

    chunks: int
    units: int
    channels: int
    tokens: int
    tops: torch.Tensor
    peaks: torch.Tensor
    cdf: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    data: torch.Tensor

    @property
    def streams(self) -> int:
        """S."""
        return len(self.starts)

    @property
    def values(self) -> int:
        """The number of values in all chunks."""
        return self.streams * self.tokens

    @property
    def nbytes(self) -> int:
        """Bytes stored: the streams, tables of 33 x 2 and lengths of 4 per channel, and 2 per token and unit."""
        return int(self.lengths.sum()) + self.streams * (2 * CDF_ENTRIES + 4) + 2 * self.peaks.numel()

    def to(self, device: torch.device) -> CodedChunks:
        """A copy on another device."""
        arrays = (self.tops, self.peaks, self.cdf, self.lengths, self.starts, self.data)
        return CodedChunks(self.chunks, self.units, self.channels, self.tokens, *(array.to(device) for array in arrays))

    def repeat(self, times: int) -> CodedChunks:
        """The same chunks, `times` times, each with bytes of its own."""
        size = len(self.data) - _AHEAD
        shift = size * torch.arange(times, device=self.starts.device)
        return replace(
            self,
            chunks=times * self.chunks,
            peaks=self.peaks.repeat(times, 1, 1),
            # Not every device repeats uint16.
            cdf=self.cdf.view(torch.int16).repeat(times, 1).view(torch.uint16),
            lengths=self.lengths.repeat(times),
            starts=(shift[:, None] + self.starts).flatten(),
            data=torch.cat([self.data[:size].repeat(times), self.data[size:]]),
        )

    def part(self, first: int, end: int) -> CodedChunks:
        """The chunks `first … end - 1` (views)."""
        each = self.units * self.channels
        at = slice(first * each, end * each)
        return replace(
            self,
            chunks=end - first,
            peaks=self.peaks[first:end],
            cdf=self.cdf[at],
            lengths=self.lengths[at],
            starts=self.starts[at],
        )


def quantize(chunk: KVChunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale every token of every unit by its largest magnitude, and round.

    Args:
        chunk: bfloat16, on any device. All units must have the same number of channels.

    Returns:
        symbols `[units, T, C]` uint8, peaks `[units, T]` bfloat16 and tops `[units]` int32.

    Raises:
        InputError: the dtype is another one, or units differ in size.
    """
    pairs = zip(chunk.keys, chunk.values, strict=True)
    units = [tensor.flatten(1) for pair in pairs for tensor in pair]
    if chunk.layout.torch_dtype != torch.bfloat16 or len({unit.shape for unit in units}) > 1:
        raise InputError("chunk: CacheGen's decoder takes bfloat16 units that all have the same size")
    x = torch.stack(units).float()
    tops = torch.tensor(
        [count // 2 - 1 for count in cachegen_bins(len(units) // 2)], dtype=torch.int32, device=x.device
    )
    peaks = x.abs().amax(2).clamp_min(1e-30).bfloat16()
    levels = (x * (peaks.float().reciprocal() * tops[:, None])[..., None]).round()
    return (levels + tops[:, None, None]).to(torch.uint8), peaks, tops


def _tables(symbols: torch.Tensor) -> torch.Tensor:
    """Cumulative frequencies `[S, 33]` uint16 of streams `[S, T]`. Every symbol gets at least 1 of 2**16."""
    counts = torch.zeros(len(symbols), MOST_SYMBOLS, dtype=torch.int64, device=symbols.device)
    counts.scatter_add_(1, symbols.long(), torch.ones_like(symbols, dtype=torch.int64))
    frequency = 1 + counts * (_TOTAL - MOST_SYMBOLS) // symbols.shape[1]
    most = counts.argmax(1, keepdim=True)
    frequency.scatter_add_(1, most, _TOTAL - frequency.sum(1, keepdim=True))
    cdf = torch.cat([torch.zeros_like(most), frequency.cumsum(1)], 1) % _TOTAL
    return cdf.to(torch.int32).to(torch.uint16)


def encode(chunk: KVChunk) -> CodedChunks:
    """Code one chunk as CacheGen stores it, on the CPU. Arguments and errors: see `quantize`."""
    return encode_symbols(*quantize(chunk))


def encode_symbols(symbols: torch.Tensor, peaks: torch.Tensor, tops: torch.Tensor) -> CodedChunks:
    """Code what `quantize` returns."""
    units, tokens, channels = symbols.shape
    streams = symbols.transpose(1, 2).reshape(units * channels, tokens).contiguous()
    cdf = _tables(streams).cpu()
    room = 2 * tokens + tokens // 8 + 16  # a symbol costs at most 16 bits, plus a little for rounding
    buffer, ends = np.empty(len(streams) * room, np.uint8), np.empty(len(streams), np.int64)
    size = _encode(streams.cpu().numpy(), cdf.numpy(), buffer, ends)
    return CodedChunks(
        1,
        units,
        channels,
        tokens,
        tops.cpu(),
        peaks.cpu()[None],
        cdf,
        torch.from_numpy(np.diff(ends, prepend=0).astype(np.int32)),
        torch.from_numpy(np.append(0, ends[:-1])),
        torch.from_numpy(np.append(buffer[:size], np.zeros(_AHEAD, np.uint8))),
    )


@compiled
def _encode(symbols, cdf, data, ends):  # type: ignore[no-untyped-def]
    """Code streams `[S, T]` one after the other, and return the number of bytes."""
    half, quarter = np.uint64(1 << 31), np.uint64(1 << 30)
    mask, one = np.uint64(0xFFFFFFFF), np.uint64(1)
    size = 0
    for stream in range(len(symbols)):
        low, high = np.uint64(0), mask
        pending, byte, filled = 0, 0, 0
        for t in range(symbols.shape[1] + 1):
            if t < symbols.shape[1]:
                symbol = symbols[stream, t]
                below, above = np.uint64(cdf[stream, symbol]), np.uint64(cdf[stream, symbol + 1])
                if above == 0:
                    above = np.uint64(1 << 16)
                span = high - low + one
                high = low + (span * above >> np.uint64(16)) - one
                low = low + (span * below >> np.uint64(16))
            else:  # two more bits name a number within the bounds, no matter what follows
                pending += 1
            while True:
                if t == symbols.shape[1]:
                    bit = 1 if low >= quarter else 0
                elif high < half:
                    bit = 0
                elif low >= half:
                    bit = 1
                elif low >= quarter and high < half + quarter:
                    bit = -1
                    pending += 1
                    low, high = low - quarter, high - quarter
                else:
                    break
                if bit >= 0:
                    for i in range(pending + 1):
                        byte = byte << 1 | (bit if i == 0 else 1 - bit)
                        filled += 1
                        if filled == 8:
                            data[size] = byte
                            size, byte, filled = size + 1, 0, 0
                    pending = 0
                if t == symbols.shape[1]:
                    break
                low, high = low << one & mask, (high << one | one) & mask
        if filled:
            data[size] = byte << (8 - filled)
            size += 1
        ends[stream] = size
    return size


# Decoding --------------------------------------------------------------------------------------------------------


def decode(coded: CodedChunks, symbols: torch.Tensor) -> None:
    """Decode all streams.

    Args:
        coded: on the device.
        symbols: `[chunks, units, tokens, channels]` uint8, written.
    """
    grid = (triton.cdiv(coded.streams, _LANES),)
    _decode[grid](
        coded.cdf, coded.starts, coded.data, symbols, coded.streams, coded.tokens, coded.channels,
        LANES=_LANES, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip


def decode_reference(coded: CodedChunks, symbols: torch.Tensor) -> None:
    """See `decode`, on the CPU."""
    out = np.empty((coded.streams, coded.tokens), np.uint8)
    _decode_streams(coded.cdf.numpy(), coded.starts.numpy(), coded.data.numpy(), out)
    shape = (coded.chunks, coded.units, coded.channels, coded.tokens)
    symbols.copy_(torch.from_numpy(out).view(shape).transpose(2, 3))


@compiled
def _decode_streams(cdf, starts, data, out):  # type: ignore[no-untyped-def]
    half, quarter = np.uint64(1 << 31), np.uint64(1 << 30)
    mask, one, bits = np.uint64(0xFFFFFFFF), np.uint64(1), np.uint64(16)
    for stream in range(len(out)):
        low, high, value = np.uint64(0), mask, np.uint64(0)
        at = 8 * starts[stream]
        for _ in range(32):
            value = value << one | np.uint64(data[at >> 3] >> (7 - (at & 7)) & 1)
            at += 1
        for t in range(out.shape[1]):
            span = high - low + one
            target = ((value - low + one << bits) - one) // span
            symbol = 0
            while symbol < 31 and np.uint64(cdf[stream, symbol + 1]) <= target:
                symbol += 1
            out[stream, t] = symbol
            above = np.uint64(cdf[stream, symbol + 1]) if symbol < 31 else np.uint64(1 << 16)
            high = low + (span * above >> bits) - one
            low = low + (span * np.uint64(cdf[stream, symbol]) >> bits)
            while True:
                if low >= half:
                    low, high, value = low - half, high - half, value - half
                elif low >= quarter and high < half + quarter:
                    low, high, value = low - quarter, high - quarter, value - quarter
                elif high >= half:
                    break
                bit = np.uint64(data[at >> 3] >> (7 - (at & 7)) & 1)
                low, high, value = low << one, high << one | one, value << one | bit
                at += 1


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    cdf, starts, data, symbols, streams, tokens, channels, LANES: tl.constexpr
):
    stream = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = stream < streams
    table = cdf + stream.to(tl.int64) * _CDF_ENTRIES
    source = data + tl.load(starts + stream, mask=live, other=0)
    out = symbols + (stream // channels).to(tl.int64) * tokens * channels + stream % channels
    low = tl.full([LANES], 0, tl.uint32)
    high = tl.full([LANES], 0xFFFFFFFF, tl.uint32)
    value = tl.full([LANES], 0, tl.uint32)
    for i in tl.static_range(4):
        value = (value << 8) | tl.load(source + i, mask=live, other=0).to(tl.uint32)
    at = tl.full([LANES], 32, tl.int32)  # bits read
    byte = tl.full([LANES], 0, tl.uint32)
    for _ in range(tokens):
        span = (high - low).to(tl.uint64) + 1
        target = (((((value - low).to(tl.uint64) + 1) << 16) - 1) // span).to(tl.uint32)
        symbol = tl.full([LANES], 0, tl.int32)
        step: tl.constexpr = _MOST_SYMBOLS // 2
        for i in tl.static_range(5):
            middle = symbol + (step >> i)
            bound = tl.load(table + middle, mask=live, other=0).to(tl.uint32)
            symbol = tl.where(bound <= target, middle, symbol)
        tl.store(out, symbol.to(tl.uint8), mask=live)
        out += channels
        below = tl.load(table + symbol, mask=live, other=0).to(tl.uint64)
        above = tl.load(table + symbol + 1, mask=live, other=0).to(tl.uint64)
        above = tl.where(above == 0, 65536, above)
        high = low + ((span * above) >> 16).to(tl.uint32) - 1
        low = low + ((span * below) >> 16).to(tl.uint32)
        same = (low ^ high) < 0x80000000
        middle_half = ((low & 0x40000000) != 0) & ((high & 0x40000000) == 0)
        going = live & (same | middle_half)
        while tl.max(going.to(tl.int32), 0) > 0:
            fresh = going & ((at & 7) == 0)
            byte = tl.where(fresh, tl.load(source + (at >> 3), mask=fresh, other=0).to(tl.uint32), byte)
            bit = (byte >> (7 - (at & 7)).to(tl.uint32)) & 1
            # Bounds in the middle half of the range lose their second bit; all others lose their first.
            flip = tl.where(same, 0, 0x80000000).to(tl.uint32)
            low = tl.where(going, (low << 1) ^ flip, low)
            high = tl.where(going, ((high << 1) | 1) ^ flip, high)
            value = tl.where(going, ((value << 1) | bit) ^ flip, value)
            at += going.to(tl.int32)
            same = (low ^ high) < 0x80000000
            middle_half = ((low & 0x40000000) != 0) & ((high & 0x40000000) == 0)
            going = live & (same | middle_half)


def dequantize(coded: CodedChunks, symbols: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Turn levels into values in a paged cache.

    Args:
        coded: on the device.
        symbols: from `decode`.
        slots: `[chunks, tokens]` int64, where each token goes.
        out: `[units, slots, channels]` bfloat16, written at those slots.
    """
    width = min(triton.next_power_of_2(coded.channels), 1024)
    rows = max(4096 // width, 1)
    grid = (coded.chunks * coded.units, triton.cdiv(coded.tokens, rows), triton.cdiv(coded.channels, width))
    _dequantize[grid](
        symbols, coded.peaks, coded.tops, slots, out, coded.units, coded.tokens, coded.channels, out.stride(0),
        TOKENS=rows, CHANNELS=width, enable_fp_fusion=True,
    )  # fmt: skip


def dequantize_reference(coded: CodedChunks, symbols: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """See `dequantize`."""
    scale = coded.peaks.float() / coded.tops[:, None]
    x = (symbols.float() - coded.tops[:, None, None]) * scale[..., None]
    for chunk in range(coded.chunks):
        out[:, slots[chunk]] = x[chunk].to(out.dtype)


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    symbols, peaks, tops, slots, out, units, tokens, channels, unit_stride, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):
    row = tl.program_id(0)  # chunk * units + unit
    unit = row % units
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside = token < tokens
    mask = inside[:, None] & (channel < channels)[None, :]
    at = row.to(tl.int64) * tokens * channels + token[:, None] * channels + channel[None, :]
    top = tl.load(tops + unit)
    level = tl.load(symbols + at, mask=mask, other=0).to(tl.int32) - top
    peak = tl.load(peaks + row.to(tl.int64) * tokens + token, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(peak, tl.full([TOKENS], 1.0, tl.float32) * top)
    slot = tl.load(slots + (row // units).to(tl.int64) * tokens + token, mask=inside, other=0)
    x = level.to(tl.float32) * scale[:, None]
    place = unit.to(tl.int64) * unit_stride + slot[:, None] * channels + channel[None, :]
    # To the nearest, ties to even. This is spelled out because Triton's interpreter truncates instead.
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    tl.store(out + place, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=mask)
