"""The configuration of transformers that a GGUF file's own fields say.

    config = config_of(reader)        # content of a config.json

Fields that are not known are refused: one that is passed over may be a scale, a window or a rotary
scaling, without which the model says something else.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; llama.cpp, convert_hf_to_gguf.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from specc.artifact.decoders.gguf_file import GGUFReader
from specc.artifact.decoders.stored_tensors import read_tensor
from specc.errors import WeightError
from specc.passes.frontend.gguf_ends import end_token_ids
from specc.passes.frontend.gguf_tensors import FREQUENCIES, are_factors_of

# general.architecture → model type, class, and what its configuration says besides
_MODELS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"attention_bias": False}),
}
_NUMBERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# read below, or of no meaning for what is computed
_OTHERS = {
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "vocab_size",
}  # fmt: skip
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# of Llama 3.1 and later: wavelengths above original / low are stretched, those below original /
# high are not
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DO = "put the file in a directory with config.json and tokenizer.json of the model, and pass that"


def config_of(reader: GGUFReader) -> dict[str, Any]:
    """Content of a config.json.

    Args:
        reader: of the file, with the names that transformers has for its tensors.
    Raises:
        WeightError: an architecture, a field or a rotary scaling that is not read; a field that is
            missing.
    """
    where, fields = reader.location(), reader.fields
    kind = str(fields.get("general.architecture"))
    if (what := fields.get("general.type", "model")) != "model":
        raise WeightError(
            f"{where} is of the type {what} (general.type)",
            "a model",
            "merge an adapter into its model first; other parts of a model are not read",
        )
    if kind not in _MODELS:
        raise WeightError(
            f"{where} is of the architecture {kind}", f"one of {', '.join(_MODELS)}", _DO
        )
    model_type, name, more = _MODELS[kind]
    own = {
        key.removeprefix(f"{kind}."): value
        for key, value in fields.items()
        if key.startswith(f"{kind}.")
    }
    unknown = sorted(own.keys() - _NUMBERS.keys() - _OTHERS)
    if unknown:
        raise WeightError(
            f"{where} has the field {kind}.{unknown[0]}",
            "fields of a plain model of this architecture: what this one means is not known",
            _DO,
        )
    config: dict[str, Any] = {"model_type": model_type, "architectures": [name], **more}
    for key, own_name in _NUMBERS.items():
        config[own_name] = _number(own, key, kind, where)
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = own.get("attention.head_count_kv", heads)
    head_dim = own.get("attention.key_length", config["hidden_size"] // max(1, heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise WeightError(
                f"{where} has {kind}.{key} {own[key]}, and heads of {head_dim} columns",
                "keys, values and rotated columns of one width",
                _DO,
            )
    config["head_dim"] = head_dim
    if _EMBEDDING not in reader.tensors:
        raise WeightError(
            f"{where} holds no token_embd.weight", "a table of embeddings", "download it again"
        )
    config["vocab_size"] = reader.tensors[_EMBEDDING].shape[0]
    config["tie_word_embeddings"] = _HEAD not in reader.tensors
    config["rope_parameters"] = _rotary(reader, own, head_dim, kind)
    for part, name in (("bos", "bos"), ("pad", "padding")):
        config[f"{part}_token_id"] = fields.get(f"tokenizer.ggml.{name}_token_id")
    config["eos_token_id"] = end_token_ids(fields) or None
    return config


def _number(own: Mapping[str, Any], key: str, kind: str, where: str) -> int | float:
    value = own.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WeightError(
            f"{where} has {kind}.{key} {value}" if key in own else f"{where} has no {kind}.{key}",
            f"a number {kind}.{key}",
            _DO,
        )
    return _decimal(value) if isinstance(value, float) else value


def _decimal(value: float) -> float:
    """What was meant by a number that is stored in float32: the shortest decimal that is it."""
    exact = struct.pack("<f", value)
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((item for item in shorter if struct.pack("<f", item) == exact), value)


def _rotary(reader: GGUFReader, own: Mapping[str, Any], head_dim: int, kind: str) -> dict[str, Any]:
    """`rope_parameters` of transformers."""
    where, base = reader.location(), _decimal(float(own.get("rope.freq_base", 10000.0)))
    scaling = own.get("rope.scaling.type", "none")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if scaling == "linear":
        found |= {"rope_type": "linear", "factor": _number(own, "rope.scaling.factor", kind, where)}
    elif scaling != "none":
        raise WeightError(f"{where} has {kind}.rope.scaling.type {scaling}", "none, or linear", _DO)
    if FREQUENCIES not in reader.tensors:
        return found
    factors = read_tensor(reader, FREQUENCIES).float()
    factor = float(factors.max()) if factors.numel() else 0.0
    stretched = found | _LLAMA3 | {"factor": factor}
    if scaling != "none" or factor < 1 or not are_factors_of(factors, _llama(head_dim, stretched)):
        raise WeightError(
            f"{where} has factors of rotary frequencies ({FREQUENCIES}) that are not those of"
            f" Llama 3.1, stretched {factor:g}-fold from"
            f" {_LLAMA3['original_max_position_embeddings']} positions",
            "no such factors, or these",
            _DO,
        )
    return stretched


def _llama(head_dim: int, rope: dict[str, Any]) -> Any:
    """A configuration of transformers that has a rotary scaling and heads of this width."""
    from transformers import LlamaConfig

    return LlamaConfig(head_dim=head_dim, rope_parameters=rope)
