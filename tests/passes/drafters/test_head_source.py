"""Heads as models to compile: weights of their own, and those that are their target's."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.artifact.weights import write_weights
from specc.errors import HeadError, WeightError
from specc.passes.drafters.feature_head import FeatureHead
from specc.passes.drafters.head_source import head_source, share_equal
from specc.passes.drafters.head_spec import EMBEDDING, HEAD, TargetFacts
from specc.passes.drafters.recognise import recognise
from specc.passes.drafters.registry import drafter_of_files
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.trace import trace
from specc.passes.pipeline import Pipeline
from tests import models
from tests.heads import CASES, LAYERS, VOCAB, WIDTH, config_of, draw_tensors, write_head

SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": VOCAB,
}  # fmt: skip
TARGET = TargetFacts("the target", WIDTH, LAYERS, VOCAB)


@pytest.mark.parametrize("is_tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_weights_are_those_of_both_checkpoints(is_tied, tmp_path):
    """A head that lacks its embedding and its head has the target's rows in its file."""
    models.save_tiny("llama", tmp_path / "target", tie_word_embeddings=is_tied, **SIZES)
    own = load_file(tmp_path / "target" / "model.safetensors")
    assert ("lm_head.weight" in own) == (not is_tied)
    case = dataclasses.replace(CASES["safeailab"], rows=VOCAB)
    tensors = write_head(tmp_path / "head", case)
    tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    spec = recognise(tmp_path / "head", TARGET)
    assert spec.shared == (EMBEDDING, HEAD)
    target = ModelSource.load("target", tmp_path / "target", torch.float32)
    source = head_source(spec, target, torch.float32)
    program = trace(
        source.module,
        "draft_0",
        rows=drafter_of_files(spec).rows(spec, torch.float32),
        hands_on=True,
    )
    Pipeline().run(program)
    write_weights(source.weight_specs(program), source.reader, tmp_path / "weights.safetensors")
    stored = load_file(tmp_path / "weights.safetensors")
    embedding = own["model.embed_tokens.weight"]
    assert torch.equal(stored[EMBEDDING], embedding)
    assert torch.equal(stored[HEAD], embedding if is_tied else own["lm_head.weight"])
    names = {name for weight in program.weights.values() for name in weight.parameters}
    assert names == dict(FeatureHead(spec).named_parameters()).keys()
    for weight in program.weights.values():
        parts = [spec.tensors[name] for name in weight.parameters if name in spec.tensors]
        if parts:
            assert torch.equal(stored[weight.key], torch.cat([tensors[name] for name in parts]))
    assert source.unread_tensors == ()


@pytest.mark.parametrize("changed", [None, EMBEDDING, HEAD])
def test_copies_of_the_targets_weights(changed, tmp_path):
    """What a head's files have of their own is the target's if it is so bit for bit."""
    models.save_tiny("llama", tmp_path / "target", **SIZES)
    own = load_file(tmp_path / "target" / "model.safetensors")
    case = dataclasses.replace(CASES["safeailab"], rows=VOCAB)
    tensors = write_head(tmp_path / "head", case)
    ends = {EMBEDDING: own["model.embed_tokens.weight"], HEAD: own["lm_head.weight"]}
    tensors |= {name: value.clone() for name, value in ends.items()}
    if changed is not None:
        # of the last number the last bit
        tensors[changed].view(torch.int32)[-1, -1] ^= 1
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    target = ModelSource.load("target", tmp_path / "target", torch.float32)
    source = head_source(recognise(tmp_path / "head", TARGET), target, torch.float32)
    assert source.head.shared == ()
    share_equal(source, target)
    assert set(source.head.shared) == ends.keys() - {changed}


def test_rounded_heads_of_dynamic_scaling(tmp_path):
    """Frequencies are those of every length up to the trained one; features have 16 bits, too."""
    layer = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    write_head(tmp_path, dataclasses.replace(CASES["safeailab-narrow"], layer=layer))
    spec = recognise(tmp_path, TARGET)
    assert (spec.rope.kind, spec.rope.trained_length) == ("dynamic", 64)
    target = ModelSource.of_shape("target", "", models.tiny_config("llama", **SIZES), torch.float32)
    source = head_source(spec, target, torch.bfloat16)
    program = trace(
        source.module,
        "draft_0",
        rows=drafter_of_files(spec).rows(spec, torch.bfloat16),
        hands_on=True,
    )
    Pipeline().run(program)
    (frequencies,) = (x for x in program.constants.values() if x.is_floating_point())
    torch.testing.assert_close(frequencies, 1000.0 ** -(torch.arange(0, 6, 2) / 6))
    found = [program.logits.meta["val"], program.handed_on.meta["val"]]
    assert [value.dtype for value in found] == [torch.bfloat16] * 2
    assert (source.max_position, source.location) == (None, str(tmp_path))


@pytest.mark.parametrize(("name", "is_head"), [("gemma3", False), ("phi", True)])
def test_targets_that_do_more_than_look_up_and_multiply(name, is_head, tmp_path):
    """Gemma scales its embedding, Phi adds to its logits: such a head has to have its own."""
    case = dataclasses.replace(CASES["safeailab"], rows=VOCAB)
    tensors = draw_tensors(case)
    if is_head:
        tensors[EMBEDDING] = torch.ones(VOCAB, WIDTH)
        tensors.pop(HEAD)
    (tmp_path / "config.json").write_text(json.dumps(config_of(case)))
    save_file(tensors, tmp_path / "model.safetensors")
    spec = recognise(tmp_path, TARGET)
    sizes = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"}
    target = ModelSource.of_shape("target", "", models.tiny_config(name, **sizes), torch.float32)
    with pytest.raises(HeadError, match="no plain one"):
        head_source(spec, target, torch.float32)


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    tensors = write_head(tmp_path, CASES["safeailab-narrow"])
    tensors["fc.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    spec = recognise(tmp_path, TARGET)
    target = ModelSource.of_shape("target", "", models.tiny_config("llama", **SIZES), torch.float32)
    source = head_source(spec, target, torch.float32)
    program = trace(
        source.module,
        "draft_0",
        rows=drafter_of_files(spec).rows(spec, torch.float32),
        hands_on=True,
    )
    with pytest.raises(WeightError, match=r"fc\.weight"):
        write_weights(source.weight_specs(program), source.reader, tmp_path / "weights")
