"""Every kind of draft that reads hidden states, beside a target whose layers keep states.

See `test_contract.py`: an oracle looks at every pass, node and row; outputs are those without it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from specc.runtime.core import EngineCore
from tests import models
from tests.draft_kinds.rig import DraftRig, all_rigs
from tests.lossless import Zoo
from tests.runtime.draft_cases import SIZES
from tests.runtime.head_rig import BLOCK, TREE, load, prompts_of, serve

_KINDS = ("rig", "eagle3", "peagle", "block", "medusa", "test_hydra")
# MTP modules and assistants have targets of their own, see `test_hybrid_architectures.py`; heads
# with an attention layer before Hydra's are for Llama alone
RIGS = [rig for rig in all_rigs() if rig.kind not in ("mtp", "gemma4_assistant", "hydra_prefix")]
_LAYERS = ["conv", "full_attention"] * (SIZES["num_hidden_layers"] // 2)


def write_hybrid(zoo: Zoo) -> Path:
    """The checkpoint of a target of the same sizes as that of `test_contract.py`."""
    sizes: dict[str, Any] = SIZES | {"layer_types": _LAYERS}
    return zoo.once("head-hybrid", lambda path: models.save_tiny("lfm2", path, **sizes))


@pytest.mark.default("eagle3-safeailab-narrow")
@pytest.mark.parametrize("rig", RIGS, ids=str)
def test_logits_rows_and_outputs(rig: DraftRig, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _KINDS:
        module = importlib.import_module(f"tests.draft_kinds.{name}")
        monkeypatch.setattr(module, "write_target", write_hybrid)
    engine = load(rig.engine(zoo, label="hybrid"))
    assert engine.cache.states is not None
    core, oracle = EngineCore(engine, TREE.name), rig.oracle(zoo)
    oracle.watch(core)
    found = serve(core, oracle, prompts_of(BLOCK)[1:4], num_tokens=6)
    assert rig.num_looked(oracle) > 5
    assert oracle.num_rows > 5
    solo = EngineCore(engine, "off", shares_prefixes=False)
    for request in found:
        plain = solo.requests.make(request.token_ids[: request.num_prompt_tokens], request.params)
        solo.scheduler.add(plain)
        while not plain.is_finished:
            solo.advance()
        assert request.output_token_ids == plain.output_token_ids
