"""GGUF files of tiny models, written field by field, and the float32 weights that they stand for.

Blocks are written from the structures of llama.cpp (`block_q4_0`, `block_q8_0`, `block_q4_K`,
`block_q6_K`), a value at a time; their numbers are drawn, so that each bit of a block is used.
Blocks of other types are random bytes with scales of a size, and gguf-py tells what they are.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specc.artifact.decoders.gguf_file import GGUFReader
from tests.models import byte_tokenizer
from tests.quantized_checkpoints import Written

FILE = "model.gguf"
TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10,
    "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18,
    "IQ1_S": 19, "IQ4_NL": 20, "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "BF16": 30,
    "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39,
}  # fmt: skip
# where random blocks have fp16 numbers, and what makes weights of some hundredths of them: a scale,
# and a minimum or its negative, with which their mean is about 0
SCALES = {
    "Q4_1": {0: 0.01, 2: -0.075}, "Q5_0": {0: 0.005}, "Q5_1": {0: 0.005, 2: -0.0775},
    "Q2_K": {80: 0.006, 82: 0.009}, "Q3_K": {108: 0.001}, "Q5_K": {0: 0.0002, 2: 0.0031},
    "IQ4_NL": {0: 0.001}, "IQ4_XS": {0: 0.00005}, "IQ1_S": {0: 0.008}, "IQ2_XXS": {0: 0.001},
    "IQ2_XS": {0: 0.001}, "IQ2_S": {0: 0.001}, "IQ3_XXS": {0: 0.0003}, "IQ3_S": {0: 0.0004},
    "TQ1_0": {52: 0.06}, "TQ2_0": {64: 0.04},
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def half(value: float) -> tuple[bytes, np.float32]:
    """fp16: its bytes, and what it is."""
    stored = np.float16(value)
    return stored.tobytes(), np.float32(stored)


def q4_0(rng: np.random.Generator) -> tuple[bytes, list[np.float32]]:
    data, d = half(rng.uniform(0.02, 0.06))
    q = rng.integers(0, 16, 32)
    # values j and j + 16 share a byte
    data += bytes(int(q[j]) | int(q[j + 16]) << 4 for j in range(16))
    return data, [np.float32(int(x) - 8) * d for x in q]


def q8_0(rng: np.random.Generator) -> tuple[bytes, list[np.float32]]:
    data, d = half(rng.uniform(0.001, 0.003))
    q = rng.integers(-128, 128, 32)
    data += struct.pack("<32b", *q.tolist())
    return data, [np.float32(int(x)) * d for x in q]


def q4_k(rng: np.random.Generator) -> tuple[bytes, list[np.float32]]:
    (first, d), (second, dmin) = half(rng.uniform(0.0005, 0.001)), half(rng.uniform(0.003, 0.006))
    scales, mins = rng.integers(0, 64, 8).tolist(), rng.integers(0, 64, 8).tolist()
    packed = [0] * 12
    for j in range(4):
        packed[j] = scales[j] | (scales[j + 4] >> 4) << 6
        packed[j + 4] = mins[j] | (mins[j + 4] >> 4) << 6
        packed[j + 8] = scales[j + 4] & 15 | (mins[j + 4] & 15) << 4
    q = rng.integers(0, 16, 256)
    data = [0] * 128
    values: list[np.float32] = []
    for i in range(256):
        part, place = i // 32, i % 32
        data[part // 2 * 32 + place] |= int(q[i]) << (4 if part % 2 else 0)
        scale, least = d * np.float32(scales[part]), dmin * np.float32(mins[part])
        values.append(scale * np.float32(int(q[i])) - least)
    return first + second + bytes(packed) + bytes(data), values


def q6_k(rng: np.random.Generator) -> tuple[bytes, list[np.float32]]:
    last, d = half(rng.uniform(0.0001, 0.0002))
    q, scales = rng.integers(0, 64, 256).tolist(), rng.integers(-128, 128, 16).tolist()
    low, high = [0] * 128, [0] * 64
    for i in range(256):
        # of 128 values, 32 after 32 after 32 after 32
        half_, quarter, place = i // 128, i % 128 // 32, i % 32
        byte = half_ * 64 + quarter % 2 * 32 + place
        low[byte] |= (q[i] & 15) << (4 if quarter >= 2 else 0)
        high[half_ * 32 + place] |= (q[i] >> 4) << (2 * quarter)
    values = [np.float32(q[i] - 32) * (np.float32(scales[i // 16]) * d) for i in range(256)]
    return bytes(low) + bytes(high) + struct.pack("<16b", *scales) + last, values


BLOCKS: dict[str, tuple[int, Callable[..., tuple[bytes, list[np.float32]]]]] = {
    "Q4_0": (32, q4_0), "Q8_0": (32, q8_0), "Q4_K": (256, q4_k), "Q6_K": (256, q6_k),
}  # fmt: skip


def draw(kind: str, shape: Sequence[int], seed: int) -> tuple[bytes, Tensor]:
    """A matrix of drawn blocks: its bytes, and float32 [N, K]."""
    if kind not in BLOCKS:
        return draw_bytes(kind, shape, seed)
    rng, (width, block) = np.random.default_rng(seed), BLOCKS[kind]
    data, values = b"", []
    for _ in range(int(np.prod(shape)) // width):
        part, own = block(rng)
        data, values = data + part, values + own
    return data, torch.tensor(np.array(values, np.float32)).view(*shape)


def draw_bytes(kind: str, shape: Sequence[int], seed: int) -> tuple[bytes, Tensor]:
    """As `draw`, of blocks of random bytes."""
    import gguf

    rng, number = np.random.default_rng(seed), gguf.GGMLQuantizationType(TYPES[kind])
    width, size = gguf.GGML_QUANT_SIZES[number]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // width, size), dtype=np.uint8)
    for place, scale in SCALES.get(kind, {}).items():
        drawn = (scale * rng.uniform(0.7, 1.3, (len(blocks), 1))).astype(np.float16)
        blocks[:, place : place + 2] = drawn.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(119, 123, len(blocks))
    if kind == "IQ1_M":
        # four bits of its scale are in each of four words
        words, scale = blocks[:, 48:].view("<u2"), int(np.float16(0.008).view(np.uint16))
        words &= 0x0FFF
        words |= np.array([scale >> i << 12 & 0xF000 for i in (0, 4, 8, 12)], np.uint16)
    values = gguf.quants.dequantize(blocks.copy(), number)
    return blocks.tobytes(), torch.from_numpy(values.reshape(*shape).copy())


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, value: Any) -> bytes:
    """One of the metadata: a string, a number, or a list of strings or numbers."""
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    if isinstance(value, bool):
        return text(name) + struct.pack("<I?", 7, value)
    if isinstance(value, float):
        return text(name) + struct.pack("<If", 6, value)
    if isinstance(value, list):
        kind = {str: 8, float: 6, int: 5, bool: 7}[type(value[0]) if value else str]
        form = {6: "<f", 5: "<i", 7: "<?"}.get(kind, "")
        items = b"".join(text(x) if kind == 8 else struct.pack(form, x) for x in value)
        return text(name) + struct.pack("<IIQ", 9, kind, len(value)) + items
    return text(name) + struct.pack("<II", 4, value)


def write_file(
    path: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
    version: int = 3,
    alignment: int = 32,
) -> None:
    """Write a file of tensors (type, shape with dim 0 first, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    head += b"".join(field(name, value) for name, value in fields.items())
    data = b""
    for name, (kind, shape, stored) in tensors.items():
        data += bytes(-len(data) % alignment)
        number = TYPES.get(kind, kind)
        head += text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(list(shape)))
        head += struct.pack("<IQ", number, len(data))
        data += stored
    path.write_bytes(head + bytes(-len(head) % alignment) + data)


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, tuple[str, Sequence[int], bytes]]]:
    """Fields and tensors of a file, as `write_file` takes them."""
    reader, kinds = GGUFReader(path, reads_lists=True), {n: name for name, n in TYPES.items()}
    tensors = {
        name: (kinds[own.kind], own.shape, b"".join(map(bytes, reader.read_chunks(name))))
        for name, own in reader.tensors.items()
    }
    reader.close()
    return reader.fields, tensors


