"""Sums of products of 16-bit integers, and these integers: the inner loops of `integer_product.py`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from cuvee.codec.stages.compiled.simd import FLOATS, INT16, INT32, INT64, VECTOR, WIDTH, Code, constant, spelled_out
from cuvee.codec.support.integer_maps import LONGEST

TOKENS = 4  # that share each load of the map: as many sums as the registers hold
_HALF = WIDTH // 2


@spelled_out
def pair_rows(typing: Any, y, at, stride, rows, pairs, to, units, first):  # type: ignore[no-untyped-def]
    """Round 16 columns to integers, as pairs of rows: `pair_rows(y, at, stride, rows, pairs, to, units, first)`.

    Args:
        y: float32 array.
        at: where row 0 of the columns begins.
        stride: from a row to the next.
        rows: how many there are, an even number.
        pairs: int32 array; receives 16 pairs for each two rows, the earlier row's integer in the low half.
        to: where the first are written.
        units: float32 array; receives what 1 stands for in each column, which makes the norm of a column `LONGEST`.
        first: the first column.
    """
    signature = types.void(y, at, stride, rows, pairs, to, units, first)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        row_bytes = builder.mul(code.integer(2, types.int64), INT64(4))
        source, target, count = code.pointer(0, 1, 4), code.pointer(4, 5, 4), code.integer(3, types.int64)
        zero = ir.Constant(FLOATS, [0.0] * WIDTH)
        squares = cgutils.alloca_once_value(builder, zero)
        with cgutils.for_range(builder, count, intp=INT64) as loop:
            row = code.load(builder.gep(source, [builder.mul(loop.index, row_bytes)]), FLOATS, 4)
            builder.store(builder.fadd(builder.load(squares), builder.fmul(row, row)), squares)
        total = builder.load(squares)
        norm = _of_vector(code, "llvm.sqrt", total)
        longest = ir.Constant(FLOATS, [LONGEST] * WIDTH)
        unit = builder.fdiv(norm, longest)
        # A column without a finite norm other than zero becomes zeros.
        sound = builder.and_(
            builder.fcmp_ordered(">", total, zero),
            builder.fcmp_ordered("<", total, ir.Constant(FLOATS, [float("inf")] * WIDTH)),
        )
        scale = builder.select(sound, builder.fdiv(longest, norm), zero)
        code.store(unit, code.pointer(6, 7, 4), 4)
        half = builder.lshr(count, INT64(1))
        with cgutils.for_range(builder, half, intp=INT64) as loop:
            at = builder.gep(source, [builder.mul(builder.shl(loop.index, INT64(1)), row_bytes)])
            low, high = (
                builder.fptosi(_of_vector(code, "llvm.rint", builder.fmul(code.load(row_at, FLOATS, 4), scale)), VECTOR)
                for row_at in (at, builder.gep(at, [row_bytes]))
            )
            pair = builder.or_(builder.and_(low, constant(0xFFFF)), builder.shl(high, constant(16)))
            code.store(pair, builder.gep(target, [builder.mul(loop.index, INT64(4 * WIDTH))]), 4)
        return context.get_dummy_value()

    return signature, generate


@spelled_out
def transpose_step(typing: Any, x, at, stride, out, to):  # type: ignore[no-untyped-def]
    """Transpose 16 rows of 16 numbers: `transpose_step(x, at, stride, out, to)`.

    Args:
        x: float32 array.
        at: where the first row is.
        stride: from a row to the next.
        out: float32 array, receives rows one after the other.
        to: where the first is written.
    """
    signature = types.void(x, at, stride, out, to)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        source, target = code.pointer(0, 1, 4), code.pointer(3, 4, 4)
        row_bytes = builder.mul(code.integer(2, types.int64), INT64(4))
        rows = [code.load(builder.gep(source, [builder.mul(row_bytes, INT64(i))]), FLOATS, 4) for i in range(WIDTH)]
        for i, row in enumerate(code.transposed(rows)):
            code.store(row, builder.gep(target, [INT64(4 * WIDTH * i)]), 4)
        return context.get_dummy_value()

    return signature, generate


def _of_vector(code: Code, name: str, value: Any) -> Any:
    function = cgutils.get_or_insert_function(
        code.builder.module, ir.FunctionType(FLOATS, [FLOATS]), f"{name}.v{WIDTH}f32"
    )
    return code.builder.call(function, [value])


@spelled_out
def multiply_step(typing: Any, pairs, at, matrix, tile, half, units, first, scale, value, out, to, stride):  # type: ignore[no-untyped-def]
    """Multiply the rows of `TOKENS` columns by the map of 16 values.

    `multiply_step(pairs, at, matrix, tile, half, units, first, scale, value, out, to, stride)`

    Args:
        pairs: int32 array, see `pair_rows`.
        at: where the first pair of the first column is.
        matrix: int32 array; for each two rows 16 pairs of integers, one for each value.
        tile: where the first are.
        half: half the number of rows.
        units: float32 array.
        first: where what 1 stands for in each column begins in it.
        scale: float32 array.
        value: where what 1 stands for in each value's map begins in it.
        out: float32 array.
        to: where the first column's values are written.
        stride: from a column's values to the next column's.
    """
    signature = types.void(pairs, at, matrix, tile, half, units, first, scale, value, out, to, stride)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        words, sums, floats = ir.VectorType(INT16, WIDTH), ir.VectorType(INT32, _HALF), ir.VectorType(ir.FloatType(), 8)
        every = ir.Constant(sums, [0] * _HALF)
        multiply = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(sums, [words, words]), "llvm.x86.avx2.pmadd.wd"
        )
        source, map_at = code.pointer(0, 1, 4), code.pointer(2, 3, 4)
        totals = [[cgutils.alloca_once_value(builder, every) for _ in range(2)] for _ in range(TOKENS)]

        def splat(value: Any, kind: Any) -> Any:
            one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT32(0))
            return builder.shuffle_vector(one, one, every)

        with cgutils.for_range(builder, code.integer(4, types.int64), intp=INT64) as loop:
            offset = builder.mul(loop.index, INT64(4 * WIDTH))
            tile_at = builder.gep(map_at, [offset])
            halves = [code.load(builder.gep(tile_at, [INT64(2 * WIDTH * i)]), words, 4) for i in range(2)]
            pair_at = builder.bitcast(builder.gep(source, [offset]), INT32.as_pointer())
            for token, of_token in enumerate(totals):
                pair = splat(builder.load(builder.gep(pair_at, [INT64(token)])), sums)
                for line, total in zip(halves, of_token, strict=True):
                    product = builder.call(multiply, [builder.bitcast(pair, words), line])
                    builder.store(builder.add(builder.load(total), product), total)
        scales = [code.load(builder.gep(code.pointer(7, 8, 4), [INT64(4 * _HALF * i)]), floats, 4) for i in range(2)]
        unit_at = builder.bitcast(code.pointer(5, 6, 4), ir.FloatType().as_pointer())
        row_bytes = builder.mul(code.integer(11, types.int64), INT64(4))
        for token, of_token in enumerate(totals):
            unit = splat(builder.load(builder.gep(unit_at, [INT64(token)])), floats)
            to_token = builder.gep(code.pointer(9, 10, 4), [builder.mul(row_bytes, INT64(token))])
            for i, (total, value_scale) in enumerate(zip(of_token, scales, strict=True)):
                result = builder.fmul(builder.sitofp(builder.load(total), floats), builder.fmul(value_scale, unit))
                code.store(result, builder.gep(to_token, [INT64(4 * _HALF * i)]), 4)
        return context.get_dummy_value()

    return signature, generate
