"""Targets whose checkpoints hold an MTP module, and that module as transformers computes it.

The tensors of a layer are those that transformers writes for a model of one layer more; what an MTP
module has beside it is drawn here, with norms that let no part go unnoticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import models
from tests.heads import VOCAB

LAYERS, WIDTH = 2, 64
# target → which names its checkpoint has for an MTP module
FORMS = {"glm4_moe": "DeepSeek", "deepseek_v3": "DeepSeek", "qwen3_next": "Qwen3-Next"}
# a target whose layers keep states, all but that of its module
HYBRID = "qwen3_next_hybrid"
_FORM = FORMS | {HYBRID: "Qwen3-Next"}
_NAMES = {
    "DeepSeek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "Qwen3-Next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}
# what transformers reads as of the MTP module, and what it needs to know of it
_PATTERN = {"DeepSeek": rf"^model\.layers\.{LAYERS}\.", "Qwen3-Next": r"^mtp\."}


def sizes_of(name: str, num_layers: int = LAYERS, vocab: int = VOCAB) -> dict[str, Any]:
    """Fields of a tiny configuration."""
    found: dict[str, Any] = {"vocab_size": vocab, "num_hidden_layers": num_layers}
    if name in ("qwen3_next", HYBRID):
        found["layer_types"] = ["full_attention"] * num_layers
    if name == HYBRID:
        found["layer_types"][0] = "linear_attention"
    return found


def write_target(
    name: str, directory: Path, has_own_ends: bool = False, vocab: int = VOCAB
) -> Path:
    """A tiny target with an MTP module.

    Args:
        name: of `FORMS`.
        has_own_ends: the module has an embedding and a head of its own.
        vocab: V.
    """
    models.save_tiny(name, directory, **sizes_of(name, vocab=vocab))
    with TemporaryDirectory() as other:
        deeper = models.save_tiny(
            name, Path(other) / "deeper", 3, **sizes_of(name, LAYERS + 1, vocab)
        )
        layer = load_file(deeper / "model.safetensors")
    first = f"model.layers.{LAYERS}."
    block = f"{first}" if _FORM[name] == "DeepSeek" else "mtp.layers.0."
    tensors = {
        block + key.removeprefix(first): value
        for key, value in layer.items()
        if key.startswith(first)
    }
    place = first if _FORM[name] == "DeepSeek" else "mtp."
    enorm, hnorm, project, norm = (place + key for key in _NAMES[_FORM[name]])
    generator = torch.Generator().manual_seed(17)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    # those of Qwen3-Next count from 1
    mean = 0.0 if _FORM[name] == "Qwen3-Next" else 1.0
    tensors |= {f"{key}.weight": mean + 0.4 * draw(WIDTH) for key in (enorm, hnorm, norm)}
    tensors[f"{project}.weight"] = 0.25 * draw(WIDTH, 2 * WIDTH)
    if has_own_ends:
        tensors[f"{first}embed_tokens.weight"] = 0.3 * draw(vocab, WIDTH)
        tensors[f"{first}shared_head.head.weight"] = 0.3 * draw(vocab, WIDTH)
    change_tensors(directory, lambda own: own | tensors)
    if _FORM[name] == "DeepSeek":
        change_config(directory, num_nextn_predict_layers=1)
    return directory


def change_tensors(directory: Path, change: Any) -> None:
    """Write the tensors of a checkpoint anew."""
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), str(file), metadata={"format": "pt"})


def change_config(directory: Path, **values: Any) -> None:
    """Set keys of config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@dataclass(frozen=True)
class TapsOfLast:
    """Where an MTP module reads its target, as `tests.heads.Case` says it of a head."""

    boundaries: tuple[int, ...] = (LAYERS,)


class MtpReference:
    """An MTP module by transformers: dense, every row from scratch.

    Args:
        target: of transformers, loaded from a directory of `write_target`.
        name: of `FORMS`.
        has_own_ends: the module has an embedding and a head of its own, which transformers, that
            takes the target's, does not read.
        ends: model whose embedding and head it has; None is the target.
    """

    def __init__(
        self, target: Any, name: str, has_own_ends: bool = False, ends: Any = None
    ) -> None:
        from transformers.modeling_layers import MtpModel

        self.case = TapsOfLast()
        target._keys_to_ignore_on_load_unexpected = [_PATTERN[_FORM[name]]]
        if _FORM[name] == "Qwen3-Next":
            target.config.num_mtp_layers = 1
            target.config.mtp_layer_types = ["full_attention"]
        self._module: Any = MtpModel.from_pretrained(target).eval()
        self._embedding = self._module.embed_tokens.weight
        self._head = self._module.shared_head.weight
        if ends is not None:
            self._embedding = ends.get_input_embeddings().weight.detach()
            self._head = ends.get_output_embeddings().weight.detach()
        if has_own_ends:
            own = load_file(Path(target.config.name_or_path) / "model.safetensors")
            first = f"model.layers.{LAYERS}."
            self._embedding = own[f"{first}embed_tokens.weight"]
            self._head = own[f"{first}shared_head.head.weight"]

    def project(self, taps: Tensor) -> Tensor:
        """[n, H]: hidden states are read as they are."""
        return taps

    @torch.no_grad()
    def run(self, g: Tensor, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What rows hand on [n, H], and their logits [n, V]."""
        embedded = self._embedding[list(ids)][None]
        # as of transformers, a row stands at the position of its token
        positions = torch.arange(1, len(ids) + 1)[None]
        handed_on = self._module.forward_layer(0, g[None], positions, None, inputs_embeds=embedded)
        return handed_on[0], handed_on[0] @ self._head.T

    def logits(self, taps: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """[V] logits after the last token of a path; see `tests.head_reference.Reference`."""
        g, ids = taps, list(tokens[1:])
        assert len(ids) == len(g)
        for token in path:
            g = torch.cat([g, self.run(g, ids)[0][-1:]])
            ids.append(token)
        return self.run(g, ids)[1][-1]


def tensor_names(directory: Path, pattern: str) -> list[str]:
    found = load_file(directory / "model.safetensors")
    return [name for name in found if re.search(pattern, name)]
