"""MTP modules in a target's own checkpoint (arXiv:2412.19437 §2.2)."""

from __future__ import annotations

from dataclasses import replace

from specc.drafters.feature_head import FACTS as HEAD

FACTS = replace(
    HEAD,
    kind="mtp",
    called="MTP module",
    module="mtp",
    is_of_target=True,
    methods=("mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp"),
    assumes=("is_last_normed",),
)
