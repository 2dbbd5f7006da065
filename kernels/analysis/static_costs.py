"""What the kernels cost before any runs: every `KernelSpec` compiled ahead of time, without a GPU.

`report` compiles all kernels for the targets asked for and reads off each: registers, spills, shared memory, code
size, and the instructions of the innermost loop that does the work; of a loop over symbols, the instructions a lane
spends on one. `check` compares a report with the budgets of the kernels. On the command line: `cuvee kernels`.

A loop is a strongly connected part of the control flow graph that is reachable from the kernel's entry; without the
instruction that enters it, what is still strongly connected are the loops inside it. Loops of control instructions
alone (a wait for a barrier) count as instructions of the loop around them. Every instruction of a loop counts once,
whether or not a given lane or pass takes its path; padding does not count.

Compilation happens in fresh processes, one a target: Triton's interpreter, which replaces kernels where they are
defined, is off there, and its cache starts empty.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cuvee
from cuvee.codec.errors import CuveeError, InputError
from cuvee.kernels.kernel_spec import KernelSpec

MODULES = tuple(
    f"cuvee.kernels.ops.{name}"
    for name in ("rans", "rans_by_class", "symbols", "symbols_by_class", "transform", "lossless", "generic")
)
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
INSTRUCTION_KINDS = ("memory", "integer", "float", "tensor", "control")

# Bytes a thread block may have at most, from sm_90 on with the KiB that the system takes and a cubin counts.
_SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10, "gfx942": 64 << 10}
_SASS_BYTES = 16  # of an instruction


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, as far as costs and control flow go.

    Attributes:
        at: address; of AMD code, its number.
        kind: one of INSTRUCTION_KINDS.
        access: a `spec.Access`, for an access to global memory of another width likewise, else "".
        spill: bytes a lane stores to local memory.
        target: where a branch goes, or None.
        falls: whether the next instruction may follow.
        alu: whether it takes the pipe for additions, logic, shifts and comparisons; of SASS alone.
    """

    at: int
    kind: str
    access: str = ""
    spill: int = 0
    target: int | None = None
    falls: bool = True
    alu: bool = False


# NVIDIA --------------------------------------------------------------------------------------------------------------

_SASS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][^\s;]*)\s*([^;]*);", re.MULTILINE)
_SASS_KINDS = (
    ("tensor", re.compile(r"\w*MMA\b")),
    (
        "control",
        re.compile(
            r"(BRA|BRX|BRXU|JMP|JMX|CALL|RET|EXIT|KILL|BSSY|BSYNC|BREAK|BMOV|BAR|BPT|WARPSYNC|WARPGROUP|YIELD|NANOSLEEP"
            r"|DEPBAR|LDGDEPBAR|ARRIVES|SYNCS|UTCBAR|UTMACMDFLUSH|UCGABAR_\w+|MEMBAR|FENCE|ERRBAR|ELECT|PREEXIT|ACQBULK"
            r"|ENDCOLLECTIVE|RPCMOV)\b"
        ),
    ),
    ("integer", re.compile(r"(U?FLO|REDUX|CREDUX)\b")),
    ("memory", re.compile(r"LD|ST|ULD|UST|ATOM|RED|UTMA|UBLK|CCTL|SULD|SUST")),
    ("float", re.compile(r"U?[FHD](ADD|MUL|FMA|SET|MNMX|SEL|CHK|RND|SWZADD)|MUFU|U?(F2F|F2I|I2F)")),
)
# Integer products and what is made of them, moves too, take the pipe of floats; conversions and counts of bits a third.
_SASS_ALU = re.compile(
    r"(IADD3?|VIADD|VIADDMNMX|LOP3?|PLOP3|SHF|LEA|ISETP|SEL|FSEL|PRMT|IMNMX|VIMNMX|IABS|FSETP|FMNMX|VOTE)\b"
)


