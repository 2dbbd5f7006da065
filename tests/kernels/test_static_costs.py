"""Ahead-of-time compilation of all kernels: what the disassembly says, the budgets, and `make costs`."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import platform
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from tests.kernels.costs import __main__ as command
from tests.kernels.costs.disassembly import (
    INSTRUCTION_KINDS,
    Instruction,
    disassembler,
    parse_amdgcn,
    parse_sass,
    read_cubin,
)
from tests.kernels.costs.loops import describe_loops, innermost_loops
from tests.kernels.costs.static_costs import TARGETS, check, report

import cuvee
from cuvee.codec.errors import CuveeError, InputError

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

Report = dict[str, Any]

# Every kernel takes a minute and a half for each target: `make costs` compiles them for all four.
MEASURED = ("sm_90", "gfx942")

# A loop that ptxas unrolled four times, with the rest in a loop of its own; parts before it and padding are left out.
SASS = """
	code for sm_90a
	.target	sm_90a

		Function : other
        /*0000*/                   EXIT ;                                                   /* 0x000000000000794d */
                                                                                            /* 0x000fea0003800000 */
		..........

		Function : count
	.headerflags	@"EF_CUDA_ACCELERATORS EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                                   /* 0x00000a00ff017b82 */
                                                                                            /* 0x000fe20000000800 */
        /*00b0*/              @!P0 EXIT ;                                                   /* 0x000000000000894d */
        /*00f0*/                   LDG.E R5, desc[UR6][R2.64] ;
        /*0150*/                   PLOP3.LUT P0, PT, PT, PT, PT, 0x80, 0x0 ;
        /*0160*/               @P1 BRA 0x200 ;
        /*0170*/                   IMAD.MOV.U32 R2, RZ, RZ, 0x5 ;
        /*01e0*/                   STG.E.U8 desc[UR6][R2.64], R5 ;
        /*0200*/                   ISETP.GT.AND P1, PT, R0, 0x3, PT ;
        /*0210*/              @!P1 BRA 0x330 ;
        /*0220*/                   HFMA2.MMA R4, -RZ, RZ, 0, 2.98023223876953125e-07 ;
        /*0230*/                   NOP ;
        /*0240*/                   IMAD R7, R5, R4.reuse, 0x1 ;
        /*0250*/                   VIADD R0, R0, 0xfffffffc ;
        /*0260*/                   IMAD R9, R7, R4.reuse, 0x1 ;
        /*0270*/                   NOP ;
        /*0280*/                   ISETP.GT.AND P1, PT, R0, 0x3, PT ;
        /*0290*/                   IMAD R11, R9, R4.reuse, 0x1 ;
        /*02d0*/                   STG.E.U8 desc[UR6][R2.64], R7 ;
        /*02e0*/                   IADD3.X R13, RZ, R3, RZ, P2, !PT ;
        /*02f0*/                   STG.E.U8 desc[UR6][R2.64+0x80], R9 ;
        /*0300*/                   STG.E.U8 desc[UR6][R2.64+0x100], R11 ;
        /*0310*/                   STG.E.U8 desc[UR6][R2.64+0x180], R5 ;
        /*0320*/               @P1 BRA 0x230 ;
        /*0330*/                   ISETP.GT.AND P1, PT, R0, 0x1, PT ;
        /*0340*/              @!P1 BRA 0x400 ;
        /*03d0*/                   STG.E.U8 desc[UR6][R2.64], R7 ;
        /*0400*/                   ISETP.NE.U32.OR P0, PT, R0, RZ, P0 ;
        /*0410*/              @!P0 EXIT ;
        /*0420*/                   HFMA2.MMA R4, -RZ, RZ, 0, 2.98023223876953125e-07 ;
        /*0430*/                   IADD3 R0, R0, -0x1, RZ ;
        /*0440*/                   IMAD R5, R5, R4, 0x1 ;
        /*0480*/                   IADD3 R6, P1, R6, 0x80, RZ ;
        /*0490*/                   STG.E.U8 desc[UR6][R2.64], R5 ;
        /*04b0*/               @P0 BRA 0x430 ;
        /*04c0*/                   EXIT ;
        /*04d0*/                   BRA 0x4d0;
        /*04e0*/                   NOP;
		..........

		Function : next
        /*0000*/                   EXIT ;
		..........
