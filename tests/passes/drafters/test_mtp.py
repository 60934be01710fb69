"""MTP modules in checkpoints of targets: what is read of them, and what they compute."""

from __future__ import annotations

import random
import re

import pytest
import torch
from safetensors.torch import load_file

from specc.artifact.safetensors_io import SafetensorsReader
from specc.artifact.weights import write_weights
from specc.errors import HeadError, WeightError
from specc.passes.drafters.head_spec import EMBEDDING, HEAD, HeadSwitches, TargetFacts
from specc.passes.drafters.mtp_source import mtp_source
from specc.passes.drafters.mtp_spec import recognise_mtp
from specc.passes.drafters.registry import drafter_of_files
from specc.passes.frontend import hf_model
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.trace import trace
from specc.passes.pipeline import Pipeline
from tests.head_reference import hidden_states
from tests.heads import VOCAB
from tests.mtp import (
    FORMS,
    LAYERS,
    WIDTH,
    change_config,
    change_tensors,
    tensor_names,
    write_target,
)
from tests.passes.drafters.drafted_trees import PagedDrafts
from tests.passes.drafters.test_head_program import READ, check_trees
from tests.tiers import only

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
ENDS = [
    ("glm4_moe", True), ("qwen3_next", False),
    *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("glm4_moe", "deepseek_v3")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "has_own_ends"), ENDS)
def test_logits_of_a_path(name, has_own_ends, load_mtp):
    """As transformers: rows with the target's hidden states, then rows with those handed on."""
    target, loaded = load_mtp(name, has_own_ends)
    chooser = random.Random(name)
    tokens = [chooser.randrange(VOCAB) for _ in range(10)]
    path = [chooser.randrange(VOCAB) for _ in range(3)]
    taps = hidden_states(target, tokens[:-1], (LAYERS,))
    ids = tokens[1:] + path
    features = torch.full((1, len(ids), WIDTH), float("nan"))
    features[0, : len(taps)] = taps
    own = torch.full_like(features, float("nan"))
    is_tapped = torch.arange(len(ids))[None, :, None] < len(taps)
    for depth in range(len(path) + 1):
        count = len(taps) + depth
        rows = (torch.arange(count)[None], *(x[:, :count] for x in (features, own, is_tapped)))
        with torch.no_grad():
            handed_on, logits = loaded.module(torch.tensor([ids[:count]]), *rows)
        want = loaded.reference.logits(taps, tokens, path[:depth])
        torch.testing.assert_close(logits[0, -1], want, **CLOSE)
        if depth < len(path):
            own[0, count] = handed_on[0, -1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == "deepseek_v3" else pytest.param(name, marks=pytest.mark.slow)
     for name in FORMS],
)  # fmt: skip
def test_trees_over_slabs(name, load_mtp):
    """Programs, after rejections, of two sequences in one pass."""
    target, loaded = load_mtp(name)
    check_trees(name, loaded, target, READ, PagedDrafts)


@pytest.mark.parametrize(("name", "has_own_ends"), only(("glm4_moe",), ENDS))
def test_what_files_say(name, has_own_ends, load_mtp, tmp_path):
    _, loaded = load_mtp(name, has_own_ends)
    spec, source = loaded.spec, loaded.source
    assert (spec.kind, spec.layout, spec.width) == ("mtp", FORMS[name], WIDTH)
    assert (spec.boundaries, spec.is_last_normed) == ((LAYERS,), True)
    assert spec.shared == (() if has_own_ends else (EMBEDDING, HEAD))
    assert (spec.trained_length, source.max_position) == (256, None)
    program = trace(
        source.module,
        "draft_0",
        rows=drafter_of_files(spec).rows(spec, torch.float32),
        hands_on=True,
    )
    Pipeline().run(program)
    assert len(program.layers) == 1
    write_weights(source.weight_specs(program), source.reader, tmp_path / "weights")
    stored, own = load_file(tmp_path / "weights"), load_file(spec.directory / "model.safetensors")
    place = f"model.layers.{LAYERS}.shared_head." if has_own_ends else ""
    assert torch.equal(stored[HEAD], own[f"{place}{'head.weight' if place else HEAD}"])
    # all of the module is in the program, and of what it lacks the target's
    read = {item.name for key in loaded.module.state_dict() for item in source.places(key)}
    place = rf"^model\.layers\.{LAYERS}\." if FORMS[name] == "DeepSeek" else r"^mtp\."
    shared = set() if has_own_ends else {"model.embed_tokens.weight", HEAD}
    assert read == {*tensor_names(spec.directory, place), *shared}


