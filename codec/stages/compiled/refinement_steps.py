"""Sixteen levels at a time: how refinements are made and applied, as `reference/refinements.py` does.

A level that a byte cannot hold is `BEYOND` there; no step computes with it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_LEVEL
from cuvee.codec.entropy.nested import CONTEXT_BITS, CONTEXTS, ESCAPED, KINDS, MOST
from cuvee.codec.stages.compiled.simd import (
    BYTES,
    FLOATS,
    INT16,
    INT32,
    INT64,
    VECTOR,
    WIDTH,
    Code,
    constant,
    spelled_out,
)

BEYOND = -128
_BYTE_LIMIT = 127
_EXPONENT_OF_ONE, _MANTISSA_BITS = 127, 23  # of a float32

_FOUND = types.Tuple((types.int64, types.boolean))


def _bytes(value: int) -> Any:
    """Return a vector of equal bytes."""
    return ir.Constant(BYTES, [value] * WIDTH)


def _number(builder: Any, lanes: Any) -> Any:
    """Return how many lanes are set."""
    return builder.zext(builder.ctpop(builder.bitcast(lanes, INT16)), INT64)


def _any(builder: Any, lanes: Any) -> Any:
    return builder.icmp_unsigned("!=", builder.bitcast(lanes, INT16), INT16(0))


def _floats(value: float) -> Any:
    """Return a vector of equal floats."""
    return ir.Constant(FLOATS, [float(value)] * WIDTH)


def _magnitude(code: Code, y: int, inverse: int, first: int) -> Any:
    """Return the magnitudes of 16 coefficients in steps."""
    bits = code.builder.and_(code.load(code.pointer(y, first, 4), VECTOR, 4), constant(0x7FFFFFFF))
    scale = code.load(code.pointer(inverse, first, 4), FLOATS, 4)
    return code.builder.fmul(code.builder.bitcast(bits, FLOATS), scale)


def _first_cells(builder: Any, magnitude: Any, zone: Any, bias: Any) -> tuple[Any, Any, Any]:
    """Return the first levels of magnitudes, and their cells; all in steps of the same part."""
    level = builder.fptosi(builder.fadd(magnitude, bias), VECTOR)
    level = builder.select(builder.fcmp_ordered(">=", magnitude, zone), level, constant(0))
    low = builder.fadd(builder.sitofp(level, FLOATS), builder.fsub(zone, _floats(1)))
    none = builder.icmp_signed("==", level, constant(0))
    return level, builder.select(none, _floats(0), low), builder.select(none, zone, builder.fadd(low, _floats(1)))


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


@spelled_out
def cell_step(typing: Any, y, first, inverse, zone, bias, active, level, low, high):  # type: ignore[no-untyped-def]
    """Quantize 16 coefficients as a base does: `cell_step(y, first, inverse, zone, bias, active, level, low, high)`.

    Args:
        typing: Numba's.
        y: float32 array; its entries `first … first + 15` are the coefficients.
        first: the first column.
        inverse: float32 array; at the same entries one over the base's steps.
        zone: float32 array; at the same entries the magnitudes, in steps, below which a level is 0.
        bias: float32 array; at the same entries what is added to other magnitudes.
        active: number of leading coefficients that count.
        level: int32 array; receives the magnitudes of the levels at the same entries.
        low: float32 array; receives where cells begin, in steps of the base.
        high: float32 array; receives where they end.

    Returns:
        whether all active coefficients are below `MAX_LEVEL` steps.
    """
    signature = types.boolean(y, first, inverse, zone, bias, active, level, low, high)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        zone, bias = (code.load(code.pointer(array, 1, 4), FLOATS, 4) for array in (3, 4))
        magnitude = _magnitude(code, 0, 2, 1)
        limit = _floats(MAX_LEVEL)
        fits = builder.fcmp_ordered("<", magnitude, limit)
        level, low, high = _first_cells(builder, builder.select(fits, magnitude, limit), zone, bias)
        for array, own in ((6, level), (7, low), (8, high)):
            code.store(own, code.pointer(array, 1, 4), 4)
        return builder.not_(_any(builder, builder.and_(builder.not_(fits), code.taking(5))))

    return signature, generate


@spelled_out
def cut_step(typing: Any, y, first, inverse, zone, fresh, halvings, active, level, low, high, out):  # type: ignore[no-untyped-def]
    """Cut 16 cells once more: `cut_step(y, first, inverse, zone, fresh, halvings, active, level, low, high, out)`.

    Args:
        typing: Numba's.
        y: float32 array; its entries `first … first + 15` are the coefficients, below `MAX_LEVEL` steps.
        first: the first column.
        inverse: float32 array; at the same entries one over the base's steps.
        zone: float32 array; at the same entries where this refinement cuts the cell around zero, in its own steps.
        fresh: int32 array; at the same entries not zero where no coarser part has levels. There are whole levels then.
        halvings: how often the base's step was halved for this refinement's.
        active: number of leading cells that are cut.
        level: int32 array; at the same entries the magnitudes of the levels, which are updated.
        low: float32 array; at the same entries where cells begin, in steps of the base, which are updated.
        high: float32 array; at the same entries where they end, which are updated.
        out: uint8 array; receives contexts and symbols at the same entries. Those of inactive cells are meaningless.

    Returns:
        how many active symbols are escapes.
    """
    signature = types.int64(y, first, inverse, zone, fresh, halvings, active, level, low, high, out)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        # This refinement's step over the base's, and the inverse: powers of two.
        unit, times = (
            builder.bitcast(code.splat(builder.shl(exponent, INT32(_MANTISSA_BITS))), FLOATS)
            for exponent in (
                operation(INT32(_EXPONENT_OF_ONE), code.integer(5, types.int32))
                for operation in (builder.sub, builder.add)
            )
        )
        targets = [code.pointer(array, 1, 4) for array in (7, 8, 9)]
        coarse, low, high = (
            code.load(target, kind, 4) for target, kind in zip(targets, (VECTOR, FLOATS, FLOATS), strict=True)
        )
        zone = code.load(code.pointer(3, 1, 4), FLOATS, 4)
        fresh = builder.icmp_signed("!=", code.load(code.pointer(4, 1, 4), VECTOR, 4), constant(0))
        taking = code.taking(6)
        magnitude = _magnitude(code, 0, 2, 1)
        y = code.load(code.pointer(0, 1, 4), FLOATS, 4)
        # A new level, of a step of this refinement.
        bias = builder.fsub(_floats(1), zone)
        whole, first_low, first_high = _first_cells(builder, builder.fmul(magnitude, times), zone, bias)
        first_low, first_high = builder.fmul(first_low, unit), builder.fmul(first_high, unit)
        # Or half a cell.
        none = builder.icmp_signed("==", coarse, constant(0))
        middle = builder.fmul(builder.fadd(low, high), _floats(0.5))
        middle = builder.select(none, builder.fmul(zone, unit), middle)
        upper = builder.fcmp_ordered(">=", magnitude, middle)
        half = builder.add(builder.add(coarse, coarse), builder.zext(upper, VECTOR))
        own_low, own_high = builder.select(upper, middle, low), builder.select(upper, high, middle)
        finer = builder.select(fresh, whole, half)
        own_low, own_high = builder.select(fresh, first_low, own_low), builder.select(fresh, first_high, own_high)
        for target, own, before in zip(targets, (finer, own_low, own_high), (coarse, low, high), strict=True):
            code.store(builder.select(taking, own, before), target, 4)
        # A level keeps its sign, so only one that was zero has a symbol with a sign.
        negative = builder.and_(none, builder.fcmp_ordered("<", y, _floats(0)))
        cut = builder.select(fresh, whole, builder.zext(upper, VECTOR))
        escaped = builder.icmp_signed(">", cut, constant(MOST))
        signed = builder.select(negative, builder.sub(constant(0), cut), cut)
        symbol = builder.and_(builder.select(escaped, constant(ESCAPED), signed), constant((1 << CONTEXT_BITS) - 1))
        small = builder.icmp_signed("<", coarse, constant(CONTEXTS - 1))
        context_of = builder.shl(builder.select(small, coarse, constant(CONTEXTS - 1)), constant(CONTEXT_BITS))
        code.store(builder.trunc(builder.or_(context_of, symbol), BYTES), code.pointer(10, 1, 1), 1)
        return _number(builder, builder.and_(escaped, taking))

    return signature, generate