def parse_sass(text: str, function: str) -> list[Instruction]:
    """Read what `cuobjdump -sass` prints about one function, without its NOPs."""
    _, found, text = text.partition(f"Function : {function}\n")
    if not found:
        raise CuveeError(f"the disassembly has no function {function!r}")
    text, _, _ = text.partition("Function : ")
    code = []
    for at, guard, opcode, operands in _SASS.findall(text):
        base, *modifiers = opcode.split(".")
        if base == "NOP":
            continue
        bits = _sass_bits(modifiers)
        target = re.search(r"\b0x([0-9a-f]+)\s*$", operands) if base in ("BRA", "JMP") else None
        if base in ("BRA", "JMP") and target is None:
            raise CuveeError(f"no address in {opcode} {operands.strip()}")
        # A predicate is a prefix or, before the address, an operand.
        conditional = guard != "" or "," in operands or any(m in ("DIV", "CONV") for m in modifiers)
        code.append(
            Instruction(
                int(at, 16),
                next((kind for kind, pattern in _SASS_KINDS if pattern.match(base)), "integer"),
                access={"LDG": f"load{bits}", "STG": f"store{bits}"}.get(base, ""),
                spill=bits // 8 if base == "STL" else 0,
                target=int(target[1], 16) if target else None,
                falls=conditional or base not in ("BRA", "JMP", "BRX", "BRXU", "JMX", "RET", "EXIT"),
                alu=_SASS_ALU.match(base) is not None,
            )
        )
    return code


def _sass_bits(modifiers: Sequence[str]) -> int:
    """Width of a load or store."""
    for modifier in modifiers:
        if modifier.lstrip("US") in ("8", "16", "64", "128"):
            return int(modifier.lstrip("US"))
    return 32


def disassembler() -> Path:
    """The `cuobjdump` to use: of TRITON_CUOBJDUMP_PATH, of Triton, or of the PATH.

    Raises:
        CuveeError: there is none.
    """
    triton = importlib.util.find_spec("triton")
    shipped = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton and triton.origin else None
    for path in (os.environ.get("TRITON_CUOBJDUMP_PATH"), shipped, shutil.which("cuobjdump")):
        if path and Path(path).is_file() and os.access(path, os.X_OK):
            return Path(path)
    raise CuveeError(
        "no cuobjdump to disassemble NVIDIA code with: neither in Triton's NVIDIA backend nor on the PATH; install "
        "the CUDA toolkit's, or choose --target gfx942"
    )


def _read_cubin(cubin: bytes, function: str) -> tuple[list[Instruction], dict[str, Any]]:
    tool = disassembler()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CuveeError(f"{tool} does not read the code: {' '.join((done.stderr or done.stdout).split())}")
    code = parse_sass(done.stdout, function)
    usage = re.search(rf"Function {re.escape(function)}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", done.stdout)
    if usage is None:
        raise CuveeError(f"{tool} says nothing about the resources of {function!r}")
    registers, stack, shared = map(int, usage.groups())
    return code, {
        "registers": registers,
        "scalar_registers": None,
        "spilled_bytes": sum(instruction.spill for instruction in code),
        "stack_bytes": stack,
        "static_shared_bytes": shared,
        "code_bytes": len(code) * _SASS_BYTES,
    }


# PTX -----------------------------------------------------------------------------------------------------------------

_PTX = re.compile(r"^\s*(?:(?P<label>\$\w+):|(?:@(?P<guard>!?%p\d+)\s+)?(?P<opcode>[a-z][\w.:]*)(?P<operands>[^;]*);)")
_PTX_ACCESS = re.compile(r"(ld|st)\.(?:\w+\.)*?global(?:\.\w+::\w+)*(?:\.(v[24]))?\.[busf](\d+)")


