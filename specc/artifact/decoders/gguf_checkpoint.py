"""GGUF files as checkpoints: which file a directory holds, and the weights of the model in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.artifact.decoders import gguf_made, gguf_rows
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf import METHOD, GGUFWeight
from specc.artifact.decoders.gguf_architectures import ARCHITECTURES
from specc.artifact.decoders.gguf_file import BLOCKS, PLAIN, GGUFReader, GGUFTensor
from specc.artifact.decoders.gguf_made import GivenNumber, MadeWeight
from specc.artifact.decoders.gguf_parts import first_part
from specc.artifact.decoders.gguf_rows import RowOrder
from specc.artifact.decoders.gguf_targets import How
from specc.artifact.weight_layout import turned
from specc.errors import WeightError


def find_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory without safetensors, or its first part; None if there is none.

    Raises:
        WeightError: there are several models.
    """
    found = sorted(directory.glob("*.gguf"))
    if not found or any(directory.glob("*.safetensors")):
        return None
    if len(found) > 1 and (first := first_part(found)) is not None:
        return first
    if len(found) > 1:
        raise WeightError(
            f"{directory} holds {found[0].name}, {found[-1].name} and no safetensors",
            "one GGUF file, or the parts of one",
            "leave one model there, or pass the file",
        )
    return found[0]


def open_gguf(path: Path, config: Any) -> tuple[GGUFReader, dict[str, DecodedWeight]]:
    """A GGUF file whose tensors have the names of a model of transformers, and its matrices.

    What the model has no name for keeps that of the file.

    Args:
        path: of the file.
        config: configuration of the model, of transformers.
    Raises:
        WeightError: it is malformed, of another model, or of types that are not read.
    """
    reader = GGUFReader(path, reads_lists=True)
    try:
        heads = _Heads.of(reader)
        _check_model(reader, config, heads)
        names, weights = _named(reader, heads)
        reader.tensors = {names.get(key, key): item for key, item in reader.tensors.items()}
        return reader, weights
    except BaseException:
        reader.close()
        raise


@dataclass(frozen=True)
class _Heads:
    """Heads of a file's layers; 0 where layers differ, or the file does not say."""

    queries: int
    keys: int

    @classmethod
    def of(cls, reader: GGUFReader) -> _Heads:
        kind = reader.fields.get("general.architecture")
        queries = reader.fields.get(f"{kind}.attention.head_count")
        keys = reader.fields.get(f"{kind}.attention.head_count_kv", queries)
        return cls(_one(queries), _one(keys))


def _one(value: Any) -> int:
    """A number, or the one that all items of a list are; else 0."""
    items = set(value) if isinstance(value, list) else {value}
    (found, *others) = items or {0}
    return found if type(found) is int and not others else 0


def _check_model(reader: GGUFReader, config: Any, heads: _Heads) -> None:
    """Raises WeightError: the file is of another model than its configuration."""
    kind, where = reader.fields.get("general.architecture"), reader.location()
    if kind not in ARCHITECTURES:
        raise unknown_architecture(kind, where)
    models = ARCHITECTURES[kind].models
    if (model := getattr(config, "model_type", None)) not in models:
        raise WeightError(
            f"{where} is of the architecture {kind}, and config.json of the model type {model}",
            " or ".join(models),
            "pass the config.json and tokenizer.json of the same model",
        )
    if ARCHITECTURES[kind].has_latents:
        return  # the file has one head of keys, which is the latent
    for name, field, own in (
        ("head_count", "num_attention_heads", heads.queries),
        ("head_count_kv", "num_key_value_heads", heads.keys),
    ):
        count = getattr(config, field, None)
        if own and type(count) is int and own != count:
            raise WeightError(
                f"{where} has {name} {own}, and config.json {count}",
                "the same number",
                "pass the config.json of the same model",
            )


def unknown_architecture(kind: Any, where: str) -> WeightError:
    """The refusal of a file whose architecture has no row of the table."""
    return WeightError(
        f"{where} is of the architecture {kind}",
        f"one of {', '.join(ARCHITECTURES)}",
        "pass the checkpoint in safetensors",
    )


def _named(reader: GGUFReader, heads: _Heads) -> tuple[dict[str, str], dict[str, DecodedWeight]]:
    """Names of plain tensors that are parameters, and what others are decoded to."""
    architecture = ARCHITECTURES[str(reader.fields["general.architecture"])]
    architecture = architecture.of_file(reader.tensors)
    names: dict[str, str] = {}
    weights: dict[str, DecodedWeight] = {}
    parts: dict[tuple[str, How], dict[int, GGUFTensor]] = {}
    for stored, tensor in reader.tensors.items():
        for target in architecture.targets(stored):
            if target.how is not How.AS_IT_IS:
                parts.setdefault((target.name, target.how), {})[target.part] = tensor
            elif tensor.kind in PLAIN:
                names[stored] = target.name
            else:
                weights[target.name] = _stored(tensor, target.name)
    for (name, how), found in parts.items():
        for weight in _made(name, how, found, heads, reader.location()):
            weights[weight.name] = weight
    for key, (name, shape) in architecture.layer_numbers.items():
        for layer, number in enumerate(_numbers(reader, key)):
            own = f"{architecture.layers}.{layer}.{name}"
            weights[own] = GivenNumber(own, shape, (), METHOD, number)
    return names, weights


