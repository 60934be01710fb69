"""The configuration of transformers that a GGUF file's own fields say.

    config = config_of(reader)        # content of a config.json

Fields that are not known are refused: one that is passed over may be a scale, a window or a rotary
scaling, without which the model says something else. What single architectures need besides their
row of the table is in `gguf_models`.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; llama.cpp, conversion/.
"""

from __future__ import annotations

from typing import Any

from specc.artifact.decoders.gguf_architectures import ARCHITECTURES
from specc.artifact.decoders.gguf_checkpoint import unknown_architecture
from specc.artifact.decoders.gguf_file import GGUFReader
from specc.artifact.decoders.gguf_names import SIZES
from specc.artifact.decoders.gguf_targets import Architecture
from specc.errors import WeightError
from specc.passes.frontend.gguf_ends import end_token_ids
from specc.passes.frontend.gguf_fields import Fields
from specc.passes.frontend.gguf_models import COMPLETE, model_type_of
from specc.passes.frontend.gguf_rotary import rotary_of

# of every architecture; read below and in `gguf_rotary`, or of no meaning for what is computed
_READ = {
    "attention.key_length", "attention.value_length", "attention.sliding_window",
    "attention.sliding_window_pattern", "rope.dimension_count", "rope.freq_base",
    "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "vocab_size",
}  # fmt: skip
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


def config_of(reader: GGUFReader) -> dict[str, Any]:
    """Content of a config.json.

    Args:
        reader: of the file, with the lists among its fields.
    Raises:
        WeightError: an architecture, a field or a rotary scaling that is not read; a field that is
            missing.
    """
    where = reader.location()
    kind = str(reader.fields.get("general.architecture"))
    if (what := reader.fields.get("general.type", "model")) != "model":
        raise WeightError(
            f"{where} is of the type {what} (general.type)",
            "a model",
            "merge an adapter into its model first; other parts of a model are not read",
        )
    if kind not in ARCHITECTURES:
        raise unknown_architecture(kind, where)
    architecture, fields = ARCHITECTURES[kind], Fields(reader.fields, kind, where)
    unknown = sorted(fields.keys() - _READ - architecture.fields.keys())
    if unknown:
        raise fields.refusal(
            unknown[0],
            "fields of a plain model of this architecture: what this one means is not known",
        )
    config: dict[str, Any] = {"model_type": model_type_of(fields, reader), **architecture.says}
    config["architectures"] = [_class_of(config["model_type"])]
    layers = fields.number("block_count")
    for key in SIZES:
        if key not in fields:
            raise fields.refusal(key, f"a number {kind}.{key}")
    for key, name in architecture.fields.items():
        if name and key in fields:
            config[name] = fields.value(key, layers)
    _add_heads(config, fields, architecture)
    _add_windows(config, fields, architecture, layers)
    if _EMBEDDING not in reader.tensors:
        raise WeightError(
            f"{where} holds no token_embd.weight", "a table of embeddings", "download it again"
        )
    config["vocab_size"] = reader.tensors[_EMBEDDING].shape[0]
    config["tie_word_embeddings"] = _HEAD not in reader.tensors
    width = fields.number("embedding_length")
    head_dim = config.get("head_dim") or width // max(1, fields.number("attention.head_count"))
    if architecture.has_latents:  # the rest of a head is not rotated
        head_dim = fields.number("rope.dimension_count")
    config["rope_parameters"] = rotary_of(reader, fields, architecture, head_dim)
    if kind in COMPLETE:
        COMPLETE[kind](config, fields, reader)
    for part, name in (("bos", "bos"), ("pad", "padding")):
        config[f"{part}_token_id"] = reader.fields.get(f"tokenizer.ggml.{name}_token_id")
    config["eos_token_id"] = end_token_ids(reader.fields) or None
    return config


def _class_of(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _add_heads(config: dict[str, Any], fields: Fields, architecture: Architecture) -> None:
    """Widths of heads, and how many of keys there are where the file does not say."""
    if architecture.has_latents:
        return
    heads = fields.number("attention.head_count")
    if fields.get("attention.head_count_kv") is None and "num_key_value_heads" in (
        architecture.fields.values()
    ):
        config["num_key_value_heads"] = heads
    head_dim = fields.number(
        "attention.key_length", fields.number("embedding_length") // max(1, heads)
    )
    if fields.number("attention.value_length", head_dim) != head_dim:
        raise fields.refusal(
            "attention.value_length", f"{head_dim}, as wide as keys ({fields.kind}.…key_length)"
        )
    config["head_dim"] = head_dim


def _add_windows(
    config: dict[str, Any], fields: Fields, architecture: Architecture, layers: int
) -> None:
    """Which layers see a window alone, by the file's pattern or as llama.cpp knows it."""
    window = fields.number("attention.sliding_window", 0)
    config["sliding_window"] = window or None
    pattern = fields.get("attention.sliding_window_pattern", architecture.window_every)
    if not window or not pattern:
        return
    if isinstance(pattern, int):
        pattern = [number % pattern < pattern - 1 for number in range(layers)]
    if len(pattern) != layers or any(not isinstance(x, bool | int) for x in pattern):
        raise fields.refusal(
            "attention.sliding_window_pattern", f"a truth for each of {layers} layers, or a number"
        )
    kinds = {True: "sliding_attention", False: "full_attention"}
    config["layer_types"] = [kinds[bool(x)] for x in pattern]