"""

# A matrix product: the wait for a barrier lies behind the end of the kernel.
SASS_WAIT = """
		Function : mm
        /*0000*/                   UMOV UR5, URZ ;
        /*10d0*/                   DEPBAR.LE SB0, 0x2 ;
        /*10e0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*11c0*/               @P0 BRA 0x13a0 ;
        /*1320*/                   UTCHMMA gdesc[UR10], gdesc[UR22], tmem[UR8], tmem[UR34], idesc[UR35], UPT ;
        /*1380*/                   UTCBAR [UR14], URZ ;
        /*13a0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*13d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR15], R22 ;
        /*13e0*/              @!P4 BRA 0x3300 ;
        /*13f0*/                   UIADD3 UR17, UPT, UPT, UR17, 0x1, URZ ;
        /*1800*/                   LDGSTS.E.BYPASS.128 [R45+0xd800], desc[UR18][R20.64], !P3 ;
        /*1840*/                   BRA.U UP0, 0x10d0 ;
        /*1850*/                   FADD R0, R1, R2 ;
        /*32f0*/                   EXIT ;
        /*3300*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR15], R22 ;
        /*3310*/              @!P4 BRA 0x3300 ;
        /*3320*/                   BRA 0x13f0 ;
        /*3360*/                   BPT.TRAP 0x1 ;
        /*33c0*/                   BRA 0x33c0;
"""

# The loop over .LBB0_6 begins in the middle: its last block, .LBB0_5, lies before it and is reached in two ways.
AMDGCN = """
	.globl	decode                          ; -- Begin function decode
decode:                                 ; @decode
.Lfunc_begin0:
	.loc	1 5 0 prologue_end              ; toy.py:5:0
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_waitcnt lgkmcnt(0)
	s_branch .LBB0_6
.LBB0_5:                                ;   in Loop: Header=BB0_6 Depth=1
	s_or_b64 exec, exec, s[4:5]
	s_waitcnt vmcnt(0)
	v_perm_b32 v6, v6, v0, s16
	s_add_i32 s12, s12, -2
	s_cmp_lg_u32 s12, 0
	s_cbranch_scc0 .LBB0_14
.LBB0_6:                                ; =>This Inner Loop Header: Depth=1
	global_load_dword v0, v1, s[10:11] offset:-4
	s_nop 0
	v_mul_f32_e32 v3, v3, v4
	s_and_saveexec_b64 s[0:1], s[2:3]
	s_cbranch_execz .LBB0_8
; %bb.7:                                ;   in Loop: Header=BB0_6 Depth=1
	global_store_byte v[4:5], v7, off
.LBB0_8:                                ;   in Loop: Header=BB0_6 Depth=1
	s_or_b64 exec, exec, s[0:1]
	v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
	global_store_byte v[4:5], v0, off
	s_cbranch_execz .LBB0_5
; %bb.13:                               ;   in Loop: Header=BB0_6 Depth=1
	global_load_ushort v6, v[2:3], off
	s_branch .LBB0_5
.LBB0_14:
	.loc	1 5 1 is_stmt 1                 ; toy.py:5:1
	s_endpgm
.Ltmp2:
.Lfunc_end0:
	.size	decode, .Lfunc_end0-decode
	s_endpgm
"""

TOY = """
import triton, triton.language as tl
from tests.kernels.costs.kernel_spec import Budget, KernelSpec

