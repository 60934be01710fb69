"""Block drafters for the contract; files and formulas are in tests/block_heads.py and beside it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from specc.drafters.block import SELECTOR, VANILLA, BlockDraft
from specc.drafters.lilicorr import LiLiCorrDraft
from tests.block_heads import BLOCK_CASES, MASK, draw_tensors, write_block
from tests.block_reference import BlockReference
from tests.draft_kinds.rig import DraftRig, Said, opened
from tests.lossless import Zoo
from tests.runtime.block_rig import BlockOracle
from tests.runtime.draft_cases import write_target


class BlockRig(DraftRig):
    cases = BLOCK_CASES
    prefix = "block"
    # K and V of 2 layers, 2 heads of 8, and nothing else
    said = Said(
        (2, 5), "z-lab", ("embed_tokens.weight", "lm_head.weight"), cache_columns=2 * 2 * 2 * 8,
        lines=(
            "draft_0 is a block drafter (dflash, files of z-lab): it reads the target at",
            "blocks of 5 rows, of which each sees the others in both directions",
            f"4 tokens a pass; mask token {MASK}",
        ),
    )  # fmt: skip

    def write(self, path: Path, case: str) -> object:
        return write_block(path, BLOCK_CASES[case])

    def oracle(self, zoo: Zoo, case: str = "", number: int = 0) -> BlockOracle:
        target = opened(write_target(zoo))
        ends = (target.get_input_embeddings(), target.get_output_embeddings())
        weights = (end.weight.detach() for end in ends)
        return BlockOracle(target, self.reference(case or self.case, *weights), number)

    def reference(self, case: str, *ends: Tensor) -> BlockReference:
        """Formulas of a case.

        Args:
            ends: the target's embedding and head.
        """
        found = BLOCK_CASES[case]
        return BlockReference(found, draw_tensors(found), *ends)


class SparkRig(BlockRig):
    said = Said(
        (2, 5), "speculators", cache_columns=2 * 2 * 8,
        lines=("draft_0 is a block drafter (dspark, files of speculators)",),
    )  # fmt: skip


class SelectorRig(BlockRig):
    said = Said(
        (2, 5), "z-lab", ("embed_tokens.weight", "lm_head.weight"), cache_columns=2 * 2 * 2 * 8,
        lines=(
            "draft_0 is a block drafter (dflash2, files of z-lab): it reads the target at",
            "logits depend on the token before, times hidden states, among the 7 best of each row",
        ),
    )  # fmt: skip


class LiLiCorrRig(BlockRig):
    said = Said(
        (2, 5), "z-lab", ("embed_tokens.weight", "lm_head.weight"), cache_columns=2 * 2 * 2 * 8,
        lines=(
            "draft_0 is a block drafter (lilicorr, files of z-lab): it reads the target at",
            "a transformer of 2 layers over the 4 best tokens of each row scores what follows what",
        ),
    )  # fmt: skip


_SCORED = LiLiCorrDraft(
    5, 0, is_biased=True, draft="draft_0", kind="lilicorr", candidates=4, hidden_columns=32,
    num_layers=2, num_heads=3, inner_width=12, scale=6.0, norm_eps=1e-5, vector_eps=1e-6,
)  # fmt: skip
_SELECTED = BlockDraft(
    5, 0, is_biased=True, bias_kind=SELECTOR, draft="draft_0", candidates=7, hidden_columns=32
)
_BIASED = BlockDraft(5, 0, is_biased=True, bias_kind=VANILLA, draft="draft_0")
RIGS = (
    BlockRig("dflash", "z-lab", BlockDraft(5, 0, draft="draft_0")),
    SparkRig("dspark", "dspark-rnn", _BIASED),
    SelectorRig("dflash2", "dflash2", _SELECTED),
    LiLiCorrRig("lilicorr", "lilicorr", _SCORED),
)
