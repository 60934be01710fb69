"""Weights of GGUF files, made of the file's tensors: as they are, in another order, or computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from specc.artifact.decoders import gguf_made
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf import METHOD, GGUFWeight
from specc.artifact.decoders.gguf_file import BLOCKS, PLAIN, GGUFTensor
from specc.artifact.decoders.gguf_made import MadeWeight
from specc.artifact.decoders.gguf_rows import RowOrder
from specc.artifact.weight_layout import turned


def ordered(
    name: str,
    shape: tuple[int, ...],
    tensors: Sequence[GGUFTensor],
    order: RowOrder | None,
    is_turned: bool = False,
    are_items: bool = False,
) -> DecodedWeight:
    """A parameter of rows of tensors.

    Args:
        name: of the parameter.
        shape: as the file would have it; that of the parameter is its transpose where
            `is_turned`.
        tensors: of the file.
        order: of rows, or of items where it is a vector.
        is_turned: matrices are transposed in the file.
        are_items: what is in an order are single numbers.
    """
    kinds = {tensor.kind for tensor in tensors}
    own = turned(shape) if is_turned else shape
    are_items = are_items or len(shape) == 1
    if len(kinds) == 1 and not are_items:
        label = _label(tensors[0])
        names = tuple(tensor.name for tensor in tensors)
        return GGUFWeight(name, own, names, _scheme(label), label, order, is_turned)
    width = 1 if are_items else shape[-1]
    make = gguf_made.in_order(order, math.prod(shape) // width, width)
    if is_turned:
        make = gguf_made.transposed_after(make, shape)
    return computed(name, own, tensors, make)


def computed(
    name: str, shape: tuple[int, ...], tensors: Sequence[GGUFTensor], make: gguf_made.Make
) -> DecodedWeight:
    parts = tuple(weight_of(tensor, tensor.name) for tensor in tensors)
    scheme = parts[0].scheme
    return MadeWeight(name, shape, tuple(t.name for t in tensors), scheme, parts, make)


def weight_of(tensor: GGUFTensor, name: str) -> GGUFWeight:
    """A tensor as it is."""
    label = _label(tensor)
    return GGUFWeight(name, tensor.shape, (tensor.name,), _scheme(label), label)


def with_columns(tensor: GGUFTensor, name: str, order: RowOrder | None) -> GGUFWeight:
    """A matrix whose columns the file has in another order.

    Args:
        tensor: of the file.
        name: of the parameter.
        order: which stored column each of its columns is; None is their own.
    """
    found = weight_of(tensor, name)
    if order is None:
        return found
    places = order(torch.arange(tensor.shape[-1]))
    return replace(found, columns=torch.argsort(places))


def _label(tensor: GGUFTensor) -> str:
    if tensor.kind in BLOCKS:
        return BLOCKS[tensor.kind][0]
    return str(PLAIN[tensor.kind]).removeprefix("torch.")


def _scheme(label: str) -> str:
    return f"{METHOD}, {label}"
