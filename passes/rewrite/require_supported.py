"""Refuse attention and quantized weights that a backend lacks, before anything slow is done."""

from __future__ import annotations

from specc.artifact.backends import (
    LATENT_ROWS,
    SHORT_GROUPS,
    VALUE_WIDTH,
    ZERO_POINTS,
    BackendFacts,
    backend_names,
    facts_of,
)
from specc.errors import ConfigError, UnsupportedAttentionError
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import AttentionLayer, Program, Weight


class RequireAttention(Pass):
    """Refuse attention that the backend lacks: sinks, softcap, slopes, chunks, value widths."""

    requires = (attention_is_a_tree,)

    def __init__(self, facts: BackendFacts) -> None:
        self._facts = facts

    def run(self, program: Program) -> PassResult:
        for layer in program.layers:
            if layer.chunk and layer.values_in_keys and self._facts.most_latent is not None:
                raise UnsupportedAttentionError(
                    f"layer {layer.name}: chunks of {layer.chunk} positions over cached latents,"
                    f" and backend {self._facts.name}",
                    "one of the two, or a backend that computes both",
                    "compile with --mla-cache expanded, or with --backend cpu",
                )
            for what, text in _extras_of_layer(layer).items():
                if what in self._facts.attention_extras:
                    continue
                able = [n for n in backend_names() if what in facts_of(n).attention_extras]
                raise UnsupportedAttentionError(
                    f"layer {layer.name}: {text}, and backend {self._facts.name}",
                    f"attention without that, or a backend that computes it: {', '.join(able)}",
                    f"compile with --backend {able[0]}",
                )
        return PassResult()


def _extras_of_layer(layer: AttentionLayer) -> dict[str, str]:
    """What a layer does besides masked products → how to say it."""
    found = {}
    if layer.has_sinks:
        found["sinks"] = "attention sinks (scores without values)"
    if layer.softcap:
        found["softcap"] = f"a softcap of {layer.softcap:g}"
    if layer.has_slopes:
        found["slopes"] = "a bias by the distance of keys (ALiBi)"
    if layer.chunk:
        found["chunks"] = f"chunks of {layer.chunk} positions"
    if layer.columns_of_values != layer.head_dim:
        what = LATENT_ROWS if layer.values_in_keys else VALUE_WIDTH
        found[what] = f"keys of {layer.head_dim} columns and values of {layer.value_dim}"
    return found


class RequireLayouts(Pass):
    """No weight is quantized in a way that the backend lacks."""

    def __init__(self, facts: BackendFacts) -> None:
        self._facts = facts

    def run(self, program: Program) -> PassResult:
        for weight in program.weights.values():
            if weight.quantized is None:
                continue
            kind, name = weight.quantized.kind, f"{program.name}: {weight.parameters[0]}"
            if kind not in self._facts.quantized:
                able = [other for other in backend_names() if kind in facts_of(other).quantized]
                raise ConfigError(
                    f"{name} in {kind}, and backend {self._facts.name}",
                    f"weights in {' or '.join(self._facts.quantized) or 'the type of the engine'},"
                    f" or a backend that reads {kind}: {', '.join(able)}",
                    f"compile with --backend {able[0]}",
                )
            for what, (found, needed) in _extras_of_weight(weight).items():
                if what in self._facts.quantized_extras:
                    continue
                able = [
                    other
                    for other in backend_names()
                    if what in facts_of(other).quantized_extras
                    and kind in facts_of(other).quantized
                ]
                raise ConfigError(
                    f"{name} in {kind} with {found}, and backend {self._facts.name}",
                    f"{needed}, or a backend that takes them: {', '.join(able)}",
                    f"compile with --backend {able[0]}",
                )
        return PassResult()


def _extras_of_weight(weight: Weight) -> dict[str, tuple[str, str]]:
    """What a quantized weight has besides levels and scales → how to say it, and its opposite."""
    layout, columns = weight.quantized, weight.shape[-1]
    assert layout is not None
    found = {}
    if layout.has_zeros:
        found[ZERO_POINTS] = "zero points of its own", "weights without zero points"
    if layout.group and columns % layout.group:
        found[SHORT_GROUPS] = (
            f"{columns} columns in groups of {layout.group}, the last one short",
            "groups that divide the columns",
        )
    return found
