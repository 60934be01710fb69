"""Random checkpoints of Medusa heads, in the layouts that are published, and their formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.heads import VOCAB, WIDTH


@dataclass(frozen=True)
class MedusaCase:
    """Heads to write.

    Args:
        layout: `vLLM` or `FasterDecoding`.
        num_heads: D.
        num_layers: L.
        kept: ids that the heads propose.
        rows: of a projection.
        vocab: V.
        boundaries: where the target is read: after its last layer, and its final norm.
        has_bias: of layers.
        has_one: all heads have one projection.
        confidence: nothing, as block drafters without a head that estimates acceptance.
    """

    layout: str
    num_heads: int = 4
    num_layers: int = 1
    kept: int = VOCAB
    rows: int = VOCAB
    vocab: int = VOCAB
    boundaries: tuple[int, ...] = (8,)
    prefix: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    has_bias: bool = True
    has_one: bool = False
    file: str = "model.safetensors"
    confidence: str = ""


MEDUSA_CASES = {
    "vllm": MedusaCase("vLLM", kept=60, rows=60, num_layers=2, prefix="medusa_heads."),
    # projections of all ids, of which the map names some; one projection for all heads
    "vllm-one": MedusaCase("vLLM", 3, kept=60, has_bias=False, has_one=True),
    "faster": MedusaCase("FasterDecoding", num_layers=2, prefix="medusa_head."),
    "faster-file": MedusaCase("FasterDecoding", 3, file="medusa_lm_head.safetensors"),
}


def write_medusa(directory: Path, case: MedusaCase, seed: int = 0) -> dict[str, Tensor]:
    """Write heads; returns their tensors, by the names of `draw_tensors`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(case)), encoding="utf-8")
    tensors = draw_tensors(case, seed)
    write_tensors(directory, case, tensors)
    return tensors


def write_tensors(directory: Path, case: MedusaCase, tensors: dict[str, Tensor]) -> None:
    """Write tensors under the names that the layout has for them."""
    stored = {name_of(case, key): value for key, value in tensors.items()}
    save_file(stored, str(directory / case.file))


def config_of(case: MedusaCase) -> dict[str, Any]:
    """Contents of config.json."""
    if case.layout == "FasterDecoding":
        sizes = {"medusa_num_heads": case.num_heads, "medusa_num_layers": case.num_layers}
        return {"base_model_name_or_path": "T/", **sizes, **case.config}
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": WIDTH,
        "vocab_size": case.vocab,
        "num_heads": case.num_heads,
        "num_hidden_layers": case.num_layers,
        **({"truncated_vocab_size": case.kept} if case.kept < case.vocab else {}),
        **({"medusa_fc_bias": True} if case.has_bias else {}),
        **({"original_lm_head": True} if case.has_one else {}),
        **case.config,
    }


def name_of(case: MedusaCase, key: str) -> str:
    """Name in the checkpoint of `w.j.l`, `b.j.l`, `out.j` or `ids`."""
    kind, *places = key.split(".")
    kinds = {"w": "weight", "b": "bias"}
    if kind == "ids":
        own = "token_map"
    elif case.layout == "FasterDecoding":
        head, *layer = places
        own = f"{head}.{layer[0]}.linear.{kinds[kind]}" if layer else ""
        own = own or f"{head}.{case.num_layers}.weight"
    elif kind == "out":
        own = "lm_head.weight" if case.has_one else f"lm_heads.{places[0]}.weight"
    else:
        own = f"blocks.{places[0]}.layers.{places[1]}.{kinds[kind]}"
    return case.prefix + own


def draw_tensors(case: MedusaCase, seed: int = 0) -> dict[str, Tensor]:
    """Tensors drawn from the seed; no layer is small, and rows of the map are in no order."""
    generator = torch.Generator().manual_seed(90 + seed)
    tensors: dict[str, Tensor] = {}
    for head in range(case.num_heads):
        for layer in range(case.num_layers):
            tensors[f"w.{head}.{layer}"] = torch.randn(WIDTH, WIDTH, generator=generator) * 0.3
            if case.has_bias:
                tensors[f"b.{head}.{layer}"] = torch.randn(WIDTH, generator=generator)
        if head == 0 or not case.has_one:
            tensors[f"out.{head}"] = torch.randn(case.rows, WIDTH, generator=generator) * 0.4
    if case.kept < case.vocab:
        tensors["ids"] = torch.randperm(case.vocab, generator=generator)[: case.kept]
    return tensors


class MedusaReference:
    """Heads by their formulas: x = x + silu(W x + b), logits = U x, of one row h.

    Args:
        tensors: of `draw_tensors`.
    """

    def __init__(self, case: MedusaCase, tensors: dict[str, Tensor]) -> None:
        self.case, self.w = case, tensors

    def proposed(self, taps: Tensor, anchor: int) -> Tensor:
        """[D, V] logits of the tokens after an anchor, from what is known before it.

        Args:
            taps: [n, H] final hidden states of the target for all tokens before it.
            anchor: the newest token, which no head reads.
        """
        logits = torch.full((self.case.num_heads, self.case.vocab), float("-inf"))
        for head in range(self.case.num_heads):
            x = taps[-1]
            for layer in range(self.case.num_layers):
                y = self.w[f"w.{head}.{layer}"] @ x + self.w.get(f"b.{head}.{layer}", 0.0)
                x = x + y / (1 + torch.exp(-y))
            own = self.w[f"out.{0 if self.case.has_one else head}"] @ x
            ids = self.w.get("ids", torch.arange(self.case.vocab))
            logits[head, ids] = own if len(own) == len(ids) else own[ids]
        return logits

    def after(self, taps: Tensor, anchor: int, path: Sequence[int]) -> Tensor:
        """[V] logits of the token after a path of drafted ones; see `proposed`."""
        return self.proposed(taps, anchor)[len(path)]
