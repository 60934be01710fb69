"""Directories of Hugging Face models: what is no causal language model is refused at once."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from specc.errors import ModelNotFoundError, NotCausalLMError, UnsupportedAttentionError
from specc.passes.frontend import hf_model
from specc.passes.frontend.trace import trace
from specc.passes.rewrite.classify_masks import ClassifyMasks
from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.recover_attention import RecoverAttention
from tests.models import tiny_config
from tests.tiers import only

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}


def write(path, **config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def rope(path, **scaling):
    """A Llama directory with this rotary configuration."""
    return write(path / "m", model_type="llama", architectures=["LlamaForCausalLM"], **scaling)


def test_absent_path(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no such directory") as caught:
        hf_model.resolve_directory(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in caught.value.found


@pytest.mark.parametrize("name", ["nowhere", "nobody/nothing", "not a name", "a--b..c/d"])
def test_unknown_hub_name(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no such directory"):
        hf_model.resolve_directory(name)


def test_directory_without_config(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        hf_model.resolve_directory(tmp_path)


def test_file_instead_of_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelNotFoundError):
        hf_model.resolve_directory(tmp_path / "file")


def test_directory_is_found(tmp_path):
    path = write(tmp_path / "m", model_type="llama")
    assert hf_model.resolve_directory(path) == path
    assert hf_model.resolve_directory(str(path)) == path


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("bert", "BertModel"),
        ("bert", "BertForMaskedLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
        ("clip", "CLIPModel"),
        ("llama", "LlamaForSequenceClassification"),
        ("qwen3", "Qwen3Model"),
        ("whisper", "WhisperForConditionalGeneration"),
    ],
)
def test_not_a_causal_model(tmp_path, model_type, architecture):
    path = write(tmp_path / "m", model_type=model_type, architectures=[architecture])
    with pytest.raises(NotCausalLMError) as caught:
        hf_model.load_config(path)
    assert architecture in caught.value.found
    assert caught.value.do


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"model_type": "no-such-type"}', "{}"])
def test_broken_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(NotCausalLMError) as caught:
        hf_model.load_config(tmp_path)
    assert "config.json" in caught.value.found
    assert "\n" not in caught.value.found


@pytest.mark.parametrize("names", [["LlamaForCausalLM"], [], None])
def test_causal_model(tmp_path, names):
    config = hf_model.load_config(write(tmp_path / "m", model_type="llama", architectures=names))
    assert config.model_type == "llama"


def test_gpt2_names_its_class_in_the_old_way(tmp_path):
    path = write(tmp_path / "m", model_type="gpt2", architectures=["GPT2LMHeadModel"])
    assert hf_model.load_config(path).model_type == "gpt2"


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_a_former_name_of_longrope(tmp_path, key):
    """`su` of the first revisions of Phi-3 is longrope, number by number."""
    scaling = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    fields = _SMALL | {"pad_token_id": 0, "original_max_position_embeddings": 64}
    for name in ("su", "longrope"):
        value = scaling | {key: name}
        write(tmp_path / name, model_type="phi3", rope_scaling=value, **fields)
    found, wanted = (hf_model.load_config(tmp_path / name) for name in ("su", "longrope"))
    assert found.rope_parameters["rope_type"] == "longrope"
    assert found.rope_parameters == wanted.rope_parameters
    assert hf_model.max_position(found) == 64


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, LLAMA3, YARN, DYNAMIC],
)
def test_rotary_scalings_are_accepted(tmp_path, key, scaling):
    value = scaling | ({"rope_theta": 1e4} if key == "rope_parameters" else {})
    assert hf_model.load_config(rope(tmp_path, **{key: value})).model_type == "llama"


BY_DISTANCE = {
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 40},
    "mpt": {"d_model": 32, "n_layers": 1, "n_heads": 4, "vocab_size": 40, "max_seq_len": 64},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    | {"vocab_size": 40, "alibi": True},
}


@pytest.mark.parametrize("kind", only(("mpt",), BY_DISTANCE))
def test_what_models_add_by_distance_is_found(kind):
    """Three ways to write it: in one product, after a product, in a mask."""
    config = AutoConfig.for_model(kind, **BY_DISTANCE[kind])
    program = trace(hf_model.build_on_meta(config, torch.float32), "target")
    for item in (Normalize(), RecoverAttention(), ClassifyMasks()):
        item.run(program)
    (slopes,) = program.slopes.values()
    assert list(program.windows.values()) == [0]
    assert torch.equal(slopes.values, 0.25 ** torch.arange(1, 5))
    assert slopes.rounds == (kind == "falcon")


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_attention_that_is_spelled_out_is_refused_where_it_is_not_recovered(kind):
    config = AutoConfig.for_model(kind, **BY_DISTANCE[kind])
    program = trace(hf_model.build_on_meta(config, torch.float32), "target")
    Normalize().run(program)
    with pytest.raises(UnsupportedAttentionError) as caught:
        ClassifyMasks().run(program)
    layer = {"bloom": "transformer.h.0.self_attention", "mpt": "transformer.blocks.0.attn"}[kind]
    assert f"layer {layer}" in caught.value.found


def test_built_on_meta_in_the_dtype_asked_for():
    model = hf_model.build_on_meta(tiny_config("llama"), torch.bfloat16)
    parameters = list(model.parameters())
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in parameters)
    assert not model.training
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "positions"), [("llama", 256), ("gpt2", 256), ("opt", 256), ("gpt_neox", 256)]
)
def test_max_position(name, positions):
    assert hf_model.max_position(tiny_config(name)) == positions


def test_max_position_unknown():
    assert hf_model.max_position(object()) is None


def test_eos_token_ids(tmp_path):
    config = tiny_config("llama", eos_token_id=7)
    assert hf_model.eos_token_ids(None, config) == [7]
    assert hf_model.eos_token_ids(tmp_path, config) == [7]
    GenerationConfig(eos_token_id=[3, 4]).save_pretrained(tmp_path)
    assert hf_model.eos_token_ids(tmp_path, config) == [3, 4]
    assert hf_model.eos_token_ids(None, tiny_config("llama")) == []


@pytest.mark.parametrize(
    ("around", "within", "ends"), [([1, 106], 1, [1, 106]), (None, 7, [7]), (3, None, [3])]
)
def test_ends_of_a_wrapper(tmp_path, around, within, ends):
    """What is around a language model is asked first, as in transformers' generate."""
    from transformers import Gemma3Config

    text = {"eos_token_id": within, "num_hidden_layers": 1}
    config = Gemma3Config(text_config=text, architectures=["Gemma3ForConditionalGeneration"])
    config.eos_token_id = around
    config.save_pretrained(tmp_path)
    found = hf_model.eos_token_ids(tmp_path, hf_model.load_config(tmp_path))
    wanted = GenerationConfig.from_model_config(config).eos_token_id
    assert found == ends == (wanted if isinstance(wanted, list) else [wanted])
