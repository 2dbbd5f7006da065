"""Sixteen levels at a time: how refinements are applied, as `reference/refinements.py` does.

A level that a byte cannot hold is `BEYOND` there; no step computes with it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from cuvee.codec.entropy.coding_plan import ESCAPE
from cuvee.codec.entropy.nested import CONTEXTS, ESCAPED, KINDS
from cuvee.codec.stages.compiled.simd import (
    BYTES,
    FLOATS,
    INT16,
    INT64,
    VECTOR,
    WIDTH,
    Code,
    constant,
    spelled_out,
)

BEYOND = -128
_BYTE_LIMIT = 127

_FOUND = types.Tuple((types.int64, types.boolean))


def _bytes(value: int) -> Any:
    """Return a vector of equal bytes."""
    return ir.Constant(BYTES, [value] * WIDTH)


def _number(builder: Any, lanes: Any) -> Any:
    """Return how many lanes are set."""
    return builder.zext(builder.ctpop(builder.bitcast(lanes, INT16)), INT64)


def _any(builder: Any, lanes: Any) -> Any:
    return builder.icmp_unsigned("!=", builder.bitcast(lanes, INT16), INT16(0))


@spelled_out
def level_step(typing: Any, symbols, place, active, levels, to):  # type: ignore[no-untyped-def]
    """Take 16 symbols of a base as levels: `level_step(symbols, place, active, levels, to)`.

    Args:
        typing: Numba's.
        symbols: uint8 array.
        place: where 16 symbols can be read.
        active: number of leading levels that are written.
        levels: int8 array. An escape is `BEYOND` there.
        to: where 16 levels can be read and written.

    Returns:
        how many active symbols are escapes.
    """
    signature = types.int64(symbols, place, active, levels, to)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        symbol, target, taking = code.load(code.pointer(0, 1, 1), BYTES, 1), code.pointer(3, 4, 1), code.taking(2)
        code.store(builder.select(taking, symbol, code.load(target, BYTES, 1)), target, 1)
        return _number(builder, builder.and_(builder.icmp_unsigned("==", symbol, _bytes(ESCAPE)), taking))

    return signature, generate


@spelled_out
def context_step(typing: Any, levels, place, out, to):  # type: ignore[no-untyped-def]
    """Write the contexts of 16 levels: `context_step(levels, place, out, to)`.

    Args:
        typing: Numba's.
        levels: int8 array.
        place: where 16 levels can be read.
        out: uint8 array.
        to: where 16 contexts are written.
    """
    signature = types.void(levels, place, out, to)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        level = code.load(code.pointer(0, 1, 1), BYTES, 1)
        negative = builder.icmp_signed("<", level, _bytes(0))
        # As a number without a sign, so that BEYOND has the largest context.
        magnitude = builder.select(negative, builder.sub(_bytes(0), level), level)
        small = builder.icmp_unsigned("<", magnitude, _bytes(CONTEXTS - 1))
        code.store(builder.select(small, magnitude, _bytes(CONTEXTS - 1)), code.pointer(2, 3, 1), 1)
        return context.get_dummy_value()

    return signature, generate


def _refined(code: Code, levels: int, place: int, symbols: int, symbols_at: int) -> tuple[Any, Any, Any, Any]:
    """Refine 16 levels: return the finer levels, the levels, the lanes that are beyond a byte, those that escape."""
    builder = code.builder
    level = code.load(code.pointer(levels, place, 1), BYTES, 1)
    symbol = code.load(code.pointer(symbols, symbols_at, 1), BYTES, 1)
    coarse, cut = builder.sext(level, VECTOR), builder.sext(symbol, VECTOR)
    negative = builder.icmp_signed("<", coarse, constant(0))
    signed = builder.select(negative, builder.sub(constant(0), cut), cut)
    finer = builder.add(builder.add(coarse, coarse), signed)
    beyond = builder.icmp_signed("==", level, _bytes(BEYOND))
    return finer, level, beyond, builder.icmp_signed("==", symbol, _bytes(ESCAPED))


@spelled_out
def refine_step(typing: Any, levels, place, symbols, symbols_at, active):  # type: ignore[no-untyped-def]
    """Refine 16 levels by their symbols: `refine_step(levels, place, symbols, symbols_at, active)`.

    Args:
        typing: Numba's.
        levels: int8 array.
        place: where 16 levels can be read and written.
        symbols: uint8 array.
        symbols_at: where 16 symbols can be read.
        active: number of leading levels that are refined.

    Returns:
        how many active symbols are escapes; and whether an active level is beyond a byte, or would be. If so, none is
        refined.
    """
    signature = _FOUND(levels, place, symbols, symbols_at, active)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        finer, level, beyond, escaped = _refined(code, 0, 1, 2, 3)
        taking = code.taking(4)
        for sign in ("<", -_BYTE_LIMIT), (">", _BYTE_LIMIT):
            beyond = builder.or_(beyond, builder.icmp_signed(sign[0], finer, constant(sign[1])))
        outside = _any(builder, builder.and_(beyond, taking))
        with builder.if_then(builder.not_(outside)):
            code.store(builder.select(taking, builder.trunc(finer, BYTES), level), code.pointer(0, 1, 1), 1)
        return context.make_tuple(builder, _FOUND, [_number(builder, builder.and_(escaped, taking)), outside])

    return signature, generate


@spelled_out
def restore_step(  # type: ignore[no-untyped-def]
    typing: Any, levels, place, symbols, symbols_at, one, two, three, more, step, first, active, out, to
):  # fmt: skip
    """Refine 16 levels for the last time, into coefficients.

    `restore_step(levels, place, symbols, symbols_at, one, two, three, more, step, first, active, out, to)`

    Args:
        typing: Numba's.
        levels: int8 array.
        place: where 16 levels can be read.
        symbols: uint8 array.
        symbols_at: where 16 symbols can be read.
        one: float32 array; its entries `first … first + 15` are the shrinkage of level 1.
        two: float32 array; at the same entries the shrinkage of level 2.
        three: float32 array; at the same entries the shrinkage of level 3.
        more: float32 array; at the same entries the shrinkage of the levels above.
        step: float32 array; at the same entries the steps.
        first: the first column.
        active: number of leading coefficients that may differ from zero.
        out: float32 array, or uint16 for the bits of bfloat16, rounded to nearest, ties to even.
        to: where 16 coefficients are written. Those of escapes, and of levels beyond a byte, are meaningless.

    Returns:
        how many active symbols are escapes, and whether an active level is beyond a byte.
    """
    signature = _FOUND(levels, place, symbols, symbols_at, one, two, three, more, step, first, active, out, to)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        finer, _, beyond, escaped = _refined(code, 0, 1, 2, 3)
        taking = code.taking(10)
        finer = builder.select(taking, finer, constant(0))
        negative = builder.icmp_signed("<", finer, constant(0))
        magnitude = builder.select(negative, builder.sub(constant(0), finer), finer)
        shrink = code.load(code.pointer(3 + KINDS, 9, 4), FLOATS, 4)
        for kind in range(1, KINDS):
            own = code.load(code.pointer(3 + kind, 9, 4), FLOATS, 4)
            shrink = builder.select(builder.icmp_signed("==", magnitude, constant(kind)), own, shrink)
        unit = code.load(code.pointer(8, 9, 4), FLOATS, 4)
        back = builder.fmul(builder.fsub(builder.sitofp(magnitude, FLOATS), shrink), unit)
        # The sign is applied to the product: a step is positive, so the result is that of a signed magnitude.
        bits = builder.xor(builder.bitcast(back, VECTOR), builder.and_(finer, constant(-(1 << 31))))
        bits = builder.select(builder.icmp_signed("==", finer, constant(0)), constant(0), bits)
        code.store_floats(builder.bitcast(bits, FLOATS), 11, 12)
        escapes = _number(builder, builder.and_(escaped, taking))
        return context.make_tuple(builder, _FOUND, [escapes, _any(builder, builder.and_(beyond, taking))])

    return signature, generate
