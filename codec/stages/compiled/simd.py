"""Sixteen lanes at once: the loops of the coder that LLVM does not vectorize by itself.

A step of rANS gathers from a table and from the coded words. The compiler must assume that the bytes it writes overlap
either, so it takes one lane at a time. Here the steps are written on vectors of 16. LLVM turns them into the CPU's
instructions: AVX-512, two halves of AVX2, or scalar ones. The arithmetic is that of `reference/rans.py` and
`reference/symbols.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

WIDTH = 16  # lanes of a step

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_VECTOR = ir.VectorType(_I32, WIDTH)
_BYTES = ir.VectorType(_I8, WIDTH)
_HALVES = ir.VectorType(_I16, WIDTH)
_FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
_LOWER_BOUND = 1 << 16
# A word is read as the near half of 32 bits, because no instruction gathers 16 bits.
_WORD_SHIFT = 16 if sys.byteorder == "big" else 0


class _Code:
    """Emits the instructions that the steps share.

    Args:
        context, builder: Numba's.
        kinds, values: types and values of the arguments.
    """

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any) -> None:
        self._context, self.builder, self._kinds, self._values = context, builder, kinds, values

    def pointer(self, array: int, place: int, size: int) -> Any:
        """Return the address of the entry numbered by argument `place`, in the array that is argument `array`."""
        offset = self.builder.mul(self.integer(place, types.int64), _I64(size))
        return self.builder.gep(self.data(array), [offset])

    def data(self, index: int) -> Any:
        """Return the address of an array."""
        array = self._context.make_array(self._kinds[index])(self._context, self.builder, self._values[index])
        return self.builder.bitcast(array.data, cgutils.voidptr_t)

    def integer(self, index: int, kind: Any) -> Any:
        """Return an argument as an integer of type `kind`."""
        return self._context.cast(self.builder, self._values[index], self._kinds[index], kind)

    def splat(self, value: Any) -> Any:
        """Return a vector of equal integers."""
        one = self.builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, _I32(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(_VECTOR, [0] * WIDTH))

    def load(self, pointer: Any, kind: Any, align: int) -> Any:
        """Load a vector from memory."""
        return self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=align)

    def store(self, value: Any, pointer: Any, align: int) -> None:
        """Store a vector to memory."""
        self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer()), align=align)

    def gather(self, pointer: Any, element: ir.IntType, index: Any, align: int) -> Any:
        """Load 32 bits from each of the elements numbered by `index`."""
        places = self._places(pointer, element, index)
        flags = ir.VectorType(ir.IntType(1), WIDTH)
        kind = ir.FunctionType(_VECTOR, [places.type, _I32, flags, _VECTOR])
        name = f"llvm.masked.gather.v{WIDTH}i32.v{WIDTH}p0"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        every = ir.Constant(flags, [True] * WIDTH)
        return self.builder.call(function, [places, _I32(align), every, ir.Constant(_VECTOR, ir.Undefined)])

    def scatter(self, value: Any, pointer: Any, index: Any, which: Any) -> None:
        """Store 32 bits to the 16-bit elements numbered by `index`, in the lanes `which`."""
        places = self._places(pointer, _I16, index)
        kind = ir.FunctionType(ir.VoidType(), [_VECTOR, places.type, _I32, which.type])
        name = f"llvm.masked.scatter.v{WIDTH}i32.v{WIDTH}p0"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        self.builder.call(function, [value, places, _I32(2), which])

    def _places(self, pointer: Any, element: ir.IntType, index: Any) -> Any:
        places = ir.instructions.GEPInstr(
            self.builder.block, pointer, [index], inbounds=False, name="", source_etype=element
        )
        places.type = ir.VectorType(ir.PointerType(), WIDTH)
        self.builder._insert(places)
        return places

    def _numbers(self, array: int, place: int, later: Any) -> tuple[Any, bool]:
        """Return where entries are, `later` ones after that numbered by argument `place`; and if they are bfloat16."""
        narrow = self._kinds[array].dtype == types.uint16
        size = 2 if narrow else 4
        pointer = self.pointer(array, place, size)
        if later is not None:
            pointer = self.builder.gep(pointer, [self.builder.mul(later, _I64(size))])
        return pointer, narrow

    def floats(self, array: int, place: int, later: Any = None) -> Any:
        """Load 16 entries of an array of float32, or of uint16 for the bits of bfloat16."""
        pointer, narrow = self._numbers(array, place, later)
        if not narrow:
            return self.load(pointer, _FLOATS, 4)
        bits = self.builder.zext(self.load(pointer, _HALVES, 2), _VECTOR)
        return self.builder.bitcast(self.builder.shl(bits, _constant(16)), _FLOATS)

    def store_floats(self, value: Any, array: int, place: int, later: Any = None) -> None:
        """Store 16 entries to such an array, rounded to nearest, ties to even."""
        pointer, narrow = self._numbers(array, place, later)
        if not narrow:
            self.store(value, pointer, 4)
            return
        bits = self.builder.bitcast(value, _VECTOR)
        odd = self.builder.and_(self.builder.lshr(bits, _constant(16)), _constant(1))
        up = self.builder.add(self.builder.add(bits, _constant(0x7FFF)), odd)
        half = self.builder.trunc(self.builder.lshr(up, _constant(16)), _HALVES)
        self.store(half, pointer, 2)

    def transposed(self, lines: list[Any]) -> list[Any]:
        """Transpose 16 vectors, by swapping ever smaller blocks."""
        lines = list(lines)
        distance = WIDTH // 2
        while distance:
            low = [i if not i & distance else WIDTH + i - distance for i in range(WIDTH)]
            high = [i + distance if not i & distance else WIDTH + i for i in range(WIDTH)]
            for i in range(WIDTH):
                if not i & distance:
                    lines[i], lines[i + distance] = (
                        self.builder.shuffle_vector(lines[i], lines[i + distance], ir.Constant(_VECTOR, lanes))
                        for lanes in (low, high)
                    )
            distance //= 2
        return lines

    def store_halves(self, lines: list[Any], places: int, entry: int, later: int, out: int) -> None:
        """Store 16 vectors of 16 bits where the entries of an array say, and nowhere if they are below zero.

        `places`, `entry`, `later` and `out` are the numbers of the arguments with the array, its first entry, what is
        added to its entries, and the array that receives the vectors.
        """
        place_at = self.builder.bitcast(self.pointer(places, entry, 8), _I64.as_pointer())
        moved = self.integer(later, types.int64)
        for number, line in enumerate(lines):
            place = self.builder.load(self.builder.gep(place_at, [_I64(number)]))
            with self.builder.if_then(self.builder.icmp_signed(">=", place, _I64(0))):
                target = self.builder.mul(self.builder.add(place, moved), _I64(2))
                self.store(line, self.builder.gep(self.data(out), [target]), 2)

    def taking(self, active: int) -> Any:
        """Return the active lanes; argument `active` is their number."""
        lanes = ir.Constant(_VECTOR, list(range(WIDTH)))
        return self.builder.icmp_signed("<", lanes, self.splat(self.integer(active, types.int32)))


def _spelled_out(function: Callable[..., Any]) -> Any:
    """Make a Numba intrinsic: the function returns the code of a call."""
    made: Any = intrinsic(function)
    return made


def _constant(value: int) -> Any:
    return ir.Constant(_VECTOR, [value] * WIDTH)


@_spelled_out
def decode_step(typing: Any, x, at, first, base, slots, words, offset, last, bits, active, out, to):  # type: ignore[no-untyped-def]
    """One symbol of 16 streams: `decode_step(x, at, first, base, slots, words, offset, last, bits, active, out, to)`.

    Args:
        typing: Numba's.
        x: uint32 array; its entries `first … first + 15` are the states, and are updated.
        at: uint32 array; at the same entries the numbers of the next words, which are updated.
        first: the first lane.
        base: uint32 array; at the same entries, where the table of each lane begins in `slots`.
        slots: uint32 array, the decode tables one after the other.
        words: uint8 array, the bytes of the blob.
        offset: where the words begin in `words`. Two bytes beyond word `last` must be readable.
        last: no word beyond this one is read, even for damaged bytes.
        bits: probability bits of the tables.
        active: number of active lanes; the states of inactive lanes do not change.
        out: uint8 array.
        to: where 16 bytes are written; those of inactive lanes are meaningless.
    """
    signature = types.void(x, at, first, base, slots, words, offset, last, bits, active, out, to)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = _Code(context, builder, sig.args, values)
        state, next_word = code.pointer(0, 2, 4), code.pointer(1, 2, 4)
        v, read = code.load(state, _VECTOR, 4), code.load(next_word, _VECTOR, 4)
        prob_bits = code.integer(8, types.uint32)
        mask = code.splat(builder.sub(builder.shl(_I32(1), prob_bits), _I32(1)))
        place = builder.add(code.load(code.pointer(3, 2, 4), _VECTOR, 4), builder.and_(v, mask))
        slot = code.gather(code.data(4), _I32, place, 4)
        frequency = builder.and_(builder.lshr(slot, _constant(12)), _constant(0xFFF))
        above = builder.mul(frequency, builder.lshr(v, code.splat(prob_bits)))
        moved = builder.add(above, builder.and_(slot, _constant(0xFFF)))
        taking = code.taking(9)
        need = builder.and_(builder.icmp_unsigned("<", moved, _constant(_LOWER_BOUND)), taking)
        limit = code.splat(code.integer(7, types.uint32))
        inside = builder.select(builder.icmp_unsigned("<", read, limit), read, limit)
        raw = code.gather(builder.gep(code.data(5), [code.integer(6, types.int64)]), _I16, inside, 1)
        word = builder.and_(builder.lshr(raw, _constant(_WORD_SHIFT)), _constant(0xFFFF))
        after = builder.select(need, builder.or_(builder.shl(moved, _constant(16)), word), moved)
        code.store(builder.select(taking, after, v), state, 4)
        code.store(builder.add(read, builder.zext(need, _VECTOR)), next_word, 4)
        symbols = builder.trunc(builder.lshr(slot, _constant(24)), _BYTES)
        code.store(symbols, code.pointer(10, 11, 1), 1)
        return context.get_dummy_value()

    return signature, generate


@_spelled_out
def dequantize_step(typing: Any, symbols, place, one, more, step, first, active, out, to):  # type: ignore[no-untyped-def]
    """Dequantize 16 symbols: `dequantize_step(symbols, place, one, more, step, first, active, out, to)`.

    Args:
        typing: Numba's.
        symbols: uint8 array.
        place: where 16 symbols can be read.
        one: float32 array; its entries `first … first + 15` are the shrinkage of level 1.
        more: float32 array; at the same entries the shrinkage of the levels above.
        step: float32 array; at the same entries the steps.
        first: the first column.
        active: number of leading coefficients that may differ from zero.
        out: float32 array, or uint16 for the bits of bfloat16, rounded to nearest, ties to even.
        to: where 16 coefficients are written.

    Returns:
        whether an active symbol is -128, which stands for an escape.
    """
    signature = types.boolean(symbols, place, one, more, step, first, active, out, to)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = _Code(context, builder, sig.args, values)
        level = builder.sext(code.load(code.pointer(0, 1, 1), _BYTES, 1), _VECTOR)
        taking = code.taking(6)
        level = builder.select(taking, level, _constant(0))
        small, large, unit = (code.load(code.pointer(i, 5, 4), _FLOATS, 4) for i in (2, 3, 4))
        negative = builder.icmp_signed("<", level, _constant(0))
        magnitude = builder.select(negative, builder.sub(_constant(0), level), level)
        shrink = builder.select(builder.icmp_signed("==", magnitude, _constant(1)), small, large)
        back = builder.fmul(builder.fsub(builder.sitofp(magnitude, _FLOATS), shrink), unit)
        bits = builder.bitcast(back, _VECTOR)
        # The sign is applied to the product: a step is positive, so the result is that of a signed magnitude.
        bits = builder.xor(bits, builder.and_(level, _constant(-(1 << 31))))
        bits = builder.select(builder.icmp_signed("==", level, _constant(0)), _constant(0), bits)
        code.store_floats(builder.bitcast(bits, _FLOATS), 7, 8)
        escaped = builder.icmp_signed("==", level, _constant(-128))
        return builder.icmp_unsigned("!=", builder.bitcast(escaped, _I16), _I16(0))

    return signature, generate


@_spelled_out
def encode_step(typing: Any, x, at, first, base, symbols, place, coders, bits, active, words):  # type: ignore[no-untyped-def]
    """Encode one symbol of 16 streams: `encode_step(x, at, first, base, symbols, place, coders, bits, active, words)`.

    Args:
        typing: Numba's.
        x: uint32 array; its entries `first … first + 15` are the states, and are updated.
        at: uint32 array; at the same entries the place of the next word in `words`, which are updated.
        first: the first lane.
        base: uint32 array; at the same entries, where the table of each lane begins in `coders`.
        symbols: uint8 array; 16 can be read from `place` on.
        place: the first lane's symbol.
        coders: uint32 array, the tables one after the other, see `EntropyTables.coders`.
        bits: probability bits of the tables.
        active: number of active lanes; the states of inactive lanes do not change.
        words: uint16 array. Each lane's words are adjacent, in the order of coding. The word after the next one is
            overwritten.
    """
    signature = types.void(x, at, first, base, symbols, place, coders, bits, active, words)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = _Code(context, builder, sig.args, values)
        state, next_word = code.pointer(0, 2, 4), code.pointer(1, 2, 4)
        v, to = code.load(state, _VECTOR, 4), code.load(next_word, _VECTOR, 4)
        symbol = builder.zext(code.load(code.pointer(4, 5, 1), _BYTES, 1), _VECTOR)
        coder = code.gather(code.data(6), _I32, builder.add(code.load(code.pointer(3, 2, 4), _VECTOR, 4), symbol), 4)
        frequency, below = builder.and_(coder, _constant(0xFFFF)), builder.lshr(coder, _constant(16))
        prob_bits = code.integer(7, types.uint32)
        taking = code.taking(8)
        limit = builder.shl(frequency, code.splat(builder.sub(_I32(32), prob_bits)))
        full = builder.and_(builder.icmp_unsigned(">=", v, limit), taking)
        # The next word overwrites the half beyond this one.
        code.scatter(builder.shl(v, _constant(16)) if sys.byteorder == "big" else v, code.data(9), to, full)
        code.store(builder.add(to, builder.zext(full, _VECTOR)), next_word, 4)
        v_ = builder.select(full, builder.lshr(v, _constant(16)), v)
        # The quotient is below 2**20, so in float32 it is right or off by one.
        safe = builder.select(builder.icmp_unsigned("==", frequency, _constant(0)), _constant(1), frequency)
        guess = builder.fptoui(builder.fdiv(builder.uitofp(v_, _FLOATS), builder.uitofp(safe, _FLOATS)), _VECTOR)
        rest = builder.sub(v_, builder.mul(guess, safe))
        less = builder.icmp_signed("<", rest, _constant(0))
        guess = builder.select(less, builder.sub(guess, _constant(1)), guess)
        rest = builder.select(less, builder.add(rest, safe), rest)
        more = builder.icmp_signed(">=", rest, safe)
        guess = builder.select(more, builder.add(guess, _constant(1)), guess)
        rest = builder.select(more, builder.sub(rest, safe), rest)
        after = builder.add(builder.add(builder.shl(guess, code.splat(prob_bits)), rest), below)
        code.store(builder.select(taking, after, v), state, 4)
        return context.get_dummy_value()

    return signature, generate


@_spelled_out
def lookup_step(typing: Any, table, place, index, first, out):  # type: ignore[no-untyped-def]
    """Look up 16 entries of a table: `lookup_step(table, place, index, first, out)`.

    Args:
        typing: Numba's.
        table: uint32 array.
        place: added to every index.
        index: uint32 array; its entries `first … first + 15` are the indices.
        first: the first lane.
        out: uint32 array; receives the table's entries at the same places.
    """
    signature = types.void(table, place, index, first, out)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = _Code(context, builder, sig.args, values)
        entries = code.gather(code.pointer(0, 1, 4), _I32, code.load(code.pointer(2, 3, 4), _VECTOR, 4), 4)
        code.store(entries, code.pointer(4, 3, 4), 4)
        return context.get_dummy_value()

    return signature, generate


def _add_rows(vectors: int) -> Any:
    """Make a step that adds rows, for 16 times `vectors` values."""

    @_spelled_out
    def add_rows(typing: Any, matrix, first, stride, rows, factors, begin, end, out, to):  # type: ignore[no-untyped-def]
        """Add multiples of a matrix's rows: `add_rows(matrix, first, stride, rows, factors, begin, end, out, to)`.

        Args:
            typing: Numba's.
            matrix: float32 array.
            first: where row 0 begins in it.
            stride: from a row to the next.
            rows: uint32 array; its entries `begin … end - 1` are the numbers of the rows.
            factors: float32 array; at the same entries the factors.
            begin: the first entry.
            end: the entry after the last.
            out: float32 array.
            to: where the sums are. Each product is rounded with its sum where the CPU can do that.
        """
        signature = types.void(matrix, first, stride, rows, factors, begin, end, out, to)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = _Code(context, builder, sig.args, values)
            kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
            fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{WIDTH}f32")
            matrix_at, sums_at = code.pointer(0, 1, 4), code.pointer(7, 8, 4)
            row_bytes = builder.mul(code.integer(2, types.int64), _I64(4))
            row_at = builder.bitcast(code.data(3), _I32.as_pointer())
            factor_at = builder.bitcast(code.data(4), ir.FloatType().as_pointer())
            places = [_I64(4 * WIDTH * vector) for vector in range(vectors)]
            sums = [cgutils.alloca_once(builder, _FLOATS) for _ in places]  # which LLVM keeps in registers
            for place, total in zip(places, sums, strict=True):
                builder.store(code.load(builder.gep(sums_at, [place]), _FLOATS, 4), total)
            limits = code.integer(5, types.int64), code.integer(6, types.int64)
            with cgutils.for_range_slice(builder, *limits, _I64(1), _I64) as (entry, _):
                row = builder.zext(builder.load(builder.gep(row_at, [entry])), _I64)
                factor = builder.load(builder.gep(factor_at, [entry]))
                one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), factor, _I32(0))
                factors_ = builder.shuffle_vector(one, one, ir.Constant(_VECTOR, [0] * WIDTH))
                values_at = builder.gep(matrix_at, [builder.mul(row, row_bytes)])
                for place, total in zip(places, sums, strict=True):
                    row_values = code.load(builder.gep(values_at, [place]), _FLOATS, 4)
                    builder.store(builder.call(fused, [factors_, row_values, builder.load(total)]), total)
            for place, total in zip(places, sums, strict=True):
                code.store(builder.load(total), builder.gep(sums_at, [place]), 4)
            return context.get_dummy_value()

        return signature, generate

    return add_rows


add_rows, add_rows_by_4, add_rows_by_8 = (_add_rows(vectors) for vectors in (1, 4, 8))


@_spelled_out
def list_step(typing: Any, x, place, stride, row, counts, rows, factors, to, pitch):  # type: ignore[no-untyped-def]
    """List what is not zero in 16 rows of 16 columns.

    `list_step(x, place, stride, row, counts, rows, factors, to, pitch)`

    Args:
        typing: Numba's.
        x: float32 array.
        place: where the 16 columns of the first row are.
        stride: from a row to the next.
        row: the number of the first row.
        counts: int64 `[16]`, how many entries each column has; is updated.
        rows: uint32 array, receives the rows of the entries, column by column. 16 entries are written, of which those
            beyond the count are meaningless.
        factors: float32 array, receives the entries, likewise.
        to: where the first column's entries begin in both.
        pitch: from a column's entries to the next column's.
    """
    signature = types.void(x, place, stride, row, counts, rows, factors, to, pitch)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = _Code(context, builder, sig.args, values)
        stride_bytes = builder.mul(code.integer(2, types.int64), _I64(4))
        lines = [
            code.load(builder.gep(code.pointer(0, 1, 4), [builder.mul(stride_bytes, _I64(i))]), _FLOATS, 4)
            for i in range(WIDTH)
        ]
        lines = code.transposed(lines)
        numbers = builder.add(code.splat(code.integer(3, types.uint32)), ir.Constant(_VECTOR, list(range(WIDTH))))
        flags = ir.VectorType(ir.IntType(1), WIDTH)
        compress = [
            cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(kind, [kind, flags, kind]),
                f"llvm.experimental.vector.compress.v{WIDTH}{name}",
            )
            for kind, name in ((_VECTOR, "i32"), (_FLOATS, "f32"))
        ]
        start, pitch_ = code.integer(7, types.int64), code.integer(8, types.int64)
        count_at = builder.bitcast(code.data(4), _I64.as_pointer())
        for lane, line in enumerate(lines):
            there = builder.fcmp_unordered("!=", line, ir.Constant(_FLOATS, [0.0] * WIDTH))
            own = builder.gep(count_at, [_I64(lane)])
            count = builder.load(own)
            entry = builder.add(builder.add(start, builder.mul(pitch_, _I64(lane))), count)
            for array, function, line_ in ((5, compress[0], numbers), (6, compress[1], line)):
                packed = builder.call(function, [line_, there, ir.Constant(line_.type, ir.Undefined)])
                code.store(packed, builder.gep(code.data(array), [builder.mul(entry, _I64(4))]), 4)
            found = builder.zext(builder.ctpop(builder.bitcast(there, _I16)), _I64)
            builder.store(builder.add(count, found), own)
        return context.get_dummy_value()

    return signature, generate


def _shifting(placing: bool) -> tuple[Any, Any]:
    """Make the steps that add a mean and a prediction to values, after which pairs are rotated; or that undo it.

    Undoing, pairs are rotated first, and the sum of mean and prediction is subtracted.
    """

    def shifted(code: _Code, x: Any, offset: Any) -> Any:
        return code.builder.fadd(x, offset) if placing else code.builder.fsub(x, offset)

    @_spelled_out
    def shift_step(typing: Any, x, place, mean, of_mean, guess, of_guess, out, to):  # type: ignore[no-untyped-def]
        """Shift 16 values: `add_step(x, place, mean, of_mean, guess, of_guess, out, to)`, or `subtract_step`.

        Args:
            typing: Numba's.
            x: float32 array, or uint16 for the bits of bfloat16, as `guess` and `out` are.
            place: where the values are.
            mean: float32 array.
            of_mean: where the values' means are.
            guess: the predictions.
            of_guess: where the values' predictions are.
            out: receives the values.
            to: where they are written.
        """
        signature = types.void(x, place, mean, of_mean, guess, of_guess, out, to)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = _Code(context, builder, sig.args, values)
            offset = builder.fadd(code.floats(2, 3), code.floats(4, 5))
            code.store_floats(shifted(code, code.floats(0, 1), offset), 6, 7)
            return context.get_dummy_value()

        return signature, generate

    @_spelled_out
    def turn_step(typing: Any, x, place, mean, of_mean, guess, of_guess, half, cos, sin, angle, out, to):  # type: ignore[no-untyped-def]
        """Shift and rotate 16 pairs of values.

        `add_and_turn_step(x, place, mean, of_mean, guess, of_guess, half, cos, sin, angle, out, to)`, or
        `turn_and_subtract_step`

        Args:
            typing: Numba's.
            x: see `add_step`, like the next five.
            place: where the first of each pair are.
            mean: see above.
            of_mean: see above.
            guess: see above.
            of_guess: see above.
            half: how much later the second of each pair come, in `x` as in `mean`, `guess` and `out`.
            cos: float32 array.
            sin: float32 array.
            angle: where the entries of both are.
            out: receives the values.
            to: where the first of each pair are written.
        """
        signature = types.void(x, place, mean, of_mean, guess, of_guess, half, cos, sin, angle, out, to)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            code = _Code(context, builder, sig.args, values)
            places = None, code.integer(6, types.int64)
            pair = [code.floats(0, 1, later) for later in places]
            offsets = [builder.fadd(code.floats(2, 3, later), code.floats(4, 5, later)) for later in places]
            if placing:
                pair = [shifted(code, x, offset) for x, offset in zip(pair, offsets, strict=True)]
            a, b = pair
            c, s = code.floats(7, 9), code.floats(8, 9)
            pair = [
                builder.fsub(builder.fmul(a, c), builder.fmul(b, s)),
                builder.fadd(builder.fmul(b, c), builder.fmul(a, s)),
            ]
            if not placing:
                pair = [shifted(code, x, offset) for x, offset in zip(pair, offsets, strict=True)]
            for value, later in zip(pair, places, strict=True):
                code.store_floats(value, 10, 11, later)
            return context.get_dummy_value()

        return signature, generate

    return shift_step, turn_step


add_step, add_and_turn_step = _shifting(placing=True)
subtract_step, turn_and_subtract_step = _shifting(placing=False)


def _joining(by_token: bool) -> Any:
    """Make the step that writes joined words token by token, or channel by channel."""

    @_spelled_out
    def join_step(typing: Any, low, at_low, low_row, high, at_high, high_row, added, first, places, entry, later, out):  # type: ignore[no-untyped-def]
        """Join the low and high bytes of 16 channels of 16 tokens to words, and write these.

        `join_step(low, at_low, low_row, high, at_high, high_row, added, first, places, entry, later, out)`, or
        `join_by_channel_step`

        Args:
            typing: Numba's.
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
            code = _Code(context, builder, sig.args, values)
            eight, one, fifteen = (ir.Constant(_HALVES, [bits] * WIDTH) for bits in (8, 1, 15))
            lows, highs = code.pointer(0, 1, 1), code.pointer(3, 4, 1)
            low_bytes, high_bytes = (code.integer(row, types.int64) for row in (2, 5))
            offsets = code.load(code.pointer(6, 7, 1), _BYTES, 1)
            lines = []
            for channel in range(WIDTH):
                number = _I64(channel)
                offset = builder.shuffle_vector(offsets, offsets, ir.Constant(_VECTOR, [channel] * WIDTH))
                below = code.load(builder.gep(lows, [builder.mul(low_bytes, number)]), _BYTES, 1)
                above = code.load(builder.gep(highs, [builder.mul(high_bytes, number)]), _BYTES, 1)
                above = builder.shl(builder.zext(builder.add(above, offset), _HALVES), eight)
                word = builder.or_(builder.zext(below, _HALVES), above)
                lines.append(builder.or_(builder.lshr(word, one), builder.shl(word, fifteen)))
            code.store_halves(code.transposed(lines) if by_token else lines, 8, 9, 10, 11)
            return context.get_dummy_value()

        return signature, generate

    return join_step


