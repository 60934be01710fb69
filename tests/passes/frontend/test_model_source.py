"""A directory that cannot be compiled is refused before its model is built and traced."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import fx

from specc.artifact.weight_spec import Source, WeightSpec
from specc.artifact.weights import MemoryReader
from specc.errors import ModelNotFoundError, SpeccError, WeightError
from specc.passes.frontend import hf_model
from specc.passes.frontend.model_source import ModelSource
from specc.passes.program import Program, Weight
from tests.models import tiny_config


@pytest.fixture
def directory(tmp_path, monkeypatch):
    tiny_config("llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    monkeypatch.setattr(hf_model, "build_on_meta", _must_not_build)
    return tmp_path


def _must_not_build(*args):
    raise AssertionError("the model was built before its weights were looked at")


def test_no_weights(directory):
    with pytest.raises(ModelNotFoundError) as caught:
        ModelSource.load("target", directory, torch.float32)
    assert str(directory) in caught.value.found


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64])
def test_malformed_weights(directory, content):
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        ModelSource.load("target", directory, torch.float32)


def test_truncated_weights(directory):
    path = directory / "model.safetensors"
    save_file({"x": torch.zeros(1000)}, str(path))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        ModelSource.load("target", directory, torch.float32)


def test_missing_shard(directory):
    index = '{"weight_map": {"x": "model-00001-of-00001.safetensors"}}'
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(SpeccError, match="model-00001-of-00001"):
        ModelSource.load("target", directory, torch.float32)


def test_readable_weights(directory, monkeypatch):
    tensors = {name: torch.zeros(3) for name in ("x", "y")}
    save_file(tensors, str(directory / "model.safetensors"))
    monkeypatch.setattr(hf_model, "build_on_meta", lambda config, dtype: torch.nn.Identity())
    source = ModelSource.load("target", directory, torch.float32)
    assert sorted(source.reader.keys()) == ["x", "y"]


def test_an_adapter(directory, monkeypatch):
    """Weights beside one are taken without it, which is said; without a model, it is none."""
    save_file({name: torch.zeros(3) for name in "xy"}, str(directory / "model.safetensors"))
    monkeypatch.setattr(hf_model, "build_on_meta", lambda config, dtype: torch.nn.Identity())
    assert ModelSource.load("target", directory, torch.float32).warnings == []
    (directory / "adapter_config.json").write_text("{}")
    (said,) = ModelSource.load("draft_0", directory, torch.float32).warnings
    assert said.startswith("draft 0: ")
    assert "weights without it" in said
    (directory / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match="an adapter") as caught:
        hf_model.resolve_directory(directory)
    assert "merge_and_unload" in caught.value.do


def columns_of(*names: str) -> list[WeightSpec]:
    """Of a weight [4, 6] that a checkpoint has as columns of these tensors."""
    reader, module = MemoryReader({}), torch.nn.Module()
    source = ModelSource("target", "made", torch.float32, module, None, None, reader)
    source.places = lambda _: tuple(map(Source, names))
    program = Program("target", fx.GraphModule(module, fx.Graph()), {}, {})
    program.weights["w"] = Weight(("w",), torch.float32, (4, 6), is_turned=True)
    return source.weight_specs(program)


def test_columns_in_several_tensors_are_refused():
    (spec,) = columns_of("a")
    assert (spec.shape, spec.is_turned) == ((4, 6), False)
    assert spec.sources == (Source("a", transpose=True),)
    with pytest.raises(WeightError, match="w of a, b"):
        columns_of("a", "b")
