"""Engines of GGUF files against plain transformers on the float32 numbers of their blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import specc
from specc.artifact.block_formats import FORMATS
from specc.artifact.decoders.gguf_file import GGUFReader
from specc.config import CompileConfig
from specc.passes.frontend.model_source import ModelSource
from specc.runtime.engine import Engine
from tests import engines, gguf_files, models
from tests.passes.frontend.gguf_recordings import recordings, write_recorded
from tests.passes.frontend.test_gguf_architectures import read
from tests.quantized_checkpoints import Written
from tests.runtime.test_quantized import PLANS, check_logits, generate
from tests.runtime.test_quantized_checkpoints import (
    TOLERANCE,
    check_integers,
    reference,
    stored_layouts,
)

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}


def write(root: Path, name: str, architecture: str, kind_of, **changes) -> Written:
    target = models.save_tiny(name, root / "target", **changes)
    config = models.tiny_config(name, **changes)
    return gguf_files.write_model(target, root, architecture, kind_of, config)


# of llama.cpp's mixes: the type of most matrices, and that of those that get more bits
MIXES = [
    ("Q4_0", "Q6_K"), ("Q4_1", "Q6_K"), ("Q5_0", "Q6_K"), ("Q5_1", "Q6_K"), ("Q8_0", "Q8_0"),
    ("Q2_K", "Q3_K"), ("Q3_K", "Q5_K"), ("Q4_K", "Q6_K"), ("Q5_K", "Q6_K"), ("Q6_K", "Q6_K"),
    ("IQ4_NL", "Q5_K"), ("IQ4_XS", "Q5_K"), ("MXFP4", "Q8_0"), ("TQ2_0", "Q4_K"), ("TQ1_0", "Q4_K"),
    ("IQ1_S", "IQ2_S"), ("IQ2_XXS", "IQ3_S"), ("IQ2_XS", "IQ3_XXS"), ("IQ3_S", "Q4_K"),
    ("IQ1_M", "Q2_K"),
]  # fmt: skip
ARCHITECTURES = ("llama", "qwen2", "qwen3")


@pytest.mark.parametrize(
    ("name", "kind", "more", "backend"),
    [pytest.param("llama", "Q4_K", "Q6_K", "cpu", id="q4_k_m")]
    + [
        pytest.param(name, *mix, "cpu", marks=pytest.mark.slow, id=f"{name}-{mix[0]}")
        for name in ARCHITECTURES
        for mix in MIXES
    ]
    + [pytest.param("qwen3", "Q5_K", "Q6_K", "eager", marks=pytest.mark.slow, id="eager")],
)
def test_mixed_types(tmp_path, name, kind, more, backend) -> None:
    """Matrices are the file's own blocks, as many bytes, and outputs those of its numbers."""
    pytest.importorskip("gguf")

    def kind_of(key: str) -> str:
        own = "down_proj", "v_proj", "lm_head", "embed_tokens"
        return more if any(part in key for part in own) else kind

    changes = WIDE | ({"head_dim": 64} if name == "qwen3" else {})
    written = write(tmp_path, name, name, kind_of, **changes)
    found = specc.compile(
        written.quantized, None, tmp_path / "engine", backend=backend, probe=False, max_seq_len=128
    )
    check_logits(tmp_path / "engine", reference(written), "float32", TOLERANCE)
    layouts = stored_layouts(tmp_path / "engine")
    names = {layout.removeprefix("blocks-").upper() for layout in layouts.values()}
    numbers = {item for item in (kind, more) if item in ("IQ2_XS", "IQ2_S", "IQ1_M")}
    formats = {item for item in (kind, more) if item.lower() in FORMATS}
    assert formats <= names
    told = [text for text in found.warnings if "quantized" in text]
    assert bool(told) == bool(numbers)
    scheme = found.manifest.models[0].checkpoint_scheme
    assert scheme is not None
    assert scheme.startswith("gguf, ")
    if formats != {kind, more}:
        return
    matrices = {k: w for k, w in written.weights.items() if w.dim() == 2}
    check_integers(replace(written, weights=matrices), tmp_path / "engine")
    stored, size = load_file(tmp_path / "engine" / "target" / "weights.safetensors"), 0
    reader = GGUFReader(written.quantized / gguf_files.FILE)
    # no matrix of the tiny model has a block of fewer than 32 outputs
    for tensor in reader.tensors.values():
        size += tensor.num_bytes if tensor.dtype == torch.uint8 else 0
    assert sum(stored[key].numel() for key in layouts) == size


