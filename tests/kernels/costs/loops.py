"""Innermost loops of a kernel's machine code, and how many instructions they spend per symbol.

A loop is a strongly connected part of the control flow graph that is reachable from the kernel's entry. Without the
instruction that enters the loop, the parts that are still strongly connected are the loops inside it. A loop of control
instructions alone (a wait for a barrier) counts as part of the loop around it. Every instruction of a loop counts once,
whether or not a given lane or pass takes its path; padding does not count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tests.kernels.costs.disassembly import INSTRUCTION_KINDS, Instruction


def innermost_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return the loops of a function that contain no other loop, each in the order of addresses; see the module."""
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
    """Return the strongly connected parts of a graph that have a cycle (Tarjan, without recursion)."""
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


def describe_loops(code: Sequence[Instruction], access: str | None) -> list[dict[str, Any]]:
    """Describe the innermost loops, the one that does most of the work first.

    Args:
        code: instructions of a function.
        access: as `KernelSpec.symbol_access`; loops without it are left out.

    Returns:
        per loop: `instructions`, `symbols` per pass and `instructions_per_symbol` (None without `access`), and the
        number of instructions of each of INSTRUCTION_KINDS.
    """
    loops = []
    for loop in innermost_loops(code):
        symbols = sum(instruction.access == access for instruction in loop) if access else None
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
    # The remainder loop that follows an unrolled loop handles fewer symbols per pass.
    return sorted(loops, key=lambda loop: (loop["symbols"] or 0, loop["instructions"]), reverse=True)
