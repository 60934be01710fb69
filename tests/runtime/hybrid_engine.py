"""An engine directory of a target with a convolution, a delta rule and attention, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import fx

from specc.artifact.directory import torch_version
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.graph_io import graph_to_json
from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import LimitsEntry, MemoryEntry, PlanEntry, TokenizerEntry
from specc.artifact.model_entry import LayerEntry, ModelEntry, SlabEntry
from specc.artifact.state_entry import StateGeometry, StateLayerEntry, StateSlabEntry
from specc.kernels import ops
from specc.passes.program import RUNTIME_INPUTS, STATES
from specc.passes.step.fuse_step import fuse_step
from specc.speculation.plans import SpecPlan, replay_rows
from specc.version import __version__
from tests.runtime.conftest import one_layer_program, text_tokenizer

aten = torch.ops.aten
VOCAB, DIM, EOS = 61, 16, 60
CONV = StateGeometry("conv", (3, DIM), DIM, "float32")
# one key head of 4, two value heads of 4
DELTA = StateGeometry("recurrence", (2, 4, 4), 4 + 8 + 2 + 2, "float32", 1, True)
_SHAPES = {"embed": (VOCAB, DIM), "conv": (DIM, 4), "head": (VOCAB, DIM + 8)}
LAYERS = (
    StateLayerEntry(**vars(CONV), name="conv", slab=0, index=0),
    StateLayerEntry(**vars(DELTA), name="mixer", slab=1, index=0),
)
SLABS = (
    StateSlabEntry(**vars(CONV), num_layers=1),
    StateSlabEntry(**vars(DELTA), num_layers=1),
)


def hybrid_program() -> dict[str, Any]:
    """program.json of: c = silu(conv(x)); logits = head([x + attention(x, x, 2 x), delta(c)])."""
    graph = fx.Graph()
    states = [
        {
            "name": f"{part}_{layer}", "kind": "state", "layer": layer, "part": part,
            "dtype": own.dtype, "shape": list(own.shape if part == "state" else (own.columns,)),
        }
        for layer, own in enumerate(LAYERS)
        for part in ("state", "rows")
    ]  # fmt: skip
    inputs = [
        *(
            {"name": f"p_{key}", "kind": "weight", "key": key, "dtype": "float32", "shape": [*size]}
            for key, size in _SHAPES.items()
        ),
        *({"name": key, "kind": "input"} for key in (*RUNTIME_INPUTS, STATES)),
        {"name": "k_cache_0", "kind": "cache", "layer": 0, "part": "k"},
        {"name": "v_cache_0", "kind": "cache", "layer": 0, "part": "v"},
        *states,
    ]
    node = {entry["name"]: graph.placeholder(entry["name"]) for entry in inputs}

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(target, args, kwargs)

    def part(value: fx.Node, first: int, last: int, *sizes: int) -> fx.Node:
        cut = call(aten.slice.Tensor, value, 1, first, last)
        return call(aten.reshape.default, cut, [-1, *sizes])

    x = call(aten.embedding.default, node["p_embed"], node["tokens"])
    where = [node[key] for key in ("q_start", "slot", "cache_len", "ancestors", STATES)]
    conv = call(
        ops.tree_conv, x, node["p_conv"], None, node["state_0"], node["rows_0"], *where,
        activation="silu",
    )  # fmt: skip
    beta = call(aten.sigmoid.default, part(conv, 0, 2, 2))
    decay = call(aten.neg.default, call(aten.sigmoid.default, part(conv, 2, 4, 2)))
    delta = call(
        ops.tree_recurrence, part(conv, 0, 4, 1, 4), part(conv, 4, 8, 1, 4),
        part(conv, 8, 16, 2, 4), decay, beta, node["state_1"], node["rows_1"], *where,
    )  # fmt: skip
    heads = call(aten.unsqueeze.default, x, 0)
    values = call(aten.mul.Scalar, heads, 2.0)
    keys = ("k_cache_0", "v_cache_0", "q_start", "positions", "slot", "cache_len", "ancestors")
    out = call(
        ops.tree_attention, heads, heads, values, *(node[key] for key in keys), node["block_table"],
        scale=0.25,
    )  # fmt: skip
    seen = call(aten.squeeze.dim, call(aten.add.Tensor, heads, out), 0)
    both = call(aten.cat.default, [seen, call(aten.reshape.default, delta, [-1, 8])], 1)
    rows = call(aten.index_select.default, both, 0, node["logit_rows"])
    graph.output(call(aten.linear.default, rows, node["p_head"]))
    return {"schema_version": 1, "name": "target", "inputs": inputs, "graph": graph_to_json(graph)}


def save_hybrid(
    path: Path, plans: Sequence[SpecPlan], *, count: int = 6, grid: int = 8, **changes: Any
) -> Path:
    """Write an engine; `changes` replace fields of its manifest."""
    generator = torch.Generator().manual_seed(3)
    weights = {key: torch.randn(*size, generator=generator) for key, size in _SHAPES.items()}
    weights["conv"] *= 0.5
    # what follows a token is mostly what the draft says, which does not know the states
    weights["head"][:, DIM:] *= 1.5
    weights["head"][EOS] = -1.0
    drafted = {"embed": weights["embed"], "head": weights["head"][:, :DIM].contiguous()}
    models = []
    with EngineWriter(path) as writer:
        for name, program, own in (
            ("target", hybrid_program(), weights),
            ("draft_0", one_layer_program("draft_0"), drafted),
        ):
            directory = name.replace("_", "-")
            writer.write_json(f"{directory}/program.json", program)
            save_file(own, writer.path(f"{directory}/weights.safetensors"))
            layer = LayerEntry("layer", 1, 1, 16, window=0, slab=0, index=0)
            model = ModelEntry(
                name, directory, "Tiny", "tiny", VOCAB, 1000, 96, (layer,), (SlabEntry(1, 1, 16),),
                "by hand", "float32",
            )  # fmt: skip
            models.append(model)
        models[0] = replace(models[0], state_layers=LAYERS, state_slabs=SLABS)
        for plan in plans:
            step = fuse_step(plan, {"target": 1, "draft_0": 1}, block_size=4, states=SLABS)
            writer.write_json(f"steps/{plan.name}.json", step.to_json())
        writer.write_bytes("tokenizer.json", text_tokenizer().to_str().encode())
        nodes, each = replay_rows(plans), models[0].state_bytes
        states = 3 * (each + nodes * models[0].replay_bytes)
        manifest = Manifest(
            specc_version=__version__, torch_version=torch_version(), created="2026-01-01",
            backend="eager", device="cpu", models=tuple(models),
            plans=tuple(PlanEntry.of(p, f"steps/{p.name}.json") for p in plans),
            default_plan=plans[-1].name,
            limits=LimitsEntry(
                3, 96, 4, 16, max(p.num_rows for p in plans), 512, state_checkpoints=count,
                state_grid=grid,
            ),
            tokenizer=TokenizerEntry("tokenizer.json", "", (EOS,), None, False),
            memory_plan={
                "target": MemoryEntry(0, 0, 0, 0, states, count * each),
                "draft_0": MemoryEntry(0, 0, 0, 0),
            },
        )  # fmt: skip
        writer.commit(replace(manifest, **changes))
    return path
