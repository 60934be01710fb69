"""Cosines and sines of positions become rows of a table, the same to the last bit, or stay."""

from __future__ import annotations

import pytest
import torch

from specc.kernels import ops
from specc.passes.lower.cuda.phases import cuda_phases, launches
from specc.passes.pipeline import Pipeline
from specc.passes.program import emit_call
from specc.passes.proof.verify_graph import verify_graph
from specc.passes.rewrite.tabulate_rotary import TabulateRotary
from tests.models import POSITIONS, VOCAB, build_model
from tests.passes.modules import Runner, compiled, several_passes
from tests.tiers import only

aten = torch.ops.aten
TRIGONOMETRY = (aten.cos.default, aten.sin.default)


def fused(name, **options):
    """A program up to the pass in question."""
    model = build_model(name, **options)
    program, _ = compiled(model)
    Pipeline(cuda_phases(POSITIONS)[:-1]).run(program)
    return program, model


# model → tables; gemma3 has one for its windows, and one for its other layers
TABLES = {"llama": 1, "gemma3": 2, "gpt_neox": 1, "qwen3": 1, "llama-yarn": 1, "gpt2": 0}


@pytest.mark.parametrize("name", only(("llama", "gemma3", "gpt2"), TABLES))
def test_tables_change_no_bit(name):
    program, model = fused(name)
    before, count = Runner(program, model), len(launches(program))
    result = TabulateRotary(POSITIONS).run(program)
    verify_graph(program, "tables", is_final=True)
    assert (result.rewrites, result.declined) == (TABLES[name], [])
    assert not program.calls(*TRIGONOMETRY)
    # of each table at least its angles, cosines and sines, and one lookup now
    assert len(launches(program)) <= count - 3 * TABLES[name]
    # all lookups come before the first layer, none between two of them
    nodes = list(program.graph.nodes)
    tables = [node for node in nodes if node.op == "placeholder" and "rotary_" in node.target]
    lookups = [nodes.index(user) for table in tables for user in table.users]
    layers = [i for i, node in enumerate(nodes) if "rope_write" in str(node.target)]
    assert all(lookup < min(layers) for lookup in lookups)
    after = Runner(program, model)
    for inputs in several_passes(VOCAB):
        assert torch.equal(before.run(inputs), after.run(inputs))
    for key, rows in before.caches.items():
        assert torch.equal(after.caches[key], rows)


def test_the_table_has_a_row_for_each_position_and_takes_the_place_of_frequencies():
    program, _ = fused("llama")
    before = {name: value.shape for name, value in program.constants.items()}
    TabulateRotary(37).run(program)
    head_dim = program.layers[0].head_dim
    assert before
    assert {name: value.shape for name, value in program.constants.items()} == {
        "rotary_0": (37, 2 * head_dim)
    }
    names = [node.target for node in program.graph.find_nodes(op="placeholder")]
    assert names.index("rotary_0") == len(program.weights) == names.index("tokens") - 1


def test_in_the_dtype_of_the_tables():
    model = build_model("llama")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    program, _ = compiled(model)
    Pipeline(cuda_phases(POSITIONS)).run(program)
    assert program.constants["rotary_0"].dtype == torch.bfloat16


def test_a_table_that_depends_on_other_positions_of_the_pass_stays():
    program, _ = fused("llama")
    positions = program.placeholder("positions")
    user = next(node for node in positions.users if node.target is not ops.attend)
    with program.graph.inserting_before(user):
        least = emit_call(program.graph, aten.amin.default, positions)
        shifted = emit_call(program.graph, aten.sub.Tensor, positions, least)
    user.replace_input_with(positions, shifted)
    result = TabulateRotary(POSITIONS).run(program)
    assert result.rewrites == 0
    assert [item.reason for item in result.declined] == [
        "a row depends on more than its own position"
    ]
    assert program.calls(*TRIGONOMETRY)


def test_a_table_of_learned_frequencies_stays():
    program, _ = fused("llama")
    name = next(iter(program.constants))
    del program.constants[name]
    result = TabulateRotary(POSITIONS).run(program)
    assert result.rewrites == 0
    assert [item.reason for item in result.declined] == [
        f"cosines and sines follow from {name}, too"
    ]


def test_long_tables_are_exact():
    """Angles of 100,000 rad: a row is that of its position, not of a nearby one."""
    program, model = fused("llama")
    before = Runner(program, model)
    TabulateRotary(131072).run(program)
    after = Runner(program, model)
    inputs = several_passes(VOCAB)[0]
    inputs = inputs | {"positions": inputs["positions"] + 131000}
    assert torch.equal(before.run(inputs), after.run(inputs))
