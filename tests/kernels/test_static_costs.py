"""Every kernel compiles for every target, and takes no more registers than its budget: without a GPU.

`make costs` shows the figures. Triton keeps what it compiled in the cache that the kernels' other tests share.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from tests.kernels.specs import SPECS, KernelSpec
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# The most bytes that a thread block may have. From sm_90 on this includes the KiB that the system reserves, which a
# cubin counts too.
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10, "gfx942": 64 << 10}
BUDGETED = "sm_90"


@pytest.fixture(autouse=True)
def whole_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator, where it is installed, would stop at PTX."""
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)


def compile_spec(spec: KernelSpec, target: str) -> Any:
    """Compile a kernel ahead of time."""
    is_amd = target.startswith("gfx")
    names, signature = spec.kernel.arg_names, spec.signature()
    assert set(signature) | set(spec.constants) == set(names), "the spec names arguments that the kernel does not have"
    constants = spec.constants | {name: value for name, value in spec.amd.items() if is_amd and name in names}
    source = ASTSource(
        spec.kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in spec.aligned()},
    )
    # Launches fuse unless they say otherwise. Triton 3.9 warns about an unset option, and 3.10 changes the default.
    options = {"num_warps": spec.num_warps, "enable_fp_fusion": True, **spec.options}
    options |= {name: value for name, value in spec.amd.items() if is_amd and name not in names}
    options = {name: value for name, value in options.items() if value is not None}
    device = GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    return triton.compile(source, target=device, options=options)


def registers_of(compiled: Any, folder: Path) -> tuple[int, int]:
    """Registers and bytes of stack of each lane, which a kernel without spills does not have."""
    if "amdgcn" in compiled.asm:
        found = [
            re.search(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"]) for name in ("vgpr_count", "vgpr_spill_count")
        ]
    else:
        path = folder / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        shipped = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        tool = shipped if shipped.exists() else shutil.which("cuobjdump")
        assert tool, "there is no cuobjdump, neither in Triton nor on the PATH: install the CUDA toolkit's"
        said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        found = [re.search(rf"\b{name}:(\d+)", said) for name in ("REG", "STACK")]
    registers, spilled = (int(match[1]) for match in found if match)
    return registers, spilled


@pytest.mark.nightly
@pytest.mark.parametrize("target", SHARED_LIMIT)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_kernel_compiles_within_its_budget(spec: KernelSpec, target: str, tmp_path: Path) -> None:
    compiled = compile_spec(spec, target)
    registers, spilled = registers_of(compiled, tmp_path)
    shared = compiled.metadata.shared
    print(f"{spec.name:26}{target:8}{registers:5} registers{spilled:6} bytes spilled{shared:8} shared")
    assert shared <= SHARED_LIMIT[target]
    if spec.registers is not None and target == BUDGETED:
        assert registers <= spec.registers and spilled == 0