def parse_ptx(text: str) -> list[Instruction]:
    """Read the PTX of one entry, as far as accesses and control flow go."""
    _, _, body = text.partition("{\n")
    labels: dict[str, int] = {}
    read: list[tuple[str, str, bool]] = []
    for line in body.splitlines():
        match = _PTX.match(line)
        if match is None:
            continue
        if match["label"]:
            labels[match["label"]] = len(read)
        else:
            read.append((match["opcode"], match["operands"].strip(), match["guard"] is not None))
    code = []
    for at, (opcode, operands, guarded) in enumerate(read):
        access = _PTX_ACCESS.match(opcode)
        bits = int(access[3]) * int((access[2] or "v1")[1]) if access else 0
        control = opcode.split(".")[0] in ("bra", "ret", "bar", "exit")
        code.append(
            Instruction(
                at,
                "control" if control else "memory" if access else "integer",
                access={"ld": f"load{bits}", "st": f"store{bits}"}[access[1]] if access else "",
                target=labels[operands] if opcode.startswith("bra") else None,
                falls=guarded or opcode.split(".")[0] not in ("bra", "ret", "exit"),
            )
        )
    return code


def expansion(code: Sequence[Instruction], ptx: Sequence[Instruction]) -> float:
    """Machine instructions per PTX instruction: of the longest innermost loop, or of the kernel if it has none.

    The compiler may unroll a loop: how often tells the accesses to global memory, of which it adds and drops none.
    """
    machine, virtual = (max(innermost_loops(own), key=len, default=list(own)) for own in (code, ptx))
    accesses = [sum(instruction.access != "" for instruction in loop) for loop in (machine, virtual)]
    times = accesses[0] / accesses[1] if all(accesses) else 1.0
    return len(machine) / len(virtual) / times


# AMD -----------------------------------------------------------------------------------------------------------------

_AMDGCN = re.compile(r"^(?:(?P<label>[\w.$]+):|\s+(?P<opcode>[a-z]\w*)(?:\s+(?P<operands>[^;\n]*))?)")
_AMDGCN_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_[us]?(byte|short|dword|dwordx2|dwordx4)(?:_d16|$)")
_AMDGCN_BITS = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx4": 128}
_AMDGCN_KINDS = (
    ("tensor", re.compile(r"v_(mfma|smfmac|wmma)_")),
    (
        "control",
        re.compile(
            r"s_(branch|cbranch|endpgm|setpc|swappc|getpc|call|waitcnt|barrier|sleep|setprio|sethalt|trap|sendmsg|icache"
            r"|inst_prefetch|\w*saveexec)"
        ),
    ),
    ("memory", re.compile(r"global_|buffer_|flat_|scratch_|ds_|s_(load|store|buffer_load|buffer_store|dcache|atomic)")),
    ("float", re.compile(r"v_\w*_(f16|f32|f64|bf16|fp8|bf8)(_|$)")),
)


def parse_amdgcn(text: str, function: str) -> list[Instruction]:
    """Read the assembly of one function, without its NOPs."""
    _, found, text = text.partition(f"\n{function}:")
    if not found:
        raise CuveeError(f"the assembly has no function {function!r}")
    text, _, _ = text.partition("\n.Lfunc_end")
    labels: dict[str, int] = {}
    read: list[tuple[str, str]] = []
    for line in text.splitlines():
        match = _AMDGCN.match(line)
        if match is None:
            continue
        if match["label"]:
            labels[match["label"]] = len(read)
        elif match["opcode"] != "s_nop":
            read.append((match["opcode"], (match["operands"] or "").strip()))
    code = []
    for at, (opcode, operands) in enumerate(read):
        access = _AMDGCN_ACCESS.match(opcode)
        code.append(
            Instruction(
                at,
                next((kind for kind, pattern in _AMDGCN_KINDS if pattern.match(opcode)), "integer"),
                access=f"{access[1]}{_AMDGCN_BITS[access[2]]}" if access else "",
                target=labels[operands] if opcode.startswith(("s_branch", "s_cbranch")) else None,
                falls=opcode not in ("s_branch", "s_endpgm", "s_setpc_b64"),
            )
        )
    return code


