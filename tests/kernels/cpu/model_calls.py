"""Calls of native operators that passes of models make, of random shapes and values."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout
from tests.kernels.cpu.call_parts import WIDTHS, Arguments, Builder, Paged, i32, random_floats


def _tree_attention(rng: random.Random) -> Arguments:
    counts = [rng.choice((0, 1, 3, 9)) for _ in range(3)]
    paged = Paged(rng, 16)
    counts = counts[: paged.batch]
    tokens = sum(counts) + rng.choice((0, 0, 2))
    kv_heads, group = rng.choice((1, 2)), rng.choice((1, 2, 5))
    head_dim, value_dim = rng.choice(WIDTHS), rng.choice(WIDTHS)
    dtype = rng.choice((torch.float32, torch.bfloat16))
    slot, position, start = [], [], [0]
    for count, length in zip(counts, paged.lengths, strict=True):
        first = max(length, 0)
        slot += [first + i if length >= 0 else -1 for i in range(count)]
        position += [first + i for i in range(count)]
        start.append(start[-1] + count)
    dead = tokens - start[-1]
    words = rng.choice((None, 0, 1, 2))
    shape = (paged.num_blocks, paged.block_size, kv_heads)
    return {
        "q": torch.randn(kv_heads * group, tokens, head_dim).to(dtype),
        "k": torch.randn(kv_heads, tokens, head_dim).to(dtype),
        "v": torch.randn(kv_heads, tokens, value_dim).to(dtype),
        "k_cache": torch.randn(*shape, head_dim).to(dtype),
        "v_cache": torch.randn(*shape, value_dim).to(dtype),
        "q_start": i32(start),
        "position": torch.tensor(position + [0] * dead, dtype=torch.int64),
        "slot": i32(slot + [-1] * dead),
        "cache_len": paged.cache_len.clamp(min=0),
        "ancestors": None if words is None else torch.randint(-(2**63), 2**63 - 1, (tokens, words)),
        "block_table": paged.table,
        "sink_logits": rng.choice((None, torch.randn(kv_heads * group).to(dtype))),
        "slopes": rng.choice((None, torch.rand(kv_heads * group))),
        "scale": 0.125,
        "window": rng.choice((0, 0, 1, 20, 64)),
        "sink": rng.choice((0, 0, 1, 4, 70)),
        "softcap": rng.choice((0.0, 0.0, 30.0)),
        "rounds_bias": rng.choice((False, True)),
        "most_rows": rng.choice((0, 0, 1, 4)),
        "chunk": rng.choice((0, 0, 0, 1, 7, 64)),
    }


def _attend_expanded(rng: random.Random) -> Arguments:
    made = _tree_attention(rng)
    for name in ("k", "v", "v_cache", "slopes", "window", "sink", "rounds_bias", "chunk"):
        made.pop(name)
    heads, tokens, _ = made["q"].shape
    dtype, shape = made["q"].dtype, made["k_cache"].shape[:2]
    own, value_dim, rank, shared = (rng.choice((1, 3, 16, 20)) for _ in range(4))
    changes = {
        "absorbed": torch.randn(heads, tokens, value_dim).to(dtype),
        "q": torch.randn(heads, tokens, own + shared).to(dtype),
        "k_cache": torch.randn(*shape, 1, rank + shared).to(dtype),
        "up_k": torch.randn(heads, own, rank).to(dtype),
        "up_v": torch.randn(heads, value_dim, rank).to(dtype),
        "most_rows": rng.choice((1, 1, 4)),
    }
    return made | changes


def _block_mass(rng: random.Random) -> Arguments:
    made = _tree_attention(rng)
    left_out = ("k", "v", "v_cache", "sink_logits", "slopes", "window", "sink", "softcap")
    for name in (*left_out, "rounds_bias", "most_rows", "chunk"):
        made.pop(name)
    batch, columns = made["block_table"].shape
    mass = torch.zeros(batch + rng.choice((0, 2)), rng.choice((columns, columns, columns + 3, 0)))
    mass[[b for b in range(batch) if rng.random() < 0.3]] = -1.0
    return {**made, "mass": mass}


def _blocks(rng: random.Random, n: int, k: int) -> Tensor:
    dtype = rng.choice((torch.float32, torch.bfloat16))
    unit = 1 if dtype == torch.float32 else 2
    return torch.randn(-(-n // 32), -(-k // unit), 32, unit).to(dtype)


def _linear(rng: random.Random) -> Arguments:
    n, k = rng.choice((0, 1, 31, 32, 33, 97)), rng.choice((0, 1, 2, 3, 127, 128, 129, 300))
    weight = _blocks(rng, n, k)
    return {
        "input": torch.randn(rng.choice((0, 1, 2, 13, 33)), k).to(weight.dtype),
        "weight": weight,
        "bias": rng.choice((None, torch.randn(n).to(weight.dtype))),
        "out_features": n,
    }


def _linear_q(rng: random.Random) -> Arguments:
    n, k = rng.choice((0, 1, 31, 32, 33, 97)), rng.choice((1, 2, 3, 127, 128, 129, 300))
    layouts = (
        "int8", "int4-g32", "int4-g128-zeros", "int8-g64-zeros", "fp8", "mxfp4", "nvfp4", "q5_1",
        "q4_k", "q6_k",
    )  # fmt: skip
    layout = QuantizedLayout.named(rng.choice(layouts))
    if layout.blocks is not None:
        k = rng.choice((1, 2, 3)) * layout.blocks.columns
    dtype = rng.choice((torch.float32, torch.bfloat16))
    return {
        "input": torch.randn(rng.choice((0, 1, 2, 13, 33)), k).to(dtype),
        "weight": torch.randint(0, 256, layout.stored_shape((n, k)), dtype=torch.uint8),
        "bias": rng.choice((None, torch.randn(n).to(dtype))),
        "out_features": n,
        "bits": layout.bits,
        "group": layout.group,
        "has_zeros": layout.has_zeros,
        "is_float": layout.is_float,
        "row_bits": 0,
        "format": layout.format,
    }


def _grouped(rng: random.Random, made: Arguments) -> Arguments:
    """The call of one product as one of several experts, without bias."""
    x, blocks, experts = made.pop("input"), made.pop("weight"), rng.choice((1, 2, 5))
    made.pop("bias")
    ends = sorted(rng.randint(0, len(x)) for _ in range(experts))
    return {
        "x": x,
        "weight": blocks.repeat(experts, *[1] * (blocks.dim() - 1)),
        "ends": torch.tensor(ends, dtype=torch.int32),
        **made,
    }


def _grouped_linear(rng: random.Random) -> Arguments:
    return _grouped(rng, _linear(rng))


def _grouped_mm_q(rng: random.Random) -> Arguments:
    return _grouped(rng, _linear_q(rng))


def _embedding_of_blocks(rng: random.Random) -> Arguments:
    n, width = rng.choice((1, 31, 32, 33, 97)), rng.choice(WIDTHS)
    return {
        "weight": _blocks(rng, n, width),
        "tokens": torch.randint(0, n, (rng.choice((0, 1, 7)),)),
        "num_embeddings": n,
        "width": width,
    }


def _embedding_q(rng: random.Random) -> Arguments:
    made = _linear_q(rng)
    n, width = max(1, made["out_features"]), made["input"].shape[1]
    facts = ("bits", "group", "has_zeros", "is_float", "format")
    layout = QuantizedLayout(**{key: made[key] for key in facts if key in made})
    return {
        "weight": torch.randint(0, 256, layout.stored_shape((n, width)), dtype=torch.uint8),
        "tokens": torch.randint(0, n, (rng.choice((0, 1, 7)),)),
        "num_embeddings": n,
        "width": width,
        "layout": layout.name,
    }


def _slab_rows(rng: random.Random) -> tuple[Arguments, int, int]:
    """Slab, tokens and tables; how many tokens there are, and how many rows a sequence has."""
    paged = Paged(rng, 8)
    counts = [rng.choice((0, 1, 3, 9)) for _ in range(paged.batch)]
    starts = i32([0, *itertools.accumulate(counts)])
    slab = random_floats(rng, paged.num_blocks, paged.block_size, rng.choice((0, *WIDTHS)))
    rows = paged.table.shape[1] * paged.block_size if paged.batch else 1
    tokens = sum(counts) + rng.choice((0, 0, 2))
    return {"slab": slab, "q_start": starts, "block_table": paged.table}, tokens, rows


def _write_rows(rng: random.Random) -> Arguments:
    made, tokens, rows = _slab_rows(rng)
    x = torch.randn(tokens, made["slab"].shape[2]).to(made["slab"].dtype)
    return {**made, "x": x, "slot": torch.randint(-1, rows, (tokens,), dtype=torch.int32)}


def _take_rows(rng: random.Random) -> Arguments:
    made, tokens, rows = _slab_rows(rng)
    shape = tokens, rng.choice((0, 1, 1, 4))
    return {**made, "slots": torch.randint(-1, rows, shape, dtype=torch.int32)}


def _block_conv(rng: random.Random) -> Arguments:
    tokens, taps, groups = rng.choice((0, 1, 9, 40)), rng.choice((1, 2, 4)), rng.choice((1, 2, 5))
    dtype, width = rng.choice((torch.float32, torch.bfloat16)), groups * rng.choice(WIDTHS)
    both = torch.randn(tokens, 2, taps, groups).to(dtype)
    return {
        "x": torch.randn(tokens, width).to(dtype),
        "base": torch.randn(2, taps, width).to(dtype)[1],
        "factors": both[:, 1],
        "places": torch.randint(-6, 0, (tokens, 2), dtype=torch.int32)[:, 1:],
    }


MODEL_BUILDERS: dict[str, Builder] = {
    "tree_attention": _tree_attention,
    "attend_expanded": _attend_expanded,
    "block_mass": _block_mass,
    "block_conv": _block_conv,
    "linear": _linear,
    "linear_q": _linear_q,
    "grouped_linear": _grouped_linear,
    "grouped_mm_q": _grouped_mm_q,
    "embedding_of_blocks": _embedding_of_blocks,
    "embedding_q": _embedding_q,
    "write_rows": _write_rows,
    "take_rows": _take_rows,
}
