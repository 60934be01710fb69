"""The example that widens a target: more parameters, the same function, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models import MAX_SEQ_LEN, WINDOW, prompts, save_tiny, tiny_config
from tests.tiers import every

SCRIPT = Path(__file__).with_name("widen_target.py")
LAYERS, COLUMNS = 5, 160
MIXED = ["full_attention", "sliding_attention"]
# name of a tiny model, and what is changed in its configuration
MODELS = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-bf16": ("llama", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
        | {"layer_types": MIXED},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The example, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("widen_target", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # its dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "widen_target", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("source") / "model")


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def round_weights(directory: Path) -> None:
    """Round a checkpoint's values to bfloat16, so that this dtype holds them exactly."""
    file = directory / "model.safetensors"
    tensors = {name: value.bfloat16().float() for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = model.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    return tokens[0].tolist()


@pytest.mark.parametrize("name", every(3, MODELS))
@torch.inference_mode()
def test_widened_model_computes_the_same(
    script: ModuleType, tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    model, changes = MODELS[name]
    source, output = save_tiny(model, tmp_path / "source", **changes), tmp_path / "wide"
    options = ["--num-layers", str(LAYERS), "--intermediate-size", str(COLUMNS)]
    if name == "llama-bf16":
        round_weights(source)
        options += ["--dtype", "bfloat16"]

    assert script.main(["--source", str(source), "--output", str(output), *options]) == 0

    old, new = load(source), load(output)
    size = script.Size(LAYERS, COLUMNS)
    assert (new.config.num_hidden_layers, new.config.intermediate_size) == (LAYERS, COLUMNS)
    assert script.ParameterCount.of(old).total(size) == new.num_parameters()
    assert f"{new.num_parameters():,} parameters" in capsys.readouterr().out
    for prompt in prompts():
        want, got = (model(torch.tensor([prompt])).logits for model in (old, new))
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    # past the sliding window, and with a cache
    assert greedy(new, prompts()[-1]) == greedy(old, prompts()[-1])
    stored = load_file(output / "model.safetensors")
    dtype = torch.bfloat16 if name == "llama-bf16" else torch.float32
    assert {value.dtype for value in stored.values()} == {dtype}
    assert (output / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_only_output_weights_are_zero(script: ModuleType, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "wide"
    options = ["--num-layers", str(LAYERS), "--intermediate-size", str(COLUMNS)]
    assert script.main(["--source", str(source), "--output", str(output), *options]) == 0

    old, new = (dict(load(path).named_parameters()) for path in (source, output))
    # 5 layers of 2: 0 and 3 are the trained ones, at the head of each run
    trained = {0: 0, 3: 1}
    tiny = torch.finfo(torch.float32).tiny
    for key, value in new.items():
        index = script.layer_index(key)
        is_output = "o_proj" in key or "down_proj" in key
        if index is not None and index not in trained:
            assert not value.any() if is_output else (value.abs() >= tiny).all(), key
            continue
        donor = key.replace(f".{index}.", f".{trained[index]}.") if index is not None else key
        kept = tuple(slice(length) for length in old[donor].shape)
        torch.testing.assert_close(value[kept], old[donor], rtol=0, atol=0)
        added = value.detach().clone()
        added[kept] = 0
        if value.shape != old[donor].shape:
            # what is new is as large as what is old, or is zero
            assert (added.std() > 0.05) != is_output, key


@pytest.mark.parametrize("leaked", [1e-3, float("nan")])
@pytest.mark.parametrize("broken", ["o_proj", "down_proj"])
def test_output_that_is_not_zero_is_noticed(
    script: ModuleType,
    source: Path,
    tmp_path: Path,
    broken: str,
    leaked: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    widen = script.widen

    def leak(name: str, *args: Any) -> torch.Tensor:
        new = widen(name, *args)
        return torch.where(new == 0, leaked, new) if broken in name else new

    monkeypatch.setattr(script, "widen", leak)
    options = ["--num-layers", "3", "--intermediate-size", "128"]
    assert script.main(["--source", str(source), "--output", str(tmp_path / "w"), *options]) == 1
    assert "found:  logits that differ" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "number", ["140K", "0.5M", pytest.param("2_000_000", marks=pytest.mark.slow)]
)
def test_parameters_are_met(script: ModuleType, source: Path, tmp_path: Path, number: str) -> None:
    output, wanted = tmp_path / "wide", script.parse_number(number)
    options = ["--parameters", number]
    assert script.main(["--source", str(source), "--output", str(output), *options]) == 0

    model = load(output)
    assert abs(model.num_parameters() / wanted - 1) < 0.02
    assert model.config.num_hidden_layers <= 24
    columns = model.config.intermediate_size
    assert columns == 96 or columns % 64 == 0  # the source has 96


def test_demo_target_at_100m(script: ModuleType) -> None:
    # the demo target's counts, without its weights
    count = script.ParameterCount(fixed=2048 * 256 + 256, per_layer=197_248, per_column=768)
    before, args = (
        script.Size(8, 768),
        script.parse_args(["--source", "a", "--output", "b", "--parameters", "100M"]),
    )
    assert count.total(before) == 6_821_120
    assert script.choose_size(count, before, args) == script.Size(24, 5120)


@pytest.mark.parametrize(("first_sliding", "want"), [(1, 3), (2, 5), (28, 28)])
def test_max_window_layers(script: ModuleType, first_sliding: int, want: int) -> None:
    config = tiny_config("qwen2", max_window_layers=first_sliding, layer_types=MIXED)
    wide = script.widened_config(config, script.Size(LAYERS, COLUMNS))
    assert wide.max_window_layers == want
    assert wide.layer_types == [MIXED[0]] * 3 + [MIXED[1]] * 2


def test_seed_decides_the_weights(script: ModuleType, source: Path, tmp_path: Path) -> None:
    files = []
    for number, seed in enumerate((0, 0, 1)):
        output = tmp_path / str(number)
        options = ["--num-layers", "3", "--seed", str(seed)]
        assert script.main(["--source", str(source), "--output", str(output), *options]) == 0
        files.append((output / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        # steps of 64 columns are coarse in a model this small
        pytest.param(["--parameters", "150K"], "--parameters 150,000", id="unreachable"),
        pytest.param([], "none of --parameters", id="no-size"),
        pytest.param(["--parameters", "10K"], "--parameters 10000", id="fewer-parameters"),
        pytest.param(["--num-layers", "1"], "--num-layers 1", id="fewer-layers"),
        pytest.param(["--intermediate-size", "0"], "--intermediate-size 0", id="fewer-columns"),
        pytest.param(
            ["--parameters", "1M", "--num-layers", "2", "--intermediate-size", "96"],
            "--parameters 1,000,000",
            id="contradiction",
        ),
    ],
)
def test_refused_sizes(
    script: ModuleType,
    source: Path,
    tmp_path: Path,
    options: list[str],
    found: str,
    capsys: pytest.CaptureFixture,
) -> None:
    command = ["--source", str(source), "--output", str(tmp_path / "wide"), *options]
    assert script.main(command) == 2
    assert capsys.readouterr().err.startswith(f"found:  {found}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", ["", "many", "-5M", "1T"])
def test_refused_numbers(script: ModuleType, number: str) -> None:
    with pytest.raises(SystemExit) as info:
        script.main(["--source", "a", "--output", "b", f"--parameters={number}"])
    assert info.value.code == 2


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "mixtral", "phi3"])
def test_other_families_are_refused(
    script: ModuleType, tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    source = save_tiny(name, tmp_path / "source")
    command = ["--source", str(source), "--output", str(tmp_path / "wide"), "--num-layers", "9"]
    assert script.main(command) == 2
    error = capsys.readouterr().err
    assert f"model type {name}" in error
    assert "needed: a model of llama, mistral, qwen2, qwen3" in error


def test_refused_sources(
    script: ModuleType, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    broken = save_tiny("llama", tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    quantized = save_tiny("llama", tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (quantized / "config.json").write_text(json.dumps(config))
    cases = {
        "absent": "no such directory",
        "broken": "no tensor model.layers.1.mlp.up_proj.weight",
        "quantized": "quantized",
    }
    for name, reason in cases.items():
        output = tmp_path / "wide"
        command = ["--source", str(tmp_path / name), "--output", str(output), "--num-layers", "3"]
        assert script.main(command) == 2
        assert reason in capsys.readouterr().err
        assert not output.exists()


def test_existing_output(
    script: ModuleType, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output, other = tmp_path / "wide", tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")

    def run(path: Path, *options: str) -> int:
        command = ["--source", str(source), "--output", str(path), "--num-layers", "3"]
        return script.main([*command, *options])

    assert run(output) == 0
    assert run(output) == 2
    assert "pass --force" in capsys.readouterr().err
    (output / "stale").touch()
    assert run(output, "--force") == 0
    assert not (output / "stale").exists()
    for path, reason in (
        (other, "is no checkpoint"),
        (source, "holds the source"),
        (source.parent, "holds the source"),
    ):
        assert run(path, "--force") == 2
        assert reason in capsys.readouterr().err
    assert (other / "notes.txt").read_text() == "mine"
    assert load(source).config.num_hidden_layers == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "wide"]


def test_prompts_stay_within_the_positions_of_the_model(script: ModuleType, tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "source", max_position_embeddings=MAX_SEQ_LEN // 4)
    command = ["--source", str(source), "--output", str(tmp_path / "wide"), "--num-layers", "3"]
    assert script.main(command) == 0