def _read_amdgcn(text: str, function: str) -> tuple[list[Instruction], dict[str, Any]]:
    code = parse_amdgcn(text, function)

    def fact(pattern: str) -> int:
        match = re.search(pattern + r"\s*(\d+)", text)
        if match is None:
            raise CuveeError(f"the assembly of {function!r} says nothing of {pattern}")
        return int(match[1])

    return code, {
        "registers": fact(r"\.vgpr_count:"),
        "scalar_registers": fact(r"\.sgpr_count:"),
        "spilled_bytes": 4 * fact(r"\.vgpr_spill_count:"),
        "stack_bytes": fact(r"\.private_segment_fixed_size:"),
        "static_shared_bytes": fact(r"\.group_segment_fixed_size:"),
        "code_bytes": fact(r"; codeLenInByte ="),
    }


# Loops ---------------------------------------------------------------------------------------------------------------


def innermost_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The loops of a function that hold no other, each in the order of addresses; see the module's docstring."""
    addresses = [instruction.at for instruction in code]
    after: list[list[int]] = []
    before: list[list[int]] = [[] for _ in code]
    for index, instruction in enumerate(code):
        follow = [index + 1] if instruction.falls else []
        if instruction.target is not None:
            follow.append(bisect_left(addresses, instruction.target))
        after.append([i for i in follow if i < len(code)])
        for i in after[index]:
            before[i].append(index)

    def search(nodes: set[int]) -> Iterator[list[Instruction]]:
        for part in _components(nodes, after):
            if all(code[i].kind == "control" for i in part):
                continue
            entry = min((i for i in part if any(j not in part for j in before[i])), default=min(part))
            inside = list(search(part - {entry}))
            yield from inside or [[code[i] for i in sorted(part)]]

    reachable, left = {0}, [0] if code else []
    while left:
        new = set(after[left.pop()]) - reachable
        reachable |= new
        left += new
    return sorted(search(reachable if code else set()), key=lambda loop: loop[0].at)


