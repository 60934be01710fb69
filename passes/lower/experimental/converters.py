"""Converters of specc's operators for torch-tensorrt: TensorRT's own cache update and attention.

Experimental: they were run on networks of TensorRT-RTX, which builds without a GPU, and never by
torch-tensorrt itself. Its signature of a converter is kept: (context, operator, arguments, keyword
arguments, name) → tensor; of the context only `net` and `record_weight` are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from specc.errors import TensorRTError
from specc.kernels import ops
from specc.tensorrt import library as tensorrt


def register_converters(decomposable: bool = False) -> None:
    """Tell torch-tensorrt how specc's operators are converted; the last call counts.

    Args:
        decomposable: an attention without a fused kernel may become several.
    Raises:
        ImportError: no torch-tensorrt.
    """
    from torch_tensorrt.dynamo.conversion import (
        ConverterPriority,
        dynamo_tensorrt_converter,
    )

    attention = partial(convert_masked_attention, decomposable=decomposable)
    for target, converter in (
        (ops.cache_write, convert_cache_write),
        (ops.masked_attention, attention),
    ):
        # of several converters of one operator, the last with a high priority is asked first
        register = dynamo_tensorrt_converter(
            target, supports_dynamic_shapes=True, priority=ConverterPriority.HIGH
        )
        register(converter)


def convert_cache_write(
    ctx: Any, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> Any:
    """`specc::cache_write` as the layer that updates a cache in place.

    Args:
        ctx: with `net`, the network.
        target: the operator.
        args: cache [B, HK, L, D], an input of the network; update [B, HK, N, D];
            write_index [B], any integers.
        kwargs: those of them that have names.
        name: of the layer.
    Returns:
        the tensor of the cache afterwards; it must become an output of the network.
    Raises:
        TensorRTError: the cache has no static shape, or TensorRT refuses the layer.
    """
    trt, net = tensorrt.load(), ctx.net
    given = _bound(target, args, kwargs)
    cache, update = given["cache"], given["update"]
    if -1 in tuple(cache.shape)[1:] or not cache.is_network_input:
        raise TensorRTError(
            f"{name}: a cache {cache.name} of shape {tuple(cache.shape)}",
            "an input of the network, of static size but for the batch",
            "give every cache to the program as an input of its own",
        )
    index = _cast(net, given["write_index"], trt.int32, f"{name}_index")
    layer = net.add_kv_cache_update(cache, update, index, trt.KVCacheMode.LINEAR)
    return _output(layer, name, "KV cache update")


def convert_masked_attention(
    ctx: Any,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    name: str,
    decomposable: bool = False,
) -> Any:
    """`specc::masked_attention` as one attention layer with a bool mask.

    The layer has no scale: queries are multiplied, in fp32, so that a scale that fp16 cannot hold
    does not bias every score.

    Args:
        ctx: with `net`, the network, and `record_weight`, which keeps a constant alive.
        target: the operator.
        args: q [B, H, N, D], k and v [B, HK, L, D], mask [B, 1, N, L] bool, scale.
        kwargs: those of them that have names.
        name: of the layer.
        decomposable: it may become several kernels where none is fused.
    Returns:
        the tensor [B, H, N, D].
    Raises:
        TensorRTError: the mask is not bool, or TensorRT refuses the layer.
    """
    trt, net = tensorrt.load(), ctx.net
    given = _bound(target, args, kwargs)
    mask = given["mask"]
    if mask.dtype != trt.bool:
        raise TensorRTError(
            f"{name}: a mask of {mask.dtype}",
            "bool, True where a node attends: a number would be added to the scores",
            "compare it, for example with mask != 0",
        )
    query = _scaled(ctx, trt, given["q"], float(given["scale"]), name)
    keys = (query, given["k"], given["v"])
    norm = trt.AttentionNormalizationOp.SOFTMAX
    if hasattr(net, "add_attention_v2"):
        layer = net.add_attention_v2(*keys, norm, trt.CausalMaskKind.NONE)
    else:
        # TensorRT 10
        layer = net.add_attention(*keys, norm, False)
    attended = _output(layer, name, "attention")
    layer.mask = mask
    layer.decomposable = decomposable
    return attended


CONVERTERS = {
    ops.cache_write: convert_cache_write,
    ops.masked_attention: convert_masked_attention,
}


def _bound(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the operator's schema."""
    names = [argument.name for argument in target._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _cast(net: Any, value: Any, dtype: Any, name: str) -> Any:
    if value.dtype == dtype:
        return value
    layer = net.add_cast(value, dtype)
    return _output(layer, name, "cast")


def _scaled(ctx: Any, trt: Any, query: Any, scale: float, name: str) -> Any:
    if scale == 1:
        return query
    number = torch.full((1,) * len(query.shape), scale, dtype=torch.float32)
    # TensorRT reads the constant when it builds
    ctx.record_weight(f"{name}_scale", number)
    factor = _output(
        ctx.net.add_constant(tuple(number.shape), number.numpy()), f"{name}_scale", "constant"
    )
    wide = _cast(ctx.net, query, trt.float32, f"{name}_wide")
    product = ctx.net.add_elementwise(wide, factor, trt.ElementWiseOperation.PROD)
    scaled = _output(product, f"{name}_scaled", "product")
    return _cast(ctx.net, scaled, query.dtype, f"{name}_query")


def _output(layer: Any, name: str, what: str) -> Any:
    """The first output of a layer that gets a name."""
    if layer is None:
        raise TensorRTError(
            f"{name}: TensorRT refuses the layer ({what})",
            "operands of shapes and dtypes that it takes; its messages tell which are not",
            "look at the messages above, and report the model",
        )
    layer.name = name
    # where a report looks for the node that a kernel belongs to; torch-tensorrt puts the path of a
    # module ahead of a name
    layer.metadata = f"[ONNX Layer: {name.rpartition('/')[2]}]"
    return layer.get_output(0)
