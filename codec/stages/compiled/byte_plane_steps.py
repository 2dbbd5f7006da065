"""Words of sixteen channels of sixteen tokens, from their bytes and back: the inner loops of `byte_planes.py`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from cuvee.codec.stages.compiled.simd import BYTES, HALVES, INT64, VECTOR, WIDTH, Code, spelled_out


def _joining(by_token: bool) -> Any:
    """Make the step that writes joined words token by token, or channel by channel."""

    @spelled_out
    def join_step(typing: Any, rows, at, plane, row, places, entry, later, out):  # type: ignore[no-untyped-def]
        """Join the bytes of 16 channels of 16 tokens to words, and write these.

        `join_step(rows, at, plane, row, places, entry, later, out)`, or `join_by_channel_step`

        Args:
            rows: uint8 array.
            at: where the first channel's low bytes are.
            plane: from bytes to the next higher bytes.
            row: from a channel's bytes to the next channel's.
            places: int64 array, where the 16 words of each token (or channel) are written; below zero: they are not.
            entry: the entry of the first token (or channel).
            later: added to each place.
            out: uint16 or uint32 array, receives the words, rotated right by one bit.
        """
        signature = types.void(rows, at, plane, row, places, entry, later, out)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = Code(context, builder, sig.args, values)
            first, apart, next_row = code.pointer(0, 1, 1), code.integer(2, types.int64), code.integer(3, types.int64)

            def halves(number: int) -> list[Any]:
                lines = []
                for channel in range(WIDTH):
                    offset = builder.add(builder.mul(apart, INT64(number)), builder.mul(next_row, INT64(channel)))
                    low = code.load(builder.gep(first, [offset]), BYTES, 1)
                    high = code.load(builder.gep(first, [builder.add(offset, apart)]), BYTES, 1)
                    lines.append(_joined(builder, low, high, HALVES))
                return code.transposed(lines) if by_token else lines

            lines = halves(0)
            if sig.args[7].dtype == types.uint32:
                lines = [_joined(builder, *pair, VECTOR) for pair in zip(lines, halves(2), strict=True)]
            code.store_lines([_rotated(builder, line, right=True) for line in lines], 4, 5, 6, 7)
            return context.get_dummy_value()

        return signature, generate

    return join_step


join_step, join_by_channel_step = _joining(by_token=True), _joining(by_token=False)


@spelled_out
def split_step(typing: Any, words, begins, token, later, planes, at, plane, row):  # type: ignore[no-untyped-def]
    """Split words of 16 channels of 16 tokens into their bytes, channel by channel.

    `split_step(words, begins, token, later, planes, at, plane, row)`

    Args:
        words: uint16 or uint32 array.
        begins: int64 array, where each token's words begin.
        token: the first token's entry.
        later: added to each beginning.
        planes: uint8 array, receives the bytes of the words, rotated left by one bit.
        at: where the first channel's low bytes are written.
        plane: from bytes to the next higher bytes.
        row: from a channel's bytes to the next channel's.
    """
    signature = types.void(words, begins, token, later, planes, at, plane, row)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        kind, size = (HALVES, 2) if sig.args[0].dtype == types.uint16 else (VECTOR, 4)
        begin_at = builder.bitcast(code.pointer(1, 2, 8), INT64.as_pointer())
        lines = []
        for token_ in range(WIDTH):
            begin = builder.add(builder.load(builder.gep(begin_at, [INT64(token_)])), code.integer(3, types.int64))
            word = code.load(builder.gep(code.data(0), [builder.mul(begin, INT64(size))]), kind, size)
            lines.append(_rotated(builder, word, right=False))
        first, apart, next_row = code.pointer(4, 5, 1), code.integer(6, types.int64), code.integer(7, types.int64)
        for number in range(0, size, 2):
            shift = ir.Constant(kind, [8 * number] * WIDTH)
            halves = [builder.trunc(builder.lshr(line, shift), HALVES) for line in lines] if size > 2 else lines
            for channel, line in enumerate(code.transposed(halves)):
                offset = builder.add(builder.mul(apart, INT64(number)), builder.mul(next_row, INT64(channel)))
                high = builder.lshr(line, ir.Constant(HALVES, [8] * WIDTH))
                code.store(builder.trunc(line, BYTES), builder.gep(first, [offset]), 1)
                code.store(builder.trunc(high, BYTES), builder.gep(first, [builder.add(offset, apart)]), 1)
        return context.get_dummy_value()

    return signature, generate


def _joined(builder: Any, low: Any, high: Any, kind: ir.VectorType) -> Any:
    """Return vectors of numbers of half the bits as one."""
    shift = ir.Constant(kind, [kind.element.width // 2] * WIDTH)
    return builder.or_(builder.zext(low, kind), builder.shl(builder.zext(high, kind), shift))


def _rotated(builder: Any, word: Any, right: bool) -> Any:
    """Return words rotated by one bit."""
    one, rest = (ir.Constant(word.type, [bits] * WIDTH) for bits in (1, word.type.element.width - 1))
    return builder.or_(builder.lshr(word, one if right else rest), builder.shl(word, rest if right else one))
