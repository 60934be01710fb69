"""A config.json with numbers that no model has: refused before anything is built of it."""

from __future__ import annotations

import json
import resource
import shutil
import time

import pytest
import torch

from specc.errors import NotCausalLMError, WeightError
from specc.passes.frontend import hf_model
from specc.passes.frontend.config_numbers import check_heads, check_numbers
from specc.passes.frontend.model_source import ModelSource

NAN, INF = float("nan"), float("inf")
# (changes, what the error names)
WRONG = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"num_hidden_layers": 4000}, "4000 layers; the checkpoint has"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_attention_heads": -4}, "num_attention_heads is -4"),
    ({"num_attention_heads": [4, "a"]}, "num_attention_heads is 'a'"),
    ({"num_attention_heads": 3}, "3 heads and 2 KV heads|attention heads"),
    ({"num_attention_heads": 6, "head_dim": None}, "a width of 32 and 6 heads|attention heads"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ({"num_key_value_heads": 3}, "4 heads and 3 KV heads"),
    ({"head_dim": -8}, "head_dim is -8"),
    ({"head_dim": 0}, "head_dim is 0"),
    ({"head_dim": 10**30}, "head_dim is 1000000000000000000000000000000"),
    ({"hidden_size": 2**40}, "hidden_size is"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"hidden_size": {"a": 1}}, "hidden_size|TypeError|config.json"),
    ({"intermediate_size": -1}, "intermediate_size is -1"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"vocab_size": 10**15}, "vocab_size is"),
    ({"vocab_size": "260"}, "vocab_size is '260'"),
    ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings is"),
    ({"rms_norm_eps": NAN}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": INF}, "rms_norm_eps is inf"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"rope_theta": NAN}, "rope_theta is nan"),
    ({"rope_theta": -10000.0}, "rope_theta is -10000.0"),
    ({"rope_theta": 10**400}, "rope_theta is 1000"),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}},
        "rope_parameters.rope_theta",
    ),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        r"rope_scaling.factor is 0",
    ),
    ({"rope_scaling": {"rope_type": "linear", "factor": NAN}}, "rope_scaling.factor is nan"),
    ({"initializer_range": NAN}, "initializer_range is nan"),
    ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
    ({"architectures": [3]}, r"architectures is \[3\]"),
    ({"model_type": 3}, "config.json"),
    ({"hidden_act": "no-such"}, "config.json"),
    ({"pad_token_id": "a"}, "config.json"),
]


@pytest.fixture(scope="module")
def directory(tiny_models, tmp_path_factory):
    """A model whose config.json may be overwritten."""
    return shutil.copytree(tiny_models.target, tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def configure(tiny_models, directory):
    """Write the config.json of the tiny model, changed."""
    original = json.loads((tiny_models.target / "config.json").read_text())

    def write(text: str | None = None, **changes: object):
        data = json.dumps(original | changes) if text is None else text
        (directory / "config.json").write_text(data)
        return directory

    return write


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(c)[:50] for c, _ in WRONG])
@pytest.mark.parametrize("name", ["target", "draft_0"])
def test_wrong_numbers(configure, name, changes, message):
    path = configure(**changes)
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(NotCausalLMError, match=message) as caught:
        ModelSource.load(name, path, torch.float32)
    assert str(path) in caught.value.found
    assert time.process_time() - begin < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_a_width_that_is_not_that_of_the_weights(configure):
    """Within the range, but another model's; refused when the weights are looked at."""
    begin = time.process_time()
    path = configure(hidden_size=2**18, intermediate_size=2**18, head_dim=2**16)
    with pytest.raises(WeightError, match=r"embed_tokens\.weight is \[260, 32\]"):
        ModelSource.load("target", path, torch.float32)
    assert time.process_time() - begin < 2


def test_the_model_itself_is_accepted(configure):
    ModelSource.load("target", configure(), torch.float32)


@pytest.mark.parametrize("levels", [200, 900, 100_000])
def test_deep_nesting(configure, levels):
    path = configure(text='{"model_type": "llama", "x": ' + "[" * levels + "]" * levels + "}")
    with pytest.raises(NotCausalLMError, match="nested more than 64 levels"):
        hf_model.load_config(path)


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"eos_token_id": "a"}', '{"eos_token_id": [1, null]}', '{"eos_token_id": -1}',
     '{"eos_token_id": 1.5}', '{"eos_token_id": {}}', '{"eos_token_id": true}', "[" * 9999],
)  # fmt: skip
def test_wrong_settings_of_generation(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(NotCausalLMError, match=r"generation_config\.json"):
        hf_model.eos_token_ids(tmp_path, None)


@pytest.mark.parametrize(
    "config",
    [
        {"num_key_value_heads": None, "head_dim": None, "sliding_window": None},
        {"num_key_value_heads": [1, 2], "intermediate_size": [64, 128]},
        {"num_local_experts": 0, "rope_theta": 1, "time_step_limit": [0.0, INF]},
        {"text_config": {"num_hidden_layers": 3}, "factor": 0},
    ],
)
def test_what_models_do_say(config):
    check_numbers(config, "a model")


def test_heads_whose_width_is_stated():
    class Config:
        hidden_size, num_attention_heads, num_key_value_heads, head_dim = 30, 4, 4, 8

    check_heads(Config(), "a model")
    Config.head_dim = None
    with pytest.raises(NotCausalLMError, match="a width of 30 and 4 heads"):
        check_heads(Config(), "a model")
