"""What makes an ordinary checkpoint a PARD model, and what it does not go with."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specc.artifact.backends import facts_of
from specc.compile_request import CompileRequest
from specc.config import CompileConfig
from specc.drafters.pard import PardDraft
from specc.errors import ConfigError, HeadError
from specc.passes.drafters.head_spec import TargetFacts
from specc.passes.drafters.recognise import recognise
from specc.passes.drafters.registry import drafter_of_config
from specc.refusals import refuse
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import MAX_NODES


def of(**config: Any) -> Any:
    return drafter_of_config(SimpleNamespace(vocab_size=96, **config), "D/")


def test_a_mask_makes_a_model_one(tmp_path):
    assert of() is of(pard_token=None) is None
    assert of(pard_token=95) == of(pard_token=95, spd_type="pard") == PardDraft(MAX_NODES, 95)
    # for readers of heads it is an ordinary model
    config = {"pard_token": 3, "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert recognise(tmp_path, TargetFacts("target", 32, 8, 96)) is None


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"pard_token": 96}, "pard_token 96, and ids 0 … 95"),
        # of models that were saved before they were trained
        ({"pard_token": -1}, "pard_token -1"),
        ({"pard_token": "3"}, "pard_token '3'"),
        ({"pard_token": True}, "pard_token True"),
        ({"pard_token": 3, "spd_type": "pard2"}, r"PARD-2 \(config.json has spd_type 'pard2'\)"),
        ({"pard_token": 3, "pard2_target_layers": [3]}, "PARD-2 .*pard2_target_layers"),
        ({"pard_token": 3, "pard2": True}, r"PARD-2 \(config.json has pard2\)"),
        ({"pard_token": 3, "spd_type": "tree"}, "pard_token and spd_type 'tree'"),
    ],
)
def test_configurations_that_do_not_fit(config, found):
    with pytest.raises(HeadError, match=found) as raised:
        of(**config)
    assert raised.value.needed
    assert raised.value.do


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"backend": facts_of("onnx")}, r"a PARD model \(draft_0\), and the backend onnx"),
        ({"mapped": ("draft_0",)}, r"a PARD model \(draft_0\), and draft_0, whose tokens are"),
    ],
)
def test_what_it_does_not_go_with(changes, found):
    plan = SpecPlan.from_widths((1, 1), (PardDraft(8, 5, draft="draft_0"),))
    asked = {"backend": facts_of("cpu"), **changes}
    with pytest.raises(ConfigError, match=found):
        refuse(CompileRequest(CompileConfig(), [plan], **asked))
