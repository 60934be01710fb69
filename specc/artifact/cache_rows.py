"""Padded programs: names of their inputs, and where the slots of a sequence lie in a cache.

Programs for ONNX and TensorRT write the tokens of a pass to rows that follow each other, for every
sequence of their batch, and nothing tells them to leave one out. So a sequence's rows have a rim:

    front     before slot 0: a draft's first level feeds tokens that a short sequence lacks
    slots     0 … max_seq_len + max_nodes - 1: committed tokens, then the tree
    scratch   after them: what sequences of a batch write that take no part in a pass
"""

from __future__ import annotations

from dataclasses import dataclass

# rows of a cache are a multiple of this: kernels read keys in such pieces
_MULTIPLE = 16


def mask_input(window: int) -> str:
    """Name of the mask of the layers with a window; 0 is none."""
    return f"mask_window_{window}" if window else "mask"


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
