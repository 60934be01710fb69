"""States of layers that keep one for each sequence, however long it is (docs/design/states.md).

A request has one place in all slabs from its admission to its end. Its states are those of exactly
its committed rows, and of a draft those of the rows that it has read: a pass folds what is certain,
the end of a step folds the accepted path.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specc.artifact.state_entry import kept_states
from specc.errors import FaultError
from specc.runtime.scheduling.state_checkpoints import StateCheckpoints
from specc.system.huge_pages import zeroed_slab

# of a request without a place
NOWHERE = -1


class StateMove(enum.IntEnum):
    """What may happen to states between passes, see `StateSlabs`."""

    KEEP = 0
    RESTORE = 1
    FOLD = 2
    SAVE = 3
    UNDO = 4


class StateCopy(NamedTuple):
    """One of these, as others that have a part of the states have to repeat it.

    Args:
        what: happens.
        place: of a request; of SAVE, how many of the first ones.
        checkpoint: of a prefix.
        length: of FOLD, committed rows of the request before the step.
        source: of FOLD, slots of accepted nodes.
    """

    what: StateMove
    place: int = 0
    checkpoint: int = 0
    length: int = 0
    source: tuple[int, ...] = ()


class FoldOptions(NamedTuple):
    """How replay rows of a recurrence are read."""

    key_heads: int
    has_beta: bool


class StateShape(NamedTuple):
    """Layers of equal geometry, whose states are one slab, and their replay rows another.

    Args:
        layers: of them.
        shape: of a sequence's state, see `specc.passes.program.StateLayer`.
        columns: of a replay row.
        dtype: of both.
        fold: of recurrences, see `fold_recurrence_reference`; None of convolutions.
    """

    layers: int
    shape: tuple[int, ...]
    columns: int
    dtype: torch.dtype
    fold: FoldOptions | None = None


@dataclass(frozen=True)
class StateSizes:
    """How many states there are.

    Args:
        num_places: requests that have some.
        num_rows: replay rows of each, one for each node of the largest tree.
        num_checkpoints: states of prefixes that are kept for later requests.
        grid: tokens between places of a prefix where they are kept, a multiple of a block; 0 where
            none are.
    """

    num_places: int
    num_rows: int
    num_checkpoints: int = 0
    grid: int = 0

    @property
    def num_kept(self) -> int:
        """States of prefixes that there is room for."""
        return kept_states(self.num_checkpoints)


class StateSlabs:
    """States and replay rows of all requests, and states that are kept for later ones.

    Args:
        shapes: of each slab pair of the model.
        sizes: of all of them.
        device: that they lie on.
        model: whose layers keep them.
    """

    def __init__(
        self,
        shapes: Sequence[StateShape],
        sizes: StateSizes,
        device: torch.device | str = "cpu",
        model: str = "target",
    ) -> None:
        self.sizes, self._model = sizes, model
        self._shapes, self._device = list(shapes), device
        # [L, places, …] states, [L, places, R, W] replay rows, [L, kept, …] states of prefixes
        self.states = [_zeros(s, (sizes.num_places, *s.shape), device) for s in shapes]
        rows = sizes.num_places, sizes.num_rows
        self.replay = [_zeros(s, (*rows, s.columns), device) for s in shapes]
        self._kept = [_zeros(s, (sizes.num_kept, *s.shape), device) for s in shapes]
        self.checkpoints = StateCheckpoints(sizes.num_checkpoints)
        # checkpoints that hold states; of a target, all that are found do
        self.filled: set[int] = set()
        self._free = list(range(sizes.num_places))
        self._saved: list[Tensor] = []
        # tells ranks that have the other parts of what is copied
        self.tell: Callable[[StateCopy], None] | None = None

    @property
    def environment(self) -> dict[str, Tensor]:
        """What step programs know by name: `target_states_0`, `target_replay_0`, …"""
        model = self._model
        states = {f"{model}_states_{i}": slab for i, slab in enumerate(self.states)}
        return states | {f"{model}_replay_{i}": slab for i, slab in enumerate(self.replay)}

    @property
    def slabs(self) -> list[Tensor]:
        """States of requests, and those of prefixes."""
        return [*self.states, *self._kept]

    @property
    def has_room(self) -> bool:
        """Whether a place is free."""
        return bool(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A place for a request; what it holds is that of an earlier one.

        A pass from a sequence's first token on begins with zeros, whatever is there.
        """
        return heapq.heappop(self._free)

    def give_back(self, place: int) -> None:
        """A place that no pass in flight uses; one that is free already is specc's own bug."""
        if not 0 <= place < self.sizes.num_places or place in self._free:
            raise RuntimeError(f"place {place} of states freed but not in use")
        heapq.heappush(self._free, place)

    def keep(self, place: int, checkpoint: int) -> None:
        """Copy the states of a request to a reserved checkpoint; queued after its last pass."""
        self._tell(StateMove.KEEP, place, checkpoint)
        self.filled.add(checkpoint)
        for states, kept in zip(self.states, self._kept, strict=True):
            kept[:, checkpoint] = states[:, place]

    def fold(
        self, checkpoint: int, place: int, source: Sequence[int], length: int, operators: Any
    ) -> None:
        """Let a checkpoint see nodes of a step, whose replay rows are still there.

        Args:
            checkpoint: holds the states before the step.
            place: of the request.
            source: slots of accepted nodes, root included, which were not certain.
            length: committed rows of the request before the step.
            operators: namespace of the `specc::` operators that run here.
        """
        self._tell(StateMove.FOLD, place, checkpoint, length, tuple(source))
        given = (
            torch.tensor([list(source)], dtype=torch.int32, device=self._device),
            torch.tensor([length], dtype=torch.int32, device=self._device),
            torch.zeros(1, 2, dtype=torch.int32, device=self._device),
        )
        for shape, kept, replay in zip(self._shapes, self._kept, self.replay, strict=True):
            for layer in range(shape.layers):
                state = kept[layer, checkpoint][None, None]
                rows = replay[layer, place][None, None]
                _fold(shape, state, rows, given, operators)

    def fold_all(self, source: Tensor, cache_len: Tensor, states: Tensor, operators: Any) -> None:
        """Let the states see what a step has accepted, as its last stage does.

        Args:
            source: [B, P] int32, this and the rest as of `fold_conv_reference`.
            cache_len: [B] int32.
            states: [B, 2] int32.
            operators: namespace of the `specc::` operators that run here.
        """
        for shape, slab, replay in zip(self._shapes, self.states, self.replay, strict=True):
            _fold(shape, slab, replay, (source, cache_len, states), operators)

    @contextlib.contextmanager
    def unchanged(self, count: int) -> Iterator[None]:
        """What passes do meanwhile to the states of the first places is undone."""
        self._save(count)
        try:
            yield
        finally:
            self._undo()

    def repeat(self, copy: StateCopy, operators: Any) -> None:
        """Do what another rank has done with its part.

        Args:
            copy: what that was.
            operators: namespace of the `specc::` operators that run here.
        Raises:
            FaultError: a place or checkpoint that is not there.
        """
        what, place, checkpoint, length, source = copy
        sizes = self.sizes
        num_places = sizes.num_places + (what is StateMove.SAVE)
        is_kept = what in (StateMove.KEEP, StateMove.RESTORE, StateMove.FOLD)
        num_kept = sizes.num_kept if is_kept else 1
        if not (0 <= place < num_places and 0 <= checkpoint < num_kept):
            raise FaultError(
                f"{what.name} of states, place {place} and checkpoint {checkpoint}",
                f"one of {sizes.num_places} places and {sizes.num_kept} checkpoints",
                "load the same engine on all ranks",
            )
        match what:
            case StateMove.KEEP:
                self.keep(place, checkpoint)
            case StateMove.RESTORE:
                self.restore(checkpoint, place)
            case StateMove.FOLD:
                self.fold(checkpoint, place, source, length, operators)
            case StateMove.SAVE:
                self._save(place)
            case StateMove.UNDO:
                self._undo()

    def _save(self, count: int) -> None:
        self._tell(StateMove.SAVE, count)
        self._saved = [slab[:, :count].clone() for slab in self.states]

    def _undo(self) -> None:
        self._tell(StateMove.UNDO)
        for slab, states in zip(self.states, self._saved, strict=True):
            slab[:, : states.shape[1]] = states
        self._saved = []

    def _tell(self, *copy: Any) -> None:
        if self.tell is not None:
            self.tell(StateCopy(*copy))

    def restore(self, checkpoint: int, place: int) -> None:
        """Give a request the states of a prefix, before its first pass."""
        self._tell(StateMove.RESTORE, place, checkpoint)
        for states, kept in zip(self.states, self._kept, strict=True):
            states[:, place] = kept[:, checkpoint]


def _fold(
    shape: StateShape, state: Tensor, rows: Tensor, given: Sequence[Tensor], operators: Any
) -> None:
    if shape.fold is None:
        operators.fold_conv(state, rows, *given)
    else:
        operators.fold_recurrence(state, rows, *given, **shape.fold._asdict())


def num_bytes(shapes: Sequence[StateShape], sizes: StateSizes) -> int:
    """Bytes of all slabs."""
    states, rows = sizes.num_places + sizes.num_kept, sizes.num_places * sizes.num_rows
    return sum(
        s.layers * s.dtype.itemsize * (states * math.prod(s.shape) + rows * s.columns)
        for s in shapes
    )


def _zeros(shape: StateShape, sizes: Sequence[int], device: torch.device | str) -> Tensor:
    """[layers, *sizes]."""
    return zeroed_slab((shape.layers, *sizes), shape.dtype, device)
