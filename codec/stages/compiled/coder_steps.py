"""Sixteen symbols at a time: the steps of the entropy coder (`codec/FORMAT.md`), and the quantizer."""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir
from numba.core import types

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_LEVEL
from cuvee.codec.entropy.tables import PROB_BITS, TOTAL
from cuvee.codec.stages.compiled.simd import (
    BYTES,
    FLOATS,
    INT8,
    INT16,
    INT32,
    INT64,
    VECTOR,
    WIDTH,
    Code,
    constant,
    spelled_out,
)

_LOWER_BOUND = 1 << 16
# No instruction gathers 16 bits, so two words are read at once: the next one is the near half.
_BIG_ENDIAN = sys.byteorder == "big"


def _slot(code: Code, alike: bool, index: Any) -> Any:
    """Return the decode table's entries at these indices of each lane's table."""
    slots = code.data(5)
    if alike:
        first = code.builder.mul(code.integer(4, types.int64), INT64(4))
        return code.gather(code.builder.gep(slots, [first]), INT32, index, 4)
    base = code.load(code.pointer(4, 3, 4), VECTOR, 4)
    return code.gather(slots, INT32, code.builder.add(base, index), 4)


def _decoding(alike: bool, second: bool) -> Any:
    """Make the step for lanes that share a table, or have tables of their own.

    Steps come in pairs, because gathering words is slow. The first of two reads two words of each stream, which are all
    that two symbols can need, and the `second` takes what the first has left.
    """

    @spelled_out
    def decode_step(typing: Any, x, at, ahead, first, base, slots, words, offset, count, active, out, to):  # type: ignore[no-untyped-def]
        """Decode one symbol of 16 streams; `decode_alike_steps` take the one table of all lanes in place of `base`.

        From entry `first` on, the uint32 arrays `x`, `at`, `ahead` and `base` hold the lanes' states and the numbers of
        their next words, which are updated; these words, from the first of two steps to the second; and where the table
        of each lane begins in `slots`, the decode tables. `words`, uint8, has `count` words from byte `offset` on, and
        four bytes before them; no byte beyond is read, even for damaged streams. The states of lanes that are not
        `active` do not change. 16 bytes are written at entry `to` of `out`; those of inactive lanes are meaningless.
        """
        signature = types.void(x, at, ahead, first, base, slots, words, offset, count, active, out, to)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = Code(context, builder, sig.args, values)
            state, next_word, left = (code.pointer(array, 3, 4) for array in range(3))
            v, read = code.load(state, VECTOR, 4), code.load(next_word, VECTOR, 4)
            index, high = builder.and_(v, constant(TOTAL - 1)), builder.lshr(v, constant(PROB_BITS))
            slot = _slot(code, alike, index)
            frequency = builder.and_(builder.lshr(slot, constant(12)), constant(0xFFF))
            moved = builder.add(builder.mul(frequency, high), builder.and_(slot, constant(0xFFF)))
            taking = code.taking(9)
            need = builder.and_(builder.icmp_unsigned("<", moved, constant(_LOWER_BOUND)), taking)
            if second:
                pair = code.load(left, VECTOR, 4)
            else:
                # Counted from two words before the first, so no byte beyond the last is read. The last comes in the
                # far half, and a word beyond it is some other one.
                following = builder.add(read, constant(2))
                limit = code.splat(code.integer(8, types.uint32))
                inside = builder.select(builder.icmp_unsigned("<", following, limit), following, limit)
                beyond = builder.and_(builder.shl(builder.sub(following, inside), constant(4)), constant(31))
                # Numbers of bytes, because LLVM gathers 32 bits at places of 16 in two halves.
                inside = builder.shl(inside, constant(1))
                before = builder.sub(code.integer(7, types.int64), INT64(4))
                pair = code.gather(builder.gep(code.data(6), [before]), INT8, inside, 1)
                pair = (builder.shl if _BIG_ENDIAN else builder.lshr)(pair, beyond)
                rest = (builder.shl if _BIG_ENDIAN else builder.lshr)(pair, constant(16))
                code.store(builder.select(need, rest, pair), left, 4)
            word = builder.lshr(pair, constant(16)) if _BIG_ENDIAN else builder.and_(pair, constant(0xFFFF))
            after = builder.select(need, builder.or_(builder.shl(moved, constant(16)), word), moved)
            code.store(builder.select(taking, after, v), state, 4)
            code.store(builder.add(read, builder.zext(need, VECTOR)), next_word, 4)
            code.store(builder.trunc(builder.lshr(slot, constant(24)), BYTES), code.pointer(10, 11, 1), 1)
            return context.get_dummy_value()

        return signature, generate

    return decode_step


# Each a pair of steps that take turns.
decode_steps, decode_alike_steps = (
    tuple(_decoding(alike, second) for second in (False, True)) for alike in (False, True)
)


