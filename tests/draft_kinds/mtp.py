"""MTP modules for the contract; files and formulas are in tests/mtp.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.drafters.feature_head import FeatureHead
from tests import engines
from tests.draft_kinds.rig import DraftRig, Said, opened
from tests.lossless import Zoo
from tests.mtp import FORMS, LAYERS, WIDTH, MtpReference, write_target
from tests.runtime.head_rig import HeadOracle, options


def with_module(target: Path, _: Sequence[Path], path: Path, config: CompileConfig) -> object:
    """Compile a target with the module in its own checkpoint."""
    return build(target, "mtp", path, config)


class MtpRig(DraftRig):
    cases = FORMS
    prefix = "mtp"
    said = Said(
        (LAYERS,), "DeepSeek", ("embed_tokens.weight", "lm_head.weight"), True, WIDTH, None,
        lines=(
            "(mtp, files of DeepSeek)",
            f"boundaries {LAYERS}, the last after the final norm",
            "embed_tokens.weight and lm_head.weight",
        ),
    )  # fmt: skip

    def target(self, zoo: Zoo, case: str) -> Path:
        return zoo.once(f"mtp-{case}", lambda path: write_target(case, path))

    def draft(self, zoo: Zoo, case: str) -> Any:
        return "mtp"

    def compile(self, zoo: Zoo, case: str, path: Path, **changes: Any) -> object:
        config, target = options(**changes), self.target(zoo, case)
        return engines.build(target, (), path, config, builder=with_module, key=("mtp",))

    def oracle(self, zoo: Zoo, case: str = "", number: int = 0) -> HeadOracle:
        case = case or self.case
        target = opened(self.target(zoo, case))
        return HeadOracle(target, MtpReference(target, case), number)

    def num_looked(self, oracle: HeadOracle) -> int:
        return oracle.num_nodes


RIGS = (
    MtpRig("mtp", "glm4_moe", FeatureHead(0)),
    MtpRig("mtp", "qwen3_next", FeatureHead(0), is_first=False),
)
