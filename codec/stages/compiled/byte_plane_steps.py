"""Words of sixteen channels of sixteen tokens, from their bytes and back: the inner loops of `byte_planes.py`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from cuvee.codec.stages.compiled.simd import BYTES, HALVES, INT64, VECTOR, WIDTH, Code, spelled_out


def _joining(by_token: bool) -> Any:
    """Make the step that writes joined words token by token, or channel by channel."""

    @spelled_out
    def join_step(typing: Any, low, at_low, low_row, high, at_high, high_row, added, first, places, entry, later, out):  # type: ignore[no-untyped-def]
        """Join the low and high bytes of 16 channels of 16 tokens to words, and write these.

        `join_step(low, at_low, low_row, high, at_high, high_row, added, first, places, entry, later, out)`, or
        `join_by_channel_step`

        Args:
            low: uint8 array.
            at_low: where the first channel's low bytes are.
            low_row: from a channel's bytes to the next channel's.
            high: uint8 array.
            at_high: where the first channel's high bytes are.
            high_row: as `low_row`.
            added: uint8 array, added to the high bytes, modulo 256.
            first: where its entries for the channels begin.
            places: int64 array, where the 16 words of each token (or channel) are written; below zero: they are not.
            entry: the entry of the first token (or channel).
            later: added to each place.
            out: uint16 array, receives the words, rotated right by one bit.
        """
        signature = types.void(low, at_low, low_row, high, at_high, high_row, added, first, places, entry, later, out)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = Code(context, builder, sig.args, values)
            eight, one, fifteen = (ir.Constant(HALVES, [bits] * WIDTH) for bits in (8, 1, 15))
            lows, highs = code.pointer(0, 1, 1), code.pointer(3, 4, 1)
            low_bytes, high_bytes = (code.integer(row, types.int64) for row in (2, 5))
            offsets = code.load(code.pointer(6, 7, 1), BYTES, 1)
            lines = []
            for channel in range(WIDTH):
                number = INT64(channel)
                offset = builder.shuffle_vector(offsets, offsets, ir.Constant(VECTOR, [channel] * WIDTH))
                below = code.load(builder.gep(lows, [builder.mul(low_bytes, number)]), BYTES, 1)
                above = code.load(builder.gep(highs, [builder.mul(high_bytes, number)]), BYTES, 1)
                above = builder.shl(builder.zext(builder.add(above, offset), HALVES), eight)
                word = builder.or_(builder.zext(below, HALVES), above)
                lines.append(builder.or_(builder.lshr(word, one), builder.shl(word, fifteen)))
            code.store_halves(code.transposed(lines) if by_token else lines, 8, 9, 10, 11)
            return context.get_dummy_value()

        return signature, generate

    return join_step


join_step, join_by_channel_step = _joining(by_token=True), _joining(by_token=False)


@spelled_out
def split_step(typing: Any, words, begins, token, later, low, at_low, high, at_high, row):  # type: ignore[no-untyped-def]
    """Split words of 16 channels of 16 tokens into low and high bytes, channel by channel.

    `split_step(words, begins, token, later, low, at_low, high, at_high, row)`

    Args:
        words: uint16 array.
        begins: int64 array, where each token's words begin.
        token: the first token's entry.
        later: added to each beginning.
        low: uint8 array, receives the low bytes of the words, rotated left by one bit.
        at_low: where the first channel's are written.
        high: as `low`, for the high bytes.
        at_high: as `at_low`.
        row: from a channel's bytes to the next channel's, in both.
    """
    signature = types.void(words, begins, token, later, low, at_low, high, at_high, row)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        eight, one, fifteen = (ir.Constant(HALVES, [bits] * WIDTH) for bits in (8, 1, 15))
        begin_at = builder.bitcast(code.pointer(1, 2, 8), INT64.as_pointer())
        moved = code.integer(3, types.int64)
        lines = []
        for token_ in range(WIDTH):
            begin = builder.add(builder.load(builder.gep(begin_at, [INT64(token_)])), moved)
            word = code.load(builder.gep(code.data(0), [builder.mul(begin, INT64(2))]), HALVES, 2)
            lines.append(builder.or_(builder.shl(word, one), builder.lshr(word, fifteen)))
        row_bytes = code.integer(8, types.int64)
        for channel, line in enumerate(code.transposed(lines)):
            offset = builder.mul(row_bytes, INT64(channel))
            for array, part in ((4, line), (6, builder.lshr(line, eight))):
                code.store(builder.trunc(part, BYTES), builder.gep(code.pointer(array, array + 1, 1), [offset]), 1)
        return context.get_dummy_value()

    return signature, generate
