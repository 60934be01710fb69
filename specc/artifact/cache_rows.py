"""Padded programs: names of their inputs, and where the slots of a sequence lie in a cache.

Programs for ONNX and TensorRT write the tokens of a pass to rows that follow each other, for every
sequence of their batch, and nothing tells them to leave one out. So a sequence's rows have a rim:

    front     before slot 0: a draft's first level feeds tokens that a short sequence lacks
    slots     0 … max_seq_len + max_nodes - 1: committed tokens, then the tree
    scratch   after them: what sequences of a batch write that take no part in a pass
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# rows of a cache are a multiple of this: kernels read keys in such pieces
_MULTIPLE = 16


class Reach(NamedTuple):
    """How far before itself a token sees keys; layers of one reach share a mask.

    Args:
        window: keys at positions ≤ position - window are not seen; 0 is no limit.
        chunk: none before position - position % chunk is seen; 0 is no limit.
    """

    window: int = 0
    chunk: int = 0

    @property
    def mask_input(self) -> str:
        """Name of the mask among the inputs of a program."""
        limits = [f"{name}_{size}" for name, size in self._asdict().items() if size]
        return "_".join(("mask", *limits))

    @property
    def description(self) -> str:
        """Of which layers the mask is, for readers of a file; empty where nothing is cut."""
        found = [f"a sliding window of {self.window}"] if self.window else []
        if self.chunk:
            found.append(f"chunks of {self.chunk} positions")
        return f"For layers with {' and '.join(found)}." if found else ""


class _Layer(Protocol):
    @property
    def window(self) -> int: ...
    @property
    def chunk(self) -> int: ...


def reach_of(layer: _Layer) -> Reach:
    return Reach(layer.window, layer.chunk)


def reaches_of(layers: Iterable[_Layer]) -> list[Reach]:
    """Those of the layers of a model, each once, in the order of the program's inputs."""
    return sorted({reach_of(layer) for layer in layers})


def cache_output(name: str) -> str:
    """Output that a cache input is bound to, too."""
    return f"{name}_out"


@dataclass(frozen=True)
class CacheRows:
    """Rows of one sequence.

    Args:
        front: rows before slot 0.
        slots: rows of slots.
        scratch: rows after them that no sequence attends to.
    """

    front: int
    slots: int
    scratch: int

    @classmethod
    def of(cls, max_seq_len: int, max_nodes: int, catch_up: int) -> CacheRows:
        """Rows for sequences and plans of these limits.

        Args:
            max_seq_len: tokens of a sequence at most.
            max_nodes: rows of the largest pass of a step.
            catch_up: tokens of a draft's first level, at most over all plans.
        """
        front, slots = max(catch_up - 1, 0), max_seq_len + max_nodes
        scratch = max(max_nodes, catch_up)
        return cls(front, slots, scratch + -(front + slots + scratch) % _MULTIPLE)

    @property
    def total(self) -> int:
        """L of the program's caches."""
        return self.front + self.slots + self.scratch
