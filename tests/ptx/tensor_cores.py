"""Instructions of tensor cores: matrices to and from shared memory, products in registers (mma, wgmma) and in tensor
memory (tcgen05), and the barriers that say when the latter are done (mbarrier)."""

from __future__ import annotations

import re

from tests.ptx.operands import Operands, number
from tests.ptx.syntax import PtxError, Statement

_ALONE = "cta_group_1"  # no pair of programs


class TensorCores(Operands):
    """Each method encodes the instructions of its name, as those of `encode`."""

    def matrices(self, s: Statement, parts: tuple[str, ...], rows: str, at: str) -> None:
        count = {"x1": 1, "x2": 2, "x4": 4}[next(part for part in parts if part.startswith("x"))]
        known = {"sync", "aligned", "m8n8", f"x{count}", "trans", "shared", "shared_cta", "b16"}
        if not set(parts) <= known:
            raise PtxError("no modifier of ldmatrix or stmatrix")
        base, add, row = self.address(at)
        names = self.vector(rows, 4)
        if len(names) != count:
            raise PtxError("as many registers as matrices")
        self.add(s, s.opcode[0], a=base, imm=add, mode=row, count=count, sign=int("trans" in parts)).rows = names

    def do_ldmatrix(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        self.matrices(s, parts, args[0], args[1])

    def do_stmatrix(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        self.matrices(s, parts, args[1], args[0])

    def do_mma(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        *known, shape, a_order, b_order, to, left, right, add = parts
        if known != ["sync", "aligned"] or (a_order, b_order, to, add) != ("row", "col", "f32", "f32") or left != right:
            raise PtxError("no product of the engine's")
        kind = {"bf16": 0, "tf32": 1}[left]
        depth = {"m16n8k8": 8, "m16n8k16": 16}[shape]
        counts = [4, depth // (2 if kind else 4), depth // (4 if kind else 8), 4]
        groups = [self.vector(arg, 4) for arg in args]
        if [len(group) for group in groups] != counts:
            raise PtxError("not as many registers as the shape has")
        self.add(s, "mma", mode=kind, width=depth).rows = [name for group in groups for name in group]

    def do_wgmma(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        if parts == ("fence", "sync", "aligned"):
            self.add(s, "wgmma.fence")
        elif parts == ("commit_group", "sync", "aligned"):
            self.add(s, "wgmma.commit_group")
        elif parts == ("wait_group", "sync", "aligned"):
            self.add(s, "wgmma.wait_group", imm=int(args[0], 0))
        else:
            self.product(s, parts, args)

    def product(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        *known, shape, to, left, right = parts
        size = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
        kind = {"bf16": 0, "tf32": 1}[left]
        if size is None or known != ["mma_async", "sync", "aligned"] or to != "f32" or left != right:
            raise PtxError("no product of the engine's")
        if int(size[2]) != (8 if kind else 16) or args[4:6] != ("1", "1"):
            raise PtxError("no depth or sign of such factors")
        columns, in_registers = int(size[1]), args[1].startswith("{")
        rows = self.vector(args[0], 4)
        left_rows = self.vector(args[1], 4) if in_registers else [self.exact(args[1], 8)]
        if len(rows) != columns // 2 or len(left_rows) != (4 if in_registers else 1):
            raise PtxError("not as many registers as the shape has")
        scale, turned = args[3], [int(x) for x in args[6:]]
        if in_registers and turned:
            turned = [0, *turned]
        flags = sum(bit << k for k, bit in enumerate(turned))
        fixed = number(scale)
        code = self.add(s, "wgmma", mode=kind, width=columns // 8, count=int(in_registers), b=self.exact(args[2], 8),
                        c="_" if fixed is not None else self.predicate(scale), imm=fixed or 0, sign=flags)  # fmt: skip
        code.rows = rows + left_rows

    def do_tcgen05(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        what, *rest = parts
        known = {
            "alloc": [_ALONE, "sync", "aligned", "shared_cta", "b32"],
            "dealloc": [_ALONE, "sync", "aligned", "b32"],
            "relinquish_alloc_permit": [_ALONE, "sync", "aligned"],
            "commit": [_ALONE, "mbarrier_arrive_one", "shared_cluster", "b64"],
            "wait_ld": ["sync", "aligned"],
            "wait_st": ["sync", "aligned"],
        }
        op = f"tcgen05.{what}"
        if what in ("ld", "st"):
            self.moved_cells(s, op, rest, args)
        elif what == "mma":
            self.product_in_tensors(s, rest, args)
        elif known.get(what) != rest:
            raise PtxError("no such instruction of the engine's")
        elif what in ("alloc", "commit"):
            base, add, row = self.address(args[0])
            self.add(s, op, a=base, imm=add, mode=row, **({"e": int(args[1], 0)} if what == "alloc" else {}))
        elif what == "dealloc":
            self.add(s, op, a=self.exact(args[0], 4), e=int(args[1], 0))
        else:
            self.add(s, op)

    def cells(self, token: str) -> tuple[str, int]:
        """Row and addend of an address in tensor memory."""
        base, add, row = self.address(token)
        if row != 4:
            raise PtxError("an address in tensor memory has 32 bits")
        return base, add

    def moved_cells(self, s: Statement, op: str, parts: list[str], args: tuple[str, ...]) -> None:
        sync, aligned, shape, times, kind = parts
        if (sync, aligned, kind) != ("sync", "aligned", "b32") or shape not in ("32x32b", "16x32bx2"):
            raise PtxError("no access to tensor memory of the engine's")
        halves = shape == "16x32bx2"
        if op == "tcgen05.ld":
            registers, address, *split = args
        else:
            address, *split, registers = args
        rows = self.vector(registers, 4)
        if len(rows) != int(times[1:]) or len(split) != halves:
            raise PtxError("not as many operands as the shape has")
        base, add = self.cells(address)
        self.add(s, op, a=base, imm=add, mode=int(halves), width=len(rows),
                 e=int(split[0], 0) if halves else 0).rows = rows  # fmt: skip

    def product_in_tensors(self, s: Statement, parts: list[str], args: tuple[str, ...]) -> None:
        if parts not in ([_ALONE, "kind_f16"], [_ALONE, "kind_tf32"]):
            raise PtxError("no product of the engine's")
        to, left, right, shape, added = args
        base, add = self.cells(to)
        a, a_add = self.cells(left) if left.startswith("[") else (self.exact(left, 8), 0)
        self.add(s, "tcgen05.mma", a=base, imm=add, b=a, e=a_add, count=int(left.startswith("[")),
                 c=self.exact(right, 8), target=self.exact(shape, 4), d=self.predicate(added),
                 mode=int(parts[1] == "kind_f16"))  # fmt: skip

    def do_mbarrier(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        what, *rest = parts
        if what == "try_wait":
            if rest != ["parity", "shared_cta", "b64"]:
                raise PtxError("no wait of the engine's")
            base, add, row = self.address(args[1])
            self.add(s, "mbarrier.try_wait", d=self.predicate(args[0]), a=base, imm=add, mode=row,
                     b=self.exact(args[2], 4))  # fmt: skip
        elif what in ("init", "inval") and rest == ["shared_cta", "b64"]:
            base, add, row = self.address(args[0])
            self.add(
                s, f"mbarrier.{what}", a=base, imm=add, mode=row, **({"e": int(args[1], 0)} if what == "init" else {})
            )
        else:
            raise PtxError("no mbarrier of the engine's")