def write_parts(
    stem: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
    sizes: Sequence[int],
) -> list[Path]:
    """Write a file in parts, as llama-gguf-split does: the first one has the fields.

    Args:
        fields: of the whole; those of parts are put beside them.
        tensors: as of `write_file`.
        sizes: tensors of each part.
    """
    names, files = list(tensors), []
    for number, size in enumerate(sizes):
        own = {name: tensors[name] for name in names[:size]}
        names = names[size:]
        file = stem.with_name(f"{stem.name}-{number + 1:05}-of-{len(sizes):05}.gguf")
        split = {
            "split.no": number, "split.count": len(sizes), "split.tensors.count": len(tensors),
        }  # fmt: skip
        write_file(file, split if number else {**fields, **split}, own)
        files.append(file)
    return files


def model_fields(architecture: str, config: Any) -> dict[str, Any]:
    """What a converter writes of a configuration of transformers."""
    own = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": 10000.0,
    }  # fmt: skip
    if getattr(config, "head_dim", None):
        own |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    named = {f"{architecture}.{name}": value for name, value in own.items()}
    return {"general.architecture": architecture, "general.name": "tiny"} | named


def byte_fields() -> dict[str, Any]:
    """Of `models.byte_tokenizer`: 128 letters, and no merges."""
    letters = sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
    own = {
        "model": "gpt2", "pre": "gpt-2", "tokens": [letter for letter, _ in letters],
        "token_type": [1] * len(letters), "merges": [], "add_bos_token": False,
    }  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


