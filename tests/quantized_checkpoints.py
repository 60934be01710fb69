"""Tiny quantized checkpoints, and beside each one the float32 checkpoint that it stands for.

Written from the descriptions of the formats, word by word and nibble by nibble, and by nothing that
specc reads them with: a mistake that a writer and a reader share would not be seen.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"
# AutoAWQ's order_map: nibble i of a word is output order_map[i] of its eight
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Rounded:
    """A weight (u - z) · s: u [N, K] and z [N, G] integers from 0 on, s [N, G] as it is stored."""

    levels: np.ndarray
    scales: Tensor
    zeros: np.ndarray
    group: int

    @property
    def weight(self) -> Tensor:
        """[N, K] float32, column by column."""
        scales = self.scales.float().numpy()
        out = np.empty(self.levels.shape, np.float32)
        for k in range(self.levels.shape[1]):
            g = k // self.group
            out[:, k] = (self.levels[:, k] - self.zeros[:, g]).astype(np.float32) * scales[:, g]
        return torch.from_numpy(out)


def round_weight(
    weight: Tensor,
    bits: int,
    group: int,
    dtype: torch.dtype = torch.float16,
    is_symmetric: bool = True,
    least_zero: int = 0,
) -> Rounded:
    """Round a weight [N, K] in groups of columns; the last one may be short.

    Args:
        bits: 4 or 8.
        is_symmetric: zero points are the middle.
        least_zero: of the zero points that are not.
    """
    values, top = weight.float().numpy(), (1 << bits) - 1
    outputs, columns = values.shape
    count = -(-columns // group)
    levels = np.zeros((outputs, columns), np.int64)
    zeros = np.full((outputs, count), 1 << (bits - 1), np.int64)
    scales = torch.zeros(outputs, count)
    for g in range(count):
        part = values[:, g * group : (g + 1) * group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        step = np.maximum(-low, high) / (top // 2) if is_symmetric else (high - low) / top
        stored = torch.from_numpy(step.astype(np.float32)).to(dtype)
        scales[:, g] = stored.float()
        step = stored.float().numpy()
        if not is_symmetric:
            zeros[:, g] = np.clip(np.rint(-low / step), least_zero, top)
        found = np.rint(part / step[:, None]) + zeros[:, g, None]
        levels[:, g * group : (g + 1) * group] = np.clip(found, 0, top)
    return Rounded(levels, scales.to(dtype), zeros, group)


def words_along_rows(fields: np.ndarray, bits: int) -> Tensor:
    """[R, C] integers → int32 [R, words]: field i of a word begins at its bit i · bits."""
    each = 32 // bits
    out = np.zeros((fields.shape[0], -(-fields.shape[1] // each)), np.uint32)
    for row in range(fields.shape[0]):
        for column in range(fields.shape[1]):
            value = np.uint32(int(fields[row, column]) << (bits * (column % each)))
            out[row, column // each] |= value
    return torch.from_numpy(out.view(np.int32))


def words_along_columns(fields: np.ndarray, bits: int) -> Tensor:
    """[R, C] integers → int32 [words, C]: each column's fields, one after the other."""
    return words_along_rows(fields.T, bits).t().contiguous()


def write_packed(name: str, item: Rounded, bits: int, has_zeros: bool) -> dict[str, Tensor]:
    """compressed-tensors, pack-quantized: signed numbers, with an offset where they are packed."""
    middle = 1 << (bits - 1)
    signed = item.levels - middle
    found = {
        f"{name}.weight_packed": words_along_rows(signed + middle, bits),
        f"{name}.weight_scale": item.scales,
        f"{name}.weight_shape": torch.tensor(item.levels.shape),
    }
    if has_zeros:
        signed_zeros = item.zeros - middle
        # along the outputs
        packed = words_along_columns(signed_zeros + middle, bits)
        found[f"{name}.weight_zero_point"] = packed
    return found


def write_whole(name: str, item: Rounded) -> dict[str, Tensor]:
    """compressed-tensors, int-quantized: int8 as they are."""
    return {
        f"{name}.weight": torch.from_numpy(item.levels - 128).to(torch.int8),
        f"{name}.weight_scale": item.scales,
    }


def write_gptq(name: str, item: Rounded, bits: int, version: int = 1) -> dict[str, Tensor]:
    """GPTQ: words along the inputs; version 1 has zero points less 1."""
    columns = item.levels.shape[1]
    stored = item.zeros.T - (1 if version == 1 else 0)
    return {
        f"{name}.qweight": words_along_columns(item.levels.T, bits),
        f"{name}.qzeros": words_along_rows(stored & ((1 << bits) - 1), bits),
        f"{name}.scales": item.scales.t().contiguous(),
        f"{name}.g_idx": torch.arange(columns, dtype=torch.int32) // item.group,
    }


