"""`specc::tree_recurrence` and `specc::fold_recurrence` against a float64 recursion along paths."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.state_passes import NAN, Pass, Tree, chain, random_batch, random_tree
from tests.tiers import every

TOLERANCES = {torch.float32: (2e-5, 2e-6), torch.bfloat16: (2**-8, 1e-5)}


@dataclass(frozen=True)
class Heads:
    """Shapes and kind of a recurrence; `decays_rows` as of KDA."""

    key_heads: int = 2
    heads: int = 4
    key_dim: int = 8
    value_dim: int = 12
    decays_rows: bool = False
    has_beta: bool = True
    dtype: torch.dtype = torch.float32

    def key_head(self, head: int) -> int:
        return head * self.key_heads // self.heads


DELTA = Heads()
KINDS = [
    pytest.param(DELTA, id="delta"),
    pytest.param(replace(DELTA, decays_rows=True), id="kda"),
    pytest.param(Heads(1, 6, 7, 33, has_beta=False), id="mamba2"),
    pytest.param(Heads(3, 3, 5, 64, True, False), id="decay-of-rows-without-beta"),
    pytest.param(Heads(2, 2, 16, 48, dtype=torch.bfloat16), id="bfloat16"),
    pytest.param(Heads(1, 1, 1, 1), id="one-number"),
]


class Inputs:
    """What the nodes of each sequence are, for all operators: q, k, v, g and beta [nodes, …]."""

    def __init__(self, heads: Heads, counts: Sequence[int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.heads = heads
        keys, values = (heads.key_heads, heads.key_dim), (heads.heads, heads.value_dim)
        decays = (heads.heads, heads.key_dim) if heads.decays_rows else (heads.heads,)

        def make(of_node: tuple[int, ...], change: Any) -> list[Tensor]:
            return [change(torch.randn(count, *of_node)) for count in counts]

        def unit(x: Tensor) -> Tensor:
            return torch.nn.functional.normalize(x, dim=-1).to(heads.dtype)

        self.q, self.k = make(keys, unit), make(keys, unit)
        self.v = make(values, lambda x: x.to(heads.dtype))
        # some nodes forget nothing, and some all
        self.g = make(decays, lambda x: -torch.nn.functional.softplus(4 * x) * (x < 1.5))
        self.beta = make((heads.heads,), lambda x: x.sigmoid().to(heads.dtype))
        self.state = torch.randn(len(counts), heads.heads, heads.key_dim, heads.value_dim)

    def of(self, nodes: Sequence[int]) -> Inputs:
        """These nodes of the first sequence, as one of their own."""
        made = copy.copy(self)
        for name in ("q", "k", "v", "g", "beta"):
            setattr(made, name, [getattr(self, name)[0][list(nodes)]])
        return made

    @property
    def parts(self) -> list[list[Tensor]]:
        return [self.k, self.v, self.g, *([self.beta] if self.heads.has_beta else [])]

    @property
    def rows(self) -> list[Tensor]:
        """Replay rows of the nodes of each sequence."""
        return [
            torch.cat([part.flatten(1).float() for part in parts], dim=1)
            for parts in zip(*self.parts, strict=True)
        ]

    def tokens(self, of_pass: Pass) -> list[Tensor | None]:
        """q, k, v, g and beta of a pass, in which rows of other tensors lie beside theirs."""
        made = [of_pass.of_tokens(part) for part in (self.q, *self.parts)]
        spaced = [torch.cat([part, part], dim=1)[:, : part.shape[1]] for part in made]
        return [*spaced, *([] if self.heads.has_beta else [None])]

    def slabs(self, of_pass: Pass) -> tuple[Tensor, Tensor]:
        """States and rows before a pass."""
        state = torch.full((of_pass.num_states, *self.state.shape[1:]), 7.0)
        for b, place in enumerate(of_pass.places):
            state[place] = NAN if of_pass.trees[b].is_begun else self.state[b]
        return state, of_pass.rows_before(self.rows)

    def after(self, b: int, path: Sequence[int], begun: bool) -> tuple[Tensor, Tensor]:
        """Float64 state of a sequence after these nodes, and what the last of them reads."""
        heads = self.heads
        state = torch.zeros_like(self.state[b]).double() if begun else self.state[b].double()
        out = torch.zeros(heads.heads, heads.value_dim).double()
        for node in path:
            for h in range(heads.heads):
                k = self.k[b][node, heads.key_head(h)].double()
                q = self.q[b][node, heads.key_head(h)].double()
                delta = self.v[b][node, h].double()
                state[h] *= self.g[b][node, h].double().exp().reshape(-1, 1)
                if heads.has_beta:
                    delta = self.beta[b][node, h].double() * (delta - k @ state[h])
                state[h] += torch.outer(k, delta)
                out[h] = q @ state[h]
        return state, out


def inputs_of(heads: Heads, trees: Sequence[Tree], seed: int = 0) -> Inputs:
    return Inputs(heads, [len(tree.parents) for tree in trees], seed)


@pytest.fixture(scope="module")
def run(implementation: Any) -> Any:
    def call(of_pass: Pass, inputs: Inputs, state: Tensor, rows: Tensor) -> Tensor:
        where = of_pass.where
        return implementation.tree_recurrence(*inputs.tokens(of_pass), state, rows, *where)

    call.fold = implementation.fold_recurrence  # type: ignore[attr-defined]
    return call


def check(run: Any, of_pass: Pass, heads: Heads, seed: int = 0) -> None:
    """Outputs, states and replay rows of a pass."""
    inputs = inputs_of(heads, of_pass.trees, seed)
    state, rows = inputs.slabs(of_pass)
    expected_rows = of_pass.rows_after(rows, inputs.rows)
    expected_state = state.double()
    out = run(of_pass, inputs, state, rows)
    relative, absolute = TOLERANCES[heads.dtype]
    for i, token in enumerate(of_pass.tokens):
        if token is None:
            assert not out[i].any(), f"dead token {i}"
            continue
        b, node = token
        _, expected = inputs.after(b, of_pass.path_of(b, node), of_pass.trees[b].is_begun)
        torch.testing.assert_close(out[i].double(), expected, rtol=relative, atol=absolute)
    for b, place in enumerate(of_pass.places):
        path = range(of_pass.last_certain(b) + 1)
        expected_state[place], _ = inputs.after(b, path, of_pass.trees[b].is_begun)
    torch.testing.assert_close(state.double(), expected_state, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(rows, expected_rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads", KINDS)
@pytest.mark.parametrize("seed", every(2, range(6)))
def test_batches(run, heads, seed):
    """Prompts, decoding, chains and trees beside each other."""
    check(run, Pass(random_batch(random.Random(seed))), heads, seed)


def test_chains_without_words(run):
    """All nodes before a token are its ancestors."""
    batch = [chain(5, 1, 1), chain(0, 9, 9), chain(7, 5, 1), chain(3, 4, 0), chain(0, 6, 2)]
    check(run, Pass(batch, causal=True), DELTA)


def test_trees_of_several_words(run):
    """Parents in an earlier word than their children."""
    tree = random_tree(random.Random(1), 140, 3)
    assert any(node // 64 - max(parent, 0) // 64 == 2 for node, parent in enumerate(tree.parents))
    check(run, Pass([tree]), Heads(1, 1, 4, 4))


def test_nodes_of_earlier_passes(run):
    """Ancestors that are not in the pass are rows; certain nodes are in the state already."""
    rng = random.Random(3)
    tree = random_tree(rng, 20, 4)
    some = tuple(sorted(rng.sample(range(1, 20), 6)))
    batch = [
        replace(tree, fed=some),
        replace(chain(2, 8, 1), fed=(7,)),
        replace(chain(0, 6, 1), fed=(3, 5, 2)),
        replace(tree, fed=tuple(range(10))),
    ]
    check(run, Pass(batch), DELTA)


def test_tokens_of_a_tree_in_any_order(run):
    rng = random.Random(5)
    order = [0, *rng.sample(range(1, 15), 14)]
    check(run, Pass([replace(random_tree(rng, 15, 3), fed=tuple(order))]), DELTA)


def test_nothing_to_do(run):
    """Of a sequence whose tokens are dead, whatever its place says."""
    batch = [replace(chain(3, 2, 1), fed=(), dead=2), chain(1, 2, 1)]
    of_pass = Pass(batch)
    check(run, of_pass, DELTA)
    inputs = inputs_of(DELTA, batch)
    state, rows = inputs.slabs(of_pass)
    of_pass.states[0] = torch.tensor([-5, -1])
    of_pass.cache_len[0] = -1
    before = state[of_pass.places[0]].clone()
    run(of_pass, inputs, state, rows)
    assert torch.equal(state[of_pass.places[0]], before)


def chunk(run: Any, inputs: Inputs, nodes: Sequence[int], length: int, state: Tensor) -> Tensor:
    """Outputs of nodes that are all certain, after so many tokens; the state's place is 1."""
    of_pass = Pass([chain(length, len(nodes), len(nodes))], places=[1])
    rows = torch.zeros(len(state), 1, inputs.rows[0].shape[1])
    return run(of_pass, inputs.of(nodes), state, rows)[: len(nodes)]


