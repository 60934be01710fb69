"""Entries of a manifest besides its models: plans, limits, memory, ranks, files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from specc.artifact.cache_rows import CacheRows
from specc.bounds import (
    MAY_BE_ABSENT,
    MOST_BYTES,
    MOST_COLUMNS,
    MOST_IDS,
    MOST_LAYERS,
    MOST_POSITIONS,
    number,
    within,
)
from specc.drafters.one_pass import OnePassEntry
from specc.speculation.plan_json import blocks_of, heads_of, kinds_of, plan_from_json
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import MAX_NODES

# of sequences, ranks and rows of a pass: as `CompileConfig` and traced dimensions have them
_MOST_SEQUENCES, _MOST_RANKS, _MOST_TOKENS = 4096, 256, 1 << 20


@dataclass(frozen=True)
class MemoryEntry:
    """Bytes that one model takes at run time.

    Args:
        states: of layers that keep some: those of all sequences, and their replay rows.
        checkpoints: states of prefixes that are kept for later requests.
    """

    weights: int = field(metadata=within(0, MOST_BYTES))
    cache: int = field(metadata=within(0, MOST_BYTES))
    logits: int = field(metadata=within(0, MOST_BYTES))
    workspace: int = field(metadata=within(0, MOST_BYTES))
    states: int = number(0, MOST_BYTES, default=0, metadata={MAY_BE_ABSENT: True})
    checkpoints: int = number(0, MOST_BYTES, default=0, metadata={MAY_BE_ABSENT: True})

    @property
    def total(self) -> int:
        beside = self.states + self.checkpoints
        return self.weights + self.cache + self.logits + self.workspace + beside


@dataclass(frozen=True)
class StageEntry:
    """A part of the target, which the ranks of one stage of a pipeline run.

    Args:
        layers: numbers of its attention layers in the target.
        state_layers: numbers of its layers that keep states, among these of the target.
        dtype: of what it gives on, and of the logits of the last one.
        shape: of that, on each rank; None for the number of tokens or rows.
        memory: of each rank.
    """

    layers: tuple[int, ...] = field(metadata=within(0, MOST_LAYERS))
    dtype: str
    shape: tuple[int | None, ...] = field(metadata=within(0, MOST_POSITIONS))
    memory: MemoryEntry
    # engines whose layers keep none do not say so
    state_layers: tuple[int, ...] = number(
        0, MOST_LAYERS, default=(), metadata={MAY_BE_ABSENT: True}
    )


@dataclass(frozen=True)
class ParallelEntry:
    """Ranks that run an engine together, and the models that are cut for them.

    Ranks of a stage are neighbours: rank r is number r % tensor_parallel_size of stage
    r // tensor_parallel_size. `stages`: parts of the target, one after the other; none where every
    rank runs all layers.

    `samples`: file of a rank's weights → `sample_file` of it. Weights are too large to be hashed
    whenever an engine is loaded; so files that change places, or come from another engine, are
    found all the same.

    `draft_ranks`: ranks that draft models which are not cut are spread over, in turn.
    """

    tensor_parallel_size: int = field(metadata=within(1, _MOST_RANKS))
    models: tuple[str, ...]
    samples: dict[str, str] = dataclasses.field(default_factory=dict)
    draft_ranks: int = number(1, _MOST_RANKS, default=1)
    stages: tuple[StageEntry, ...] = ()

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stages))

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.num_stages

    def stage_of(self, rank: int) -> int:
        """The stage that a rank runs a part of."""
        return rank // self.tensor_parallel_size if self.stages else 0


@dataclass(frozen=True)
class AdapterEntry:
    """A low-rank adapter of the target; its number is its place among them.

    Args:
        name: as requests call it.
        rank: the largest of its terms.
        num_modules: products of the target that it has terms beside.
    """

    name: str
    rank: int = field(metadata=within(1, MOST_COLUMNS))
    num_modules: int = field(metadata=within(1, MOST_IDS))


@dataclass(frozen=True)
class SegmentsEntry:
    """The target as segments, which run one after another; see `specc.artifact.segments`.

    Args:
        num_segments: of them.
        num_kinds: programs that they are made of: equal layers are one.
    """

    num_segments: int = field(metadata=within(1, MOST_LAYERS))
    num_kinds: int = field(metadata=within(1, MOST_LAYERS))


@dataclass(frozen=True)
class DynamicEntry:
    """See `specc.speculation.dynamic_tree`: of a `BudgetTree` there are levels."""

    num_nodes: int = field(metadata=within(1, MAX_NODES))
    top_k: int = field(metadata=within(1, MAX_NODES))
    depth: int = field(metadata=within(1, MAX_NODES))
    levels: tuple[int, ...] = number(1, MAX_NODES, default=(), metadata={MAY_BE_ABSENT: True})


@dataclass(frozen=True)
class PlanEntry:
    """A plan, see `specc.speculation.plans.SpecPlan`, and the file of its step program."""

    name: str
    widths: tuple[int, ...] = field(metadata=within(0, MAX_NODES))
    parents: tuple[int, ...] = field(metadata=within(-1, MAX_NODES))
    dynamic: DynamicEntry | None
    drafts: tuple[str, ...]
    combine: str
    tile: int | None = field(metadata=within(1, MAX_NODES))
    file: str
    # engines that were written before there were heads do not say
    heads: tuple[str, ...] = field(default=(), metadata={MAY_BE_ABSENT: True})
    sharpness: tuple[tuple[float, ...], ...] = number(
        0.0, 1e6, default=(), metadata={MAY_BE_ABSENT: True}
    )
    blocks: tuple[OnePassEntry, ...] = field(default=(), metadata={MAY_BE_ABSENT: True})
    kinds: dict[str, str] = field(default_factory=dict, metadata={MAY_BE_ABSENT: True})

    @classmethod
    def of(cls, plan: SpecPlan, file: str) -> PlanEntry:
        dynamic = DynamicEntry(**dataclasses.asdict(plan.dynamic)) if plan.dynamic else None
        shape = (plan.name, plan.widths, plan.parents, dynamic)
        drafts = plan.drafts, plan.combine, plan.tile
        blocks = tuple(OnePassEntry(**data) for data in blocks_of(plan))
        return cls(*shape, *drafts, file, heads_of(plan), plan.sharpness, blocks, kinds_of(plan))

    @property
    def winners_file(self) -> str:
        """The step program whose acceptance reads tokens: of plans in tiles there is no other."""
        return self.file if self.tile else self.file.removesuffix(".json") + ".winners.json"

    @property
    def plan(self) -> SpecPlan:
        """Raises SpeccError: no such plan can be."""
        return plan_from_json(dataclasses.asdict(self))


@dataclass(frozen=True)
class LimitsEntry:
    """Sizes that the engine was compiled for; block_size 0 is dense, one block a sequence.

    Plans whose logits would take more than max_logits_mb are in tiles. Caches have kv_cache_tokens
    rows for all sequences together, or, where it is None, those of the longest sequences. Where
    layers keep states, those of state_checkpoints prefixes are kept, which are multiples of
    state_grid tokens; 0 and 0 where none are.
    """

    max_batch_size: int = field(metadata=within(1, _MOST_SEQUENCES))
    max_seq_len: int = field(metadata=within(1, MOST_POSITIONS))
    block_size: int = field(metadata=within(0, 1 << 16))
    prefill_chunk: int = field(metadata=within(1, _MOST_TOKENS))
    max_nodes: int = field(metadata=within(1, 4 * MAX_NODES))
    max_logits_mb: int = field(metadata=within(1, 1 << 20))
    kv_cache_tokens: int | None = number(1, 1 << 40, default=None)
    state_checkpoints: int = number(0, 1 << 20, default=0, metadata={MAY_BE_ABSENT: True})
    state_grid: int = number(0, MOST_POSITIONS, default=0, metadata={MAY_BE_ABSENT: True})

    @property
    def context(self) -> int:
        """Cache rows that one sequence may have, in whole blocks."""
        rows = self.max_seq_len + self.max_nodes
        return rows if not self.block_size else -(-rows // self.block_size) * self.block_size

    def cache_rows(
        self, max_num_seqs: int | None = None, kv_cache_tokens: int | None = None
    ) -> int:
        """Cache rows of all sequences together, in whole blocks.

        Args:
            max_num_seqs: sequences that caches are made for; None is what the engine allows.
            kv_cache_tokens: asked for where the engine is loaded; None is what it was compiled for.
        """
        most = min(max_num_seqs or self.max_batch_size, self.max_batch_size) * self.context
        wanted = kv_cache_tokens or self.kv_cache_tokens
        if wanted is None or not self.block_size:
            return most
        return min(wanted // self.block_size * self.block_size, most)


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer; file None where the engine takes token ids only.

    Args:
        eos_token_ids: end an output.
        tokenizer_eos: those of them that the tokenizer alone names, and no configuration.
    """

    file: str | None
    map_sha256: str
    eos_token_ids: tuple[int, ...] = field(metadata=within(0, MOST_IDS))
    bos_token_id: int | None = field(metadata=within(0, MOST_IDS))
    add_bos: bool
    tokenizer_eos: tuple[int, ...] = number(0, MOST_IDS, default=(), metadata={MAY_BE_ABSENT: True})


@dataclass(frozen=True)
class CacheRowsEntry:
    """ONNX files of the models: their opset, and the rows of a cache, see `CacheRows`."""

    opset: int = field(metadata=within(1, 1 << 10))
    front: int = field(metadata=within(0, _MOST_TOKENS))
    slots: int = field(metadata=within(1, MOST_POSITIONS))
    scratch: int = field(metadata=within(0, _MOST_TOKENS))

    @property
    def rows(self) -> CacheRows:
        return CacheRows(self.front, self.slots, self.scratch)


@dataclass(frozen=True)
class TensorRTEntry:
    """What built the TensorRT engines, and for which GPU; None is every GPU that it supports."""

    name: str
    version: str
    compute_capability: str | None


@dataclass(frozen=True)
class FileEntry:
    """Content of one file of the engine; of weights also `BlockSums.hex`, else empty."""

    sha256: str
    bytes: int = field(metadata=within(0, MOST_BYTES))
    # engines that were written before there were sums do not say
    crc32: str = field(default="", metadata={MAY_BE_ABSENT: True})
