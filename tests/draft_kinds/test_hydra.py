"""Hydra heads: random checkpoints as zankner/Hydra writes them, their formulas, and their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from specc.drafters.hydra import HydraHeads, PrefixHydraHeads
from specc.drafters.one_pass import OnePassEntry
from specc.errors import HeadError
from specc.passes.drafters.head_spec import TargetFacts
from specc.passes.drafters.recognise import recognise
from specc.runtime.backends.program_files import read_json
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.scheduling.request import Request
from tests.draft_kinds.rig import DraftRig, Said, opened
from tests.heads import HEADS, KV_HEADS, LAYERS, VOCAB, WIDTH
from tests.lossless import Zoo
from tests.runtime.block_rig import BlockOracle
from tests.runtime.draft_cases import write_target
from tests.runtime.head_rig import CLOSE, TREE, owner_of

INNER = 48
_PREFIX = "prefix_embeding_layer"


@dataclass(frozen=True)
class HydraCase:
    """Heads to write.

    Args:
        arch: `mlp` or `prefix-mlp`.
        num_heads: D.
        num_layers: L.
        repeats: layers after the first are written once for each, as the trainer's state has them.
        vocab: V.
        boundaries: where the target is read.
        has_embedding: the file has the target's.
        confidence: nothing, as block drafters without a head that estimates acceptance.
    """

    arch: str = "mlp"
    num_heads: int = 3
    num_layers: int = 1
    repeats: bool = True
    vocab: int = VOCAB
    boundaries: tuple[int, ...] = (LAYERS,)
    config: dict[str, Any] = field(default_factory=dict)
    has_embedding: bool = False
    file: str = "model.safetensors"
    confidence: str = ""

    @property
    def has_prefix(self) -> bool:
        return self.arch == "prefix-mlp"


HYDRA_CASES = {
    # Hydra++, as ankner/hydra-vicuna-7b-v1.3
    "prefix": HydraCase("prefix-mlp", 4, 4, has_embedding=True, file="hydra_lm_head.safetensors"),
    "mlp": HydraCase(num_heads=4),
    # layers that are one module, there once; hidden states before the target's last layer
    "once": HydraCase(
        "mlp", num_layers=3, repeats=False, boundaries=(7,), config={"hidden_state_offset": 1}
    ),
}


def config_of(case: HydraCase) -> dict[str, Any]:
    """Contents of config.json, as transformers writes a configuration of no known type."""
    return {
        "base_model_name_or_path": "T/",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hydra_head_arch": case.arch,
        "hydra_num_heads": case.num_heads,
        "hydra_num_layers": case.num_layers,
        **case.config,
    }


def write_hydra(directory: Path, case: HydraCase, seed: int = 0) -> dict[str, Tensor]:
    """Write heads; returns their tensors, of layers that are one the first alone."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(case)), encoding="utf-8")
    tensors = draw_tensors(case, seed)
    stored = dict(tensors)
    if case.repeats:
        first, step = (1, 2) if case.has_prefix else (0, 1)
        for head in range(case.num_heads):
            for layer in range(2, case.num_layers):
                for part in ("weight", "bias"):
                    place = f"hydra_mlp.{head}.{{}}.linear.{part}"
                    one = tensors[place.format(first + step)]
                    stored[place.format(first + layer * step)] = one.clone()
    if case.has_prefix:
        # of the model that the prefix layer is trained as
        stored[f"{_PREFIX}.embed_tokens.weight"] = torch.zeros(case.vocab, WIDTH)
        stored[f"{_PREFIX}.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(stored, str(directory / case.file))
    return tensors


def draw_tensors(case: HydraCase, seed: int = 0) -> dict[str, Tensor]:
    """Tensors drawn from the seed, by the names in files; no part is small."""
    generator = torch.Generator().manual_seed(70 + seed)

    def draw(scale: float, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    first, step, last = (1, 2, ".1") if case.has_prefix else (0, 1, "")
    found: dict[str, Tensor] = {}
    for head in range(case.num_heads):
        for layer in range(min(case.num_layers, 2)):
            columns = (head + 2) * WIDTH if layer == 0 else WIDTH
            place = f"hydra_mlp.{head}.{first + step * layer}"
            for key in ("linear", "res_connection")[: 1 if layer else 2]:
                found[f"{place}.{key}.weight"] = draw(0.12, WIDTH, columns)
                found[f"{place}.{key}.bias"] = draw(0.5, WIDTH)
        found[f"hydra_lm_head.{head}{last}.weight"] = draw(0.3, case.vocab, WIDTH)
        found[f"hydra_lm_head.{head}{last}.bias"] = draw(0.5, case.vocab)
    if case.has_embedding:
        found["input_embed_fn.weight"] = draw(0.4, case.vocab, WIDTH)
    if case.has_prefix:
        size = WIDTH // HEADS
        rows = {"q": HEADS * size, "k": KV_HEADS * size, "v": KV_HEADS * size, "o": WIDTH}
        for key, count in rows.items():
            weight = draw(0.3, count, HEADS * size if key == "o" else WIDTH)
            found[f"{_PREFIX}.layers.0.self_attn.{key}_proj.weight"] = weight
        for key, shape in {"gate": (INNER, WIDTH), "up": (INNER, WIDTH)}.items():
            found[f"{_PREFIX}.layers.0.mlp.{key}_proj.weight"] = draw(0.25, *shape)
        found[f"{_PREFIX}.layers.0.mlp.down_proj.weight"] = draw(0.25, WIDTH, INNER)
        for key in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
            found[f"{_PREFIX}.{key}.weight"] = 1.0 + draw(0.4, WIDTH)
    return found


class HydraReference:
    """Heads by their formulas: dense, without caches, and of nothing in specc.

        h = taps of the last token, or norm(layer(taps of all))
        x_0 = [h e_0 … e_j];  x = S x + s + silu(W x + b), then x + silu(W x + b);  logits = U x + u

    Args:
        tensors: of `draw_tensors`.
        embedding: of the target, [V, H].
        theta: base of the target's rotary embedding.
    """

    def __init__(
        self, case: HydraCase, tensors: dict[str, Tensor], embedding: Tensor, theta: float = 1e4
    ) -> None:
        self.case, self.w = case, tensors
        self.embedding = tensors.get("input_embed_fn.weight", embedding)
        self.frequencies = theta ** -(torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))

    def read(self, taps: Tensor, tokens: Sequence[int]) -> Tensor:
        """What a head reads: h, and embeddings of the anchor and of drafted tokens."""
        h = self.prefix(taps)[-1] if self.case.has_prefix else taps[-1]
        return torch.cat([h, *self.embedding[list(tokens)]])

    def after(self, taps: Tensor, anchor: int, path: Sequence[int]) -> Tensor:
        """[V] logits of the token after a path of drafted ones.

        Args:
            taps: [n, H] hidden states of the target for all tokens before the anchor.
            anchor: the newest token.
        """
        head = len(path)
        first, step, last = (1, 2, ".1") if self.case.has_prefix else (0, 1, "")
        x = self.read(taps, [anchor, *path])
        place = f"hydra_mlp.{head}.{first}"
        x = self.linear(f"{place}.res_connection", x) + self.silu(f"{place}.linear", x)
        for _ in range(1, self.case.num_layers):
            x = x + self.silu(f"hydra_mlp.{head}.{first + step}.linear", x)
        return self.linear(f"hydra_lm_head.{head}{last}", x)

    def silu(self, name: str, x: Tensor) -> Tensor:
        y = self.linear(name, x)
        return y / (1 + torch.exp(-y))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", torch.zeros(()))

    def norm(self, name: str, x: Tensor) -> Tensor:
        wide = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return wide * self.w[f"{_PREFIX}.{name}.weight"]

    def kept(self, taps: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix layer, [n, HK, D]: what a cache of it holds."""
        x, name = self.norm("layers.0.input_layernorm", taps), f"{_PREFIX}.layers.0.self_attn"
        k, v = (self.linear(f"{name}.{key}_proj", x).view(len(x), KV_HEADS, -1) for key in "kv")
        return self.rotate(k), v

    def prefix(self, taps: Tensor) -> Tensor:
        """[n, H]."""
        name, size, n = f"{_PREFIX}.layers.0", WIDTH // HEADS, len(taps)
        q = self.linear(f"{name}.self_attn.q_proj", self.norm("layers.0.input_layernorm", taps))
        q, (k, v) = self.rotate(q.view(n, HEADS, size)), self.kept(taps, 0)
        seen = torch.ones(n, n).tril().bool()
        heads = []
        for head in range(HEADS):
            own = head * KV_HEADS // HEADS
            scores = q[:, head] @ k[:, own].T / size**0.5
            heads.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, own])
        y = taps + self.linear(f"{name}.self_attn.o_proj", torch.cat(heads, dim=-1))
        x = self.norm("layers.0.post_attention_layernorm", y)
        gate, up = (self.linear(f"{name}.mlp.{key}_proj", x) for key in ("gate", "up"))
        y = y + self.linear(f"{name}.mlp.down_proj", gate * torch.sigmoid(gate) * up)
        return self.norm("norm", y)

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(len(x))[:, None, None] * self.frequencies
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class HydraOracle(BlockOracle):
    """Compares what heads compute in an engine with their formulas, and rows of a prefix layer."""

    @property
    def num_cached(self) -> int:
        return int(self.reference.case.has_prefix)

    def check_rows(self, engine: Engine, request: Request) -> None:
        if self.num_cached:
            super().check_rows(engine, request)
        else:
            assert request.draft_lens[self.number] == 0
            self.num_rows += 1

    def _look(self, core: EngineCore, given: Sequence[Any], logits: Tensor) -> None:
        """The first head of each request, and what it reads."""
        cache_len, table, logit_rows = given[4], given[6], given[7]
        if not len(logit_rows):
            return
        for b, row in enumerate(table):
            request = owner_of(core, row.tolist())
            assert int(cache_len[b]) == request.cache_len - 1 == len(request.token_ids) - 2
            taps, root = self.taps(request, request.cache_len), request.token_ids[-1]
            wanted = [self.reference.after(taps, root, []), self.reference.read(taps, [root])]
            torch.testing.assert_close(logits[b], torch.cat(wanted), **CLOSE)
            self.num_passes += 1


class HydraRig(DraftRig):
    cases = HYDRA_CASES
    prefix = "hydra"

    @property
    def said(self) -> Said:  # type: ignore[override]
        case = HYDRA_CASES[self.case]
        lines = (
            "a set of Hydra heads (hydra",
            f"{case.num_heads} heads of {case.num_layers} layers",
        )
        shared = () if case.has_embedding else ("embed_tokens.weight",)
        columns = 2 * KV_HEADS * WIDTH // HEADS if case.has_prefix else 0
        return Said((LAYERS,), "zankner/Hydra", shared, True, 0, columns, lines)

    def write(self, path: Path, case: str) -> object:
        return write_hydra(path, HYDRA_CASES[case])

    def oracle(self, zoo: Zoo, case: str = "", number: int = 0) -> HydraOracle:
        found, target = HYDRA_CASES[case or self.case], opened(write_target(zoo))
        embedding = target.get_input_embeddings().weight.detach()
        return HydraOracle(target, HydraReference(found, draw_tensors(found), embedding), number)


_PLAIN = HydraHeads(4, num_layers=2, hidden_columns=16, draft="draft_0")
_WITH_PREFIX = PrefixHydraHeads(4, num_layers=4, is_tied=True, hidden_columns=16, draft="draft_0")
RIGS = (HydraRig("hydra_prefix", "prefix", _WITH_PREFIX), HydraRig("hydra", "mlp", _PLAIN))


def of_target(**changes: Any) -> TargetFacts:
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, vocab_size=VOCAB,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
    )  # fmt: skip
    for key, value in changes.items():
        setattr(config, key, value)
    return TargetFacts.of_config("the target", config)


def changed(path: Path, name: str, change: Any = None, tensors: Any = None) -> Path:
    """Heads of `HYDRA_CASES` of which some things are different."""
    case = HYDRA_CASES[name]
    write_hydra(path, case)
    config = {**config_of(case), **(change or {})}
    (path / "config.json").write_text(json.dumps({k: x for k, x in config.items() if x != DROPPED}))
    found = load_file(path / case.file)
    for key, value in (tensors or {}).items():
        found.pop(key) if value is None else found.update({key: value})
    save_file(found, path / case.file)
    return path


DROPPED = "dropped"


@pytest.mark.parametrize("name", HYDRA_CASES)
def test_what_files_say(name: str, tmp_path: Path) -> None:
    case = HYDRA_CASES[name]
    write_hydra(tmp_path, case)
    spec: Any = recognise(tmp_path, of_target())
    assert spec is not None
    assert spec.kind == ("hydra_prefix" if case.has_prefix else "hydra")
    assert (spec.boundaries, spec.is_last_normed) == (case.boundaries, case.boundaries == (LAYERS,))
    assert (spec.block.size, spec.block.num_proposed) == (case.num_heads, case.num_heads)
    assert (spec.block.num_layers, spec.block.is_tied) == (case.num_layers, case.num_layers > 2)
    assert spec.shared == (() if case.has_embedding else ("embed_tokens.weight",))
    assert spec.trained_length == (2048 if case.has_prefix else 0)
    # layers that are one are read once
    stored = {key for key in spec.tensors if key.startswith("heads.") and key.endswith("weight")}
    assert len(stored) == case.num_heads * (1 + min(case.num_layers, 2))
    assert OnePassEntry(**spec.block.to_json()).kind == spec.kind


def test_layers_that_differ_are_all_read(tmp_path: Path) -> None:
    other = {"hydra_mlp.2.7.linear.bias": torch.ones(WIDTH)}
    spec: Any = recognise(changed(tmp_path, "prefix", tensors=other), of_target())
    assert not spec.block.is_tied
    assert sum(key.endswith("linear.weight") for key in spec.tensors) == 4 * 4
    assert spec.block.tensors.keys() >= {"_heads_3_3_linear_weight", "_lm_heads_1_bias"}


@pytest.mark.parametrize(
    ("name", "change", "tensors", "found"),
    [
        ("mlp", {"hydra_head_arch": "eagle-attn"}, {}, "hydra_head_arch is 'eagle-attn'"),
        ("mlp", {"hydra_head_arch": "cross-attn"}, {}, "hydra_head_arch is 'cross-attn'"),
        ("mlp", {"grounded_heads": False}, {}, "grounded_heads is False"),
        ("mlp", {"grounded_heads": DROPPED}, {}, "grounded_heads is None"),
        ("mlp", {"hidden_state_offset": LAYERS + 1}, {}, "hidden_state_offset is 9"),
        ("mlp", {"hidden_state_offset": "1"}, {}, "hidden_state_offset is '1'"),
        ("mlp", {"hydra_num_heads": 5}, {}, "hydra_mlp.4.0.linear.weight"),
        ("mlp", {"hydra_num_heads": 3}, {}, "6 tensors that its configuration has no place for"),
        ("mlp", {"hydra_num_heads": "3"}, {}, "hydra_num_heads is '3'"),
        ("mlp", {"hydra_num_layers": 2}, {}, "hydra_mlp.0.1.linear.weight"),
        ("mlp", {}, {"hydra_lm_head.1.bias": None}, "hydra_lm_head.1.bias is not in"),
        ("mlp", {}, {"hydra_lm_head.1.weight": torch.ones(60, WIDTH)}, r"is \[60, 32\]"),
        ("mlp", {}, {"hydra_mlp.1.0.linear.weight": torch.ones(WIDTH, 64)}, r"is \[32, 64\]"),
        ("mlp", {}, {"more": torch.ones(1)}, "1 tensors that its configuration has no place for"),
        ("prefix", {}, {"prefix_embeding_layer.norm.weight": None}, "norm.weight is not in"),
        ("prefix", {}, {"input_embed_fn.weight": torch.ones(8, WIDTH)}, r"is \[8, 32\]"),
        ("once", {}, {"hydra_mlp.2.1.linear.bias": None}, "hydra_mlp.2.1.linear.bias is not in"),
    ],
)
def test_files_that_do_not_fit(
    name: str, change: Any, tensors: Any, found: str, tmp_path: Path
) -> None:
    with pytest.raises(HeadError, match=found) as raised:
        recognise(changed(tmp_path, name, change, tensors), of_target())
    assert raised.value.do


def test_targets_that_do_not_fit(tmp_path: Path) -> None:
    path = changed(tmp_path / "a", "prefix")
    with pytest.raises(HeadError, match="prefix layer, and the target, a target of type qwen3"):
        recognise(path, replace(of_target(), config=Qwen3Config()))
    with pytest.raises(HeadError, match=r"gate_proj.weight is \[48, 32\]"):
        recognise(path, of_target(intermediate_size=64))
    (tmp_path / "a" / "hydra_lm_head.safetensors").rename(tmp_path / "a" / "hydra_lm_head.pt")
    with pytest.raises(HeadError, match=r"its weights are pickled \(hydra_lm_head.pt\)"):
        recognise(path, of_target())
    (path / "config.json").write_text(json.dumps({"speculators_model_type": "hydra"}))
    save_file({"x": torch.ones(1)}, path / "model.safetensors")
    with pytest.raises(HeadError, match=r"Hydra .speculators_model_type hydra"):
        recognise(path, of_target())


@pytest.mark.parametrize("name", ["prefix", "mlp"])
def test_what_engines_hold(name: str, zoo: Zoo) -> None:
    """Heads of steps beside the program, an embedding once; and what steps read is counted."""
    rig = next(rig for rig in RIGS if rig.case == name)
    path, case = rig.engine(zoo), HYDRA_CASES[name]
    manifest = Engine.load(path).manifest
    assert manifest is not None
    stored = load_file(path / manifest.weights_file(manifest.models[1], None))
    assert manifest.memory_plan["draft_0"].weights == sum(x.nbytes for x in stored.values())
    floats = VOCAB * WIDTH + case.num_heads * VOCAB * (WIDTH + 1)
    for head in range(case.num_heads):
        floats += 2 * WIDTH * ((head + 2) * WIDTH + 1)
        floats += (case.num_layers > 1) * WIDTH * (WIDTH + 1)
    if case.has_prefix:
        size = WIDTH // HEADS
        floats += WIDTH * size * 2 * (HEADS + KV_HEADS) + 3 * WIDTH * INNER + 3 * WIDTH
    kept = {key: x for key, x in stored.items() if "rotary" not in key and "inv_freq" not in key}
    weights = sum(x.numel() for key, x in kept.items() if not key.startswith("constant"))
    assert weights == floats
    # rows that get logits are chosen before the first head, so prompts compute no head
    nodes = read_json(path / manifest.models[1].program_file)["graph"]["nodes"]
    targets = [node.get("target") for node in nodes]
    first = targets.index("aten.index_select.default")
    assert targets.count("aten.silu.default") == case.num_layers + case.has_prefix
    assert targets[first:].count("aten.silu.default") == case.num_layers
    step = read_json(path / "steps" / f"{TREE.name}.json")
    (draft,) = (stage for stage in step["stages"] if stage["name"] == "draft")
    targets = [node.get("target") for node in draft["graph"]["nodes"]]
    assert targets.count("aten.silu.default") == (TREE.max_depth - 1) * case.num_layers
