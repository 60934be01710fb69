"""Refuse attention that a backend does not compute, before anything slow is done for it."""

from __future__ import annotations

from specc.artifact.backends import (
    LATENT_ROWS,
    VALUE_WIDTH,
    BackendFacts,
    backend_names,
    facts_of,
)
from specc.errors import UnsupportedAttentionError
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import AttentionLayer, Program


class RequireAttention(Pass):
    """No layer has what the backend lacks: sinks, softcaps, slopes, chunks, other values than keys.

    Args:
        facts: of the backend.
    """

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
            for what, text in _extras(layer).items():
                if what in self._facts.attention_extras:
                    continue
                able = [n for n in backend_names() if what in facts_of(n).attention_extras]
                raise UnsupportedAttentionError(
                    f"layer {layer.name}: {text}, and backend {self._facts.name}",
                    f"attention without that, or a backend that computes it: {', '.join(able)}",
                    f"compile with --backend {able[0]}",
                )
        return PassResult()


def _extras(layer: AttentionLayer) -> dict[str, str]:
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
