"""Rotary scalings whose frequencies depend on a pass: up to which length they are constant.

transformers chooses the frequencies of dynamic NTK and longrope by the longest position of a pass,
and leaves keys in the cache as they were rotated by another pass. A tree pass cannot follow that:
its longest position is that of its deepest node. Up to the length that a model was trained for the
frequencies are constant, and everybody's; beyond it an engine has those of one length at every
position (`--rope-length`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from specc.errors import ConfigError, UnsupportedRotaryError

DYNAMIC, LONGROPE = "dynamic", "longrope"
# transformers has dropped this name of longrope
_FORMER = "su"
_POSITIONS = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"
_ABSENT = object()


@dataclass(frozen=True)
class LengthScaling:
    """Frequencies of a model, or of one kind of its layers, that follow the length of a pass.

    Args:
        kind: dynamic or longrope.
        original: tokens up to which they are constant.
        longest: tokens that the scaling was made for; None is any number.
        layer_type: of the layers, where kinds of layers differ; None is all.
    """

    kind: str
    original: int
    longest: int | None
    layer_type: str | None = None


def length_scalings(config: Any) -> tuple[LengthScaling, ...]:
    """What depends on length in a configuration of transformers; () is nothing.

    Raises:
        UnsupportedRotaryError: a scaling that does not say up to which length it is constant.
    """
    # a configuration of another kind may have the older name
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return ()
    nested = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    found = []
    for layer_type, values in (nested or {None: parameters}).items():
        kind = values.get("rope_type", values.get("type"))
        if not isinstance(kind, str) or (DYNAMIC not in kind and kind != LONGROPE):
            continue
        longest = getattr(config, _POSITIONS, None)
        original = longest if kind != LONGROPE else values.get(_ORIGINAL, longest)
        if type(original) is not int or original < 1:
            raise UnsupportedRotaryError(
                f"rotary scaling {kind} without a length that it was trained for",
                f"{_ORIGINAL if kind == LONGROPE else _POSITIONS} in config.json",
                "correct config.json, or download the model again",
            )
        last = longest if kind == LONGROPE else None
        found.append(LengthScaling(kind, min(original, last or original), last, layer_type))
    return tuple(found)


def constant_length(config: Any, rope_length: int | None) -> int | None:
    """Tokens that frequencies are constant for, in an engine; None where no length matters.

    Args:
        rope_length: frequencies of this length at every position, where a model's own length is
            exceeded; None is none.
    """
    lengths = [
        rope_length if is_frozen(scaling, rope_length) else scaling.original
        for scaling in length_scalings(config)
    ]
    return min((length for length in lengths if length), default=None)


def is_frozen(scaling: LengthScaling, rope_length: int | None) -> bool:
    """Whether `rope_length` makes other frequencies of these."""
    return rope_length is not None and rope_length > scaling.original


def frozen_length(config: Any, rope_length: int | None) -> int | None:
    """`rope_length` where it changes a model's frequencies, else None."""
    changes = any(is_frozen(scaling, rope_length) for scaling in length_scalings(config))
    return rope_length if changes else None


