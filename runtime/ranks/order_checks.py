"""Orders as what they have to be: tensors of the dtypes and shapes that go together.

Numbers in them (blocks, slots, rows) are compared with the caches by the operators that use them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from specc.runtime.execution.draws import Draws
from specc.runtime.ranks.orders import Commit, Message, Spec, refused, specs_of
from specc.runtime.ranks.rank_group import own_votes
from specc.runtime.scheduling.state_slabs import StateCopy, StateMove

# name, dtype and shape of a tensor, where letters are sizes; None is any shape
_Wanted = tuple[str, torch.dtype, str | None]

# the inputs of a pass, see `ModelProgram.forward`
_PASS = (
    ("tokens", torch.int64, "T"),
    ("positions", torch.int64, "T"),
    ("q_start", torch.int32, "S"),
    ("slot", torch.int32, "T"),
    ("cache_len", torch.int32, "B"),
    ("ancestors", torch.int64, "TW"),
    ("block_table", torch.int32, "Bn"),
    ("logit_rows", torch.int64, "R"),
)
# one more where layers keep states, and one more where blocks are voted on
_STATES = ("states", torch.int32, "B2")
_MASS = ("mass", torch.float32, "MC")
_DRAW = (
    *_PASS,
    ("temperature", torch.float32, "R"),
    ("seeds", torch.int64, "R"),
    ("draw_positions", torch.int64, "R"),
)
_COMMIT = (
    ("path", torch.int32, "BP"),
    ("num_accepted", torch.int32, "B"),
    ("cache_len", torch.int32, "B"),
    ("block_table", torch.int32, "Bn"),
    ("slots", torch.int32, None),
)
_COPY = (("copy", torch.int32, "H"), ("source", torch.int32, "P"))


def pass_inputs(message: Message) -> tuple[Tensor | None, ...]:
    """The inputs of a model that a PASS holds: eight, states where it keeps some, and votes.

    Raises:
        FaultError: they are others.
    """
    _check_sizes(_check(message.kind.name, specs_of(message), _all(message, _PASS), "ancestors"))
    return (*message.tensors[: len(_PASS)], *_more(message, _PASS))


def drawn_inputs(message: Message) -> tuple[Draws, tuple[Tensor | None, ...]]:
    """What a DRAW holds: how rows are drawn, and the inputs of a model, as of `pass_inputs`.

    Raises:
        FaultError: it holds something else.
    """
    _check_sizes(_check(message.kind.name, specs_of(message), _all(message, _DRAW), "ancestors"))
    draws = Draws(*message.tensors[len(_PASS) : len(_DRAW)])  # type: ignore[arg-type]
    return draws, (*message.tensors[: len(_PASS)], *_more(message, _DRAW))


def commit_of(message: Message) -> Commit:
    """What a COMMIT holds.

    Raises:
        FaultError: it is no commit, or its paths are not as long as it says.
    """
    has_states = len(message.tensors) > len(_COMMIT)
    wanted = (*_COMMIT, _STATES) if has_states else _COMMIT
    sizes = _check(message.kind.name, specs_of(message), wanted)
    _check_places(sizes)
    commit = Commit(*message.tensors)  # type: ignore[arg-type]
    slots = tuple(commit.slots.shape)
    if len(slots) not in (1, 2) or slots[:-1] not in ((), (sizes["B"],)):
        raise refused(f"a commit of {sizes['B']} sequences with slots of shape {slots}")
    # a path is the root, what was accepted after it, and then nothing
    if not torch.equal((commit.path >= 0).sum(dim=1).int(), commit.num_accepted + 1):
        raise refused("a commit whose paths are not as long as it says")
    return commit


def copy_of(message: Message) -> StateCopy:
    """What a STATES holds; its numbers are compared with the states by what does it.

    Raises:
        FaultError: it holds something else.
    """
    sizes = _check(message.kind.name, specs_of(message), _COPY)
    head, source = message.tensors
    assert head is not None
    assert source is not None
    if sizes["H"] != len(StateCopy._fields) - 1 or int(head[0]) not in set(StateMove):
        raise refused(f"STATES with {head.tolist()[:8]}")
    what, place, checkpoint, length = head.tolist()
    return StateCopy(StateMove(what), place, checkpoint, length, tuple(source.tolist()))


def copy_tensors(copy: StateCopy) -> tuple[Tensor, Tensor]:
    """What `copy_of` reads."""
    *head, source = copy
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (head, source))  # type: ignore[return-value]


def _all(message: Message, wanted: tuple[_Wanted, ...]) -> tuple[_Wanted, ...]:
    """What a pass has to hold: states are integers, and votes are not."""
    more = message.tensors[len(wanted) :]
    has_states = bool(more) and more[0] is not None and not more[0].is_floating_point()
    has_mass = len(more) > has_states
    return (*wanted, *[_STATES] * has_states, *[_MASS] * has_mass)


def _more(message: Message, wanted: Sequence[_Wanted]) -> tuple[Tensor, ...]:
    """Places of states, and what this rank adds its votes to, where there are such tensors."""
    more = (tensor for tensor in message.tensors[len(wanted) :] if tensor is not None)
    return tuple(own_votes(x) if x.is_floating_point() else x for x in more)


def _check_places(sizes: dict[str, int]) -> None:
    if (columns := sizes.get("2", 2)) != 2:
        raise refused(f"{columns} columns of places of states, not 2")


def _check_sizes(sizes: dict[str, int]) -> None:
    _check_places(sizes)
    if sizes["S"] != sizes["B"] + 1:
        raise refused(f"a pass of {sizes['B']} sequences with {sizes['S']} starts")
    if sizes.get("M", sizes["B"]) < sizes["B"]:
        raise refused(f"a pass of {sizes['B']} sequences with {sizes['M']} rows of votes")


@functools.lru_cache(256)
def _check(
    name: str, specs: tuple[Spec, ...], wanted: tuple[_Wanted, ...], optional: str = ""
) -> dict[str, int]:
    """Sizes by letter; steps of one plan have the same tensors again and again.

    Args:
        name: of the kind of order.
        specs: of its tensors.
        wanted: what they have to be.
        optional: that may be left out.
    Raises:
        FaultError: they are others.
    """
    if len(specs) != len(wanted):
        raise refused(f"{name} with {len(specs)} tensors, not {len(wanted)}")
    sizes: dict[str, int] = {}
    for spec, (key, dtype, letters) in zip(specs, wanted, strict=True):
        if spec is None:
            if key != optional:
                raise refused(f"{name} without {key}")
            continue
        of_tensor, shape = spec
        found = dict(zip(letters or "", shape, strict=False))
        is_odd = letters is not None and len(shape) != len(letters)
        clash = any(sizes.get(letter, size) != size for letter, size in found.items())
        if of_tensor != dtype or is_odd or clash:
            raise refused(f"{name} with {key} of {of_tensor} and shape {tuple(shape)}")
        sizes |= found
    return sizes
