"""Where each parameter of a Hugging Face model lies in its checkpoint on disk.

Checkpoints name and cut tensors differently from the model classes. Transformers describes the
difference by objects (renamings, and converters that merge experts or split projections), and its
loader applies them. The same objects and the same order of steps run here, but on row numbers in
place of values: what comes out says which rows of which tensors a parameter consists of.
Source: `convert_and_load_state_dict_in_model` in transformers/core_model_loading.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specc.artifact.safetensors_io import TensorReader, missing_tensor
from specc.artifact.weight_spec import Source
from specc.errors import WeightError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# operations that only move rows; any other may compute, which row numbers would hide
_ROW_OPERATIONS = frozenset(
    {
        "Chunk",
        "Concatenate",
        "Interleave",
        "MergeModulelist",
        "PermuteForRope",
        "Split",
        "SplitModulelist",
    }
)

# tensors that older versions of transformers saved, and newer ones compute
_OBSOLETE = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.(attn|attention)\.masked_bias$")
_MASK = re.compile(r"\.(attn|attention)\.bias$")


@dataclass
class _Group:
    """Checkpoint tensors that one converter turns into one or more parameters."""

    converter: Any
    pattern: str
    first: str  # parameter that names the group
    members: list[tuple[str, str]] = field(default_factory=list)  # (source pattern, tensor)

    @property
    def parameters(self) -> list[str]:
        targets = self.converter.target_patterns
        return [self.first.replace(targets[0], target) for target in targets]


class CheckpointMap:
    """Maps names of a model's parameters and persistent buffers to sources in its checkpoint.

    Args:
        model: the model, usually on the meta device; its class and config select the conversions.
        reader: the checkpoint; of a quantized one, a reader of what its tensors stand for.
    """

    def __init__(self, model: PreTrainedModel, reader: TensorReader) -> None:
        self._model = model
        self._reader = reader
        self._shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        self._renamed: dict[str, str] = {}
        self._groups: dict[str, _Group] = {}
        self._converted: dict[str, tuple[Source, ...]] = {}
        self._tied = _tied_names(model)
        self._compared: set[tuple[str, str]] = set()
        self._used: set[str] = set()
        self._collect()

    def sources(self, parameter: str) -> tuple[Source, ...]:
        """Return what a parameter consists of: the concatenation of sources along dim 0.

        Raises:
            WeightError: the checkpoint does not hold it, holds it in another shape, or needs a
                conversion that is no concatenation of rows.
        """
        sources = self._sources(parameter)
        self._used |= {source.name for source in sources}
        return sources

    def tensors_of(self, parameters: Collection[str]) -> list[str]:
        """Tensors of the checkpoint that these parameters consist of, as far as it has them."""
        found = {self._renamed[name] for name in parameters if name in self._renamed}
        groups = (self._groups[name] for name in parameters if name in self._groups)
        found |= {tensor for group in groups for _, tensor in group.members}
        return [name for name in self._reader.keys() if name in found]  # noqa: SIM118

    def unread(self) -> tuple[str, ...]:
        """Tensors that no call of `sources` asked for, in the order of the checkpoint.

        Left out are those that nobody misses: copies of tied parameters, which were compared with
        what is read, and what transformers itself ignores in checkpoints of this architecture.
        """
        ignored = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()
        known = re.compile("|".join(f"(?:{pattern})" for pattern in (*_OBSOLETE, *sorted(ignored))))
        return tuple(
            name
            for name in self._reader.keys()  # noqa: SIM118 - a reader is no mapping
            if name not in self._used and not known.search(name) and not self._is_mask(name)
        )

    def _is_mask(self, name: str) -> bool:
        """Whether this is a causal mask [1, 1, positions, positions] and not a bias."""
        return bool(_MASK.search(name)) and len(self._reader.shape(name)) == 4

    def _sources(self, parameter: str) -> tuple[Source, ...]:
        name = self._resolve(parameter)
        if name in self._renamed:
            source = self._renamed[name]
            shape = self._reader.shape(source)
            if shape != self._shapes[name]:
                raise WeightError(
                    f"{source} {list(shape)} in {self._reader.location(source)}",
                    f"{list(self._shapes[name])} for {parameter}",
                    "pass a checkpoint that fits this model's config.json",
                )
            return (Source(source),)
        if name not in self._converted:
            self._convert(self._groups[name])
        return self._converted[name]

    def _resolve(self, parameter: str) -> str:
        """Return the parameter itself, or one that it is tied to and that the checkpoint holds."""
        if parameter not in self._shapes:
            raise ValueError(f"{type(self._model).__name__} has no parameter {parameter}")
        present = [name for name in self._tied.get(parameter, ()) if self._holds(name)]
        if self._holds(parameter):
            for other in present:
                self._check_equal(parameter, other)
            return parameter
        if present:
            return present[0]
        raise missing_tensor(parameter, self._reader)

    def _holds(self, name: str) -> bool:
        return name in self._renamed or name in self._groups

    def _check_equal(self, first: str, second: str) -> None:
        """Refuse tied parameters that differ on disk: a tied model would use one for both."""
        pair = (min(first, second), max(first, second))
        names = [self._renamed.get(name) for name in pair]
        if pair in self._compared or None in names or names[0] == names[1]:
            return
        chunks = [self._reader.read_chunks(name) for name in names if name]
        if any(a != b for a, b in zip(*chunks, strict=False)):
            raise WeightError(
                f"{names[0]} and {names[1]} differ in {self._reader.location()}, while config.json "
                "ties them",
                "equal tensors, or a model that does not tie them",
                'set "tie_word_embeddings": false in config.json',
            )
        self._compared.add(pair)
        self._used |= {name for name in names if name}

    def _collect(self) -> None:
        """Assign every tensor of the checkpoint to a parameter, as the loader of transformers."""
        if getattr(self._reader, "has_parameter_names", False):
            self._renamed = {key: key for key in self._reader.keys() if key in self._shapes}  # noqa: SIM118
            return
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self._model)
        renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
        converters = [item for item in mapping if isinstance(item, WeightConverter)]
        by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
        prefix = self._model.base_model_prefix
        # experts are stacked in the order of this sort
        for tensor in sorted(self._reader.keys(), key=dot_natural_key):
            name, pattern = rename_source_key(tensor, renamings, converters, prefix, self._shapes)
            if name not in self._shapes and tensor in self._shapes:
                name, pattern = rename_source_key(tensor, [], [], prefix, self._shapes)
            if name not in self._shapes:
                continue
            if pattern is None:
                self._renamed.setdefault(name, tensor)
                continue
            if name not in self._groups:
                group = _Group(by_pattern[pattern], pattern, name)
                self._groups |= dict.fromkeys(group.parameters, group)
            self._groups[name].members.append((pattern, tensor))

    def _convert(self, group: _Group) -> None:
        names = [type(operation).__name__ for operation in group.converter.operations]
        if names == ["Transpose"] and len(group.members) == 1:
            self._converted[group.first] = self._transpose(group)
            return
        unknown = [name for name in names if name not in _ROW_OPERATIONS]
        if unknown:
            raise self._inexpressible(group, f"the operation {unknown[0]}")
        rows = _RowNumbers(self._reader)
        converter = deepcopy(group.converter)
        for pattern, tensor in group.members:
            converter.add_tensor(group.first, tensor, pattern, rows.number(tensor))
        try:
            values = converter.convert(group.first, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError, IndexError) as error:
            message = str(error).splitlines()[0]
            raise self._inexpressible(group, f"{' and '.join(names)} ({message})") from error
        for name, value in values.items():
            if name not in self._shapes:
                continue
            value = value[0] if isinstance(value, list) else value
            sources = rows.decode(value, self._shapes[name])
            if sources is None:
                shapes = ", ".join(
                    f"{tensor} {list(self._reader.shape(tensor))}"
                    for _, tensor in group.members[:3]
                )
                reason = f"{' and '.join(names)} of {shapes} to {name} {list(self._shapes[name])}"
                raise self._inexpressible(group, reason)
            self._converted[name] = sources
        absent = [name for name in group.parameters if name not in self._converted]
        if absent:
            raise self._inexpressible(group, f"{' and '.join(names)} does not yield {absent[0]}")

    def _transpose(self, group: _Group) -> tuple[Source, ...]:
        (_, tensor), (operation,) = group.members[0], group.converter.operations
        shape, expected = self._reader.shape(tensor), self._shapes[group.first]
        if getattr(operation, "check_dims", False) and shape == expected:
            return (Source(tensor),)
        axes = {operation.dim0 % len(shape), operation.dim1 % len(shape)} if shape else set()
        if len(shape) == 2 and axes == {0, 1} and shape[::-1] == expected:
            return (Source(tensor, transpose=True),)
        raise self._inexpressible(group, f"a transposition of {tensor} {list(shape)}")

    def _inexpressible(self, group: _Group, reason: str) -> WeightError:
        tensor = group.members[0][1]
        return WeightError(
            f"{tensor} in {self._reader.location(tensor)} becomes {group.first} by a conversion "
            f"that specc cannot stream: {reason}",
            "a checkpoint whose tensors are rows of the model's parameters",
            "load the model with transformers and pass the module to specc.compile",
        )


class _RowNumbers:
    """Numbers the rows (vectors along the last dim) of checkpoint tensors, and reads them back."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._names: list[str] = []
        self._bases: list[int] = []
        self._next = 0

    def number(self, name: str) -> Tensor:
        """[…, 1] int64 for a tensor […, n]; a vector counts as rows of one element."""
        shape = self._reader.shape(name)
        shape = (*shape[:-1], 1) if len(shape) > 1 else shape
        count = math.prod(shape)
        numbers = torch.arange(self._next, self._next + count).view(shape)
        self._names.append(name)
        self._bases.append(self._next)
        self._next += count + 1  # the gap keeps runs from crossing into the next tensor
        return numbers

    def decode(self, numbers: Tensor, shape: tuple[int, ...]) -> tuple[Source, ...] | None:
        """Return the runs of rows in a converted tensor, or None where it is not made of rows."""
        flat = numbers.reshape(-1)
        if flat.numel() == 0:
            return None
        breaks = (flat.diff() != 1).nonzero().flatten() + 1
        firsts = flat[torch.cat([breaks.new_zeros(1), breaks])]
        ends = torch.cat([breaks, breaks.new_tensor([flat.numel()])])
        lengths = ends.diff(prepend=ends.new_zeros(1))
        owners = torch.searchsorted(torch.tensor(self._bases), firsts, right=True) - 1
        sources = []
        for first, length, owner in zip(
            firsts.tolist(), lengths.tolist(), owners.tolist(), strict=True
        ):
            name = self._names[owner]
            source_shape = self._reader.shape(name)
            is_vector = len(source_shape) < 2
            wanted = shape if is_vector else (*shape[:-1], 1)
            if tuple(numbers.shape) != wanted or not (is_vector or source_shape[-1] == shape[-1]):
                return None
            inner = 1 if is_vector else math.prod(source_shape[1:-1])  # rows a step along dim 0
            start = first - self._bases[owner]
            if start % inner or length % inner:
                return None
            start, stop = start // inner, (start + length) // inner
            rows = None if (start, stop) == (0, source_shape[0]) else (start, stop)
            sources.append(Source(name, rows))
        return tuple(sources)


def _tied_names(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Return parameter → the others that share its values."""
    groups: dict[str, list[str]] = {}
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        groups.setdefault(source, [source]).append(target)
    return {
        name: tuple(other for other in group if other != name)
        for group in groups.values()
        for name in group
    }