def _components(nodes: set[int], after: Sequence[Sequence[int]]) -> list[set[int]]:
    """The strongly connected parts of a graph that have a cycle (Tarjan, without recursion)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    waiting: set[int] = set()
    parts: list[set[int]] = []
    path: list[tuple[int, Iterator[int]]] = []

    def enter(node: int) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        waiting.add(node)
        path.append((node, iter([i for i in after[node] if i in nodes])))

    for root in nodes:
        if root in order:
            continue
        enter(root)
        while path:
            node, follow = path[-1]
            following = next(follow, None)
            if following is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == order[node]:
                    start = stack.index(node)
                    part = set(stack[start:])
                    del stack[start:]
                    waiting -= part
                    if len(part) > 1 or node in after[node]:
                        parts.append(part)
            elif following not in order:
                enter(following)
            elif following in waiting:
                low[node] = min(low[node], order[following])
    return parts


def describe_loops(code: Sequence[Instruction], access: str | None, per_access: int = 1) -> list[dict[str, Any]]:
    """The innermost loops, the one that does the work first.

    Args:
        code: of a function.
        access: as `KernelSpec.symbol_access`; loops without it are left out.
        per_access: as `KernelSpec.symbols_per_access`.

    Returns:
        per loop: `instructions`, `symbols` a pass and `instructions_per_symbol` (None without `access`), and how many
        instructions there are of each of INSTRUCTION_KINDS.
    """
    loops = []
    for loop in innermost_loops(code):
        symbols = per_access * sum(instruction.access == access for instruction in loop) if access else None
        if symbols == 0:
            continue
        kinds = Counter(instruction.kind for instruction in loop)
        loops.append(
            {
                "instructions": len(loop),
                "symbols": symbols,
                "instructions_per_symbol": len(loop) / symbols if symbols else None,
                **{kind: kinds[kind] for kind in INSTRUCTION_KINDS},
            }
        )
    # Of an unrolled loop, the rest that follows it handles fewer symbols per pass.
    return sorted(loops, key=lambda loop: (loop["symbols"] or 0, loop["instructions"]), reverse=True)


# Compilation, in a process of its own --------------------------------------------------------------------------------


def _gpu_target(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if target.startswith("sm_"):
        return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    return GPUTarget("hip", target, 64)


def _compile(spec: KernelSpec, target: str) -> Any:
    import triton
    from triton.compiler import ASTSource

    if not isinstance(spec.kernel, triton.JITFunction):
        raise CuveeError(f"{type(spec.kernel).__name__} is not a kernel to compile; Triton's interpreter must be off")
    names = spec.kernel.arg_names
    if wrong := set(names) ^ {*spec.signature, *spec.constants} or set(spec.divisible) - set(names):
        raise CuveeError(f"the spec and the arguments of the kernel disagree about {', '.join(sorted(wrong))}")
    source = ASTSource(
        spec.kernel,
        signature={name: spec.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in spec.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in spec.divisible},
    )
    # As launches that do not ask for the opposite; Triton 3.9 warns where nothing is said, 3.10 has another default.
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=_gpu_target(target), options={**options, **(spec.options or {})})


def _measure(spec: KernelSpec, target: str) -> dict[str, Any]:
    """One kernel's entry of a report, or its `error`."""
    spec = spec.on(target)
    budget = spec.budgets.get(target)
    entry: dict[str, Any] = {
        "kernel": spec.name,
        "target": target,
        "symbol_access": spec.symbol_access,
        "budget": asdict(budget) if budget else None,
        "error": None,
    }
    try:
        start = time.perf_counter()
        compiled = _compile(spec, target)
        entry["seconds"] = time.perf_counter() - start
        name = compiled.metadata.name
        if "cubin" in compiled.asm:
            code, facts = _read_cubin(compiled.asm["cubin"], name)
        else:
            code, facts = _read_amdgcn(compiled.asm["amdgcn"], name)
    except Exception as error:  # of any pass of the compiler; the other kernels are still of interest
        return {**entry, "error": _with_causes(error)}
    loops = describe_loops(code, spec.symbol_access, spec.symbols_per_access)
    ptx = parse_ptx(compiled.asm["ptx"]) if "ptx" in compiled.asm else None
    busiest = max(innermost_loops(code), key=len, default=code)
    return {
        **entry,
        "expansion": expansion(code, ptx) if ptx else None,
        "integer_share": sum(i.alu for i in busiest) / len(busiest) if ptx else None,
        **facts,
        "dynamic_shared_bytes": compiled.metadata.shared,
        "num_warps": spec.num_warps,
        "loop": loops[0] if loops else None,
        "other_loops": loops[1:],
    }


def _with_causes(error: BaseException) -> str:
    """An error and what caused it; the line that matters most is the last."""
    text = f"{type(error).__name__}: {error}".rstrip("\n ^")
    return text if error.__cause__ is None else f"{text}\n{_with_causes(error.__cause__)}"


def _specs(modules: Sequence[str]) -> list[KernelSpec]:
    specs: list[KernelSpec] = [spec for module in modules for spec in importlib.import_module(module).SPECS]
    twice = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if twice:
        raise CuveeError(f"two kernels are called {twice[0]!r}")
    for spec in specs:
        _check_targets(f"budgets of {spec.name}", tuple(spec.budgets))
        _check_targets(f"changes of {spec.name}", tuple(spec.changes))
    return specs


def _main() -> None:
    """Compile for one target and write Triton's version and the entries to a file, as JSON."""
    import triton

    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--modules", required=True, nargs="+")
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args()
    entries = [_measure(spec, given.target) for spec in _specs(given.modules)]
    given.out.write_text(json.dumps({"triton": triton.__version__, "entries": entries}))


# Reports -------------------------------------------------------------------------------------------------------------


