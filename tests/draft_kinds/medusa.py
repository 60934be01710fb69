"""Medusa heads for the contract; files and formulas are in tests/medusa_heads.py."""

from __future__ import annotations

from pathlib import Path

from specc.drafters.medusa import MedusaHeads
from tests.draft_kinds.rig import DraftRig, Said, opened
from tests.heads import LAYERS
from tests.lossless import Zoo
from tests.medusa_heads import MEDUSA_CASES, MedusaReference, draw_tensors, write_medusa
from tests.runtime.block_rig import MedusaOracle
from tests.runtime.draft_cases import write_target


class MedusaRig(DraftRig):
    cases = MEDUSA_CASES
    prefix = "medusa"
    said = Said(
        (LAYERS,), "vLLM", is_last_normed=True,
        lines=(
            "draft_0 is a set of Medusa heads (medusa, files of vLLM): it reads the target",
            "4 heads read one row: 4 tokens a pass",
        ),
    )  # fmt: skip

    def write(self, path: Path, case: str) -> object:
        return write_medusa(path, MEDUSA_CASES[case])

    def oracle(self, zoo: Zoo, case: str = "", number: int = 0) -> MedusaOracle:
        found = MEDUSA_CASES[case or self.case]
        reference = MedusaReference(found, draw_tensors(found))
        return MedusaOracle(opened(write_target(zoo)), reference, number)


RIGS = (MedusaRig("medusa", "vllm", MedusaHeads(4, draft="draft_0")),)
