"""Engines of GGUF files against plain transformers on the float32 numbers of their blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

import specc
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from tests import engines, gguf_files, models
from tests.quantized_checkpoints import Written
from tests.runtime.test_quantized import PLANS, check_logits, generate
from tests.runtime.test_quantized_checkpoints import TOLERANCE, reference, stored_layouts

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}


def write(root: Path, name: str, architecture: str, kind_of, **changes) -> Written:
    target = models.save_tiny(name, root / "target", **changes)
    config = models.tiny_config(name, **changes)
    return gguf_files.write_model(target, root, architecture, kind_of, config)


def kind_of_4_k_m(name: str) -> str:
    """Types of llama.cpp's Q4_K_M, in small."""
    if "embed_tokens" in name or "down_proj" in name:
        return "Q6_K"
    return "Q8_0" if "lm_head" in name or "v_proj" in name else "Q4_K"


@pytest.mark.slow
def test_mixed_types(tmp_path) -> None:
    """Q4_K and Q6_K become the type of the engine, exactly in float32, and that is said."""
    written = write(tmp_path, "llama", "llama", kind_of_4_k_m, **WIDE)
    found = specc.compile(
        written.quantized, None, tmp_path / "engine", backend="eager", probe=False, max_seq_len=128
    )
    check_logits(tmp_path / "engine", reference(written), "float32", TOLERANCE)
    layouts = stored_layouts(tmp_path / "engine")
    assert layouts == {
        "lm_head.weight:int8-g32": "blocks-int8-g32",
        "model.layers.0.self_attn.v_proj.weight:int8-g32": "blocks-int8-g32",
    }
    (told,) = [text for text in found.warnings if "quantized" in text]
    # the embedding, q, k, o, down, and gate and up, which are fused
    assert "7 quantized weights of the checkpoint become float32" in told
    assert found.manifest.models[0].checkpoint_scheme == "gguf, Q4_K; and 2 others"


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
    layout = {"Q4_0": "blocks-int4-g32", "Q8_0": "blocks-int8-g32"}[kind]
    assert list(stored_layouts(engine).values()) == [layout] * (10 - len(plain))
    check_logits(engine, reference(written), dtype, TOLERANCE)
    check_plans_of_any_draft(engine)


def check_plans_of_any_draft(engine: Path) -> None:
    """As `check_plans`, with a draft that is another model: it accepts what it accepts."""
    loaded, prompts = Engine.load(engine), models.prompts()
    plain = [generate(loaded, "off", [prompt])[0][0] for prompt in prompts]
    assert len(set(plain[0])) > 3
    for plan in PLANS[1:]:
        assert generate(loaded, plan.name, prompts)[0] == plain, plan.name
