"""Weighted sums of four rows at a time, and sixteen values at a time: the inner loops of `correcting.py`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from cuvee.codec.stages.compiled.simd import (
    FLOATS,
    HALVES,
    INT32,
    INT64,
    VECTOR,
    WIDTH,
    Code,
    constant,
    spelled_out,
)

ROWS = 4  # which are summed together, so that each value that is loaded serves four products


def _weigh(vectors: int) -> Any:
    """Make a step that computes sums, for 16 times `vectors` values in each of four rows."""

    @spelled_out
    def weigh(typing: Any, weights, first, values, at, stride, count, out, to, pitch):  # type: ignore[no-untyped-def]
        """Write four rows of weighted sums: `weigh(weights, first, values, at, stride, count, out, to, pitch)`.

        Args:
            typing: Numba's.
            weights: float32 array with four adjacent rows of `count` weights.
            first: where these begin.
            values: float32 array.
            at: where the first row of values begins.
            stride: from a row of values to the next.
            count: number of rows of values.
            out: float32 array, receives the sums.
            to: where the first row of sums begins.
            pitch: from a row of sums to the next.
        """
        signature = types.void(weights, first, values, at, stride, count, out, to, pitch)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = Code(context, builder, sig.args, values)
            kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
            fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{WIDTH}f32")
            weights_at = builder.bitcast(code.pointer(0, 1, 4), ir.FloatType().as_pointer())
            values_at, out_at = code.pointer(2, 3, 4), code.pointer(6, 7, 4)
            stride_bytes = builder.mul(code.integer(4, types.int64), INT64(4))
            count_ = code.integer(5, types.int64)
            pitch_bytes = builder.mul(code.integer(8, types.int64), INT64(4))
            places = [INT64(4 * WIDTH * vector) for vector in range(vectors)]
            zero = ir.Constant(FLOATS, [0.0] * WIDTH)
            sums = [[cgutils.alloca_once(builder, FLOATS) for _ in places] for _ in range(ROWS)]  # kept in registers
            for total in (each for row in sums for each in row):
                builder.store(zero, total)
            with cgutils.for_range(builder, count_) as loop:
                row_at = builder.gep(values_at, [builder.mul(loop.index, stride_bytes)])
                loaded = [code.load(builder.gep(row_at, [place]), FLOATS, 4) for place in places]
                for number, row in enumerate(sums):
                    entry = builder.add(builder.mul(count_, INT64(number)), loop.index)
                    weight = builder.load(builder.gep(weights_at, [entry]))
                    equal = _equal(builder, weight)
                    for vector, total in zip(loaded, row, strict=True):
                        builder.store(builder.call(fused, [equal, vector, builder.load(total)]), total)
            for number, row in enumerate(sums):
                line_at = builder.gep(out_at, [builder.mul(pitch_bytes, INT64(number))])
                for place, total in zip(places, row, strict=True):
                    code.store(builder.load(total), builder.gep(line_at, [place]), 4)
            return context.get_dummy_value()

        return signature, generate

    return weigh


weigh, weigh_by_4 = (_weigh(vectors) for vectors in (1, 4))


@spelled_out
def subtract_step(typing: Any, x, at, old, begin, out, to):  # type: ignore[no-untyped-def]
    """Write the differences of 16 values: `subtract_step(x, at, old, begin, out, to)`.

    Args:
        typing: Numba's.
        x: float32 array, or uint16 for the bits of bfloat16, as `old` is.
        at: where the values are.
        old: what is subtracted.
        begin: where it is.
        out: float32 array, receives the differences.
        to: where they are written.
    """
    signature = types.void(x, at, old, begin, out, to)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        code.store_floats(builder.fsub(code.floats(0, 1), code.floats(2, 3)), 4, 5)
        return context.get_dummy_value()

    return signature, generate


@spelled_out
def turn_step(typing: Any, x, at, half, cos, sin, angle):  # type: ignore[no-untyped-def]
    """Rotate 16 pairs of values where they are: `turn_step(x, at, half, cos, sin, angle)`.

    Args:
        typing: Numba's.
        x: float32 array.
        at: where the first of each pair are.
        half: how much later the second of each pair come.
        cos: float32 array.
        sin: float32 array.
        angle: where the entries of both are.
    """
    signature = types.void(x, at, half, cos, sin, angle)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        later = code.integer(2, types.int64)
        a, b = code.floats(0, 1), code.floats(0, 1, later)
        c, s = code.floats(3, 5), code.floats(4, 5)
        code.store_floats(builder.fsub(builder.fmul(a, c), builder.fmul(b, s)), 0, 1)
        code.store_floats(builder.fadd(builder.fmul(b, c), builder.fmul(a, s)), 0, 1, later)
        return context.get_dummy_value()

    return signature, generate


@spelled_out
def add_step(typing: Any, x, at, scale, out, to):  # type: ignore[no-untyped-def]
    """Add a multiple of 16 values: `add_step(x, at, scale, out, to)`.

    Args:
        typing: Numba's.
        x: float32 array.
        at: where the values are.
        scale: float32, the factor.
        out: float32 array, or uint16 for the bits of bfloat16. Sums are rounded to it once.
        to: where they are added.
    """
    signature = types.void(x, at, scale, out, to)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        more = builder.fmul(code.floats(0, 1), _equal(builder, values[2]))
        code.store_floats(code.saturated(builder.fadd(code.floats(3, 4), more), 3), 3, 4)
        return context.get_dummy_value()

    return signature, generate


@spelled_out
def add_across_step(typing: Any, x, at, pitch, lanes, scale, places, entry, out, begin):  # type: ignore[no-untyped-def]
    """Add a multiple of 16 values of each of up to 16 tokens that are adjacent in each dimension.

    `add_across_step(x, at, pitch, lanes, scale, places, entry, out, begin)`

    Args:
        typing: Numba's.
        x: float32 array with rows of values.
        at: where the 16 values of the first row are.
        pitch: from a row to the next.
        lanes: int32 `[16]`, the row of the values of each of 16 adjacent tokens; -1 for a token that is left alone.
        scale: float32, the factor.
        places: int64 array.
        entry: where the entries of the 16 values are, which tell their places after `begin`.
        out: float32 array, or uint16 for the bits of bfloat16. Sums are rounded to it once.
        begin: where the first token begins.
    """
    signature = types.void(x, at, pitch, lanes, scale, places, entry, out, begin)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        narrow = sig.args[7].dtype == types.uint16
        size, kind, name = (2, HALVES, "i16") if narrow else (4, FLOATS, "f32")
        rows_at, pitch_bytes = code.pointer(0, 1, 4), builder.mul(code.integer(2, types.int64), INT64(4))
        rows = code.load(code.data(3), VECTOR, 4)
        taken = builder.icmp_signed(">=", rows, constant(0))
        there = builder.select(taken, rows, constant(0))
        lines = []
        for lane in range(WIDTH):
            row = builder.zext(builder.extract_element(there, INT32(lane)), INT64)
            lines.append(code.load(builder.gep(rows_at, [builder.mul(row, pitch_bytes)]), FLOATS, 4))
        factor = _equal(builder, values[4])
        places_at = builder.bitcast(code.pointer(5, 6, 8), INT64.as_pointer())
        begin = code.integer(8, types.int64)
        flags = ir.VectorType(ir.IntType(1), WIDTH)
        pointer = code.data(7).type
        load = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(kind, [pointer, INT32, flags, kind]), f"llvm.masked.load.v{WIDTH}{name}.p0"
        )
        store = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [kind, pointer, INT32, flags]),
            f"llvm.masked.store.v{WIDTH}{name}.p0",
        )
        nothing = ir.Constant(kind, None)
        for number, line in enumerate(code.transposed(lines)):
            place = builder.add(begin, builder.load(builder.gep(places_at, [INT64(number)])))
            target = builder.gep(code.data(7), [builder.mul(place, INT64(size))])
            old = builder.call(load, [target, INT32(size), taken, nothing])
            new = code.saturated(builder.fadd(code.widened(old), builder.fmul(line, factor)), 7)
            builder.call(store, [code.narrowed(new) if narrow else new, target, INT32(size), taken])
        return context.get_dummy_value()

    return signature, generate


def _equal(builder: Any, value: Any) -> Any:
    """Return a vector of equal numbers."""
    one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(one, one, ir.Constant(VECTOR, [0] * WIDTH))
