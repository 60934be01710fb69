"""What the manifest says of an engine's models and limits, and what may be refused for them."""

from __future__ import annotations

from collections.abc import Sequence

from specc.artifact.model_entry import (
    HeadEntry,
    LayerEntry,
    ModelEntry,
    SlabEntry,
    TapsEntry,
    VocabularyEntry,
)
from specc.artifact.state_entry import StateGeometry, StateLayerEntry, StateSlabEntry
from specc.errors import TreeError
from specc.passes.drafters.head_spec import HeadSpec
from specc.passes.frontend.model_source import ModelSource
from specc.passes.program import Program
from specc.speculation.plans import SpecPlan
from specc.speculation.vocabulary_map import VocabularyMap

_MOST_UNREAD = 3


def cache_layout(program: Program) -> tuple[tuple[LayerEntry, ...], tuple[SlabEntry, ...]]:
    """Layers, and one slab for each geometry among them."""
    counts: dict[tuple[int, int, int, bool], int] = {}
    layers = []
    for layer in program.layers:
        key = (layer.num_kv_heads, layer.head_dim, layer.value_dim, layer.values_in_keys)
        index = counts.get(key, 0)
        counts[key] = index + 1
        slab = list(counts).index(key)
        entry = LayerEntry(
            layer.name, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window,
            slab, index, layer.sink, layer.value_dim, layer.values_in_keys, layer.chunk,
        )  # fmt: skip
        layers.append(entry)
    return tuple(layers), tuple(SlabEntry(count, *key) for key, count in counts.items())


def state_layout(
    program: Program,
) -> tuple[tuple[StateLayerEntry, ...], tuple[StateSlabEntry, ...]]:
    """Layers that keep states, and one slab for each geometry among them."""
    counts: dict[StateGeometry, int] = {}
    layers = []
    for layer in program.state_layers:
        dtype = str(layer.dtype).removeprefix("torch.")
        key = StateGeometry(
            layer.kind, layer.shape, layer.columns, dtype, layer.key_heads, layer.has_beta
        )
        index = counts.get(key, 0)
        counts[key] = index + 1
        slab = list(counts).index(key)
        layers.append(StateLayerEntry(**vars(key), name=layer.name, slab=slab, index=index))
    slabs = (StateSlabEntry(**vars(key), num_layers=count) for key, count in counts.items())
    return tuple(layers), tuple(slabs)


def draft_states(models: Sequence[ModelEntry]) -> dict[str, tuple[StateSlabEntry, ...]]:
    """Draft model → slabs of the states that its layers keep, of those that keep some.

    Args:
        models: of an engine, the target first.
    """
    return {model.name: model.state_slabs for model in models[1:] if model.state_slabs}


def describe_model(
    source: ModelSource, program: Program, max_seq_len: int, target: ModelEntry | None = None
) -> ModelEntry:
    """The manifest's entry of a model after its last pass.

    Args:
        target: of a draft.
    """
    layers_of_target = () if target is None else target.layers
    reads = tuple(layers_of_target[number] for number in program.attended_layers)
    layers, slabs = cache_layout(program)
    state_layers, state_slabs = state_layout(program)
    return ModelEntry(
        name=source.name,
        dir=source.name.replace("_", "-"),
        architecture=source.architecture,
        model_type=source.model_type,
        vocab_size=program.vocab_size,
        num_parameters=program.num_parameters,
        max_position=source.max_position or max_seq_len,
        layers=layers,
        slabs=slabs,
        source=source.label,
        dtype=str(source.dtype).removeprefix("torch."),
        location=source.location,
        rope_length=source.rope_length,
        vocabulary=_describe_vocabulary(source.vocabulary),
        taps=_describe_taps(program),
        head=None if source.head is None else describe_head(source.head, reads),
        state_layers=state_layers,
        state_slabs=state_slabs,
    )


def _describe_vocabulary(vocabulary: VocabularyMap | None) -> VocabularyEntry | None:
    if vocabulary is None:
        return None
    return VocabularyEntry(vocabulary.num_proposed, vocabulary.num_target, vocabulary.num_unread)


def describe_head(spec: HeadSpec, reads: tuple[LayerEntry, ...] = ()) -> HeadEntry:
    """The manifest's entry of a head.

    Args:
        reads: layers of its target that it attends to.
    """
    width, length = spec.width if spec.hands_on else 0, spec.trained_length
    return HeadEntry(spec.kind, spec.layout, width, length, spec.shared, spec.warnings, reads)


def _describe_taps(program: Program) -> TapsEntry | None:
    taps = program.taps
    if taps is None:
        return None
    return TapsEntry(taps.boundaries, taps.is_last_normed, program.feature_width)


def describe_unread(names: Sequence[str]) -> str:
    """`5 tensors (visual.0.weight, visual.1.weight, visual.2.weight, …)`."""
    shown = ", ".join(names[:_MOST_UNREAD])
    more = ", …" if len(names) > _MOST_UNREAD else ""
    return f"{len(names)} tensor{'s' * (len(names) != 1)} ({shown}{more})"


def check_windows(entry: ModelEntry, plans: Sequence[SpecPlan]) -> None:
    """Raises TreeError: a tree that is deeper than a sliding window."""
    for layer in entry.layers:
        for plan in plans:
            if layer.window and plan.max_depth >= layer.window:
                raise TreeError(
                    f"plan {plan.name} of depth {plan.max_depth}; layer {layer.name} of"
                    f" {entry.name} has a sliding window of {layer.window}",
                    f"a tree of depth {layer.window - 1} or less",
                    "choose fewer levels",
                )
