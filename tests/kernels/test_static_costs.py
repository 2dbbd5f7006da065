"""Ahead-of-time compilation of all kernels: what the disassembly says, the budgets, and `make costs`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from tests.kernels.costs.disassembly import Instruction, innermost_loops, main_loop, parse_sass
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
    KernelSpec("count", **COUNT, symbol_access="store8", budgets={"sm_90": Budget(4, 40, 0)}),
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


def test_sass_is_read_without_padding_and_other_functions() -> None:
    code = parse_sass(SASS, "count")
    assert len(code) == sum(bool(re.match(r" +/\*\w{4}\*/", line)) for line in SASS.splitlines()) - 5
    control = {i.at: i.control for i in code}
    assert [control[at] for at in (0x0, 0xB0, 0x220, 0x160)] == [False, True, False, True]
    assert {i.at: i.target for i in code if i.target is not None} == {
        0x160: 0x200, 0x210: 0x330, 0x320: 0x230, 0x340: 0x400, 0x4B0: 0x430, 0x4D0: 0x4D0,
    }  # fmt: skip
    assert {i.access for i in code} == {"", "load32", "store8"}
    with pytest.raises(CuveeError, match="no function 'coun'"):
        parse_sass(SASS, "coun")
    with pytest.raises(CuveeError, match="BRA"):
        parse_sass("\t\tFunction : f\n        /*0000*/    BRA `(.L_x_1) ;\n", "f")


@pytest.mark.parametrize(
    ("line", "control", "access", "spill"),
    [
        ("LDG.E.U16.CONSTANT R2, desc[UR4][R2.64]", False, "load16", 0),
        ("@P0 LDG.E.EF.128 R4, [R2.64]", False, "load128", 0),
        ("STG.E.S8 desc[UR4][R6.64], R13", False, "store8", 0),
        ("STL.64 [R1+0x8], R4", False, "", 8),
        ("STL [R1], R4", False, "", 4),
        ("STS.U8 [R1], R4", False, "", 0),
        ("LDGDEPBAR", True, "", 0),
    ],
)
def test_sass_opcodes(line: str, control: bool, access: str, spill: int) -> None:
    (got,) = parse_sass(f"\t\tFunction : f\n        /*0000*/    {line} ;   /* 0x0 */\n", "f")
    assert got == Instruction(0, control, access, spill)


def test_the_unrolled_loop_comes_before_its_rest() -> None:
    code = parse_sass(SASS, "count")
    assert main_loop(code, "store8") == {"instructions": 11, "symbols": 4, "instructions_per_symbol": 11 / 4}
    assert main_loop(code, "store16") is None and len(innermost_loops(code)) == 2
    # What waits is no loop; neither is one around others.
    wait, outer = Instruction(24, True, target=24), Instruction(9, True, target=0)
    inner = [Instruction(0), Instruction(3, target=2), Instruction(5, target=5)]
    assert [[i.at for i in loop] for loop in innermost_loops([*inner, outer, wait])] == [[3], [5]]


def test_small_kernels(toys: Report) -> None:
    assert toys["targets"] == ["gfx942", "sm_90"]
    assert [e["target"] for e in toys["kernels"]] == ["gfx942", "sm_90"] * 6
    for target in toys["targets"]:
        entry = toy(toys, "count", target)
        assert entry["error"] is None and 8 <= entry["registers"] <= 40
        assert entry["spilled_bytes"] == entry["static_shared_bytes"] == 0
    loop = toy(toys, "count", "sm_90")["loop"]
    assert loop["symbols"] >= 1 and 2 < loop["instructions_per_symbol"] < 10
    sort = toy(toys, "straight", "sm_90")
    assert sort["registers"] == 24 and sort["spilled_bytes"] >= 64
    assert toy(toys, "straight", "gfx942")["num_warps"] == 1 and toy(toys, "choose", "sm_90")["num_warps"] == 2


def test_faults_of_small_kernels(toys: Report) -> None:
    wrong = check(toys)
    assert [line.split(":")[0] for line in wrong] == [
        "unmarked on sm_90",
        "unnamed on gfx942 does not compile",
        "unnamed on sm_90 does not compile",
        "wrong on gfx942 does not compile",
        "wrong on sm_90 does not compile",
        "choose on gfx942 does not compile",
    ]
    assert "no loop has a load16" in wrong[0] and "disagree about n, out" in wrong[1]


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


def test_an_unknown_target_is_named_with_the_choices() -> None:
    with pytest.raises(InputError, match="targets: must be among sm_80, sm_90, sm_100, gfx942, got 'sm_70'"):
        report(["sm_70"])
