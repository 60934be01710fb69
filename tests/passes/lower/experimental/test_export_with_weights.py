"""What compilers of whole models are handed: the program with its weights inside."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from specc.artifact.cache_rows import CacheRows, reach_of
from specc.errors import UnsupportedGraphError, WeightError
from specc.kernels import ops
from specc.passes.lower.experimental.export_with_weights import (
    export_with_weights,
    input_sizes,
    read_weights,
)
from specc.passes.program import upstream
from tests.onnx_models import WEIGHTS, lowered, save_file

# no GPU has run it, and no default path uses it
pytestmark = pytest.mark.slow

ROWS = CacheRows(front=1, slots=60, scratch=19)


def results_of(pair, given):
    """Logits and caches of the padded program, operator by operator."""
    program = pair.padded
    weights = pair.weights
    values = {name: weights[weight.key] for name, weight in program.weights.items()}
    values |= program.constants | given
    written = {}

    class Keeping(fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if n.target is ops.cache_write:
                written[n.args[0].target] = value
            return value

    names = [node.target for node in program.graph.find_nodes(op="placeholder")]
    logits = Keeping(program.graph_module).run(*(values[name] for name in names))
    return [logits, *(written[name] for name in program.caches)]


def mask_of(attention):
    """The input that its mask comes from, which may be repeated for a group of heads."""
    names = {node.target for node in upstream(attention.args[3]) if node.op == "placeholder"}
    (name,) = {name for name in names if name.startswith("mask")}
    return name


def example(program, batch, nodes, rows, seed=3):
    """Values of all inputs, of sizes that the export did not see; caches have no zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"batch": batch, "nodes": nodes, "rows": rows}
    given = {}
    for name, shape in input_sizes(program).items():
        shape = [sizes.get(size, size) for size in shape]
        dtype = program.placeholder(name).meta["val"].dtype
        if dtype == torch.bool:
            value = torch.rand(shape, generator=generator) < 0.3
            value[..., 0] = True
        elif dtype == torch.int64:
            high = {"logit_rows": batch * nodes, "write_index": ROWS.total - nodes}.get(name, 100)
            value = torch.randint(high, shape, generator=generator)
        else:
            value = torch.randn(shape, generator=generator).to(dtype)
        given[name] = value
    return given


@pytest.mark.parametrize("name", [pytest.param("gemma3-tied", marks=pytest.mark.slow), "gpt2"])
def test_the_exported_program_is_the_program(name):
    pair = lowered(name, ROWS)
    program = pair.padded
    exported = export_with_weights(program, pair.weights)
    # names, so that they are those of the engine
    module = exported.module()
    inputs = [node.target for node in module.graph.find_nodes(op="placeholder")]
    assert inputs == [*program.runtime_inputs, *program.caches] == list(input_sizes(program))
    own = [node for node in exported.graph.nodes if "specc" in str(node.target)]
    kinds = [node.target for node in own]
    layers = len(program.layers)
    assert kinds.count(ops.cache_write) == 2 * layers == len(program.caches)
    assert kinds.count(ops.masked_attention) == layers
    assert set(kinds) == {ops.cache_write, ops.masked_attention}
    # the masks are those of the layers
    masks = [mask_of(node) for node in own if node.target is ops.masked_attention]
    assert masks == [reach_of(layer).mask_input for layer in program.layers]
    # heads are named: -1 would be unknown to TensorRT
    for node in exported.graph.nodes:
        if "view" in str(node.target):
            for size, made in zip(node.args[1], node.meta["val"].shape, strict=True):
                assert size != -1 or isinstance(made, torch.SymInt)
    # tied weights are held once
    held = [*exported.state_dict.values()]
    assert len({value.data_ptr() for value in held if value.numel()}) == len(held)
    # torch-tensorrt takes assertions out; of sizes that torch did not see they say too much
    for node in list(module.graph.nodes):
        if "_assert" in str(node.target):
            module.graph.erase_node(node)
    module.recompile()
    for sizes in ((2, 5, 4), (1, 1, 1)):
        given = example(program, *sizes)
        found, wanted = module(*given.values()), results_of(pair, given)
        assert len(found) == len(wanted) == 1 + len(program.caches)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_weights_come_from_the_engines_file(tmp_path):
    pair = lowered("mistral", ROWS, torch.float16)
    save_file(pair.weights, tmp_path / WEIGHTS)
    found = read_weights(pair.padded, tmp_path / WEIGHTS)
    assert found.keys() == {weight.key for weight in pair.padded.weights.values()}
    for key, value in found.items():
        assert value.dtype == torch.float16
        assert torch.equal(value, pair.weights[key])
    key = next(iter(found))
    with pytest.raises(WeightError, match="nothing for"):
        export_with_weights(pair.padded, {k: v for k, v in found.items() if k != key})
    with pytest.raises(WeightError, match="float32"):
        export_with_weights(pair.padded, found | {key: found[key].float()})


@pytest.mark.slow
def test_an_operator_without_converter_is_refused_by_name():
    pair = lowered("mixtral", ROWS)
    with pytest.raises(UnsupportedGraphError, match="grouped_mm"):
        export_with_weights(pair.padded, pair.weights)
