"""Which head a directory holds, and which of them do not fit: found, needed, what to do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.errors import HeadError, SpeccError
from specc.passes.drafters.head_spec import EMBEDDING, HeadSwitches, TargetFacts
from specc.passes.drafters.recognise import recognise
from specc.passes.drafters.tap_ids import AFTER, ENTERING
from tests.heads import CASES, LAYERS, VOCAB, WIDTH, write_head

TARGET = TargetFacts("the target", WIDTH, LAYERS, VOCAB)
OF_LAYERS = ("sliding_window", "layer_types", "use_sliding_window", "max_window_layers")
AUX = "eagle_aux_hidden_state_layer_ids"


def head(path, name, **changes):
    """A head of `CASES` with some keys of its configuration changed; None removes one."""
    write_head(path, CASES[name])
    configure(path, **changes)
    return path


def configure(path, **changes):
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        layers = config.get("transformer_layer_config", config)
        place = layers if key in OF_LAYERS or key in layers else config
        place[key] = value
        if value is None:
            del place[key]
    (path / "config.json").write_text(json.dumps(config))


def change_tensors(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_what_files_say(name, tmp_path):
    case = CASES[name]
    tensors = write_head(tmp_path, case)
    spec = recognise(tmp_path, TARGET)
    assert (spec.layout, spec.width, spec.draft_vocab_size) == (case.layout, case.width, case.rows)
    assert spec.boundaries == case.boundaries
    flags = {key for key, is_set in vars(spec.flags).items() if is_set}
    assert flags == {key for key, value in case.config.items() if value is True}
    assert spec.shared == (() if "embed_tokens.weight" in tensors else (EMBEDDING,))
    assert set(spec.tensors.values()) == tensors.keys() - {"d2t", "t2d"}
    assert spec.rope.trained_length == 64
    if "t2d" in tensors:
        assert torch.equal(spec.target_ids, tensors["t2d"].nonzero().flatten())
    else:
        assert spec.target_ids is None
    told = "\n".join(spec.describe())
    assert "trained for 64 positions" in told
    assert f"boundaries {', '.join(map(str, case.boundaries))}" in told


def test_windows_and_rotary_embedding(tmp_path):
    sliding = recognise(head(tmp_path / "a", "speculators-sliding"), TARGET)
    assert sliding.windows == (0, 4)
    linear = recognise(head(tmp_path / "b", "speculators-before-fc"), TARGET)
    assert (linear.rope.kind, linear.rope.theta) == ("linear", 1000.0)
    nested = recognise(head(tmp_path / "c", "nvidia", rope_theta=None), TARGET)
    assert nested.rope.theta == 300.0
    ignored = recognise(head(tmp_path / "e", "speculators", sliding_window=8), TARGET)
    assert ignored.windows == (0,)
    slides = {"layer_types": None, "use_sliding_window": True, "max_window_layers": 1}
    ruled = recognise(head(tmp_path / "d", "speculators-sliding", **slides), TARGET)
    assert ruled.windows == (0, 4)


def test_ordinary_models_are_no_heads(tmp_path):
    assert recognise(tmp_path, TARGET) is None
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert recognise(tmp_path, TARGET) is None
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert recognise(tmp_path, TARGET) is None


def test_maps_of_zeros_where_none_is_needed(tmp_path):
    """Files of SafeAILab have both maps, unfilled, where the head has a row for every id."""
    maps = {"d2t": torch.zeros(VOCAB).long(), "t2d": torch.zeros(VOCAB).bool()}
    tensors = write_head(tmp_path, replace(CASES["safeailab"], rows=VOCAB))
    save_file(tensors | maps, tmp_path / "model.safetensors")
    assert recognise(tmp_path, TARGET).target_ids is None
    maps["d2t"][7] = 1
    save_file(tensors | maps, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match="maps rows"):
        recognise(tmp_path, TARGET)


# ids → boundaries

IDS = {
    "defaults": ("safeailab", {}, {}, (2, 4, 5)),
    "entering": ("speculators", {AUX: [2, 4, 6]}, {}, (2, 4, 6)),
    "after, since 1 is first": ("speculators", {AUX: [1, 3, 6]}, {}, (2, 4, 7)),
    "entering by a switch": (
        "speculators", {AUX: [1, 3, 6]}, {"tap_convention": ENTERING}, (1, 3, 6),
    ),
    "after by a switch": ("speculators", {AUX: [2, 4, 6]}, {"tap_convention": AFTER}, (3, 5, 7)),
    "defaults are ids, too": ("safeailab", {}, {"tap_convention": AFTER}, (3, 5, 6)),
    "embedding": ("deepspec", {"target_layer_ids": [-1, 0, 1, 2, 3]}, {}, (0, 1, 2, 3, 4)),
    "layer_ids": ("nvidia", {"eagle_config": {"layer_ids": [0, 2, 3, 4]}}, {}, (0, 2, 3, 4)),
    "last": ("speculators", {AUX: [1, 3, 7]}, {"is_last_normed": False}, (2, 4, 8)),
}  # fmt: skip


@pytest.mark.parametrize("case", IDS)
def test_boundaries(case, tmp_path):
    name, changes, switches, boundaries = IDS[case]
    spec = recognise(head(tmp_path, name, **changes), TARGET, HeadSwitches(**switches))
    assert spec.boundaries == boundaries
    assert ("names no layers" in " ".join(spec.warnings)) == (case.startswith("defaults"))


def test_what_is_not_said_is_told(tmp_path):
    spec = recognise(head(tmp_path, "speculators", norm_before_residual=None), TARGET)
    assert "norm_before_residual" in " ".join(spec.warnings)
    assert not spec.flags.norm_before_residual
    switches = HeadSwitches(norm_before_residual=True)
    spec = recognise(tmp_path, TARGET, switches)
    assert spec.flags.norm_before_residual
    assert "norm_before_residual" not in " ".join(spec.warnings)
    configure(tmp_path, rope_theta=None)
    assert "rope_theta" in " ".join(recognise(tmp_path, TARGET).warnings)


# refusals

KINDS = {
    "MTP": {"speculators_model_type": "mtp"},
    "DSpark of DeepSeek V4": {"dspark_block_size": 7},
    "Medusa heads in files of speculators": {"speculators_model_type": "medusa"},
    "Hydra": {"hydra_num_heads": 4},
    "P-EAGLE": {"ptd_token_id": 3, "architectures": ["LlamaForCausalLM"]},
    "EAGLE 1": {"architectures": ["EagleLlamaForCausalLM"]},
    "'quantum'": {"speculators_model_type": "quantum"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_refused_by_name(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KINDS[kind]))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match=kind.strip()) as caught:
        recognise(tmp_path, TARGET)
    assert str(tmp_path) in caught.value.found
    # what is refused is not what is asked for
    assert kind not in caught.value.needed


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("hydra_head.0.0.linear.weight", "Hydra"),
        ("markov_head.markov_w1", "DSpark"),
        ("mtp.fc.weight", "MTP"),
    ],
)
def test_other_kinds_by_their_tensors(tensor, kind, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({tensor: torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match=kind):
        recognise(tmp_path, TARGET)


CONFIGS = {
    "hidden size of another target": ("safeailab-narrow", {"target_hidden_size": 16}, "size 16"),
    "no target_hidden_size": ("safeailab-narrow", {"target_hidden_size": None}, "size 24"),
    "ids of another target": ("safeailab", {"vocab_size": 128}, "128 ids"),
    "layers of another target": ("deepspec", {"num_target_layers": 36}, "36 layers"),
    "a layer too far": ("speculators", {AUX: [2, 4, 9]}, "layer 9"),
    "a layer before all": ("speculators", {AUX: [-1, 4, 5]}, "layer -1"),
    "a layer after the last": ("deepspec", {"target_layer_ids": [1, 2, 3, 4, 8]}, "layer 8"),
    "the last layer": ("speculators", {AUX: [1, 4, 7]}, "final norm"),
    "too few ids": ("speculators", {AUX: [2, 4]}, "names 2 layers"),
    "no ids": ("deepspec", {"target_layer_ids": None}, "names no layers"),
    "ids that are none": ("speculators", {AUX: [2, "4", 5]}, "layer_ids"),
    "two norms": ("speculators", {"fc_norm": True, "norm_before_fc": True}, "both true"),
    "a flag that is none": ("speculators", {"norm_output": "yes"}, "norm_output"),
    "a norm that is not there": ("speculators", {"fc_norm": True}, "fc_norm.0.weight"),
    "a norm that is not used": ("speculators-3.1", {"fc_norm": None}, "no place for"),
    "layers": ("speculators-3.1", {"num_hidden_layers": 3}, "3 layers"),
    "model type": ("speculators", {"model_type": "gemma3"}, "gemma3"),
    "ids of the head": ("speculators", {"draft_vocab_size": 50}, "50 in config.json"),
    "one feature": ("nvidia", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux"),
    "windows that look ahead": ("speculators", {"sliding_window_non_causal": True}, "non_causal"),
    "no size of windows": ("speculators", {"layer_types": ["sliding_attention"]}, "its size"),
    "no model type": ("speculators", {"model_type": None}, "model type None"),
    "part of a head rotated, by scaling": (
        "safeailab", {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}},
        "partial_rotary",
    ),
    "nested rotary parameters": (
        "nvidia", {"rope_parameters": {"full_attention": {"rope_theta": 3.0}}}, "several kinds",
    ),
    "scaled logits": ("safeailab", {"logit_scale": 0.5}, "logit_scale"),
    "both ways": ("safeailab", {"is_causal": False}, "is_causal"),
    "layer types": ("speculators", {"layer_types": ["linear_attention"]}, "linear_attention"),
    "quantized": ("safeailab", {"quantization_config": {"bits": 4}}, "quantized"),
    "no width": ("safeailab", {"hidden_size": None}, "no hidden_size"),
    "a number that is none": ("safeailab", {"num_attention_heads": 0}, "num_attention_heads"),
    "heads": ("safeailab", {"num_key_value_heads": 3}, "KV heads"),
    "rotary scaling": ("safeailab", {"rope_scaling": {"rope_type": "warp"}}, "config.json"),
    "part of a head rotated": ("safeailab", {"partial_rotary_factor": 0.5}, "partial_rotary"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_do_not_fit(case, tmp_path):
    name, changes, found = CONFIGS[case]
    path = head(tmp_path, name, **changes)
    with pytest.raises(SpeccError) as caught:
        recognise(path, TARGET)
    told = str(caught.value)
    assert found in told
    assert str(tmp_path) in caught.value.found


def _drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def _set(**values):
    return lambda tensors: tensors.update(
        {key.replace("__", "."): make(tensors) for key, make in values.items()}
    )


TENSORS = {
    "no norm": ("safeailab", _drop("norm.weight"), "norm.weight is not in"),
    "no norm of features": ("safeailab", _drop("midlayer.hidden_norm.weight"), "hidden_norm"),
    "no projection": ("safeailab", _drop("fc.weight"), "fc.weight is not in"),
    "no head": ("safeailab", _drop("lm_head.weight"), "no lm_head.weight"),
    "no embedding": ("safeailab-narrow", _drop("embed_tokens.weight"), "no embed_tokens.weight"),
    "no norm of keys": (
        "deepspec", _drop("layers.0.self_attn.k_norm.weight"), "k_norm.weight is not in",
    ),
    "one too many": ("safeailab", _set(more__weight=lambda t: torch.ones(2)), "more.weight"),
    "norms of queries": (
        "safeailab",
        _set(midlayer__self_attn__q_norm__weight=lambda t: torch.ones(8)),
        "no place for",
    ),
    "width of fc": ("safeailab", _set(fc__weight=lambda t: torch.ones(32, 90)), r"\[32, 90\]"),
    "taps by width": ("safeailab", _set(fc__weight=lambda t: torch.ones(32, 64)), "reads 2 hidden"),
    "a shape": ("safeailab", _set(norm__weight=lambda t: torch.ones(31)), r"norm.weight is \[31\]"),
    "a dtype": ("safeailab", _set(norm__weight=lambda t: torch.ones(32).int()), "int32"),
    "no map": ("safeailab", _drop("d2t"), "no d2t"),
    "a map of ids": (
        "safeailab", _set(d2t=lambda t: t["d2t"] + torch.arange(60)), "d2t maps|t2d keeps",
    ),
    "a map that falls": (
        "safeailab", _set(d2t=lambda t: t["d2t"] * (torch.arange(60) != 30)), "maps rows",
    ),
    "a map beyond the target": ("safeailab", _set(d2t=lambda t: t["d2t"] + 40), "maps rows to ids"),
    "a map before the target": ("safeailab", _set(d2t=lambda t: t["d2t"] - 40), "maps rows to ids"),
    "two maps": ("safeailab", _set(t2d=lambda t: t["t2d"].roll(1)), "t2d keeps 60"),
    "a map of floats": ("safeailab", _set(d2t=lambda t: t["d2t"].float()), "d2t is torch.float32"),
    "a map of another head": ("safeailab", _set(d2t=lambda t: t["d2t"][:50]), "50 in d2t"),
    "kept ids of another target": ("safeailab", _set(t2d=lambda t: t["t2d"][:90]), "t2d is"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(case, tmp_path):
    name, change, found = TENSORS[case]
    path = head(tmp_path, name)
    change_tensors(path, change)
    with pytest.raises(HeadError, match=found) as caught:
        recognise(path, TARGET)
    assert str(tmp_path) in caught.value.found


def test_several_layers_that_read_tokens(tmp_path):
    write_head(tmp_path, replace(CASES["deepspec"], num_layers=2))
    with pytest.raises(HeadError, match="each of which reads"):
        recognise(tmp_path, TARGET)


def test_embeddings_of_another_target(tmp_path):
    with pytest.raises(HeadError, match="embed_tokens"):
        recognise(head(tmp_path, "speculators"), replace(TARGET, vocab_size=VOCAB + 1))


def test_pickled_weights_alone(tmp_path):
    path = head(tmp_path, "safeailab")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(HeadError, match=r"pickled \(pytorch_model\.bin\)"):
        recognise(path, TARGET)
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(HeadError, match="no weights"):
        recognise(path, TARGET)


def test_eagle_1(tmp_path):
    path = head(tmp_path, "safeailab")

    def change(tensors):
        for key in [key for key in tensors if key.startswith("midlayer.")]:
            tensors[key.replace("midlayer.", "layers.0.")] = tensors.pop(key)
        query = "layers.0.self_attn.q_proj.weight"
        tensors[query] = tensors[query][:, :WIDTH]
        tensors["fc.weight"] = torch.ones(WIDTH, 2 * WIDTH)

    change_tensors(path, change)
    with pytest.raises(HeadError, match="EAGLE 1 or 2"):
        recognise(path, TARGET)