def by_its_name(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose longrope is called that; the same one where it is.

    First revisions of Phi-3 call it `su`, a name that transformers has dropped.
    """
    renamed = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, dict) and _FORMER in (value.get("rope_type"), value.get("type")):
            renamed[key] = {name: LONGROPE if x == _FORMER else x for name, x in value.items()}
    return config if renamed == config else renamed


def check_rotary(config: Any, name: str, max_seq_len: int | None, rope_length: int | None) -> None:
    """Compare the length of an engine with what a model's frequencies are constant for.

    Args:
        config: of transformers; None for a module without one.
        max_seq_len: tokens of prompt and output; None takes what there is.
        rope_length: see `constant_length`.
    Raises:
        UnsupportedRotaryError: the engine is longer.
        ConfigError: `rope_length` is beyond the positions of longrope.
    """
    for scaling in length_scalings(config):
        last = scaling.longest
        if rope_length is not None and last is not None and rope_length > last:
            raise ConfigError(
                f"--rope-length {rope_length}; {name}: rotary scaling {scaling.kind} of {last}"
                " positions",
                f"{last} or less",
                f"pass --rope-length {last}",
            )
        length = rope_length if is_frozen(scaling, rope_length) else scaling.original
        if max_seq_len is not None and length is not None and max_seq_len > length:
            others = min(max_seq_len, last or max_seq_len)
            are = "are kept at those of" if length == rope_length else "are constant up to"
            raise UnsupportedRotaryError(
                f"--max-seq-len {max_seq_len}; {name}: rotary scaling {scaling.kind}, whose"
                f" frequencies {are} {length} tokens",
                f"{length} tokens or less: beyond them, a tree pass would change numbers",
                f"pass --max-seq-len {length}; or --rope-length {others}, which rotates every"
                f" position as transformers does in a pass of {others} tokens",
            )


def check_rope_length(configs: dict[str, Any], rope_length: int | None) -> list[str]:
    """What `--rope-length` changes, said aloud.

    Args:
        configs: name of a model → its configuration, or None.
        rope_length: see `constant_length`.
    Returns:
        a warning for each model that it changes.
    Raises:
        ConfigError: it changes none.
    """
    if rope_length is None:
        return []
    told, lengths = [], []
    for name, config in configs.items():
        for scaling in length_scalings(config):
            lengths.append(scaling.original)
            if is_frozen(scaling, rope_length):
                told.append(
                    f"{name.replace('_', ' ')}: --rope-length {rope_length}: every position is"
                    f" rotated as transformers does in a pass of {rope_length} tokens; outputs"
                    " differ from those of transformers where a pass is shorter"
                )
    if told:
        return list(dict.fromkeys(told))
    most = max(lengths, default=None)
    raise ConfigError(
        f"--rope-length {rope_length}; "
        + (
            f"frequencies are constant up to {most} tokens"
            if most
            else "no model has rotary frequencies that depend on length (dynamic, longrope)"
        ),
        f"more than {most}, or none" if most else "a model with such frequencies, or none",
        "leave out --rope-length",
    )


@contextmanager
def constant_frequencies(model: nn.Module, rope_length: int | None) -> Iterator[dict[str, Tensor]]:
    """A model whose forward leaves its frequencies alone, while it is traced.

    Args:
        model: of transformers, or any other; as it was, afterwards.
        rope_length: see `constant_length`.
    Yields:
        path of a buffer → the frequencies [R] that a program is to hold in its place; what
        `_init_weights` computes for a module on the meta device is left out.
    Raises:
        UnsupportedRotaryError: frequencies that depend on length, and no known place of them.
    """
    config = getattr(model, "config", None)
    scalings = {scaling.layer_type: scaling for scaling in length_scalings(config)}
    rotaries = {
        path: module
        for path, module in model.named_modules()
        if isinstance(getattr(module, "rope_type", None), str | dict)
    }
    if scalings and not rotaries:
        raise UnsupportedRotaryError(
            f"{type(model).__name__}: rotary scaling {next(iter(scalings.values())).kind}, and no"
            " module that holds its frequencies",
            "a model whose rotary embeddings are those of transformers",
            "choose another rotary scaling in config.json",
        )
    values: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for path, module in rotaries.items():
            types: Any = module.rope_type
            for layer_type, kind in (types if isinstance(types, dict) else {None: types}).items():
                scaling = scalings.get(layer_type)
                if scaling is None or scaling.kind != kind:
                    continue
                # what transformers decorates looks at positions, and writes buffers
                forward = MethodType(inspect.unwrap(type(module).forward), module)
                prefix = f"{layer_type}_" if layer_type else ""
                name = f"{prefix}inv_freq"
                frequencies, scale = _frequencies(module, scaling, prefix, rope_length)
                # after some passes two names have one tensor, and a trace knows one of the names
                own = module.get_buffer(name).clone()
                for owner, key, value in (
                    (vars(module), "forward", forward),
                    (vars(module), f"{prefix}attention_scaling", scale),
                    (module._buffers, name, own),
                ):
                    stack.enter_context(_replaced(owner, key, value))
                if frequencies is not None:
                    values[f"{path}.{name}".removeprefix(".")] = frequencies
        yield values


def _frequencies(
    module: Any, scaling: LengthScaling, prefix: str, rope_length: int | None
) -> tuple[Tensor | None, float]:
    """Those of an engine, or None where they are what `_init_weights` computes; and their scale."""
    if is_frozen(scaling, rope_length):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kinds = {"layer_type": scaling.layer_type} if scaling.layer_type else {}
        compute: Any = ROPE_INIT_FUNCTIONS[scaling.kind]
        return compute(module.config, torch.device("cpu"), seq_len=rope_length, **kinds)
    # a module that has run may hold those of a longer pass
    original = getattr(module, f"{prefix}original_inv_freq")
    found = None if original.is_meta else original.detach().cpu().clone()
    return found, getattr(module, f"{prefix}attention_scaling")


@contextmanager
def _replaced(owner: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """An entry of what a module holds, for a while."""
    before = owner.get(name, _ABSENT)
    owner[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            del owner[name]
        else:
            owner[name] = before
