"""PARD models: ordinary checkpoints that say which token masks what comes next."""

from __future__ import annotations

from typing import Any

from specc.drafters.drafter import Drafter
from specc.drafters.pard import PardDraft
from specc.errors import HeadError
from specc.passes.drafters.block_pass import block_levels
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.drafters.lattice import Lattice
from specc.passes.frontend.config_numbers import whole_number
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import MAX_NODES

_KEY, _TYPE = "pard_token", "spd_type"
# of PARD-2: its own switch, and what says how hidden states are added to its tokens
_SECOND = ("pard2", "pard2_target_layers", "pard2_target_dim", "pard2_scale", "pard2_proj_bias")


class CompilerPard(CompilerDrafter):
    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        assert isinstance(drafter, PardDraft)
        return Lattice(drafter, block_levels(g, plan, drafter))

    def of_config(self, config: Any, name: str) -> PardDraft | None:
        if getattr(config, _KEY, None) is None:
            return None
        kind = getattr(config, _TYPE, None) or "pard"
        second = [key for key in _SECOND if getattr(config, key, None)]
        if kind != "pard" or second:
            said = second[0] if second else f"{_TYPE} {kind!r:.40}"
            raise HeadError(
                f"{name}: PARD-2 (config.json has {said})"
                if second or kind == "pard2"
                else f"{name}: {_KEY} and {said}",
                "a PARD model, which reads tokens alone",
                "pass such a model, a smaller one with the target's tokens, or --draft self:…",
            )
        mask, num_ids = whole_number(config, _KEY), whole_number(config, "vocab_size")
        given = getattr(config, _KEY)
        if type(given) is not int or not 0 <= mask < num_ids:
            raise HeadError(
                f"{name}: {_KEY} {given!r:.40}, and ids 0 … {num_ids - 1}",
                "a row of the model's own embedding, which it was trained to read as a mask",
                "correct config.json, or download the model again",
            )
        return PardDraft(MAX_NODES, mask)


DRAFTER = CompilerPard()
