"""Programs exported as launches of their kernels: nothing else is left, and the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import Pipeline
from tests.kept import COMPILER, ROOT, keep
from tests.models import POSITIONS, VOCAB, build_model
from tests.passes.lower.experimental.inlined import describe, export_for, kernel_name, launches_of
from tests.passes.modules import BLOCK_SIZE, BLOCKS_A_ROW, Runner, compiled, several_passes

# no GPU has run it, and no default path uses it
pytestmark = pytest.mark.slow

FOLDER = "tests/passes/lower/experimental"
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
# model → operator → calls; what is split, and not fused, is in gpt2 alone
KERNELS_OF = {
    ops.rms_norm: ("_rms_norm_kernel",),
    ops.add_rms_norm: ("_rms_norm_kernel",),
    ops.act_and_mul: ("_act_and_mul_kernel",),
    ops.rope_write: ("_rope_write_kernel",),
    ops.write_kv: ("_write_kv_kernel",),
    ops.attend: ("attend_kernel",),
    # beside the library's product, as nothing was measured here
    ops.add_norm_linear: ("_rms_norm_kernel",),
    ops.add_norm_gate_up: ("_rms_norm_kernel", "_act_and_mul_kernel"),
    ops.add_norm_rope_write: ("_rms_norm_kernel", "_rope_write_kernel"),
    ops.add_norm_head: ("_rms_norm_kernel",),
    ops.embed_norm_rope_write: ("_rms_norm_kernel", "_rope_write_kernel"),
    ops.skinny_linear: (),
    # of few pairs of token and expert
    ops.experts: ("experts_gate_up_kernel", "experts_down_kernel", "experts_sum_kernel"),
}
# blocks and their rows, as Runner has them
CACHE = (2 * BLOCKS_A_ROW + 1, BLOCK_SIZE)
PASSES = {"prefill": 0, "tree": 1, "decode": 2}


def lowered(name: str, **options):
    model = build_model(name, **options)
    program, _ = compiled(model)
    Pipeline(cuda_phases(POSITIONS)).run(program)
    return program, model


def wide(inputs):
    """The same pass with a block table so wide that attention splits its keys."""
    return inputs | {"block_table": F.pad(inputs["block_table"], (0, 200))}


def with_weights(exported, program, runner):
    """The exported module with the values that the runner has."""
    module = exported.module()
    values = iter(x for x in runner._values if isinstance(x, torch.Tensor))
    names = program.graph.find_nodes(op="placeholder")
    count = 0
    with torch.no_grad():
        for node in names:
            if node.target in program.weights or node.target in program.constants:
                module.get_parameter(f"w{count}").copy_(next(values))
                count += 1
    return module


# model, pass, whether the block table is wide, whether attention may then split its keys
CASES = [
    ("llama", "prefill", False, False),
    ("llama", "tree", True, True),
    ("llama", "decode", True, True),
    pytest.param("qwen3", "tree", False, False, marks=pytest.mark.slow),
    ("gemma3", "tree", True, True),
    pytest.param("gemma3", "decode", False, False, marks=pytest.mark.slow),
    ("gpt2", "prefill", False, False),
    ("gpt2", "tree", True, True),
    ("mixtral", "tree", False, False),
]


@pytest.mark.parametrize(("name", "kind", "is_wide", "is_split"), CASES)
def test_launches_alone_give_the_oracles_numbers(name, kind, is_wide, is_split, poisoned_memory):
    program, model = lowered(name)
    want, found = Runner(program, model), Runner(program, model)
    passes = [wide(inputs) if is_wide else inputs for inputs in several_passes(VOCAB)]
    for before in passes[: PASSES[kind]]:  # rows that this pass attends to
        want.run(before), found.run(before)
    inputs = passes[PASSES[kind]]
    cache = next(iter(found.caches.values()))
    exported = export_for(program, inputs, cache)
    assert not [n for n in exported.graph.nodes if getattr(n.target, "namespace", "") == "specc"]
    expected = Counter()
    for operator, kernels in KERNELS_OF.items():
        expected.update(kernels * len(program.calls(operator)))
    launched = Counter(kernel_name(node) for node in launches_of(exported))
    assert launched == +expected
    numbers = [x["numbers"] for x in describe(exported) if x["kernel"] == "attend_kernel"]
    assert {found["num_parts"] > 0 for found in numbers} == {is_split}
    module = with_weights(exported, program, found)
    caches = list(found.caches.values())
    logits = module(list(inputs.values()), caches)
    torch.testing.assert_close(logits, want.run(inputs), **TOLERANCE)
    for name_, rows in want.caches.items():
        torch.testing.assert_close(found.caches[name_], rows, **TOLERANCE)


def test_an_operator_without_a_kernel_is_refused():
    program, _ = compiled(build_model("mixtral"))
    Pipeline(tuple(item for item in cuda_phases(POSITIONS) if item[0] != "mixtures")).run(program)
    inputs = several_passes(VOCAB)[2]
    with pytest.raises(UnsupportedGraphError) as error:
        export_for(program, inputs, torch.empty(3, 4))
    assert "grouped_mm" in error.value.found
    assert "--backend cuda" in error.value.do


@pytest.fixture(scope="module")
def compiled_kernels(tmp_path_factory):
    """Of a Llama for a tree, with the kernels that Triton compiles: a process of its own."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(ROOT / FOLDER / "inlined_launches.py"), "llama"]

    def make(directory: Path) -> None:
        result = subprocess.run(command, env=inherited, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-3000:]
        directory.mkdir()
        (directory / "lines").write_text(result.stdout)

    sources = (*COMPILER, FOLDER, "tests/passes/modules.py", "tests/models.py")
    path = keep(tmp_path_factory.mktemp("inlined"), make, sources=sources)
    launches, calls = map(json.loads, (path / "lines").read_text().splitlines()[-2:])
    return launches, calls


@pytest.mark.slow
def test_compiled_kernels_are_launched_alike(compiled_kernels):
    """`wrap_triton` makes the nodes that the tests above run: kernels, grids, tensors, numbers."""
    program, _ = lowered("llama")
    exported = export_for(program, wide(several_passes(VOCAB)[1]), torch.empty(CACHE))
    wanted = json.loads(json.dumps(describe(exported)))
    for launch in wanted:
        # the interpreter's nodes hold these options whether a launch names them or not
        assert launch["numbers"].keys() >= {"num_warps", "num_stages"}
    assert compiled_kernels[0] == wanted


@pytest.mark.slow
def test_inductor_copies_no_cache(compiled_kernels):
    """All launches are in place when Inductor generates code.

    torch takes the block table, and all that leads to an address, for written by what writes to
    the cache: Inductor copies these onto themselves at the end.
    """
    launches, calls = compiled_kernels
    copies = [call for call in calls if len(call) == 3]
    assert [call for call in calls if len(call) < 3] == [[x["kernel"]] for x in launches]
    num_layers = 2
    cache = next(x["tensors"]["k_cache"] for x in launches if x["kernel"] == "attend_kernel")
    assert len([x for x in launches if x["kernel"] == "attend_kernel"]) == num_layers
    assert not [call for call in copies if call[1] == cache[1:]]
    assert all(is_itself for name, _, is_itself in copies if name in ("copy_", "copy"))
