"""`specc::tree_conv` and `specc::fold_conv` against sums over the last inputs of each path."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.state_passes import NAN, Pass, Tree, chain, random_batch, random_tree
from tests.tiers import every

TOLERANCES = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (2**-8, 1e-6)}
# channels, width, type, whether there is a bias, activation
KINDS = [
    pytest.param((16, 4, torch.float32, False, "silu"), id="delta-net"),
    pytest.param((40, 3, torch.bfloat16, True, ""), id="lfm2"),
    pytest.param((5, 2, torch.float32, True, "silu"), id="two-inputs"),
    pytest.param((300, 4, torch.float32, True, ""), id="two-pieces"),
    pytest.param((7, 1, torch.float32, False, ""), id="itself-alone"),
    pytest.param((3, 9, torch.bfloat16, False, "silu"), id="nine-inputs"),
]
Kind = tuple[int, int, torch.dtype, bool, str]
PLAIN: Kind = (20, 4, torch.float32, True, "silu")


class Inputs:
    """What a convolution is, and the inputs of each sequence: `before` [K - 1, C], x [nodes, C]."""

    def __init__(self, kind: Kind, trees: Sequence[Tree], seed: int = 0) -> None:
        torch.manual_seed(seed)
        channels, width, dtype, has_bias, self.activation = kind
        self.width = width
        self.weight = torch.randn(channels, width).to(dtype)
        self.bias = torch.randn(channels).to(dtype) if has_bias else None
        self.before = [torch.randn(width - 1, channels).to(dtype) for _ in trees]
        self.x = [torch.randn(len(tree.parents), channels).to(dtype) for tree in trees]

    def slabs(self, of_pass: Pass) -> tuple[Tensor, Tensor]:
        state = torch.full((of_pass.num_states, *self.before[0].shape), 7.0)
        for b, place in enumerate(of_pass.places):
            state[place] = NAN if of_pass.trees[b].is_begun else self.before[b]
        return state.to(self.weight.dtype), of_pass.rows_before(self.x)

    def seen(self, b: int, path: Sequence[int], begun: bool) -> Tensor:
        """All inputs of a path [n, C], those before it first, which are 0 where nothing was."""
        before = torch.zeros_like(self.before[b]) if begun else self.before[b]
        return torch.cat([before, self.x[b][list(path)]])

    def after(self, b: int, path: Sequence[int], begun: bool) -> Tensor:
        """Float64 output of the last node of a path."""
        window = self.seen(b, path, begun)[-self.width :].double()
        out = torch.stack(
            [(window[:, c] * self.weight[c].double()).sum() for c in range(len(self.weight))]
        )
        out = out if self.bias is None else out + self.bias.double()
        return out * out.sigmoid() if self.activation else out


@pytest.fixture(scope="module")
def run(implementation: Any) -> Any:
    def call(of_pass: Pass, inputs: Inputs, state: Tensor, rows: Tensor) -> Tensor:
        x = of_pass.of_tokens(inputs.x)
        # rows of another tensor lie beside them
        x = torch.cat([x, x], dim=1)[:, : x.shape[1]]
        return implementation.tree_conv(
            x, inputs.weight, inputs.bias, state, rows, *of_pass.where,
            activation=inputs.activation,
        )  # fmt: skip

    call.fold = implementation.fold_conv  # type: ignore[attr-defined]
    return call


def check(run: Any, of_pass: Pass, kind: Kind, seed: int = 0) -> None:
    """Outputs, states and replay rows of a pass."""
    inputs = Inputs(kind, of_pass.trees, seed)
    state, rows = inputs.slabs(of_pass)
    expected_rows, expected_state = of_pass.rows_after(rows, inputs.x), state.clone()
    out = run(of_pass, inputs, state, rows)
    relative, absolute = TOLERANCES[kind[2]]
    for i, token in enumerate(of_pass.tokens):
        if token is None:
            assert not out[i].any(), f"dead token {i}"
            continue
        b, node = token
        expected = inputs.after(b, of_pass.path_of(b, node), of_pass.trees[b].is_begun)
        torch.testing.assert_close(out[i].double(), expected, rtol=relative, atol=absolute)
    for b, place in enumerate(of_pass.places):
        path = range(of_pass.last_certain(b) + 1)
        seen = inputs.seen(b, path, of_pass.trees[b].is_begun)
        expected_state[place] = seen[len(seen) - inputs.width + 1 :]
    assert torch.equal(state, expected_state)
    torch.testing.assert_close(rows, expected_rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", every(2, range(6)))
def test_batches(run, kind, seed):
    """Prompts, decoding, chains and trees beside each other."""
    check(run, Pass(random_batch(random.Random(seed))), kind, seed)


def test_chains_without_words(run):
    """All nodes before a token are its ancestors."""
    batch = [chain(5, 1, 1), chain(0, 9, 9), chain(7, 5, 1), chain(3, 4, 0), chain(0, 6, 2)]
    check(run, Pass(batch, causal=True), PLAIN)


def test_nodes_of_earlier_passes(run):
    """Ancestors that are not in the pass are rows; certain nodes are in the state already."""
    rng = random.Random(3)
    tree = random_tree(rng, 20, 4)
    some = tuple(sorted(rng.sample(range(1, 20), 6)))
    batch = [
        replace(tree, fed=some),
        replace(chain(2, 8, 1), fed=(7,)),
        replace(chain(0, 6, 1), fed=(3, 5, 2)),
    ]
    check(run, Pass(batch), PLAIN)


def test_nothing_to_do(run):
    """Of a sequence whose tokens are dead, whatever its place says."""
    batch = [replace(chain(3, 2, 1), fed=(), dead=2), chain(1, 2, 1)]
    of_pass = Pass(batch)
    inputs = Inputs(PLAIN, batch)
    state, rows = inputs.slabs(of_pass)
    of_pass.states[0] = torch.tensor([-5, -1])
    of_pass.cache_len[0] = -1
    before = state[of_pass.places[0]].clone()
    run(of_pass, inputs, state, rows)
    assert torch.equal(state[of_pass.places[0]], before)


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_and_folds_have_the_bits_of_plain_decoding(run, kind):
    """Each node as the last of its path; then that path as the accepted one, of any length."""
    tree = random_tree(random.Random(11), 12, 6)
    inputs = Inputs(kind, [tree])
    of_pass = Pass([tree], places=[1])
    state, rows = inputs.slabs(of_pass)
    before = state.clone()
    out = run(of_pass, inputs, state, rows)
    token_of = {token[1]: i for i, token in enumerate(of_pass.tokens) if token}
    for node in range(12):
        path, expected = tree.path(node), before.clone()
        for i, each in enumerate(path):
            one = Inputs(kind, [tree])
            one.x = [inputs.x[0][[each]]]
            last = run(Pass([chain(6 + i, 1, 1)], places=[1]), one, expected, rows.clone())[0]
        assert torch.equal(out[token_of[node]], last), f"node {node}"
        layers = torch.stack([torch.full_like(state, 3.0), state])
        source = torch.full((1, 12), -1, dtype=torch.int32)
        source[0, : len(path)] = torch.tensor(path) + tree.length
        # a slot after the last one counts for nothing
        source[0, len(path) + 1 :] = tree.length + 1
        of_layers = torch.stack([rows.nan_to_num(), rows])
        run.fold(layers, of_layers, source, of_pass.cache_len, of_pass.states)
        assert torch.equal(layers[1], expected), f"path to node {node}"


def test_folds_of_a_batch(run):
    """Accepted paths of any length; nodes that were certain are not folded again."""
    rng = random.Random(7)
    trees = [random_tree(rng, 9, 4, certain) for certain in (1, 0, 2, 1, 1)]
    inputs = Inputs(PLAIN, trees)
    of_pass = Pass(trees)
    state, rows = inputs.slabs(of_pass)
    source, expected = torch.full((5, 9), -1, dtype=torch.int32), state.clone()
    for b, tree in enumerate(trees):
        path = tree.path((8, 5, 7, 0, 8)[b])
        rows[of_pass.places[b], tree.certain : len(tree.parents)] = inputs.x[b][tree.certain :]
        source[b, : len(path)] = torch.tensor(path) + tree.length
        if b < 4:
            seen = inputs.seen(b, [node for node in path if node >= tree.certain], begun=False)
            expected[of_pass.places[b]] = seen[len(seen) - inputs.width + 1 :]
    # it commits nothing
    of_pass.cache_len[4] = -1
    run.fold(state[None], rows[None], source, of_pass.cache_len, of_pass.states)
    assert torch.equal(state, expected)


def test_refuses_another_activation(run):
    inputs = Inputs(PLAIN, [chain(1, 1, 1)])
    inputs.activation = "gelu"
    of_pass = Pass([chain(1, 1, 1)])
    with pytest.raises((RuntimeError, ValueError), match="silu"):
        run(of_pass, inputs, *inputs.slabs(of_pass))
