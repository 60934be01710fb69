"""Let long prompts attend to keys and values that their pass expands, while caches hold latents."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import Program, bind_args, emit_call
from specc.passes.rewrite.absorb_latent import values_in_keys

aten = torch.ops.aten
_OF_PASS = ("q_start", "position", "slot", "cache_len", "ancestors", "block_table")


class ExpandPrompts(Pass):
    """After attention over latents (`AbsorbLatent`) → `specc.attend_expanded` for many tokens.

    A score of absorbed attention takes R + r products in place of n + r, and its output R in place
    of v, for each pair of a token and a row of the cache; to expand a row takes R · (n + v) once.
    So a sequence with more tokens in the pass than R · (n + v) / (2 R - n - v), 171 for DeepSeek,
    is attended to over expanded rows; both are chosen between in one program, by sequences.
    `tree_attention` writes the rows of these, too, and leaves out the rest (`most_rows`).

    Layers with a window stay as they are, since few rows are read there, and so do caches of int8,
    whose values have rows of their own.

    Source: DeepSeek-V2, arXiv:2405.04434 §2.1 and appendix C; vLLM and DeepSeek's own code likewise
        expand in prefill and absorb while decoding.
    """

    requires = (attention_is_a_tree,)
    ensures = (attention_is_a_tree,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.tree_attention):
            if values_in_keys(node):
                with result.attempt(node.name):
                    _rewrite(program.graph, node, _absorbed(node))
        return result


@dataclass(frozen=True)
class _Absorbed:
    """Attention whose queries are [own · up_k, rest], and whose result is multiplied by up_v."""

    own: fx.Node
    rest: tuple[fx.Node, ...]
    up_k: fx.Node
    up_v: fx.Node
    output: fx.Node

    @property
    def most_rows(self) -> int:
        """Tokens of a sequence up to which absorbed attention takes fewer products; 0: any."""
        num_keys, rank = (int(size) for size in self.up_k.meta["val"].shape[1:])
        expanded = num_keys + int(self.up_v.meta["val"].shape[1])
        saved = 2 * rank - expanded
        return math.ceil(rank * expanded / saved) if saved > 0 else 0


def _absorbed(attention: fx.Node) -> _Absorbed:
    """What `AbsorbLatent` has made.

    Raises:
        NoMatch: something else, or attention that does not gain.
    """
    bound = bind_args(attention)
    if bound["k_cache"].meta["val"].dtype != bound["q"].meta["val"].dtype:
        raise NoMatch("its cache has values in rows of their own")
    for name, what in (("window", "a window"), ("slopes", "slopes"), ("chunk", "chunks")):
        if bound[name]:
            raise NoMatch(f"it has {what}")
    queries, (output, *others) = bound["q"], attention.users
    parts = bind_args(queries)["tensors"] if queries.target is aten.cat.default else ()
    products = (*parts[:1], output)
    if not parts or others or any(item.target is not aten.bmm.default for item in products):
        raise NoMatch("no up-projection is absorbed before and after it")
    own, up_k = parts[0].args
    up = output.args[1]
    rows = up.args[0] if up.target is aten.transpose.int else up
    if rows.target is aten.contiguous.default:
        rows = rows.args[0]
    if output.args[0] is not attention or up.args[1:] != (1, 2):
        raise NoMatch("no up-projection follows it")
    found = _Absorbed(own, tuple(parts[1:]), up_k, rows, output)
    if not found.most_rows:
        raise NoMatch("its latent is no wider than what it expands to: nothing is saved")
    return found


def _rewrite(graph: fx.Graph, attention: fx.Node, found: _Absorbed) -> None:
    bound = bind_args(attention)
    attention.kwargs = {**attention.kwargs, "most_rows": found.most_rows}
    with graph.inserting_after(found.output):
        queries = emit_call(graph, aten.cat.default, [found.own, *found.rest], -1)
    with graph.inserting_after(queries):
        expanded = emit_call(
            graph,
            ops.attend_expanded,
            found.output,
            queries,
            bound["k_cache"],
            found.up_k,
            found.up_v,
            *(bound[name] for name in _OF_PASS),
            bound["sink_logits"],
            most_rows=found.most_rows,
            scale=bound["scale"],
            softcap=bound["softcap"],
        )
    expanded.meta["nn_module_stack"] = found.output.meta.get("nn_module_stack")
    found.output.replace_all_uses_with(expanded, delete_user_cb=lambda user: user is not expanded)