join_step, join_by_channel_step = _joining(by_token=True), _joining(by_token=False)


@_spelled_out
def transpose_step(typing: Any, x, place, row, places, entry, later, out):  # type: ignore[no-untyped-def]
    """Transpose 16 rows of 16 values: `transpose_step(x, place, row, places, entry, later, out)`.

    Args:
        typing: Numba's.
        x: uint16 array.
        place: where the first row is.
        row: from a row to the next.
        places: int64 array, where each column is written; below zero: it is not.
        entry: the first column's entry.
        later: added to each place.
        out: uint16 array.
    """
    signature = types.void(x, place, row, places, entry, later, out)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = _Code(context, builder, sig.args, values)
        first, row_bytes = code.pointer(0, 1, 2), builder.mul(code.integer(2, types.int64), _I64(2))
        lines = [code.load(builder.gep(first, [builder.mul(row_bytes, _I64(i))]), _HALVES, 2) for i in range(WIDTH)]
        code.store_halves(code.transposed(lines), 3, 4, 5, 6)
        return context.get_dummy_value()

    return signature, generate


@_spelled_out
def split_step(typing: Any, words, begins, token, later, low, at_low, high, at_high, row):  # type: ignore[no-untyped-def]
    """Split words of 16 channels of 16 tokens into low and high bytes, channel by channel.

    `split_step(words, begins, token, later, low, at_low, high, at_high, row)`

    Args:
        typing: Numba's.
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
        code = _Code(context, builder, sig.args, values)
        eight, one, fifteen = (ir.Constant(_HALVES, [bits] * WIDTH) for bits in (8, 1, 15))
        begin_at = builder.bitcast(code.pointer(1, 2, 8), _I64.as_pointer())
        moved = code.integer(3, types.int64)
        lines = []
        for token_ in range(WIDTH):
            place = builder.add(builder.load(builder.gep(begin_at, [_I64(token_)])), moved)
            word = code.load(builder.gep(code.data(0), [builder.mul(place, _I64(2))]), _HALVES, 2)
            lines.append(builder.or_(builder.shl(word, one), builder.lshr(word, fifteen)))
        row_bytes = code.integer(8, types.int64)
        for channel, line in enumerate(code.transposed(lines)):
            offset = builder.mul(row_bytes, _I64(channel))
            for array, part in ((4, line), (6, builder.lshr(line, eight))):
                code.store(builder.trunc(part, _BYTES), builder.gep(code.pointer(array, array + 1, 1), [offset]), 1)
        return context.get_dummy_value()

    return signature, generate