def llama_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, _, number, rest = module.split(".", 3)
    return f"blk.{number}.{NAMES[rest]}.{kind}"


def paired(weight: bytes, num_rows: int, head_rows: int) -> bytes:
    """Rows of heads as llama.cpp's converter has them: (half, i) becomes (i, half)."""
    size = len(weight) // num_rows
    rows = [weight[i * size : (i + 1) * size] for i in range(num_rows)]
    out = [b""] * num_rows
    for row, data in enumerate(rows):
        head, place = divmod(row, head_rows)
        side, i = divmod(place, head_rows // 2)
        out[head * head_rows + 2 * i + side] = data
    return b"".join(out)


def write_model(
    source: Path, root: Path, architecture: str, kind_of: Callable[[str], str], config: Any
) -> Written:
    """Write a model with drawn matrices as GGUF, and the float32 checkpoint of these numbers.

    Args:
        source: directory of the model in float32.
        root: gets `quantized`, with config.json, tokenizer.json and the file, and `exact`.
        kind_of: type of a matrix, by its name in transformers.
    """
    made = Written(root / "quantized", root / "exact")
    tensors, stored = load_file(source / "model.safetensors"), {}
    for path in (made.quantized, made.exact):
        shutil.copytree(source, path)
    for seed, (name, value) in enumerate(tensors.items()):
        kind = kind_of(name) if value.dim() == 2 else "F32"
        if kind not in ("F32", "F16"):
            data, exact = draw(kind, value.shape, seed)
        else:
            exact = value.half().float() if kind == "F16" else value
            data = (value.half() if kind == "F16" else value).numpy().tobytes()
        made.weights[name] = exact
        head_rows = config.hidden_size // config.num_attention_heads
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            data = paired(data, value.shape[0], head_rows)
        stored[llama_name(name)] = (kind, tuple(value.shape), data)
    fields = model_fields(architecture, config) | byte_fields()
    (made.quantized / "model.safetensors").unlink()
    write_file(made.quantized / FILE, fields, stored)
    save_file(made.weights, made.exact / "model.safetensors", {"format": "pt"})
    return made
