"""The cache of an engine, as its manifest says, and the part of it that each layer has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specc.artifact.cache_rows import CacheRows
from specc.artifact.kv_rows import AUTO, SCALE_BYTES, holds_quantized, stored_row
from specc.artifact.manifest import Manifest
from specc.artifact.model_entry import LayerEntry, ModelEntry
from specc.artifact.state_entry import CONV
from specc.errors import ConfigError, EngineError
from specc.runtime.backends.base import LoadLimits
from specc.runtime.backends.offload_budget import free_bytes
from specc.runtime.scheduling.kv_cache import CacheShape, KVCache, SlabShape
from specc.runtime.scheduling.state_slabs import (
    FoldOptions,
    StateShape,
    StateSizes,
    StateSlabs,
    num_bytes,
)
from specc.speculation.plans import replay_rows
from specc.system.files import format_bytes

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# k and v cache of each layer; then, of a target that keeps hidden states, their slab, twice; of a
# head the slab of what it hands on, twice, if it does, then that of its target, and the caches of
# the target's layers that it attends to
LayerCaches = Sequence[tuple[Tensor, Tensor]]


def make_cache(
    manifest: Manifest,
    wanted: LoadLimits,
    device: torch.device | str = "cpu",
    rows: CacheRows | None = None,
    grows: bool = False,
) -> KVCache:
    """The cache of all models of an engine.

    Args:
        manifest: of the engine.
        wanted: sequences and tokens that it has room for.
        device: that it lies on.
        rows: of a sequence, for programs that take padded batches; None is a cache of flat rows.
        grows: begin with few of these rows.
    Raises:
        ConfigError: more sequences or tokens than the engine allows, or too few tokens.
    """
    limits = manifest.limits
    max_num_seqs = limits.max_batch_size if wanted.max_num_seqs is None else wanted.max_num_seqs
    if not 1 <= max_num_seqs <= limits.max_batch_size:
        raise ConfigError(
            f"max_num_seqs {max_num_seqs}",
            f"1 … {limits.max_batch_size}, the engine's max_batch_size",
            "choose a number in this range, or compile with a larger --max-batch-size",
        )
    max_seq_len = min(limits.max_seq_len, manifest.models[0].max_position)
    shape = CacheShape(max_seq_len, limits.max_nodes, limits.block_size, max_num_seqs)
    if wanted.kv_cache_tokens is not None:
        shape = _shape_of(shape, wanted.kv_cache_tokens)
    elif limits.kv_cache_tokens is not None:
        num_blocks = limits.cache_rows(max_num_seqs) // limits.block_size
        shape = dataclasses.replace(shape, pool_blocks=num_blocks)
    rows_kind = manifest.kv_cache_dtype
    specs = {model.name: slab_shapes(model, rows_kind) for model in manifest.models}
    dtypes = {
        model.name: stored_row(1, DTYPES[model.dtype], rows_kind)[1] for model in manifest.models
    }
    has_mass = any(entry.plan.chooses_blocks for entry in manifest.plans)
    sizes = state_sizes(manifest, max_num_seqs, wanted.replay_rows)
    states = {model.name: state_shapes(model) for model in manifest.models}
    if torch.device(device).type == "cpu":
        beside = sum(num_bytes(shapes, sizes) for shapes in states.values())
        _check_room(shape, specs, dtypes, 1 if grows or rows is None else rows.total, beside)
    slabs = [
        StateSlabs(shapes, sizes, device, name) if shapes else None
        for name, shapes in states.items()
    ]
    drafts = {number: x for number, x in enumerate(slabs[1:]) if x is not None}
    return KVCache(shape, specs, dtypes, device, rows, grows, has_mass, slabs[0], drafts)


def _check_room(
    shape: CacheShape,
    specs: Mapping[str, Sequence[SlabShape]],
    dtypes: Mapping[str, torch.dtype],
    rows: int,
    beside: int = 0,
) -> None:
    """Compare the caches with the memory that there is: what a manifest plans, its author says.

    Args:
        shape: of the caches.
        specs: of each model's slabs.
        dtypes: of each model's rows.
        rows: of a sequence, where heads come before rows; else 1.
        beside: bytes that do not depend on rows.
    Raises:
        EngineError: they take more.
    """
    # tokens of the rows, and what is noted of a block
    of_rows, needed = shape.num_blocks * max(rows, shape.rows_per_block), shape.num_blocks * 64
    needed += of_rows * 4 + beside
    for model, slabs in specs.items():
        for slab in slabs:
            columns = slab.layers * slab.parts * slab.heads * slab.columns
            needed += of_rows * columns * (slab.dtype or dtypes[model]).itemsize
    free = free_bytes()
    if free is not None and needed > free:
        raise EngineError(
            f"caches of {format_bytes(needed)}, and {format_bytes(free)} of memory free",
            "room for them",
            "load with a smaller --max-num-seqs or --kv-cache-tokens, or free memory",
        )


def slab_shapes(model: ModelEntry, kv_cache_dtype: str = AUTO) -> list[SlabShape]:
    """Slabs of a model: of its layers, then of the rows that it keeps besides.

    Args:
        model: of the engine.
        kv_cache_dtype: see `specc.artifact.kv_rows`.
    """
    dtype, found = DTYPES[model.dtype], []
    for slab in model.slabs:
        columns, parts = stored_row(slab.head_dim, dtype, kv_cache_dtype)[0], 2
        if slab.value_dim:
            widths = slab.cached_columns
            columns = sum(stored_row(width, dtype, kv_cache_dtype)[0] for width in widths)
            parts = 1
        found.append(SlabShape(slab.num_layers, slab.num_kv_heads, columns, parts))
    # in the type of the model, whatever that of K and V is
    if model.taps is not None:
        found.append(SlabShape(1, 1, model.taps.width, 1, dtype))
    if model.num_handed_on:
        found.append(SlabShape(1, 1, model.num_handed_on, 1, dtype))
    return found


def state_shapes(model: ModelEntry) -> list[StateShape]:
    """Slabs of the states that a model's layers keep, of those that keep some."""
    return [
        StateShape(
            slab.num_layers,
            slab.shape,
            slab.columns,
            DTYPES[slab.dtype],
            None if slab.kind == CONV else FoldOptions(slab.key_heads, slab.has_beta),
        )
        for slab in model.state_slabs
    ]


