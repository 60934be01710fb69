"""PARD models for the contract: ordinary checkpoints, and transformers' own pass over masks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specc.drafters.pard import PardDraft
from specc.runtime.scheduling.request import Request
from tests import models
from tests.draft_kinds.rig import DraftRig, opened
from tests.heads import VOCAB
from tests.lossless import Zoo
from tests.runtime.block_rig import BlockOracle

# deeper than any tree of the contract
MOST = 6
MASK = 5
_SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
# name → kind of model, and its configuration
PARD_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"pard_token": MASK, "vocab_size": VOCAB}),
    # the mask is none of the target's ids
    "qwen3-padded": (
        "qwen3",
        {"pard_token": VOCAB + 3, "vocab_size": VOCAB + 8, "spd_type": "pard", "head_dim": 8},
    ),
    # its layers see the last rows alone
    "mistral": ("mistral", {"pard_token": MASK, "vocab_size": VOCAB, "sliding_window": 7}),
}


def write_pard(path: Path, case: str) -> object:
    kind, config = PARD_CASES[case]
    return models.save_tiny(kind, path, 31, **_SIZES, **config)


class PardReference:
    """A model as transformers runs it, without a cache: a text, its newest token, and masks."""

    def __init__(self, model: Any, vocab: int = VOCAB) -> None:
        self.model, self.vocab = model, vocab
        self.case = SimpleNamespace(
            num_layers=model.config.num_hidden_layers, confidence="", from_anchor=True
        )

    @torch.no_grad()
    def proposed(self, tokens: Tensor, root: int) -> Tensor:
        """[MOST, V] logits of the tokens after a root."""
        masks = [self.model.config.pard_token] * (MOST - 1)
        text = torch.tensor([[*tokens.tolist(), root, *masks]])
        return self.model(text, use_cache=False).logits[0, -MOST:, : self.vocab]

    def after(self, tokens: Tensor, root: int, path: Sequence[int]) -> Tensor:
        """[V] after drafted tokens, which change nothing."""
        return self.proposed(tokens, root)[len(path)]

    @torch.no_grad()
    def kept(self, tokens: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a text, [n, HK, D]."""
        from transformers import DynamicCache

        # without the configuration, nothing is cut off by windows
        found = self.model(tokens[None], past_key_values=DynamicCache()).past_key_values
        own = found.layers[layer]
        return own.keys[0].transpose(0, 1), own.values[0].transpose(0, 1)


class PardOracle(BlockOracle):
    """Its context is tokens, in place of the target's hidden states."""

    def taps(self, request: Request, count: int) -> Tensor:
        return torch.tensor(request.token_ids[:count])


class PardRig(DraftRig):
    cases = PARD_CASES
    prefix = "pard"

    def write(self, path: Path, case: str) -> object:
        return write_pard(path, case)

    def oracle(self, zoo: Zoo, case: str = "", number: int = 0) -> PardOracle:
        model = opened(self.draft(zoo, case or self.case))
        return PardOracle(None, PardReference(model), number)


_SAMPLE = PardDraft(8, MASK, draft="draft_0")
RIGS = (PardRig("pard", "qwen3-padded", _SAMPLE), PardRig("pard", "llama", _SAMPLE, False))
