"""A tiny transformer pair over the real operators, and engines made of it by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, fx, nn

from specc.artifact.directory import torch_version
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.graph_io import graph_to_json
from specc.artifact.kv_rows import AUTO, stored_row
from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import LimitsEntry, MemoryEntry, PlanEntry, TokenizerEntry
from specc.artifact.model_entry import LayerEntry, ModelEntry, SlabEntry
from specc.kernels import ops
from specc.passes.program import RUNTIME_INPUTS
from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.eager.step import EagerStep
from specc.runtime.engine import Engine
from specc.runtime.execution.shared_runner import SharedRunner
from specc.runtime.scheduling.kv_cache import CacheShape, KVCache
from specc.speculation.plans import SpecPlan
from specc.version import __version__
from tests.lossless import Zoo, shared_zoo
from tests.rehearsed_once import rehearsed_once
from tests.runtime.draft_pair import Pair, make_pair

aten = torch.ops.aten

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS, POSITIONS = 61, 32, 4, 2, 8, 2, 96
EOS = 60
PLANS = ((), (1, 1, 1, 1), (3, 2, 1))


@pytest.fixture(autouse=True, scope="module")
def _rehearsed() -> Iterator[None]:
    with rehearsed_once():
        yield


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return shared_zoo(tmp_path_factory.getbasetemp())


class TinyModel(nn.Module):
    """Two pre-norm attention layers with learned positions; weights from a seed.

    `forward` is the contract of a ModelProgram, `greedy` an independent dense oracle.
    """

    def __init__(
        self,
        seed: int = 0,
        noise: float = 0.0,
        dtype: torch.dtype = torch.float32,
        noise_seed: int | None = None,
    ) -> None:
        super().__init__()
        self.caches: list[tuple[Tensor, Tensor]] = []
        self.num_tokens: list[int] = []
        generator = torch.Generator().manual_seed(seed)
        other = torch.Generator().manual_seed(seed + 1 if noise_seed is None else noise_seed)

        def weight(*shape: int) -> Tensor:
            value = torch.randn(*shape, generator=generator)
            value += noise * torch.randn(*shape, generator=other)
            return (value / shape[-1] ** 0.5).to(dtype)

        kv_dim = KV_HEADS * HEAD_DIM
        self.embed = weight(VOCAB, DIM) * DIM**0.5
        self.position = weight(POSITIONS, DIM) * DIM**0.5
        self.layers = [
            [weight(DIM, DIM), weight(kv_dim, DIM), weight(kv_dim, DIM), weight(DIM, DIM)]
            for _ in range(LAYERS)
        ]
        self.head = weight(VOCAB, DIM) * 3

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        q_start: Tensor,
        slot: Tensor,
        cache_len: Tensor,
        ancestors: Tensor | None,
        block_table: Tensor,
        logit_rows: Tensor,
        mass: Tensor | None = None,
    ) -> Tensor:
        self.num_tokens.append(len(tokens))
        x = self.embed[tokens] + self.position[positions]
        for (wq, wk, wv, wo), (k_cache, v_cache) in zip(self.layers, self.caches, strict=True):
            h = nn.functional.layer_norm(x, (DIM,))
            q, k, v = (
                (h @ w.T).view(len(tokens), -1, HEAD_DIM).transpose(0, 1) for w in (wq, wk, wv)
            )
            out = ops.tree_attention(
                q, k, v, k_cache, v_cache, q_start, positions, slot, cache_len, ancestors,
                block_table, scale=HEAD_DIM**-0.5,
            )  # fmt: skip
            if mass is not None:
                ops.block_mass(
                    q, k_cache, q_start, positions, slot, cache_len, ancestors, block_table, mass,
                    scale=HEAD_DIM**-0.5,
                )  # fmt: skip
            x = x + out.transpose(0, 1).reshape(len(tokens), -1) @ wo.T
        return nn.functional.layer_norm(x[logit_rows], (DIM,)) @ self.head.T

    def dense_logits(self, tokens: list[int]) -> Tensor:
        """[V] logits of the next token, without caches and without specc's operators."""
        x = self.embed[tokens] + self.position[: len(tokens)]
        for wq, wk, wv, wo in self.layers:
            h = nn.functional.layer_norm(x, (DIM,))
            q, k, v = (
                (h @ w.T).view(len(tokens), -1, HEAD_DIM).transpose(0, 1)[None]
                for w in (wq, wk, wv)
            )
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            x = x + out[0].transpose(0, 1).reshape(len(tokens), -1) @ wo.T
        return nn.functional.layer_norm(x[-1], (DIM,)) @ self.head.T

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Plain greedy decoding, up to the last position."""
        tokens = list(prompt)
        while len(tokens) - len(prompt) < max_tokens and len(tokens) < POSITIONS:
            tokens.append(int(self.dense_logits(tokens).argmax()))
        return tokens[len(prompt) :]


def text_tokenizer() -> Tokenizer:
    """Tokens 0 … VOCAB - 1 of the tiny model: letters, digits, a space, and EOS."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456Ġ"
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.add_special_tokens([AddedToken("<eos>", special=True)]) == 1
    assert tokenizer.token_to_id("<eos>") == EOS
    return tokenizer


