"""What a picture of a cut shows, in the order of execution: weights, attention, sums over ranks.

Layers that are alike, weight for weight and sum for sum, are one section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from specc.errors import EngineError
from specc.sharding.shard_plan import ShardPlan, WeightCut
from specc.sharding.words import NUMBER, short_name


@dataclass(frozen=True)
class WeightItem:
    """A weight, where it is first read in a section.

    Args:
        is_again: an earlier section has it, too: a head that is the embedding.
    """

    name: str
    cut: WeightCut
    is_again: bool = False


@dataclass(frozen=True)
class AttentionItem:
    """Heads of a rank, and key and value heads of its caches."""

    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True)
class SumItem:
    """A meeting of all ranks, and the bytes of one token that it sums."""

    kind: str
    bytes_per_token: int


Item = WeightItem | AttentionItem | SumItem


@dataclass
class Section:
    """Layers that are alike, or what stands before and after all layers.

    Args:
        title: such as `layers 0 to 27 (28)`.
        count: of layers.
    """

    title: str
    count: int = 1
    items: list[Item] = field(default_factory=list)


@dataclass
class _Part:
    """What one layer does; None is no layer."""

    layer: int | None
    items: list[Item] = field(default_factory=list)


def sections(
    program: Mapping[str, Any], plan: ShardPlan, heads: Sequence[tuple[int, int]]
) -> list[Section]:
    """The sections of a model, in the order of execution.

    Args:
        program: content of its `program.json`.
        heads: of a rank, queries' and keys', of each attention layer.
    Raises:
        EngineError: a program that the plan does not fit.
    """
    try:
        parts = _parts(program, plan, heads)
    except (KeyError, TypeError, StopIteration) as error:
        raise EngineError(
            f"a program that its plan does not fit: {type(error).__name__}: {error}",
            "program.json and shard.json of one compilation",
            "compile or copy the engine again",
        ) from error
    found: list[Section] = []
    last = max((number for number, part in enumerate(parts) if part.layer is not None), default=-1)
    # layers of one kind may take turns with those of another
    kinds: dict[tuple[Item, ...], list[int]] = {}
    for part in parts:
        if part.layer is not None:
            kinds.setdefault(tuple(part.items), []).append(part.layer)
    for number, part in enumerate(parts):
        if part.layer is None:
            found.append(Section("after the layers" if number > last else "before the layers"))
            found[-1].items = part.items
        elif layers := kinds.pop(tuple(part.items), None):
            found.append(Section(_title(layers), len(layers), part.items))
    return found


def _title(layers: Sequence[int]) -> str:
    """`layers 0 to 3, 5 (5 alike)`."""
    runs = []
    for _, run in groupby(enumerate(layers), lambda item: item[1] - item[0]):
        numbers = [number for _, number in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}")
    if len(layers) == 1:
        return f"layer {runs[0]}"
    return f"layers {', '.join(runs)} ({len(layers)} alike)"


def _parts(
    program: Mapping[str, Any], plan: ShardPlan, heads: Sequence[tuple[int, int]]
) -> list[_Part]:
    keys = {item["name"]: item["key"] for item in program["inputs"] if item["kind"] == "weight"}
    cuts, layers = plan.by_key, iter(heads)
    sums = {item.node: item for item in plan.collectives}
    parts = [_Part(None)]
    seen: set[str] = set()
    everywhere: set[str] = set()
    for node in program["graph"]["nodes"]:
        for key in (keys[name] for name in _names(node) if name in keys):
            number = NUMBER.search(key)
            layer = int(number[0]) if number else None
            if layer != parts[-1].layer:
                parts.append(_Part(layer))
                seen = set()
            if key not in seen:
                seen.add(key)
                parts[-1].items.append(WeightItem(_name(key), cuts[key], key in everywhere))
                everywhere.add(key)
        if node.get("target") == "specc.tree_attention.default":
            parts[-1].items.append(AttentionItem(*next(layers)))
        elif node["name"] in sums:
            found = sums[node["name"]]
            parts[-1].items.append(SumItem(found.kind, found.bytes_per_token))
    return [_alike(part) for part in parts if part.items]


def _name(key: str) -> str:
    """Without what stands before the number of a layer, and without `.weight`."""
    key = short_name(key)
    number = NUMBER.search(key)
    name = key[number.end() + 1 :] if number else key.removeprefix("model.")
    return name.replace(".weight", "")


def _alike(part: _Part) -> _Part:
    """Keys of layers that are alike differ by their number alone."""
    items = [
        replace(item, cut=replace(item.cut, key=NUMBER.sub("*", item.cut.key)))
        if isinstance(item, WeightItem)
        else item
        for item in part.items
    ]
    return _Part(part.layer, items)


def _names(value: Any) -> Iterator[str]:
    """Nodes that an encoded call reads."""
    if isinstance(value, dict):
        if set(value) == {"node"}:
            yield value["node"]
            return
        for key in ("args", "kwargs") if "op" in value else value:
            yield from _names(value.get(key))
    elif isinstance(value, list):
        for part in value:
            yield from _names(part)