def _numbers(reader: GGUFReader, key: str) -> list[float]:
    """One for each layer.

    Raises:
        WeightError: there are others, or none.
    """
    kind = reader.fields["general.architecture"]
    layers, found = reader.fields.get(f"{kind}.block_count"), reader.fields.get(key)
    if (
        not isinstance(found, list)
        or len(found) != layers
        or any(type(item) is not float for item in found)
    ):
        raise WeightError(
            f"{reader.location()} has {key} {found!r:.80}",
            f"a number for each of {layers} layers",
            "download or convert the file again",
        )
    return found


def _made(
    name: str, how: How, found: Mapping[int, GGUFTensor], heads: _Heads, where: str
) -> Iterator[DecodedWeight]:
    """The parameters that tensors are, in a way of the table.

    Raises:
        WeightError: one of several tensors is missing, or its sizes are no whole heads.
    """
    if how.parts and len(found) < how.parts:
        lost = "the other half" if how is not How.LATENT else "keys or values"
        raise WeightError(
            f"{where} holds {next(iter(found.values())).name}, and not {lost} of {name}",
            "both tensors",
            "download or convert the file again",
        )
    items = [found[number] for number in sorted(found)]
    _check_shapes(items, how, where)
    first = items[0]
    rows = first.shape[0]
    order: RowOrder | None
    if how is How.PAIRED:
        count = heads.queries if _is_query(name) else heads.keys
        yield _ordered(name, first.shape, items, gguf_rows.pairs(_size(rows, count, first, where)))
    elif how is How.HEAD_GROUPS:
        size = _size(rows, heads.queries + 2 * heads.keys, first, where)
        order = gguf_rows.groups_of_heads(heads.queries, heads.keys, size)
        yield _ordered(name, first.shape, items, order)
    elif how in (How.FUSED, How.FUSED_PAIRED):
        size = _size(rows, heads.queries + 2 * heads.keys, first, where)
        number = next(iter(found))
        before = (0, heads.queries, heads.queries + heads.keys)[number]
        count = heads.queries if number == 0 else heads.keys
        order = gguf_rows.from_row(before * size)
        if how is How.FUSED_PAIRED and number < 2:
            order = gguf_rows.then(gguf_rows.pairs(size), order)
        yield _ordered(name, (count * size, *first.shape[1:]), items, order)
    elif how in (How.HALVES, How.TURNED_HALVES, How.TURNED_ALTERNATING, How.ALTERNATING):
        experts, half = first.shape[:2]
        is_alternating = how in (How.TURNED_ALTERNATING, How.ALTERNATING)
        order = gguf_rows.stacked_halves(experts, half, is_alternating)
        shape = (experts, 2 * half, *first.shape[2:])
        is_turned = how in (How.TURNED_HALVES, How.TURNED_ALTERNATING)
        yield _ordered(name, shape, items, order, is_turned, how is How.ALTERNATING)
    elif how is How.JOINED:
        yield _ordered(name, (2 * rows, *first.shape[1:]), items, None)
    elif how is How.TURNED:
        yield _ordered(name, first.shape, items, None, True)
    elif how is How.LATENT:
        keys, values = items
        shape = (keys.shape[0] * (keys.shape[2] + values.shape[1]), keys.shape[1])
        yield _computed(name, shape, items, gguf_made.keys_and_values)
    elif how is How.TRANSPOSED:
        yield _computed(name, turned(first.shape), items, gguf_made.transpose)
    elif how is How.LESS_ONE:
        yield _computed(name, first.shape, items, gguf_made.less_one)
    elif how is How.ROW:
        yield _computed(name, (1, first.shape[-1]), items, gguf_made.as_stored)
    else:
        assert how is How.NORMS
        for number in range(rows):
            make = gguf_made.row_of(number)
            yield _computed(name.format(number), first.shape[1:], items, make)


def _check_shapes(items: Sequence[GGUFTensor], how: How, where: str) -> None:
    """Raises WeightError: tensors of other shapes than what is made of them needs."""
    first, dims = items[0], how.dims
    sizes = {item.shape if how is not How.LATENT else item.shape[0] for item in items}
    if len(first.shape) < dims or len(items[-1].shape) < dims or len(sizes) > 1:
        shapes = " and ".join(f"{item.name} of {list(item.shape)}" for item in items)
        raise WeightError(
            f"{where} holds {shapes}",
            f"{dims} dimensions or more, and the same sizes where there are two tensors",
            "download or convert the file again",
        )


def _is_query(name: str) -> bool:
    return "q_proj" in name


def _size(rows: int, count: int, tensor: GGUFTensor, where: str) -> int:
    """Rows of a head.

    Raises:
        WeightError: these are no whole heads.
    """
    if not count or rows % count or (rows // count) % 2:
        raise WeightError(
            f"{tensor.name} in {where} has {rows} rows",
            f"whole heads of an even number of rows, and there are {count}",
            "download or convert the file again",
        )
    return rows // count


def _ordered(
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
    return _computed(name, own, tensors, make)


def _computed(
    name: str, shape: tuple[int, ...], tensors: Sequence[GGUFTensor], make: gguf_made.Make
) -> DecodedWeight:
    parts = tuple(_stored(tensor, tensor.name) for tensor in tensors)
    scheme = parts[0].scheme
    return MadeWeight(name, shape, tuple(t.name for t in tensors), scheme, parts, make)


def _stored(tensor: GGUFTensor, name: str) -> GGUFWeight:
    """A tensor as it is."""
    label = _label(tensor)
    return GGUFWeight(name, tensor.shape, (tensor.name,), _scheme(label), label)


def _label(tensor: GGUFTensor) -> str:
    if tensor.kind in BLOCKS:
        return BLOCKS[tensor.kind][0]
    return str(PLAIN[tensor.kind]).removeprefix("torch.")


def _scheme(label: str) -> str:
    return f"{METHOD}, {label}"
