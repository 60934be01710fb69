"""What the C++ of layers that keep states does beyond its oracles: bits, memory, refusals."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernel_flags import kernel_flags
from tests.kernels import test_tree_conv as convs
from tests.kernels.cpu.test_linear import present
from tests.kernels.state_passes import Pass, Tree, chain, random_tree
from tests.kernels.test_tree_recurrence import DELTA, Heads, Inputs, inputs_of
from tests.native_library import load_wrapper

WRAPPER = """
#include "tree_recurrence.cpp"
#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace specc;
// one sequence, whose state has place 0
EXPORT void run(const void* const* p, const int64_t* n) {
  TreeRecurrence a{};
  a.tokens = {n[0], 1, (const int32_t*)p[0], (const int32_t*)p[1], (const int32_t*)p[2],
              (const int64_t*)p[3], n[1], (const int32_t*)p[4], 1, n[2]};
  a.heads = {n[3], n[4], n[5], n[6], n[7] != 0, true};
  const DType f = DType::kFloat32;
  a.q = {p[5], f, n[3] * n[5], n[5]};
  a.k = {p[6], f, n[3] * n[5], n[5]};
  a.v = {p[7], f, n[4] * n[6], n[6]};
  a.g = {p[8], f, n[4] * a.heads.decays(), a.heads.decays()};
  a.beta = {p[9], f, n[4], 1};
  a.state = (float*)p[10];
  a.rows = (float*)p[11];
  a.out_dtype = f;
  a.out = (void*)p[12];
  tree_recurrence(a, 1);
}
"""


pytestmark = pytest.mark.usefixtures("one_thread_afterwards")


def test_threads_change_no_bit(native_operators):
    """One and two threads, of a pass and a fold that are worth both."""
    batch = [chain(0, 20, 20), random_tree(random.Random(1), 15, 3), chain(9, 1, 1)]
    of_pass, results = Pass(batch), []
    inputs = inputs_of(Heads(2, 4, 64, 80), batch)
    path = torch.tensor([[-1] * 2, [3, 4], [-1] * 2]).int()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        state, rows = inputs.slabs(of_pass)
        out = native_operators.tree_recurrence(*inputs.tokens(of_pass), state, rows, *of_pass.where)
        native_operators.fold_recurrence(
            state[None], rows[None], path, of_pass.cache_len, of_pass.states, key_heads=2,
            has_beta=True,
        )  # fmt: skip
        results.append((out, state, rows))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def test_threads_change_no_bit_of_convolutions(native_operators):
    batch = [chain(0, 20, 20), random_tree(random.Random(1), 15, 3), chain(9, 1, 1)]
    of_pass, results = Pass(batch), []
    inputs = convs.Inputs((1200, 4, torch.bfloat16, True, "silu"), batch)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        state, rows = inputs.slabs(of_pass)
        out = native_operators.tree_conv(
            of_pass.of_tokens(inputs.x), inputs.weight, inputs.bias, state, rows, *of_pass.where,
            activation="silu",
        )  # fmt: skip
        results.append((out, state, rows))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("decays_rows", [False, True])
@pytest.mark.parametrize("isa", ["x86-64-v3", "x86-64-v4"])
def test_instruction_sets_change_no_bit(native_operators, tmp_path, isa, decays_rows):
    """A tree after a chunk, as compiled for other machines and for this one."""
    flags = kernel_flags("tree_recurrence.cpp", present(isa))
    library = load_wrapper(tmp_path / "states", WRAPPER, flags)
    heads = Heads(2, 4, 33, 40, decays_rows)
    tree = replace(random_tree(random.Random(4), 20, 7, certain=3), dead=0)
    of_pass = Pass([tree], places=[0])
    inputs = inputs_of(heads, of_pass.trees)
    count = len(of_pass.trees[0].nodes)
    tokens = [x[:count].contiguous() for x in inputs.tokens(of_pass)]
    results = []
    for is_here in (True, False):
        state, rows = inputs.slabs(of_pass)
        out = torch.zeros(count, heads.heads, heads.value_dim)
        if is_here:
            where = (*of_pass.where[:1], of_pass.slot[:count], of_pass.cache_len,
                     of_pass.ancestors[:count], of_pass.states)  # fmt: skip
            out = native_operators.tree_recurrence(*tokens, state, rows, *where)
        else:
            used = (of_pass.q_start, of_pass.slot, of_pass.cache_len, of_pass.ancestors,
                    of_pass.states, *tokens, state, rows, out)  # fmt: skip
            sizes = (count, of_pass.ancestors.shape[1], rows.shape[1], heads.key_heads,
                     heads.heads, heads.key_dim, heads.value_dim, decays_rows)  # fmt: skip
            library.run(
                (ctypes.c_void_p * len(used))(*(x.data_ptr() for x in used)),
                (ctypes.c_int64 * len(sizes))(*sizes),
            )
        results.append((out, state[:1], rows[:1]))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def test_paths_that_are_no_tree(native_operators, reference_operators):
    """A node's words alone say which nodes its state has seen, whatever those of its parent say."""
    of_pass = Pass([Tree(2, tuple(range(-1, 19))), Tree(5, tuple(range(-1, 9)), certain=3)])
    inputs = inputs_of(DELTA, of_pass.trees)
    torch.manual_seed(1)
    of_pass.ancestors = torch.randint(0, 1 << 20, of_pass.ancestors.shape)
    results = []
    for operators in (native_operators, reference_operators):
        state, rows = inputs.slabs(of_pass)
        results.append(
            operators.tree_recurrence(*inputs.tokens(of_pass), state, rows, *of_pass.where)
        )
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-6)


