"""Tiny checkpoints of more programs that quantize, as `quantized_checkpoints` has them.

Written number by number from the descriptions of the formats, and by nothing that specc reads them
with.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from torch import Tensor

from tests import quantized_checkpoints as made
from tests.quantized_checkpoints import Format

# arXiv:2305.14314, appendix E
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# a sign and three bits, as bitsandbytes orders them
FP4 = [0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25]
FP4 += [-value for value in FP4]


def auto_round(form: Format, packing: str, **more) -> Format:
    """The words of another program, with AutoRound's configuration."""
    names = ("bits", "group_size", "sym")
    config = {name: form.config[name] for name in names if name in form.config}
    own = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}"}
    return Format(
        config | own | {"data_type": "int", "autoround_version": "0.8"} | more, form.writer
    )


def awq_by_its_own_names(group: int) -> Format:
    """What AutoAWQ's quant_config.json says."""
    config = {
        "quant_method": "awq", "w_bit": 4, "q_group_size": group, "zero_point": True,
        "version": "GEMM",
    }  # fmt: skip
    return Format(config, made.awq(group).writer)


def fbgemm() -> Format:
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return made.write_float8(name, weight, (1, weight.shape[1]), "weight_scale", torch.float32)

    return Format(config, write)


def float8_tensor(config: dict) -> Format:
    """One number for a weight, and one for its activations."""

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        shape = (weight.shape[0], weight.shape[1])
        parts, exact = made.write_float8(name, weight, shape, "weight_scale", torch.float32)
        parts[f"{name}.weight_scale"] = parts[f"{name}.weight_scale"].reshape(())
        return parts | {f"{name}.input_scale": torch.tensor(0.5)}, exact

    return Format(config, write)


def modelopt_fp8() -> Format:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    return float8_tensor(config)


def of_a_producer(form: Format) -> Format:
    """The same, as configurations have it that name no method."""
    config = {key: value for key, value in form.config.items() if key != "quant_method"}
    producer = {"name": form.config["quant_method"], "version": "0.31.0"}
    return Format(config | {"producer": producer}, form.writer)


def quark_config(weight: dict, **more) -> dict:
    general = {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark", "global_quant_config": general | more, "exclude": ["lm_head"],
        "layer_quant_config": {}, "layer_type_quant_config": {},
        "export": {"weight_format": "real_quantized", "pack_method": "reorder",
                   "kv_cache_group": []},
    }  # fmt: skip


def quark_fp8() -> Format:
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True, "group_size": None}
    return float8_tensor(quark_config(weight, input_tensors=dict(weight)))


def quark_mxfp4() -> Format:
    weight = {
        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1,
        "scale_format": "e8m0", "scale_calculation_mode": "even", "is_dynamic": False,
    }  # fmt: skip

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, exponents, exact = made.write_mxfp4(weight)
        return {f"{name}.weight": codes, f"{name}.weight_scale": exponents}, exact

    return Format(quark_config(weight), write)


