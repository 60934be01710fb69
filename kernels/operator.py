"""What is known of an operator, in one value; the modules of `specc.kernels.operators` hold them.

Passes, memory plans and lowerings ask this value instead of comparing names. What they ask is data,
or a plain function over shapes: the engines of their rules are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# What an operator does along the tokens of a pass, for the proof that nothing but attention mixes
# them (specc.passes.proof). Operands are named as in the schema.


@dataclass(frozen=True)
class OfHeads:
    """It may mix tokens: attention, recurrences, and what reads or writes rows by token beside
    them.

    Args:
        heads: operands [heads, tokens, head_dim].
        tables: operands [tokens, columns].
        of_tokens: operands [tokens, …], None among them.
        parameters: operands that have no tokens.
    """

    heads: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    of_tokens: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class OfRows:
    """Each row of the result is of the row of one token.

    Args:
        rows: operands with a row for each token.
        tables: operands [tokens, columns].
        parameters: operands that have no tokens.
        chosen: the operand that chooses rows of the result, which is `logit_rows`.
        are_ids: rows are token ids, which name rows of a table.
    """

    rows: tuple[str, ...]
    tables: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    chosen: str | None = None
    are_ids: bool = False


@dataclass(frozen=True)
class NamedRows:
    """Rows of slabs, which are caches: `names` [tokens, rows] says which each token reads."""

    names: str


@dataclass(frozen=True)
class SortedRows:
    """Rows in the order of a sort, and the ends of runs that this sort found."""

    rows: str = "x"
    weight: str = "weight"
    ends: str = "ends"


@dataclass(frozen=True)
class Product:
    """Contracts the last dimension of one factor and one of another.

    Args:
        first: [..., columns].
        second: [outputs, columns], or [..., columns, outputs] where it `is_plain`.
        bias: what is added, where there is such an operand; empty where there is none.
    """

    first: str = "input"
    second: str = "weight"
    bias: str = "bias"
    is_plain: bool = False


@dataclass(frozen=True)
class AlongLast:
    """Goes along the last dimension of its operands, and keeps the others."""


@dataclass(frozen=True)
class Lookup:
    """Rows of a table by ids of tokens."""

    table: str
    ids: str


@dataclass(frozen=True)
class Elementwise:
    """Element by element; of the tokens of a pass, and of dimensions that ranks cut."""


@dataclass(frozen=True)
class NoRule:
    """There is nothing to say.

    Args:
        reason: why nobody asks, or what follows from it.
    """

    reason: str


TokenRule = (
    OfHeads | OfRows | NamedRows | SortedRows | Product | AlongLast | Lookup | Elementwise | NoRule
)


@dataclass(frozen=True)
class Cut:
    """How dimensions of operands are laid out alike, for ranks that cut them (specc.passes.shard).

    A layout has a word for each dimension: a name, which stands for the same dimension wherever it
    is; `*` for one that stays whole; `.` for one of which nothing is said. `...` in front stands
    for all that the result has in front, too; `?` after the last says that it may be absent.

    Args:
        operands: name → layout, of those that something is said of.
        result: layout of the result.
        why: the reason of `*`.
        contracted: operand and dimension that the result sums over.
        heads: operands whose first named dimensions are heads of queries, and of keys; of a
            recurrence, of values and of keys.
    """

    operands: Mapping[str, str]
    result: str
    why: str
    contracted: tuple[str, str] | None = None
    heads: tuple[str, str] | None = None


CutRule = Cut | Elementwise | NoRule


# What a call takes, for memory plans and counts.


@dataclass(frozen=True)
class Operand:
    """Shape and type of a tensor of one call; a size that no pass knows is a symbol."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True)
class PassLimits:
    """What a call may meet besides its operands.

    Args:
        longest: in-flight tokens of one sequence.
        context: cache rows that one sequence may attend to.
        attention: which attention runs, see `specc.artifact.backends.BackendFacts`.
        decoded: `decoded_bytes` of these facts.
    """

    longest: int
    context: int
    attention: str
    decoded: int


@dataclass(frozen=True)
class Reads:
    """What a call reads of a weight that is not all of it once, or is read anew by each call.

    Args:
        whole: operand that every call reads all of, from memory.
        rows: operand of which only rows are read, those that ids name.
        experts: operand that chooses the matrices that are read.
        shared: operands beside those matrices that are read for every choice.
    """

    whole: str | None = None
    rows: str | None = None
    experts: str | None = None
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operator:
    """An operator `specc::name`.

    Args:
        schema: as torch writes it, name first.
        reference: its oracle, and its implementation where no other is registered.
        fake: the same arguments → results without values; None where there is no result.
        tokens: what it does along the tokens of a pass.
        cut: how ranks may cut its dimensions.
        flops: operands by name → multiplications and additions; None where they are no product.
        scratch: limits and operands by name → bytes that a call needs besides its results.
        reads: of weights.
        onnx: emitter of ONNX → what a node of this operator becomes, see `specc.passes.lower.onnx`.
        cuda: kernel for CUDA, as `module:function` of `specc.kernels.cuda`.
        cpu: whether the library of C++ kernels has it.
        stored: whether graphs of engines may call it; others are called around graphs, or replaced
            before graphs are stored.
    """

    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    tokens: TokenRule
    cut: CutRule
    flops: Callable[..., int] | None = None
    scratch: Callable[..., int] | None = None
    reads: Reads = field(default_factory=Reads)
    onnx: Callable[[Any], Callable[..., Any]] | None = None
    cuda: str | None = None
    cpu: bool = False
    stored: bool = True

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @property
    def writes(self) -> bool:
        """Whether it writes to operands in place."""
        return "!" in self.schema


def nothing(*args: object, **kwargs: object) -> None:
    """The fake of an operator that writes and returns nothing."""


def count(sizes: Sequence[int]) -> int:
    """Product of sizes."""
    product = 1
    for size in sizes:
        product *= size
    return product
