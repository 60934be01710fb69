"""Models of a manifest: their layers, their caches, the names of their files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from specc.artifact.state_entry import StateLayerEntry, StateSlabEntry
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
from specc.drafters.facts import DrafterFacts
from specc.drafters.registry import facts_of
from specc.speculation.taps import Taps


def cached_columns(head_dim: int, value_dim: int, values_in_keys: bool) -> tuple[int, ...]:
    """Widths of the rows that a cache has for a token and a KV head; see `LayerEntry`."""
    return (head_dim,) if values_in_keys else (head_dim, value_dim or head_dim)


@dataclass(frozen=True)
class LayerEntry:
    """One attention layer; its cache is row `index` of slab `slab`.

    Args:
        window: last rows that it attends to; 0 is no limit.
        sink: first rows, besides those of its window.
        chunk: positions of a chunk, whose tokens attend to each other alone; 0 is no chunks.
        value_dim: columns of a value where they are not those of a key, else 0.
        values_in_keys: a value is the first `value_dim` columns of its key, so that the cache holds
            keys alone.
    """

    name: str
    num_heads: int = field(metadata=within(1, MOST_COLUMNS))
    num_kv_heads: int = field(metadata=within(1, MOST_COLUMNS))
    head_dim: int = field(metadata=within(1, MOST_COLUMNS))
    window: int = field(metadata=within(0, MOST_POSITIONS))
    slab: int = field(metadata=within(0, MOST_LAYERS))
    index: int = field(metadata=within(0, MOST_LAYERS))
    # engines that were written before there were sinks do not say
    sink: int = number(0, MOST_POSITIONS, default=0, metadata={MAY_BE_ABSENT: True})
    value_dim: int = number(0, MOST_COLUMNS, default=0, metadata={MAY_BE_ABSENT: True})
    values_in_keys: bool = field(default=False, metadata={MAY_BE_ABSENT: True})
    chunk: int = number(0, MOST_POSITIONS, default=0, metadata={MAY_BE_ABSENT: True})

    @property
    def cached_columns(self) -> tuple[int, ...]:
        """Widths of the rows that the cache has for a token and a KV head."""
        return cached_columns(self.head_dim, self.value_dim, self.values_in_keys)


@dataclass(frozen=True)
class SlabEntry:
    """Caches of equal geometry: [num_layers, 2, blocks, block_size, num_kv_heads, head_dim].

    Where values have a width of their own, `value_dim`, a row is a key and then its value:
    [num_layers, 1, blocks, block_size, num_kv_heads, head_dim + value_dim]; where a value is the
    first columns of its key, the key alone: [num_layers, 1, blocks, …, head_dim].
    """

    num_layers: int = field(metadata=within(0, MOST_LAYERS))
    num_kv_heads: int = field(metadata=within(1, MOST_COLUMNS))
    head_dim: int = field(metadata=within(1, MOST_COLUMNS))
    value_dim: int = number(0, MOST_COLUMNS, default=0, metadata={MAY_BE_ABSENT: True})
    values_in_keys: bool = field(default=False, metadata={MAY_BE_ABSENT: True})

    @property
    def cached_columns(self) -> tuple[int, ...]:
        """Widths of the rows that a token and a KV head have."""
        return cached_columns(self.head_dim, self.value_dim, self.values_in_keys)


# layers of one kind, and their slabs
L = TypeVar("L", LayerEntry, StateLayerEntry)
S = TypeVar("S", SlabEntry, StateSlabEntry)


@dataclass(frozen=True)
class TapsEntry:
    """Rows that the target keeps of its tokens for drafts, in a slab after those of its layers.

    Args:
        boundaries: where they are taken, see `specc.speculation.taps`.
        is_last_normed: the last boundary is taken after the final norm.
        width: columns of a row, of all boundaries together.
    """

    boundaries: tuple[int, ...] = field(metadata=within(0, MOST_LAYERS))
    is_last_normed: bool
    width: int = field(metadata=within(1, MOST_IDS))


@dataclass(frozen=True)
class HeadEntry:
    """Of a draft that reads the target's hidden states, see `docs/guide/heads.md`.

    Args:
        kind: see `specc.drafters.facts`.
        layout: whose files it came from.
        width: columns of the row that each of its tokens hands on, in a slab after those of its
            layers; 0 of those that hand nothing on.
        trained_length: positions that its configuration was written for; 0 of one that knows none.
        shared: parameters that are the target's.
        assumed: what its files do not say and was taken for it, for people.
        reads: layers of the target whose keys and values it attends to, as the target has them.
    """

    kind: str
    layout: str
    width: int = field(metadata=within(0, MOST_IDS))
    trained_length: int = field(metadata=within(0, MOST_POSITIONS))
    shared: tuple[str, ...]
    assumed: tuple[str, ...]
    reads: tuple[LayerEntry, ...] = field(default=(), metadata={MAY_BE_ABSENT: True})

    @property
    def facts(self) -> DrafterFacts:
        """Raises EngineError: nobody knows this kind."""
        return facts_of(self.kind)


def rank_prefix(rank: int | None) -> str:
    """What the name of a file begins with of which each rank has its own; None: there is one."""
    return "" if rank is None else f"rank-{rank}."


class ProgramFiles:
    """Names of the files of a program, in the folder `dir` of its own."""

    dir: str

    @property
    def program_file(self) -> str:
        return f"{self.dir}/program.json"

    @property
    def whole_file(self) -> str:
        """The graph before it was cut for ranks, for other cuts; only where it is cut."""
        return f"{self.dir}/whole.json"


@dataclass(frozen=True)
class VocabularyEntry:
    """Of a draft whose tokens are other ones than the target's, see `docs/guide/drafts.md`.

    Args:
        num_proposed: target ids that it can propose.
        num_target: tokens that the target's tokenizer has.
        num_unread: of these, those that it reads as another token.
    """

    num_proposed: int = field(metadata=within(0, MOST_IDS))
    num_target: int = field(metadata=within(0, MOST_IDS))
    num_unread: int = field(metadata=within(0, MOST_IDS))


@dataclass(frozen=True)
class ModelEntry(ProgramFiles):
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
        embedding: how its tables of tokens are stored; None in `dtype`.
        vocabulary: of a draft of other tokens; its program takes and gives ids of the target.
        taps: hidden states that it keeps for drafts; None where none reads any.
        head: of a draft that reads them.
        state_layers: layers that keep a state for each sequence.
        state_slabs: of these.
    """

    name: str
    dir: str
    architecture: str
    model_type: str
    vocab_size: int = field(metadata=within(1, MOST_IDS))
    num_parameters: int = field(metadata=within(0, MOST_BYTES))
    max_position: int = field(metadata=within(1, MOST_POSITIONS))
    layers: tuple[LayerEntry, ...]
    slabs: tuple[SlabEntry, ...]
    source: str
    dtype: str
    location: str | None = None
    unread_tensors: tuple[str, ...] = ()
    nonfinite_weights: int = number(0, MOST_BYTES, default=0)
    rope_length: int | None = number(1, MOST_POSITIONS, default=None)
    quantization: str | None = None
    checkpoint_scheme: str | None = None
    # engines that were written before embeddings were integers do not say
    embedding: str | None = field(default=None, metadata={MAY_BE_ABSENT: True})
    # engines that were written before there were such drafts do not say
    vocabulary: VocabularyEntry | None = field(default=None, metadata={MAY_BE_ABSENT: True})
    taps: TapsEntry | None = field(default=None, metadata={MAY_BE_ABSENT: True})
    head: HeadEntry | None = field(default=None, metadata={MAY_BE_ABSENT: True})
    state_layers: tuple[StateLayerEntry, ...] = field(default=(), metadata={MAY_BE_ABSENT: True})
    state_slabs: tuple[StateSlabEntry, ...] = field(default=(), metadata={MAY_BE_ABSENT: True})

    @property
    def reads_hidden(self) -> bool:
        """Whether it drafts from hidden states of the target."""
        return self.head is not None

    @property
    def attended(self) -> tuple[LayerEntry, ...]:
        """Layers whose keys and values its passes read: its own, or the target's."""
        return self.layers if self.head is None else (*self.layers, *self.head.reads)

    @property
    def num_handed_on(self) -> int:
        """Columns of the row that each of its tokens hands on; 0 where none does."""
        return 0 if self.head is None else self.head.width

    @property
    def kept_taps(self) -> Taps | None:
        """Hidden states that it keeps."""
        entry = self.taps
        return None if entry is None else Taps(entry.boundaries, entry.is_last_normed)

    @property
    def state_bytes(self) -> int:
        """Of the states of one sequence."""
        return sum(layer.state_bytes for layer in self.state_layers)

    @property
    def replay_bytes(self) -> int:
        """Of the replay rows of one node."""
        return sum(layer.row_bytes for layer in self.state_layers)

    @property
    def num_slabs(self) -> int:
        """Slabs whose rows move with what is accepted: those of the layers, and that of taps.

        Those of heads never move: what was accepted is computed again.
        """
        return len(self.slabs) + (self.taps is not None)

    @property
    def checkpoint(self) -> str:
        """Where to load the original from, whatever the working directory is."""
        return self.location or self.source

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

    def stage(
        self, number: int, layers: tuple[int, ...], state_layers: tuple[int, ...] = ()
    ) -> ModelEntry:
        """The part of a model that one stage of a pipeline runs.

        It has all slabs of the whole model, those of which it has no layer without rows, so that
        steps find them under their names.

        Args:
            number: of the stage.
            layers: numbers of its layers in the model.
            state_layers: likewise, of those that keep states.
        """
        own, slabs = _part_of_slabs([self.layers[place] for place in layers], self.slabs)
        kept = [self.state_layers[place] for place in state_layers]
        states, state_slabs = _part_of_slabs(kept, self.state_slabs)
        return dataclasses.replace(
            self,
            dir=f"{self.dir}/stage-{number}",
            layers=own,
            slabs=slabs,
            state_layers=states,
            state_slabs=state_slabs,
        )

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


def _part_of_slabs(layers: Sequence[L], slabs: Sequence[S]) -> tuple[tuple[L, ...], tuple[S, ...]]:
    """Some layers, and all slabs with rows for these alone.

    Args:
        layers: in order.
        slabs: of all layers.
    """
    counts = [0] * len(slabs)
    own: list[L] = []
    for layer in layers:
        own.append(dataclasses.replace(layer, index=counts[layer.slab]))
        counts[layer.slab] += 1
    return tuple(own), tuple(
        dataclasses.replace(slab, num_layers=count)
        for slab, count in zip(slabs, counts, strict=True)
    )


@dataclass(frozen=True)
class SelfDraftEntry(ProgramFiles):
    """A second program of the target, which a self-draft runs: its weights and caches, by name.

    Args:
        name: of the draft, in plans; `dir` holds program.json.
        layers: that it has, of the target's that attend, ascending.
        is_windowed: its attention sees a part of the rows by itself; else its steps let it.
    """

    name: str
    dir: str
    layers: tuple[int, ...] = field(metadata=within(0, MOST_LAYERS))
    is_windowed: bool
