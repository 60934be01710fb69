"""Let caches hold rows of int8 with a scale each."""

from __future__ import annotations

import torch

from specc.artifact.kv_rows import INT8, MOST_COLUMNS, stored_row
from specc.errors import ConfigError
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree, caches_are_int8
from specc.passes.program import Program


class StoreInt8(Pass):
    """Caches [blocks, block_size, HK, D] → the same as int8, [blocks, block_size, HK, D + 4].

    The operators see how rows lie by the type of the cache, so no call changes: attention stores
    what it is given as codes and reads it as codes, also the rows of its own pass, and rows move
    with their scales. A head's row has a scale of its own, so heads can be cut as before.
    """

    requires = (attention_is_a_tree,)
    ensures = (attention_is_a_tree, caches_are_int8)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for name, (layer, _) in program.caches.items():
            node = program.placeholder(name)
            value = node.meta["val"]
            *sizes, head_dim = value.shape
            if head_dim > MOST_COLUMNS:
                raise ConfigError(
                    f"--kv-cache-dtype {INT8}, and heads of {head_dim} columns in layer"
                    f" {program.layers[layer].name} of {program.name}",
                    f"heads of {MOST_COLUMNS} columns or less",
                    "leave out --kv-cache-dtype",
                )
            columns, dtype = stored_row(int(head_dim), value.dtype, INT8)
            node.meta["val"] = value.new_empty((*sizes, columns), dtype=dtype)
            assert dtype == torch.int8
            result.rewrites += 1
        return result
