"""EAGLE-3 heads for the contract; files and formulas are in tests/heads.py, head_reference.py."""

from __future__ import annotations

from pathlib import Path

from specc.drafters.feature_head import FeatureHead
from tests.draft_kinds.rig import DraftRig, Said, opened
from tests.head_reference import Reference
from tests.heads import CASES, draw_tensors, write_head
from tests.lossless import Zoo
from tests.runtime.draft_cases import write_target
from tests.runtime.head_rig import HeadOracle


class EagleRig(DraftRig):
    cases = CASES
    prefix = "head"
    # K and V of 2 heads of 6, and what a token hands on
    said = Said(
        (2, 4, 5), "SafeAILab", width=24, cache_columns=2 * 2 * 6 + 24,
        lines=(
            "draft_0 is a head (eagle3, files of SafeAILab): it reads the target at boundaries 2,"
            " 4, 5, and was trained for 64 positions",
            "config.json names no layers",
        ),
    )  # fmt: skip

    def write(self, path: Path, case: str) -> object:
        return write_head(path, CASES[case])

    def oracle(self, zoo: Zoo, case: str = "", number: int = 0) -> HeadOracle:
        case = case or self.case
        target = opened(write_target(zoo))
        embedding = target.get_input_embeddings().weight.detach()
        return HeadOracle(
            target, Reference(CASES[case], draw_tensors(CASES[case]), embedding), number
        )

    def num_looked(self, oracle: HeadOracle) -> int:
        return oracle.num_nodes


RIGS = (EagleRig("eagle3", "safeailab-narrow", FeatureHead(0)),)
