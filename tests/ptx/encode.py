"""Statements -> what the engine runs: rows of a register file, constants, handlers, where addresses come from.

Every register gets a row of 32 lanes, every constant one that is filled before a program starts. An instruction's
handler is found by a name made of its opcode; a modifier that no handler knows is an error here, not when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.ptx.operands import ALIGNMENT, LANE, SPECIAL, Code, number
from tests.ptx.syntax import BYTES, Entry, PtxError, Statement
from tests.ptx.tensor_cores import TensorCores

_SIGNLESS = ("add", "sub", "and", "or", "xor", "not", "neg", "shl", "popc", "prmt", "shf")
# Operands whose origin a result has, by operation.
_KEEP = {
    "add.b64": "ab", "sub.b64": "a", "or.b64": "ab", "and.b64": "ab", "selp.b64": "ab", "selp.b32": "ab",
    "mov.b64": "a", "mov.b32": "a", "mad.wide.s32": "c", "mad.wide.u32": "c", "mad.lo.b64": "c", "pack.b64": "ab",
    "shfl": "a",
}  # fmt: skip


@dataclass(slots=True)
class Encoded:
    """What an engine needs to know of a kernel.

    Attributes:
        codes: its instructions, whose fields are numbers.
        lists: rows that `Ins.list` points into.
        constants: bytes of rows that lie at `constants_at` of the file.
        special: offsets of the rows of SPECIAL, or -1.
        shared_bytes: declared with a size.
        data: global variables by name; their addresses are those given to `encode`.
    """

    entry: Entry
    codes: list[Code]
    lists: list[int]
    file_bytes: int
    constants: bytes
    constants_at: int
    local_bytes: int
    shared_bytes: int
    special: list[int]


def encode(entry: Entry, address_of: Callable[[str, bytes, int], int]) -> Encoded:
    """Encode a kernel.

    Args:
        entry: of `syntax.parse`.
        address_of: (name, initial bytes, size) of a global variable -> where it lies.

    Raises:
        PtxError: an instruction or operand that is not known.
    """
    return _Encoder(entry, address_of).run()


class _Encoder(TensorCores):
    def run(self) -> Encoded:
        for statement in self.entry.statements:
            try:
                self.instruction(statement)
            except (PtxError, KeyError, IndexError, ValueError) as error:
                where = f" ({', '.join(statement.source)})" if statement.source else ""
                raise PtxError(f"line {statement.line}: cannot run `{statement.text}`{where}: {error}") from error
        return self.finish()

    def instruction(self, s: Statement) -> None:
        base = s.opcode[0]
        method = getattr(self, f"do_{base}", None) or self.arithmetic
        if s.guard is not None:
            self.predicate(s.guard)
        method(s, s.opcode[1:], s.operands)

    # Modifiers that say what the engine does anyway: rounding to nearest, approximations that are exact.
    def arithmetic(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        """Instructions whose handlers are named by opcode and type, and whose operands are of that type."""
        base, kind = s.opcode[0], parts[-1]
        between = [part for part in parts[:-1] if part != "rn"]
        width, suffix = BYTES[kind], kind
        is_float = kind.startswith("f")
        if not is_float and "rn" in parts:
            raise PtxError("an integer is not rounded")
        if not is_float and kind != "pred":
            sized = base in _SIGNLESS or "lo" in between
            suffix = kind if kind.endswith("x2") else f"b{8 * width}" if sized else kind.replace("b", "u")
            suffix = suffix.replace("s16x2", "u16x2")
        if base == "mad" and is_float:
            base = "fma"
        op = ".".join([base, *between, suffix])
        wide = 2 * width if "wide" in between else width
        fields: dict[str, int | str] = {}
        widths = [wide, width, width, wide]  # d, a, b, c
        if base in ("shl", "shr", "bfe"):
            widths[2:] = [4, 4]
        take = self.predicate if kind == "pred" else None
        fields["d"] = take(args[0]) if take else self.written(args[0], widths[0])
        for name, token, size in zip("abc", args[1:], widths[1:], strict=False):
            fields[name] = take(token) if take else self.exact(token, size)
        self.add(s, op, **fields)

    def do_setp(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        comparison, kind = parts
        comparison = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(comparison, comparison)
        width = BYTES[kind]
        self.add(s, f"setp.{comparison}.{kind.replace('b', 'u')}", d=self.predicate(args[0]),
                 a=self.exact(args[1], width), b=self.exact(args[2], width))  # fmt: skip

    def do_selp(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        width = BYTES[parts[-1]]
        self.add(s, f"selp.b{8 * width}", d=self.written(args[0], width), a=self.exact(args[1], width),
                 b=self.exact(args[2], width), c=self.predicate(args[3]))  # fmt: skip

    def do_mov(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        (kind,) = parts
        width = BYTES[kind]
        if kind == "pred":
            value = number(args[1])
            source = self.predicate(args[1]) if value is None else self.constant(-(value != 0), 4)
            self.add(s, "mov.pred", d=self.predicate(args[0]), a=source)
        elif args[0].startswith("{"):
            low, high = self.vector(args[0], width // 2)
            self.add(s, f"unpack.b{8 * width}", d=low, b=high, a=self.exact(args[1], width))
        elif args[1].startswith("{"):
            low, high = self.vector(args[1], width // 2)
            self.add(s, f"pack.b{8 * width}", d=self.written(args[0], width), a=low, b=high)
        else:
            self.add(s, f"mov.b{8 * width}", d=self.written(args[0], width), a=self.exact(args[1], width))

    def do_cvt(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        to, of = parts[-2:]
        source = self.read(args[1], BYTES[of])
        if to[0] in "usb" and to[1:].isdigit() and of[0] in "usb" and of[1:].isdigit():
            if len(parts) > 2:
                raise PtxError("integers are converted without modifiers")
            target = self.entry.registers[args[0]]
            have, want = self.width[source], LANE[BYTES[target]]
            if have == BYTES[of] and want == BYTES[to]:
                kind = f"b{8 * have}" if want <= have else of.replace("b", "u")
                op = f"mov.b{8 * want}" if want == have else f"cvt.b{8 * want}.{kind}"
                self.add(s, op, d=args[0], a=source)
                return
            self.add(s, "cvt.integer", d=args[0], a=source, width=BYTES[of], sign=int(of[0] == "s"), count=have,
                     mode=BYTES[to], imm=int(to[0] == "s"), row=want)  # fmt: skip
            return
        fields: dict[str, int | str] = {"a": self.exact(args[1], BYTES[of])}
        if len(args) > 2:
            fields["b"] = self.exact(args[2], BYTES[of])
        self.add(s, ".".join(["cvt", *parts]), d=self.written(args[0], BYTES[to]), **fields)

    def memory(self, parts: Iterable[str]) -> tuple[str, str, int]:
        """Space, type and elements; what else a modifier says must be about caches."""
        space, kind, count = "", "", 1
        for part in parts:
            if part in BYTES:
                kind = part
            elif part.split("_")[0] in ("global", "shared", "local", "param"):
                space = part.split("_")[0]
            elif part in ("v2", "v4"):
                count = int(part[1])
            elif part not in ("nc", "relaxed", "acq_rel", "gpu", "sys"):
                raise PtxError(f"no modifier of a memory access: {part}")
        if not space or not kind:
            raise PtxError("no space or no type")
        return space, kind, count

    def do_ld(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        space, kind, count = self.memory(parts)
        signed, width = int(kind[0] == "s"), BYTES[kind]
        if space == "param":
            index = self.parameters[args[1].strip("[] ")]
            if BYTES[self.entry.parameters[index].kind] != width:
                raise PtxError("a parameter is read whole")
            target = self.written(args[0], self.width[args[0]])
            self.add(s, "ld.param", d=target, row=self.width[target], imm=index, width=width, sign=signed)
            return
        rows = self.vector(args[0], width)
        (row,) = {self.width[name] for name in rows if name != "_"}
        if len(rows) != count or row < width:
            raise PtxError("as many registers as elements, and as wide")
        self.access(s, "ld", space, args[1], width=width, count=count, sign=signed, row=row).rows = rows

    def do_st(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        space, kind, count = self.memory(parts)
        width = BYTES[kind]
        rows = self.vector(args[1], width)
        # A constant has rows of every width.
        row = max(self.width[name] for name in rows)
        rows = [self.constant(self.constants[name][0], row) if name in self.constants else name for name in rows]
        if len(rows) != count or {self.width[name] for name in rows} != {row}:
            raise PtxError("as many registers as elements, all as wide")
        self.access(s, "st", space, args[0], width=width, count=count, row=row).rows = rows

    def do_atom(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        how = [k for k, name in enumerate(("add", "or")) if name in parts]
        space, kind, _ = self.memory(part for part in parts if part not in ("add", "or"))
        width = BYTES[kind]
        if len(how) != 1 or width < 4 or kind[0] == "f" or space not in ("global", "shared"):
            raise PtxError("no atomic operation of the engine's")
        result, *args_ = args if s.opcode[0] == "atom" else ("_", *args)
        self.access(s, "atom", space, args_[0], d=self.written(result, width), b=self.exact(args_[1], width), e=how[0],
                    width=width, row=width)  # fmt: skip

    do_red = do_atom

    def do_cp(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        if parts == ("async", "commit_group"):
            self.add(s, "cp.async.commit_group")
        elif parts == ("async", "wait_group"):
            self.add(s, "cp.async.wait_group", imm=int(args[0], 0))
        elif parts in (("async", "ca", "shared", "global"), ("async", "cg", "shared", "global")):
            to, to_add, to_row = self.address(args[0])
            of, of_add, _ = self.address(args[1])
            size = self.exact(args[3], 4) if len(args) > 3 else "_"
            code = self.add(s, "cp.async", d=to, e=to_add, mode=to_row, a=of, imm=of_add, b=size, width=int(args[2], 0))
            code.base = of
        else:
            raise PtxError("no copy of the engine's")

    def do_fence(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        if parts[:2] != ("proxy", "async"):
            raise PtxError("no fence of the engine's")
        self.add(s, "fence.proxy")

    def do_shfl(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        sync, how, kind = parts
        if sync != "sync" or kind != "b32":
            raise PtxError("no shuffle of the engine's")
        to, _, inside = args[0].partition("|")
        self.add(s, "shfl", d=self.written(to, 4), target=self.predicate(inside) if inside else "_",
                 mode=("up", "bfly", "idx").index(how), a=self.exact(args[1], 4), b=self.exact(args[2], 4),
                 c=self.exact(args[3], 4), e=self.exact(args[4], 4))  # fmt: skip

    def do_redux(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        _, *how = parts
        known = ("add.s32", "max.s32", "min.s32", "max.u32")
        self.add(s, "redux", d=self.written(args[0], 4), a=self.exact(args[1], 4), b=self.exact(args[2], 4),
                 mode=known.index(".".join(how)))  # fmt: skip

    def do_elect(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        if parts != ("sync",):
            raise PtxError("no election of the engine's")
        to, _, chosen = args[0].partition("|")
        self.add(s, "elect", d=self.written(to, 4), target=self.predicate(chosen), a=self.exact(args[1], 4))

    def do_bar(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        if parts == ("warp", "sync"):
            self.add(s, "bar.warp.sync", a=self.exact(args[0], 4))
        elif parts in (("sync",), ("sync", "aligned")) and args == ("0",):
            self.add(s, "bar.sync")
        else:
            raise PtxError("no barrier of the engine's")

    do_barrier = do_bar

    def do_bra(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        if args[0] not in self.entry.labels:
            raise PtxError("no such label")
        self.add(s, "bra").label = args[0]

    def do_ret(self, s: Statement, parts: tuple[str, ...], args: tuple[str, ...]) -> None:
        self.add(s, "ret")

    # layout -----------------------------------------------------------------------------------------------------------

    def finish(self) -> Encoded:
        origins = self.origins()
        self.size += -self.size % ALIGNMENT
        constants_at, constants = self.size, bytearray()
        for name, (value, width) in self.constants.items():
            self.offset[name] = constants_at + len(constants)
            constants += value.to_bytes(width, "little") * 32
        offset = {**self.offset, "_": -1}
        lists: list[int] = []
        # As if there were a return after the last instruction.
        for code in self.codes:
            for key, field_value in code.fields.items():
                if isinstance(field_value, str):
                    code.fields[key] = offset[field_value]
            if code.statement.guard is not None:
                code.fields |= {"guard": offset[code.statement.guard], "negated": int(code.statement.negated)}
            if code.rows is not None:
                code.fields["list"] = len(lists)
                lists += [offset[name] for name in code.rows]
            if code.label is not None:
                code.fields["target"] = self.entry.labels[code.label]
            if code.base is not None:
                code.fields["origin"] = origins.get(code.base, 0)
        if not self.codes or self.codes[-1].op not in ("ret", "bra"):
            raise PtxError("the code does not end in a return")
        special = [self.offset.get(name, -1) for name in SPECIAL]
        return Encoded(self.entry, self.codes, lists, constants_at + len(constants), bytes(constants), constants_at,
                       self.local_bytes, self.shared_bytes, special)  # fmt: skip

    def origins(self) -> dict[str, int]:
        """Which pointers among the parameters a register may come from, as bits.

        Sums, choices and moves keep them, and so does the way through other lanes or through shared memory, of which
        all 64-bit values are taken together.
        """
        shared = "values of 64 bits in shared memory"
        steps: list[tuple[str, str]] = []  # to, from
        found: dict[str, int] = {}
        for code in self.codes:
            fields = {key: str(value) for key, value in code.fields.items()}
            if code.op == "ld.param" and self.entry.parameters[int(code.fields["imm"])].pointer:
                found[fields["d"]] = 1 << int(code.fields["imm"])
            elif code.op in _KEEP:
                steps += [(fields["d"], fields[key]) for key in _KEEP[code.op]]
            elif code.op == "unpack.b64":
                steps += [(fields["d"], fields["a"]), (fields["b"], fields["a"])]
            elif code.op in ("ld.shared", "st.shared") and code.fields["width"] == 8:
                steps += [(name, shared) if code.op == "ld.shared" else (shared, name) for name in code.rows or ()]
        changed = True
        while changed:
            changed = False
            for to, name in steps:
                origin = found.get(to, 0) | found.get(name, 0)
                if origin != found.get(to, 0):
                    found[to], changed = origin, True
        return found
