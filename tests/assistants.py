"""Random Gemma 4 assistants in files as transformers writes them, and their formulas.

The formulas are dense and in float64: a node's logits are computed from the committed tokens and
its path alone, with keys and values of the target as transformers computes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import models
from tests.heads import HEADS, KV_HEADS, VOCAB, WIDTH

# of the targets of Gemma: layers that have the keys and values of others are the last two
GEMMA_LAYERS, SHARED, WINDOW, INNER, D = 6, 2, 8, 40, 24
FULL, SLIDING = "full_attention", "sliding_attention"
_EPS = 1e-6


@dataclass(frozen=True)
class AssistantCase:
    """An assistant to write.

    Args:
        target: `gemma4`, or `llama`, whose layers are all of one kind.
        kinds: of its layers.
        clusters: of ids, and how many of them get logits; 0 and 0 where all do.
        vocab: V.
        shared: layers of a target of Gemma that have keys and values of others.
    """

    target: str = "gemma4"
    kinds: tuple[str, ...] = (SLIDING, FULL, SLIDING, FULL)
    clusters: tuple[int, int] = (0, 0)
    vocab: int = VOCAB
    width: int = D
    shared: int = SHARED
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def head_dims(self) -> dict[str, int]:
        of_llama = {FULL: WIDTH // HEADS, SLIDING: WIDTH // HEADS}
        return of_llama if self.target == "llama" else {SLIDING: 16, FULL: 32}


ASSISTANT_CASES = {
    "plain": AssistantCase(),
    # as of E2B and E4B: logits of some clusters of ids
    "clusters": AssistantCase(clusters=(12, 4)),
    # as of 31B, whose target has keys and values of its own in every layer
    "unshared": AssistantCase(kinds=(SLIDING, SLIDING, FULL), shared=0),
    "llama": AssistantCase("llama", (FULL, FULL)),
}


def write_gemma(directory: Path, shared: int = SHARED, vocab: int = VOCAB) -> Path:
    """A target of Gemma 4 with layers of both kinds, the last of which have others' K and V."""
    return models.save_tiny(
        "gemma4",
        directory,
        vocab_size=vocab,
        vocab_size_per_layer_input=vocab,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=GEMMA_LAYERS,
        layer_types=[SLIDING, FULL] * (GEMMA_LAYERS // 2),
        num_kv_shared_layers=shared,
        sliding_window=WINDOW,
    )


def config_of(case: AssistantCase) -> dict[str, Any]:
    """Contents of config.json."""
    count, chosen = case.clusters
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    proportional = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    own = {
        "model_type": "gemma4_text",
        "hidden_size": case.width,
        "intermediate_size": INNER,
        "num_hidden_layers": len(case.kinds),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": case.head_dims[SLIDING],
        "global_head_dim": case.head_dims[FULL],
        "layer_types": list(case.kinds),
        "rope_parameters": {SLIDING: rope, FULL: proportional},
        "sliding_window": WINDOW,
        "rms_norm_eps": _EPS,
        "vocab_size": case.vocab,
        "max_position_embeddings": 256,
        "num_kv_shared_layers": len(case.kinds),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        # it is the target's, and nothing reads it
        "final_logit_softcapping": 5.0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": WIDTH,
        "use_ordered_embeddings": count > 0,
        "num_centroids": count or 2048,
        "centroid_intermediate_top_k": chosen or 32,
        "tie_word_embeddings": True,
        "text_config": own,
        **case.config,
    }


def draw_tensors(case: AssistantCase, seed: int = 0) -> dict[str, Tensor]:
    """Tensors by the names in files; no part is small."""
    generator = torch.Generator().manual_seed(90 + seed)

    def draw(scale: float, *shape: int, mean: float = 0.0) -> Tensor:
        return mean + torch.randn(shape, generator=generator) * scale

    d, found = case.width, {}
    for i, kind in enumerate(case.kinds):
        size, place = case.head_dims[kind], f"model.layers.{i}"
        found |= {
            f"{place}.self_attn.q_proj.weight": draw(0.3, HEADS * size, d),
            f"{place}.self_attn.q_norm.weight": draw(0.1, size, mean=0.3),
            f"{place}.self_attn.o_proj.weight": draw(0.3, d, HEADS * size),
            f"{place}.mlp.gate_proj.weight": draw(0.3, INNER, d),
            f"{place}.mlp.up_proj.weight": draw(0.3, INNER, d),
            f"{place}.mlp.down_proj.weight": draw(0.3, d, INNER),
            f"{place}.layer_scalar": draw(0.2, 1, mean=1.0),
        }
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            found[f"{place}.{norm}_layernorm.weight"] = draw(0.4, d, mean=1.0)
    found |= {
        "model.norm.weight": draw(0.4, d, mean=1.0),
        "model.embed_tokens.weight": draw(0.2, case.vocab, d),
        "pre_projection.weight": draw(0.2, d, 2 * WIDTH),
        "post_projection.weight": draw(0.3, WIDTH, d),
    }
    if case.clusters[0]:
        found["masked_embedding.centroids.weight"] = draw(0.4, case.clusters[0], d)
        order = torch.randperm(case.vocab, generator=generator)
        found["masked_embedding.token_ordering"] = order
    return found


def write_assistant(directory: Path, case: AssistantCase, seed: int = 0) -> dict[str, Tensor]:
    """Write an assistant; returns its tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(case)), encoding="utf-8")
    tensors = draw_tensors(case, seed)
    save_file(tensors, str(directory / "model.safetensors"))
    return tensors


class TargetRows:
    """Keys, values and hidden states of a target by transformers, in float64.

    Args:
        target: of transformers, in float64.
    """

    def __init__(self, target: Any) -> None:
        self.target, self.config = target, target.config
        self._known: dict[tuple[int, ...], tuple[dict[str, tuple[Tensor, Tensor]], Tensor]] = {}

    @property
    def embedding(self) -> Any:
        return self.target.get_input_embeddings()

    def of(self, tokens: Sequence[int]) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
        """Kind → K and V [HK, n, D] of its last layer, and hidden states [n, H]."""
        from transformers import DynamicCache

        key = tuple(tokens)
        if key not in self._known:
            # without the configuration no layer forgets what its window has left
            cache = DynamicCache()
            with torch.no_grad():
                found = self.target.base_model(
                    torch.tensor([list(key)]), past_key_values=cache, use_cache=True
                )
            kinds = getattr(self.config, "layer_types", None) or [FULL] * len(cache.layers)
            layers = range(len(kinds) - getattr(self.config, "num_kv_shared_layers", 0))
            rows = {kinds[i]: (cache.layers[i].keys[0], cache.layers[i].values[0]) for i in layers}
            self._known[key] = rows, found.last_hidden_state[0]
        return self._known[key]


class AssistantReference:
    """Logits after a path, in float64.

    Args:
        case: of the assistant.
        tensors: of its file.
        rows: of its target.
    """

    def __init__(
        self, case: AssistantCase, tensors: Mapping[str, Tensor], rows: TargetRows
    ) -> None:
        self.case, self.rows = case, rows
        self._tensors = {
            key: x if x.dtype == torch.int64 else x.double() for key, x in tensors.items()
        }
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    def logits(self, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """[V] after the tokens of a sequence, of which the last is not committed, and a path."""
        return self._row(tuple(tokens), tuple(path))[0]

    def _row(self, tokens: tuple[int, ...], path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Logits of the last token, and what it hands on."""
        if (tokens, path) not in self._known:
            shared, hidden = self.rows.of(tokens[:-1])
            above = hidden[-1] if not path else self._row(tokens, path[:-1])[1]
            self._known[tokens, path] = self._compute((*tokens, *path)[-1], above, shared)
        return self._known[tokens, path]

    def _compute(
        self, token: int, above: Tensor, shared: dict[str, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        of = self._tensors
        with torch.no_grad():
            embedded = self.rows.embedding(torch.tensor([token]))[0].double()
        x = of["pre_projection.weight"] @ torch.cat([embedded, above])
        for i, kind in enumerate(self.case.kinds):
            place = f"model.layers.{i}"
            y = self._norm(x, f"{place}.input_layernorm")
            y = self._attend(y, f"{place}.self_attn", kind, *shared[kind])
            x = x + self._norm(y, f"{place}.post_attention_layernorm")
            y = self._norm(x, f"{place}.pre_feedforward_layernorm")
            gate = of[f"{place}.mlp.gate_proj.weight"] @ y
            gate = torch.nn.functional.gelu(gate, approximate="tanh")
            y = of[f"{place}.mlp.down_proj.weight"] @ (
                gate * (of[f"{place}.mlp.up_proj.weight"] @ y)
            )
            x = x + self._norm(y, f"{place}.post_feedforward_layernorm")
            x = x * of[f"{place}.layer_scalar"]
        y = self._norm(x, "model.norm")
        logits = of["model.embed_tokens.weight"] @ y
        if (chosen := self.case.clusters[1]) > 0:
            best = (of["masked_embedding.centroids.weight"] @ y).topk(chosen).indices
            order = of["masked_embedding.token_ordering"].view(self.case.clusters[0], -1)
            kept = torch.zeros(len(logits), dtype=torch.bool)
            kept[order[best].flatten()] = True
            logits = logits.masked_fill(~kept, float("-inf"))
        return logits, of["post_projection.weight"] @ y

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x * (x.pow(2).mean(-1, keepdim=True) + _EPS).rsqrt() * self._tensors[f"{name}.weight"]
        )

    def _attend(self, x: Tensor, name: str, kind: str, keys: Tensor, values: Tensor) -> Tensor:
        """The root's position is the number of committed tokens, and a window counts from the last
        of them: so many are that far away, or less.
        """
        size, length = self.case.head_dims[kind], keys.shape[1]
        q = (self._tensors[f"{name}.q_proj.weight"] @ x).view(HEADS, size)
        q = self._rotated(self._norm(q, f"{name}.q_norm"), kind, length)
        first = max(0, length - 1 - WINDOW) if kind == SLIDING else 0
        out = []
        for head in range(HEADS):
            k, v = (rows[head * KV_HEADS // HEADS, first:].double() for rows in (keys, values))
            out.append((q[head] @ k.T).softmax(-1) @ v)
        return self._tensors[f"{name}.o_proj.weight"] @ torch.cat(out)

    def _rotated(self, q: Tensor, kind: str, position: int) -> Tensor:
        size = q.shape[-1]
        theta, share = (10000.0, 1.0) if kind == SLIDING else (1e6, 0.25)
        count = int(share * size // 2)
        angles = torch.zeros(size // 2, dtype=torch.float64)
        angles[:count] = theta ** (-2 * torch.arange(count).double() / size)
        angles = angles * position
        first, second = q.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def double(path: Path) -> Any:
    """A target as transformers runs it, in float64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