def test_decays_above_one(native_operators):
    """Nothing says that states forget: e^g of any g is what it is."""
    heads = Heads(1, 1, 16, 16, decays_rows=True, has_beta=False)
    inputs = Inputs(heads, [1])
    inputs.g[0][0, 0] = torch.linspace(-80, 80, 16)
    inputs.k[0].zero_()
    of_pass = Pass([chain(1, 1, 1)], places=[0])
    state, rows = inputs.slabs(of_pass)
    before = state[0, 0].double()
    native_operators.tree_recurrence(*inputs.tokens(of_pass), state, rows, *of_pass.where)
    expected = before * inputs.g[0][0, 0].double().exp()[:, None]
    torch.testing.assert_close(state[0, 0].double(), expected, rtol=1e-6, atol=0)


def _set(name: str, place: Any, value: int) -> Any:
    def change(of_pass: Pass) -> None:
        getattr(of_pass, name)[place] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("states", (0, 0), 9), r"states\[0\]\[0\] = 9, needed 0 … 3"),
        (lambda p: _set("states", (1, 0), p.places[0])(p), "that no other sequence has"),
        (_set("states", (0, 1), -1), r"states\[0\]\[1\] = -1, needed 0 or more"),
        (_set("slot", 1, 50), "which is node 47, needed nodes 0 … 5"),
        (_set("slot", 0, 2), "which is node -1, needed certain nodes in order"),
        (_set("slot", 5, 3), "which is node 1, needed certain nodes in order"),
        (_set("cache_len", 0, -3), r"cache_len\[0\] = -3, needed 0 or more"),
        (_set("q_start", 1, 99), r"q_start\[1\] = 99"),
    ],
)
def test_refuses(native_operators, change, message):
    of_pass = Pass([Tree(3, (-1, 0, 0, 1, 1)), chain(2, 3, 3)])
    inputs = inputs_of(DELTA, of_pass.trees)
    state, rows = inputs.slabs(of_pass)
    before = state.clone()
    change(of_pass)
    with pytest.raises(RuntimeError, match=message):
        native_operators.tree_recurrence(*inputs.tokens(of_pass), state, rows, *of_pass.where)
    assert torch.equal(state, before)


def test_a_fold_refuses_rows_that_are_not_there(native_operators):
    of_pass = Pass([chain(3, 5, 1)], places=[1])
    inputs = inputs_of(DELTA, of_pass.trees)
    state, rows = inputs.slabs(of_pass)
    for path in ((3, 4, 9), (3, 5, 4)):
        with pytest.raises(RuntimeError, match="needed nodes that ascend up to 5"):
            native_operators.fold_recurrence(
                state[None], rows[None], torch.tensor([path]).int(), of_pass.cache_len,
                of_pass.states, key_heads=2, has_beta=True,
            )  # fmt: skip