def write_awq(name: str, item: Rounded) -> dict[str, Tensor]:
    """AWQ, gemm: words along the outputs, in an order of their own."""

    def words(fields: np.ndarray) -> Tensor:
        out = np.zeros((fields.shape[0], fields.shape[1] // 8), np.uint32)
        for row in range(fields.shape[0]):
            for word in range(out.shape[1]):
                for nibble in range(8):
                    value = int(fields[row, word * 8 + AWQ_ORDER[nibble]])
                    out[row, word] |= np.uint32(value << (4 * nibble))
        return torch.from_numpy(out.view(np.int32))

    return {
        f"{name}.qweight": words(item.levels.T),
        f"{name}.qzeros": words(item.zeros.T),
        f"{name}.scales": item.scales.t().contiguous(),
    }


def write_float8(
    name: str, weight: Tensor, blocks: tuple[int, int], suffix: str, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """e4m3 with a scale for each block; returns the tensors, and the weight in float32."""
    outputs, columns = weight.shape
    height, width = blocks
    rows, places = -(-outputs // height), -(-columns // width)
    codes = torch.empty(outputs, columns, dtype=torch.float8_e4m3fn)
    scales, exact = torch.empty(rows, places, dtype=dtype), torch.empty(outputs, columns)
    for i in range(rows):
        for j in range(places):
            own = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scales[i, j] = weight[own].abs().max() / 448
            scale = scales[i, j].float()
            codes[own] = (weight[own] / scale).to(torch.float8_e4m3fn)
            exact[own] = codes[own].float() * scale
    return {f"{name}.weight": codes, f"{name}.{suffix}": scales}, exact


def compressed_config(form: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors."""
    scheme = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"group_0": scheme},
    } | more  # fmt: skip


@dataclass
class Written:
    """A checkpoint and the float32 checkpoint of the same numbers."""

    quantized: Path
    exact: Path
    weights: dict[str, Tensor] = field(default_factory=dict)


def is_projection(name: str) -> bool:
    """Whether a weight of a layer, and not the head, has this name."""
    return "_proj." in name


Writer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def write_checkpoint(
    source: Path,
    root: Path,
    config: Mapping[str, Any],
    writer: Writer,
    is_quantized: Callable[[str], bool] = is_projection,
) -> Written:
    """Write a model's checkpoint with its projections quantized.

    Args:
        source: directory of the model in float32.
        root: gets `quantized` and `exact`.
        config: `quantization_config`.
        writer: (name of a layer, its weight) → tensors of the format, and the weight in float32.
    """
    made = Written(root / "quantized", root / "exact")
    tensors = load_file(source / FILE)
    for path in (made.quantized, made.exact):
        shutil.copytree(source, path)
    stored: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith(".weight") and value.dim() == 2 and is_quantized(name):
            parts, exact = writer(name.removesuffix(".weight"), value)
            stored |= parts
            made.weights[name] = exact
        else:
            stored[name] = value
    whole = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(whole, made.quantized / FILE, {"format": "pt"})
    save_file(tensors | made.weights, made.exact / FILE, {"format": "pt"})
    set_config(made.quantized, quantization_config=dict(config))
    return made


def set_config(directory: Path, **changes: Any) -> None:
    """Replace fields of a config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@dataclass(frozen=True)
class Format:
    """One way to quantize a tiny model: its configuration, and how its layers are written."""

    config: Mapping[str, Any]
    writer: Writer


def packed(bits: int, group: int | None, is_symmetric: bool = True) -> Format:
    """compressed-tensors, pack-quantized; without a group, one scale for each output."""
    options = {
        "num_bits": bits, "type": "int", "symmetric": is_symmetric,
        "strategy": "channel" if group is None else "group", "group_size": group,
    }  # fmt: skip

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = group or weight.shape[1]
        item = round_weight(weight, bits, size, torch.bfloat16, is_symmetric)
        return write_packed(name, item, bits, not is_symmetric), item.weight

    return Format(compressed_config("pack-quantized", options), write)


def draw_places(columns: int, name: str) -> Tensor:
    """An order of columns, one for all layers that read the same rows."""
    siblings = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("",))
    seed = next(i for i, parts in enumerate(siblings) if any(part in name for part in parts))
    return torch.from_numpy(np.random.default_rng(seed).permutation(columns))


def activation_order(item: Rounded, places: Tensor) -> tuple[Rounded, Tensor, Tensor]:
    """Put column c of a rounded weight where it belongs, at places[c].

    Returns:
        the weight; the group of each of its columns; and the float32 weight.
    """
    columns = len(places)
    owners, levels = torch.zeros(columns, dtype=torch.int32), np.zeros_like(item.levels)
    exact = torch.empty(item.levels.shape)
    rounded = item.weight
    for column in range(columns):
        owners[places[column]] = column // item.group
        levels[:, places[column]] = item.levels[:, column]
        exact[:, places[column]] = rounded[:, column]
    return Rounded(levels, item.scales, item.zeros, item.group), owners, exact


def in_order(form: Format) -> Format:
    """The same, with columns in groups in another order than theirs (act-order, desc_act)."""
    config = dict(form.config)
    is_gptq = config["quant_method"] == "gptq"
    if is_gptq:
        config["desc_act"] = True

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        places = draw_places(weight.shape[1], name)
        weight = weight[:, places]
        if is_gptq:
            item = round_weight(weight, 4, config["group_size"], torch.float16, config["sym"], 1)
            item, owners, exact = activation_order(item, places)
            parts = write_gptq(name, item, 4) | {f"{name}.g_idx": owners}
            return parts, exact
        item = round_weight(weight, 4, 32, torch.bfloat16, is_symmetric=False)
        item, owners, exact = activation_order(item, places)
        return write_packed(name, item, 4, True) | {f"{name}.weight_g_idx": owners}, exact

    return Format(config, write)


def gptq(bits: int, group: int, is_symmetric: bool = True, version: int = 1) -> Format:
    """GPTQ; a group of -1 is one scale for each output."""
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False,
        "sym": is_symmetric, "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = weight.shape[1] if group == -1 else group
        item = round_weight(weight, bits, size, torch.float16, is_symmetric, 2 - version)
        return write_gptq(name, item, bits, version), item.weight

    return Format(config, write)


def awq(group: int) -> Format:
    """AWQ, gemm."""
    config = {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": None,
    }  # fmt: skip

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        item = round_weight(weight, 4, group, torch.float16, is_symmetric=False)
        return write_awq(name, item), item.weight

    return Format(config, write)


def float8_blocks(size: int) -> Format:
    """`quant_method: fp8`, in square blocks."""
    config = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [size, size],
    }  # fmt: skip

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return write_float8(name, weight, (size, size), "weight_scale_inv", torch.float32)

    return Format(config, write)


def write_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [N, K / 2], exponents uint8 [N, K / 32], and the weight that they are."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    groups = weight.double().unflatten(1, (-1, 32))
    largest = groups.abs().amax(2, keepdim=True)
    power = torch.where(largest > 0, largest.log2().floor() - 2, -127.0)
    codes = (groups.abs() / power.exp2())[..., None].sub(table).abs().argmin(-1)
    exact = (table[codes] * power.exp2()).where(groups >= 0, -table[codes] * power.exp2())
    codes = (codes + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    exponents = (power + 127)[..., 0].to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, exponents, exact.flatten(1).float()


def packed_mxfp4() -> Format:
    """compressed-tensors, mxfp4-pack-quantized."""
    options = {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
    }  # fmt: skip

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, exponents, exact = write_mxfp4(weight)
        return {f"{name}.weight_packed": codes, f"{name}.weight_scale": exponents}, exact

    return Format(compressed_config("mxfp4-pack-quantized", options), write)


def whole(strategy: str = "channel") -> Format:
    """compressed-tensors, int-quantized: what W8A8 checkpoints hold."""
    options = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        item = round_weight(weight, 8, weight.shape[1], torch.bfloat16)
        return write_whole(name, item), item.weight

    config = compressed_config("int-quantized", options)
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    config["config_groups"]["group_0"]["input_activations"] = activations
    return Format(config, write)


def float8_channels(strategy: str = "channel", block: int = 32) -> Format:
    """compressed-tensors, float-quantized."""
    options = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy,
        "block_structure": [block, block] if strategy == "block" else None,
    }  # fmt: skip

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        blocks = {
            "channel": (1, weight.shape[1]), "tensor": tuple(weight.shape), "block": (block, block),
        }[strategy]  # fmt: skip
        parts, exact = write_float8(name, weight, blocks, "weight_scale", torch.bfloat16)
        if strategy == "tensor":
            parts[f"{name}.weight_scale"] = parts[f"{name}.weight_scale"].reshape(1)
        return parts, exact

    return Format(compressed_config("float-quantized", options), write)
