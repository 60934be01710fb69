"""Calls of the products with norm and epilogue, on tensors without data; see `launches`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels.cuda import (
    add_norm_gate_up,
    add_norm_head,
    add_norm_linear,
    add_norm_rope_fragments,
    add_norm_rope_write,
    embed_norm_rope_write,
    experts,
    few_rows,
    few_rows_tiles,
    invariant_linear,
    linear_q,
    rope_write_latent,
    route,
    skinny_linear,
)
from specc.kernels.reference.fused import ACTIVATIONS, CLAMPED
from specc.kernels.reference.latent import PAIRS
from tests.kernels.cuda.cases_linear_q import ALL
from tests.kernels.cuda.meta_tensors import FLOATS, I32, I64, meta

_HIDDEN, _TOKENS = 4096, 5


def _operands(num_out: int, num_rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    x = meta(1, num_rows, _HIDDEN, dtype=dtype)
    weight = meta(num_out, _HIDDEN, dtype=dtype)
    return x, x, meta(_HIDDEN, dtype=dtype), 1e-6, False, weight


def _tiles(operator: str) -> Iterator[tuple[torch.dtype, int]]:
    """Types and numbers of rows, once for each tile of such a product, which it takes meanwhile."""
    for dtype, num_rows in itertools.product(FLOATS, (1, _TOKENS, 16)):
        weight = meta(8, _HIDDEN, dtype=dtype)
        for number in range(len(few_rows.Product.of(operator, num_rows, weight).tiles)):
            with few_rows.forced(number):
                yield dtype, num_rows


def _linear_calls() -> Iterator[Any]:
    for dtype, num_rows in _tiles(add_norm_linear.NAME):
        for bias in (None, meta(6144, dtype=dtype)):
            yield add_norm_linear.add_norm_linear(*_operands(6144, num_rows, dtype), bias)


def _gate_up_calls() -> Iterator[Any]:
    for dtype, num_rows in _tiles(add_norm_gate_up.NAME):
        for activation in ACTIVATIONS:
            operands = _operands(28672, num_rows, dtype)
            yield add_norm_gate_up.add_norm_gate_up(*operands, activation)


def _head_calls() -> Iterator[Any]:
    for dtype, num_rows in _tiles(add_norm_head.NAME):
        rows = meta(num_rows, dtype=torch.int64)
        # a vocabulary that aligns nothing
        for size in (128256, 50257):
            for bias in (None, meta(size, dtype=dtype)):
                operands = _operands(size, num_rows, dtype)
                yield add_norm_head.add_norm_head(*operands, bias, rows)


def _places(num_rows: int, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Bias, tables and places of the operators that write to the caches."""
    table = meta(num_rows, 128, dtype=dtype)
    cache = meta(300, 16, 8, 128, dtype=dtype)
    places = (meta(2, dtype=I32), meta(num_rows, dtype=I32), meta(1, 256, dtype=I32))
    for bias in (None, meta(6144, dtype=dtype)):
        yield bias, table, table, cache, cache, *places


def _rope_write_calls() -> Iterator[Any]:
    for dtype, num_rows in _tiles(add_norm_rope_write.NAME):
        for places in _places(num_rows, dtype):
            operands = _operands(6144, num_rows, dtype)
            yield add_norm_rope_write.add_norm_rope_write(*operands, *places)


def _rope_write_latent_calls() -> Iterator[Any]:
    for dtype in FLOATS:
        for (size, width), pairs in itertools.product(((512, 64), (256, 32)), PAIRS):
            for num_rows in (1, 512):
                rows = [meta(n, num_rows, d, dtype=dtype) for n in (16, 1) for d in (size, width)]
                table = meta(num_rows, width, dtype=dtype)
                cache = meta(300, 16, 1, size + width, dtype=dtype)
                places = (meta(2, dtype=I32), meta(num_rows, dtype=I32), meta(1, 256, dtype=I32))
                yield rope_write_latent.rope_write_latent(
                    *rows, table, table, cache, cache[..., :size], *places, pairs
                )


def _embed_calls() -> Iterator[Any]:
    for dtype, num_rows in _tiles(embed_norm_rope_write.NAME):
        # side by side, and apart
        beside = meta(1, num_rows, dtype=torch.int64)
        apart = meta(1, num_rows, 2, dtype=torch.int64)[..., 1]
        for size, tokens in ((128256, beside), (50257, apart)):
            table = meta(size, _HIDDEN, dtype=dtype)
            for places in _places(num_rows, dtype):
                norm = _operands(6144, num_rows, dtype)[2:]
                yield embed_norm_rope_write.embed_norm_rope_write(tokens, table, *norm, *places)