def _dequantizing(low_bits: bool) -> Any:
    """Make the step for coefficients with low bits, or for those without."""

    @spelled_out
    def dequantize_step(typing: Any, symbols, at, at_low, bits, one, more, step, out, to):  # type: ignore[no-untyped-def]
        """Dequantize 16 symbols of one class.

        `dequantize_step(symbols, at, at_low, bits, one, more, step, out, to)`, or `dequantize_low_step`

        Args:
            symbols: uint8 array.
            at: where 16 symbols can be read.
            at_low: where 16 bytes with low bits can be read in the same array, for `dequantize_low_step`.
            bits: the number of low bits, for `dequantize_low_step`.
            one: float32, the shrinkage of level 1.
            more: float32, the shrinkage of the levels above.
            step: float32, the step.
            out: float32 array, or uint16 for the bits of bfloat16, rounded to nearest, ties to even.
            to: where 16 coefficients are written.

        Returns:
            whether a symbol is -128, which stands for an escape.
        """
        signature = types.boolean(symbols, at, at_low, bits, one, more, step, out, to)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = Code(context, builder, sig.args, values)
            level = builder.sext(code.load(code.pointer(0, 1, 1), BYTES, 1), VECTOR)
            escaped = builder.icmp_signed("==", level, constant(ESCAPE - 256))
            if low_bits:
                low = builder.zext(code.load(code.pointer(0, 2, 1), BYTES, 1), VECTOR)
                shift = code.integer(3, types.int32)
                half = code.splat(builder.shl(INT32(1), builder.sub(shift, INT32(1))))
                level = builder.sub(builder.add(builder.shl(level, code.splat(shift)), low), half)
            small, large, unit = (
                builder.bitcast(code.splat(builder.bitcast(values[i], INT32)), FLOATS) for i in (4, 5, 6)
            )
            negative = builder.icmp_signed("<", level, constant(0))
            magnitude = builder.select(negative, builder.sub(constant(0), level), level)
            shrink = builder.select(builder.icmp_signed("==", magnitude, constant(1)), small, large)
            back = builder.fmul(builder.fsub(builder.sitofp(magnitude, FLOATS), shrink), unit)
            bits = builder.bitcast(back, VECTOR)
            # The sign is applied to the product: a step is positive, so the result is that of a signed magnitude.
            bits = builder.xor(bits, builder.and_(level, constant(-(1 << 31))))
            bits = builder.select(builder.icmp_signed("==", level, constant(0)), constant(0), bits)
            code.store_floats(builder.bitcast(bits, FLOATS), 7, 8)
            return builder.icmp_unsigned("!=", builder.bitcast(escaped, INT16), INT16(0))

        return signature, generate

    return dequantize_step


dequantize_step, dequantize_low_step = _dequantizing(low_bits=False), _dequantizing(low_bits=True)


@spelled_out
def quantize_step(  # type: ignore[no-untyped-def]
    typing: Any, y, at, inverse, zone, rounding, half, bits, least, greatest, first, active, planes, to, levels
):  # fmt: skip
    """Quantize the 16 coefficients at entry `at` of `y` to bytes at entry `to` of `planes`.

    From entry `first` on, the float32 arrays `inverse`, `zone` and `rounding` hold one over the steps, the magnitudes
    in steps below which a level is 0, and what is added to other magnitudes; the int32 arrays `half`, `bits`, `least`
    and `greatest` half the range of the low bits, their number, and the range of a byte's values. `levels`, int32,
    receives the levels plus `half`. Returns how many active coefficients escape, and whether all of them are below
    `MAX_LEVEL` steps.
    """
    result = types.Tuple((types.int64, types.boolean))
    signature = result(y, at, inverse, zone, rounding, half, bits, least, greatest, first, active, planes, to, levels)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        y, scale, zone, rounding = (
            code.load(code.pointer(array, where, 4), FLOATS, 4) for array, where in ((0, 1), (2, 9), (3, 9), (4, 9))
        )
        half, bits, least, greatest = (code.load(code.pointer(array, 9, 4), VECTOR, 4) for array in (5, 6, 7, 8))
        taking = code.taking(10)
        magnitude = builder.bitcast(builder.and_(builder.bitcast(y, VECTOR), constant(0x7FFFFFFF)), FLOATS)
        a = builder.fmul(magnitude, scale)
        limit = ir.Constant(FLOATS, [float(MAX_LEVEL)] * WIDTH)
        fits = builder.fcmp_ordered("<", a, limit)
        level = builder.fptosi(builder.fadd(builder.select(fits, a, limit), rounding), VECTOR)
        level = builder.select(builder.fcmp_ordered(">=", a, zone), level, constant(0))
        positive = builder.fcmp_ordered(">=", y, ir.Constant(FLOATS, [0.0] * WIDTH))
        level = builder.select(positive, level, builder.sub(constant(0), level))
        shifted = builder.add(level, half)
        high = builder.ashr(shifted, bits)
        escaped = builder.or_(builder.icmp_signed("<", high, least), builder.icmp_signed(">", high, greatest))
        code.store(builder.trunc(builder.select(escaped, constant(ESCAPE), high), BYTES), code.pointer(11, 12, 1), 1)
        code.store(shifted, code.pointer(13, 9, 4), 4)
        escapes = builder.ctpop(builder.bitcast(builder.and_(escaped, taking), INT16))
        outside = builder.bitcast(builder.and_(builder.not_(fits), taking), INT16)
        return context.make_tuple(
            builder, result, [builder.zext(escapes, INT64), builder.icmp_unsigned("==", outside, INT16(0))]
        )

    return signature, generate


