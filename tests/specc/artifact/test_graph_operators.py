"""The list of operators that engines may call: neither more nor less than what they hold."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.artifact.graph_operators import (
    EMITTED,
    KNOWN,
    OF_MODULES,
    PYTHON,
    allow,
    is_known,
    of_specc,
    operator_named,
)
from specc.kernels.ops import OPERATORS
from tests.emitted_operators import RESULTS
from tests.tiers import every


def overload(name: str) -> Any:
    namespace, packet, overload_name = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload_name)


# written by passes that no run of `tests.emitted_operators` has reached so far
BY_PASSES = {
    "aten.bitwise_left_shift.Tensor": "passes/drafters/see_blocks.py",
    "aten.bmm.default": "models whose experts are one stack, left as they are",
    "specc.add_lora.default": "passes/rewrite/add_lora.py",
    "specc.attend_expanded.default": "passes/rewrite/expand_prompts.py",
    "specc.block_conv.default": "passes/drafters/block_head.py",
    "specc.block_mass.default": "passes/rewrite/insert_block_mass.py",
    "specc.bmm_by_token.default": "passes/rewrite/write_heads_by_token.py",
    "specc.embedding_of_blocks.default": "passes/lower/cpu/linear.py",
    "specc.fold_conv.default": "passes/step/fuse_step.py",
    "specc.fold_recurrence.default": "passes/step/fuse_step.py",
    "specc.hadamard.default": "passes/rewrite/quantize_caches.py",
    "specc.invariant_attend.default": "passes/rewrite/fix_row_sums.py",
    "specc.invariant_linear.default": "passes/rewrite/fix_row_sums.py",
    "specc.invariant_linear_q.default": "passes/rewrite/fix_row_sums.py",
    "specc.invariant_experts.default": "passes/rewrite/fix_row_sums.py",
    "specc.norm_rope_write.default": "passes/rewrite/fuse_head_norm.py",
    "specc.rope_write_latent.default": "passes/rewrite/fuse_latent_write.py",
    "specc.route.default": "passes/rewrite/fuse_router.py",
    "specc.tree_conv.default": "passes/rewrite/tree_recurrence.py",
    "specc.tree_expand.default": "passes/drafters/lattice.py",
    "specc.tree_recurrence.default": "passes/rewrite/tree_recurrence.py",
}


def test_engines_hold_exactly_what_is_listed():
    """What the compiler wrote, where it was seen: `python -m tests.emitted_operators`."""
    emitted = {name for name in json.loads(RESULTS.read_text()) if name not in PYTHON}
    assert not emitted & BY_PASSES.keys()
    assert emitted | BY_PASSES.keys() == EMITTED | of_specc()


def test_no_operator_is_listed_twice():
    groups = [EMITTED, *OF_MODULES.values()]
    assert sum(map(len, groups)) == len(KNOWN)


@pytest.mark.parametrize("group", OF_MODULES.values(), ids=OF_MODULES.keys())
def test_what_modules_bring_is_torchs_and_changes_nothing(group):
    for name in group:
        schema = overload(name)._schema
        assert name.startswith("aten.")
        assert not schema.is_mutable
        assert not any(argument.is_out for argument in schema.arguments)


def test_all_names_are_operators():
    for name in KNOWN | of_specc():
        assert str(overload(name)) == name
        assert is_known(overload(name))
        assert operator_named(name) is overload(name)


def test_what_specc_adds_is_its_own():
    with pytest.raises(AssertionError, match="of specc"):
        allow(torch.ops.aten.rand.default)
    assert not {name for name in KNOWN if name.startswith("specc.")}


@pytest.mark.parametrize(
    "name",
    [
        # writes and reads files
        "aten.from_file.default",
        # read and write where indices say, which nothing compares with sizes
        "aten._embedding_bag.default",
        "aten.segment_reduce.default",
        "aten._sparse_coo_tensor_unsafe.default",
        "aten._sparse_csr_tensor_unsafe.default",
        "aten.nll_loss_forward.default",
        "aten._ctc_loss.default",
        "aten._fused_moving_avg_obs_fq_helper.default",
        "aten._make_per_tensor_quantized_tensor.default",
        "aten.set_.source_Storage_storage_offset",
        "aten.resize_.default",
        "aten.as_strided.default",
        "aten.empty.memory_format",
        # keys and values of unequal length
        "aten.scaled_dot_product_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        # shapes that depend on values, and values that the host reads
        "aten.nonzero.default",
        "aten.item.default",
        "aten._local_scalar_dense.default",
        "aten.repeat_interleave.Tensor",
        "aten.bincount.default",
        # what others see, or nobody can repeat
        "aten.rand.default",
        "aten.bernoulli.default",
        "aten._print.default",
        "aten.add_.Tensor",
        "aten.add.out",
        "aten.copy_.default",
        "aten.matmul.out",
        "prims.convert_element_type.default",
        # what ranks and captured steps call around graphs, and what passes replace
        *(f"specc.{name}.default" for name, item in OPERATORS.items() if not item.stored),
    ],
)
def test_what_no_graph_may_call(name):
    assert operator_named(name) is None
    assert not is_known(overload(name))


# shapes that fit each other in part, and numbers at the ends of their ranges
_SHAPES = ((), (0,), (1,), (3,), (4,), (3, 4), (4, 3), (2, 3, 4), (3, 1), (1, 4), (0, 4))
_INTS = (-(2**63), -(2**31), -3, -1, 0, 1, 2, 3, 4, 7, 2**31, 2**62, 2**63 - 1)
_ERRORS = (RuntimeError, IndexError, TypeError, ValueError, OverflowError, MemoryError)
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


def _tensor(rng: random.Random) -> Tensor:
    shape, dtype = rng.choice(_SHAPES), rng.choice(_DTYPES)
    if dtype.is_floating_point:
        value = torch.randn(shape).to(dtype)
        return value * float("nan") if rng.random() < 0.1 else value
    if dtype == torch.bool or rng.random() < 0.5:
        return torch.randint(0, 3, shape).to(dtype)
    limits = torch.iinfo(dtype)
    ends = torch.tensor([limits.min, limits.max, -1, 0, 5], dtype=torch.int64)
    return ends[torch.randint(0, 5, shape)].to(dtype)


def _argument(kind: str, rng: random.Random) -> Any:
    while kind.startswith("Optional["):
        if rng.random() < 0.3:
            return None
        kind = kind[len("Optional[") : -1]
    if kind.startswith("List["):
        return [_argument(kind[len("List[") : -1], rng) for _ in range(rng.choice((0, 1, 2, 3)))]
    return {
        "Tensor": _tensor,
        "int": lambda rng: rng.choice(_INTS if rng.random() < 0.4 else (-1, 0, 1, 2, 3)),
        "number": lambda rng: rng.choice((-1, 0, 1, 2.5, float("nan"), float("inf"), 2**62)),
        "float": lambda rng: rng.choice((-1.0, 0.0, 0.5, float("nan"), float("inf"))),
        "bool": lambda rng: rng.random() < 0.5,
        "str": lambda rng: rng.choice(("none", "tanh", "floor")),
        "ScalarType": lambda rng: rng.choice((torch.float32, torch.int64, torch.bool)),
    }[kind](rng)


def _call_often(names: list[str], calls: int) -> None:
    """Call operators with anything of the right type; errors are as good as results."""
    import resource

    # what takes more is refused before it runs, and fails here
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    torch.set_num_threads(1)
    for name in names:
        rng = random.Random(name)
        function = overload(name)
        known = ("Tensor", "int", "number", "float", "bool", "str", "ScalarType")
        for _ in range(calls):
            arguments = {}
            for argument in function._schema.arguments:
                kind = str(argument.real_type)
                inner = kind.replace("Optional[", "").replace("List[", "").rstrip("]")
                if inner in known:
                    arguments[argument.name] = _argument(kind, rng)
            if name in ("aten.cat.default", "aten.stack.default") and rng.random() < 0.5:
                arguments["tensors"] = [torch.ones(2, 3)] * 3
            with contextlib.suppress(*_ERRORS):
                function(**arguments)


@pytest.mark.parametrize("part", every(8, range(16)), ids="part-{}".format)
def test_no_arguments_end_the_process(part):
    """A call that reads or writes elsewhere ends the process sooner or later; none here does."""
    names = sorted(name for name in KNOWN if name.startswith("aten."))[part::16]
    process = multiprocessing.get_context("fork").Process(target=_call_often, args=(names, 200))
    process.start()
    process.join(300)
    assert process.exitcode == 0, f"one of {', '.join(names)}: {process.exitcode}"