def write_nvfp4(weight: Tensor, is_inverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes uint8 [N, K / 2], scales e4m3 [N, K / 16], a number for all, and the float32 weight."""
    outputs, columns = weight.shape
    most = weight.abs().max() / (6 * 448)
    common = (1 / most if is_inverse else most).float()
    codes = torch.zeros(outputs, columns // 2, dtype=torch.uint8)
    scales = torch.zeros(outputs, columns // 16, dtype=torch.float8_e4m3fn)
    exact = torch.zeros(outputs, columns)
    for n in range(outputs):
        for g in range(columns // 16):
            own = weight[n, 16 * g : 16 * g + 16]
            step = own.abs().max() / 6 / most
            scales[n, g] = step.clamp(2**-9, 448).to(torch.float8_e4m3fn)
            stored = scales[n, g].float()
            scale = stored * (1 / common if is_inverse else common)
            for k in range(16 * g, 16 * g + 16):
                value = float(weight[n, k].abs() / scale)
                code = int(np.argmin([abs(value - level) for level in E2M1]))
                exact[n, k] = torch.tensor(E2M1[code]) * scale
                if weight[n, k] < 0:
                    exact[n, k] = -exact[n, k]
                    code += 8
                codes[n, k // 2] |= code if k % 2 == 0 else code << 4
    return codes, scales, common, exact


def modelopt_nvfp4() -> Format:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, common, exact = write_nvfp4(weight, is_inverse=False)
        return {
            f"{name}.weight": codes, f"{name}.weight_scale": scales,
            f"{name}.weight_scale_2": common, f"{name}.input_scale": torch.tensor(0.25),
        }, exact  # fmt: skip

    return Format(config, write)


def mixed(form: Format, *, by_groups: bool = False) -> Format:
    """A form of ModelOpt in a checkpoint that has others beside it, named by layers or by groups:
    experts and MLPs in NVFP4, and FP8, as of Nemotron 3 and Qwen3.6.
    """
    layers = {
        "model.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
        "model.layers.1.mixer.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    }
    groups = {
        f"group_{number}": {"weights": {"num_bits": bits, "type": "float"}, "targets": [name]}
        for number, (bits, name) in enumerate(zip((8, 4), layers, strict=True))
    }
    named = {"config_groups": groups} if by_groups else {"quantized_layers": layers}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"} | named
    return Format(config, form.writer)


def modelopt_mixed() -> Format:
    """Both of them in one checkpoint."""

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        is_mlp = "expert" in name or "up_proj" in name or "down_proj" in name
        return (modelopt_nvfp4() if is_mlp else modelopt_fp8()).writer(name, weight)

    return mixed(Format({}, write))


def packed_nvfp4() -> Format:
    """compressed-tensors, nvfp4-pack-quantized, of weights alone."""
    options = {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
        "group_size": 16,
    }  # fmt: skip

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, common, exact = write_nvfp4(weight, is_inverse=True)
        return {
            f"{name}.weight_packed": codes, f"{name}.weight_scale": scales,
            f"{name}.weight_global_scale": common.reshape(1),
        }, exact  # fmt: skip

    return Format(made.compressed_config("nvfp4-pack-quantized", options), write)


def bitsandbytes(kind: str, block: int = 64, nested: int = 0) -> Format:
    """4 bits; with `nested`, so many magnitudes share one of their own."""
    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": bool(nested),
    }  # fmt: skip
    table = torch.tensor(NF4 if kind == "nf4" else FP4)

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        flat, count = weight.flatten(), weight.numel()
        magnitudes = torch.stack([part.abs().max() for part in flat.split(block)])
        parts: dict[str, Tensor] = {}
        state = {
            "quant_type": kind, "blocksize": block, "dtype": "bfloat16",
            "shape": list(weight.shape),
        }  # fmt: skip
        if nested:
            offset = float(magnitudes.mean())
            levels = torch.linspace(-1, 1, 256)
            rest = magnitudes - offset
            largest = torch.stack([part.abs().max() for part in rest.split(nested)])
            bytes_ = torch.zeros(len(rest), dtype=torch.uint8)
            for i in range(len(rest)):
                found = (levels * largest[i // nested] - rest[i]).abs().argmin()
                bytes_[i] = found
                magnitudes[i] = levels[found] * largest[i // nested] + offset
            parts |= {"absmax": bytes_, "nested_absmax": largest, "nested_quant_map": levels}
            state |= {
                "nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset,
            }  # fmt: skip
        else:
            parts["absmax"] = magnitudes.clone()
        packed, exact = torch.zeros(count // 2, 1, dtype=torch.uint8), torch.zeros(count)
        for i in range(count):
            code = int((table * magnitudes[i // block] - flat[i]).abs().argmin())
            exact[i] = table[code] * magnitudes[i // block]
            packed[i // 2] |= code << 4 if i % 2 == 0 else code
        parts |= {"quant_map": table.clone()}
        text = json.dumps(state).encode()
        parts[f"quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        own = {f"{name}.weight.{key}": value for key, value in parts.items()}
        return own | {f"{name}.weight": packed}, exact.view(weight.shape)

    return Format(config, write)


def bitsandbytes_int8() -> Format:
    """LLM.int8(): rows, and the magnitude that 127 stands for."""
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, largest = torch.zeros(weight.shape, dtype=torch.int8), torch.zeros(len(weight))
        exact = torch.zeros(weight.shape)
        for n in range(len(weight)):
            largest[n] = weight[n].abs().max()
            codes[n] = (weight[n] * 127 / largest[n]).round().to(torch.int8)
            exact[n] = codes[n].float() * (largest[n] / 127)
        return {
            f"{name}.weight": codes, f"{name}.SCB": largest,
            f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
        }, exact  # fmt: skip

    return Format(config, write)
