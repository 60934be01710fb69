"""Paged KV caches: slabs that hold the rows of all layers, and the blocks that sequences own.

Target and drafts share block ids: block 3 of a sequence names block 3 of every slab.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from specc.artifact.cache_rows import CacheRows
from specc.runtime.scheduling.block_pool import BlockPool
from specc.runtime.scheduling.state_slabs import StateSlabs
from specc.system.huge_pages import zeroed_slab

# a cache that grows does so by this many rows: what attends to all of them reads no more in vain
GROWTH = 128
# in the mass of blocks: a sequence that does not vote
NOBODY = -1.0


@dataclass(frozen=True)
class CacheShape:
    """Rows of a cache and how they divide into blocks.

    Args:
        max_seq_len: tokens of a sequence at most.
        max_nodes: nodes of the largest tree; their rows lie after the committed ones.
        block_size: rows of a block; 0 is dense: one block a sequence.
        max_num_seqs: sequences that run together.
        pool_blocks: blocks of the cache; None is enough for the worst case of all sequences, so
            that none ever gives way to another.
    """

    max_seq_len: int
    max_nodes: int
    block_size: int
    max_num_seqs: int
    pool_blocks: int | None = None

    @property
    def rows_per_block(self) -> int:
        return self.block_size or self.max_seq_len + self.max_nodes

    @property
    def blocks_per_sequence(self) -> int:
        """Width of the block table: enough for S_max = max_seq_len + max_nodes rows."""
        return -(-(self.max_seq_len + self.max_nodes) // self.rows_per_block)

    @property
    def num_blocks(self) -> int:
        if self.pool_blocks is not None:
            return self.pool_blocks
        return self.max_num_seqs * self.blocks_per_sequence

    def blocks_for(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Blocks a request can need at worst."""
        num_tokens = min(num_prompt_tokens + max_tokens, self.max_seq_len)
        return -(-(num_tokens + self.max_nodes) // self.rows_per_block)


class SlabShape(NamedTuple):
    """Layers, heads, columns of a row, and parts of a layer: K and V, or rows that hold both.

    The type is that of the model's rows, where it is not said.
    """

    layers: int
    heads: int
    columns: int
    parts: int = 2
    dtype: torch.dtype | None = None


class KVCache:
    """Slabs of all models and the allocator of their common blocks.

    Args:
        shape: rows and blocks.
        slab_specs: model name → shape of each of its slabs; columns are those of a row as it is
            stored, see `specc.artifact.kv_rows`.
        dtype: of the rows; or model name → its rows' own.
        device: that they lie on.
        rows: of a sequence, where heads come before rows: [layers, 2, sequences, HK, L, D];
            such a cache is dense. None is [layers, 2, blocks, block_size, HK, D].
        grows: begin with few of these rows, see `reserve`.
        has_mass: the target says how much attention blocks get.
        states: of a target whose layers keep some; None where none does.
        draft_states: by number, those of drafts whose layers keep some.
    """

    def __init__(
        self,
        shape: CacheShape,
        slab_specs: Mapping[str, Sequence[SlabShape | tuple[int, int, int]]],
        dtype: torch.dtype | Mapping[str, torch.dtype],
        device: torch.device | str = "cpu",
        rows: CacheRows | None = None,
        grows: bool = False,
        has_mass: bool = False,
        states: StateSlabs | None = None,
        draft_states: Mapping[int, StateSlabs] = MappingProxyType({}),
    ) -> None:
        self.shape = shape
        self.states = states
        self.draft_states = draft_states
        self.rows = rows
        # rows of a sequence that there are by now
        self.length = min(rows.total, GROWTH) if rows and grows else rows.total if rows else 0
        self.device = torch.device(device)
        self.allocator = BlockPool(shape.num_blocks)
        self.slabs: dict[str, list[Tensor]] = {
            model: [
                zeroed_slab(
                    (
                        slab.layers,
                        slab.parts,
                        shape.num_blocks,
                        *self._block(slab.heads),
                        slab.columns,
                    ),
                    slab.dtype or (dtype if isinstance(dtype, torch.dtype) else dtype[model]),
                    self.device,
                )
                for slab in (SlabShape(*spec) for spec in specs)
            ]
            for model, specs in slab_specs.items()
        }
        # [blocks, block_size] tokens of the sequences at the places of their rows
        self.history = torch.zeros(
            shape.num_blocks, shape.rows_per_block, dtype=torch.int32, device=self.device
        )

        # [sequences of a step, n] attention that blocks get, where steps ask; below 0: nobody votes
        self.block_mass: Tensor | None = None
        if has_mass:
            sizes = (shape.max_num_seqs, shape.blocks_per_sequence)
            self.block_mass = torch.full(sizes, NOBODY, device=self.device)

    def _block(self, heads: int) -> tuple[int, int]:
        if self.rows is None:
            return self.shape.rows_per_block, heads
        return heads, self.length

    def reserve(self, num_slots: int) -> int:
        """Have rows for this many slots of every sequence, in caches with heads before rows.

        Slabs that are too short are replaced by longer ones with the same content. Not while a
        step is under way, which holds the ones that it began with.

        Returns:
            rows of a sequence.
        """
        assert self.rows is not None, "other caches are as long as they can get"
        needed = self.rows.front + num_slots
        if needed > self.length:
            self.length = min(self.rows.total, -(-needed // GROWTH) * GROWTH)
            for model, slabs in self.slabs.items():
                for i, slab in enumerate(slabs):
                    longer = zeroed_slab(
                        (*slab.shape[:4], self.length, slab.shape[5]), slab.dtype, slab.device
                    )
                    longer[:, :, :, :, : slab.shape[4]] = slab
                    slabs[i] = self.environment[f"{model}_slab_{i}"] = longer
        return self.length

    @functools.cached_property
    def environment(self) -> dict[str, Tensor]:
        """What step programs know by name: `target_slab_0`, `draft_0_slab_0`, …, `history`, and
        where there are some `block_mass` and states.
        """
        slabs = {
            f"{model}_slab_{i}": slab
            for model, slabs in self.slabs.items()
            for i, slab in enumerate(slabs)
        }
        mass = {} if self.block_mass is None else {"block_mass": self.block_mass}
        found = slabs | {"history": self.history} | mass
        for states in self._all_states:
            found |= states.environment
        return found

    @property
    def places(self) -> StateSlabs | None:
        """Hands out places, which are the same in the states of all models; None without states."""
        return next(iter(self._all_states), None)

    @property
    def _all_states(self) -> list[StateSlabs]:
        own = [] if self.states is None else [self.states]
        return [*own, *self.draft_states.values()]

    def history_rows(self, blocks: Sequence[int], start: int, end: int) -> Tensor:
        """Places in the flat history of a sequence's positions start … end - 1.

        Args:
            blocks: of the sequence.
            start: first position.
            end: position after the last one.
        Returns:
            [end - start] int64 on the host.
        """
        size = self.shape.rows_per_block
        first = start // size
        own = torch.tensor(blocks[first : -(-end // size)], dtype=torch.int64)
        positions = torch.arange(start, end)
        return own[positions // size - first] * size + positions % size

    def record(self, rows: Tensor, tokens: Tensor) -> None:
        """Put tokens into the history; nothing waits for the device.

        Args:
            rows: [Nt] int64 on the device, see `history_rows`.
            tokens: [Nt] int64 on the device.
        """
        self.history.view(-1)[rows] = tokens.int()

    def block_table(self, block_lists: Sequence[Sequence[int]]) -> Tensor:
        """[B, n] int32 on the host; entries after a sequence's own blocks are 0 and never used."""
        width = self.shape.blocks_per_sequence
        table = torch.zeros(len(block_lists), width, dtype=torch.int32)
        for row, blocks in zip(table, block_lists, strict=True):
            row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return table