def state_sizes(manifest: Manifest, num_places: int, num_rows: int | None = None) -> StateSizes:
    """How many states a model has.

    Args:
        manifest: of the engine.
        num_places: requests that have some.
        num_rows: replay rows of each; None: as many as the plans need.
    """
    limits = manifest.limits
    kept = limits.state_checkpoints, limits.state_grid
    if num_rows is None:
        num_rows = replay_rows([x.plan for x in manifest.plans])
    return StateSizes(num_places, num_rows, *kept)


def states_of(model: ModelEntry, cache: KVCache) -> list[tuple[Tensor, Tensor]]:
    """States [places, …] and replay rows [places, R, W] of each layer that keeps some."""
    if not model.state_layers:
        return []
    named = cache.environment
    found = []
    for x in model.state_layers:
        states, replay = (named[f"{model.name}_{part}_{x.slab}"] for part in ("states", "replay"))
        found.append((states[x.index], replay[x.index]))
    return found


def rows_of(manifest: Manifest) -> CacheRows | None:
    """Rows of a sequence, where the engine's programs take padded batches."""
    return None if manifest.rectangle is None else manifest.rectangle.rows


def caches_of(model: ModelEntry, cache: KVCache) -> LayerCaches:
    """A model's layers' k and v caches, as they are now; see `LayerCaches`."""
    found = _of_layers(model.layers, cache.slabs[model.name])
    if model.taps is not None:
        features = features_of(model, cache)
        found.append((features, features))
    if model.head is not None:
        if model.num_handed_on:
            handed_on = features_of(model, cache)
            found.append((handed_on, handed_on))
        # what the target keeps for it is its last slab
        slabs = cache.slabs["target"]
        kept = slabs[-1][0, 0, :, :, 0]
        found += [(kept, kept), *_of_layers(model.head.reads, slabs)]
    return found


def _of_layers(
    layers: Sequence[LayerEntry], slabs: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    found = []
    for layer in layers:
        parts = slabs[layer.slab][layer.index]
        if not layer.value_dim:
            found.append((parts[0], parts[1]))
            continue
        if layer.values_in_keys:
            # one memory: what writes a value writes what its key has there
            found.append((parts[0], parts[0][..., : layer.value_dim]))
            continue
        # a quantized row ends with its scale
        scale = SCALE_BYTES if holds_quantized(parts.dtype) else 0
        columns = (layer.head_dim + scale, layer.value_dim + scale)
        keys, values = parts[0].split(columns, dim=-1)
        found.append((keys, values))
    return found


def features_of(model: ModelEntry, cache: KVCache) -> Tensor:
    """[blocks, block_size, W] rows that a model keeps besides K and V.

    Hidden states of a target, see `TapsEntry`; what a head hands on, see `HeadEntry`.
    """
    # one part of one layer of one head
    return cache.slabs[model.name][len(model.slabs)][0, 0, :, :, 0]


def _shape_of(shape: CacheShape, num_tokens: int) -> CacheShape:
    """Raises ConfigError: a cache that has no blocks, or fewer or more than can be of use."""
    most = shape.num_blocks * shape.rows_per_block
    if not shape.block_size or not shape.block_size <= num_tokens <= most:
        raise ConfigError(
            f"kv_cache_tokens {num_tokens}"
            + ("" if shape.block_size else ", and a cache of one block a sequence"),
            f"{shape.block_size} … {most}, what {shape.max_num_seqs} sequences can need"
            if shape.block_size
            else "an engine whose cache has blocks: --block-size 16 at compile",
            "choose a number in this range, or lower max_num_seqs",
        )
    return dataclasses.replace(shape, pool_blocks=num_tokens // shape.block_size)
