"""What the manifest says of an engine's models and limits, and what may be refused for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specc.artifact.backends import BackendFacts
from specc.artifact.manifest_entries import LimitsEntry
from specc.artifact.model_entry import (
    HeadEntry,
    LayerEntry,
    ModelEntry,
    SlabEntry,
    TapsEntry,
    VocabularyEntry,
)
from specc.config import CompileConfig
from specc.errors import ConfigError, TreeError
from specc.passes.frontend.heads.head_spec import HeadSpec
from specc.passes.frontend.model_source import ModelSource
from specc.passes.memory import ModelMemory, PassShape, plan_memory
from specc.passes.program import Program
from specc.passes.step.tiles import logit_rows, pass_rows
from specc.speculation.plans import OFF, SpecPlan
from specc.speculation.vocabulary_map import VocabularyMap

DEFAULT_MAX_SEQ_LEN = 4096
LEAST_PREFILL_CHUNK = 512
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


def describe_model(source: ModelSource, program: Program, max_seq_len: int) -> ModelEntry:
    """The manifest's entry of a model after its last pass."""
    layers, slabs = cache_layout(program)
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
        head=None if source.head is None else describe_head(source.head),
    )


def _describe_vocabulary(vocabulary: VocabularyMap | None) -> VocabularyEntry | None:
    if vocabulary is None:
        return None
    return VocabularyEntry(vocabulary.num_proposed, vocabulary.num_target, vocabulary.num_unread)


def describe_head(spec: HeadSpec) -> HeadEntry:
    """The manifest's entry of a head."""
    width, length = spec.width if spec.hands_on else 0, spec.trained_length
    return HeadEntry(spec.kind, spec.layout, width, length, spec.shared, spec.warnings)


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


def check_seq_len(max_seq_len: int | None, longest: dict[str, int]) -> None:
    """Compare the length that was asked for with the positions of the models.

    Raises:
        ConfigError: it is beyond them.
    """
    if max_seq_len is None or not longest or max_seq_len <= min(longest.values()):
        return
    name = min(longest, key=lambda key: longest[key])
    most = longest[name]
    raise ConfigError(
        f"--max-seq-len {max_seq_len}; the {name.replace('_', ' ')} model has {most} positions",
        f"{most} or less",
        f"pass --max-seq-len {most}",
    )


def engine_limits(
    sources: Sequence[ModelSource],
    plans: Sequence[SpecPlan],
    config: CompileConfig,
    default_chunk: int,
) -> LimitsEntry:
    """Sizes that an engine is compiled for; see `fit_prefill_chunk`, too.

    Args:
        sources: of the models.
        plans: of the engine.
        config: options.
        default_chunk: tokens of a prefill pass where nobody says how many.
    Raises:
        ConfigError: more tokens than a model has positions, or a cache that cannot be.
    """
    longest = {source.name: source.max_position for source in sources if source.max_position}
    most = min(longest.values(), default=DEFAULT_MAX_SEQ_LEN)
    max_seq_len = config.max_seq_len or min(most, DEFAULT_MAX_SEQ_LEN)
    check_seq_len(max_seq_len, longest)
    most_tokens = max(max_seq_len * config.max_batch_size, LEAST_PREFILL_CHUNK)
    chunk = config.prefill_chunk or min(default_chunk, most_tokens)
    limits = LimitsEntry(
        max_batch_size=config.max_batch_size,
        max_seq_len=max_seq_len,
        block_size=config.block_size,
        prefill_chunk=chunk,
        max_nodes=max(plan.num_rows for plan in plans),
        max_logits_mb=config.max_logits_mb,
        kv_cache_tokens=config.kv_cache_tokens,
    )
    _check_cache(limits)
    return limits


def _check_cache(limits: LimitsEntry) -> None:
    """Raises ConfigError: a cache that has no blocks, or fewer or more than can be of use."""
    wanted = limits.kv_cache_tokens
    most = limits.max_batch_size * limits.context
    if wanted is None or (limits.block_size and limits.block_size <= wanted <= most):
        return
    raise ConfigError(
        f"--kv-cache-tokens {wanted}"
        + ("" if limits.block_size else ", and a cache of one block a sequence"),
        f"{limits.block_size} … {most}, what {limits.max_batch_size} sequences can need"
        if limits.block_size
        else "a cache in blocks, which --block-size 0 and the backends onnx and tensorrt lack",
        "choose a number in this range, or leave it out"
        if limits.block_size
        else "leave out --kv-cache-tokens, or choose another --block-size or --backend",
    )


def fit_prefill_chunk(
    limits: LimitsEntry,
    config: CompileConfig,
    models: Sequence[tuple[Program, torch.dtype]],
    facts: BackendFacts,
) -> LimitsEntry:
    """Halve a chunk that nobody asked for until its passes take what a step's logits may.

    Args:
        limits: of the engine.
        config: asked for, or left to the default, how many tokens a pass takes.
        models: programs after their last phase, and the dtype of each.
        facts: of the backend.
    """
    most = config.max_logits_mb << 20
    while config.prefill_chunk is None and limits.prefill_chunk > LEAST_PREFILL_CHUNK:
        plans = [plan_model_memory(item, limits, dtype, [OFF], facts) for item, dtype in models]
        if max(plan.workspace for plan in plans) <= most:
            break
        chunk = max(limits.prefill_chunk // 2, LEAST_PREFILL_CHUNK)
        limits = replace(limits, prefill_chunk=chunk)
    return limits


def plan_model_memory(
    program: Program,
    limits: LimitsEntry,
    dtype: torch.dtype,
    plans: Sequence[SpecPlan],
    facts: BackendFacts,
) -> ModelMemory:
    """Memory of one model of an engine of these limits and plans; the model has one's name.

    Logits are those of the plan that leaves most of them alive, and of a draft include what
    children were drawn from, until the tree is verified.
    """
    batch = limits.max_batch_size
    rows = max(1, *(logit_rows(plan, program.name) for plan in plans))
    nodes = max(1, *(pass_rows(plan, program.name) for plan in plans))
    context = limits.context
    chunk = min(limits.prefill_chunk, limits.max_seq_len * batch)
    prefill = PassShape(chunk, batch, batch, min(chunk, limits.max_seq_len), context)
    step = PassShape(batch * nodes, batch * min(nodes, rows), batch, nodes, context)
    # a draft without layers reads no prompt
    shapes = [prefill, step] if program.layers else [step]
    sizes = (limits.cache_rows(), shapes, batch * rows)
    return plan_memory(program, dtype, *sizes, facts.attention, facts.decoded_bytes)
