"""Facts that passes require and ensure."""

from __future__ import annotations

import torch

from specc.artifact.kv_rows import holds_quantized
from specc.kernels import ops
from specc.passes.program import FEATURES, HANDED_ON, STATES, Program

aten = torch.ops.aten
# attention as models call it
DENSE_ATTENTION = (aten.scaled_dot_product_attention.default, ops.dense_attention)
# convolutions and recurrences over tokens, as models call them
DENSE_RECURRENCE = (ops.dense_conv, ops.dense_recurrence)


def has_runtime_inputs(program: Program) -> bool:
    """The graph takes every runtime input."""
    names = {node.target for node in program.graph.find_nodes(op="placeholder")}
    return names.issuperset(program.runtime_inputs)


def is_flat_call_graph(program: Program) -> bool:
    """No nested graph, no attribute: placeholders, calls and one output."""
    return all(
        node.op in ("placeholder", "call_function", "output") for node in program.graph.nodes
    )


def is_off_meta_device(program: Program) -> bool:
    """No operator creates a tensor on the meta device."""
    return not any(
        isinstance(device := node.kwargs.get("device"), torch.device) and device.type == "meta"
        for node in program.graph.nodes
    )


def masks_are_classified(program: Program) -> bool:
    """Every attention node has a known window."""
    return all(node.name in program.windows for node in program.calls(*DENSE_ATTENTION))


def has_no_dense_attention(program: Program) -> bool:
    """No attention node of a model is left."""
    return not list(program.calls(*DENSE_ATTENTION))


def has_no_layers(program: Program) -> bool:
    """It attends to nothing: it keeps states (Mamba), or reads rows of a target (Medusa heads)."""
    is_empty = not program.layers and not program.caches
    has_others = bool(program.row_inputs or program.state_layers)
    return is_empty and has_others and has_no_dense_attention(program)


def has_no_dense_recurrence(program: Program) -> bool:
    """No convolution or recurrence of a model is left."""
    return not list(program.calls(*DENSE_RECURRENCE))


def recurrences_are_trees(program: Program) -> bool:
    """Every convolution and recurrence over tokens has a state and replay rows of its own."""
    calls = program.calls(ops.tree_conv, ops.tree_recurrence)
    count, held = len(program.state_layers), sorted(program.states.values())
    # numbers of a second program are those of its target's layers
    numbers = sorted({number for number, _ in held})
    wanted = [(number, part) for number in numbers for part in ("rows", "state")]
    has_input = STATES in program.runtime_inputs or not count
    return has_input and len(calls) == count == len(numbers) and held == wanted


def attention_is_a_tree(program: Program) -> bool:
    """Every layer attends through specc::tree_attention with caches of its own."""
    if has_no_layers(program):
        return True
    count = len(list(program.calls(ops.tree_attention)))
    return count > 0 and count == len(program.layers) and len(program.caches) == 2 * count


def caches_are_quantized(program: Program) -> bool:
    """Every cache holds quantized rows."""
    return all(holds_quantized(program.placeholder(x).meta["val"].dtype) for x in program.caches)


def attention_is_cached(program: Program) -> bool:
    """Every layer attends through an operator of specc with caches of its own."""
    if has_no_layers(program):
        return True
    calls = program.calls(ops.tree_attention, ops.masked_attention)
    held: dict[int, set[str]] = {}
    for layer, part in program.caches.values():
        held.setdefault(layer, set()).add(part)
    # of padded programs, a value that is in its key's row has no cache of its own
    are_there = (
        parts == {"k", "v"} or (parts == {"k"} and layer.values_in_keys)
        for (_, parts), layer in zip(sorted(held.items()), program.layers, strict=False)
    )
    return 0 < len(calls) == len(program.layers) == len(held) and all(are_there)


def features_are_written(program: Program) -> bool:
    """One call writes rows to the input that holds them, and nothing else has that input."""
    calls = program.calls(ops.write_rows)
    return (
        program.taps is not None
        and len(calls) == 1
        and list(program.placeholder(FEATURES).users) == calls
    )


def features_are_read(program: Program) -> bool:
    """A draft has one output, reads its target's slab, and one that it alone writes, or none."""
    written, reads = program.calls(ops.write_rows), program.calls(ops.take_rows)
    target = set(program.placeholder(FEATURES).users)
    if not (program.reads_features and program.handed_on is None and len(target) == 1):
        return False
    if not program.feature_width:
        return not written and target == set(reads)
    own = set(program.placeholder(HANDED_ON).users)
    return (
        len(written) == 1
        and len(reads) == 2
        and own == {written[0], *(node for node in reads if node not in target)}
        and target <= set(reads)
    )


def logits_are_selected(program: Program) -> bool:
    """Only the rows that are asked for reach the output; a part that hands on has none."""
    if program.ends_hidden:
        return True
    return bool(program.placeholder("logit_rows").users) and program.logits.meta["val"].dim() == 2
