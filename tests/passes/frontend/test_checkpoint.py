"""Resolving and streaming a checkpoint gives exactly what `from_pretrained` loads."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specc.artifact.safetensors_io import SafetensorsReader
from specc.artifact.weight_spec import Source, WeightSpec
from specc.artifact.weights import write_weights
from specc.errors import WeightError
from specc.passes.frontend.checkpoint import CheckpointMap
from tests.tiers import every

logging.getLogger("transformers").setLevel(logging.ERROR)

_TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 32}
_CONFIGS = {
    "llama": ("LlamaConfig", _TINY),
    "mistral": ("MistralConfig", _TINY | {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", _TINY | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _TINY | {"head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", _TINY | {"head_dim": 8}),
    "phi": ("PhiConfig", _TINY | {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", _TINY | {"pad_token_id": 0}),
    "gpt2": ("GPT2Config", _GPT2),
    "opt": ("OPTConfig", _TINY | {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "gpt_neox": ("GPTNeoXConfig", _TINY),
    "mixtral": ("MixtralConfig", _TINY | {"num_local_experts": 12}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _TINY | {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 6},
    ),
}


def make_config(name, **changes):
    class_name, values = _CONFIGS[name]
    return getattr(transformers, class_name)(**values | changes)


def save_random(config, path, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # also norms and biases, which start as ones and zeros
        torch.nn.init.normal_(parameter)
    model.save_pretrained(path, **options)
    return model


def meta_model(path, dtype=torch.float32):
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def stream(model, path, out, dtype=None):
    """Stream all parameters of a meta model from its checkpoint, as the compiler does."""
    with SafetensorsReader(path) as reader:
        checkpoint = CheckpointMap(model, reader)
        specs = [
            WeightSpec(name, value.dtype, tuple(value.shape), checkpoint.sources(name))
            for name, value in model.named_parameters(remove_duplicate=False)
        ]
        write_weights(specs, reader, out, dtype)
    return load_file(out)


def check_equals_from_pretrained(path, out, dtype=torch.float32):
    model = meta_model(path, dtype)
    streamed = stream(model, path, out)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    expected = dict(loaded.named_parameters(remove_duplicate=False))
    assert streamed.keys() == expected.keys()
    for name, value in expected.items():
        assert streamed[name].dtype == value.dtype
        assert torch.equal(streamed[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", every(2, _CONFIGS))
def test_streaming_equals_from_pretrained(name, dtype, tmp_path):
    save_random(make_config(name), tmp_path / "model", dtype)
    check_equals_from_pretrained(tmp_path / "model", tmp_path / "out", dtype)


def test_bfloat16_checkpoint_as_float32_and_back(tmp_path):
    save_random(make_config("mixtral"), tmp_path / "model", torch.bfloat16)
    check_equals_from_pretrained(tmp_path / "model", tmp_path / "out", torch.float32)
    save_random(make_config("mixtral"), tmp_path / "wide", torch.float32)
    check_equals_from_pretrained(tmp_path / "wide", tmp_path / "out", torch.bfloat16)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_sharded_checkpoint(name, tmp_path):
    save_random(make_config(name), tmp_path / "model", max_shard_size="4KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    check_equals_from_pretrained(tmp_path / "model", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "prefix"), [("gpt2", "transformer."), ("qwen2", "model."), ("opt", "model.")]
)
def test_checkpoint_without_base_prefix(name, prefix, tmp_path):
    path = tmp_path / "model"
    save_random(make_config(name), path)
    rewrite(path, lambda tensors: {k.removeprefix(prefix): v for k, v in tensors.items()})
    check_equals_from_pretrained(path, tmp_path / "out")


def test_experts_on_disk_are_separate_and_stay_in_numeric_order(tmp_path):
    path = tmp_path / "model"
    save_random(make_config("mixtral"), path)
    model = meta_model(path)
    with SafetensorsReader(path) as reader:
        prefix = "model.layers.1.block_sparse_moe.experts"
        assert f"{prefix}.11.w1.weight" in set(reader.keys())
        sources = CheckpointMap(model, reader).sources("model.layers.1.mlp.experts.gate_up_proj")
    assert sources == tuple(
        Source(f"{prefix}.{expert}.{part}.weight") for expert in range(12) for part in ("w1", "w3")
    )


def test_legacy_names(tmp_path):
    path = tmp_path / "model"
    save_random(make_config("gpt_neox"), path)
    old = "gpt_neox.final_LayerNorm.gamma"

    def rename(tensors):
        tensors[old] = tensors.pop("gpt_neox.final_layer_norm.weight")
        return tensors

    rewrite(path, rename)
    # `final_LayerNorm.gamma` becomes `final_LayerNorm.weight`, which this model does not have
    with SafetensorsReader(path) as reader, pytest.raises(WeightError, match="final_layer_norm"):
        CheckpointMap(meta_model(path), reader).sources("gpt_neox.final_layer_norm.weight")


def test_tied_output_is_read_from_whichever_name_is_there(tmp_path):
    path = tmp_path / "model"
    save_random(make_config("qwen2"), path)
    embedding = "model.embed_tokens.weight"
    model = meta_model(path)
    with SafetensorsReader(path) as reader:
        assert "lm_head.weight" not in set(reader.keys())
        assert CheckpointMap(model, reader).sources("lm_head.weight") == (Source(embedding),)

    def move(tensors):
        tensors["lm_head.weight"] = tensors.pop(embedding)
        return tensors

    rewrite(path, move)
    with SafetensorsReader(path) as reader:
        assert CheckpointMap(model, reader).sources(embedding) == (Source("lm_head.weight"),)
    check_equals_from_pretrained(path, tmp_path / "out")


def test_tied_parameters_that_differ_on_disk_are_refused(tmp_path):
    path = tmp_path / "model"
    save_random(make_config("qwen2"), path)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        return tensors

    rewrite(path, add)
    check_equals_from_pretrained(path, tmp_path / "out")  # equal copies are fine

    def change(tensors):
        tensors["lm_head.weight"][3, 2] += 1
        return tensors

    rewrite(path, change)
    with SafetensorsReader(path) as reader, pytest.raises(WeightError, match="tie_word_embeddings"):
        CheckpointMap(meta_model(path), reader).sources("lm_head.weight")


def test_missing_tensor_names_file_and_close_names(tmp_path):
    path = tmp_path / "model"
    save_random(make_config("llama"), path)
    rewrite(
        path, lambda t: {k: v for k, v in t.items() if k != "model.layers.1.mlp.up_proj.weight"}
    )
    with SafetensorsReader(path) as reader, pytest.raises(WeightError) as error:
        CheckpointMap(meta_model(path), reader).sources("model.layers.1.mlp.up_proj.weight")
    assert str(path) in error.value.found
    assert "no tensor model.layers.1.mlp.up_proj.weight" in error.value.found
    assert "model.layers.0.mlp.up_proj.weight" in error.value.found.split("close names")[1]


def test_wrong_shape(tmp_path):
    path = tmp_path / "model"
    save_random(make_config("llama"), path)
    change_config(path, intermediate_size=20)
    with SafetensorsReader(path) as reader, pytest.raises(WeightError, match=r"\[24, 16\].*\n.*20"):
        CheckpointMap(meta_model(path), reader).sources("model.layers.0.mlp.up_proj.weight")


def test_missing_expert_and_wrong_expert_shape(tmp_path):
    path = tmp_path / "model"
    save_random(make_config("mixtral"), path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    one = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    tensors = load_file(path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != one}, path / "model.safetensors")
    with SafetensorsReader(path) as reader, pytest.raises(WeightError, match="MergeModulelist"):
        CheckpointMap(meta_model(path), reader).sources(name)
    save_file(tensors | {one: torch.zeros(23, 16)}, path / "model.safetensors")
    with SafetensorsReader(path) as reader, pytest.raises(WeightError, match="MergeModulelist"):
        CheckpointMap(meta_model(path), reader).sources(name)


class TestConversions:
    """Conversions that no tested architecture has, on a llama with a mapping of its own."""

    @pytest.fixture
    def convert(self, tmp_path, monkeypatch):
        from transformers import conversion_mapping, core_model_loading

        path = tmp_path / "model"
        save_random(make_config("llama"), path)

        def run(sources, targets, operations, edit):
            rewrite(path, edit)
            monkeypatch.setattr(
                conversion_mapping,
                "get_model_conversion_mapping",
                lambda model: [core_model_loading.WeightConverter(sources, targets, operations)],
            )
            return stream(meta_model(path), path, tmp_path / "out")

        return run

    def test_split_a_fused_projection(self, convert):
        from transformers.core_model_loading import Chunk

        before = {}

        def fuse(tensors):
            before.update(tensors)
            for layer in range(2):
                prefix = f"model.layers.{layer}.mlp."
                parts = [tensors.pop(f"{prefix}{n}_proj.weight") for n in ("gate", "up")]
                tensors[f"{prefix}both.weight"] = torch.cat(parts)
            return tensors

        targets = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
        after = convert("mlp.both.weight", targets, [Chunk(dim=0)], fuse)
        assert all(torch.equal(after[key], value) for key, value in before.items())

    def test_transposed_projection(self, convert):
        from transformers.core_model_loading import Transpose

        before = {}

        def transpose(tensors):
            before.update(tensors)
            for key in list(tensors):
                if "down_proj" in key:
                    tensors[key.replace("weight", "kernel")] = tensors.pop(key).T.contiguous()
            return tensors

        after = convert("down_proj.kernel", "down_proj.weight", [Transpose(0, 1)], transpose)
        assert all(torch.equal(after[key], value) for key, value in before.items())

    def test_interleaved_rows(self, convert):
        from transformers.core_model_loading import Interleave

        before = {}

        def interleave(tensors):
            before.update(tensors)
            for key in list(tensors):
                if "up_proj" in key:
                    value = tensors.pop(key)
                    mixed = value.view(2, -1, 16).transpose(0, 1).reshape(value.shape)
                    tensors[key.replace("weight", "mixed")] = mixed.contiguous()
            return tensors

        after = convert("up_proj.mixed", "up_proj.weight", [Interleave(dim=0)], interleave)
        assert all(torch.equal(after[key], value) for key, value in before.items())

    @pytest.mark.parametrize("kind", ["columns", "arithmetic"])
    def test_what_is_no_move_of_rows_is_refused(self, kind, convert):
        from transformers.core_model_loading import Chunk, ConversionOps

        class AddOne(ConversionOps):
            def convert(self, input_dict, **kwargs):
                return input_dict

        operation = Chunk(dim=1) if kind == "columns" else AddOne()

        def widen(tensors):
            for key in list(tensors):
                if "up_proj" in key:
                    value = tensors.pop(key)
                    tensors[key.replace("up_proj", "wide")] = torch.cat([value, value], dim=1)
            return tensors

        targets = ["up_proj.weight", "gate_proj.weight"] if kind == "columns" else "up_proj.weight"
        with pytest.raises(WeightError, match=r"cannot stream: .*(Chunk|AddOne)"):
            convert("wide.weight", targets, [operation], widen)


def rewrite(path, edit):
    file = path / "model.safetensors"
    save_file(edit(load_file(file)), file)


def change_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
