"""Block drafters from their files: what they are, which do not fit, and where weights come from."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.drafters.block import OF_TOKEN, BlockDraft
from specc.drafters.lilicorr import LiLiCorrDraft
from specc.errors import HeadError
from specc.passes.drafters.block_head import step_weights
from specc.passes.drafters.head_source import head_source
from specc.passes.drafters.head_spec import EMBEDDING, HEAD, HeadSwitches, TargetFacts
from specc.passes.drafters.recognise import recognise
from specc.passes.drafters.tap_ids import ENTERING
from specc.passes.frontend.model_source import ModelSource
from tests.block_heads import BLOCK_CASES, MASK, BlockCase, write_block
from tests.heads import LAYERS, VOCAB, WIDTH

TARGET = TargetFacts("the target", WIDTH, LAYERS, VOCAB)


def changed(path, name, change=lambda config: None, tensors=lambda found: None):
    """A drafter of `BLOCK_CASES` of which some things are different."""
    write_block(path, BLOCK_CASES[name])
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    found = load_file(path / "model.safetensors")
    tensors(found)
    save_file(found, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", BLOCK_CASES)
def test_what_files_say(name, tmp_path):
    case = BLOCK_CASES[name]
    tensors = write_block(tmp_path, case)
    spec = recognise(tmp_path, TARGET)
    assert (spec.kind, spec.layout, spec.width) == (case.kind, case.layout, case.width)
    assert spec.boundaries == case.boundaries
    causal = case.is_causal and not case.is_mixed
    wanted = BlockDraft(case.size, MASK, case.from_anchor, causal, case.causal_layers)
    wanted = replace(wanted, is_biased=case.rank > 0, is_partial=case.is_partial)
    wanted = replace(wanted, bias_kind=case.bias_kind, hidden_columns=case.hidden_columns)
    wanted = replace(wanted, confidence=case.confidence, candidates=case.candidates)
    if case.lilicorr:
        wanted = scored(wanted, case)
    conv = None if spec.conv is None else (spec.conv.taps, spec.conv.size)
    assert (conv, (spec.scale.factor, spec.scale.cap)) == (case.conv, case.scale or (1.0, 0.0))
    assert (spec.block, spec.rank) == (wanted, case.rank)
    is_lost = case.has_confidence and not case.confidence
    assert any("its confidence head is not read" in x for x in spec.warnings) == is_lost
    assert (spec.windows, spec.is_anchored) == (case.windows, case.is_anchored)
    last = case.num_layers - 1
    assert spec.window_of(last) == case.windows[last] + bool(
        case.is_anchored and case.windows[last]
    )
    assert spec.draft_vocab_size == case.rows
    assert spec.shared == (() if case.has_own_ends else (EMBEDDING, HEAD))
    assert set(spec.tensors.values()) == tensors.keys() - {"d2t", "t2d"}
    assert spec.rope.theta == (300.0 if name == "z-lab-causal" else 1000.0)
    told = "\n".join(spec.describe())
    assert f"blocks of {case.size} rows" in told
    assert f"{case.size - (not case.from_anchor)} tokens a pass" in told


def scored(block: BlockDraft, case: BlockCase) -> LiLiCorrDraft:
    own = case.lilicorr
    sizes = {"num_layers": own.layers, "num_heads": own.heads, "candidates": own.count}
    sizes |= {"inner_width": own.width or case.width, "scale": own.scale, "kind": "lilicorr"}
    return LiLiCorrDraft(
        **{**vars(block), **sizes, "is_biased": True, "norm_eps": 1e-5, "vector_eps": 1e-6}
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_causal_block_as_jetspec_says_it(is_causal, tmp_path):
    write_block(tmp_path, BLOCK_CASES["z-lab"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"] |= {"causal_head": is_causal, "unsaid": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert recognise(tmp_path, TARGET).block.is_causal == is_causal


def test_where_ids_of_layers_may_mean_another_thing(tmp_path):
    write_block(tmp_path, BLOCK_CASES["z-lab"])
    spec = recognise(tmp_path, TARGET, HeadSwitches(tap_convention=ENTERING))
    assert spec.boundaries == (1, 4)


def nested(**values):
    return lambda config: config["dflash_config"].update(values)


def top(**values):
    return lambda config: config.update(values)


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("z-lab", top(num_target_layers=9), "a target of 9 layers; the target has 8"),
        ("z-lab", top(vocab_size=64), "a target of 64 ids; the target has 96"),
        ("z-lab", top(target_hidden_size=16), "hidden size 16; the target has 32"),
        ("z-lab", top(block_size=None), "no block_size"),
        ("z-lab", top(block_size=1), "block_size 1"),
        ("z-lab", top(block_size="5"), "block_size is '5'"),
        ("z-lab", top(num_anchors=512), "which token the anchor's row proposes"),
        ("z-lab", top(model_type="laguna"), "model type 'laguna'"),
        ("dspark-deepspec", top(model_type="dspark"), "model type 'dspark'"),
        ("z-lab", top(quantization_config={}), "a quantized drafter"),
        ("z-lab", top(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
        ("z-lab", top(is_neox_style=False), "is_neox_style is False"),
        ("z-lab", top(architectures=["DFlash2DraftModel"]), "no selector_rank"),
        ("dflash2", top(architectures=["DFlashDraftModel"]), "DFlash 2 (the checkpoint has cand"),
        ("dflash2", nested(selector_top_k=0), "selector_top_k is 0"),
        ("dflash2", nested(selector_top_k=97), "selector_top_k is 97"),
        ("dflash2", nested(selector_top_k=None), "no selector_top_k"),
        ("dflash2", nested(selector_rank=5), "predecessor_codebook is [96, 6]"),
        ("dflash2", nested(conv_kernel_size=None), "no conv_kernel_size"),
        ("dflash2", nested(conv_kernel_size=3), "attention_conv.base_kernel is [2, 2, 32]"),
        ("dflash2", nested(conv_kernel_size=65), "convolutions of 65 rows"),
        ("dflash2", nested(conv_group_size=5), "groups of 5 of 32 channels"),
        ("dflash2", nested(conv_kernel_size=None, conv_group_size=None), "8 tensors that its"),
        ("dflash2", nested(output_multiplier=0), "output_multiplier is 0"),
        ("dflash2", nested(final_logit_softcapping=-1.0), "final_logit_softcapping is -1.0"),
        ("dflash2", nested(markov_rank=4), "markov_rank is 4"),
        ("dflash2", nested(lilicorr_enabled=True), "dflash_config.lilicorr_enabled is True"),
        ("dflash2", top(markov_rank=4), "DSpark"),
        ("lilicorr", top(architectures=["DFlashDraftModel"]), "LiLiCorr (the checkpoint has lil"),
        ("lilicorr", nested(projector_type="dflash"), "projector_type is 'dflash'"),
        ("lilicorr", nested(lilicorr_enabled=False), "lilicorr_enabled is False"),
        *(
            ("lilicorr", nested(**{f"lilicorr_{key}": None}), f"lilicorr_{key}")
            for key in (
                "candidate_topk", "hidden_size", "num_layers", "num_heads", "mlp_ratio",
                "factor_dim", "vector_eps", "logit_scale",
            )
        ),
        ("lilicorr", nested(lilicorr_num_heads=5), "12 columns for 5 heads"),
        ("lilicorr", nested(lilicorr_num_heads=2), "relative_slot_bias is [3, 9]"),
        ("lilicorr", nested(lilicorr_num_layers=1), "10 tensors that its configuration"),
        ("lilicorr", nested(lilicorr_hidden_size=24), "_embedding is [1, 1, 4, 1, 12]"),
        ("lilicorr", nested(lilicorr_unheard_of=1), "dflash_config.lilicorr_unheard_of is 1"),
        ("lilicorr", nested(conv_kernel_size=2, conv_group_size=4), "attention_conv"),
        ("lilicorr", nested(selector_rank=4), "selector_rank is 4"),
        ("lilicorr", nested(output_multiplier=2.0), "output_multiplier is 2.0"),
        ("lilicorr-conv", nested(conv_kernel_size=None, conv_group_size=None), "4 tensors that"),
        ("z-lab", nested(lilicorr_enabled=True), "dflash_config.lilicorr_enabled is True"),
        ("z-lab", top(dflash_config=3), "dflash_config is 3"),
        ("z-lab", nested(mask_token_id=None), "mask_token_id is None"),
        ("z-lab", nested(mask_token_id=VOCAB), "mask_token_id 96; the target has ids 0 … 95"),
        ("z-lab", nested(target_layer_ids=None), "no target_layer_ids"),
        ("z-lab", nested(target_layer_ids=[1]), "fc reads 2 hidden states; config.json names 1"),
        ("z-lab", nested(target_layer_ids=[1, 8]), "reads layer 8"),
        ("z-lab", nested(target_layer_ids=[1, 7]), "what the last layer returns"),
        ("z-lab", nested(causal=1), "causal is 1"),
        ("z-lab", nested(causal_head=1), "causal_head is 1"),
        ("z-lab", nested(causal=False, causal_head=True), "causal false, causal_head true"),
        ("z-lab", nested(conv_kernel_size=2), "conv_kernel_size is 2"),
        ("z-lab", nested(attention_value_scale=2.0), "dflash_config.attention_value_scale is 2.0"),
        ("z-lab", nested(use_swa=True), "use_swa is True"),
        ("z-lab", nested(attention_sink_bias=True), "attention_sink_bias is True"),
        ("z-lab", nested(projector_type="domino"), "no shift_label"),
        ("z-lab", nested(selector_rank=8), "selector_rank is 8"),
        ("z-lab-causal", top(sliding_window=4), "a window of 4 rows, and blocks of 5"),
        ("z-lab-mixed", top(block_size=64, sliding_window=64), "layers that differ in what a row"),
        ("speculators", top(transformer_layer_config=None), "no transformer_layer_config"),
        ("speculators", top(draft_vocab_size=50), "50 in config.json, 60 in lm_head.weight"),
        ("speculators", top(markov_rank=4), "DSpark"),
        ("speculators", top(dspark_block_size=7), "DSpark of DeepSeek V4"),
        ("dspark-deepspec", top(markov_head_type="fir"), "markov_head_type is 'fir'"),
        ("dspark-deepspec", top(markov_head_type="gated"), "gate_proj.bias are not in"),
        ("dspark-gated", top(markov_head_type="rnn"), "joint_proj.bias are not in"),
        ("dspark-gated", top(markov_head_type="vanilla"), "2 tensors that its configuration"),
        ("dspark-deepspec", top(markov_rank="6"), "markov_rank is '6'"),
        ("dspark-deepspec", top(markov_rank=5), "markov_w1.weight is [96, 6]"),
        ("dspark-deepspec", top(markov_rank=0), "confidence_head.proj.weight is [1, 38]"),
        ("dspark-deepspec", top(enable_confidence_head=1), "enable_confidence_head is 1"),
        ("dspark-deepspec", top(selector_rank=8), "DFlash 2"),
        ("dspark-specforge", nested(projector_type="domino"), "projector_type is 'domino'"),
        ("dspark-specforge", nested(dspark_backbone_conv_enabled=True), "backbone_conv_enabled is"),
        ("dspark-specforge", nested(confidence_head_alpha=0.0), "2 tensors that"),
        ("dspark-rnn", top(sample_from_anchor=False), "the state that the anchor's row leaves"),
        ("dspark-deepspec", top(num_target_layers=9), "a target of 9 layers; the target has 8"),
    ],
)  # fmt: skip
def test_configurations_that_do_not_fit(name, change, found, tmp_path):
    with pytest.raises(HeadError, match=re.escape(found)) as raised:
        recognise(changed(tmp_path, name, change), TARGET)
    assert raised.value.needed
    assert raised.value.do


@pytest.mark.parametrize(
    ("name", "tensors", "found"),
    [
        ("z-lab", lambda x: x.pop("hidden_norm.weight"), "hidden_norm.weight is not in"),
        ("z-lab", lambda x: x.pop("layers.1.self_attn.k_norm.weight"), "k_norm.weight is not in"),
        ("z-lab", lambda x: x.update({"midlayer.x": torch.ones(1)}), "1 tensors that"),
        ("z-lab", lambda x: x.update({"markov_head.w": torch.ones(1)}), "DSpark"),
        ("z-lab", lambda x: x.update({"norm.weight": torch.ones(3)}), r"norm.weight is \[3\]"),
        ("z-lab", lambda x: x.update({"fc.weight": torch.ones(32, 63)}), r"fc.weight is \[32, 63"),
        ("speculators", lambda x: x.pop("d2t"), "a head of 60 rows for 96 ids, and no d2t"),
        ("speculators", lambda x: x.pop("embed_tokens.weight"), "no embed_tokens.weight in a head"),
        (
            "dspark-deepspec",
            lambda x: x.pop("markov_head.markov_w2.weight"),
            "markov_w2.weight is not",
        ),
        ("dspark-deepspec", lambda x: x.pop("confidence_head.proj.bias"), "proj.bias is not in"),
        ("dflash2", lambda x: x.pop("layers.1.mlp_conv.base_kernel"), "base_kernel is not in"),
        (
            "dflash2",
            lambda x: x.pop("candidate_selector.successor_codebook"),
            "successor_codebook is not in",
        ),
    ],
)
def test_tensors_that_do_not_fit(name, tensors, found, tmp_path):
    with pytest.raises(HeadError, match=found):
        recognise(changed(tmp_path, name, tensors=tensors), TARGET)


def test_early_names_of_heads(tmp_path):
    """Of SpecForge's first drafters; both at once are too many."""

    def early(found, keeps=False):
        for key in [key for key in found if key.startswith(("markov_head", "confidence_head"))]:
            value = found[key] if keeps else found.pop(key)
            found[f"logit_head.{key}"] = value.clone()

    spec = recognise(changed(tmp_path / "one", "dspark-specforge", tensors=early), TARGET)
    key = "markov_head.gate_proj.bias"
    assert spec.tensors[key] == f"logit_head.{key}"
    both = changed(tmp_path / "both", "dspark-specforge", tensors=partial(early, keeps=True))
    with pytest.raises(HeadError, match=r"6 tensors that .* logit_head\."):
        recognise(both, TARGET)


