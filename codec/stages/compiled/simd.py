"""Sixteen lanes at once: how to write the loops that LLVM does not vectorize by itself.

The compiler must assume that what a loop writes overlaps what it reads, so it takes one lane at a time where a step
gathers from a table, or where there are many arrays. So such steps are written on vectors of 16. LLVM turns them into
the CPU's instructions: AVX-512, two halves of AVX2, or scalar ones. The steps are in `coder_steps.py`,
`product_steps.py`, `integer_steps.py`, `linear_steps.py` and `byte_plane_steps.py`;
their arithmetic is that of the reference, but for products, whose sums have another order or fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from cuvee.codec.stages.compiled.bfloat16 import LARGEST_BFLOAT16, LARGEST_FLOAT32

WIDTH = 16  # lanes of a step

INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
VECTOR = ir.VectorType(INT32, WIDTH)
BYTES = ir.VectorType(INT8, WIDTH)
HALVES = ir.VectorType(INT16, WIDTH)
FLOATS = ir.VectorType(ir.FloatType(), WIDTH)


class _VolatileLoad(ir.instructions.LoadInstr):  # type: ignore[misc, unused-ignore]
    """A load that LLVM leaves as it is. It would replace one of a vector's lanes by slower moves between registers."""

    def descr(self, buf: list[str]) -> None:
        """Write the instruction."""
        lines: list[str] = []
        super().descr(lines)
        buf.append(lines[0].replace("load", "load volatile", 1))


