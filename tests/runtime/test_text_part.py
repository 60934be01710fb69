"""The language model inside of models that take images equals them, where they get text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.compiler import build as compiler
from specc.config import CompileConfig
from specc.passes.frontend.model_source import ModelSource
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import hybrids, models, more_models, quantized_checkpoints
from tests.tiers import only
from tests.traces import shared_traces

NUM_TOKENS = 24
PLANS = (SpecPlan.from_widths(()), SpecPlan.from_widths((2, 2, 1)))
# of a model whose layers keep states, which is no draft
LOOKUPS = (SpecPlan.from_widths(()), SpecPlan.from_widths((1, 1, 1), drafts=("lookup-3",)))
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


_NAMES = {
    "Gemma3": "gemma3", "Mistral3": "mistral", "Llama4": "llama4_text", "Qwen3_5": "qwen3_5",
    "SmolVLM": "llama",
}  # fmt: skip
# besides those of every model, where it has others
_VISIONS = {
    "Mistral3": {"model_type": "pixtral"},
    "Llama4": {
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "pixel_shuffle_ratio": 0.5,
    },
    "Qwen3_5": {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16},
}


def wrapper(kind: str) -> Any:
    """A tiny model that takes images, every parameter drawn anew."""
    import transformers

    if kind == "MuseGlimmer":
        return muse_glimmer()
    if kind not in _NAMES:
        return traced_wrapper(kind)
    name = _NAMES[kind]
    text = models.tiny_config(name)
    config = getattr(transformers, f"{kind}Config")(
        text_config=text.to_dict(),
        vision_config=_VISION | _VISIONS.get(kind, {}),
        tie_word_embeddings=False,
        **({"mm_tokens_per_image": 4} if kind == "Gemma3" else {}),
    )
    made = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return drawn(made, name, kind == "Gemma3")


def traced_wrapper(kind: str) -> Any:
    """One of whose language model transformers has no class with a head."""
    import transformers

    # sections of a rotary half of 8 columns, for each axis of an image
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = more_models.COMMON | {
        "head_dim": 16,
        "vocab_size": models.VOCAB,
        "rope_parameters": rope,
    }
    text |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    if kind == "Qwen3VLMoe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    tokens = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    vision |= {"embed_dim": 32} if kind == "Qwen2VL" else {"out_hidden_size": 64}
    vision |= {"hidden_size": 64} if kind == "Qwen2VL" else {}
    if kind.startswith("Qwen3"):
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens
    )
    made = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return drawn(made, "qwen2", False)


def muse_glimmer() -> Any:
    """One of those below that writes over tokens of images before it looks them up."""
    import transformers

    config = transformers.MuseGlimmerConfig()
    text = type(config.text_config)(
        **more_models.COMMON, head_dim=16, vocab_size=models.VOCAB, sliding_window=16,
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    vision |= {"num_attention_heads": 2}
    config = transformers.MuseGlimmerConfig(
        text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False
    )
    return drawn(transformers.MuseGlimmerForConditionalGeneration(config), "qwen2", False)


def drawn(made: Any, name: str, is_around_zero: bool) -> Any:
    generator = torch.Generator().manual_seed(4)
    spread_of = hybrids.spread if name in models.HYBRIDS else more_models.spread
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            spread, center = spread_of(name, key, parameter)
            center = 0.0 if is_around_zero and parameter.ndim == 1 else center
            parameter.copy_(center + spread * torch.randn(parameter.shape, generator=generator))
    return made.eval()


def older_names(path: Path) -> None:
    """Rename the tensors of a checkpoint as checkpoints had them before transformers 4.52."""
    file = path / "model.safetensors"
    renamed = {}
    for key, value in load_file(file).items():
        if key.startswith("model.language_model."):
            key = "language_model.model." + key.removeprefix("model.language_model.")
        elif key.startswith("lm_head."):
            key = f"language_model.{key}"
        renamed[key] = value
    save_file(renamed, file, {"format": "pt"})


@pytest.mark.default("Qwen3VL-False")
@pytest.mark.parametrize(
    ("kind", "is_older"),
    [
        # one whose language model has a class with a head, and one below
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("Gemma3", False),
                ("Gemma3", True),
                ("Mistral3", False),
                ("Qwen3_5", False),
                ("SmolVLM", False),
            )
        ),
        ("Llama4", False),
        # three positions of each token, which for text are one
        ("Qwen3VL", False),
        *(
            pytest.param(kind, False, marks=pytest.mark.slow)
            for kind in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VLMoe", "MuseGlimmer")
        ),
    ],
)
def test_text_equals_that_of_the_whole_model(kind: str, is_older: bool, tmp_path: Path) -> None:
    model = wrapper(kind)
    path = tmp_path / "model"
    model.save_pretrained(path)
    models.byte_tokenizer().save(str(path / "tokenizer.json"))
    keys = set(load_file(path / "model.safetensors"))
    if is_older:
        older_names(path)
    elif kind in _NAMES and not any(key.startswith("model.language_model.") for key in keys):
        parts = ("language_model.model.", "model.text_model.")
        assert any(key.startswith(parts) for key in keys)
    # target and draft are one model
    plans, drafts = (LOOKUPS, []) if _NAMES.get(kind) in models.HYBRIDS else (PLANS, [path])
    config = CompileConfig(
        plans=plans, max_seq_len=128, max_batch_size=5, block_size=16, backend="eager", probe=False
    )
    with shared_traces():
        made = compiler.build(path, drafts, tmp_path / "engine", config)
    said = [text for text in made.warnings if "images and sound are not taken" in text]
    assert len(said) == 1 + len(drafts)
    assert json.loads((path / "config.json").read_text())["architectures"][0].startswith(kind)
    prompts = models.prompts()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            tokens = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
        wanted.append(tokens[0, len(prompt) :].tolist())
        assert len(set(wanted[-1])) > 4
    engine = Engine.load(tmp_path / "engine")
    for plan in plans:
        outputs = LLM(engine, plan=plan.name).generate([list(p) for p in prompts], params)
        assert [output.outputs[0].token_ids for output in outputs] == wanted


@pytest.mark.parametrize("kind", only(["Llama4"], ["Gemma3", "Llama4", "Qwen3VL"]))
def test_a_quantized_checkpoint_of_such_a_model(kind: str, tmp_path: Path) -> None:
    """Its language model has the checkpoint's integers, under the names that it has alone."""
    wrapper(kind).save_pretrained(tmp_path / "plain")
    form = quantized_checkpoints.packed(4, 32)

    def is_quantized(name: str) -> bool:
        return "language_model" in name and name.endswith("o_proj.weight")

    written = quantized_checkpoints.write_checkpoint(
        tmp_path / "plain", tmp_path, form.config, form.writer, is_quantized
    )
    source = ModelSource.load("target", written.quantized, torch.float32)
    exact = ModelSource.load("target", written.exact, torch.float32)
    assert source.scheme.startswith("compressed-tensors, pack-quantized, 4 bits")
    said = [[text.partition("; ")[2] for text in x.warnings] for x in (source, exact)]
    assert said[0] == said[1] != []
    names = list(exact.reader.keys())
    assert set(source.reader.keys()) == set(names)
    kept = [name for name in names if source.reader.decoded(name) is not None]
    assert len(kept) == len(written.weights) == source.config.num_hidden_layers
    for name in names:
        found, wanted = (
            b"".join(map(bytes, item.reader.read_chunks(name))) for item in (source, exact)
        )
        assert found == wanted, name
        assert source.reader.shape(name) == exact.reader.shape(name)
