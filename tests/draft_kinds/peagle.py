"""P-EAGLE heads for the contract: files of both layouts, and their formulas.

A row of masks pairs the mask's embedding with a vector in place of hidden states, at the place of
the token that it stands for; else it is a row of EAGLE-3 (`tests/head_reference.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specc.drafters.peagle import PeagleDraft
from specc.runtime.scheduling.request import Request
from tests.draft_kinds.rig import DraftRig, Said, opened
from tests.head_reference import Reference
from tests.heads import WIDTH, Case, config_of, draw_tensors, write_files
from tests.lossless import Zoo
from tests.runtime.block_rig import BlockOracle
from tests.runtime.draft_cases import write_target

# deeper than any tree of the contract
MOST = 6
MASK = 7
_SPECULATORS = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "mask_token_id": MASK,
    "norm_before_residual": True,
}
PEAGLE_CASES = {
    "vllm-peagle": Case(
        "SafeAILab",
        width=24,
        config={
            "architectures": ["LlamaForCausalLMEagle3"],
            "ptd_token_id": MASK,
            "parallel_drafting": True,
            "target_hidden_size": WIDTH,
        },
    ),
    "speculators-peagle": Case(
        "speculators", config={**_SPECULATORS, "fc_norm": True, "norm_output": True}, num_layers=2
    ),
    "speculators-peagle-sliding": Case(
        "speculators",
        width=24,
        config={**_SPECULATORS, "norm_before_fc": True, "target_hidden_size": WIDTH},
        layer={"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4},
        num_layers=2,
        model_type="qwen3",
    ),
}


def draw_peagle(case: Case) -> dict[str, Tensor]:
    """Tensors of the checkpoint."""
    columns = len(case.boundaries) * WIDTH
    shape = (1, 1, columns) if case.layout == "speculators" else (1, columns)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    return {**draw_tensors(case), "mask_hidden": mask}


def write_peagle(path: Path, case: Case) -> dict[str, Tensor]:
    return write_files(path, config_of(case), draw_peagle(case))


class Read(NamedTuple):
    """Hidden states [n, A · H] of tokens, and these [n + 1 or more]."""

    taps: Tensor
    tokens: list[int]


class PeagleReference(Reference):
    """A head, dense and without a cache."""

    def proposed(self, read: Read, root: int) -> Tensor:
        """[MOST, V] logits of the tokens after a root, whose own hidden states are not known."""
        mask = self.project(self.w["mask_hidden"].view(1, -1))
        g = torch.cat([self.project(read.taps), mask.expand(MOST - 1, -1)])
        mask_id = self.case.config.get("mask_token_id", MASK)
        ids = [*read.tokens[1 : len(read.taps)], root, *[mask_id] * (MOST - 1)]
        return self.run(g, ids)[1][-MOST:]

    def after(self, read: Read, root: int, path: Sequence[int]) -> Tensor:
        """[V] after drafted tokens, which change nothing."""
        return self.proposed(read, root)[len(path)]


class PeagleOracle(BlockOracle):
    def taps(self, request: Request, count: int) -> Any:
        return Read(super().taps(request, count), request.token_ids)

    def check_rows(self, engine: Any, request: Request) -> None:
        """Keys and values of all rows that pair hidden states with a token."""
        count = request.draft_lens[self.number] - self.rows_behind
        if count < 1:
            return
        read = self.taps(request, count)
        self.reference.run(self.reference.project(read.taps), read.tokens[1 : count + 1])
        kept = [self.reference.kept[layer] for layer in range(self.num_cached)]
        self.compare_rows(engine, request, kept, count)


class PeagleRig(DraftRig):
    cases = PEAGLE_CASES
    prefix = "peagle"
    # K and V of 2 heads of 6
    said = Said(
        (2, 4, 5), "SafeAILab", cache_columns=2 * 2 * 6,
        lines=(
            "draft_0 is a P-EAGLE head (peagle, files of SafeAILab): it reads the target at"
            " boundaries 2, 4, 5, and was trained for 64 positions",
            f"masks after the newest token propose all levels of a tree in one pass; mask token"
            f" {MASK}",
        ),
    )  # fmt: skip

    def write(self, path: Path, case: str) -> object:
        return write_peagle(path, PEAGLE_CASES[case])

    def oracle(self, zoo: Zoo, case: str = "", number: int = 0) -> PeagleOracle:
        found = PEAGLE_CASES[case or self.case]
        target = opened(write_target(zoo))
        embedding = target.get_input_embeddings().weight.detach()
        reference = PeagleReference(found, draw_peagle(found), embedding)
        return PeagleOracle(target, reference, number, rows_behind=1)


_SAMPLE = PeagleDraft(8, MASK, draft="draft_0")
RIGS = (
    PeagleRig("peagle", "vllm-peagle", _SAMPLE),
    PeagleRig("peagle", "speculators-peagle", _SAMPLE, False),
)
