"""Calls of fused operators that an engine could make, of random shapes and values."""

from __future__ import annotations

import random

import torch

from tests.kernels.cpu.call_parts import WIDTHS, Arguments, Builder, random_floats
from tests.kernels.cpu.model_calls import tree_attention_call

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def _rms_norm(rng: random.Random) -> Arguments:
    width = rng.choice(WIDTHS)
    return {
        "x": random_floats(rng, rng.choice((0, 1, 3)), rng.choice((1, 2)), width),
        "weight": random_floats(rng, width),
        "eps": 1e-6,
        "unit_offset": rng.choice((False, True)),
    }


def _add_rms_norm(rng: random.Random) -> Arguments:
    made = _rms_norm(rng)
    return {**made, "residual": torch.randn_like(made["x"])}


def _act_and_mul(rng: random.Random) -> Arguments:
    gate_up = random_floats(rng, rng.choice((0, 1, 3)), 2 * rng.choice(WIDTHS))
    return {"gate_up": gate_up, "activation": rng.choice(_ACTIVATIONS)}


def _write_kv(rng: random.Random) -> Arguments:
    names = ("k", "v", "k_cache", "v_cache", "q_start", "slot", "block_table")
    made = tree_attention_call(rng)
    return {name: made[name] for name in names}


def _rope_write(rng: random.Random) -> Arguments:
    made = _write_kv(rng)
    tokens, head_dim = made["k"].shape[1:]
    rotated = 2 * rng.randint(0, head_dim // 2)
    dtype = rng.choice((torch.float32, made["k"].dtype))
    return {
        **made,
        "q": torch.randn(made["k"].shape[0] * rng.choice((1, 3)), tokens, head_dim).to(
            made["k"].dtype
        ),
        "cos": torch.randn(tokens, rotated).to(dtype),
        "sin": torch.randn(tokens, rotated).to(dtype),
    }


def _attend(rng: random.Random) -> Arguments:
    made = tree_attention_call(rng)
    del made["k"], made["v"]
    return made


FUSED_BUILDERS: dict[str, Builder] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "act_and_mul": _act_and_mul,
    "write_kv": _write_kv,
    "rope_write": _rope_write,
    "attend": _attend,
}