def test_what_files_of_speculators_leave_out(tmp_path):
    """A confidence head is there, and reads the token before, unless files say otherwise."""

    def drop(config):
        del config["enable_confidence_head"], config["confidence_head_with_markov"]

    def add(found):
        found["confidence_head.proj.weight"] = torch.ones(1, 24 + 5)
        found["confidence_head.proj.bias"] = torch.ones(1)

    path = changed(tmp_path, "dspark-speculators", drop, add)
    assert recognise(path, TARGET).block.confidence == OF_TOKEN


def test_an_embedding_of_masks_beside_the_table(tmp_path):
    write_block(tmp_path, BLOCK_CASES["z-lab"])
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(HeadError, match=r"mask_embedding\.pt"):
        recognise(tmp_path, TARGET)


def test_what_steps_read(tmp_path):
    """Of DSpark, beside the program: two weights, and which of their rows are which ids."""
    write_block(tmp_path / "all", BLOCK_CASES["dspark-deepspec"])
    weights, tables = step_weights(recognise(tmp_path / "all", TARGET), torch.float32)
    shapes = [weight.shape for weight in weights.values()]
    assert shapes == [(VOCAB, 6), (VOCAB, 6), (1, WIDTH + 6), (1,)]
    assert not tables
    tensors = write_block(tmp_path / "some", BLOCK_CASES["dspark-speculators"])
    spec = recognise(tmp_path / "some", TARGET)
    weights, tables = step_weights(spec, torch.float32)
    assert [weight.shape for weight in weights.values()] == [(VOCAB, 5), (60, 5)]
    ids = torch.arange(60) + tensors["d2t"]
    (columns,) = tables.values()
    assert columns[ids].tolist() == list(range(60))
    assert (columns == 60).sum() == VOCAB - 60
    keys = replace(spec.block, draft="draft_0").tensors
    assert {*weights, *tables} == set(keys.values())
    assert step_weights(replace(spec, block=BlockDraft(4, MASK)), torch.float32) == ({}, {})


def test_where_weights_come_from(target, tmp_path):
    """Embedding and head of the target, all else of the drafter's files."""
    tensors = write_block(tmp_path, BLOCK_CASES["z-lab"])
    spec = recognise(tmp_path, TARGET)
    source = head_source(spec, ModelSource.load("target", target, torch.float32), torch.float32)
    owner = dict(target.named_parameters())
    for parameter, value in source.module.named_parameters():
        wanted = {
            EMBEDDING: owner["model.embed_tokens.weight"], HEAD: owner["lm_head.weight"],
        }.get(parameter, tensors.get(parameter))  # fmt: skip
        raw = bytearray().join(bytes(x) for x in source.reader.read_chunks(parameter))
        found = torch.frombuffer(raw, dtype=torch.float32).view(value.shape)
        assert torch.equal(found, wanted)
