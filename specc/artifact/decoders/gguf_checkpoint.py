"""GGUF files as checkpoints: which file a directory holds, and the weights of the model in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.artifact.decoders import gguf_made, gguf_rows
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf import METHOD
from specc.artifact.decoders.gguf_architectures import ARCHITECTURES
from specc.artifact.decoders.gguf_file import PLAIN, GGUFReader, GGUFTensor
from specc.artifact.decoders.gguf_made import GivenNumber
from specc.artifact.decoders.gguf_parts import first_part
from specc.artifact.decoders.gguf_rows import RowOrder
from specc.artifact.decoders.gguf_states import StateHeads
from specc.artifact.decoders.gguf_targets import OF_STATES, Architecture, How
from specc.artifact.decoders.gguf_weights import computed, ordered, weight_of
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
        architecture = _check_model(reader, config, heads)
        reader.tensors = _own_tensors(reader)
        names, weights = _named(
            reader, heads, architecture.of_file(reader.tensors, config.model_type)
        )
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
    """A number, or the one that all items of a list are that are not 0; else 0."""
    items = set(value) - {0} if isinstance(value, list) else {value}
    (found, *others) = items or {0}
    return found if type(found) is int and not others else 0


def _check_model(reader: GGUFReader, config: Any, heads: _Heads) -> Architecture:
    """The file's architecture.

    Raises:
        WeightError: the file is of another model than its configuration.
    """
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
        return ARCHITECTURES[kind]  # the file has one head of keys, which is the latent
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
    return ARCHITECTURES[kind]


def _own_tensors(reader: GGUFReader) -> dict[str, GGUFTensor]:
    """The file's tensors, without those of layers that predict further tokens (MTP): these come
    after the model's own, and are no part of it.
    """
    kind = reader.fields["general.architecture"]
    layers, further = (
        reader.fields.get(f"{kind}.{name}", 0) for name in ("block_count", "nextn_predict_layers")
    )
    if not further:
        return dict(reader.tensors)
    left = tuple(f"blk.{number}." for number in range(layers - further, layers))
    return {key: item for key, item in reader.tensors.items() if not key.startswith(left)}


def unknown_architecture(kind: Any, where: str) -> WeightError:
    """The refusal of a file whose architecture has no row of the table."""
    return WeightError(
        f"{where} is of the architecture {kind}",
        f"one of {', '.join(ARCHITECTURES)}",
        "pass the checkpoint in safetensors",
    )


def _named(
    reader: GGUFReader, heads: _Heads, architecture: Architecture
) -> tuple[dict[str, str], dict[str, DecodedWeight]]:
    """Names of plain tensors that are parameters, and what others are decoded to."""
    states = StateHeads.of(reader, architecture)
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
                weights[target.name] = weight_of(tensor, target.name)
    for (name, how), found in parts.items():
        for weight in _made(name, how, found, heads, states, reader.location()):
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
    name: str,
    how: How,
    found: Mapping[int, GGUFTensor],
    heads: _Heads,
    states: StateHeads,
    where: str,
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
    if how in OF_STATES:
        yield states.made(name, how, items, where)
    elif how is How.PAIRED:
        count = heads.queries if _is_query(name) else heads.keys
        yield ordered(name, first.shape, items, gguf_rows.pairs(_size(rows, count, first, where)))
    elif how is How.HEAD_GROUPS:
        size = _size(rows, heads.queries + 2 * heads.keys, first, where)
        order = gguf_rows.groups_of_heads(heads.queries, heads.keys, size)
        yield ordered(name, first.shape, items, order)
    elif how in (How.FUSED, How.FUSED_PAIRED):
        size = _size(rows, heads.queries + 2 * heads.keys, first, where)
        number = next(iter(found))
        before = (0, heads.queries, heads.queries + heads.keys)[number]
        count = heads.queries if number == 0 else heads.keys
        order = gguf_rows.from_row(before * size)
        if how is How.FUSED_PAIRED and number < 2:
            order = gguf_rows.then(gguf_rows.pairs(size), order)
        yield ordered(name, (count * size, *first.shape[1:]), items, order)
    elif how in (How.HALVES, How.TURNED_HALVES, How.TURNED_ALTERNATING, How.ALTERNATING):
        experts, half = first.shape[:2]
        is_alternating = how in (How.TURNED_ALTERNATING, How.ALTERNATING)
        order = gguf_rows.stacked_halves(experts, half, is_alternating)
        shape = (experts, 2 * half, *first.shape[2:])
        is_turned = how in (How.TURNED_HALVES, How.TURNED_ALTERNATING)
        yield ordered(name, shape, items, order, is_turned, how is How.ALTERNATING)
    elif how is How.JOINED:
        yield ordered(name, (2 * rows, *first.shape[1:]), items, None)
    elif how is How.TURNED:
        yield ordered(name, first.shape, items, None, True)
    elif how is How.LATENT:
        keys, values = items
        shape = (keys.shape[0] * (keys.shape[2] + values.shape[1]), keys.shape[1])
        yield computed(name, shape, items, gguf_made.keys_and_values)
    elif how is How.TRANSPOSED:
        yield computed(name, turned(first.shape), items, gguf_made.transpose)
    elif how is How.LESS_ONE:
        yield computed(name, first.shape, items, gguf_made.less_one)
    elif how is How.ROW:
        yield computed(name, (1, first.shape[-1]), items, gguf_made.as_stored)
    else:
        assert how is How.NORMS
        for number in range(rows):
            make = gguf_made.row_of(number)
            yield computed(name.format(number), first.shape[1:], items, make)


def _check_shapes(items: Sequence[GGUFTensor], how: How, where: str) -> None:
    """Raises WeightError: tensors of other shapes than what is made of them needs."""
    first, dims = items[0], how.dims
    same = {How.LATENT: slice(1), How.STATE_GROUPS: slice(1, None)}.get(how, slice(None))
    sizes = {item.shape[same] for item in items}
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
