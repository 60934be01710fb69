"""Weights of GGUF files by names of llama.cpp; how they are stored is in `gguf_weight.py`.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf_file import BLOCKS, PLAIN, GGUFReader
from specc.artifact.decoders.gguf_parts import first_part
from specc.artifact.decoders.gguf_weight import GGUFWeight
from specc.errors import WeightError

METHOD = "gguf"
# general.architecture → model types of transformers whose names and norms are these
_ARCHITECTURES = {"llama": ("llama", "mistral"), "qwen2": ("qwen2",), "qwen3": ("qwen3",)}
# whose converter takes rotary halves of queries and keys apart, pair by pair
_PAIRED = ("llama",)
_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


def model_name(name: str) -> str:
    """What transformers calls a tensor of llama.cpp's name; others keep theirs."""
    found = _LAYER.fullmatch(name)
    if found is not None and found[2] in _NAMES:
        return f"model.layers.{found[1]}.{_NAMES[found[2]]}.{found[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def find_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory without safetensors, or its first part; None if there is none.

    Raises:
        WeightError: there are several models.
    """
    found = sorted(directory.glob("*.gguf"))
    if not found or any(directory.glob("*.safetensors")):
        return None
    if len(found) > 1 and (first := first_part(found)) is not None:
        return first
    if len(found) > 1:
        raise WeightError(
            f"{directory} holds {found[0].name}, {found[-1].name} and no safetensors",
            "one GGUF file, or the parts of one",
            "leave one model there, or pass the file",
        )
    return found[0]


def open_gguf(path: Path, config: Any) -> tuple[GGUFReader, dict[str, DecodedWeight]]:
    """A GGUF file whose tensors have the names of a model of transformers, and its matrices.

    Args:
        path: of the file.
        config: configuration of the model, of transformers.
    Raises:
        WeightError: it is malformed, of another model, or of types that are not read.
    """
    reader = GGUFReader(path, model_name)
    try:
        return reader, _decode(reader, config)
    except BaseException:
        reader.close()
        raise


def _decode(reader: GGUFReader, config: Any) -> dict[str, DecodedWeight]:
    kind, where = reader.fields.get("general.architecture"), reader.location()
    model = getattr(config, "model_type", None)
    if kind not in _ARCHITECTURES:
        raise WeightError(
            f"{where} is of the architecture {kind}",
            ", ".join(_ARCHITECTURES) + ": others change norms or rows in ways of their own",
            "pass the checkpoint in safetensors",
        )
    if model not in _ARCHITECTURES[kind]:
        raise WeightError(
            f"{where} is of the architecture {kind}, and config.json of the model type {model}",
            f"{' or '.join(_ARCHITECTURES[kind])}",
            "pass the config.json and tokenizer.json of the same model",
        )
    heads = {
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
    }
    for name, count in heads.items():
        own = reader.fields.get(f"{kind}.attention.{name}", count)
        if own != count:
            raise WeightError(
                f"{where} has {name} {own}, and config.json {count}",
                "the same number",
                "pass the config.json of the same model",
            )
    found: dict[str, DecodedWeight] = {}
    for name, tensor in reader.tensors.items():
        module, _, part = name.rpartition(".")
        query, key = module.endswith(".q_proj"), module.endswith(".k_proj")
        is_paired = kind in _PAIRED and (query or key)
        if is_paired and part == "bias":
            raise WeightError(
                f"{name} in {where}: queries and keys of {kind} with a bias",
                "a model without one: its rows would be in pairs, too",
                "pass the checkpoint in safetensors",
            )
        if tensor.kind in PLAIN and not is_paired:
            continue
        if len(tensor.shape) != 2:
            raise WeightError(
                f"{name} in {where} has shape {list(tensor.shape)}",
                "matrices: experts are not read from GGUF",
                "pass the checkpoint in safetensors",
            )
        count = heads["head_count" if query else "head_count_kv"]
        rows = tensor.shape[0] // count if is_paired else 0
        label = BLOCKS[tensor.kind][0] if tensor.kind in BLOCKS else str(PLAIN[tensor.kind])
        scheme = f"{METHOD}, {label.removeprefix('torch.')}"
        found[name] = GGUFWeight(name, tensor.shape, (name,), scheme, label, rows)
    return found
