"""What the ranks of an engine on devices do together, as numbers: sizes, and never values.

What a pass reads lies on rank 0's device, where its drafts and its last step have left it. So an
order says how large everything is, and the values go from device to device (`specc::from_first`),
inside of captured graphs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specc.kernels.cuda.launch import is_even
from specc.runtime.ranks.draft_parts import SENT
from specc.runtime.ranks.orders import MOST_BYTES, refused

# the first number of a row of the table
_PASS, _COMMIT, _DRAFT, _TAKE = 0, 1, 2, 3
_COLUMNS = 10
# of tensors in what is sent, in bytes: what Triton specializes pointers on
_ALIGNMENT = 16
_I64, _I32 = torch.int64, torch.int32
# what is left out, such as the ancestors of a causal pass
_ABSENT = -1

# dtype and shape of a tensor; None is left out
Spec = tuple[torch.dtype, tuple[int, ...]] | None


class PassWork(NamedTuple):
    """A pass of a model.

    Args:
        tokens: Nt, of all sequences.
        sequences: B.
        words: W of the ancestors of a token, or -1: a causal pass.
        blocks: width of the block table.
        rows: R that get logits, or 0.
        is_even: sequences have equally many tokens, see `even_tokens`.
        model: number of the model among those that all ranks run; 0 is the target.
        votes: M, rows of the mass of blocks, or 0: nobody is asked for votes.
        columns: C of it, or 0.
    """

    tokens: int
    sequences: int
    words: int
    blocks: int
    rows: int
    is_even: bool
    model: int = 0
    votes: int = 0
    columns: int = 0

    @classmethod
    def of(cls, inputs: Sequence[Tensor | None], model: int = 0) -> PassWork:
        """The sizes of the inputs of `ModelProgram.forward`, as this thread launches it."""
        tokens, _, _, _, lengths, ancestors, table, rows, *more = inputs
        assert tokens is not None
        assert lengths is not None
        assert table is not None
        assert rows is not None
        words = _ABSENT if ancestors is None else ancestors.shape[1]
        sizes = (len(tokens), len(lengths), words, table.shape[1], len(rows))
        votes = [size for mass in more if mass is not None for size in mass.shape]
        return cls(*sizes, is_even(), model, *votes)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Of the eight inputs, and of the mass where there is one."""
        count, batch = (self.tokens,), (self.sequences,)
        mass: tuple[Spec, ...] = ((torch.float32, (self.votes, self.columns)),)
        return (
            (_I64, count),
            (_I64, count),
            (_I32, (self.sequences + 1,)),
            (_I32, count),
            (_I32, batch),
            None if self.words == _ABSENT else (_I64, (self.tokens, self.words)),
            (_I32, (self.sequences, self.blocks)),
            (_I64, (self.rows,)),
            *(mass if self.votes else ()),
        )


class CommitWork(NamedTuple):
    """Rows of a model's caches move after the committed ones; see `specc::commit_kv`.

    Args:
        sequences: B.
        places: P, accepted nodes of a path at most.
        blocks: width of the block table.
        model: as of `PassWork`.
    """

    sequences: int
    places: int
    blocks: int
    model: int = 0

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Of source, target and block table."""
        rows = (_I32, (self.sequences, self.places))
        return (rows, rows, (_I32, (self.sequences, self.blocks)))


class DraftWork(NamedTuple):
    """Ranks that have drafts of a plan compute their parts of its draft stage.

    Args:
        plan: number of the plan in the engine.
        sequences: B.
        last: width of `last_tokens`; of what is not sent, here and below, 0.
        blocks: width of the block table.
        values: width of `sampling_values`.
        words: width of `sampling_words`.
    """

    plan: int
    sequences: int
    last: int
    blocks: int
    values: int
    words: int

    @classmethod
    def of(cls, plan: int, names: Sequence[str], inputs: Sequence[Tensor]) -> DraftWork:
        """The sizes of the inputs with these names, see `SENT`."""
        widths = {name: x.shape[-1] for name, x in zip(names, inputs, strict=True) if x.ndim == 2}
        return cls(plan, len(inputs[0]), *(widths.get(name, 0) for name in _WIDE))

    def specs_of(self, names: Sequence[str]) -> tuple[Spec, ...]:
        """Of the inputs with these names."""
        widths = {name: (width,) for name, width in zip(_WIDE, self[2:], strict=True)}
        return tuple((SENT[name][0], (self.sequences, *widths.get(name, ()))) for name in names)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Of all inputs that may be sent."""
        return self.specs_of([*SENT])


