"""A checkpoint of transformers as a GGUF file, for architectures of plain decoders.

llama.cpp's own converter is a script of its repository, which no package brings. Texts come as
token ids, so the file has no tokenizer, which the format has a name for.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor

from specc.bench.peers.peer import Form, NotAvailableError

# model_type of transformers → llama.cpp's architecture, and whether it pairs neighbours in rotary
# embeddings, where transformers pairs halves
_ARCHITECTURES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, True),
    "mistral": (gguf.MODEL_ARCH.LLAMA, True),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, False),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, False),
}
_Kind = gguf.GGMLQuantizationType
_TYPES = {
    "float32": (_Kind.F32, gguf.LlamaFileType.ALL_F32),
    "bfloat16": (_Kind.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "int8": (_Kind.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "int4": (_Kind.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
# of the table of embeddings, which is also the head where there is no other
_TABLES = {_Kind.Q4_0: _Kind.Q8_0}
_BLOCK = 32


def export(checkpoint: Path, form: Form, output: Path) -> None:
    """Write the file.

    Args:
        checkpoint: directory with config.json and safetensors.
        form: of the weights; int8 is Q8_0, int4 is Q4_0 with a table of embeddings in Q8_0.
    Raises:
        NotAvailableError: an architecture, a rotary embedding or weights that this does not write.
    """
    if not checkpoint.is_dir():
        raise NotAvailableError(f"specc writes GGUF files of directories, and {checkpoint} is not")
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise NotAvailableError(
            f"specc writes GGUF files of {', '.join(_ARCHITECTURES)}, and this is {kind}: convert"
            " it with llama.cpp's convert_hf_to_gguf.py and pass the file as --target-checkpoint"
        )
    if config.get("quantization_config"):
        raise NotAvailableError("specc writes GGUF files of checkpoints that are not quantized")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window:
        raise NotAvailableError(f"specc writes GGUF files without windows, and this has {window}")
    architecture, is_paired = _ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(output, gguf.MODEL_ARCH_NAMES[architecture])
    kind_of_matrices, file_type = _TYPES[form.integers or form.dtype]
    writer.add_file_type(file_type)
    factors = _write_fields(writer, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in _tensors(checkpoint):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new_name is None:
            raise NotAvailableError(f"llama.cpp's {kind} has no tensor {name}")
        if is_paired and ".self_attn." in name and ("q_proj" in name or "k_proj" in name):
            tensor = _pair_neighbours(tensor, _num_heads(config, "q_proj" in name))
        # norms and biases stay in float32, as with llama.cpp's converter
        kept = kind_of_matrices if tensor.dim() > 1 else _Kind.F32
        if "embed_tokens" in name or "lm_head" in name:
            kept = _TABLES.get(kept, kept)
        if kept in (_Kind.Q8_0, _Kind.Q4_0) and tensor.shape[-1] % _BLOCK:
            raise NotAvailableError(
                f"blocks of {kept.name} have {_BLOCK} columns, and {name} has {tensor.shape[-1]}"
            )
        rounded = tensor.to(getattr(torch, form.dtype)).float().numpy()
        writer.add_tensor(new_name, gguf.quants.quantize(rounded, kept), raw_dtype=kept)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_fields(writer: Any, config: dict[str, Any]) -> numpy.ndarray | None:
    """Shapes and constants; returns by how much frequencies are divided, where they are."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(_num_heads(config, False))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(base)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "llama3":
        return _llama3_factors(rope, base, width)
    raise NotAvailableError(
        f"specc writes GGUF files with rotary embeddings default and llama3, and this has {kind}"
    )


def _llama3_factors(rope: dict[str, Any], base: float, width: int) -> numpy.ndarray:
    """Factors [width / 2], float32, of Llama 3's rotary embeddings."""
    factor, old = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for place in range(0, width, 2):
        length = 2 * math.pi * base ** (place / width)
        if length < old / high:
            factors.append(1.0)
        elif length > old / low:
            factors.append(factor)
        else:
            share = (old / length - low) / (high - low)
            factors.append(1 / ((1 - share) / factor + share))
    return numpy.array(factors, dtype=numpy.float32)


def _num_heads(config: dict[str, Any], is_query: bool) -> int:
    heads: int = config["num_attention_heads"]
    return heads if is_query else config.get("num_key_value_heads") or heads


def _pair_neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head in another order: (half, i) becomes (i, half)."""
    rows = tensor.shape[0] // heads // 2
    split = tensor.reshape(heads, 2, rows, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise NotAvailableError(f"{checkpoint} has no safetensors")
    for file in files:
        yield from load_file(file).items()