def build_engine(
    *,
    noise: float = 0.35,
    draft_seed: int = 0,
    block_size: int = 4,
    max_num_seqs: int = 3,
    max_seq_len: int = POSITIONS,
    prefill_chunk: int = 16,
    draft_positions: int = POSITIONS,
    plans: Sequence[SpecPlan | tuple[int, ...]] = PLANS,
    dtype: torch.dtype = torch.float32,
    eos: tuple[int, ...] = (),
    kv_cache_dtype: str = AUTO,
) -> Engine:
    """An engine of the tiny models; noise 0 is a draft that equals the target."""
    spec_plans = [p if isinstance(p, SpecPlan) else SpecPlan.from_widths(p) for p in plans]
    names = sorted({"draft_0", *(model for plan in spec_plans for model in plan.model_names)})
    max_nodes = max(plan.num_rows for plan in spec_plans)
    shape = CacheShape(max_seq_len, max_nodes, block_size, max_num_seqs)
    columns, stored = stored_row(HEAD_DIM, dtype, kv_cache_dtype)
    slab = (LAYERS, KV_HEADS, columns)
    has_mass = any(plan.chooses_blocks for plan in spec_plans)
    specs = {name: [slab] for name in ("target", *names)}
    cache = KVCache(shape, specs, stored, has_mass=has_mass)
    target = TinyModel(dtype=dtype)
    drafts = [
        TinyModel(draft_seed, noise, dtype, noise_seed=draft_seed + 1 + i)
        for i in range(len(names))
    ]
    # a position past the end is an IndexError in all models
    target.position = target.position[:max_seq_len]
    for draft in drafts:
        draft.position = draft.position[:draft_positions]
    modules = dict(zip(("target", *names), (target, *drafts), strict=True))
    for name, model in modules.items():
        model.caches = [(layer[0], layer[1]) for layer in cache.slabs[name][0]]
    steps = {}
    for plan in spec_plans:
        program = fuse_step(plan, dict.fromkeys(modules, 1), block_size=block_size).to_json()
        steps[plan.name] = EagerStep(json.loads(json.dumps(program)), modules)
    return Engine(
        target=target,
        drafts=drafts,
        steps=steps,
        cache=cache,
        default_plan=spec_plans[-1].name,
        prefill_chunk=prefill_chunk,
        vocab_size=VOCAB,
        position_limit=min(max_seq_len, draft_positions),
        tokenizer=text_tokenizer(),
        eos_token_ids=frozenset(eos),
        runner_type=SharedRunner,
    )


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "eager")


@pytest.fixture(scope="session")
def cpu_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("cpu-pair"), "cpu")


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    return build_engine


@pytest.fixture(scope="session")
def greedy() -> Callable[..., list[int]]:
    """What any plan, batch and schedule must produce for (prompt, max_tokens)."""
    model, known = TinyModel(), {}

    def decode(prompt: list[int], max_tokens: int) -> list[int]:
        key = tuple(prompt)
        if len(known.get(key, ())) < max_tokens:
            known[key] = model.greedy(prompt, max(24, max_tokens))
        return known[key][:max_tokens]

    return decode


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, EOS, (length,), generator=generator).tolist()
        for length in (1, 5, 16, 17, 33, 2, 9)
    ]


@dataclass(frozen=True)
class SavedEngine:
    """An engine directory of a one-layer model without positions, and its dense oracle."""

    path: Path
    weights: dict[str, Tensor]

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(max_tokens):
            x = self.weights["embed"][tokens]
            out = nn.functional.scaled_dot_product_attention(x, x, 2 * x, is_causal=True)
            tokens.append(int((self.weights["head"] @ (x + out)[-1]).argmax()))
        return tokens[len(prompt) :]


