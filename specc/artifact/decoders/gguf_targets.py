"""What is said of an architecture of llama.cpp, and what a tensor of a GGUF file is."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class How(Enum):
    """What the converter did to a parameter.

    Of halves a Target says which of the two tensors it is, of fused ones which part of the tensor.
    """

    AS_IT_IS = "as it is"
    PAIRED = "rotary halves of each head pair by pair"
    FUSED = "queries, keys, then values in one tensor"
    FUSED_PAIRED = "the same, of heads pair by pair"
    HEAD_GROUPS = "queries, keys, then values, of what was group after group"
    LESS_ONE = "one was added"
    TRANSPOSED = "transposed"
    ROW = "a matrix of one row as a vector"
    NORMS = "vectors of heads stacked"
    JOINED = "halves of a matrix in two tensors"
    HALVES = "stacked halves of matrices in two tensors"
    TURNED_HALVES = "the same, transposed"
    ALTERNATING = "alternating items of vectors in two tensors"
    TURNED_ALTERNATING = "alternating rows of matrices in two tensors, transposed"
    TURNED = "stacked matrices transposed"
    LATENT = "keys and values of a latent in two tensors, keys transposed"
    FLAT = "a vector as a matrix"
    KERNEL = "a kernel of channels without its middle dimension"
    KERNELS = "the same, of queries, keys and values in three tensors"
    DECAY = "minus its exponential"
    CHANNEL_DECAY = "the same, of heads whose channels decay apart"
    VALUES = "value heads in another order"
    VALUE_COLUMNS = "the same, of columns"
    STATE_GROUPS = "queries, keys and values, then gates, of what was group after group"

    @property
    def parts(self) -> int:
        """Tensors that are needed; 0 where one is enough."""
        return 3 if self is How.KERNELS else 2 if self in _OF_TWO else 0

    @property
    def dims(self) -> int:
        """Dimensions that a tensor has at least."""
        if self in _OF_STACKS:
            return 3
        return 2 if self in _OF_MATRICES else 1


_OF_TWO = (
    How.JOINED, How.HALVES, How.TURNED_HALVES, How.ALTERNATING, How.TURNED_ALTERNATING, How.LATENT,
    How.STATE_GROUPS,
)  # fmt: skip
_OF_MATRICES = (
    How.JOINED, How.ALTERNATING, How.TRANSPOSED, How.NORMS, How.KERNEL, How.KERNELS,
    How.VALUE_COLUMNS, How.STATE_GROUPS,
)  # fmt: skip
# of layers that keep states
OF_STATES = (
    How.FLAT, How.KERNEL, How.KERNELS, How.DECAY, How.CHANNEL_DECAY, How.VALUES,
    How.VALUE_COLUMNS, How.STATE_GROUPS,
)  # fmt: skip

_OF_STACKS = (How.HALVES, How.TURNED_HALVES, How.TURNED_ALTERNATING, How.TURNED, How.LATENT)


@dataclass(frozen=True)
class Target:
    """What a tensor of a file is.

    Args:
        name: of the parameter.
        how: what the converter did.
        part: which part of it, where there are several.
    """

    name: str
    how: How = How.AS_IT_IS
    part: int = 0


_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_SUFFIXES = ("weight", "bias")
_FUSED = "attn_qkv"
_QKV = ("attn_q", "attn_k", "attn_v")


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Args:
        models: model types of transformers; the first is what a file alone is, unless its fields
            say which.
        names: name of a tensor, or its stem, without its layer → the parameter, likewise.
        fields: of the file → of the configuration; "" says nothing there, or is read where the
            configuration is made. Others are refused.
        layers: what names of parameters of layers begin with.
        says: of the configuration, where the file has no field for it.
        names_beside: a tensor → names in place of others, of files that hold it.
        layer_numbers: fields of a number for each layer → the parameter that it is, and its shape.
        window_every: layers of which one sees all, where the file has windows and no pattern; 0
            where all layers are alike.
        window_base: of rotary frequencies of layers with windows, where the file does not say; None
            is that of all layers.
        is_partial: heads may be rotated in part.
        has_own_rotary_by_layer: layers with windows have rotary frequencies of their own.
        has_latents: keys and values are made of a latent.
        names_of: a model type → names in place of others.
        has_tiled_values: of a recurrence, the file has the first value head of each key head, then
            the second of each, …; the model has those of a key head side by side.
    """

    models: tuple[str, ...]
    names: Mapping[str, str | Target]
    fields: Mapping[str, str]
    layers: str = "model.layers"
    says: Mapping[str, Any] = field(default_factory=dict)
    names_beside: Mapping[str, Mapping[str, str | Target]] = field(default_factory=dict)
    layer_numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    window_every: int = 0
    window_base: float | None = None
    is_partial: bool = False
    has_own_rotary_by_layer: bool = False
    has_latents: bool = False
    names_of: Mapping[str, Mapping[str, str | Target]] = field(default_factory=dict)
    has_tiled_values: bool = False

    def of_file(self, tensors: Collection[str], model: str) -> Architecture:
        """This one, with the names that a file with these tensors has, of this model type."""
        names = {**self.names, **self.names_of.get(model, {})}
        for tensor, others in self.names_beside.items():
            if tensor in tensors:
                names |= others
        return replace(self, names=names)

    def targets(self, stored: str) -> tuple[Target, ...]:
        """What a tensor is; () where the architecture has no such tensor."""
        found = _LAYER.fullmatch(stored)
        own, prefix = (found[2], f"{self.layers}.{found[1]}.") if found else (stored, "")
        if own in self.names:
            return (_named(self.names[own], prefix, ""),)
        stem, _, suffix = own.rpartition(".")
        if suffix not in _SUFFIXES:
            return ()
        if stem in self.names:
            return (_named(self.names[stem], prefix, f".{suffix}"),)
        if stem == _FUSED and all(name in self.names for name in _QKV):
            return tuple(
                _part(_named(self.names[name], prefix, f".{suffix}"), part)
                for part, name in enumerate(_QKV)
            )
        return ()


def _named(target: str | Target, prefix: str, suffix: str) -> Target:
    if isinstance(target, str):
        return Target(f"{prefix}{target}{suffix}")
    return Target(f"{prefix}{target.name}{suffix}", target.how, target.part)


def _part(target: Target, part: int) -> Target:
    """Of one projection in a tensor of three."""
    how = How.FUSED_PAIRED if target.how is How.PAIRED else How.FUSED
    return Target(target.name, how, part)