class Code:
    """Emits the instructions that the steps share.

    Args:
        kinds, values: types and values of the arguments.
    """

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any) -> None:
        self._context, self.builder, self._kinds, self._values = context, builder, kinds, values
        self.wide = "+avx512f" in context.codegen()._tm_features

    def pointer(self, array: int, entry: int, size: int) -> Any:
        """Return the address of the entry numbered by argument `entry`, in the array that is argument `array`."""
        offset = self.builder.mul(self.integer(entry, types.int64), INT64(size))
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
        one = self.builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, INT32(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(VECTOR, [0] * WIDTH))

    def load(self, pointer: Any, kind: Any, align: int) -> Any:
        """Load a vector from memory."""
        return self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=align)

    def store(self, value: Any, pointer: Any, align: int) -> None:
        """Store a vector to memory."""
        self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer()), align=align)

    def gather(self, pointer: Any, element: ir.IntType, index: Any, align: int) -> Any:
        """Load 32 bits from each of the elements numbered by `index`."""
        if not self.wide:
            return self._gather_one_by_one(pointer, element, index, align)
        places = self._pointers(pointer, element, index)
        flags = ir.VectorType(ir.IntType(1), WIDTH)
        kind = ir.FunctionType(VECTOR, [places.type, INT32, flags, VECTOR])
        name = f"llvm.masked.gather.v{WIDTH}i32.v{WIDTH}p0"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        every = ir.Constant(flags, [True] * WIDTH)
        return self.builder.call(function, [places, INT32(align), every, ir.Constant(VECTOR, ir.Undefined)])

    def _gather_one_by_one(self, pointer: Any, element: ir.IntType, index: Any, align: int) -> Any:
        """Gather by loads of one lane each: faster than AVX2's own gathers, which LLVM expands to 64-bit addresses."""
        numbers = cgutils.alloca_once(self.builder, VECTOR)
        self.builder.store(index, numbers)
        elements = self.builder.bitcast(pointer, element.as_pointer())
        gathered = ir.Constant(VECTOR, ir.Undefined)
        for lane, number in enumerate(self._loaded(numbers)):
            address = self.builder.gep(elements, [self.builder.sext(number, INT64)])
            value = self.builder.load(self.builder.bitcast(address, INT32.as_pointer()), align=align)
            gathered = self.builder.insert_element(gathered, value, INT32(lane))
        return gathered

    def each(self, value: Any, pointer: Any) -> Iterator[Any]:
        """Yield the lanes of a vector, which is at `pointer`."""
        if not self.wide:
            yield from self._loaded(pointer)
            return
        for lane in range(WIDTH):
            yield self.builder.extract_element(value, INT32(lane))

    def _loaded(self, pointer: Any) -> Iterator[Any]:
        first = self.builder.bitcast(pointer, INT32.as_pointer())
        for lane in range(WIDTH):
            number = _VolatileLoad(self.builder.block, self.builder.gep(first, [INT32(lane)]), typ=INT32)
            number.align = 4
            self.builder._insert(number)
            yield number

    def _pointers(self, pointer: Any, element: ir.IntType, index: Any) -> Any:
        places = ir.instructions.GEPInstr(
            self.builder.block, pointer, [index], inbounds=False, name="", source_etype=element
        )
        places.type = ir.VectorType(ir.PointerType(), WIDTH)
        self.builder._insert(places)
        return places

    def _numbers(self, array: int, entry: int, later: Any) -> tuple[Any, bool]:
        """Return where entries are, `later` ones after that numbered by argument `entry`; and if they are bfloat16."""
        narrow = self._kinds[array].dtype == types.uint16
        size = 2 if narrow else 4
        pointer = self.pointer(array, entry, size)
        if later is not None:
            pointer = self.builder.gep(pointer, [self.builder.mul(later, INT64(size))])
        return pointer, narrow

    def floats(self, array: int, entry: int, later: Any = None) -> Any:
        """Load 16 entries of an array of float32, or of uint16 for the bits of bfloat16."""
        pointer, narrow = self._numbers(array, entry, later)
        return self.widened(self.load(pointer, HALVES, 2)) if narrow else self.load(pointer, FLOATS, 4)

    def widened(self, value: Any) -> Any:
        """Return a vector of float32 as it is, or one of the bits of bfloat16 as float32."""
        if value.type == FLOATS:
            return value
        return self.builder.bitcast(self.builder.shl(self.builder.zext(value, VECTOR), constant(16)), FLOATS)

    def store_floats(self, value: Any, array: int, entry: int, later: Any = None) -> None:
        """Store 16 entries to such an array, rounded to nearest, ties to even."""
        pointer, narrow = self._numbers(array, entry, later)
        if not narrow:
            self.store(value, pointer, 4)
            return
        self.store(self.narrowed(value), pointer, 2)

    def narrowed(self, value: Any) -> Any:
        """Return the bits of bfloat16 of a vector of float32, rounded to nearest, ties to even."""
        bits = self.builder.bitcast(value, VECTOR)
        odd = self.builder.and_(self.builder.lshr(bits, constant(16)), constant(1))
        up = self.builder.add(self.builder.add(bits, constant(0x7FFF)), odd)
        return self.builder.trunc(self.builder.lshr(up, constant(16)), HALVES)

    def saturated(self, value: Any, array: int) -> Any:
        """Return a vector of float32 within the range of such an array; NaN stays."""
        most = LARGEST_BFLOAT16 if self._kinds[array].dtype == types.uint16 else LARGEST_FLOAT32
        for beyond, limit in ((">", most), ("<", -most)):
            limits = ir.Constant(FLOATS, [limit] * WIDTH)
            value = self.builder.select(self.builder.fcmp_ordered(beyond, value, limits), limits, value)
        return value

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
                        self.builder.shuffle_vector(lines[i], lines[i + distance], ir.Constant(VECTOR, lanes))
                        for lanes in (low, high)
                    )
            distance //= 2
        return lines

    def store_lines(self, lines: list[Any], places: int, entry: int, later: int, out: int) -> None:
        """Store 16 vectors of integers where the entries of an array say, and nowhere if they are below zero.

        `places`, `entry`, `later` and `out` are the numbers of the arguments with the array, its first entry, what is
        added to its entries, and the array that receives the vectors.
        """
        begins = self.builder.bitcast(self.pointer(places, entry, 8), INT64.as_pointer())
        moved, size = self.integer(later, types.int64), lines[0].type.element.width // 8
        for number, line in enumerate(lines):
            begin = self.builder.load(self.builder.gep(begins, [INT64(number)]))
            with self.builder.if_then(self.builder.icmp_signed(">=", begin, INT64(0))):
                target = self.builder.mul(self.builder.add(begin, moved), INT64(size))
                self.store(line, self.builder.gep(self.data(out), [target]), size)

    def taking(self, active: int) -> Any:
        """Return the active lanes; argument `active` is their number."""
        lanes = ir.Constant(VECTOR, list(range(WIDTH)))
        return self.builder.icmp_signed("<", lanes, self.splat(self.integer(active, types.int32)))


def spelled_out(function: Callable[..., Any]) -> Any:
    """Make a Numba intrinsic: the function returns the code of a call."""
    made: Any = intrinsic(function)
    return made


def constant(value: int) -> Any:
    """Return a vector of equal constants."""
    return ir.Constant(VECTOR, [value] * WIDTH)
