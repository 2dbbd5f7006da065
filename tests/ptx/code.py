"""Instructions as they are encoded one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.ptx.operands import Operands
from tests.ptx.syntax import Entry, PtxError, Statement


@dataclass(slots=True)
class Code:
    """An instruction: `op` names its handler, `fields` are those of the engine's `Ins`, with names of rows in some."""

    statement: Statement
    op: str
    fields: dict[str, int | str] = field(default_factory=dict)
    rows: list[str] | None = None
    label: str | None = None
    base: str | None = None  # register of an address in global memory


class Emitter(Operands):
    """Operands of an entry, and the code that takes them.

    Args:
        entry, address_of: see `Operands`.

    Attributes:
        codes: emitted so far.
    """

    def __init__(self, entry: Entry, address_of: Callable[[str, bytes, int], int]) -> None:
        super().__init__(entry, address_of)
        self.codes: list[Code] = []

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
