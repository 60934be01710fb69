"""Tensors of EAGLE-3 checkpoints: which belong to which parameter, and whether all are there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from specc.artifact.safetensors_io import TensorReader
from specc.errors import HeadError
from specc.passes.drafters.head_config import HeadConfig
from specc.passes.drafters.head_spec import EMBEDDING, HEAD, TargetFacts
from specc.passes.drafters.vocabulary_map import KEPT, OFFSETS

Shapes = dict[str, tuple[int, ...]]

_DO = "pass the head of this target, or download it again"
# names of the first layer's tensors in files of SafeAILab, and in those of all others
_MIDDLE, _FIRST = "midlayer.", "layers.0."
_LAYER = re.compile(r"^layers\.(\d+)\.")
# that older versions of transformers saved, and nothing reads
_OBSOLETE = re.compile(r"rotary_emb\.inv_freq$")
# what early drafters of SpecForge have before names of their heads
_EARLY = "logit_head."
_MOST_NAMES = 4


def count_layers(names: Iterable[str]) -> int:
    """Layers that a checkpoint has tensors of; at least 1."""
    numbers = [int(match[1]) for item in names if (match := _LAYER.match(item))]
    return max(numbers, default=0) + 1


def count_taps(
    reader: TensorReader,
    width: int,
    target_width: int,
    target: TargetFacts,
    name: str,
    reads_taps_alone: bool = False,
) -> int:
    """A: how many hidden states `fc` reads.

    Args:
        width: d.
        target_width: H that the head was made for.
        reads_taps_alone: no layer reads tokens and hidden states side by side.
    Raises:
        HeadError: the hidden size of another target, or a width that is no multiple of it.
    """
    if target_width != target.width:
        raise HeadError(
            f"{name}: a head for a target of hidden size {target_width}; {target.name} has"
            f" {target.width}",
            f"a head for a hidden size of {target.width}",
            "pass the head of this target",
        )
    if "fc.weight" not in set(reader.keys()):
        raise missing_error(["fc.weight"], reader, name)
    shape = reader.shape("fc.weight")
    query = next((q for p in (_MIDDLE, _FIRST) if (q := f"{p}self_attn.q_proj.weight")
                  in set(reader.keys())), None)  # fmt: skip
    is_old = query is not None and reader.shape(query)[1:] == (width,)
    if is_old and not reads_taps_alone and shape == (width, 2 * width):
        raise HeadError(
            f"{name}: EAGLE 1 or 2: fc is {list(shape)}, and {query} reads {width} columns",
            "an EAGLE-3 head, which reads hidden states of several layers",
            "pass an EAGLE-3 head of this target",
        )
    if len(shape) != 2 or shape[0] != width or shape[1] % target_width or not shape[1]:
        raise HeadError(
            f"{name}: fc.weight is {list(shape)}",
            f"[{width}, A · {target_width}]: A hidden states of {target.name}",
            "pass the head of this target",
        )
    return shape[1] // target_width


def match_tensors(
    reader: TensorReader,
    config: HeadConfig,
    num_taps: int,
    draft_vocab_size: int,
    target: TargetFacts,
    name: str,
    more: Shapes,
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Find each parameter's tensor.

    Args:
        num_taps: A.
        draft_vocab_size: Vd.
        more: parameters besides those of EAGLE-3.
    Returns:
        parameter of the module → tensor, and the parameters that are the target's.
    Raises:
        HeadError: a tensor is missing, left over, or of another shape.
    """
    prefix = _MIDDLE if any(item.startswith(_MIDDLE) for item in reader.keys()) else _FIRST  # noqa: SIM118 - a reader is no mapping
    needed, optional = _parameters(config, num_taps, draft_vocab_size, target)
    needed |= more
    width = int(config.layers.hidden_size)
    return match_parameters(reader, needed, optional, width, draft_vocab_size, target, name, prefix)


