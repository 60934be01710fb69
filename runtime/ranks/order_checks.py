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
# one more where blocks are voted on
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


def pass_inputs(message: Message) -> tuple[Tensor | None, ...]:
    """The inputs of a model that a PASS holds: eight, and one more where there are votes.

    Raises:
        FaultError: they are others.
    """
    wanted = _with_mass(message, _PASS)
    _check_starts(_check(message.kind.name, specs_of(message), wanted, "ancestors"))
    return (*message.tensors[: len(_PASS)], *_own_mass(message, _PASS))


def drawn_inputs(message: Message) -> tuple[Draws, tuple[Tensor | None, ...]]:
    """What a DRAW holds: how rows are drawn, and the inputs of a model, as of `pass_inputs`.

    Raises:
        FaultError: it holds something else.
    """
    wanted = _with_mass(message, _DRAW)
    _check_starts(_check(message.kind.name, specs_of(message), wanted, "ancestors"))
    draws = Draws(*message.tensors[len(_PASS) : len(_DRAW)])  # type: ignore[arg-type]
    return draws, (*message.tensors[: len(_PASS)], *_own_mass(message, _DRAW))


def commit_of(message: Message) -> Commit:
    """What a COMMIT holds.

    Raises:
        FaultError: it is no commit, or its paths are not as long as it says.
    """
    sizes = _check(message.kind.name, specs_of(message), _COMMIT)
    commit = Commit(*message.tensors)  # type: ignore[arg-type]
    slots = tuple(commit.slots.shape)
    if len(slots) not in (1, 2) or slots[:-1] not in ((), (sizes["B"],)):
        raise refused(f"a commit of {sizes['B']} sequences with slots of shape {slots}")
    # a path is the root, what was accepted after it, and then nothing
    if not torch.equal((commit.path >= 0).sum(dim=1).int(), commit.num_accepted + 1):
        raise refused("a commit whose paths are not as long as it says")
    return commit


def _with_mass(message: Message, wanted: tuple[_Wanted, ...]) -> tuple[_Wanted, ...]:
    return (*wanted, _MASS) if len(message.tensors) == len(wanted) + 1 else wanted


def _own_mass(message: Message, wanted: Sequence[_Wanted]) -> tuple[Tensor, ...]:
    """What this rank adds its votes to, where there is such a tensor."""
    return tuple(own_votes(mass) for mass in message.tensors[len(wanted) :] if mass is not None)


def _check_starts(sizes: dict[str, int]) -> None:
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
