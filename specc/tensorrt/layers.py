"""Layers of a built engine: what each is made of, and which attentions stayed one kernel.

Where it comes from. The builder's verbose log ends in the list that the engine inspector prints, if
it was asked for detailed verbosity: one line a layer, each with its ONNX nodes. That is read here,
since an engine can be inspected only where it can be loaded, which takes a driver. It was compared
with engines of TensorRT-RTX 1.7.

An attention is called fused where one kernel does both products and the softmax: it is known by its
name (`_gemm_mha_v2`, `_gemv_mha_v1`, `fmha`), which the list takes from the compiler's code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAYERS_FILE = "layers.json"

_START = re.compile(r"^(?:\w+: )?Layers:$", re.MULTILINE)
_LINE = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<type>\w+), ")
# which fields follow differs with the type
_FIELDS = {
    "inputs": re.compile(r", Inputs: \[ (\{.*?\})\], "),
    "outputs": re.compile(r", Outputs: \[ (\{.*?\})\], "),
    "tactic": re.compile(r", TacticName: (.*?), StreamId: "),
    "metadata": re.compile(r", Metadata: (.*)$"),
}
_TENSOR = re.compile(r"\{ Name: (.*?), (?:Location: \w+, )?Dimensions: \[")
_PROFILE = re.compile(r" \[profile (\d+)\]")
_GROUP = re.compile(r"_myl(\d+)_\d+$")
_ONNX = re.compile(r"\[ONNX Layer: (.*?)\]")
_FUSED = re.compile(r"(?:^|[^a-z])(?:f?mha|flash_attention|fused_attention)(?:[^a-z]|$)", re.I)


@dataclass(frozen=True)
class Layer:
    """One layer of one optimization profile.

    Args:
        type: the compiler's word: `kgen`, `gemm`, `runtime_fusion`, …
        profile: index of the optimization profile; an engine holds every layer once for each.
        nodes: names of the ONNX nodes that it computes, or parts of them.
        inputs, outputs: tensors, without constants.
        attention: the attention node that it belongs to, or None.
        is_attention: it computes a whole attention.
    """

    name: str
    type: str
    profile: int
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tactic: str
    attention: str | None = None
    is_attention: bool = False


@dataclass(frozen=True)
class AttentionLayers:
    """What became of one attention node in one profile.

    Args:
        is_fused: one kernel computes it.
        kernels: layers that compute a whole attention.
        others: layers that belong to it alone and move or convert data, or, where it fell apart,
            compute its products and softmax.
        cache_reads: those of `others` that read a whole cache, to copy, convert or only reshape
            it; the list does not tell. Grouped queries cost two (`Repl`, repeated keys and values)
            where the kernel wants a head for each query head.
    """

    node: str
    profile: int
    is_fused: bool
    kernels: tuple[str, ...]
    others: tuple[str, ...]
    cache_reads: tuple[str, ...]


@dataclass(frozen=True)
class LayerReport:
    """Layers of an engine; empty where nothing told them.

    Args:
        layers: in order.
        decoded: nodes of quantized weights that a layer of their own makes floats of, which
            products read in place of the integers, in some profile.
    """

    layers: tuple[Layer, ...]
    attentions: tuple[AttentionLayers, ...]
    decoded: tuple[str, ...] = ()

    @property
    def num_profiles(self) -> int:
        return 1 + max((layer.profile for layer in self.layers), default=-1)

    @property
    def fell_apart(self) -> tuple[AttentionLayers, ...]:
        return tuple(attention for attention in self.attentions if not attention.is_fused)

    def count(self, profile: int) -> int:
        return sum(layer.profile == profile for layer in self.layers)

    def reads(self, tensor: str) -> bool:
        """Some layer reads this input of the engine: the builder did not drop it."""
        return any(tensor in layer.inputs for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> LayerReport:
        def items(kind: Any, entries: Iterable[dict[str, Any]]) -> tuple[Any, ...]:
            return tuple(
                kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
                for entry in entries
            )

        attentions = items(AttentionLayers, value["attentions"])
        return cls(items(Layer, value["layers"]), attentions, tuple(value.get("decoded", ())))


def read_layers(
    layers: Sequence[Layer],
    attentions: Iterable[str],
    caches: Iterable[str],
    weights: Mapping[str, Collection[str]] | None = None,
) -> LayerReport:
    """Say which attention each layer belongs to, and how each attention is computed.

    A kernel may hold parts of several nodes: it belongs to the one attention that it names.

    Args:
        layers: of `layers_from_log`.
        attentions: names of the ONNX nodes.
        caches: names of the outputs that hold caches.
        weights: names of the ONNX nodes that make weights of integers → of those that read them.
    """
    names, cached = tuple(attentions), set(caches)
    known = set(names)
    marked = []
    for layer in layers:
        mine = [node for node in layer.nodes if node in known]
        is_kernel = bool(_FUSED.search(_GROUP.sub("", layer.name)) and mine)
        owner = mine[0] if len(mine) == 1 else None
        marked.append(dataclasses.replace(layer, attention=owner, is_attention=is_kernel))
    found = []
    for profile in sorted({layer.profile for layer in marked}):
        for name in names:
            mine_ = [x for x in marked if x.profile == profile and x.attention == name]
            kernels = [x for x in mine_ if x.is_attention]
            # what has parts of other nodes is there anyway: projections' tails, cache writes
            others = [x for x in mine_ if not x.is_attention and x.nodes == (name,)]
            reads = [x for x in others if cached & set(x.inputs) and not cached & set(x.outputs)]
            found.append(
                AttentionLayers(
                    name,
                    profile,
                    len(kernels) == 1 and not any(x.type == "gemm" for x in others),
                    *(tuple(x.name for x in group) for group in (kernels, others, reads)),
                )
            )
    # in one layer with the product the integers are what is read; of a weight that no layer names
    # nothing shows that they are
    decoded = tuple(
        weight
        for weight, readers in (weights or {}).items()
        if marked and not _is_read_by(weight, readers, marked)
    )
    return LayerReport(tuple(marked), tuple(found), decoded)


def _is_read_by(weight: str, readers: Collection[str], layers: Sequence[Layer]) -> bool:
    """Whether each layer that names the weight, one at least, also names what multiplies it."""
    named = [set(layer.nodes) for layer in layers if weight in layer.nodes]
    return bool(named) and all(nodes & set(readers) for nodes in named)


def layers_from_log(text: str) -> tuple[Layer, ...]:
    """Read the last list of layers in a builder's verbose log; empty where it has none."""
    starts = list(_START.finditer(text))
    if not starts:
        return ()
    layers = []
    for line in text[starts[-1].end() :].lstrip("\n").splitlines():
        match = _LINE.match(line)
        if not match:
            break
        found = {key: field.search(line) for key, field in _FIELDS.items()}
        fields = {key: item[1] if item else "" for key, item in found.items()}
        tensors = [_TENSOR.findall(fields[key]) for key in ("inputs", "outputs")]
        name = (match["name"], match["type"])
        layers.append((*name, *tensors, fields["tactic"], fields["metadata"]))
    return _layers(layers)


def _layers(entries: Sequence[tuple[Any, ...]]) -> tuple[Layer, ...]:
    """Names lose their profile, which is a field; compiled groups have one for all their layers."""
    profile_of_group: dict[str, int] = {}
    groups: list[tuple[int, str]] = []
    for name, _, inputs, outputs, _, _ in entries:
        found = [int(k) for text in (name, *inputs, *outputs) for k in _PROFILE.findall(text)]
        match = _GROUP.search(name)
        own, group = max(found, default=0), match[1] if match else ""
        if group:
            profile_of_group[group] = max(own, profile_of_group.get(group, 0))
        groups.append((own, group))
    layers = []
    for entry, (own, group) in zip(entries, groups, strict=True):
        name, kind, inputs, outputs, tactic, metadata = entry
        layers.append(
            Layer(
                name=_PROFILE.sub("", name),
                type=kind,
                profile=profile_of_group.get(group, own),
                nodes=tuple(dict.fromkeys(_ONNX.findall(metadata))),
                inputs=tuple(_PROFILE.sub("", tensor) for tensor in inputs),
                outputs=tuple(_PROFILE.sub("", tensor) for tensor in outputs),
                tactic=tactic,
            )
        )
    return tuple(layers)
