"""Give `specc::attend` as many words of ancestors as its kernel asks for."""

from __future__ import annotations

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call
from specc.passes.rewrite.fuse_rope_write import attention_reads_caches
from specc.speculation.tree import WORD_BITS

aten = torch.ops.aten


class WidenAncestors(Pass):
    """`ancestors` that a program computes get a bit for every token of a pass.

    The kernel refuses fewer: it cannot tell rows that nobody is meant to see from rows that were
    forgotten. What steps hand to a program has them; what a program computes itself (of block
    drafters, whose layers differ in what their rows see) has one word. Zeros are added: as many for
    every pass, since a program may not look at how many tokens a pass has.

    Args:
        num_tokens: of a sequence in a pass, at most.
    """

    requires = (attention_reads_caches,)
    ensures = (attention_reads_caches,)

    def __init__(self, num_tokens: int) -> None:
        self._num_words = -(-num_tokens // WORD_BITS)

    def run(self, program: Program) -> PassResult:
        result, graph = PassResult(), program.graph
        wide: dict[fx.Node, fx.Node] = {}
        for call in program.calls(ops.attend):
            words = bind_args(call)["ancestors"]
            if words is None or words.op == "placeholder":
                continue
            missing = self._num_words - int(words.meta["val"].shape[1])
            if missing <= 0:
                continue
            if words not in wide:
                with graph.inserting_before(call):
                    wide[words] = emit_call(
                        graph, aten.constant_pad_nd.default, words, [0, missing]
                    )
            call.replace_input_with(words, wide[words])
            result.rewrites += 1
        return result
