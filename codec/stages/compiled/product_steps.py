"""Sums of rows that are listed, and the list: the inner loops of `product.py`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from cuvee.codec.stages.compiled.simd import FLOATS, INT16, INT32, INT64, VECTOR, WIDTH, Code, spelled_out


def _add_rows(vectors: int) -> Any:
    """Make a step that adds rows, for 16 times `vectors` values."""

    @spelled_out
    def add_rows(typing: Any, matrix, first, stride, rows, factors, begin, end, out, to):  # type: ignore[no-untyped-def]
        """Add multiples of a matrix's rows to 16 times `vectors` sums at entry `to` of `out`; all are float32.

        Row 0 begins at entry `first` of `matrix`, and rows are `stride` apart. The entries `begin … end - 1` of `rows`,
        uint32, number the rows, and those of `factors` multiply them. Each product is rounded with its sum where the
        CPU can do that.
        """
        signature = types.void(matrix, first, stride, rows, factors, begin, end, out, to)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = Code(context, builder, sig.args, values)
            kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
            fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{WIDTH}f32")
            matrix_at, sums_at = code.pointer(0, 1, 4), code.pointer(7, 8, 4)
            row_bytes = builder.mul(code.integer(2, types.int64), INT64(4))
            row_at = builder.bitcast(code.data(3), INT32.as_pointer())
            factor_at = builder.bitcast(code.data(4), ir.FloatType().as_pointer())
            offsets = [INT64(4 * WIDTH * vector) for vector in range(vectors)]
            sums = [cgutils.alloca_once(builder, FLOATS) for _ in offsets]  # which LLVM keeps in registers
            for offset, total in zip(offsets, sums, strict=True):
                builder.store(code.load(builder.gep(sums_at, [offset]), FLOATS, 4), total)
            limits = code.integer(5, types.int64), code.integer(6, types.int64)
            with cgutils.for_range_slice(builder, *limits, INT64(1), INT64) as (entry, _):
                row = builder.zext(builder.load(builder.gep(row_at, [entry])), INT64)
                factor = builder.load(builder.gep(factor_at, [entry]))
                one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), factor, INT32(0))
                factors_ = builder.shuffle_vector(one, one, ir.Constant(VECTOR, [0] * WIDTH))
                values_at = builder.gep(matrix_at, [builder.mul(row, row_bytes)])
                for offset, total in zip(offsets, sums, strict=True):
                    row_values = code.load(builder.gep(values_at, [offset]), FLOATS, 4)
                    builder.store(builder.call(fused, [factors_, row_values, builder.load(total)]), total)
            for offset, total in zip(offsets, sums, strict=True):
                code.store(builder.load(total), builder.gep(sums_at, [offset]), 4)
            return context.get_dummy_value()

        return signature, generate

    return add_rows


add_rows, add_rows_by_4, add_rows_by_8 = (_add_rows(vectors) for vectors in (1, 4, 8))


@spelled_out
def list_step(typing: Any, x, at, stride, row, counts, rows, factors, to, pitch):  # type: ignore[no-untyped-def]
    """List what is not zero in 16 rows of 16 columns of `x`, float32: the row numbered `row` at entry `at`, and the
    next.

    Rows are `stride` apart. `rows`, uint32, and `factors`, float32, receive the rows and the values of the entries,
    column by column: those of the first from entry `to` on, those of each further one `pitch` later. `counts`, int64
    `[16]`, says how many entries each column has, and is updated. 16 entries are written, of which those beyond the
    count are meaningless.
    """
    signature = types.void(x, at, stride, row, counts, rows, factors, to, pitch)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        stride_bytes = builder.mul(code.integer(2, types.int64), INT64(4))
        lines = [
            code.load(builder.gep(code.pointer(0, 1, 4), [builder.mul(stride_bytes, INT64(i))]), FLOATS, 4)
            for i in range(WIDTH)
        ]
        lines = code.transposed(lines)
        numbers = builder.add(code.splat(code.integer(3, types.uint32)), ir.Constant(VECTOR, list(range(WIDTH))))
        flags = ir.VectorType(ir.IntType(1), WIDTH)
        compress = [
            cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(kind, [kind, flags, kind]),
                f"llvm.experimental.vector.compress.v{WIDTH}{name}",
            )
            for kind, name in ((VECTOR, "i32"), (FLOATS, "f32"))
        ]
        start, pitch_ = code.integer(7, types.int64), code.integer(8, types.int64)
        count_at = builder.bitcast(code.data(4), INT64.as_pointer())
        for lane, line in enumerate(lines):
            there = builder.fcmp_unordered("!=", line, ir.Constant(FLOATS, [0.0] * WIDTH))
            counter = builder.gep(count_at, [INT64(lane)])
            count = builder.load(counter)
            entry = builder.add(builder.add(start, builder.mul(pitch_, INT64(lane))), count)
            for array, function, line_ in ((5, compress[0], numbers), (6, compress[1], line)):
                packed = builder.call(function, [line_, there, ir.Constant(line_.type, ir.Undefined)])
                code.store(packed, builder.gep(code.data(array), [builder.mul(entry, INT64(4))]), 4)
            nonzero = builder.zext(builder.ctpop(builder.bitcast(there, INT16)), INT64)
            builder.store(builder.add(count, nonzero), counter)
        return context.get_dummy_value()

    return signature, generate
