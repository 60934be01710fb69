"""Of programs over [batch, nodes] tokens: what ONNX and TensorRT have of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specc.kernels.operator import Cut, NoRule, Operator
from specc.kernels.reference import padded

_PADDED = NoRule("only padded programs have it, in which each sequence has a row of its own")
# TensorProto.DataType
_FLOAT, _BFLOAT16 = 1, 16


def _cache_write_fake(cache: Tensor, update: Tensor, write_index: Tensor) -> Tensor:
    return cache.new_empty(cache.shape)


def _cache_write_onnx(emit: Any) -> Any:
    def cache_write(cache: Any, update: Any, write_index: Any) -> Any:
        return emit.op.TensorScatter(cache, update, write_index, axis=2, mode="linear")

    return cache_write


CACHE_WRITE = Operator(
    "cache_write(Tensor cache, Tensor update, Tensor write_index) -> Tensor",
    reference=padded.cache_write_reference,
    fake=_cache_write_fake,
    tokens=_PADDED,
    # a cache [B, HK, L, D], and rows [B, HK, T, D] that it gets
    cut=Cut(
        {"cache": "* kv_heads * *", "update": "* kv_heads * *"},
        "* kv_heads * *",
        "rows are written as a whole",
    ),
    onnx=_cache_write_onnx,
    stored=False,
)


def _distance_bias_fake(
    mask: Tensor, positions: Tensor, slopes: Tensor, *args: object, **kwargs: object
) -> Tensor:
    batch, _, nodes, rows = mask.shape
    return slopes.new_empty(batch, slopes.shape[0], nodes, rows)


def _distance_bias_onnx(emit: Any) -> Any:
    op = emit.op

    def distance_bias(
        mask: Any, positions: Any, slopes: Any, hidden: float, rounded_scale: float = 0.0
    ) -> Any:
        """See `distance_bias_reference`; keys after one that a token sees are counted exactly."""
        last, to_heads = op.Constant(value_int=3), op.Constant(value_ints=[1, 2])
        after = op.CumSum(op.Cast(mask, to=_FLOAT), last, exclusive=1, reverse=1)
        slopes = op.Unsqueeze(slopes, to_heads)
        if rounded_scale:
            tokens = op.Unsqueeze(op.Cast(positions, to=_FLOAT), op.Constant(value_ints=[1, 3]))
            rounded = lambda x: op.Cast(op.Cast(x, to=_BFLOAT16), to=_FLOAT)  # noqa: E731
            keys, own = (
                rounded(op.Mul(slopes, rounded(x))) for x in (op.Sub(tokens, after), tokens)
            )
            bias = op.Mul(op.Sub(keys, own), op.Constant(value_float=rounded_scale))
        else:
            bias = op.Mul(slopes, op.Neg(after))
        return op.Where(mask, bias, op.Constant(value_float=hidden))

    return distance_bias


DISTANCE_BIAS = Operator(
    "distance_bias(Tensor mask, Tensor positions, Tensor slopes, *, float hidden,"
    " float rounded_scale=0.0) -> Tensor",
    reference=padded.distance_bias_reference,
    fake=_distance_bias_fake,
    tokens=_PADDED,
    cut=NoRule("biases by distance are not cut"),
    onnx=_distance_bias_onnx,
    stored=False,
)


def _masked_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, *, softcap: float = 0.0
) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _masked_attention_onnx(emit: Any) -> Any:
    def masked_attention(
        q: Any, k: Any, v: Any, mask: Any, scale: float, softcap: float = 0.0
    ) -> Any:
        cap = {"softcap": softcap} if softcap else {}
        return emit.op.Attention(q, k, v, mask, scale=scale, **cap)[0]

    return masked_attention


MASKED_ATTENTION = Operator(
    "masked_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale, *,"
    " float softcap=0.0) -> Tensor",
    reference=padded.masked_attention_reference,
    fake=_masked_attention_fake,
    tokens=_PADDED,
    # queries [B, H, T, D], keys and values [B, HK, L, D]
    cut=Cut(
        {"q": "* heads * *", "k": "* kv_heads * *", "v": "* kv_heads * *"},
        "* heads * *",
        "attention goes over it",
        heads=("q", "k"),
    ),
    onnx=_masked_attention_onnx,
    stored=False,
)
