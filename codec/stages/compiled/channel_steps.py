"""Sixteen channels of sixteen tokens, from symbols to values and back: the inner loops of `channels.py`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from cuvee.codec.stages.compiled.simd import BYTES, FLOATS, INT32, INT64, VECTOR, WIDTH, Code, constant, spelled_out


def _dequantizing(low_bits: bool) -> Any:
    """Make the step for channels of which some have low bits, or none."""

    @spelled_out
    def dequantize_step(typing: Any, planes, high, low, shift, channel, column, one, more, scale, step, out, to, row):  # type: ignore[no-untyped-def]
        """Dequantize 16 symbols of 16 channels, and write the values token by token.

        `dequantize_channels_step(planes, high, low, shift, channel, column, one, more, scale, step, out, to, row)`, or
        `dequantize_wide_step`, which also adds the low bits.

        Args:
            typing: Numba's.
            planes: uint8 array.
            high: int64 array; at `channel` and the next 15 entries, where the plane of each channel begins.
            low: the same for the planes of low bits. A channel without them has a plane of zeros.
            shift: int32 array; at the same entries the number of low bits.
            channel: the first channel's entry.
            column: the first column, in all planes.
            one: float32 array; at the same entries the shrinkage of level 1.
            more: float32 array; at the same entries the shrinkage of the levels above.
            scale: float32 array; at the same entries what coefficients are multiplied by.
            step: float32, the quantizer's step.
            out: float32 array.
            to: where the 16 values of the first column are written.
            row: from there to those of the next column.

        Returns:
            whether a symbol is -128, which stands for an escape.
        """
        signature = types.boolean(planes, high, low, shift, channel, column, one, more, scale, step, out, to, row)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = Code(context, builder, sig.args, values)
            data, column = code.data(0), code.integer(5, types.int64)
            unit = _splat_float(builder, context.cast(builder, values[9], sig.args[9], types.float32))

            def entry(array: int, number: int, kind: ir.Type, size: int) -> Any:
                at = builder.bitcast(code.pointer(array, 4, size), kind.as_pointer())
                return builder.load(builder.gep(at, [INT64(number)]), align=size)

            def symbols(array: int, number: int) -> Any:
                place = builder.add(entry(array, number, INT64, 8), column)
                return code.load(builder.gep(data, [place]), BYTES, 1)

            escaped = None
            lines = []
            for number in range(WIDTH):
                level = builder.sext(symbols(1, number), VECTOR)
                found = builder.icmp_signed("==", level, constant(-128))
                escaped = found if escaped is None else builder.or_(escaped, found)
                if low_bits:
                    bits = entry(3, number, INT32, 4)
                    half = builder.lshr(builder.shl(INT32(1), bits), INT32(1))
                    below = builder.sub(builder.zext(symbols(2, number), VECTOR), code.splat(half))
                    level = builder.add(builder.shl(level, code.splat(bits)), below)
                negative = builder.icmp_signed("<", level, constant(0))
                magnitude = builder.select(negative, builder.sub(constant(0), level), level)
                small, large, scaled = (
                    _splat_float(builder, entry(array, number, ir.FloatType(), 4)) for array in (6, 7, 8)
                )
                shrink = builder.select(builder.icmp_signed("==", magnitude, constant(1)), small, large)
                back = builder.fmul(builder.fsub(builder.sitofp(magnitude, FLOATS), shrink), unit)
                # The sign is applied to the product: a step is positive, so the result is that of a signed magnitude.
                pattern = builder.xor(builder.bitcast(back, VECTOR), builder.and_(level, constant(-(1 << 31))))
                pattern = builder.select(builder.icmp_signed("==", level, constant(0)), constant(0), pattern)
                lines.append(builder.fmul(builder.bitcast(pattern, FLOATS), scaled))
            first, row = code.integer(11, types.int64), code.integer(12, types.int64)
            for number, line in enumerate(code.transposed(lines)):
                place = builder.mul(builder.add(first, builder.mul(row, INT64(number))), INT64(4))
                code.store(line, builder.gep(code.data(10), [place]), 4)
            return builder.icmp_unsigned("!=", builder.bitcast(escaped, ir.IntType(WIDTH)), ir.IntType(WIDTH)(0))

        return signature, generate

    return dequantize_step


def _splat_float(builder: Any, value: Any) -> Any:
    """Return a vector of equal float32."""
    one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(one, one, ir.Constant(VECTOR, [0] * WIDTH))


dequantize_channels_step, dequantize_wide_step = _dequantizing(low_bits=False), _dequantizing(low_bits=True)


@spelled_out
def normalize_step(typing: Any, x, at, row, scale, channel, places, column, out):  # type: ignore[no-untyped-def]
    """Divide 16 channels of 16 tokens by scales, and write the results channel by channel.

    `normalize_step(x, at, row, scale, channel, places, column, out)`

    Args:
        typing: Numba's.
        x: float32 array.
        at: where the channels of the first token are.
        row: from there to those of the next token.
        scale: float32 array.
        channel: the first channel's entry there.
        places: int64 array; at the same entries, where each channel's results begin; below zero: they are not written.
        column: where the first token's result is among these.
        out: float32 array.
    """
    signature = types.void(x, at, row, scale, channel, places, column, out)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        scales = code.load(code.pointer(3, 4, 4), FLOATS, 4)
        first, row_bytes = code.pointer(0, 1, 4), builder.mul(code.integer(2, types.int64), INT64(4))
        lines = []
        for token in range(WIDTH):
            own = code.load(builder.gep(first, [builder.mul(row_bytes, INT64(token))]), FLOATS, 4)
            lines.append(builder.fdiv(own, scales))
        place_at = builder.bitcast(code.pointer(5, 4, 8), INT64.as_pointer())
        column_ = code.integer(6, types.int64)
        for number, line in enumerate(code.transposed(lines)):
            place = builder.load(builder.gep(place_at, [INT64(number)]))
            with builder.if_then(builder.icmp_signed(">=", place, INT64(0))):
                target = builder.mul(builder.add(place, column_), INT64(4))
                code.store(line, builder.gep(code.data(7), [target]), 4)
        return context.get_dummy_value()

    return signature, generate
