"""Heads as models to compile: a module on the meta device, and where its weights come from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from specc.artifact.forwarding_reader import ForwardingReader
from specc.artifact.safetensors_io import SafetensorsReader, TensorReader, missing_tensor
from specc.artifact.weights import MemoryReader
from specc.errors import HeadError
from specc.passes.drafters.head_spec import EMBEDDING, HEAD, HeadSpec
from specc.passes.drafters.registry import drafter_of_files
from specc.passes.frontend.checkpoint import CheckpointMap
from specc.passes.frontend.model_source import ModelSource, own_source


class HeadReader(ForwardingReader):
    """A head's tensors by the names of its parameters; shared ones are read from the target's.

    Args:
        tensors: parameter → tensor in it.
        shared: parameter → tensor of the target.
    """

    def __init__(
        self,
        reader: TensorReader,
        tensors: dict[str, str],
        target: TensorReader,
        shared: dict[str, str],
    ) -> None:
        self._reader = reader
        self._places = {parameter: (reader, name) for parameter, name in tensors.items()}
        self._places |= {parameter: (target, name) for parameter, name in shared.items()}

    def keys(self) -> Iterable[str]:
        return self._places.keys()

    def location(self, key: str | None = None) -> str:
        if key is None or key not in self._places:
            return self._reader.location()
        reader, name = self._places[key]
        return reader.location(name)

    def source_of(self, key: str) -> tuple[TensorReader, str]:
        if key not in self._places:
            raise missing_tensor(key, self)
        return self._places[key]


def head_source(
    spec: HeadSpec, target: ModelSource, dtype: torch.dtype, name: str = "draft_0"
) -> ModelSource:
    """A head as a model to compile; no weight is read.

    Args:
        dtype: of its weights, arithmetic and caches.
        name: `draft_0`, ….
    Raises:
        HeadError: a parameter of the target that it shares is none that can be read as it is.
        WeightError: its checkpoint cannot be read.
    """
    kind = drafter_of_files(spec)
    if (found := kind.source_in_target(spec, target, dtype, name)) is not None:
        return found
    module = _module_of(spec, dtype)
    reader = SafetensorsReader(spec.files)
    shared = {parameter: _tensor_of(target, parameter, spec) for parameter in spec.shared}
    source = ModelSource(
        name,
        str(spec.directory),
        dtype,
        module,
        spec.directory,
        spec.config,
        HeadReader(reader, spec.tensors, target.reader, shared),
        [f"{name.replace('_', ' ')}: {text}" for text in spec.warnings],
    )
    source.places = own_source
    source.head = spec
    return source


def shape_of_head(
    spec: HeadSpec, target: ModelSource, dtype: torch.dtype, name: str = "draft_0"
) -> ModelSource:
    """A head that has no weights; arguments as of `head_source`.

    Raises:
        HeadError: a parameter that it shares is none of the target's.
    """
    shared_parameters(spec, target.module)
    label = str(spec.directory)
    source = ModelSource(
        name, label, dtype, _module_of(spec, dtype), None, spec.config, MemoryReader({}, label)
    )
    source.head = spec
    return source


def _module_of(spec: HeadSpec, dtype: torch.dtype) -> nn.Module:
    """On the meta device."""
    with torch.device("meta"):
        module = drafter_of_files(spec).module(spec).eval()
    for parameter in module.parameters():
        # buffers keep their own: rotary frequencies are float32 in every model
        parameter.data = parameter.data.to(dtype)
    return module


def shared_parameters(spec: HeadSpec, target: nn.Module) -> dict[str, str]:
    """Parameter of a head → parameter of its target that it is.

    Raises:
        HeadError: the target does not say which of its parameters that is, it has another shape,
            or the target does more with it than look rows up, or multiply with it.
    """
    found = {}
    for parameter in spec.shared:
        method = "get_input_embeddings" if parameter == EMBEDDING else "get_output_embeddings"
        part = getattr(target, method, lambda: None)()
        weight = getattr(part, "weight", None)
        if parameter == EMBEDDING and _scale_of(part) != spec.embedding_scale:
            weight = None
        if parameter == HEAD and getattr(part, "bias", None) is not None:
            weight = None
        names = [key for key, value in target.named_parameters() if value is weight]
        needed = (spec.target.vocab_size, spec.width)
        if not names or weight is None or tuple(weight.shape) != needed:
            raise HeadError(
                f"{spec.directory}: no {parameter}, and {spec.target.name} has no plain one of"
                f" {list(needed)}",
                f"{parameter} in the checkpoint of the head",
                "pass a head that has all of its weights",
            )
        found[parameter] = names[0]
    return found


def _scale_of(embedding: nn.Module | None) -> float | None:
    """What an embedding multiplies its rows with; None of one that does something else."""
    if type(embedding) is nn.Embedding:
        return 1.0
    # of Gemma
    scale = getattr(embedding, "scalar_embed_scale", None)
    return float(scale) if isinstance(embedding, nn.Embedding) and scale is not None else None


def share_equal(draft: ModelSource, target: ModelSource) -> None:
    """Take for the target's what the files of a head have a copy of.

    Args:
        draft: a head; its `shared` become more.
    """
    spec = draft.head
    assert spec is not None
    for parameter in (EMBEDDING, HEAD):
        if parameter in spec.shared or parameter not in spec.tensors or draft.places is None:
            continue
        try:
            theirs = _tensor_of(target, parameter, replace(spec, shared=(parameter,)))
        except HeadError:  # the target has none that is plain
            continue
        (own,) = draft.places(parameter)
        if _are_equal(draft.reader, own.name, target.reader, theirs):
            spec = replace(spec, shared=(*spec.shared, parameter))
    draft.head = spec


def _are_equal(reader: TensorReader, name: str, other: TensorReader, theirs: str) -> bool:
    """Two tensors, bit for bit; the first chunk that differs is the last that is read."""
    if name not in set(reader.keys()) or theirs not in set(other.keys()):
        return False  # sizes of a model without weights
    if (reader.shape(name), reader.dtype(name)) != (other.shape(theirs), other.dtype(theirs)):
        return False
    # chunks of readers that cut them elsewhere count as different
    chunks = reader.read_chunks(name), other.read_chunks(theirs)
    pairs = itertools.zip_longest(*chunks, fillvalue=b"")
    return all(memoryview(one) == memoryview(two) for one, two in pairs)


def _tensor_of(target: ModelSource, parameter: str, spec: HeadSpec) -> str:
    """The tensor in the target's checkpoint that a head has in place of its own."""
    own = shared_parameters(spec, target.module)[parameter]
    if target.directory is None:
        return own
    module: nn.Module = target.module
    sources = CheckpointMap(module, target.reader).sources(own)  # type: ignore[arg-type]
    (source, *others) = sources
    if others or source.rows is not None or source.transpose or source.part is not None:
        raise HeadError(
            f"{spec.directory}: no {parameter}, and {spec.target.name} has {own} in pieces",
            f"{parameter} in the checkpoint of the head",
            "pass a head that has all of its weights",
        )
    return source.name
