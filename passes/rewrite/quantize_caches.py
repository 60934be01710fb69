"""Let caches hold quantized rows with a scale each."""

from __future__ import annotations

from specc.artifact.kv_rows import MOST_COLUMNS, stored_row
from specc.errors import ConfigError
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree, caches_are_quantized
from specc.passes.program import Program


class QuantizeCaches(Pass):
    """Caches [blocks, block_size, HK, D] → [blocks, block_size, HK, D + 4] of bytes.

    The operators see how rows lie by the type of the cache, so no call changes: attention stores
    what it is given as codes and reads it as codes, also the rows of its own pass, and rows move
    with their scales. A head's row has a scale of its own, so heads can be cut as before.

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
        return result