def one_layer_program(name: str) -> dict[str, Any]:
    """program.json of: x = embed[tokens]; logits = head(x + attention(x, x, 2 x))[logit_rows]."""
    graph = fx.Graph()
    inputs = [
        {"name": "p_0", "kind": "weight", "key": "embed", "dtype": "float32", "shape": [VOCAB, 16]},
        {"name": "p_1", "kind": "weight", "key": "head", "dtype": "float32", "shape": [VOCAB, 16]},
        *({"name": key, "kind": "input"} for key in RUNTIME_INPUTS),
        {"name": "k_cache_0", "kind": "cache", "layer": 0, "part": "k"},
        {"name": "v_cache_0", "kind": "cache", "layer": 0, "part": "v"},
    ]
    node = {entry["name"]: graph.placeholder(entry["name"]) for entry in inputs}
    x = graph.call_function(aten.embedding.default, (node["p_0"], node["tokens"]))
    heads = graph.call_function(aten.unsqueeze.default, (x, 0))
    values = graph.call_function(aten.mul.Scalar, (heads, 2.0))
    keys = ("k_cache_0", "v_cache_0", "q_start", "positions", "slot", "cache_len", "ancestors")
    out = graph.call_function(
        ops.tree_attention,
        (heads, heads, values, *(node[key] for key in keys), node["block_table"]),
        {"scale": 0.25},
    )
    hidden = graph.call_function(aten.add.Tensor, (heads, out))
    rows = graph.call_function(aten.index_select.default, (hidden, 1, node["logit_rows"]))
    logits = graph.call_function(aten.linear.default, (rows, node["p_1"]))
    graph.output(graph.call_function(aten.squeeze.dim, (logits, 0)))
    return {
        "schema_version": 1, "name": name, "inputs": inputs, "graph": graph_to_json(graph)
    }  # fmt: skip


def save_engine(path: Path, draft_dtype: str = "float32", **changes: Any) -> SavedEngine:
    """Write an engine by hand; `changes` replace fields of its manifest."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        key: torch.randn(VOCAB, 16, generator=generator).contiguous() for key in ("embed", "head")
    }
    plans = [SpecPlan.from_widths(widths) for widths in PLANS]
    models = []
    with EngineWriter(path) as writer:
        for name, directory in (("target", "target"), ("draft_0", "draft-0")):
            writer.write_json(f"{directory}/program.json", one_layer_program(name))
            save_file(weights, writer.path(f"{directory}/weights.safetensors"))
            layer = LayerEntry("layer", 1, 1, 16, window=0, slab=0, index=0)
            models.append(
                ModelEntry(
                    name,
                    directory,
                    "Tiny",
                    "tiny",
                    VOCAB,
                    2 * VOCAB * 16,
                    96,
                    (layer,),
                    (SlabEntry(1, 1, 16),),
                    "by hand",
                    "float32" if name == "target" else draft_dtype,
                )
            )
        for plan in plans:
            step = fuse_step(plan, {"target": 1, "draft_0": 1})
            writer.write_json(f"steps/{plan.name}.json", step.to_json())
        writer.write_bytes("tokenizer.json", text_tokenizer().to_str().encode())
        memory = {name: MemoryEntry(0, 0, 0, 0) for name in ("target", "draft_0")}
        manifest = Manifest(
            specc_version=__version__, torch_version=torch_version(), created="2026-01-01",
            backend="eager", device="cpu", models=tuple(models),
            plans=tuple(PlanEntry.of(p, f"steps/{p.name}.json") for p in plans),
            default_plan="chain-4",
            limits=LimitsEntry(3, 64, 16, 32, max(p.num_rows for p in plans), 512),
            tokenizer=TokenizerEntry("tokenizer.json", "", (EOS,), None, False),
            memory_plan=memory,
        )  # fmt: skip
        writer.commit(replace(manifest, **changes))
    return SavedEngine(path, weights)


@pytest.fixture(scope="session")
def save_engine_to() -> Callable[..., SavedEngine]:
    return save_engine


@pytest.fixture(scope="session")
def saved_engine(tmp_path_factory: pytest.TempPathFactory) -> SavedEngine:
    return save_engine(tmp_path_factory.mktemp("engines") / "engine")


@pytest.fixture(scope="session")
def lowered_phi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Both programs of a model, with a rim around its cache rows, and its ONNX file."""
    from specc.artifact.cache_rows import CacheRows
    from tests.onnx_models import lowered, write_onnx

    pair = lowered("phi", CacheRows(front=2, slots=96, scratch=46))
    directory = tmp_path_factory.mktemp("lowered") / "target"
    write_onnx(pair, directory)
    return pair, directory
