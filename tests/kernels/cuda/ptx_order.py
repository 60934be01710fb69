"""What a kernel that is launched early does before it waits, read from its PTX.

A walk over the basic blocks of the one entry of a module: at each instruction, has every path to it
passed `griddepcontrol.wait`? Until then nothing of the device's memory may be read or written but
constants, whose lines may be asked for, too (`prefetch`), and no program may end: see
`specc.kernels.cuda.dependent`, which argues from that. Which argument an address comes from is
found by following registers to the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

WAIT, START = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"(\$?[\w$]+):\s*")
_GUARD = re.compile(r"@!?(%\w+)\s+")
_REGISTER = re.compile(r"%[a-z]+\d+")
_PARAMETER = re.compile(r"\b\w+_param_(\d+)\b")
# instructions that touch memory; those of the spaces beside belong to one program
_MEMORY = {
    "ld", "ldu", "st", "atom", "red", "cp", "prefetch", "prefetchu", "discard", "applypriority",
    "multimem", "tensormap", "tex", "tld4", "suld", "sust", "sured",
}  # fmt: skip
# of copies that were asked for before
_GROUPS = {"cp.async.commit_group", "cp.async.wait_group"}
_OWN_SPACES = {"param", "shared", "local", "const"}
_ENDS = {"ret", "exit"}
# where they lead is not followed
_UNKNOWN = {"call", "brx"}
# what `origins` has for addresses that were read from memory
LOADED = "loaded"


@dataclass(frozen=True)
class Instruction:
    """One instruction; `guard` is the predicate it depends on, or empty."""

    text: str
    guard: str

    @property
    def opcode(self) -> str:
        return self.text.split(maxsplit=1)[0]

    @property
    def kind(self) -> str:
        """What stands before the first dot."""
        return self.opcode.partition(".")[0]

    @property
    def touches_memory(self) -> bool:
        """Of the device: not of one program alone."""
        first, *rest = self.opcode.split(".")
        if self.opcode in _GROUPS:
            return False
        return first in _MEMORY and ("global" in rest or not _OWN_SPACES & _spaces(rest))


def _spaces(modifiers: Sequence[str]) -> set[str]:
    return {modifier.partition("::")[0] for modifier in modifiers}


def problems(
    ptx: str, arguments: Sequence[str], constants: Collection[str], early: Collection[str] = ()
) -> list[str]:
    """What is wrong with a kernel that is launched early; empty where all is in order.

    Args:
        arguments: its names, in the order of the parameters.
        early: those whose memory the kernel before does not write, nor one after that.
    """
    blocks = list(_blocks(ptx))
    has_waited = _waited(blocks)
    origins = _origins([x for _, block in blocks for x in block], arguments)
    found = []
    for i, (_, block) in enumerate(blocks):
        waited = has_waited[i]
        for x in block:
            if waited or (x.opcode == WAIT and not x.guard):
                waited = True
            elif x.opcode == START:
                found.append("lets the next kernel start before it waits")
            elif x.kind in _ENDS:
                found.append(f"ends before it waits: {x.text}")
            elif x.kind in _UNKNOWN:
                found.append(f"leads away before it waits: {x.text}")
            elif x.touches_memory and not (
                _is_asked(x, origins, constants) or _is_early(x, origins, early)
            ):
                found.append(f"before it waits: {x.text}")
    texts = {x.opcode for _, block in blocks for x in block}
    return found + [f"no {needed}" for needed in (WAIT, START) if needed not in texts]


def starts_soon(ptx: str, arguments: Sequence[str], streamed: Collection[str]) -> list[str]:
    """Loads of what a kernel streams that come after the next one may start; empty is in order.

    Args:
        arguments: its names, in the order of the parameters.
        streamed: those that a kernel which fills the device reads in its loop.
    """
    instructions = [x for _, block in _blocks(ptx) for x in block]
    origins = _origins(instructions, arguments)
    has_let, found = False, []
    for x in instructions:
        has_let |= x.opcode == START
        if has_let and x.kind in {"ld", "cp"} and x.touches_memory:
            of = set().union(*(origins.get(name, set()) for name in _REGISTER.findall(x.text)))
            if of & set(streamed):
                found.append(f"after it lets the next kernel start: {x.text}")
    return found


def is_ordinary(ptx: str) -> bool:
    """Nothing of dependent launches is in a kernel."""
    return "griddepcontrol" not in ptx and "prefetch.global" not in ptx


def _is_asked(x: Instruction, origins: dict[str, set[str]], constants: Collection[str]) -> bool:
    """Constants, at an address that follows from their argument and from no memory."""
    if x.kind not in {"prefetch", "ld", "cp"}:
        return False
    address = x.text[x.text.index("[") :]
    of = set().union(*(origins.get(name, set()) for name in _REGISTER.findall(address)))
    return bool(of & set(constants)) and not (of - set(constants) - {""})


def _is_early(x: Instruction, origins: dict[str, set[str]], early: Collection[str]) -> bool:
    """A load past the first-level cache from such arguments, at places that others may name."""
    modifiers = x.opcode.split(".")
    if modifiers[0] != "ld" or "cg" not in modifiers:
        return False
    address = x.text[x.text.index("[") :]
    of = set().union(*(origins.get(name, set()) for name in _REGISTER.findall(address)))
    return bool(of & set(early)) and not (of - set(early) - {"", LOADED})


def _blocks(ptx: str) -> Iterator[tuple[str, list[Instruction]]]:
    """(label, instructions) of the entry, in order; a block ends after each branch."""
    text = _COMMENT.sub("", ptx)
    assert text.count(".entry") == 1, "one kernel"
    lines = text[text.index("{", text.index(".reqntid")) :].splitlines()
    # what debuggers read has no semicolons
    text = "\n".join(line for line in lines if not re.match(r"\s*\.(loc|file)\b", line))
    label, block = "", list[Instruction]()
    for piece in text.split(";"):
        rest = piece.strip().strip("{}").strip()
        while (match := _LABEL.match(rest)) is not None:
            yield label, block
            label, block = match[1], []
            rest = rest[match.end() :].strip("{}").strip()
        guard = _GUARD.match(rest)
        rest = rest[guard.end() :] if guard else rest
        if not rest or rest.startswith("."):
            continue
        block.append(Instruction(" ".join(rest.split()), guard[1] if guard else ""))
        if block[-1].kind in {"bra", *_ENDS}:
            yield label, block
            label, block = "", []
    yield label, block


def _waited(blocks: Sequence[tuple[str, list[Instruction]]]) -> list[bool]:
    """Of each block: every path to it has passed the wait. Unreachable blocks have, too."""
    places = {label: i for i, (label, _) in enumerate(blocks) if label}
    before: list[list[int]] = [[] for _ in blocks]
    for i, (_, block) in enumerate(blocks):
        last = block[-1] if block else None
        kind = last.kind if last else ""
        if last is not None and kind == "bra":
            before[places[last.text.split()[-1]]].append(i)
        falls_through = kind not in {"bra", *_ENDS} or bool(last and last.guard)
        if falls_through and i + 1 < len(blocks):
            before[i + 1].append(i)
    own = [any(x.opcode == WAIT and not x.guard for x in block) for _, block in blocks]
    waited = [i > 0 for i in range(len(blocks))]
    changed = True
    while changed:
        changed = False
        for i, sources in enumerate(before):
            now = i > 0 and all(waited[j] or own[j] for j in sources)
            changed |= now != waited[i]
            waited[i] = now
    return waited


def _origins(instructions: Sequence[Instruction], arguments: Sequence[str]) -> dict[str, set[str]]:
    """Register → pointers that its value follows from: arguments, LOADED, "" for numbers."""
    found: dict[str, set[str]] = {}
    changed = True
    while changed:
        changed = False
        for x in instructions:
            operands = x.text.partition(" ")[2]
            if operands.startswith("["):
                # no result: it stores, or asks
                continue
            end = operands.index("}") if operands.startswith("{") else operands.find(",")
            to = _REGISTER.findall(operands[: end if end >= 0 else None])
            of: set[str] = set()
            for name in _REGISTER.findall(operands[end:] if end >= 0 else ""):
                of |= found.get(name, set())
            for number in _PARAMETER.findall(operands):
                # only 64-bit parameters are addresses, and no program has integers of that size
                is_pointer = x.opcode.startswith("ld.param") and "64" in x.opcode
                known_argument = is_pointer and int(number) < len(arguments)
                of |= {arguments[int(number)] if known_argument else ""}
            if x.touches_memory or x.opcode.startswith("ld.shared"):
                of |= {LOADED}
            for name in to:
                known = found.setdefault(name, set())
                changed |= not of <= known
                known |= of
    return found
