"""EAGLE-3 and 3.1 heads (arXiv:2503.01840)."""

from __future__ import annotations

from dataclasses import replace

from specc.drafters.feature_head import FACTS as HEAD

FACTS = replace(
    HEAD,
    kind="eagle3",
    module="eagle3",
    methods=("eagle3",),
    assumes=("norm_before_residual", "tap_convention", "is_last_normed"),
)
