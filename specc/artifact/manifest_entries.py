"""Entries of a manifest: models, plans, limits, memory, files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from specc.artifact.cache_rows import CacheRows
from specc.speculation.plans import SpecPlan

# metadata of a field that files need not have
MAY_BE_ABSENT = "may_be_absent"


@dataclass(frozen=True)
class LayerEntry:
    """One attention layer; its cache is row `index` of slab `slab`.

    Args:
        window: last rows that it attends to; 0 is no limit.
        sink: first rows, besides those of its window.
        value_dim: columns of a value where they are not those of a key, else 0.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    slab: int
    index: int
    # engines that were written before there were sinks do not say
    sink: int = field(default=0, metadata={MAY_BE_ABSENT: True})
    value_dim: int = field(default=0, metadata={MAY_BE_ABSENT: True})


@dataclass(frozen=True)
class SlabEntry:
    """Caches of equal geometry: [num_layers, 2, blocks, block_size, num_kv_heads, head_dim].

    Where values have a width of their own, `value_dim`, a row is a key and then its value:
    [num_layers, 1, blocks, block_size, num_kv_heads, head_dim + value_dim].
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_dim: int = field(default=0, metadata={MAY_BE_ABSENT: True})


def rank_prefix(rank: int | None) -> str:
    """What the name of a file begins with of which each rank has its own; None: there is one."""
    return "" if rank is None else f"rank-{rank}."


@dataclass(frozen=True)
class ModelEntry:
    """The target or a draft: `dir` holds program.json and weights.safetensors.

    Args:
        source: what the user called it: a path, a hub id, or the class of a module.
        location: absolute path of the checkpoint, where `source` is a path; else None.
        unread_tensors: of the checkpoint, which no graph reads.
        nonfinite_weights: weights that are NaN or infinite, which the user has allowed.
        rope_length: length whose rotary frequencies every position has, where the scaling depends
            on length and the engine is for more than it was trained for.
        quantization: how weights of projections are stored, `int8` or `int4-g64`; None in `dtype`.
        checkpoint_scheme: how the checkpoint is quantized, for people; None where it is not.
    """

    name: str
    dir: str
    architecture: str
    model_type: str
    vocab_size: int
    num_parameters: int
    max_position: int
    layers: tuple[LayerEntry, ...]
    slabs: tuple[SlabEntry, ...]
    source: str
    dtype: str
    location: str | None = None
    unread_tensors: tuple[str, ...] = ()
    nonfinite_weights: int = 0
    rope_length: int | None = None
    quantization: str | None = None
    checkpoint_scheme: str | None = None

    @property
    def checkpoint(self) -> str:
        """Where to load the original from, whatever the working directory is."""
        return self.location or self.source

    @property
    def program_file(self) -> str:
        return f"{self.dir}/program.json"

    @property
    def package_file(self) -> str:
        """The compiled program, in engines of a compiled backend."""
        return f"{self.dir}/program.pt2"

    @property
    def onnx_file(self) -> str:
        """The padded program, in engines of a backend that runs padded batches."""
        return f"{self.dir}/model.onnx"

    @property
    def plan_file(self) -> str:
        """The TensorRT engine, which TensorRT calls a plan."""
        return f"{self.dir}/model.plan"

    @property
    def build_file(self) -> str:
        """What the TensorRT builder said of it."""
        return f"{self.dir}/build.json"

    @property
    def weights_file(self) -> str:
        return f"{self.dir}/weights.safetensors"

    @property
    def segments_file(self) -> str:
        """Its segments, see `specc.artifact.segments`, where it is cut into some."""
        return f"{self.dir}/segments.json"

    def segment_package(self, kind: int) -> str:
        """The compiled program of one kind of segment, in engines of a compiled backend."""
        return f"{self.dir}/segment-{kind}.pt2"

    def stage(self, number: int, layers: tuple[int, ...]) -> ModelEntry:
        """The part of a model that one stage of a pipeline runs.

        It has all slabs of the whole model, those of which it has no layer without rows, so that
        steps find them under their names.

        Args:
            number: of the stage.
            layers: numbers of its layers in the model.
        """
        counts = [0] * len(self.slabs)
        own = []
        for place in layers:
            layer = self.layers[place]
            own.append(dataclasses.replace(layer, index=counts[layer.slab]))
            counts[layer.slab] += 1
        slabs = tuple(
            dataclasses.replace(slab, num_layers=count)
            for slab, count in zip(self.slabs, counts, strict=True)
        )
        directory = f"{self.dir}/stage-{number}"
        return dataclasses.replace(self, dir=directory, layers=tuple(own), slabs=slabs)

    def part_of(self, file: str, rank: int | None) -> str:
        """The file of one rank in the place of a file of the model; None is the file itself."""
        if rank is None:
            return file
        directory, _, name = file.rpartition("/")
        return f"{directory}/{rank_prefix(rank)}{name}"

    def rank_file(self, rank: int) -> str:
        """Weights of one rank, where the model is cut."""
        return self.part_of(self.weights_file, rank)

    @property
    def shard_file(self) -> str:
        """How the model is cut, see `specc.sharding.shard_plan.ShardPlan`."""
        return f"{self.dir}/shard.json"

    @property
    def whole_file(self) -> str:
        """The graph before it was cut, for other cuts."""
        return f"{self.dir}/whole.json"


@dataclass(frozen=True)
class SelfDraftEntry:
    """A second program of the target, which a self-draft runs: its weights and caches, by name.

    Args:
        name: of the draft, in plans; `dir` holds program.json.
        layers: that it has, of the target's, ascending.
        is_windowed: its attention sees a part of the rows by itself; else its steps let it.
    """

    name: str
    dir: str
    layers: tuple[int, ...]
    is_windowed: bool

    @property
    def program_file(self) -> str:
        return f"{self.dir}/program.json"

    @property
    def whole_file(self) -> str:
        """The graph before it was cut, where the target is."""
        return f"{self.dir}/whole.json"

    @property
    def package_file(self) -> str:
        """The compiled program, in engines of a compiled backend."""
        return f"{self.dir}/program.pt2"


@dataclass(frozen=True)
class MemoryEntry:
    """Bytes that one model takes at run time."""

    weights: int
    cache: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.logits + self.workspace


@dataclass(frozen=True)
class StageEntry:
    """A part of the target, which the ranks of one stage of a pipeline run.

    Args:
        layers: numbers of its attention layers in the target.
        dtype: of what it gives on, and of the logits of the last one.
        shape: of that, on each rank; None for the number of tokens or rows.
        memory: of each rank.
    """

    layers: tuple[int, ...]
    dtype: str
    shape: tuple[int | None, ...]
    memory: MemoryEntry


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

    tensor_parallel_size: int
    models: tuple[str, ...]
    samples: dict[str, str] = dataclasses.field(default_factory=dict)
    draft_ranks: int = 1
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
class SegmentsEntry:
    """The target as segments, which run one after another; see `specc.artifact.segments`.

    Args:
        num_segments: of them.
        num_kinds: programs that they are made of: equal layers are one.
    """

    num_segments: int
    num_kinds: int


@dataclass(frozen=True)
class DynamicEntry:
    """See `specc.speculation.plans.DynamicTree`."""

    num_nodes: int
    top_k: int
    depth: int


@dataclass(frozen=True)
class PlanEntry:
    """A plan, see `specc.speculation.plans.SpecPlan`, and the file of its step program."""

    name: str
    widths: tuple[int, ...]
    parents: tuple[int, ...]
    dynamic: DynamicEntry | None
    drafts: tuple[str, ...]
    combine: str
    tile: int | None
    file: str

    @classmethod
    def of(cls, plan: SpecPlan, file: str) -> PlanEntry:
        dynamic = DynamicEntry(**dataclasses.asdict(plan.dynamic)) if plan.dynamic else None
        shape = (plan.name, plan.widths, plan.parents, dynamic)
        return cls(*shape, plan.drafts, plan.combine, plan.tile, file)

    @property
    def winners_file(self) -> str:
        """The step program whose acceptance reads tokens: of plans in tiles there is no other."""
        return self.file if self.tile else self.file.removesuffix(".json") + ".winners.json"

    @property
    def plan(self) -> SpecPlan:
        """Raises SpeccError: no such plan can be."""
        return SpecPlan.from_json(dataclasses.asdict(self))


@dataclass(frozen=True)
class LimitsEntry:
    """Sizes that the engine was compiled for; block_size 0 is dense, one block a sequence.

    Plans whose logits would take more than max_logits_mb are in tiles. Caches have kv_cache_tokens
    rows for all sequences together, or, where it is None, those of the longest sequences.
    """

    max_batch_size: int
    max_seq_len: int
    block_size: int
    prefill_chunk: int
    max_nodes: int
    max_logits_mb: int
    kv_cache_tokens: int | None = None

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
    """The tokenizer; file None where the engine takes token ids only."""

    file: str | None
    map_sha256: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool


@dataclass(frozen=True)
class NativeEntry:
    """Compiled code for CPUs: the operators' library, and the instruction sets that it may use."""

    library: str
    isa_flags: tuple[str, ...]


@dataclass(frozen=True)
class CacheRowsEntry:
    """ONNX files of the models: their opset, and the rows of a cache, see `CacheRows`."""

    opset: int
    front: int
    slots: int
    scratch: int

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
    """Content of one file of the engine."""

    sha256: str
    bytes: int