def plain(
    run: Any, inputs: Inputs, nodes: Sequence[int], length: int, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of nodes one after the other, as plain decoding has them, and the state after it."""
    state = state.clone()
    outs = [chunk(run, inputs, [node], length + i, state) for i, node in enumerate(nodes)]
    return torch.cat(outs), state[1]


@pytest.mark.parametrize("heads", KINDS)
def test_nodes_and_folds_have_the_bits_of_plain_decoding(run, heads):
    """Each node as the last of its path; then that path as the accepted one, of any length."""
    tree = random_tree(random.Random(11), 12, 6)
    inputs = inputs_of(heads, [tree])
    of_pass = Pass([tree], places=[1])
    state, rows = inputs.slabs(of_pass)
    before = state.clone()
    out = run(of_pass, inputs, state, rows)
    token_of = {token[1]: i for i, token in enumerate(of_pass.tokens) if token}
    for node in range(12):
        path = tree.path(node)
        outs, expected = plain(run, inputs, path, tree.length, before)
        assert torch.equal(out[token_of[node]], outs[-1]), f"node {node}"
        layers = torch.stack([torch.full_like(state, 3.0), state])
        source = torch.full((1, 12), -1, dtype=torch.int32)
        source[0, : len(path)] = torch.tensor(path) + tree.length
        # a slot after the last one counts for nothing
        source[0, len(path) + 1 :] = tree.length + 1
        run.fold(
            layers, torch.stack([rows.nan_to_num(), rows]), source, of_pass.cache_len,
            of_pass.states, key_heads=heads.key_heads, has_beta=heads.has_beta,
        )  # fmt: skip
        assert torch.equal(layers[1, 1], expected), f"path to node {node}"
        others = [0, *range(2, of_pass.num_states)]
        assert torch.equal(layers[1, others], state[others])


def test_prompts_have_the_bits_of_plain_decoding(run):
    """At once, and in two chunks."""
    inputs = inputs_of(DELTA, [chain(0, 9, 9)])
    nothing = torch.full((3, *inputs.state.shape[1:]), NAN)
    outs, expected = plain(run, inputs, range(9), 0, nothing)
    for cuts in ((0, 9), (0, 4, 9)):
        state = nothing.clone()
        results = [
            chunk(run, inputs, range(first, last), first, state)
            for first, last in itertools.pairwise(cuts)
        ]
        assert torch.equal(torch.cat(results), outs)
        assert torch.equal(state[1], expected)


def test_tiles_have_the_bits_of_the_whole_tree(run):
    tree = random_tree(random.Random(2), 30, 5)
    inputs = inputs_of(DELTA, [tree])
    whole = Pass([tree], places=[1])
    state, rows = inputs.slabs(whole)
    expected_out = run(whole, inputs, state, rows)
    tiled_state, tiled_rows = inputs.slabs(whole)
    results = {}
    for fed in (range(11), range(11, 20), range(20, 30)):
        tile = Pass([replace(tree, fed=tuple(fed))], places=[1])
        out = run(tile, inputs, tiled_state, tiled_rows)
        results |= {token: out[i] for i, token in enumerate(tile.tokens) if token}
    for i, token in enumerate(whole.tokens):
        assert token is None or torch.equal(results[token], expected_out[i])
    assert torch.equal(tiled_state, state)
    assert torch.equal(tiled_rows[1, 1:30], rows[1, 1:30])


def test_folds_of_a_batch(run):
    """Accepted paths of any length; nodes that were certain are not folded again."""
    rng = random.Random(7)
    trees = [random_tree(rng, 9, 4, certain) for certain in (1, 0, 2, 1, 1)]
    inputs = inputs_of(DELTA, trees)
    of_pass = Pass(trees)
    state, _ = inputs.slabs(of_pass)
    rows = torch.full((of_pass.num_states, of_pass.num_rows, inputs.rows[0].shape[1]), NAN)
    source = torch.full((5, 9), -1, dtype=torch.int32)
    expected = state.double()
    for b, tree in enumerate(trees):
        path = tree.path((8, 5, 7, 0, 8)[b])
        rows[of_pass.places[b], : len(tree.parents)] = inputs.rows[b]
        source[b, : len(path)] = torch.tensor(path) + tree.length
        kept = [node for node in path if node >= tree.certain]
        if b < 4:
            expected[of_pass.places[b]], _ = inputs.after(b, kept, begun=False)
    # it commits nothing
    of_pass.cache_len[4] = -1
    run.fold(
        state[None], rows[None], source, of_pass.cache_len, of_pass.states, key_heads=2,
        has_beta=True,
    )  # fmt: skip
    torch.testing.assert_close(state.double(), expected, rtol=2e-5, atol=2e-6)
