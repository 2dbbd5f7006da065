"""Parser of PTX text into statements with their Python source lines, without interpreting them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

BYTES = {
    "pred": 4, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "s16x2": 4, "tf32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8,
}  # fmt: skip


class PtxError(ValueError):
    """PTX that the emulator does not know; the message quotes the statement and its line."""


@dataclass(frozen=True, slots=True)
class Statement:
    """An instruction.

    Attributes:
        line: of the PTX text, from 1 on.
        text: as it stands there.
        guard: predicate that it is executed under, or None; `negated` if that must be false.
        opcode: the parts between its dots.
        operands: as they stand there; `{...}` and `[...]` are one operand.
        source: `file:line` of the Python that it was compiled from, innermost call first.
    """

    line: int
    text: str
    guard: str | None
    negated: bool
    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    source: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Of the entry: `kind` is a type without its dot; `pointer` if it is one into global memory."""

    name: str
    kind: str
    pointer: bool


@dataclass(frozen=True, slots=True)
class Variable:
    """A declaration with an address: `space` is shared, local or global; `size` bytes, 0 if set at launch."""

    space: str
    name: str
    size: int
    initial: bytes


@dataclass(slots=True)
class Entry:
    """The one kernel of a text."""

    name: str
    threads: int
    parameters: list[Parameter]
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_LOCATION = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:\s*,\s*function_name\s+\S+\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+\d+)?"
)
_INSTRUCTION = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_VARIABLE = re.compile(
    r"\.(shared|local|global)\s+(?:\.align\s+\d+\s+)?\.[bus](\d+)\s+([\w$]+)\s*(?:\[(\d*)\])?(?:\s*=\s*\{?([^}]*)\}?)?$"
)
_IGNORED = (".pragma", ".file", ".section", ".version", ".target", ".address_size")


def split(text: str) -> tuple[str, ...]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        if letter in "{[(":
            depth += 1
        elif letter in "}])":
            depth -= 1
        elif letter == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return (*parts, last) if last else tuple(parts)


def parse(text: str) -> Entry:
    """Read the text of one kernel.

    Raises:
        PtxError: no entry, or a statement or declaration that has no known form.
    """
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+(?:"[^"\n]*"\s+)?"(?:[^"\n]*/)?([^"\n/]*)"', text, re.M))
    code = re.sub(r"//[^\n]*", "", text)
    found = _ENTRY.search(code)
    if found is None:
        raise PtxError("no entry in the text")
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", found[3])
    if threads is None:
        raise PtxError(f"{found[1]} does not say how many threads a program has")
    entry = Entry(found[1], int(threads[1]), [_parameter(part) for part in split(found[2])])
    for line in code[: found.start()].splitlines():
        declared = re.search(r"\.(shared|global)\b.*", line)
        if declared:
            _declare(entry, declared[0].rstrip(" ;"))
    source: tuple[str, ...] = ()
    scopes = _Scopes(entry)
    for number, statement in _statements(code, found.end()):
        if statement == "{":
            scopes.enter()
        elif statement == "}":
            scopes.leave()
        elif location := _LOCATION.match(statement):
            # Line 0: code of no line in particular.
            ends = [(location[1], location[2]), (location[3], location[4])]
            source = tuple(f"{files.get(file, file)}:{line}" for file, line in ends if file and line != "0")
        elif statement.endswith(":"):
            entry.labels[scopes.own(statement[:-1])] = len(entry.statements)
        elif statement.startswith("."):
            _declare(entry, statement, scopes)
        else:
            entry.statements.append(_instruction(number, statement, source))
    return entry


def _parameter(text: str) -> Parameter:
    words = text.split()
    return Parameter(words[-1], words[1].removeprefix("."), ".ptr" in words)


def _statements(code: str, start: int) -> Iterator[tuple[int, str]]:
    """Statements of the body with their lines, without semicolons; braces of scopes stand alone."""
    number, pending, first = code.count("\n", 0, start) + 1, "", 0
    depth = 1
    for line in code[start:].split("\n"):
        words = line.strip()
        if not pending and (re.match(r"\.loc\s|[\w$]+:$", words)):
            yield number, words
            words = ""
        while words:
            if not pending and words[0] in "{}" and not re.match(r"\{[^;}]*\}", words):
                depth += 1 if words[0] == "{" else -1
                if not depth:
                    return
                yield number, words[0]
                words = words[1:].strip()
                continue
            if not pending:
                first = number
            part, end, words = words.partition(";")
            pending = f"{pending} {part.strip()}".strip()
            words = words.strip()
            if end:
                yield first, pending
                pending = ""
        number += 1
    raise PtxError("the body of the entry does not end")


def _instruction(line: int, text: str, source: tuple[str, ...]) -> Statement:
    found = _INSTRUCTION.match(text)
    if found is None:
        raise PtxError(f"line {line}: no instruction: {text}")
    opcode = tuple(found[3].replace("::", "_").split("."))
    return Statement(line, text, found[2], bool(found[1]), opcode, split(found[4]), source)


class _Scopes:
    """Rename declarations inside braces of the body, because inline assembly repeats the same names."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._open: list[tuple[int, int, dict[str, str]]] = []  # number, first statement, new names by old ones
        self._count = 0

    def enter(self) -> None:
        self._count += 1
        self._open.append((self._count, len(self.entry.statements), {}))

    def own(self, name: str) -> str:
        if not self._open:
            return name
        number, _, names = self._open[-1]
        return names.setdefault(name, f"{name}_of_scope_{number}")

    def leave(self) -> None:
        _, first, names = self._open.pop()
        if not names:
            return
        pattern = re.compile(rf"(?<![\w$%])(?:{'|'.join(map(re.escape, names))})(?![\w$])")
        for k, statement in enumerate(self.entry.statements[first:], first):
            guard, *operands = (
                pattern.sub(lambda found: names[found[0]], text)
                for text in (statement.guard or "", *statement.operands)
            )
            self.entry.statements[k] = replace(statement, guard=guard or None, operands=tuple(operands))


def _declare(entry: Entry, text: str, scopes: _Scopes | None = None) -> None:
    if text.startswith(_IGNORED):
        return
    if registers := re.match(r"\.reg\s+\.(\w+)\s+(.+)$", text, re.S):
        for given in split(registers[2]):
            name = scopes.own(given) if scopes is not None and "<" not in given else given
            if many := re.fullmatch(r"(%?[\w$]+)<(\d+)>", name):
                entry.registers.update({f"{many[1]}{k}": registers[1] for k in range(int(many[2]))})
            else:
                entry.registers[name] = registers[1]
    elif variable := _VARIABLE.search(text):
        space, bits, name, count, initial = variable.groups()
        width = int(bits) // 8
        values = [int(value, 0) for value in split(initial or "")]
        data = b"".join(value.to_bytes(width, "little") for value in values)
        # [] has no size: shared memory that the launch gives.
        entry.variables.append(
            Variable(space, name, width * int(count) if count else 0 if count == "" else width, data)
        )
    else:
        raise PtxError(f"no known declaration: {text}")