def _experts_calls() -> Iterator[Any]:
    # one token, a tree, a prompt; weights as they are, and in float32
    for dtype in FLOATS:
        stacks = meta(8, 1536, 2048, dtype=dtype), meta(8, 2048, 768, dtype=dtype)
        for num_tokens in (1, _TOKENS, 16, 512):
            x, ids = meta(num_tokens, 2048, dtype=dtype), meta(num_tokens, 8, dtype=I64)
            for activation in ACTIVATIONS:
                for kind in {dtype, torch.float32}:
                    weights = meta(num_tokens, 8, dtype=kind)
                    yield experts.experts(x, ids, weights, *stacks, activation)
            if dtype == torch.bfloat16:
                # DeepSeek V2 Lite, with two that every token takes
                shared = meta(4 * 768, 2048, dtype=dtype), meta(2048, 2 * 768, dtype=dtype)
                weights = meta(num_tokens, 8, dtype=torch.float32)
                places = None, None, 0, "", ""
                yield experts.experts(x, ids, weights, *stacks, "silu", *places, *shared)
            biases = [meta(*stack.shape[:2], dtype=dtype) for stack in stacks]
            for kind in {dtype, torch.float32}:
                weights = meta(num_tokens, 8, dtype=kind)
                yield experts.experts(x, ids, weights, *stacks, CLAMPED, *biases)
            kinds = experts.QUANTIZED[0 if dtype == torch.bfloat16 else -1 :]
            weights = meta(num_tokens, 8, dtype=torch.float32)
            for name in kinds:
                layout = QuantizedLayout.named(name)
                shapes = (layout.stored_shape(stack.shape) for stack in stacks)
                given = [meta(*shape, dtype=torch.uint8) for shape in shapes]
                more = (768, name, name)
                yield experts.experts(x, ids, weights, *given, "silu", None, None, *more)
                if name == "mxfp4":
                    yield experts.experts(x, ids, weights, *given, CLAMPED, *biases, *more)
            if dtype == torch.bfloat16 and num_tokens > experts.FEW_TOKENS:
                for name in experts.FRAGMENTS:
                    yield from _calls_of_fragments(name, num_tokens)


def _experts_fragments_calls() -> Iterator[Any]:
    for name in few_rows_tiles.FRAGMENT_LAYOUTS:
        for num_tokens in (1, _TOKENS, 16):
            yield from _calls_of_fragments(name, num_tokens)


def _calls_of_fragments(name: str, num_tokens: int) -> Iterator[Any]:
    """As of other layouts; of mxfp4 with a gate in turn and biases, too."""
    x, ids = meta(num_tokens, 2048, dtype=torch.bfloat16), meta(num_tokens, 8, dtype=I64)
    weights, layout = meta(num_tokens, 8, dtype=torch.float32), QuantizedLayout.named(name)
    shapes = ((8, 1536, 2048), (8, 2048, 768))
    given = [meta(*layout.stored_shape(shape), dtype=torch.uint8) for shape in shapes]
    biases = [meta(*shape[:2], dtype=torch.bfloat16) for shape in shapes]
    more = (768, layout.paired(768).name, name)
    yield experts.experts(x, ids, weights, *given, "silu", None, None, *more)
    if layout.kind == "mxfp4":
        more = (768, layout.paired(1).name, name)
        yield experts.experts(x, ids, weights, *given, CLAMPED, *biases, *more)


def _route_calls() -> Iterator[Any]:
    # one token, a tree, a prompt; experts of V2 Lite, of V3
    for dtype in FLOATS:
        for num_tokens, num_experts in ((1, 64), (_TOKENS, 256), (512, 64)):
            x, weight = (meta(n, 2048, dtype=dtype) for n in (num_tokens, num_experts))
            bias = meta(num_experts, dtype=dtype)
            correction = meta(num_experts, dtype=torch.float32)
            yield route.route(x, weight, None, None, "softmax", 6, False, 0.0, 1.0, 1, 1, 1)
            for item in (None, bias):
                yield route.route(x, weight, item, None, "chosen", 4, False, 0.0, 1.0, 1, 1, 1)
            more = ("sigmoid", 8, True, 1e-20, 2.5, 8, 4, 2)
            yield route.route(x, weight, None, correction, *more)
            if dtype == torch.bfloat16:
                yield route.route(x, weight, None, correction, *more, 1)
                for gate in (None, meta(1, 2048, dtype=dtype)):
                    how = ("softmax", 4, False, 0.0, 1.0, 1, 1, 1, 4, gate)
                    yield route.route(x, weight, None, None, *how)