def report(targets: Sequence[str] = TARGETS, modules: Sequence[str] = MODULES) -> dict[str, Any]:
    """Compile all kernels.

    Args:
        targets: one or more of TARGETS.
        modules: whose `SPECS` to compile.

    Returns:
        what JSON can hold: `versions`, `targets`, and `kernels`: per kernel and target `seconds` of compilation,
        `registers` (on AMD also `scalar_registers`), `spilled_bytes`, `stack_bytes`, `static_shared_bytes`,
        `dynamic_shared_bytes`, `code_bytes`, on NVIDIA `expansion` and the `integer_share` of machine instructions that
        `model` reads, and `loop`, the first of `describe_loops`, with the rest in
        `other_loops`; or the `error` of its compilation.

    Raises:
        InputError: an unknown target.
        ImportError: Triton is not installed.
        CuveeError: there is no disassembler, or a module is missing or at fault.
    """
    _check_targets("targets", targets)
    if importlib.util.find_spec("triton") is None:
        raise ImportError("the kernels need Triton, which is not installed; it exists for Linux: pip install triton")
    if any(target.startswith("sm_") for target in targets):
        disassembler()
    targets = tuple(dict.fromkeys(targets))
    with ThreadPoolExecutor(min(len(targets), os.cpu_count() or 1)) as pool:
        found = list(pool.map(lambda target: _compile_apart(target, modules), targets))
    return {
        "versions": {
            "cuvee": cuvee.__version__,
            "triton": found[0][0],
            "python": platform.python_version(),
        },
        "targets": list(targets),
        "kernels": [entry for same in zip(*(entries for _, entries in found), strict=True) for entry in same],
    }


def _check_targets(what: str, targets: Sequence[str]) -> None:
    for target in targets:
        if target not in TARGETS:
            raise InputError(f"{what}: {target!r} is not one of {', '.join(TARGETS)}")


def _compile_apart(target: str, modules: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """Triton's version and the entries of one target."""
    with tempfile.TemporaryDirectory(prefix="cuvee-kernels-") as folder:
        out = Path(folder, "out.json")
        paths = [str(Path(cuvee.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": folder,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        environment.pop("TRITON_INTERPRET", None)
        # -P: a folder `kernels` in the current directory must not be taken for an installed package.
        command = [sys.executable, "-P", "-m", __name__, "--target", target, "--out", str(out), "--modules", *modules]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
            raise CuveeError(f"compiling for {target} failed: {lines[-1]}")
        read = json.loads(out.read_text())
        return read["triton"], read["entries"]


def check(report: dict[str, Any]) -> list[str]:
    """Say what in a report breaks a kernel's budget or a limit of its target, a line each."""
    wrong = []
    for entry in report["kernels"]:
        where = f"{entry['kernel']} on {entry['target']}"
        if entry["error"] is not None:
            wrong.append(f"{where} does not compile: {entry['error'].splitlines()[-1].strip()}")
            continue
        shared, limit = shared_bytes(entry), _SHARED_LIMIT[entry["target"]]
        if shared > limit:
            wrong.append(f"{where}: {shared:,} bytes of shared memory, there are {limit:,}")
        if entry["symbol_access"] and entry["loop"] is None:
            wrong.append(f"{where}: no loop has a {entry['symbol_access']}, the access that marks a symbol")
        budget = entry["budget"] or {}
        values = {**entry, **(entry["loop"] or {})}
        for name, most in budget.items():
            if most is None:
                continue
            value = values.get(name)
            if value is None or value > most:
                shown = "unknown" if value is None else f"{value:g}"
                wrong.append(f"{where}: {name.replace('_', ' ')} {shown}, at most {most:g} allowed")
    return wrong


def shared_bytes(entry: dict[str, Any]) -> int:
    """Shared memory of a thread block, static and dynamic."""
    static: int = entry["static_shared_bytes"]
    dynamic: int = entry["dynamic_shared_bytes"]
    return static + dynamic


if __name__ == "__main__":
    _main()
