"""The MTP module of a target as a model to compile; its weights are read from the target's files.

A checkpoint has the module's layer as it has the target's own: experts one by one, say. So a model
with a layer more says which tensors each parameter consists of, as of any layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specc.artifact.forwarding_reader import ForwardingReader
from specc.artifact.safetensors_io import TensorReader
from specc.artifact.weight_spec import Source
from specc.errors import HeadError
from specc.passes.drafters.head_spec import EMBEDDING, HEAD
from specc.passes.drafters.mtp_head import MtpHead
from specc.passes.drafters.mtp_spec import MTP_DRAFT, MtpSpec
from specc.passes.frontend import hf_model
from specc.passes.frontend.checkpoint import CheckpointMap
from specc.passes.frontend.model_source import ModelSource

_LAYER = "layer."
_OBSOLETE = re.compile(r"rotary_emb\.inv_freq$")
_MOST_NAMES = 4


def mtp_source(
    spec: MtpSpec, target: ModelSource, dtype: torch.dtype, name: str = "draft_0"
) -> ModelSource:
    """An MTP module as a model to compile; no weight is read.

    Args:
        dtype: of its weights, arithmetic and caches.
        name: `draft_0`, ….
    Raises:
        HeadError: the checkpoint has a tensor of it that has no place in the module.
        WeightError: a tensor is missing, or has another shape.
    """
    deeper: Any = hf_model.build_on_meta(spec.config, dtype)
    with torch.device("meta"):
        module = MtpHead(deeper).eval()
    for part in (module.enorm, module.hnorm, module.eh_proj, module.norm):
        for parameter in part.parameters():
            parameter.data = parameter.data.to(dtype)
    sources = _sources(spec, module, deeper, target.reader)
    read = {item.name for found in sources.values() for item in found}
    left = [
        item
        for item in target.reader.keys()  # noqa: SIM118 - a reader is no mapping
        if item.startswith(spec.place) and item not in read and not _OBSOLETE.search(item)
    ]
    if left:
        more = ", …" if len(left) > _MOST_NAMES else ""
        raise HeadError(
            f"{spec.target.name}: {len(left)} tensors of its MTP module that have no place in it:"
            f" {', '.join(left[:_MOST_NAMES])}{more}",
            "a module all of whose tensors are read",
            "choose another --draft; what it computes would be another thing without them",
        )
    target.read_by_drafts |= read
    source = ModelSource(name, MTP_DRAFT, dtype, module, spec.directory, spec.config, target.reader)
    source.places = sources.__getitem__
    source.rope_length = target.rope_length
    source.head = spec
    return source


def _sources(
    spec: MtpSpec, module: MtpHead, deeper: Any, reader: TensorReader
) -> dict[str, tuple[Source, ...]]:
    """What each parameter and saved buffer of the module consists of in the checkpoint."""
    places = {id(part): path for path, part in deeper.named_modules()}
    own, ends = places[id(module.layer)], {EMBEDDING: module.embed_tokens, HEAD: module.lm_head}
    checkpoint = CheckpointMap(deeper, _AsLayer(reader, spec.layer, f"{own}."))
    found: dict[str, tuple[Source, ...]] = {}
    for key in _stored(module):
        if key in spec.tensors:
            found[key] = (Source(spec.tensors[key]),)
            continue
        if key.startswith(_LAYER):
            place = f"{own}.{key.removeprefix(_LAYER)}"
        else:
            part, _, last = key.rpartition(".")
            place = f"{places[id(ends[f'{part}.weight'])]}.{last}"
        found[key] = tuple(
            replace(item, name=_renamed(item.name, f"{own}.", spec.layer))
            for item in checkpoint.sources(place)
        )
    return found


def _stored(module: nn.Module) -> list[str]:
    """Parameters, and the buffers that checkpoints hold."""
    return [key for key, value in module.state_dict().items() if value.is_floating_point()]


class _AsLayer(ForwardingReader):
    """A target's checkpoint with the layer of its MTP module as the layer after its own.

    Args:
        given: what the layer's tensors begin with in it.
    """

    def __init__(self, reader: TensorReader, given: str, taken: str) -> None:
        self._reader, self._given, self._taken = reader, given, taken

    def keys(self) -> Iterable[str]:
        return [_renamed(key, self._given, self._taken) for key in self._reader.keys()]  # noqa: SIM118

    def location(self, key: str | None = None) -> str:
        return self._reader.location(None if key is None else self.source_of(key)[1])

    def source_of(self, key: str) -> tuple[TensorReader, str]:
        return self._reader, _renamed(key, self._taken, self._given)


def _renamed(key: str, given: str, taken: str) -> str:
    return taken + key.removeprefix(given) if key.startswith(given) else key
