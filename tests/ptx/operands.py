"""Operands of PTX -> rows of a warp's register file: registers, constants, special registers, addresses; and the code
that takes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.ptx.syntax import BYTES, Entry, PtxError, Statement

SHARED_BASE = 1024  # as in machine.h
ROW = {1: 64, 2: 64, 4: 128, 8: 256}  # bytes of a row of lanes
LANE = {1: 2, 2: 2, 4: 4, 8: 8}  # bytes of a lane
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z")
# Of rows, so that vector instructions find them; predicates are words.
ALIGNMENT = 64


def number(token: str) -> int | None:
    if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", token):
        return int(found[1] or found[2], 16)
    try:
        return int(token.rstrip("U"), 0)
    except ValueError:
        return None


@dataclass(slots=True)
class Code:
    """An instruction: `op` names its handler, `fields` are those of the engine's `Ins`, with names of rows in some."""

    statement: Statement
    op: str
    fields: dict[str, int | str] = field(default_factory=dict)
    rows: list[str] | None = None
    label: str | None = None
    base: str | None = None  # register of an address in global memory


class Operands:
    """The rows that an entry's code needs, and the code.

    Args:
        entry: whose registers and variables there are.
        address_of: see `encode.encode`.

    Attributes:
        codes: encoded so far.
    """

    def __init__(self, entry: Entry, address_of: Callable[[str, bytes, int], int]) -> None:
        self.entry = entry
        self.codes: list[Code] = []
        self.width = {name: LANE[BYTES[kind]] for name, kind in entry.registers.items()}
        self.offset: dict[str, int] = {}
        self.size = 0
        for name, kind in entry.registers.items():
            self.place(name, 4 if kind == "pred" else ROW[BYTES[kind]])
        self.constants: dict[str, tuple[int, int]] = {}
        self.symbols: dict[str, int] = {}
        self.parameters = {parameter.name: k for k, parameter in enumerate(entry.parameters)}
        self.local_bytes = self.shared_bytes = 0
        for variable in entry.variables:
            if variable.space == "local":
                self.symbols[variable.name] = self.local_bytes
                self.local_bytes += -(-variable.size // 16) * 16
            elif variable.space == "shared":
                self.symbols[variable.name] = SHARED_BASE + (self.shared_bytes if variable.size else 0)
                self.shared_bytes += -(-variable.size // 16) * 16
            else:
                self.symbols[variable.name] = address_of(variable.name, variable.initial, variable.size)

    def place(self, name: str, size: int) -> None:
        if size >= ALIGNMENT:
            self.size += -self.size % ALIGNMENT
        self.offset[name] = self.size
        self.size += size

    def constant(self, value: int, width: int) -> str:
        width = LANE[width]
        value &= (1 << 8 * width) - 1
        name = f"#{value:x}:{width}"
        self.constants[name] = value, width
        self.width[name] = width
        return name

    def read(self, token: str, width: int) -> str:
        """The row of what is read as so many bytes: a register, a special one, a number, an address."""
        token = token.strip()
        if token in SPECIAL and token not in self.offset:
            self.place(token, ROW[4])
            self.width[token] = 4
        if token in self.entry.registers or token in self.offset:
            if self.width[token] < width and width > 1:
                raise PtxError(f"{token} is too narrow")
            return token
        value = self.symbols.get(token, number(token))
        if value is None:
            raise PtxError(f"no operand: {token}")
        return self.constant(value, width)

    def exact(self, token: str, width: int) -> str:
        """Like `read`, of a register that is just as wide: what is wider has other lanes."""
        name = self.read(token, width)
        if self.width[name] != LANE[width]:
            raise PtxError(f"{token} is not of {8 * width} bits")
        return name

    def written(self, token: str, width: int) -> str:
        if token == "_":
            return "_"
        if self.entry.registers.get(token) in (None, "pred") or self.width[token] != LANE[width]:
            raise PtxError(f"{token} is no register of {8 * width} bits")
        return token

    def predicate(self, token: str) -> str:
        if self.entry.registers.get(token) != "pred":
            raise PtxError(f"{token} is no predicate")
        return token

    def vector(self, token: str, width: int) -> list[str]:
        inside = token.strip()
        names = inside[1:-1].split(",") if inside.startswith("{") else [inside]
        return ["_" if name.strip() == "_" else self.read(name, width) for name in names]

    def address(self, token: str) -> tuple[str, int, int]:
        """Row of the base, what is added to it, bytes of a lane of the base."""
        if not (token.startswith("[") and token.endswith("]")):
            raise PtxError(f"no address: {token}")
        base, _, add = (part.strip() for part in token[1:-1].partition("+"))
        more = number(add) if add else 0
        if more is None:
            raise PtxError(f"no offset: {add}")
        if base in self.entry.registers:
            return base, more, self.width[base]
        value = self.symbols.get(base, number(base))
        if value is None:
            raise PtxError(f"no address: {token}")
        return self.constant(value + more, 8), 0, 8

    def add(self, statement: Statement, op: str, **fields: int | str) -> Code:
        code = Code(statement, op, fields)
        self.codes.append(code)
        return code

    def access(self, s: Statement, op: str, space: str, token: str, **fields: int | str) -> Code:
        base, add, row = self.address(token)
        code = self.add(s, f"{op}.{space}", a=base, imm=add, mode=row, **fields)
        if space == "global":
            if row != 8:
                raise PtxError("an address in global memory has 64 bits")
            code.base = base
        return code