@pytest.mark.slow
def test_parts_alone(tmp_path) -> None:
    """Configuration, tokenizer and ends are the file's own, weights those of all of its parts."""
    changes = {"num_hidden_layers": 1}
    written = write(tmp_path, "llama", "llama", lambda name: "Q4_0", **changes)
    options = {"backend": "eager", "probe": False, "max_seq_len": 64}
    specc.compile(written.quantized, None, tmp_path / "beside", **options)
    params = specc.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    plain = specc.LLM(tmp_path / "beside").generate(["hello"], params)[0].outputs[0].token_ids
    # an end of turns that comes after two tokens or more
    end = next(token for i, token in enumerate(plain) if i > 1 and token not in plain[:i])
    fields, tensors = gguf_files.read_file(written.quantized / gguf_files.FILE)
    fields |= {"tokenizer.ggml.eos_token_id": 127, "tokenizer.ggml.eot_token_id": end}
    head = list(tensors).index("output.weight")
    sizes = [head, 1, len(tensors) - head - 1]
    parts = gguf_files.write_parts(tmp_path / "alone", fields, tensors, sizes)
    found = specc.compile(parts[0], None, tmp_path / "alone", **options)
    weights = [
        (tmp_path / name / "target" / "weights.safetensors").read_bytes()
        for name in ("alone", "beside")
    ]
    assert weights[0] == weights[1]
    assert found.manifest.models[0].location == str(parts[0])
    params = specc.SamplingParams(max_tokens=8, temperature=0.0)
    output = specc.LLM(tmp_path / "alone").generate(["hello"], params)[0].outputs[0]
    assert list(output.token_ids) == list(plain[: plain.index(end) + 1])
    assert output.finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture", "kind", "dtype"),
    [
        ("llama", "llama", "Q4_0", "float32"),
        # biases
        ("qwen2", "qwen2", "Q8_0", "float32"),
        ("qwen3", "qwen3", "Q4_0", "bfloat16"),
    ],
)
def test_plans_and_logits(tmp_path, name, architecture, kind, dtype) -> None:
    """All projections and the head are the file's own integers."""
    changes = {"num_key_value_heads": 2}
    # a head of drawn blocks says one token for ever in this llama
    plain = ("embed", "lm_head") if name == "llama" else ("embed",)
    only = lambda key: "F16" if any(part in key for part in plain) else kind  # noqa: E731
    written = write(tmp_path, name, architecture, only, **changes)
    draft = models.save_tiny(name, tmp_path / "draft", 1)
    config = CompileConfig(
        plans=PLANS, max_seq_len=models.MAX_SEQ_LEN, probe=False, backend="eager", dtype=dtype
    )
    engine = engines.build(written.quantized, draft, tmp_path / "engine", config)
    assert set(stored_layouts(engine).values()) == {f"blocks-{kind.lower()}"}
    assert len(stored_layouts(engine)) == 10 - len(plain)
    check_logits(engine, reference(written), dtype, TOLERANCE)
    check_plans_of_any_draft(engine)


def check_plans_of_any_draft(engine: Path) -> None:
    """As `check_plans`, with a draft that is another model: it accepts what it accepts."""
    loaded, prompts = Engine.load(engine), models.prompts()
    plain = [generate(loaded, "off", [prompt])[0][0] for prompt in prompts]
    assert len(set(plain[0])) > 3
    for plan in PLANS[1:]:
        assert generate(loaded, plan.name, prompts)[0] == plain, plan.name


def quantize_file(path: Path, kind: str) -> None:
    """Write matrices of a file of numbers, and stacks of them, in blocks: all but routers, and rows
    that blocks do not fit.
    """
    import gguf

    fields, tensors = gguf_files.read_file(path)
    number = gguf.GGMLQuantizationType(gguf_files.TYPES[kind])
    for name, (_, shape, data) in tensors.items():
        if len(shape) > 1 and shape[-1] % 32 == 0 and "_inp" not in name:
            values = np.frombuffer(data, np.float32).reshape(shape)
            tensors[name] = kind, shape, gguf.quants.quantize(values, number).tobytes()
    gguf_files.write_file(path, fields, tensors)


@pytest.mark.default("qwen3_5-square-Q8_0-eager")
@pytest.mark.parametrize(
    ("name", "kind", "backend"),
    [
        ("mixtral", "Q4_0", "cpu"),
        ("qwen3_moe", "Q5_1", "cpu"),
        ("qwen2_moe", "Q8_0", "eager"),
        # other norms, heads of other sizes, windows
        ("gemma3", "Q5_0", "cpu"),
        ("phi3", "Q4_1", "cpu"),
        # value heads in another order, by rows and by columns; groups of rows; Mamba-2
        ("qwen3_5-square", "Q8_0", "eager"),
        ("qwen3_5_moe", "Q4_0", "cpu"),
        ("qwen3_next_hybrid", "Q5_0", "cpu"),
        ("lfm2", "Q8_0", "cpu"),
        ("nemotron_h", "Q4_1", "cpu"),
        ("granite4_hybrid", "Q8_0", "cpu"),
    ],
)
def test_other_architectures(tmp_path, name, kind, backend) -> None:
    """Experts and fused projections are the file's blocks, too, in the order of the model."""
    pytest.importorskip("gguf")
    base, changes = recordings()[name]["config"]
    model: Any = models.build_model(base, **changes).eval()
    path = tmp_path / "model.gguf"
    write_recorded(path, name, model.state_dict())
    quantize_file(path, kind)
    source = ModelSource.load("target", path, torch.float32)
    model.load_state_dict(read(source))
    specc.compile(path, None, tmp_path / "engine", backend=backend, probe=False, max_seq_len=128)
    check_logits(tmp_path / "engine", model, "float32", TOLERANCE)
    layouts = stored_layouts(tmp_path / "engine")
    assert set(layouts.values()) == {f"blocks-{kind.lower()}"}
    has_experts = any("experts" in key for key in layouts)
    mixtures = ("mixtral", "qwen3_next_hybrid", "granite4_hybrid")
    assert has_experts == ("moe" in name or name in mixtures)
