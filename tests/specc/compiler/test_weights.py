"""What a compilation says of the weights of a checkpoint: damaged ones, and those nobody reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specc.artifact.manifest import Manifest
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.rounding import quantize as quantize_rows
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.errors import WeightError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests.models import save_tiny
from tests.traces import shared_traces

UP = "model.layers.0.mlp.up_proj.weight"


def options(**changes) -> CompileConfig:
    fields = {"max_batch_size": 2, "max_seq_len": 64, "prefill_chunk": 4, "probe": False}
    return CompileConfig(**(fields | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    save_tiny("llama", path, num_hidden_layers=1)
    return path


def changed(model: Path, path: Path, edit) -> Path:
    """A copy of a checkpoint whose tensors `edit` has changed."""
    shutil.copytree(model, path)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def put(name: str, *values: float):
    def edit(tensors) -> None:
        tensors[name].view(-1)[: len(values)] = torch.tensor(values)

    return edit


def test_nan_is_refused_before_anything_is_compiled(model, tmp_path):
    path, events = changed(model, tmp_path / "nan", put(UP, float("nan"), 1.0)), []
    with pytest.raises(WeightError) as caught:
        build(path, None, tmp_path / "engine", options(backend="cpu"), listen=events.append)
    assert f"{UP} in {path / 'model.safetensors'}" in caught.value.found
    assert "compile programs" not in {event.phase for event in events}
    assert not (tmp_path / "engine").exists()


def test_of_a_draft_too(model, tmp_path):
    path = changed(model, tmp_path / "inf", put(UP, float("inf")))
    with pytest.raises(WeightError, match="1 infinite"):
        build(model, path, tmp_path / "engine", options())


@pytest.mark.slow
def test_what_overflows_in_the_type_of_the_engine(model, tmp_path):
    path = changed(model, tmp_path / "large", put(UP, 1e6, -1e6))
    build(path, None, tmp_path / "engine", options())
    with pytest.raises(WeightError, match="2 too large for float16"):
        build(path, None, tmp_path / "half", options(dtype="float16", backend="cuda"))


def test_allowed_ones_are_recorded(model, tmp_path):
    path = changed(model, tmp_path / "nan", put(UP, float("nan"), float("inf"), 1.0))
    config = options(allow_nonfinite_weights=True)
    compilation = build(path, model, tmp_path / "engine", config)
    (warning,) = compilation.warnings
    assert warning.startswith(f"target: {UP}")
    assert "2 values" in warning
    stored = Manifest.from_json(json.loads((tmp_path / "engine/manifest.json").read_text()))
    assert [entry.nonfinite_weights for entry in stored.models] == [2, 0]


def test_tensors_that_no_graph_reads(model, tmp_path):
    extra = {f"visual.{i}.weight": torch.full((2,), float("nan")) for i in range(5)}
    path = changed(model, tmp_path / "more", lambda tensors: tensors.update(extra))
    compilation = build(path, None, tmp_path / "engine", options())
    assert compilation.warnings == [
        "target: 5 tensors (visual.0.weight, visual.1.weight, visual.2.weight, …) of the checkpoint"
        " are not read by its graph"
    ]
    assert compilation.manifest.models[0].unread_tensors == tuple(extra)


def test_harmless_ones_are_not_mentioned(model, tmp_path):
    """Frequencies and masks of older versions of transformers, and copies of tied weights."""

    def edit(tensors) -> None:
        for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.position_ids"):
            tensors[name] = torch.arange(8).float()
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
        tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    path = changed(model, tmp_path / "old", edit)
    config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(config))
    compilation = build(path, None, tmp_path / "engine", options())
    assert compilation.warnings == []
    assert compilation.manifest.models[0].unread_tensors == ()


def test_a_bias_with_the_name_of_a_mask_is_mentioned(model, tmp_path):
    extra = {"model.layers.0.attn.bias": torch.ones(8)}
    path = changed(model, tmp_path / "bias", lambda tensors: tensors.update(extra))
    compilation = build(path, None, tmp_path / "engine", options())
    assert compilation.manifest.models[0].unread_tensors == tuple(extra)
    assert "1 tensor (model.layers.0.attn.bias) of the checkpoint is not" in compilation.warnings[0]


@pytest.mark.slow
def test_checkpoints_without_surprises_give_no_warning(tmp_path):
    for kind in ("gpt2", "qwen3_moe"):
        save_tiny(kind, tmp_path / kind)
        compilation = build(tmp_path / kind, None, tmp_path / f"{kind}-engine", options())
        assert compilation.warnings == [], kind
        assert compilation.manifest.models[0].unread_tensors == (), kind


@pytest.mark.default("checkpoint-None", "module-int8")
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("is_module", [False, True], ids=["checkpoint", "module"])
def test_weights_of_columns_are_stored_in_rows(tmp_path, is_module, quantize):
    """Those of GPT-2 are [inputs, outputs]; its head stays tied to its embedding."""
    path = save_tiny("gpt2", tmp_path / "gpt2")
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    config = options(backend="eager", quantize=quantize)
    build(model if is_module else path, None, tmp_path / "engine", config)
    stored = load_file(tmp_path / "engine" / "target" / "weights.safetensors")
    ends = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    names = [name for name, _ in model.named_parameters() if name.endswith(ends)]
    assert len(names) == 4 * 2
    for name in names:
        rows = model.get_parameter(name).detach().t().contiguous()
        if quantize is None:
            assert torch.equal(stored[name], rows)
        else:
            assert torch.equal(stored[f"{name}:int8"], quantize_rows(rows, QuantizedLayout(8)))
    heads = [key for key in stored if key.startswith(("lm_head", "transformer.wte"))]
    assert len(heads) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_in_blocks_are_read_in_rows_too(tmp_path, kind):
    path = save_tiny(kind, tmp_path / kind)
    found = []
    for backend in ("eager", "cpu"):
        engine = tmp_path / backend
        with shared_traces():
            build(path, None, engine, options(backend=backend))
        entries = json.loads((engine / "target" / "program.json").read_text())["inputs"]
        stacks = [item for item in entries if len(item.get("blocks_of", ())) == 3]
        assert len(stacks) == (4 if backend == "cpu" else 0)
        llm = LLM(Engine.load(engine, backend="eager"))
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
        found.append(llm.generate([[3, 17, 90]], params)[0].outputs[0])
    plain, other = found
    assert plain.token_ids == other.token_ids
    for one, two in zip(plain.logprobs, other.logprobs, strict=True):
        assert one.keys() == two.keys()
        for token, value in one.items():
            assert value.logprob == pytest.approx(two[token].logprob, abs=1e-4)