class TakeWork(NamedTuple):
    """What ranks have found of a draft stage goes to rank 0.

    Args:
        num_bytes: that each rank gives, those that have found nothing too.
    """

    num_bytes: int

    @property
    def specs(self) -> tuple[Spec, ...]:
        return ((torch.uint8, (self.num_bytes,)),)


Work = PassWork | CommitWork | DraftWork | TakeWork
# inputs of `DraftWork` that have two dimensions, in the order of its fields
_WIDE = tuple(name for name, (_, dimensions) in SENT.items() if dimensions == 2)
_KINDS = {PassWork: _PASS, CommitWork: _COMMIT, DraftWork: _DRAFT, TakeWork: _TAKE}


def table_of(works: Sequence[Work]) -> Tensor:
    """[n, 10] int64: a row of numbers for each piece of work."""
    rows = []
    for work in works:
        row = [_KINDS[type(work)], *map(int, work)]
        rows.append(row + [0] * (_COLUMNS - len(row)))
    return torch.tensor(rows, dtype=_I64)


def works_of(table: Tensor | None) -> list[Work]:
    """What `table_of` has made a table of.

    Raises:
        FaultError: it is no such table, or of sizes that cannot be.
    """
    if table is None or table.dtype != _I64 or table.ndim != 2 or table.shape[1] != _COLUMNS:
        raise refused("an order without a table of work")
    return [_work_of(row) for row in table.tolist()]


def _work_of(row: Sequence[int]) -> Work:
    kind, *sizes = row
    work: Work
    if kind == _PASS:
        tokens, sequences, words, blocks, rows, is_even_, model, votes, columns = sizes
        work = PassWork(
            tokens, sequences, words, blocks, rows, bool(is_even_), model, votes, columns
        )
        is_wrong = is_even_ not in (0, 1) or words < _ABSENT or words == 0 or model < 0
        # rows of votes of all sequences, and a column of each block; or none
        is_wrong |= (votes, columns) != (0, 0) and (votes < sequences or columns < 1)
        # a chunk of a prompt may want no logits
        least = min(tokens, sequences, blocks, rows + 1)
    elif kind == _COMMIT:
        work = CommitWork(*sizes[:4])
        is_wrong, least = any(sizes[4:]) or work.model < 0, min(work[:-1])
    elif kind == _DRAFT:
        work = DraftWork(*sizes[:6])
        is_wrong, least = any(sizes[6:]) or min(work) < 0, work.sequences
    elif kind == _TAKE:
        work = TakeWork(sizes[0])
        is_wrong, least = any(sizes[1:]), work.num_bytes
    else:
        raise refused(f"work of kind {kind}")
    if is_wrong or least < 1 or max(sizes) > MOST_BYTES or _places(work.specs)[-1] > MOST_BYTES:
        raise refused(f"work of sizes {list(row)}")
    return work


def give(values: Sequence[Tensor | None]) -> None:
    """Send values of rank 0's device to the others, which `take` them: one copy, one message.

    Args:
        values: of any shapes, with the dtypes of a `Spec` each.
    """
    torch.ops.specc.from_first(joined([value for value in values if value is not None]))


def take(specs: Sequence[Spec], device: torch.device) -> list[Tensor | None]:
    """What rank 0 has given, on the device of this rank."""
    size = num_bytes_of(specs)
    return parted(
        torch.ops.specc.from_first(torch.empty(size, dtype=torch.uint8, device=device)), specs
    )


def joined(values: Sequence[Tensor]) -> Tensor:
    """[bytes] uint8: values one after the other, each where Triton has its pointers."""
    gap = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=values[0].device)
    parts = []
    for value in values:
        parts.append(value.contiguous().view(-1).view(torch.uint8))
        if left := -value.nbytes % _ALIGNMENT:
            parts.append(gap[:left])
    return torch.cat(parts)


def num_bytes_of(specs: Sequence[Spec]) -> int:
    """Of values that are `joined`."""
    return _places(specs)[-1]


def parted(found: Tensor, specs: Sequence[Spec]) -> list[Tensor | None]:
    """The values that were `joined`, as views."""
    places = _places(specs)
    values: list[Tensor | None] = []
    for spec, begin in zip(specs, places, strict=False):
        if spec is None:
            values.append(None)
            continue
        dtype, shape = spec
        end = begin + _num_bytes(spec)
        values.append(found[begin:end].view(dtype).view(shape))
    return values


def _places(specs: Sequence[Spec]) -> list[int]:
    """Where each begins, in bytes, and where the last ends."""
    places = [0]
    for spec in specs:
        places.append(places[-1] + -(-_num_bytes(spec) // _ALIGNMENT) * _ALIGNMENT)
    return places


def _num_bytes(spec: Spec) -> int:
    if spec is None:
        return 0
    dtype, shape = spec
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count
