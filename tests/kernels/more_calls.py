"""Calls of all operators, of random shapes and values."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.rounding import quantize
from specc.kernels.reference.latent import PAIRS
from specc.kernels.reference.routing import SCORES
from tests.kernels.cpu.call_parts import Arguments, Builder, i32, random_tokens
from tests.kernels.cpu.engine_calls import BUILDERS

DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def _floats(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


def _write_kv(rng: random.Random) -> Arguments:
    made = BUILDERS["tree_attention"](rng)
    names = ("k", "v", "k_cache", "v_cache", "q_start", "slot", "block_table")
    return {name: made[name] for name in names}


def _rope_write(rng: random.Random) -> Arguments:
    made = _write_kv(rng)
    heads, tokens = made["k"].shape[0] * rng.choice((1, 3)), made["k"].shape[1]
    width = 2 * rng.choice((1, 4, 8))
    dtype, cache = made["k"].dtype, made["k_cache"].shape[:3]
    made |= {name: _floats(dtype, made["k"].shape[0], tokens, width) for name in ("k", "v")}
    made |= {name: _floats(dtype, *cache, width) for name in ("k_cache", "v_cache")}
    made |= {name: _floats(dtype, tokens, width) for name in ("cos", "sin")}
    return made | {"q": _floats(dtype, heads, tokens, width)}


def _norm_rope_write(rng: random.Random) -> Arguments:
    made = _rope_write(rng)
    gammas = {name: _floats(made["q"].dtype, made["q"].shape[2]) for name in ("q_gamma", "k_gamma")}
    return made | gammas | {"eps": 1e-6, "unit_offset": rng.random() < 0.5}


def _rope_write_latent(rng: random.Random) -> Arguments:
    made = _rope_write(rng)
    (heads, tokens, width), size = made["q"].shape, rng.choice((1, 6))
    dtype = made["q"].dtype
    rows = {"q": (heads, size), "latent": (1, size), "q_rest": (heads, width), "shared": (1, width)}
    cache = _floats(dtype, *made["k_cache"].shape[:2], 1, size + width)
    del made["k"], made["v"]
    made |= {name: _floats(dtype, n, tokens, columns) for name, (n, columns) in rows.items()}
    return made | {"k_cache": cache, "v_cache": cache[..., :size], "pairs": rng.choice(PAIRS)}


def _rms_norm(rng: random.Random) -> Arguments:
    dtype, rows, width = rng.choice(DTYPES), rng.choice((0, 1, 5)), rng.choice((1, 7, 32))
    shape = rng.choice(((rows, width), (1, rows, width), (2, rows, width)))
    return {
        "x": _floats(dtype, *shape),
        "weight": _floats(dtype, width),
        "eps": 1e-6,
        "unit_offset": rng.random() < 0.5,
    }


def _add_rms_norm(rng: random.Random) -> Arguments:
    made = _rms_norm(rng)
    return made | {"residual": torch.randn_like(made["x"])}


def _add_norm(rng: random.Random, num_out: int) -> Arguments:
    made = _add_rms_norm(rng)
    made["gamma"] = made.pop("weight")
    return made | {"weight": _floats(made["x"].dtype, num_out, made["x"].shape[-1])}


def _bias(rng: random.Random, weight: Tensor) -> Tensor | None:
    return rng.choice((None, _floats(weight.dtype, weight.shape[0])))


def _add_norm_linear(rng: random.Random) -> Arguments:
    made = _add_norm(rng, rng.choice((1, 9)))
    return made | {"bias": _bias(rng, made["weight"])}


def _in_fragments(made: Arguments, name: str, num_out: int) -> Arguments:
    """With a weight in this layout, and as many columns as it needs."""
    dtype, layout = made["x"].dtype, QuantizedLayout.named(name)
    for key in ("x", "residual"):
        made[key] = torch.randn(*made[key].shape[:-1], 256).to(dtype)
    weight = quantize(torch.randn(num_out, 256), layout)
    return made | {"gamma": torch.randn(256).to(dtype), "weight": weight, "layout": name}


def _add_norm_linear_of_either(rng: random.Random) -> Arguments:
    made = _add_norm_linear(rng)
    if rng.random() < 0.5:
        return made
    return _in_fragments(made, "int4-g64-zeros-fragments", 32) | {"bias": None}


def _add_norm_gate_up(rng: random.Random) -> Arguments:
    made = _add_norm(rng, 2 * rng.choice((1, 9))) | {"activation": rng.choice(ACTIVATIONS)}
    return _in_fragments(made, "int8-fragments-32", 64) if rng.random() < 0.5 else made


def _add_norm_head(rng: random.Random) -> Arguments:
    made = _add_norm_linear(rng)
    num_tokens = made["x"].shape[-2]
    rows = [rng.randrange(num_tokens) for _ in range(rng.choice((0, 1, 4)) if num_tokens else 0)]
    return made | {"rows": torch.tensor(rows, dtype=torch.int64)}


def _projected(rng: random.Random) -> tuple[Arguments, int, int]:
    """Tables and caches of a projection to queries, keys and values, its outputs and columns."""
    made = _rope_write(rng)
    num_out = (made.pop("q").shape[0] + 2 * made["k"].shape[0]) * made["k"].shape[2]
    made.pop("k")
    made.pop("v")
    return made, num_out, rng.choice((1, 7, 16))


def _projection(rng: random.Random, width: int, num_out: int) -> Arguments:
    weight = torch.randn(num_out, width)
    gamma = torch.randn(width)
    return {
        "gamma": gamma, "eps": 1e-6, "unit_offset": False, "weight": weight,
        "bias": _bias(rng, weight),
    }  # fmt: skip


def _add_norm_rope_write(rng: random.Random) -> Arguments:
    made, num_out, width = _projected(rng)
    made |= _projection(rng, width, num_out)
    dtype, tokens = made["cos"].dtype, made["cos"].shape[0]
    made |= {"x": torch.randn(1, tokens, width), "residual": torch.randn(1, tokens, width)}
    names = ("x", "residual", "gamma", "weight", "bias")
    return made | {name: None if made[name] is None else made[name].to(dtype) for name in names}


def _embed_norm_rope_write(rng: random.Random) -> Arguments:
    made, num_out, width = _projected(rng)
    made |= _projection(rng, width, num_out)
    dtype, tokens = made["cos"].dtype, made["cos"].shape[0]
    made |= {"embedding": torch.randn(11, width)}
    names = ("embedding", "gamma", "weight", "bias")
    made |= {name: None if made[name] is None else made[name].to(dtype) for name in names}
    return made | {"tokens": torch.randint(0, 11, (1, tokens))}


def _skinny_linear(rng: random.Random) -> Arguments:
    made = _rms_norm(rng)
    weight = _floats(made["x"].dtype, rng.choice((1, 9)), made["x"].shape[-1])
    return {"input": made["x"], "weight": weight, "bias": _bias(rng, weight)}


def _invariant_attend(rng: random.Random) -> Arguments:
    beside = ("values_in_keys", "most_rows")
    return {name: x for name, x in BUILDERS["attend"](rng).items() if name not in beside}


def _route(rng: random.Random) -> Arguments:
    dtype, tokens, num, width = rng.choice(DTYPES), rng.choice((0, 1, 5)), 8, 6
    groups, shared = rng.choice((1, 2, 4)), rng.choice((0, 1, 2))
    return {
        "x": _floats(dtype, tokens, width),
        "weight": _floats(dtype, num, width),
        "bias": rng.choice((None, _floats(dtype, num))),
        "correction": rng.choice((None, torch.rand(num))),
        "scores": rng.choice(SCORES),
        "top_k": rng.choice((1, 3)),
        "normalize": rng.choice((False, True)),
        "eps": 1e-20,
        "scale": rng.choice((1.0, 2.5)),
        "groups": groups,
        "top_groups": rng.choice((groups, max(1, groups - 1))),
        "group_best": rng.choice((1, 2)),
        "shared": shared,
        "shared_gate": rng.choice((None, _floats(dtype, 1, width))) if shared else None,
    }


def _experts(rng: random.Random) -> Arguments:
    dtype, tokens, num, width, inner = rng.choice(DTYPES), rng.choice((0, 1, 5)), 3, 8, 5
    shared = rng.choice((0, 1, 2))
    activation = rng.choice((*ACTIVATIONS, *([] if shared else ["clamped"])))
    return {
        "x": _floats(dtype, tokens, width),
        "ids": torch.randint(0, num + shared, (tokens, 2)),
        "weights": torch.rand(tokens, 2),
        "gate_up": _floats(dtype, num, 2 * inner, width),
        "down": _floats(dtype, num, width, inner),
        "activation": activation,
        "gate_up_bias": None if shared else rng.choice((None, _floats(dtype, num, 2 * inner))),
        "down_bias": None if shared else rng.choice((None, _floats(dtype, num, width))),
        "shared_gate_up": _floats(dtype, 2 * shared * inner, width) if shared else None,
        "shared_down": _floats(dtype, width, shared * inner) if shared else None,
    }


def _grouped_mm(rng: random.Random) -> Arguments:
    dtype, tokens, num = rng.choice(DTYPES), rng.choice((0, 1, 7)), rng.choice((1, 3))
    ends = sorted(rng.randint(0, tokens) for _ in range(num))
    return {
        "x": _floats(dtype, tokens, 8),
        "weight": _floats(dtype, num, 8, 5),
        "ends": i32(ends),
    }


def _padded(rng: random.Random) -> tuple[int, int, int, int]:
    return rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 4)), rng.choice((8, 9))


def _dense_attention(rng: random.Random) -> Arguments:
    batch, kv_heads, tokens, _ = _padded(rng)
    dtype, heads = rng.choice(DTYPES), kv_heads * rng.choice((1, 2))
    return {
        "query": _floats(dtype, batch, heads, tokens, 4),
        "key": _floats(dtype, batch, kv_heads, tokens, 4),
        "value": _floats(dtype, batch, kv_heads, tokens, 6),
        "attn_mask": rng.choice((None, torch.ones(1, 1, tokens, tokens, dtype=torch.bool))),
        "sink_logits": rng.choice((None, torch.randn(heads))),
        "scale": 0.5,
    }


def _dense_conv(rng: random.Random) -> Arguments:
    dtype, channels = rng.choice(DTYPES), rng.choice((1, 6))
    return {
        "x": _floats(dtype, 1, rng.choice((1, 3, 9)), channels),
        "weight": _floats(dtype, channels, rng.choice((1, 3, 4))),
        "bias": rng.choice((None, _floats(dtype, channels))),
        "activation": rng.choice(("", "silu")),
    }


def _dense_recurrence(rng: random.Random) -> Arguments:
    tokens, key_heads = rng.choice((1, 3, 9)), rng.choice((1, 2))
    heads, dtype = key_heads * rng.choice((1, 3)), rng.choice(DTYPES)
    shape = 1, tokens, heads
    return {
        "q": _floats(dtype, 1, tokens, key_heads, 4),
        "k": _floats(dtype, 1, tokens, key_heads, 4),
        "v": _floats(dtype, *shape, 6),
        "g": -torch.rand(*shape, *rng.choice(((), (4,)))),
        "beta": rng.choice((None, torch.rand(shape))),
    }


def _cache_write(rng: random.Random) -> Arguments:
    batch, kv_heads, tokens, rows = _padded(rng)
    return {
        "cache": torch.randn(batch, kv_heads, rows, 4),
        "update": torch.randn(batch, kv_heads, tokens, 4),
        "write_index": torch.randint(0, rows - tokens + 1, (batch,)),
    }


def _distance_bias(rng: random.Random) -> Arguments:
    batch, heads, tokens, rows = _padded(rng)
    return {
        "mask": torch.rand(batch, 1, tokens, rows) < 0.5,
        "positions": torch.randint(0, 9, (batch, tokens)),
        "slopes": torch.rand(heads),
        "hidden": -1e9,
        "rounded_scale": rng.choice((0.0, 0.5)),
    }


def _masked_attention(rng: random.Random) -> Arguments:
    batch, kv_heads, tokens, rows = _padded(rng)
    dtype = rng.choice(DTYPES)
    return {
        "q": _floats(dtype, batch, kv_heads * rng.choice((1, 2)), tokens, 4),
        "k": _floats(dtype, batch, kv_heads, rows, 4),
        "v": _floats(dtype, batch, kv_heads, rows, 4),
        "mask": torch.rand(batch, 1, tokens, rows) < 0.5,
        "scale": 0.5,
        "softcap": rng.choice((0.0, 2.0)),
    }


def _leave_step(rng: random.Random) -> Arguments:
    batch, drafts = rng.choice((0, 1, 3)), rng.choice((0, 1, 2))
    lengths = torch.randint(0, 9, (drafts, batch), dtype=torch.int32)
    return {
        "results": torch.zeros(batch, 9, dtype=torch.int64),
        "last_tokens": random_tokens(rng, batch, 2),
        "cache_len": torch.zeros(batch, dtype=torch.int32),
        "num_accepted": torch.ones(batch, dtype=torch.int32),
        "output_tokens": random_tokens(rng, batch, 3),
        "next_cache_len": torch.full((batch,), 4, dtype=torch.int32),
        "next_last_tokens": random_tokens(rng, batch, 2),
        "draft_lens": lengths if drafts else None,
    }


def random_lora(
    rng: random.Random,
    dtype: torch.dtype,
    tokens: int,
    num_adapters: int = 0,
    wide: bool = False,
) -> Arguments:
    """Terms of some adapters beside a product of up to three weights.

    Args:
        num_adapters: 0 is one or more.
        wide: as many columns as several threads take.
    """
    inputs = 200 if wide else rng.choice((1, 7, 16, 65))
    parts = [rng.choice((300, 513) if wide else (1, 5, 32, 70)) for _ in range(rng.choice((1, 3)))]
    pieces, num_adapters = [], num_adapters or rng.choice((1, 3))
    first = 0
    for part, columns in enumerate(parts):
        for adapter in range(num_adapters):
            # not each has a term beside each weight, but each has one
            if part and rng.random() < 0.3:
                continue
            rank = rng.choice((1, 4, 7, 16))
            pieces.append([adapter, sum(parts[:part]), columns, first, rank])
            first += rank
    numbers = [rng.randrange(-1, num_adapters) for _ in range(tokens)]
    return {
        "base": _floats(dtype, tokens, sum(parts)),
        "input": _floats(dtype, tokens, inputs),
        "adapters": i32(numbers).reshape(tokens, 1),
        "down": _floats(dtype, first, inputs),
        "up": _floats(dtype, sum(piece[2] * piece[4] for piece in pieces)),
        "pieces": i32(pieces),
        "scales": torch.rand(len(pieces)) + 0.5,
    }


def _bmm_by_token(rng: random.Random) -> Arguments:
    heads, tokens, columns, outputs = (rng.randint(1, 5) for _ in range(4))
    dtype = rng.choice(DTYPES)
    # columns of wider rows of each token, and rows of a wider matrix
    x = torch.randn(tokens, heads, columns + 2).to(dtype)[..., :columns].transpose(0, 1)
    weight = torch.randn(heads, outputs + 3, columns).to(dtype)[:, 1 : 1 + outputs]
    return {"x": x, "weight": weight.transpose(1, 2)}


def _add_lora(rng: random.Random) -> Arguments:
    return random_lora(rng, rng.choice(DTYPES), rng.choice((0, 1, 9)))


def _over_link(rng: random.Random) -> Arguments:
    return BUILDERS["all_reduce"](rng) | {"link": "next"}


# every operator
CALLS: dict[str, Builder] = {
    **BUILDERS,
    "add_norm_linear": _add_norm_linear_of_either,
    "add_norm_gate_up": _add_norm_gate_up,
    "add_norm_rope_write": _add_norm_rope_write,
    "embed_norm_rope_write": _embed_norm_rope_write,
    "add_norm_head": _add_norm_head,
    "norm_rope_write": _norm_rope_write,
    "rope_write_latent": _rope_write_latent,
    "skinny_linear": _skinny_linear,
    "invariant_linear": _skinny_linear,
    "invariant_linear_q": BUILDERS["linear_q"],
    "invariant_attend": _invariant_attend,
    "bmm_by_token": _bmm_by_token,
    "route": _route,
    "experts": _experts,
    "invariant_experts": _experts,
    "grouped_mm": _grouped_mm,
    "dense_attention": _dense_attention,
    "dense_conv": _dense_conv,
    "dense_recurrence": _dense_recurrence,
    "cache_write": _cache_write,
    "distance_bias": _distance_bias,
    "masked_attention": _masked_attention,
    "leave_step": _leave_step,
    "over_link": _over_link,
    "add_lora": _add_lora,
}
