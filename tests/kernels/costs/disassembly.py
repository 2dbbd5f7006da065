"""What compiled kernels take: NVIDIA's machine code, reduced to what costs and loops need; AMD's own summary.

A loop is what lies between a branch and the earlier address that it jumps to. A loop of control instructions alone (a
wait for a barrier) is none; what the compiler moves behind the end of the kernel, such as these waits, is not counted.
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


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        at: address.
        control: whether it only decides what comes next, or waits.
        access: `"load"` or `"store"` with its width in bits, like `kernel_spec.Access`, for an access to global memory;
            else "".
        spill: bytes that each lane stores to local memory.
        target: address that a branch jumps to, or None.
    """

    at: int
    control: bool = False
    access: str = ""
    spill: int = 0
    target: int | None = None


_SASS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^\s;]*)\s*([^;]*);", re.MULTILINE)
_CONTROL = re.compile(
    r"(BRA|BRX|BRXU|JMP|JMX|CALL|RET|EXIT|KILL|BSSY|BSYNC|BREAK|BMOV|BAR|BPT|WARPSYNC|WARPGROUP|YIELD|NANOSLEEP|DEPBAR"
    r"|LDGDEPBAR|ARRIVES|SYNCS|UTCBAR|UTMACMDFLUSH|UCGABAR_\w+|MEMBAR|FENCE|ERRBAR|ELECT|PREEXIT|ACQBULK|ENDCOLLECTIVE"
    r"|RPCMOV)\b"
)


def parse_sass(text: str, function: str) -> list[Instruction]:
    """Parse what `cuobjdump -sass` prints about one function; leaves out NOPs."""
    _, found, text = text.partition(f"Function : {function}\n")
    if not found:
        raise CuveeError(f"the disassembly has no function {function!r}")
    text, _, _ = text.partition("Function : ")
    code = []
    for at, opcode, operands in _SASS.findall(text):
        base, *modifiers = opcode.split(".")
        if base == "NOP":
            continue
        bits = _sass_bits(modifiers)
        target = re.search(r"\b0x([0-9a-f]+)\s*$", operands) if base in ("BRA", "JMP") else None
        if base in ("BRA", "JMP") and target is None:
            raise CuveeError(f"no address in {opcode} {operands.strip()}")
        code.append(
            Instruction(
                int(at, 16),
                _CONTROL.match(base) is not None,
                access={"LDG": f"load{bits}", "STG": f"store{bits}"}.get(base, ""),
                spill=bits // 8 if base == "STL" else 0,
                target=int(target[1], 16) if target else None,
            )
        )
    return code


def _sass_bits(modifiers: Sequence[str]) -> int:
    """Return the width of a load or store, in bits."""
    for modifier in modifiers:
        if modifier.lstrip("US") in ("8", "16", "64", "128"):
            return int(modifier.lstrip("US"))
    return 32


def innermost_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return the loops that contain no other loop, in the order of addresses."""
    spans = {(i.target, i.at) for i in code if i.target is not None and i.target <= i.at}
    bodies = {span: [i for i in code if span[0] <= i.at <= span[1]] for span in sorted(spans)}
    loops = {span: own for span, own in bodies.items() if not all(i.control for i in own)}
    return [
        own
        for (first, last), own in loops.items()
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]


def main_loop(code: Sequence[Instruction], access: str | None) -> dict[str, Any] | None:
    """Describe the innermost loop that does most of the work.

    Args:
        code: instructions of a function.
        access: as `KernelSpec.symbol_access`; loops without it are left out.

    Returns:
        `instructions`, `symbols` per pass and `instructions_per_symbol` (None without `access`); None without a loop.
    """
    loops = []
    for loop in innermost_loops(code):
        symbols = sum(instruction.access == access for instruction in loop) if access else None
        if symbols != 0:
            each = len(loop) / symbols if symbols else None
            loops.append({"instructions": len(loop), "symbols": symbols, "instructions_per_symbol": each})
    # The remainder loop that follows an unrolled loop handles fewer symbols per pass.
    return max(loops, key=lambda loop: (loop["symbols"] or 0, loop["instructions"]), default=None)


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
        the instructions of a function, and its entries of a report: registers, spills, memory.

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
    usage = re.search(rf"Function {re.escape(function)}:\s+REG:(\d+) STACK:\d+ SHARED:(\d+)", done.stdout)
    if usage is None:
        raise CuveeError(f"{tool} says nothing about the resources of {function!r}")
    registers, shared = map(int, usage.groups())
    spilled = sum(instruction.spill for instruction in code)
    return code, {"registers": registers, "spilled_bytes": spilled, "static_shared_bytes": shared}


def read_amdgcn(text: str) -> dict[str, Any]:
    """Return the same entries for AMD assembly, which ends with a summary."""

    def fact(pattern: str) -> int:
        match = re.search(pattern + r"\s*(\d+)", text)
        if match is None:
            raise CuveeError(f"the assembly says nothing of {pattern}")
        return int(match[1])

    return {
        "registers": fact(r"\.vgpr_count:"),
        "spilled_bytes": 4 * fact(r"\.vgpr_spill_count:"),
        "static_shared_bytes": fact(r"\.group_segment_fixed_size:"),
    }