def _encoding(alike: bool) -> Any:
    """Make the step for lanes that share a table, or have tables of their own."""

    @spelled_out
    def encode_step(typing: Any, x, at, first, base, symbols, symbols_at, coders, active, words):  # type: ignore[no-untyped-def]
        """Encode one symbol of 16 streams; `encode_alike_step` takes the one table of all lanes in place of `base`.

        From entry `first` on, the uint32 arrays `x`, `at` and `base` hold the lanes' states and the indices of their
        next words in `words`, which are updated, and where the table of each lane begins in `coders`, see
        `EntropyTables.coders`. 16 `symbols`, uint8, begin at entry `symbols_at`. The states of lanes that are not
        `active` do not change. Each lane's words, uint16, are adjacent, in the order of coding; the word after the next
        one is overwritten.
        """
        signature = types.void(x, at, first, base, symbols, symbols_at, coders, active, words)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = Code(context, builder, sig.args, values)
            state, next_word = code.pointer(0, 2, 4), code.pointer(1, 2, 4)
            v, to = code.load(state, VECTOR, 4), code.load(next_word, VECTOR, 4)
            symbol = builder.zext(code.load(code.pointer(4, 5, 1), BYTES, 1), VECTOR)
            if alike:
                coder = code.gather(code.pointer(6, 3, 4), INT32, symbol, 4)
            else:
                symbol = builder.add(code.load(code.pointer(3, 2, 4), VECTOR, 4), symbol)
                coder = code.gather(code.data(6), INT32, symbol, 4)
            frequency, below = builder.and_(coder, constant(0xFFFF)), builder.lshr(coder, constant(16))
            taking = code.taking(7)
            limit = builder.shl(frequency, constant(32 - PROB_BITS))
            full = builder.and_(builder.icmp_unsigned(">=", v, limit), taking)
            # In all lanes, without branches: a lane that is not full overwrites its word later.
            words = builder.bitcast(code.data(8), INT16.as_pointer())
            states, places = code.each(v, state), code.each(to, next_word)
            for low, word_at in zip(states, places, strict=True):
                target = builder.gep(words, [builder.zext(word_at, INT64)])
                builder.store(builder.trunc(low, INT16), target, align=2)
            code.store(builder.add(to, builder.zext(full, VECTOR)), next_word, 4)
            v_ = builder.select(full, builder.lshr(v, constant(16)), v)
            # The quotient is below 2**20, so in float32 it is right or off by one.
            safe = builder.select(builder.icmp_unsigned("==", frequency, constant(0)), constant(1), frequency)
            if code.wide:
                ratio = builder.fdiv(builder.uitofp(v_, FLOATS), builder.uitofp(safe, FLOATS))
            else:  # of halves, because AVX2 converts signed integers only
                half = builder.fmul(builder.sitofp(safe, FLOATS), ir.Constant(FLOATS, [0.5] * WIDTH))
                ratio = builder.fdiv(builder.sitofp(builder.lshr(v_, constant(1)), FLOATS), half)
            guess = builder.fptosi(ratio, VECTOR)
            rest = builder.sub(v_, builder.mul(guess, safe))
            less = builder.icmp_signed("<", rest, constant(0))
            guess = builder.select(less, builder.sub(guess, constant(1)), guess)
            rest = builder.select(less, builder.add(rest, safe), rest)
            more = builder.icmp_signed(">=", rest, safe)
            guess = builder.select(more, builder.add(guess, constant(1)), guess)
            rest = builder.select(more, builder.sub(rest, safe), rest)
            after = builder.add(builder.add(builder.shl(guess, constant(PROB_BITS)), rest), below)
            code.store(builder.select(taking, after, v), state, 4)
            return context.get_dummy_value()

        return signature, generate

    return encode_step


encode_step, encode_alike_step = _encoding(alike=False), _encoding(alike=True)


@spelled_out
def lookup_step(typing: Any, table, table_at, index, first, out):  # type: ignore[no-untyped-def]
    """Write to `out` the 16 entries of `table`, counted from `table_at`, that `index` has from `first` on, at the same
    entries.
    """
    signature = types.void(table, table_at, index, first, out)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        entries = code.gather(code.pointer(0, 1, 4), INT32, code.load(code.pointer(2, 3, 4), VECTOR, 4), 4)
        code.store(entries, code.pointer(4, 3, 4), 4)
        return context.get_dummy_value()

    return signature, generate
