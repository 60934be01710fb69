"""Weights of GGUF files: blocks Q4_0, Q8_0, Q4_K and Q6_K, and names of llama.cpp.

- Q4_0: fp16 d, 16 bytes: low bits are values 0 … 15 of 32, high bits 16 … 31; d · (q - 8).
- Q8_0: fp16 d, 32 int8; d · q.
- Q4_K: 256 values in 8 parts: fp16 d and dmin, 12 bytes with 6 bits of scale and minimum for each
  part, 4 · 32 bytes, low bits part 2j, high bits part 2j + 1; d · scale · q - dmin · minimum.
- Q6_K: 256 values in 16 parts: 128 bytes of low and 64 of high bits, 16 int8 scales, fp16 d;
  d · scale · (q - 32).

Q4_0 and Q8_0 are layouts of the engine. The minima of Q4_K are zero points that are no integers,
and the parts of Q6_K have 16 columns: such weights are read as numbers.
Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h, ggml-quants.c;
convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf_file import BLOCKS, PLAIN, GGUFReader
from specc.artifact.decoders.gguf_parts import first_part
from specc.artifact.decoders.stored_tensors import read_rows
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import TensorReader
from specc.errors import WeightError

METHOD = "gguf"
_GROUP = 32
_LAYOUTS = {"Q4_0": QuantizedLayout(4, _GROUP), "Q8_0": QuantizedLayout(8, _GROUP)}
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


@dataclass(frozen=True)
class GGUFWeight(DecodedWeight):
    """A matrix of a GGUF file.

    Args:
        kind: `Q4_0`, …, or of plain numbers the name of their type.
        paired_rows: rows of a head whose rotary halves are stored pair by pair; 0 for rows in the
            order of the model.
    """

    kind: str
    paired_rows: int

    @property
    def is_quantized(self) -> bool:
        return self.kind in _BYTES

    @property
    def layout(self) -> QuantizedLayout | None:
        return _LAYOUTS.get(self.kind)

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        rows = self._rows(reader, start, stop)
        if self.kind not in _VALUES:
            return rows.float()
        blocks = rows.view(-1, _BYTES[self.kind])
        return _VALUES[self.kind](blocks).reshape(stop - start, self.shape[1])

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        blocks = self._rows(reader, start, stop).view(-1, _BYTES[self.kind])
        data = blocks[:, 2:]
        # sums of bytes wrap: -1, which is 255, becomes 127
        levels = torch.cat([data & 15, data >> 4], 1) if self.kind == "Q4_0" else data + 128
        scales = _half(blocks, 0).reshape(stop - start, -1)
        return Integers(levels.reshape(stop - start, -1), scales)

    def _rows(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        if not self.paired_rows:
            return read_rows(reader, self.tensors[0], start, stop).contiguous()
        # row (half, i) of a head lies at (i, half)
        size = self.paired_rows
        first, last = start // size * size, -(-stop // size) * size
        stored = read_rows(reader, self.tensors[0], first, last)
        heads = stored.view(-1, size // 2, 2, stored.shape[1]).transpose(1, 2)
        return heads.reshape(last - first, -1)[start - first : stop - first].contiguous()


def _half(blocks: Tensor, place: int) -> Tensor:
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    data = blocks[:, 2:]
    return (torch.cat([data & 15, data >> 4], 1).float() - 8) * _half(blocks, 0)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _q4_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat([low & 63, (high & 15) | (low >> 6) << 4], 1).float() * _half(blocks, 0)
    least = torch.cat([middle & 63, (high >> 4) | (middle >> 6) << 4], 1).float() * _half(blocks, 2)
    data = blocks[:, 16:].reshape(-1, 4, 1, 32)
    parts = torch.cat([data & 15, data >> 4], 2).reshape(-1, 8, 32).float()
    return (parts * scale[..., None] - least[..., None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    # 128 values at a time: 64 bytes of low bits, 32 of high ones
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    lows = torch.cat([low & 15, low >> 4], 2)
    highs = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 2)
    q = (lows | highs << 4).reshape(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return (q * scales[..., None]).flatten(1)


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
_BYTES = {name: size for name, _, size in BLOCKS.values()}


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
