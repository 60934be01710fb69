"""Calls of fused operators that passes of models make, of random shapes and values."""

from __future__ import annotations

import random

import torch

from tests.kernels.cpu.call_parts import WIDTHS, Arguments, Builder
from tests.kernels.cpu.model_calls import MODEL_BUILDERS

_PLACES = ("q_start", "slot", "block_table")


def _rms_norm(rng: random.Random) -> Arguments:
    dtype, width = rng.choice((torch.float32, torch.bfloat16)), rng.choice((*WIDTHS, 300))
    sizes = rng.choice(((), (0,), (3,), (1, 5), (2, 3)))
    return {
        "x": torch.randn(*sizes, width).to(dtype),
        "weight": torch.randn(width).to(dtype),
        "eps": 1e-6,
        "unit_offset": rng.choice((False, True)),
    }


def _add_rms_norm(rng: random.Random) -> Arguments:
    made = _rms_norm(rng)
    return {**made, "residual": torch.randn(made["x"].shape).to(made["x"].dtype)}


def _act_and_mul(rng: random.Random) -> Arguments:
    rows, width = rng.choice((0, 1, 4)), 2 * rng.choice(WIDTHS)
    dtype = rng.choice((torch.float32, torch.bfloat16))
    activation = rng.choice(("silu", "gelu", "gelu_tanh", "relu"))
    return {"gate_up": torch.randn(rows, width).to(dtype), "activation": activation}


def _write_kv(rng: random.Random) -> Arguments:
    made = MODEL_BUILDERS["tree_attention"](rng)
    kept = {name: made[name] for name in ("k", "v", "k_cache", "v_cache", *_PLACES)}
    return {**kept, "values_in_keys": rng.choice((False, False, True))}


def _rope_write(rng: random.Random) -> Arguments:
    made = MODEL_BUILDERS["tree_attention"](rng)
    _, tokens, head_dim = made["q"].shape
    rotated = rng.choice((head_dim // 2 * 2, 0, head_dim // 4 * 2))
    tables = torch.randn(tokens, 2 * rotated).to(rng.choice((torch.float32, torch.bfloat16)))
    kept = {name: made[name] for name in ("q", "k", "v", "k_cache", "v_cache", *_PLACES)}
    made = {**kept, "cos": tables[:, :rotated], "sin": tables[:, rotated:]}
    return {**made, "hadamard": rng.choice((False, True))}


def _hadamard(rng: random.Random) -> Arguments:
    rows, width = rng.choice(((), (0,), (2, 3))), rng.choice((*WIDTHS, 96, 256))
    return {"x": torch.randn(*rows, width).to(rng.choice((torch.float32, torch.bfloat16)))}


def _attend(rng: random.Random) -> Arguments:
    made = MODEL_BUILDERS["tree_attention"](rng)
    for name in ("k", "v"):
        made.pop(name)
    return {**made, "values_in_keys": rng.choice((False, False, True))}


FUSED_BUILDERS: dict[str, Builder] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "act_and_mul": _act_and_mul,
    "write_kv": _write_kv,
    "rope_write": _rope_write,
    "hadamard": _hadamard,
    "attend": _attend,
}
