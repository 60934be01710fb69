"""What files of P-EAGLE heads say, and which are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specc.drafters.peagle import PeagleDraft
from specc.errors import HeadError
from specc.passes.drafters.head_spec import TargetFacts
from specc.passes.drafters.peagle_spec import PeagleSpec
from specc.passes.drafters.recognise import recognise
from specc.speculation.tree import MAX_NODES
from tests.draft_kinds.peagle import MASK, PEAGLE_CASES, write_peagle
from tests.heads import LAYERS, VOCAB, WIDTH

TARGET = TargetFacts("target", WIDTH, LAYERS, VOCAB)


def changed(
    path: Path, config: dict[str, Any], tensors: dict[str, Tensor], case: str = "vllm-peagle"
) -> Path:
    write_peagle(path, PEAGLE_CASES[case])
    file, weights = path / "config.json", path / "model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    kept = {key: x for key, x in (load_file(weights) | tensors).items() if x.numel()}
    save_file(kept, weights)
    return path


@pytest.mark.parametrize("case", PEAGLE_CASES)
def test_files_of_each_layout(case, tmp_path):
    write_peagle(tmp_path, PEAGLE_CASES[case])
    spec = recognise(tmp_path, TARGET)
    assert isinstance(spec, PeagleSpec)
    layout = "speculators" if case.startswith("speculators") else "SafeAILab"
    assert (spec.kind, spec.layout, spec.boundaries) == ("peagle", layout, (2, 4, 5))
    assert spec.drafter("draft_0") == PeagleDraft(MAX_NODES, MASK, draft="draft_0")
    assert not spec.hands_on
    assert any(f"mask token {MASK}" in line for line in spec.describe())


@pytest.mark.parametrize("key", ["pard_token", "mask_token_id"])
def test_what_else_masks_are_called(key, tmp_path):
    spec = recognise(changed(tmp_path, {"ptd_token_id": None, key: 9}, {}), TARGET)
    assert isinstance(spec, PeagleSpec)
    assert spec.mask_token_id == 9


@pytest.mark.parametrize(
    ("config", "tensors", "found"),
    [
        ({}, {"mask_hidden": torch.zeros(0)}, "mask_hidden is not in"),
        ({}, {"mask_hidden": torch.zeros(1, 64)}, r"mask_hidden is \[1, 64\]"),
        ({}, {"mask_hidden": torch.zeros(3, 32)}, r"mask_hidden is \[3, 32\]"),
        ({}, {"more": torch.zeros(3)}, "1 tensors that its configuration has no place for: more"),
        ({"ptd_token_id": None}, {}, "none of mask_token_id, pard_token, ptd_token_id"),
        ({"ptd_token_id": VOCAB}, {}, f"ptd_token_id {VOCAB}"),
        ({"ptd_token_id": "7"}, {}, "ptd_token_id '7'"),
        ({"pard_token": 8}, {}, "pard_token 8, ptd_token_id 7"),
    ],
)
def test_files_that_do_not_fit(config, tensors, found, tmp_path):
    with pytest.raises(HeadError, match=found) as raised:
        recognise(changed(tmp_path, config, tensors), TARGET)
    assert raised.value.needed
    assert raised.value.do


def test_a_head_without_masks_is_no_such_head(tmp_path):
    case = replace(PEAGLE_CASES["vllm-peagle"], config={"target_hidden_size": WIDTH})
    write_peagle(tmp_path, case)
    changed_tensors = load_file(tmp_path / "model.safetensors")
    del changed_tensors["mask_hidden"]
    save_file(changed_tensors, tmp_path / "model.safetensors")
    spec = recognise(tmp_path, TARGET)
    assert spec is not None
    assert spec.kind == "eagle3"
