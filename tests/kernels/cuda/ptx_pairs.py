"""Run inline assembly of pairs of bfloat16 on tensors of words.

The instructions that `linear_q_unpack` is written in, as the PTX ISA has them: `mov`, `and`, `shl`,
`shr`, `shf.r.wrap`, `prmt`, `mad.lo`, `lop3` of 32 bits, `fma.rn.bf16x2`, and `mov` of a word's
halves. A fused product that is not exact is an error, since levels are to be exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def run(text: str, words: Sequence[Tensor], num_results: int) -> list[Tensor]:
    """What the assembly makes of registers: bfloat16 [..., 2] each; see `run_words`."""
    return [_pair(word) for word in run_words(text, words, num_results)]


def run_words(text: str, words: Sequence[Tensor], num_results: int) -> list[Tensor]:
    """What the assembly makes of registers.

    Args:
        text: results are $0, $1, …, and after them come the words.
        words: int32 [..., P], of each P registers one after the other.
    Returns:
        int64 [...] each, of 32 bits.
    """
    given = [x.long() & _MASK for word in words for x in word.unbind(-1)]
    registers = {f"${num_results + i}": x for i, x in enumerate(given)}
    for line in text.strip().strip("{}").split(";"):
        opcode, _, rest = " ".join(line.split()).partition(" ")
        if not opcode or opcode == ".reg":
            continue
        to, *names = re.findall(r"\{[^}]*\}|[^{},\s]+", rest)
        operands = [_value(name, registers) for name in names]
        for i, name in enumerate(halves := _halves(to)):
            found = operands[0] >> 16 * i & 0xFFFF if len(halves) > 1 else _step(opcode, operands)
            registers[name] = found.expand(given[0].shape)
    return [registers[f"${i}"] for i in range(num_results)]


def _halves(name: str) -> list[str]:
    """Names of a word's halves, the lower one first; of a word its own."""
    return [half.strip() for half in name.strip("{}").split(",")]


def _value(name: str, registers: dict[str, Tensor]) -> Tensor:
    if re.fullmatch(r"0x[0-9a-f]+|\d+", name):
        return torch.tensor(int(name, 0))
    low, *high = (registers[half] for half in _halves(name))
    return low | high[0] << 16 if high else low


def _step(opcode: str, operands: Sequence[Tensor]) -> Tensor:
    a, *others = operands
    if opcode == "mov.b32":
        return a
    if opcode == "and.b32":
        return a & others[0]
    if opcode == "shl.b32":
        return a << others[0] & _MASK
    if opcode == "shr.u32":
        return a >> others[0]
    if opcode == "shf.r.wrap.b32":
        low, high, count = operands
        return (low | high << 32) >> count & _MASK
    if opcode == "lop3.b32":
        return _of_three(a, others[0], others[1], int(others[2]))
    if opcode == "prmt.b32":
        return _bytes(a, others[0], int(others[1]))
    if opcode == "mad.lo.u32":
        return a * others[0] + others[1] & _MASK
    if opcode == "fma.rn.bf16x2":
        return _fused(a, others[0], others[1])
    raise NotImplementedError(opcode)


def _bytes(a: Tensor, b: Tensor, selector: int) -> Tensor:
    """Four of the eight bytes of two words, by a number of four bits each."""
    both = [word >> 8 * i & 255 for word in (a, b) for i in range(4)]
    found = [both[selector >> 4 * i & 15] << 8 * i for i in range(4)]
    return found[0] | found[1] | found[2] | found[3]


def _of_three(a: Tensor, b: Tensor, c: Tensor, table: int) -> Tensor:
    """Bit 4 a + 2 b + c of the table, for each bit of the operands."""
    found = torch.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            found = found | (
                (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) & _MASK
            )
    return found


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    exact = _pair(a).double() * _pair(b).double() + _pair(c).double()
    rounded = exact.bfloat16()
    if not torch.equal(rounded.double(), exact):
        raise ArithmeticError("found a product of pairs that is rounded")
    halves = rounded.contiguous().view(torch.int16).long() & 0xFFFF
    return halves[..., 0] | halves[..., 1] << 16


def _pair(words: Tensor) -> Tensor:
    """[..., 2] of words, the lower half first."""
    halves = torch.stack([words & 0xFFFF, words >> 16], -1)
    return (halves << 16).to(torch.int32).view(torch.float32).bfloat16()
