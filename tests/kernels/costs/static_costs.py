"""Static costs of the kernels: compile every `KernelSpec` ahead of time, without a GPU, and measure the code.

`report` compiles all kernels for some targets and lists each kernel's registers, spills and shared memory, and on
NVIDIA the instructions of its main innermost loop; for a loop over symbols, also the instructions per symbol. `check`
compares a report with the kernels' budgets. `python -m tests.kernels.costs` shows it.

Each target is compiled in a process of its own, where Triton's interpreter is off and Triton's cache is empty. The
interpreter would replace kernels where they are defined.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tests.kernels.costs.disassembly import Instruction, disassembler, main_loop, read_amdgcn, read_cubin
from tests.kernels.costs.kernel_spec import KernelSpec

import cuvee
from cuvee.codec.errors import CuveeError, InputError

ROOT = Path(__file__).parents[3]
MODULE = "tests.kernels.costs.specs"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

# The most bytes that a thread block may have. From sm_90 on this includes the KiB that the system reserves, which a
# cubin counts too.
_SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10, "gfx942": 64 << 10}


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
        raise CuveeError(
            f"kernel: must be a @triton.jit function, got {type(spec.kernel).__name__}; run without TRITON_INTERPRET"
        )
    names = spec.kernel.arg_names
    if wrong := set(names) ^ {*spec.signature, *spec.constants} or set(spec.divisible) - set(names):
        raise CuveeError(f"the spec and the arguments of the kernel disagree about {', '.join(sorted(wrong))}")
    source = ASTSource(
        spec.kernel,
        signature={name: spec.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in spec.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in spec.divisible},
    )
    # Launches fuse unless they say otherwise. Triton 3.9 warns about an unset option, and 3.10 changes the default.
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=_gpu_target(target), options={**options, **(spec.options or {})})


def _measure(spec: KernelSpec, target: str) -> dict[str, Any]:
    """Return one kernel's entry of a report; its `error` is set if compilation failed."""
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
        compiled = _compile(spec, target)
        code: list[Instruction] = []
        if "cubin" in compiled.asm:
            code, facts = read_cubin(compiled.asm["cubin"], compiled.metadata.name)
        else:
            facts = read_amdgcn(compiled.asm["amdgcn"])
    except Exception as error:  # any pass of the compiler may fail; report the other kernels all the same
        return {**entry, "error": _with_causes(error)}
    return {
        **entry,
        **facts,
        "dynamic_shared_bytes": compiled.metadata.shared,
        "num_warps": spec.num_warps,
        "loop": main_loop(code, spec.symbol_access),
    }


def _with_causes(error: BaseException) -> str:
    """Return the text of an error and of its causes, one per line; the root cause comes last."""
    text = f"{type(error).__name__}: {error}".rstrip("\n ^")
    return text if error.__cause__ is None else f"{text}\n{_with_causes(error.__cause__)}"


def _specs(module: str, names: Sequence[str] = ()) -> list[KernelSpec]:
    specs: list[KernelSpec] = list(importlib.import_module(module).SPECS)
    twice = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if twice:
        raise CuveeError(f"two kernels are called {twice[0]!r}; rename one in SPECS of {module}")
    for spec in specs:
        _check_targets(f"budgets of {spec.name}", tuple(spec.budgets))
        _check_targets(f"changes of {spec.name}", tuple(spec.changes))
    if unknown := set(names) - {spec.name for spec in specs}:
        raise InputError(f"kernels: must be in SPECS of {module}, got {', '.join(sorted(unknown))}")
    return [spec for spec in specs if not names or spec.name in names]


def _main() -> None:
    """Compile for one target; write the entries to a file, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--module", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    given.out.write_text(json.dumps([_measure(spec, given.target) for spec in _specs(given.module, given.names)]))


# Reports -------------------------------------------------------------------------------------------------------------


def report(targets: Sequence[str] = TARGETS, module: str = MODULE, names: Sequence[str] = ()) -> dict[str, Any]:
    """Compile kernels.

    Args:
        targets: one or more of TARGETS.
        module: the module whose `SPECS` to compile.
        names: of the specs; none: all.

    Returns:
        a dict that JSON can hold: `targets`, and `kernels`, an entry per kernel and target. An entry has `registers`,
        `spilled_bytes`, `static_shared_bytes`, `dynamic_shared_bytes` and `loop`, the `main_loop`; or, instead of
        these, the `error` of its compilation.

    Raises:
        InputError: an unknown target.
        ImportError: Triton is not installed.
        CuveeError: there is no disassembler, or the module is missing or faulty.
    """
    _check_targets("targets", targets)
    if importlib.util.find_spec("triton") is None:
        raise ImportError("the kernels need Triton, which is not installed; it exists for Linux: pip install triton")
    if any(target.startswith("sm_") for target in targets):
        disassembler()
    targets = tuple(dict.fromkeys(targets))
    with ThreadPoolExecutor(min(len(targets), os.cpu_count() or 1)) as pool:
        found = list(pool.map(partial(_compile_apart, module=module, names=names), targets))
    return {
        "targets": list(targets),
        "kernels": [entry for same in zip(*found, strict=True) for entry in same],
    }


def _check_targets(what: str, targets: Sequence[str]) -> None:
    for target in targets:
        if target not in TARGETS:
            raise InputError(f"{what}: must be among {', '.join(TARGETS)}, got {target!r}")


def _compile_apart(target: str, module: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the entries of one target."""
    with tempfile.TemporaryDirectory(prefix="cuvee-kernels-") as folder:
        out = Path(folder, "out.json")
        paths = [str(Path(cuvee.__file__).parents[1]), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": folder,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-P", "-m", __name__, "--target", target, "--out", str(out), "--module", module]
        done = subprocess.run([*command, *names], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            written = [line for line in done.stderr.splitlines() if line.strip()]
            raise CuveeError(f"compiling for {target} failed: {(written or [f'exit code {done.returncode}'])[-1]}")
        entries: list[dict[str, Any]] = json.loads(out.read_text())
        return entries


def check(report: dict[str, Any]) -> list[str]:
    """Return a line for each entry of a report that breaks its kernel's budget or a limit of its target."""
    wrong = []
    for entry in report["kernels"]:
        where = f"{entry['kernel']} on {entry['target']}"
        if entry["error"] is not None:
            wrong.append(f"{where} does not compile: {entry['error'].splitlines()[-1].strip()}")
            continue
        shared, limit = shared_bytes(entry), _SHARED_LIMIT[entry["target"]]
        if shared > limit:
            wrong.append(f"{where}: {shared:,} bytes of shared memory, there are {limit:,}")
        if entry["symbol_access"] and entry["loop"] is None and entry["target"].startswith("sm_"):
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
    """Return the static and dynamic shared memory of a thread block, in bytes."""
    static: int = entry["static_shared_bytes"]
    dynamic: int = entry["dynamic_shared_bytes"]
    return static + dynamic


if __name__ == "__main__":
    _main()
