"""Parsers for what the compilers emit: SASS on NVIDIA, assembly on AMD.

Each returns a kernel as a list of `Instruction`, reduced to what costs and control flow need.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuvee.codec.errors import CuveeError

INSTRUCTION_KINDS = ("memory", "integer", "float", "tensor", "control")
_SASS_BYTES = 16  # per instruction


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, reduced to its cost and its effect on control flow.

    Attributes:
        at: address; in AMD code, the instruction's index.
        kind: one of INSTRUCTION_KINDS.
        access: `"load"` or `"store"` with its width in bits, like `kernel_spec.Access`, for an access to global memory;
            else "".
        spill: bytes that each lane stores to local memory.
        target: address that a branch jumps to, or None.
        falls: whether the next instruction may follow.
    """

    at: int
    kind: str
    access: str = ""
    spill: int = 0
    target: int | None = None
    falls: bool = True


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


def parse_sass(text: str, function: str) -> list[Instruction]:
    """Parse what `cuobjdump -sass` prints about one function; leaves out NOPs."""
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
            )
        )
    return code


def _sass_bits(modifiers: Sequence[str]) -> int:
    """Return the width of a load or store, in bits."""
    for modifier in modifiers:
        if modifier.lstrip("US") in ("8", "16", "64", "128"):
            return int(modifier.lstrip("US"))
    return 32


def disassembler() -> Path:
    """Return the `cuobjdump` to use: that of TRITON_CUOBJDUMP_PATH, of Triton or on the PATH, in this order.

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


def read_cubin(cubin: bytes, function: str) -> tuple[list[Instruction], dict[str, Any]]:
    """Disassemble NVIDIA code.

    Returns:
        the instructions of a function, and its entries of a report: registers, spills, memory, code size.

    Raises:
        CuveeError: there is no disassembler, or it cannot read the code.
    """
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
    """Parse the assembly of one function; leaves out NOPs."""
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


def read_amdgcn(text: str, function: str) -> tuple[list[Instruction], dict[str, Any]]:
    """Read AMD assembly. Returns and raises as `read_cubin`."""
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