@pytest.mark.slow
def test_what_the_target_says_of_tensors_that_it_does_not_read(load_mtp):
    """Those of the module are read by the draft."""
    _, loaded = load_mtp("glm4_moe")
    given = ModelSource.load("target", loaded.spec.directory, torch.float32)
    program = trace(given.module, "target")
    given.weight_specs(program)
    unread = tensor_names(loaded.spec.directory, rf"layers\.{LAYERS}\.")
    assert sorted(given.unread_tensors) == sorted(unread)
    mtp_source(loaded.spec, given, torch.float32)
    given.weight_specs(program)
    assert given.unread_tensors == ()


def recognised(directory, **switches):
    config = hf_model.load_config(directory)
    facts = TargetFacts.of_config("the target", config)
    more = (HeadSwitches(**switches),) if switches else ()
    with SafetensorsReader(directory) as reader:
        return recognise_mtp(config, reader, directory, facts, *more)


def without(pattern):
    return lambda tensors: {key: value for key, value in tensors.items() if pattern not in key}


def renamed(before, after):
    return lambda tensors: {key.replace(before, after): value for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("name", "change", "found", "needed"),
    [
        ("glm4_moe", without(f"layers.{LAYERS}."),
         "no MTP module in .*num_nextn_predict_layers is 1", r"model\.layers\.2\.eh_proj"),
        ("qwen3_next", without("mtp."), "no MTP module", r"mtp\.fc"),
        ("glm4_moe", without("hnorm"), r"without model\.layers\.2\.hnorm", "enorm"),
        ("qwen3_next", without("fc.weight"), r"without mtp\.fc", "pre_fc_norm_hidden"),
        ("deepseek_v3", without("shared_head"), r"without model.*shared_head\.norm", "eh_proj"),
        # of a target of other depth
        ("glm4_moe", renamed(f"layers.{LAYERS}.", "layers.7."), "no MTP module", "eh_proj"),
        ("glm4_moe", lambda own: own | {"model.layers.3.eh_proj.weight": torch.ones(1)},
         "2 MTP modules", "one module"),
        ("qwen3_next", lambda own: own | {"mtp.layers.1.x": torch.ones(1)},
         "2 MTP modules", "one module"),
        ("glm4_moe", lambda own: own | {"model.layers.2.hnorm.weight": torch.ones(3)},
         r"hnorm\.weight is \[3\]", r"\[64\]"),
        ("glm4_moe", lambda own: own | {"model.layers.2.eh_proj.weight": torch.ones(64, 64)},
         r"eh_proj\.weight is \[64, 64\]", r"\[64, 128\]"),
    ],
)  # fmt: skip
def test_modules_that_are_refused(name, change, found, needed, tmp_path):
    write_target(name, tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(HeadError, match=found) as caught:
        recognised(tmp_path)
    assert re.search(needed, caught.value.needed)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (without(f"layers.{LAYERS}.self_attn.k_proj"), r"layers\.2\.self_attn\.k_proj"),
        (without(f"layers.{LAYERS}.mlp.experts.1"), "experts"),
        (lambda own: own | {f"model.layers.{LAYERS}.extra": torch.ones(2)}, r"layers\.2\.extra"),
    ],
)
def test_layers_that_are_refused(change, found, tmp_path):
    """The layer is read as transformers reads its like."""
    write_target("glm4_moe", tmp_path)
    change_tensors(tmp_path, change)
    spec = recognised(tmp_path)
    target = ModelSource.load("target", tmp_path, torch.float32)
    with pytest.raises((HeadError, WeightError), match=found):
        mtp_source(spec, target, torch.float32)


def test_what_configurations_say_of_modules(tmp_path):
    write_target("glm4_moe", tmp_path)
    change_config(tmp_path, num_nextn_predict_layers=3)
    with pytest.raises(HeadError, match=r"1 MTP modules .* num_nextn_predict_layers 3"):
        recognised(tmp_path)
    write_target("qwen3_next", tmp_path / "qwen")
    change_config(tmp_path / "qwen", mtp_layer_types=["linear_attention"])
    with pytest.raises(HeadError, match="of kind linear_attention"):
        recognised(tmp_path / "qwen")


def test_hidden_states_before_the_norm(load_mtp):
    """What one reader of Qwen3.5 says: a switch, as nothing in the files tells."""
    directory = load_mtp("qwen3_next")[1].spec.directory
    assert recognised(directory, is_last_normed=False).is_last_normed is False
    assert recognised(directory).is_last_normed is True
