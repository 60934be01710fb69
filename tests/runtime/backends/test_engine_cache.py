"""Where each layer's keys and values lie in the caches of an engine."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specc.artifact.kv_rows import AUTO, INT8, SCALE_BYTES
from specc.artifact.model_entry import LayerEntry, SlabEntry
from specc.runtime.backends.base import LoadLimits
from specc.runtime.backends.engine_cache import caches_of, make_cache
from tests.specc.artifact.engine_folders import make_manifest

LAYERS, HEADS, KEY, VALUE = 2, 3, 20, 16


@pytest.mark.parametrize(("rows", "scale"), [(AUTO, 0), (INT8, SCALE_BYTES)])
def test_a_value_begins_where_its_key_ends(rows: str, scale: int) -> None:
    """Keys and values of other widths are one row, of which nothing is left over or taken twice."""
    layers = tuple(
        LayerEntry(f"layers.{i}", 6, HEADS, KEY, 0, 0, i, value_dim=VALUE) for i in range(LAYERS)
    )
    manifest = make_manifest(kv_cache_dtype=rows)
    target = dataclasses.replace(
        manifest.models[0], layers=layers, slabs=(SlabEntry(LAYERS, HEADS, KEY, VALUE),)
    )
    manifest = dataclasses.replace(manifest, models=(target,))
    cache = make_cache(manifest, LoadLimits())
    (slab,) = cache.slabs["target"]
    widths = (KEY + scale, VALUE + scale)
    assert (*slab.shape[:2], *slab.shape[-2:]) == (LAYERS, 1, HEADS, sum(widths))
    for layer, (keys, values) in enumerate(caches_of(target, cache)):
        assert (keys.shape[-1], values.shape[-1]) == widths
        keys.fill_(1 + layer)
        values.fill_(-1 - layer)
    for layer in range(LAYERS):
        columns = slab[layer].reshape(-1, sum(widths))
        wanted = torch.tensor([1 + layer] * widths[0] + [-1 - layer] * widths[1])
        assert torch.equal(columns, wanted.to(slab.dtype).expand_as(columns))
