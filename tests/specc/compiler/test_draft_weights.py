"""`specc draft-weights` writes what compiling the checkpoint would write, and only for its engine.

The oracle is the weight file of an engine that was compiled with the other checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specc.artifact.directory import read_manifest
from specc.compiler.build import build
from specc.compiler.draft_weights import write_draft_weights
from specc.errors import ConfigError, SpeccError
from specc.runtime.backends.program_files import read_json
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from tests.conftest import save_tiny_llama
from tests.draft_kinds import block, eagle3, medusa, mtp, pard, peagle
from tests.lossless import Zoo, shared_zoo
from tests.runtime.draft_pair import target_bytes, tokens
from tests.runtime.head_rig import TREE, options
from tests.tiers import only
from tests.traces import shared_traces

RIGS = {
    "eagle3": eagle3.RIGS[0],
    "dflash": block.RIGS[0],
    "medusa": medusa.RIGS[0],
    "mtp": mtp.RIGS[0],
    "pard": pard.RIGS[0],
    "peagle": peagle.RIGS[0],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "model-eager": ("", {"backend": "eager"}),
    "model-cpu": ("", {"backend": "cpu"}),
    "model-cpu-bfloat16": ("", {"backend": "cpu", "dtype": "bfloat16"}),
    "model-cpu-int8": ("", {"backend": "cpu", "quantize": "int8"}),
    "model-cpu-int4": ("", {"backend": "cpu", "quantize": "int4"}),
    **{f"{kind}-cpu": (kind, {"backend": "cpu"}) for kind in RIGS},
    **{f"{kind}-cpu-int8": (kind, {"backend": "cpu", "quantize": "int8"}) for kind in RIGS},
    # beside a target in floats; heads have copies of what is the target's
    **{
        f"{kind or 'model'}-cpu-alone": (kind, {"backend": "cpu", "draft_quantize": ("int8",)})
        for kind in ("", *RIGS)
    },
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return shared_zoo(tmp_path_factory.getbasetemp())


def mixed(checkpoint: Path, path: Path, prefix: str = "", keeps: tuple[str, ...] = ()) -> Path:
    """The same model with other weights."""
    shutil.copytree(checkpoint, path)
    (file,) = path.glob("*.safetensors")
    weights, generator = load_file(file), torch.Generator().manual_seed(7)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    for key, value in weights.items():
        is_meant = key.startswith(prefix) and not key.startswith(keeps or ("\0",))
        if value.is_floating_point() and is_meant:
            noise = torch.randn(value.shape, generator=generator).to(value.dtype)
            weights[key] = value + 0.1 * value.float().std().to(value.dtype) * noise
    save_file(weights, file, metadata)
    return path


def own_tensors(engine: Path) -> dict[str, torch.Tensor]:
    """Of the engine's draft, but for constants and what is its target's."""
    manifest = read_manifest(engine)
    entry = manifest.models[1]
    inputs = read_json(engine / entry.program_file)["inputs"]
    shared = {item["key"] for item in inputs if "of_target" in item}
    tensors = load_file(engine / entry.weights_file)
    return {k: v for k, v in tensors.items() if not k.startswith("constant.") and k not in shared}


@pytest.mark.parametrize("case", only(["model-cpu-int8", "dflash-cpu"], CASES))
def test_bytes_are_those_of_a_compilation(case: str, zoo: Zoo, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    config = options(plans=(TREE,), **changes)
    if kind:
        rig = RIGS[kind]
        target, draft = rig.target(zoo, rig.case), rig.draft(zoo, rig.case)
    else:
        target, draft = tmp_path / "target", tmp_path / "draft"
        save_tiny_llama(target, 1, 2)
        save_tiny_llama(draft, 2, 1)
    if kind == "mtp":
        # its weights are in the target's checkpoint, whose own stay
        names = load_file(next(Path(target).glob("*.safetensors")))
        own = tuple(key for key in names if not (key.startswith("mtp") or ".layers.2." in key))
        other = mixed(Path(target), tmp_path / "other", keeps=own)
        compiled = other, draft
    else:
        other = mixed(Path(draft), tmp_path / "other", keeps=("embed_tokens", "lm_head"))
        compiled = target, other
    with shared_traces():
        build(target, draft, tmp_path / "engine", config)
        build(*compiled, tmp_path / "oracle", config)
    file = tmp_path / "new.safetensors"
    form = write_draft_weights(other, tmp_path / "engine", file)
    found, expected = load_file(file), own_tensors(tmp_path / "oracle")
    assert found.keys() == expected.keys() == form.tensors.keys()
    for key, value in found.items():
        assert torch.equal(value.view(torch.uint8), expected[key].view(torch.uint8)), key
    before = own_tensors(tmp_path / "engine")
    assert any(not torch.equal(found[key], before[key]) for key in found)
    assert not [item for item in tmp_path.iterdir() if "partial" in item.name]
    check_reload(tmp_path / "engine", file, found)


def check_reload(path: Path, file: Path, expected: dict[str, torch.Tensor]) -> None:
    """The draft has these weights then, the target its own, and outputs stay."""
    engine = Engine.load(path)
    with LLM(engine, plan=TREE.name) as llm:
        outputs, target = tokens(llm), target_bytes(engine)
        llm.reload_draft(file)
        own = engine.draft_weights.tensors(engine.draft_weights.form())
        for key, value in expected.items():
            assert torch.equal(own[key].view(torch.uint8), value.view(torch.uint8)), key
        assert target_bytes(engine) == target
        assert tokens(llm) == outputs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    save_tiny_llama(root / "target", 1, 2)
    save_tiny_llama(root / "draft", 2, 1)
    with shared_traces():
        config = options(plans=(TREE,), backend="eager")
        build(root / "target", root / "draft", root / "engine", config)
    return root


def refused(pair: Path, checkpoint: Path, tmp_path: Path, **given: Any) -> SpeccError:
    with pytest.raises(SpeccError) as caught:
        write_draft_weights(checkpoint, pair / "engine", tmp_path / "new.safetensors", **given)
    assert not list(tmp_path.glob("*.safetensors*"))
    return caught.value


def test_another_model_is_refused(pair: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_tiny_llama(other, 3, 1, rope_theta=500.0)
    # all shapes are the same
    error = refused(pair, other, tmp_path)
    assert isinstance(error, ConfigError)
    assert "rope" in error.found
    deeper = tmp_path / "deeper"
    save_tiny_llama(deeper, 3, 2)
    assert "num_hidden_layers" in refused(pair, deeper, tmp_path).found
    assert "draft_7" in refused(pair, pair / "draft", tmp_path, draft="draft_7").found


def test_other_tokens_are_refused(pair: Path, tmp_path: Path) -> None:
    other = shutil.copytree(pair / "draft", tmp_path / "other")
    data = json.loads((other / "tokenizer.json").read_text())
    ids = data["model"]["vocab"]
    first, second = list(ids)[:2]
    ids[first], ids[second] = ids[second], ids[first]
    (other / "tokenizer.json").write_text(json.dumps(data))
    assert "other tokens" in refused(pair, other, tmp_path).found


def test_weights_that_are_no_numbers_are_refused(pair: Path, tmp_path: Path) -> None:
    other = shutil.copytree(pair / "draft", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight" in refused(pair, other, tmp_path).found


def test_what_is_the_targets_cannot_change(zoo: Zoo, tmp_path: Path) -> None:
    """A head that has trained its embedding, for an engine whose draft reads the target's."""
    rig = RIGS["dflash"]
    target, draft = rig.target(zoo, rig.case), rig.draft(zoo, rig.case)
    with shared_traces():
        build(target, draft, tmp_path / "engine", options(plans=(TREE,), backend="eager"))
    other = shutil.copytree(draft, tmp_path / "other")
    (file,) = other.glob("*.safetensors")
    weights = load_file(file)
    theirs = load_file(next(Path(target).glob("*.safetensors")))
    weights["embed_tokens.weight"] = theirs["model.embed_tokens.weight"] + 1
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(SpeccError) as caught:
        write_draft_weights(other, tmp_path / "engine", tmp_path / "new.safetensors")
    assert "embed_tokens" in caught.value.found
    # a copy of the target's is no change
    weights["embed_tokens.weight"] = theirs["model.embed_tokens.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    form = write_draft_weights(other, tmp_path / "engine", tmp_path / "new.safetensors")
    assert "embed_tokens.weight" not in form.tensors
