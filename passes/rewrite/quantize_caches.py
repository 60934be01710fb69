"""Let caches hold quantized rows with a scale each."""

from __future__ import annotations

import torch
from torch import fx

from specc.artifact.kv_rows import INT8, MOST_COLUMNS, stored_row
from specc.errors import ConfigError
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree, caches_are_quantized
from specc.passes.program import Program, emit_call
from specc.passes.rewrite.absorb_latent import values_in_keys


class QuantizeCaches(Pass):
    """Caches [blocks, block_size, HK, D] → [blocks, block_size, HK, D + 4] of bytes.

    The operators see how rows lie by the type of the cache, so no call changes: attention stores
    what it is given as codes and reads it as codes, also the rows of its own pass, and rows move
    with their scales. A head's row has a scale of its own, so heads can be cut as before.

    For int8, queries and keys are multiplied by a Hadamard matrix, since columns of keys that are
    far larger than the others would leave these few codes. Not for fp8, whose codes suit any size,
    and not of latents, whose first columns are values.

    Args:
        kind: one of `specc.artifact.kv_rows.QUANTIZED_ROWS`.
    Raises:
        ConfigError: wider heads than the operators take.
    """

    requires = (attention_is_a_tree,)
    ensures = (attention_is_a_tree, caches_are_quantized)

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for name, (layer, _) in program.caches.items():
            node = program.placeholder(name)
            value = node.meta["val"]
            *sizes, head_dim = value.shape
            if head_dim > MOST_COLUMNS:
                raise ConfigError(
                    f"--kv-cache-dtype {self._kind}, and heads of {head_dim} columns in layer"
                    f" {program.layers[layer].name} of {program.name}",
                    f"heads of {MOST_COLUMNS} columns or less",
                    "leave out --kv-cache-dtype",
                )
            columns, dtype = stored_row(int(head_dim), value.dtype, self._kind)
            node.meta["val"] = value.new_empty((*sizes, columns), dtype=dtype)
            result.rewrites += 1
        # of `attend`, keys are those of the target's own program
        for node in program.calls(ops.tree_attention, ops.attend):
            if self._kind == INT8 and not values_in_keys(node):
                _transform(node, 2 if node.target is ops.tree_attention else 1)
        return result


def _transform(attention: fx.Node, operands: int) -> None:
    """Queries, and keys if they are an operand."""
    graph, args = attention.graph, list(attention.args)
    with graph.inserting_before(attention):
        for i in range(operands):
            rows: fx.Node = args[i]  # type: ignore[assignment]
            if rows.meta["val"].stride(-1) != 1:
                rows = emit_call(graph, torch.ops.aten.contiguous.default, rows)
            args[i] = emit_call(graph, ops.hadamard, rows)
    attention.args = tuple(args)