def _linear_q_calls() -> Iterator[Any]:
    # outputs that align nothing, one row, some of each kernel, and those of a prompt
    for dtype in FLOATS:
        for name in ALL:
            layout = QuantizedLayout.named(name)
            facts = (layout.bits, layout.group, layout.has_zeros, layout.is_float)
            for num_rows, size in ((1, 6144), (_TOKENS, 50257), (16, 6144), (40, 6144), (512, 96)):
                weight = meta(*layout.stored_shape((size, _HIDDEN)), dtype=torch.uint8)
                x = meta(num_rows, _HIDDEN, dtype=dtype)
                for bias in (None, meta(size, dtype=dtype)):
                    tiles = few_rows_tiles.quantized_tiles(name, dtype, num_rows)
                    for number in range(max(1, len(tiles))):
                        with few_rows.forced(number):
                            yield linear_q.linear_q(x, weight, bias, size, *facts)
    for name in few_rows_tiles.FRAGMENT_LAYOUTS:
        layout = QuantizedLayout.named(name)
        weight = meta(*layout.stored_shape((6144, _HIDDEN)), dtype=torch.uint8)
        x = meta(40, _HIDDEN, dtype=torch.bfloat16)
        yield linear_q.linear_q(x, weight, None, 6144, *layout.facts)


def _linear_q_fragments_calls() -> Iterator[Any]:
    # rows of each kernel
    for name in few_rows_tiles.FRAGMENT_LAYOUTS:
        layout = QuantizedLayout.named(name)
        for num_rows, size in itertools.product((1, _TOKENS, 16, 32), (6144, 50257)):
            weight = meta(*layout.stored_shape((size, _HIDDEN)), dtype=torch.uint8)
            x = meta(num_rows, _HIDDEN, dtype=torch.bfloat16)
            tiles = few_rows_tiles.quantized_tiles(name, x.dtype, num_rows)
            for bias in (None, meta(size, dtype=x.dtype)):
                for number in range(len(tiles)):
                    with few_rows.forced(number):
                        yield linear_q.linear_q(x, weight, bias, size, *layout.facts)
                yield linear_q.invariant_linear_q(x, weight, bias, size, *layout.facts)


def _normed(distance: int) -> Iterator[tuple[Any, ...]]:
    """Operands of 6144 outputs up to a weight in fragments, a bias, and the layout's name."""
    for name in few_rows_tiles.FRAGMENT_LAYOUTS:
        layout = QuantizedLayout.named(name).paired(distance)
        for num_rows in (1, _TOKENS):
            x, gamma = (meta(*n, _HIDDEN, dtype=torch.bfloat16) for n in ((1, num_rows), ()))
            weight = meta(*layout.stored_shape((6144, _HIDDEN)), dtype=torch.uint8)
            for bias in (None, meta(6144, dtype=x.dtype)):
                yield (x, x, gamma, 1e-6, False, weight), bias, layout.name


def _add_norm_fragments_calls() -> Iterator[Any]:
    for operands, bias, layout in _normed(16):
        yield add_norm_linear.add_norm_linear(*operands, bias, layout)
    for operands, _, layout in _normed(3072):
        for activation in ACTIVATIONS:
            yield add_norm_gate_up.add_norm_gate_up(*operands, activation, layout)


def _add_norm_rope_fragments_calls() -> Iterator[Any]:
    for operands, bias, layout in _normed(64):
        _, *places = next(_places(operands[0].shape[1], torch.bfloat16))
        yield add_norm_rope_fragments.add_norm_rope_write(*operands, bias, *places, layout)


def _skinny_linear_calls() -> Iterator[Any]:
    # outputs that align nothing, as those of routers
    for dtype, num_rows in _tiles(few_rows.SKINNY):
        for size in (4096, 50257, 8):
            x, weight = (meta(n, _HIDDEN, dtype=dtype) for n in (num_rows, size))
            for bias in (None, meta(size, dtype=dtype)):
                yield skinny_linear.skinny_linear(x, weight, bias)


def _invariant_linear_calls() -> Iterator[Any]:
    for dtype, num_rows, size in itertools.product(FLOATS, (1, 17), (4096, 50257, 8)):
        x, weight = (meta(n, _HIDDEN, dtype=dtype) for n in (num_rows, size))
        for bias in (None, meta(size, dtype=dtype)):
            yield invariant_linear.invariant_linear(x, weight, bias)


CALLS: dict[str, Callable[[], Iterator[Any]]] = {
    "add_norm_fragments": _add_norm_fragments_calls,
    "add_norm_gate_up": _gate_up_calls,
    "add_norm_head": _head_calls,
    "add_norm_linear": _linear_calls,
    "add_norm_rope_fragments": _add_norm_rope_fragments_calls,
    "add_norm_rope_write": _rope_write_calls,
    "embed_norm_rope_write": _embed_calls,
    "experts": _experts_calls,
    "experts_fragments": _experts_fragments_calls,
    "linear_q": _linear_q_calls,
    "invariant_linear": _invariant_linear_calls,
    "linear_q_fragments": _linear_q_fragments_calls,
    "rope_write_latent": _rope_write_latent_calls,
    "route": _route_calls,
    "skinny_linear": _skinny_linear_calls,
}
