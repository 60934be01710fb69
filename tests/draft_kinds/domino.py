"""Domino drafters for the contract: files, formulas, and a rig.

The recurrent state is torch's own GRU, over all tokens of a path at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specc.drafters.domino import DominoDraft
from tests.block_heads import MASK, BlockCase, config_of, draw_tensors
from tests.block_reference import BlockReference
from tests.draft_kinds.block import BlockRig
from tests.draft_kinds.rig import Said
from tests.heads import LAYERS, write_files


@dataclass(frozen=True)
class DominoCase(BlockCase):
    """A drafter whose GRU has `state` columns, and its correction `joint`."""

    layout: str = "z-lab"
    kind: str = "domino"
    state: int = 6
    joint: int = 7
    # all keys are at the top of config.json
    is_flat: bool = False

    @property
    def hidden_columns(self) -> int:
        return self.width

    def written(self) -> dict[str, Any]:
        """Contents of config.json."""
        config = config_of(self)
        own = {
            "projector_type": "domino", "shift_label": self.from_anchor,
            "pure_draft_prefix_len": 1, "gru_hidden_dim": self.state, "emb_dim": self.joint,
        }  # fmt: skip
        (config if self.is_flat else config["dflash_config"]).update(own)
        return config

    def tensors(self) -> dict[str, Tensor]:
        shapes = {
            "prefix_gru.weight_ih_l0": (3 * self.state, self.width),
            "prefix_gru.weight_hh_l0": (3 * self.state, self.state),
            "embed_proj.0.weight": (self.joint, self.width + self.state),
            "embed_proj.2.weight": (self.rows, self.joint),
        }
        generator = torch.Generator().manual_seed(8)
        own = {key: 0.7 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        return draw_tensors(self) | own


DOMINO_CASES = {
    # a block of B proposes B - 1 tokens, wherever it begins
    "domino": DominoCase(from_anchor=True, config={"block_size": 5, "num_target_layers": LAYERS}),
    "domino-masks": DominoCase(
        nested={"block_size": 5, "causal": True}, num_layers=1, is_causal=True, is_flat=True
    ),
}


def write_domino(path: Path, case: DominoCase) -> dict[str, Tensor]:
    return write_files(path, case.written(), case.tensors())


class DominoReference(BlockReference):
    """With s of all tokens from the anchor on: U_1, then U_k + W₂ silu(W₁ [z_k; s])."""

    def after(self, taps: Tensor, anchor: int, path: Sequence[int]) -> Tensor:
        case = self.case
        logits = self.proposed(taps, anchor)[len(path)]
        if not path:
            return logits
        gru = nn.GRU(case.width, case.state, bias=False, batch_first=True)  # type: ignore[attr-defined]
        own = {name: self.w[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")}
        gru.load_state_dict(own)
        with torch.no_grad():
            _, state = gru(self.w["embed_tokens.weight"][[anchor, *path]][None])
        z = self.hidden(taps, anchor)[len(path) + (not case.from_anchor)]
        joint = F.silu(self.linear("embed_proj.0", torch.cat([z, state[0, 0]])))
        logits[self.ids] += self.linear("embed_proj.2", joint)
        return logits


class DominoRig(BlockRig):
    cases = DOMINO_CASES
    prefix = "domino"
    said = Said(
        (2, 5), "z-lab", ("embed_tokens.weight", "lm_head.weight"), cache_columns=2 * 2 * 2 * 8,
        lines=(
            "draft_0 is a block drafter (domino, files of z-lab): it reads the target at",
            f"4 tokens a pass; mask token {MASK}; a recurrent state of 6 columns",
        ),
    )  # fmt: skip

    def write(self, path: Path, case: str) -> object:
        return write_domino(path, DOMINO_CASES[case])

    def reference(self, case: str, *ends: Tensor) -> BlockReference:
        found = DOMINO_CASES[case]
        return DominoReference(found, found.tensors(), *ends)


_SAMPLE = DominoDraft(
    5, 0, True, is_biased=True, draft="draft_0", kind="domino", hidden_columns=32, inner_width=6
)
RIGS = (DominoRig("domino", "domino", _SAMPLE),)