def match_block_tensors(
    reader: TensorReader,
    layers: Any,
    num_taps: int,
    draft_vocab_size: int,
    target: TargetFacts,
    name: str,
    more: Shapes,
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The same of a block drafter.

    Args:
        num_taps: A.
        draft_vocab_size: Vd.
    """
    d = int(layers.hidden_size)
    needed: Shapes = {"fc.weight": (d, num_taps * target.width)}
    needed |= {"hidden_norm.weight": (d,), "norm.weight": (d,), **more}
    optional: Shapes = {}
    for i in range(layers.num_hidden_layers):
        own, more = _layer(layers, has_qk_norm=True, is_first=False)
        needed |= {f"layers.{i}.{key}": shape for key, shape in own.items()}
        optional |= {f"layers.{i}.{key}": shape for key, shape in more.items()}
    needed |= {EMBEDDING: (target.vocab_size, d), HEAD: (draft_vocab_size, d)}
    return match_parameters(reader, needed, optional, d, draft_vocab_size, target, name)


def match_parameters(
    reader: TensorReader,
    needed: Shapes,
    optional: Shapes,
    width: int,
    draft_vocab_size: int,
    target: TargetFacts,
    name: str,
    prefix: str = _FIRST,
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Find the tensor of each of these parameters; see `match_tensors`.

    Args:
        needed: parameter → shape.
        optional: likewise, of what may be absent.
        width: d.
        draft_vocab_size: Vd.
        name: of the draft, for errors.
        prefix: what the first layer's tensors begin with.
    """
    names = list(reader.keys())
    tensors: dict[str, str] = {}
    missing: list[str] = []
    shared: list[str] = []
    for parameter, shape in (needed | optional).items():
        tensor = parameter
        if parameter.startswith(_FIRST):
            tensor = prefix + parameter.removeprefix(_FIRST)
        if tensor not in names and _EARLY + tensor in names:
            tensor = _EARLY + tensor
        if tensor in names:
            check_shape(reader, tensor, shape, name)
            tensors[parameter] = tensor
        elif parameter == EMBEDDING or (parameter == HEAD and draft_vocab_size == shape[0]):
            shared.append(parameter)
        elif parameter in needed:
            missing.append(tensor)
    if missing:
        raise missing_error(missing, reader, name)
    _check_shared(shared, width, draft_vocab_size, target, name)
    known = {*tensors.values(), OFFSETS, KEPT}
    check_left([item for item in names if item not in known], name)
    return tensors, tuple(shared)


def check_left(left: Iterable[str], name: str) -> None:
    """Refuse a checkpoint with tensors that nothing reads.

    Raises:
        HeadError: there is one that says what a head computes.
    """
    left = [item for item in left if not _OBSOLETE.search(item)]
    if left:
        more = ", …" if len(left) > _MOST_NAMES else ""
        raise HeadError(
            f"{name}: {len(left)} tensors that its configuration has no place for:"
            f" {', '.join(left[:_MOST_NAMES])}{more}",
            "a checkpoint all of whose tensors are read",
            "pass the config.json of this checkpoint; what the head computes would be another"
            " thing without them",
        )


def _parameters(
    config: HeadConfig, num_taps: int, draft_vocab_size: int, target: TargetFacts
) -> tuple[Shapes, Shapes]:
    """Shapes of the parameters that a head has to have, and of those that it may have."""
    layers: Any = config.layers
    d, columns = int(layers.hidden_size), num_taps * target.width
    needed: Shapes = {"fc.weight": (d, columns), "norm.weight": (d,)}
    optional: Shapes = {"fc.bias": (d,)}
    if config.flags.norm_before_fc:
        needed["input_norm.weight"] = (columns,)
    if config.flags.fc_norm:
        needed |= {f"fc_norm.{i}.weight": (target.width,) for i in range(num_taps)}
    for i in range(layers.num_hidden_layers):
        own, more = _layer(layers, config.has_qk_norm, is_first=i == 0)
        needed |= {f"layers.{i}.{key}": shape for key, shape in own.items()}
        optional |= {f"layers.{i}.{key}": shape for key, shape in more.items()}
    needed |= {EMBEDDING: (target.vocab_size, d), HEAD: (draft_vocab_size, d)}
    return needed, optional


def _layer(layers: Any, has_qk_norm: bool, is_first: bool) -> tuple[Shapes, Shapes]:
    d, inner, size = layers.hidden_size, layers.intermediate_size, layers.head_dim
    heads, kv_heads = layers.num_attention_heads, layers.num_key_value_heads
    read = 2 * d if is_first else d
    linear = {
        "self_attn.q_proj": (heads * size, read),
        "self_attn.k_proj": (kv_heads * size, read),
        "self_attn.v_proj": (kv_heads * size, read),
        "self_attn.o_proj": (d, heads * size),
        "mlp.gate_proj": (inner, d),
        "mlp.up_proj": (inner, d),
        "mlp.down_proj": (d, inner),
    }
    needed: Shapes = {f"{key}.weight": shape for key, shape in linear.items()}
    needed |= {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
    if is_first:
        needed["hidden_norm.weight"] = (d,)
    if has_qk_norm:
        needed |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    return needed, {f"{key}.bias": shape[:1] for key, shape in linear.items()}


def check_shape(reader: TensorReader, tensor: str, shape: tuple[int, ...], name: str) -> None:
    """Raises HeadError: a tensor of the head of this name has another shape, or is no float."""
    if (found := tuple(reader.shape(tensor))) != shape:
        raise HeadError(
            f"{name}: {tensor} is {list(found)}",
            f"{list(shape)}, as config.json and the target say",
            _DO,
        )
    if not reader.dtype(tensor).is_floating_point:
        raise HeadError(f"{name}: {tensor} has dtype {reader.dtype(tensor)}", "a float", _DO)


def _check_shared(
    shared: list[str],
    width: int,
    draft_vocab_size: int,
    target: TargetFacts,
    name: str,
) -> None:
    """Refuse to take from the target what does not fit."""
    for parameter in shared:
        if width != target.width:
            raise HeadError(
                f"{name}: no {parameter} in a head of width {width}; that of {target.name} has"
                f" {target.width} columns",
                f"{parameter} in its checkpoint",
                _DO,
            )
        if parameter == HEAD and draft_vocab_size != target.vocab_size:
            raise HeadError(
                f"{name}: no {HEAD} in a head of {draft_vocab_size} ids",
                f"{HEAD} [{draft_vocab_size}, {width}]",
                _DO,
            )


def missing_error(missing: list[str], reader: TensorReader, name: str) -> HeadError:
    """What to say of a head of this name that lacks tensors."""
    more = ", …" if len(missing) > _MOST_NAMES else ""
    are = "is" if len(missing) == 1 else "are"
    return HeadError(
        f"{name}: {', '.join(missing[:_MOST_NAMES])}{more} {are} not in {reader.location()}",
        "every tensor of the head that config.json describes",
        _DO,
    )
