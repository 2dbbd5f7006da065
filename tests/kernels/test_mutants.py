"""Faults put into compiled kernels are found: by the emulator, or because a chunk comes out wrong.

A kind of fault is put into up to eight places of a kernel, one at a time, until one is found. Not each can be: some
barriers are there for a memory that is not used again, some masks cover what is masked once more. Nightly, because it
tests the tests: what the emulator finds in small programs is in tests/ptx.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from tests.kernels import scenarios
from tests.kernels.emulation import KERNELS_RUN_ON, TARGET
from tests.ptx.driver import TARGETS, Faulty, State, state

from cuvee.codec.errors import CuveeError

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.usefixtures("products_in_bfloat16"),
    pytest.mark.skipif(KERNELS_RUN_ON != "ptx", reason=f"kernels run on: {KERNELS_RUN_ON}"),
]
PLACES = 8
LIMIT = 1 << 22  # instructions of a program: what loops for good is found soon


@dataclass(frozen=True)
class Mutant:
    """A kind of fault: what `pattern` finds in the PTX of a kernel becomes `instead`; `by` says what must find it."""

    kind: str
    kernel: str
    pattern: str
    instead: str
    by: str = ""

    def __str__(self) -> str:
        return f"{self.kind}, {self.kernel.strip('_')}"


ANY = r"([^,]+)"
MUTANTS = (
    Mutant("swapped operands", "_encode_kernel", rf"(sub\.s32 \t%r\d+), {ANY}, {ANY};", r"\1, \3, \2;"),
    Mutant("dropped barrier", "_gather", r"bar\.sync \t0;", "", "race"),
    Mutant("dropped barrier", "_synthesize", r"bar\.sync \t0;", "", "race"),
    Mutant("dropped barrier", "_quantize", r"bar\.sync \t0;", "", "race"),
    Mutant("dropped barrier", "_count_symbols", r"bar\.sync \t0;", "", "race"),
    Mutant("predicate off by one", "_sum_bytes", r"setp\.gt\.s64", "setp.ge.s64", "out of bounds"),
    Mutant("predicate off by one", "_synthesize", r"setp\.lt\.s32", "setp.le.s32", "out of bounds"),
    Mutant("predicate off by one", "_write_kernel", r"setp\.lt\.s32", "setp.le.s32", "out of bounds"),
    Mutant("rounded up", "_quantize", r"cvt\.rmi\.", "cvt.rpi."),
    Mutant("rounded to nearest", "_quantize", r"cvt\.rmi\.", "cvt.rni."),
    Mutant("removed mask of a load", "_gather", r"@%p\d+ (ld\.global)", r"\1", "out of bounds"),
    Mutant("removed mask of a load", "_encode_kernel", r"@%p\d+ (ld\.global)", r"\1", "out of bounds"),
    Mutant("removed mask of a store", "_synthesize", r"@%p\d+ (st\.global)", r"\1"),
    Mutant("removed mask of a store", "_decode_kernel", r"@%p\d+ (st\.global)", r"\1", "out of bounds"),
    Mutant("negated mask", "_dequantize", r"@(%p\d+) (ld\.global)", r"@!\1 \2", "out of bounds"),
    Mutant("shift off by one", "_encode_kernel", r"(shr\.u32 \t%r\d+, %r\d+), 16;", r"\1, 15;"),
    Mutant("sign forgotten", "_dequantize", r"cvt\.s32\.s8", "cvt.u32.u8"),
    Mutant("low half of a product", "_encode_kernel", r"mul\.hi\.u32", "mul.lo.u32"),
    Mutant("wait for fewer copies", "_analyze", r"cp\.async\.wait_group \t?\d+;", "cp.async.wait_group 7;", "copy"),
    Mutant("shuffle by another distance", "_decode_kernel", r"(shfl\.sync\.up\.b32 \t%r\d+\S*, %r\d+), \d+", r"\1, 7"),
    Mutant("shuffle by none", "_sum_bytes", r"(shfl\.sync\.bfly\.b32 \t%r\d+\S*, %r\d+), \d+", r"\1, 0"),
    Mutant("stored instead of added", "_count_symbols", r"(atom\.\S*shared)\.add\.u32", r"\1.exch.b32"),
    Mutant("maximum instead of sum", "_count_symbols", r"(red\.global\S*)\.add\.u32", r"\1.max.u32"),
    Mutant("sum forgotten", "_sum_bytes", r"@%p\d+ red\.global[^;]*;", ""),
    Mutant("choice turned around", "_decode_kernel", rf"(selp\.b32 \t%r\d+), {ANY}, {ANY},", r"\1, \3, \2,"),
    Mutant("least instead of most", "_decode_kernel", r"redux\.sync\.max", "redux.sync.min"),
    Mutant("most instead of sum", "_write_kernel", r"redux\.sync\.add", "redux.sync.max"),
    Mutant("branch turned around", "_write_escapes", r"@(%p\d+) bra", r"@!\1 bra"),
    Mutant("sign of a sum", "_gather", r"sub\.f32", "add.f32"),
    Mutant("returns at once", "_write_escapes", r"(mov\.u32 \t%r\d+, %tid\.x;)", r"\1 ret;"),
)  # fmt: skip
# In instructions that not all targets have.
_OLDER = (
    Mutant("address off by 8", "_analyze", r"(ld\.shared\.v2\.b32 \t\{[^}]*\}, \[%r\d+)(?:\+\d+)?\];", r"\1+8];"),
    Mutant("sum forgotten", "_synthesize", rf"fma\.rn\.f32 (\t%r\d+), {ANY}, {ANY}, {ANY};", r"mul.rn.f32 \1, \2, \3;"),
)
ALONE = {
    "sm_80": _OLDER,
    "sm_90": (
        *_OLDER,
        Mutant("fence forgotten", "_analyze", r"fence\.proxy\.async[^;]*;", "", "without a fence"),
        Mutant("wgmma not waited for", "_analyze", r"wgmma\.wait_group\.sync\.aligned\s+\d+;", ""),
    ),
    "sm_100": (
        Mutant("fence of a product forgotten", "_analyze", r"fence\.proxy\.async[^;]*;", "", "without a fence"),
        Mutant("product not waited for", "_analyze", r"@!complete bra\.uni waitLoop;", "", "waited for"),
        Mutant("product not waited for", "_synthesize", r"@!complete bra\.uni waitLoop;", "", "waited for"),
        Mutant("store not waited for", "_synthesize", r"tcgen05\.wait::st\.sync\.aligned;", "", "waited for"),
        Mutant("product forgotten", "_synthesize", r"@%p\d+ tcgen05\.mma[^;]*;", ""),
        Mutant("other factors", "_analyze", r"(tcgen05\.mma\S+ \[[^]]*\], \[ %r\d+ \+ )16", r"\g<1>0"),
        Mutant("sum begun anew", "_analyze", r"mov\.pred (\t%p\d+), -1;", r"mov.pred \1, 0;"),
        Mutant("other columns", "_analyze", r"(tcgen05\.ld\S+ \{[^}]*\}, \[%r\d+ \+ )0", r"\g<1>1"),
        Mutant("tensor memory kept", "_analyze", r"@%p\d+ tcgen05\.dealloc[^;]*;", "", "given back"),
    ),
}
RUNS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "_decode_kernel": (scenarios.decodes, ("layer",)),
    "_dequantize": (scenarios.decodes, ("layer",)),
    "_write_escapes": (scenarios.decodes, ("layer",)),
    "_synthesize": (scenarios.decodes, ("layer",)),
    "_count_symbols": (scenarios.encodes, ("lossless",)),
    "_split_planes": (scenarios.encodes, ("lossless",)),
    "_sum_bytes": (scenarios.encodes, ("lossless",)),
}
ENCODED = (scenarios.encodes, ("layer",))


@pytest.fixture
def emulator() -> Iterator[State]:
    current = state()
    before = current.target, current.options
    yield current
    (current.target, current.options), current.mutate = before, None


@pytest.mark.parametrize("scheme", scenarios.SCHEMES)
@pytest.mark.parametrize("target", TARGETS)
def test_without_a_fault_nothing_is_found_on_any_target(target: str, scheme: str, emulator: State) -> None:
    emulator.target = target
    scenarios.decodes(scheme)
    scenarios.encodes(scheme)


@pytest.mark.parametrize("mutant", [*MUTANTS, *ALONE.get(TARGET, ())], ids=str)
def test_faults_are_found(mutant: Mutant, emulator: State) -> None:
    run, schemes = RUNS.get(mutant.kernel, ENCODED)
    # Of the kernels that these chunks launch; tests before this one may have loaded others of the same name.
    texts: set[str] = set()

    def look(name: str, text: str) -> str:
        texts.update([text] if name == mutant.kernel else [])
        return text

    emulator.mutate = look
    for scheme in schemes:
        run(scheme)
    emulator.options = replace(emulator.options, limit=LIMIT)
    count = max(len(re.findall(mutant.pattern, text)) for text in texts)
    assert count, f"nothing in {mutant.kernel} is like {mutant.pattern}"
    outcomes = []
    for place in sorted({k * (count - 1) // max(PLACES - 1, 1) for k in range(PLACES)}):
        outcomes.append(outcome(emulator, mutant, place, lambda: [run(scheme) for scheme in schemes]))
        if outcomes[-1] and mutant.by in outcomes[-1]:
            return
    pytest.fail(f"nothing has found it: {outcomes}")


def outcome(emulator: State, mutant: Mutant, place: int, scenario: Callable[[], object]) -> str:
    """What found the fault in one place; empty if nothing did."""

    def mutate(name: str, text: str) -> str:
        found = list(re.finditer(mutant.pattern, text)) if name == mutant.kernel else []
        if place >= len(found):
            return text
        at = found[place]
        return text[: at.start()] + at.expand(mutant.instead) + text[at.end() :]

    emulator.mutate = mutate
    try:
        scenario()
    except Faulty as error:
        return str(error)
    except AssertionError:
        return "wrong"
    except CuveeError as error:  # the kernels' own checks, or the CPU's of what they wrote
        return type(error).__name__
    finally:
        emulator.mutate = None
    return ""