@triton.jit
def count(x, out, n, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(x + t)
    for i in range(n):
        last = last * 5 + 1
        tl.store(out + t, last.to(tl.uint8))
        out += BLOCK

@triton.jit
def wrong(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.zeros((2 * BLOCK,), tl.float32))

@triton.jit
def choose(x, NAME: tl.constexpr, BLOCK: tl.constexpr):
    if NAME != "right":
        wrong(x, BLOCK)
    tl.store(x + tl.arange(0, BLOCK), 0.0)

@triton.jit
def straight(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.sort(tl.load(x + i)))

COUNT = dict(kernel=count, signature={"x": "*u32", "out": "*u8", "n": "i32"}, constants={"BLOCK": 128})
SPECS = (
    KernelSpec("count", **COUNT, symbol_access="store8", budgets={"sm_90": Budget(4, 40, 0), "gfx942": Budget(1)}),
    KernelSpec("unmarked", **COUNT, symbol_access="load16"),
    KernelSpec("unnamed", count, {"x": "*u32"}, {"BLOCK": 128}),
    KernelSpec("wrong", wrong, {"x": "*fp32"}, {"BLOCK": 128}),
    KernelSpec(
        "choose", choose, {"x": "*fp32"}, {"BLOCK": 128, "NAME": "right"}, options={"maxnreg": 24},
        changes={"gfx942": {"constants": {"NAME": "no"}}, "sm_90": {"num_warps": 2, "options": {"maxnreg": 64}}},
    ),
    KernelSpec("straight", straight, {"x": "*fp32"}, {"BLOCK": 1024}, num_warps=1, options={"maxnreg": 24}),
)
"""


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Compile all kernels for one target of each vendor, once per state of their sources.

    The report is kept in pytest's cache folder, by a digest of all that it depends on: Triton, and every module of
    `kernels/` and of `codec/`, whose constants are compiled in. Several processes that run the tests share it.
    """
    import triton

    package = Path(cuvee.__file__).parent
    sources = sorted(source for name in ("codec", "kernels") for source in (package / name).rglob("*.py"))
    assert len(sources) > 80
    digest = hashlib.sha256(f"{platform.python_version()} {triton.__version__}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    cache: pytest.Cache | None = getattr(request.config, "cache", None)  # there is none with -p no:cacheprovider
    folder = cache.mkdir("cuvee-kernels") if cache else tmp_path_factory.getbasetemp().parent / "cuvee-kernels"
    folder.mkdir(exist_ok=True)
    kept = folder / f"{digest.hexdigest()}.json"
    with FileLock(folder / "lock"):
        if not kept.exists():
            for old in folder.glob("*.json"):
                old.unlink()
            kept.write_text(json.dumps(report(MEASURED)))
        found: Report = json.loads(kept.read_text())
    return found


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Small kernels, some at fault."""
    folder = tmp_path_factory.mktemp("toys")
    (folder / "static_toys.py").write_text(TOY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        found = report(["gfx942", "sm_90"], "static_toys")
    assert not (folder / "cache").exists()  # what is found there might be stale
    return found


def toy(toys: Report, name: str, target: str) -> Report:
    (entry,) = [e for e in toys["kernels"] if (e["kernel"], e["target"]) == (name, target)]
    return dict(entry)


def cut(text: str, first: str, last: str) -> int:
    """Instructions between two lines of an excerpt, NOPs aside."""
    part = text[text.index(first) : text.index(last) + 1]
    return sum("NOP" not in line and "s_nop" not in line for line in part.splitlines())


# --- instructions


def test_sass_is_read_without_padding_and_other_functions() -> None:
    code = parse_sass(SASS, "count")
    assert len(code) == sum(bool(re.match(r" +/\*\w{4}\*/", line)) for line in SASS.splitlines()) - 5
    kinds = {i.at: i.kind for i in code}
    assert [kinds[at] for at in (0x0, 0xB0, 0x220, 0x240, 0x320)] == [
        "memory",
        "control",
        "float",
        "integer",
        "control",
    ]
    assert {i.at: i.target for i in code if i.target is not None} == {
        0x160: 0x200, 0x210: 0x330, 0x320: 0x230, 0x340: 0x400, 0x4B0: 0x430, 0x4D0: 0x4D0,
    }  # fmt: skip
    assert [i.at for i in code if not i.falls] == [0x4C0, 0x4D0]
    assert {i.access for i in code} == {"", "load32", "store8"}
    with pytest.raises(CuveeError, match="no function 'coun'"):
        parse_sass(SASS, "coun")


@pytest.mark.parametrize(
    ("line", "kind", "access", "spill"),
    [
        ("LDG.E.U16.CONSTANT R2, desc[UR4][R2.64]", "memory", "load16", 0),
        ("@P0 LDG.E.EF.128 R4, [R2.64]", "memory", "load128", 0),
        ("STG.E.S8 desc[UR4][R6.64], R13", "memory", "store8", 0),
        ("STL.64 [R1+0x8], R4", "memory", "", 8),
        ("STL [R1], R4", "memory", "", 4),
        ("LDL R4, [R1]", "memory", "", 0),
        ("STS.U8 [R1], R4", "memory", "", 0),
        ("LDGDEPBAR", "control", "", 0),
        ("REDUX.SUM UR4, R3", "integer", "", 0),
        ("RED.E.OR.STRONG.GPU desc[UR4][R2.64], R5", "memory", "", 0),
        ("FLO.U32 R2, R3", "integer", "", 0),
        ("FSETP.GT.AND P0, PT, R2, R3, PT", "float", "", 0),
        ("I2F.U32.RP R2, R3", "float", "", 0),
        ("FENCE.VIEW.ASYNC.S", "control", "", 0),
        ("DEPBAR.LE SB0, 0x1", "control", "", 0),
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4].tnspB, R24, gsb0", "tensor", "", 0),
        ("IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4", "tensor", "", 0),
        ("HFMA2.MMA R4, -RZ, RZ, 0, 0", "float", "", 0),
        ("LOP3.LUT R4, R5, 0x7f, RZ, 0xc0, !PT", "integer", "", 0),
    ],
)
def test_sass_opcodes(line: str, kind: str, access: str, spill: int) -> None:
    (got,) = parse_sass(f"\t\tFunction : f\n        /*0000*/    {line} ;   /* 0x0 */\n", "f")
    assert got == Instruction(0, kind, access, spill)


@pytest.mark.parametrize(
    ("line", "target", "falls"),
    [
        ("BRA 0x40", 0x40, False),
        ("@!UP0 BRA 0x40", 0x40, True),
        ("BRA.U !UP0, 0x40", 0x40, True),
        ("BRA.DIV UR4, 0x40", 0x40, True),
        ("@P0 EXIT", None, True),
        ("EXIT", None, False),
        ("RET.REL.NODEC R2 0x0", None, False),
        ("CALL.REL.NOINC 0x40", None, True),
        ("BSSY B0, 0x40", None, True),
    ],
)
def test_sass_branches(line: str, target: int | None, falls: bool) -> None:
    (got,) = parse_sass(f"\t\tFunction : f\n        /*0000*/    {line} ;\n", "f")
    assert (got.kind, got.target, got.falls) == ("control", target, falls)


def test_a_branch_to_what_is_no_address_is_refused() -> None:
    with pytest.raises(CuveeError, match="BRA"):
        parse_sass("\t\tFunction : f\n        /*0000*/    BRA `(.L_x_1) ;\n", "f")


def test_amdgcn_is_read() -> None:
    code = parse_amdgcn(AMDGCN, "decode")
    assert [i.target for i in code if i.target is not None] == [9, 20, 14, 3, 3]
    assert [i.at for i in code if not i.falls] == [2, 19, 20] and len(code) == 21
    assert [i.access for i in code if i.access] == ["load32", "store8", "store8", "load16"]
    kinds = {kind: sum(i.kind == kind for i in code) for kind in INSTRUCTION_KINDS}
    assert kinds == {"memory": 5, "integer": 5, "float": 1, "tensor": 1, "control": 9}
    with pytest.raises(CuveeError, match="no function 'code'"):
        parse_amdgcn(AMDGCN, "code")


# --- loops


def test_the_unrolled_loop_comes_before_its_rest() -> None:
    main, rest = describe_loops(parse_sass(SASS, "count"), "store8")
    assert main["symbols"] == 4 and main["instructions"] == cut(SASS, "/*0240*/", "/*0320*/") == 11
    assert rest["symbols"] == 1 and rest["instructions"] == cut(SASS, "/*0430*/", "/*04b0*/") == 5
    assert main["instructions_per_symbol"] == 11 / 4
    assert {kind: main[kind] for kind in INSTRUCTION_KINDS} == {
        "memory": 4, "integer": 6, "float": 0, "tensor": 0, "control": 1,
    }  # fmt: skip
    assert describe_loops(parse_sass(SASS, "count"), "store16") == []
    assert [loop["instructions"] for loop in describe_loops(parse_sass(SASS, "count"), None)] == [11, 5]


def test_waiting_is_no_loop_of_its_own() -> None:
    (loop,) = describe_loops(parse_sass(SASS_WAIT, "mm"), None)
    assert loop["instructions"] == cut(SASS_WAIT, "/*10d0*/", "/*1840*/") + cut(SASS_WAIT, "/*3300*/", "/*3320*/")
    assert loop["tensor"] == 1 and loop["float"] == 0 and loop["symbols"] is None


def test_an_amd_loop_with_its_end_before_its_start() -> None:
    (loop,) = describe_loops(parse_amdgcn(AMDGCN, "decode"), "store8")
    assert loop["instructions"] == 17 and loop["symbols"] == 2


def loops(*instructions: Instruction) -> list[list[int]]:
    return [[i.at for i in loop] for loop in innermost_loops(instructions)]


def plain(at: int) -> Instruction:
    return Instruction(at, "integer")


def branch(at: int, target: int, falls: bool = True) -> Instruction:
    return Instruction(at, "control", target=target, falls=falls)


def test_nested_loops_and_dead_code() -> None:
    end = Instruction(9, "control", falls=False)
    assert loops() == loops(plain(0), plain(1)) == []
    # An outer loop 1 … 7 around 2 … 3 and 4 … 5; instruction 10 is never reached.
    nest = [plain(0), plain(1), plain(2), branch(3, 2), plain(4), branch(5, 4), plain(6), branch(7, 1), end]
    assert loops(*nest, plain(10), branch(11, 10)) == [[2, 3], [4, 5]]
    # Both branches back belong to one loop, and so does a part behind the end that returns into it.
    assert loops(plain(0), plain(1), branch(2, 1), plain(3), branch(4, 1), end) == [[1, 2, 3, 4]]
    assert loops(plain(0), plain(1), branch(2, 10), plain(3), branch(4, 1), end, plain(10), branch(11, 3, False)) == [
        [1, 2, 3, 4, 10, 11]
    ]
    # A loop entered at 4, whose lowest address is one of its two ways back.
    assert loops(branch(0, 4, False), plain(1), branch(2, 4, False), plain(4), branch(5, 1), branch(6, 4), end) == [
        [1, 2, 4, 5, 6]
    ]
    # A loop of one instruction that is no wait; a branch to an address between instructions.
    assert loops(plain(0), Instruction(4, "memory", target=4), end) == [[4]]
    assert loops(plain(0), plain(4), branch(6, 2), end) == [[4, 6]]


# --- compilation


def test_small_kernels(toys: Report) -> None:
    assert toys["targets"] == ["gfx942", "sm_90"]
    assert [e["target"] for e in toys["kernels"]] == ["gfx942", "sm_90"] * 6
    for target, scalar in (("sm_90", False), ("gfx942", True)):
        entry = toy(toys, "count", target)
        assert entry["error"] is None and entry["seconds"] > 0
        assert 8 <= entry["registers"] <= 40 and (entry["scalar_registers"] is not None) == scalar
        assert entry["spilled_bytes"] == entry["stack_bytes"] == entry["static_shared_bytes"] == 0
        assert 300 < entry["code_bytes"] < 3000
        assert entry["loop"]["symbols"] >= 1 and 2 < entry["loop"]["instructions_per_symbol"] < 10
    sort = toy(toys, "straight", "sm_90")
    assert sort["registers"] == 24 and sort["spilled_bytes"] >= 64 and sort["stack_bytes"] >= 16
    assert toy(toys, "straight", "gfx942")["num_warps"] == 1 and toy(toys, "choose", "sm_90")["num_warps"] == 2


def test_faults_of_small_kernels(toys: Report) -> None:
    wrong = check(toys)
    assert [line.split(":")[0] for line in wrong] == [
        "count on gfx942",
        "unmarked on gfx942",
        "unmarked on sm_90",
        "unnamed on gfx942 does not compile",
        "unnamed on sm_90 does not compile",
        "wrong on gfx942 does not compile",
        "wrong on sm_90 does not compile",
        "choose on gfx942 does not compile",
    ]
    assert "instructions per symbol" in wrong[0] and wrong[0].endswith("at most 1 allowed")
    assert "no loop has a load16" in wrong[1]
    assert "disagree about n, out" in wrong[3]


def test_limits(toys: Report) -> None:
    def broken(**changes: Any) -> list[str]:
        return check({"kernels": [{**toy(toys, "count", "sm_90"), **changes}]})

    assert broken() == []
    assert broken(spilled_bytes=4) == ["count on sm_90: spilled bytes 4, at most 0 allowed"]
    assert broken(registers=41) == ["count on sm_90: registers 41, at most 40 allowed"]
    assert broken(registers=41, budget=None) == []
    assert broken(dynamic_shared_bytes=229 << 10) == [
        "count on sm_90: 234,496 bytes of shared memory, there are 233,472"
    ]
    assert broken(loop=None) == [
        "count on sm_90: no loop has a store8, the access that marks a symbol",
        "count on sm_90: instructions per symbol unknown, at most 4 allowed",
    ]


@pytest.mark.nightly
def test_every_kernel_compiles(measured: Report) -> None:
    assert measured["targets"] == list(MEASURED)
    assert {e["error"] for e in measured["kernels"]} == {None}
    names = {e["kernel"] for e in measured["kernels"]}
    assert len(measured["kernels"]) == len(names) * len(MEASURED)
    json.dumps(measured, allow_nan=False)


@pytest.mark.nightly
def test_entropy_coding_compiles_for_every_target() -> None:
    others = [target for target in TARGETS if target not in MEASURED]
    compiled = report(others, names=["rans_decode", "rans_encode"])
    assert compiled["targets"] == others and len(compiled["kernels"]) >= 2 * len(others)
    assert {e["error"] for e in compiled["kernels"]} == {None} and check(compiled) == []


@pytest.mark.nightly
def test_budgets_hold(measured: Report) -> None:
    assert check(measured) == []
    entry = decode_on_sm_90(measured)
    assert entry["budget"] == {"instructions_per_symbol": 42, "registers": 40, "spilled_bytes": 0}
    assert 10 < entry["loop"]["instructions_per_symbol"] <= 42 and entry["registers"] <= 40
    assert entry["spilled_bytes"] == 0


def decode_on_sm_90(measured: Report) -> Report:
    """The entropy decoder of the lossy schemes."""
    (entry,) = [e for e in measured["kernels"] if e["kernel"] == "rans_decode" and e["target"] == "sm_90"]
    return dict(entry)


@pytest.fixture
def canned(toys: Report, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Replace the command's report by the toys', which tests may change."""
    data = copy.deepcopy(toys)
    data["kernels"] = [e for e in data["kernels"] if e["error"] is None]

    def get(targets: list[str], names: list[str]) -> Report:
        data["asked"] = list(targets), list(names)
        return data

    monkeypatch.setattr(command, "report", get)
    return data


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["costs", *args])
    return command.main()


def test_json(canned: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--json", "--target", "sm_90", "--target", "gfx942", "count") == 1
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert canned["asked"] == (["sm_90", "gfx942"], ["count"]) and data["kernels"] == canned["kernels"]
    assert shown.err.splitlines() == [f"error: {line}" for line in data["violations"]] and data["violations"]
    assert set(data["versions"]) == {"cuvee", "triton", "python"}


def test_an_unknown_target_is_named_with_the_choices() -> None:
    with pytest.raises(InputError, match="targets: must be among sm_80, sm_90, sm_100, gfx942, got 'sm_70'"):
        report(["sm_70"])


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("TRITON_CUOBJDUMP_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "x.py")))
    with pytest.raises(CuveeError, match="no cuobjdump"):
        report(["sm_90"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="the kernels need Triton"):
        report(["gfx942"])


def test_the_disassembler_may_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "cuobjdump"
    tool.write_text("#!/bin/sh\necho not this one >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("TRITON_CUOBJDUMP_PATH", str(tool))
    assert disassembler() == tool
    with pytest.raises(CuveeError, match="does not read the code: not this one"):
        read_cubin(b"", "f")
    monkeypatch.setenv("TRITON_CUOBJDUMP_PATH", str(tmp_path))  # a folder
    assert disassembler() != tmp_path
