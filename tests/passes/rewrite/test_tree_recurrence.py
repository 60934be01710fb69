"""Convolutions and recurrences over tokens become those over trees, each with its own state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from specc.errors import EngineError, UnsupportedAttentionError, UnsupportedGraphError
from specc.kernels import ops
from specc.passes.facts import recurrences_are_trees
from specc.passes.frontend.read_program import read_program
from specc.passes.pipeline import Pipeline
from specc.passes.program import (
    RUNTIME_INPUTS,
    STATES,
    Program,
    StateLayer,
    bind_args,
    constant_key,
)
from specc.passes.program_json import program_to_json
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from specc.speculation.tree import TokenTree
from tests.passes.modules import TOLERANCE, Tiny, compiled, dense_logits, random_tokens
from tests.state_session import Sessions

TREE = TokenTree((-1, 0, 0, 1, 1))
f32 = torch.float32


class Recurrent(Tiny):
    """After attention, a convolution, and a gated delta rule with two value heads a key head."""

    by_row, has_beta, key_heads = False, True, 2

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(16, 3))
        self.offset = nn.Parameter(torch.randn(16))
        self.gates = nn.Linear(16, 12 if self.by_row else 4)
        self.write = nn.Linear(16, 4)
        self.values = nn.Linear(16, 20)
        self.back = nn.Linear(20, 16)

    def convolved(self, x: Tensor) -> Tensor:
        return ops.dense_conv(x, self.kernel, self.offset, activation="silu")

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.convolved(x)
        q, k, _ = y.view(1, -1, 2, 8).split([3, 3, 2], dim=-1)
        k = k * (k.square().sum(-1, keepdim=True) + 0.1).rsqrt()
        if self.key_heads != 2:
            q, k = (z.repeat(1, 1, 2, 1)[:, :, : self.key_heads] for z in (q, k))
        g = -F.softplus(self.gates(y)) / 4
        g = g.view(1, -1, 4, 3) if self.by_row else g
        beta = self.write(y).sigmoid() if self.has_beta else None
        v = self.values(y).view(1, -1, 4, 5)
        return x + self.back(ops.dense_recurrence(q, k, v, g, beta).flatten(2))


class ByRow(Recurrent):
    by_row = True


class Plain(Recurrent):
    has_beta = False


class Turned(Recurrent):
    def convolved(self, x: Tensor) -> Tensor:
        return ops.dense_conv(x.transpose(1, 2).transpose(-1, 1), self.kernel, None)


class Alone(Recurrent):
    """No attention at all."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        return self.head(self.after(self.embed(input_ids, position_ids), position_ids))


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().eval()


@functools.cache
def made(kind: type[nn.Module]) -> tuple[nn.Module, Program]:
    """For tests that do not change it."""
    model = seeded(kind)
    return model, compiled(model)[0]


def inputs_of(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.find_nodes(op="placeholder")]


def test_states_follow_caches_and_say_what_they_are():
    _, program = made(Recurrent)
    count = len(program.weights) + len(program.constants)
    assert inputs_of(program)[count:] == [
        *RUNTIME_INPUTS, STATES, "k_cache_0", "v_cache_0", "state_0", "rows_0", "state_1", "rows_1",
    ]  # fmt: skip
    assert program.runtime_inputs == (*RUNTIME_INPUTS, STATES)
    assert program.states == {
        "state_0": (0, "state"), "rows_0": (0, "rows"),
        "state_1": (1, "state"), "rows_1": (1, "rows"),
    }  # fmt: skip
    # k, v, g and beta
    columns = 2 * 3 + 4 * 5 + 4 + 4
    assert program.state_layers == [
        StateLayer(program.state_layers[0].name, "conv", (2, 16), 16, f32),
        StateLayer(program.state_layers[1].name, "recurrence", (4, 3, 5), columns, f32, 2, True),
    ]
    shapes = [program.placeholder(name).meta["val"] for name in program.states]
    assert [tuple(map(str, x.shape))[-2:] for x in shapes] == [
        ("2", "16"), (str(shapes[1].shape[1]), "16"), ("3", "5"), (str(shapes[3].shape[1]), "34"),
    ]  # fmt: skip
    assert len({str(size) for x in shapes for size in x.shape if not isinstance(size, int)}) == 2
    states = program.placeholder(STATES).meta["val"]
    assert (states.dtype, states.shape[1]) == (torch.int32, 2)
    assert str(states.shape[0]) == str(program.placeholder("cache_len").meta["val"].shape[0])


@pytest.mark.parametrize(
    ("kind", "columns"), [(ByRow, 6 + 20 + 12 + 4), (Plain, 6 + 20 + 4), (Alone, 34)]
)
def test_other_recurrences(kind, columns):
    _, program = made(kind)
    layer = program.state_layers[1]
    assert (layer.columns, layer.has_beta) == (columns, kind is not Plain)
    assert (len(program.layers), len(program.caches)) == ((0, 0) if kind is Alone else (1, 2))


def test_a_value_that_is_turned_twice_is_read_as_it_was():
    _, program = made(Turned)
    (call,) = program.calls(ops.tree_conv)
    assert call.args[0].target is torch.ops.aten.squeeze.dim
    assert "transpose" not in str(call.args[0].args[0].target)
    assert call.args[2] is None
    assert not call.kwargs


@pytest.mark.parametrize("kind", [Recurrent, ByRow, Plain, Turned, Alone])
def test_every_token_sees_its_path(kind):
    """Prompts in chunks, plain tokens, and a tree of two sequences in one pass, and its commit."""
    model, program = made(kind)
    first, second = random_tokens(9).tolist(), random_tokens(14).tolist()[::-1]
    session = Sessions(program, model, 2)
    found = [session.prompt([first[:4], second[:9]]), session.prompt([first[4:8], second[9:13]])]
    for tokens, parts in zip((first, second), zip(*found, strict=True), strict=True):
        wanted = dense_logits(model, torch.tensor(tokens))[: sum(map(len, parts))]
        torch.testing.assert_close(torch.cat(parts), wanted, **TOLERANCE)
    texts = [first[:8], second[:13]]
    for path in ([0, 2], [0, 1, 4], [0]):
        nodes = torch.randint(0, 13, (2, TREE.num_nodes)).tolist()
        for logits, text, own in zip(session.step(nodes, TREE), texts, nodes, strict=True):
            for node in range(TREE.num_nodes):
                line = [own[x] for x in _path(node)]
                wanted = dense_logits(model, torch.tensor(text + line))[-1]
                torch.testing.assert_close(logits[node], wanted, **TOLERANCE)
        session.commit([path, path[:1]])
        texts = [
            text + [own[x] for x in kept]
            for text, own, kept in zip(texts, nodes, (path, path[:1]), strict=True)
        ]


def test_tiles_and_levels_read_rows_of_earlier_passes():
    """The root is in the first tile alone; a later one must not fold it again."""
    model, program = made(Recurrent)
    nodes = [random_tokens(5).tolist()]
    sessions = [Sessions(program, model) for _ in range(2)]
    for session in sessions:
        session.prompt([random_tokens(6).tolist()])
    whole = sessions[0].step(nodes, TREE)[0]
    tiles = [sessions[1].step(nodes, TREE, part)[0] for part in ([0, 2], [1], [3, 4])]
    torch.testing.assert_close(torch.cat(tiles), whole[[0, 2, 1, 3, 4]], **TOLERANCE)
    for mine, other in zip(*(s.states().values() for s in sessions), strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)


def test_a_step_after_a_tree_is_that_of_plain_decoding():
    """What was rejected leaves no trace: states are those of a sequence without trees."""
    model, program = made(Recurrent)
    tokens = random_tokens(9).tolist()
    tree, plain = Sessions(program, model), Sessions(program, model)
    for session in (tree, plain):
        session.prompt([tokens[:4]])
    tree.step([[tokens[4], 12 - tokens[5], tokens[5], 1, 2]], TREE)
    tree.commit([[0, 2]])
    for token in tokens[4:6]:
        plain.step([[token]], TokenTree((-1,)))
        plain.commit([[0]])
    for mine, other in zip(tree.states().values(), plain.states().values(), strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)


def _path(node: int) -> list[int]:
    found = [node]
    while (parent := TREE.parents[found[0]]) >= 0:
        found.insert(0, parent)
    return found


def other_heads() -> nn.Module:
    return seeded(type("ThreeKeyHeads", (Recurrent,), {"key_heads": 3}))


def test_key_heads_that_do_not_divide_the_value_heads_are_refused():
    with pytest.raises(UnsupportedAttentionError, match="4 value heads and 3 key heads"):
        compiled(other_heads())


def swap(node: fx.Node, name: str, other: fx.Node | None) -> None:
    names = [argument.name for argument in node.target._schema.arguments]
    node.update_arg(names.index(name), other)


def share_a_state(program: Program) -> None:
    """Two convolutions of one layer, one of which has the other's state."""
    (call,) = program.calls(ops.tree_conv)
    with program.graph.inserting_after(call):
        copy = program.graph.node_copy(call)
    call.replace_all_uses_with(copy, lambda user: user is not copy)


def rows_of_another(program: Program) -> None:
    (first,), (second,) = program.calls(ops.tree_conv), program.calls(ops.tree_recurrence)
    rows = bind_args(first)["rows"], bind_args(second)["rows"]
    swap(first, "rows", rows[1])
    swap(second, "rows", rows[0])


def turned_parts(program: Program) -> None:
    (call,) = program.calls(ops.tree_conv)
    state, rows = bind_args(call)["state"], bind_args(call)["rows"]
    swap(call, "state", rows)
    swap(call, "rows", state)


def weights_of_tokens(program: Program) -> None:
    (call,) = program.calls(ops.tree_conv)
    swap(call, "weight", bind_args(call)["x"])


def no_ancestors(program: Program) -> None:
    swap(program.calls(ops.tree_recurrence)[0], "ancestors", None)


def other_slots(program: Program) -> None:
    swap(program.calls(ops.tree_recurrence)[0], "slot", program.placeholder("cache_len"))


def decay_of_none(program: Program) -> None:
    (call,) = program.calls(ops.tree_recurrence)
    swap(call, "g", program.placeholder("states"))


CHANGES = (
    (share_a_state, "another call has its state, too"),
    (rows_of_another, "its state and its rows are not those of one layer"),
    (turned_parts, "its state and its rows are not those of one layer"),
    (weights_of_tokens, "mixes tokens outside attention"),
    (no_ancestors, "its ancestors is another one"),
    (other_slots, "its slot is another one"),
    (decay_of_none, r"states is not \[tokens, …\]"),
)


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[x.__name__ for x, _ in CHANGES])
def test_the_proof_refuses(change: Callable[[Program], None], reason: str):
    program = made(Recurrent)[1].copy("model")
    verify_tokenwise(program, "now")
    change(program)
    with pytest.raises(UnsupportedGraphError, match=reason):
        verify_tokenwise(program, "now")


def test_what_is_left_dense_is_refused():
    """As other mixtures of tokens are."""
    phases = tuple(
        (name, tuple(kind for kind in passes if kind.__name__ != "RewriteTreeRecurrence"))
        for name, passes in Pipeline().phases
    )
    with pytest.raises(UnsupportedGraphError, match=r"dense_conv\S* is not known to keep"):
        compiled(seeded(Recurrent), phases)


@pytest.mark.parametrize("kind", [Recurrent, Alone])
def test_a_stored_program_is_read_back(kind):
    _, program = made(kind)
    data = program_to_json(program)
    entries = {entry["name"]: entry for entry in data["inputs"]}
    assert entries[STATES]["kind"] == "input"
    assert entries["rows_1"] == {
        "name": "rows_1", "kind": "state", "layer": 1, "part": "rows", "dtype": "float32",
        "shape": [34],
    }  # fmt: skip
    assert entries["state_0"]["shape"] == [2, 16]
    constants = {constant_key(name): value for name, value in program.constants.items()}
    keys = [*(weight.key for weight in program.weights.values()), *constants]
    layers = [(layer.name, layer.window) for layer in program.layers]
    names = [layer.name for layer in program.state_layers]
    found = read_program(data, constants, layers, keys, names)
    assert program_to_json(found) == data
    assert (found.states, found.state_layers) == (program.states, program.state_layers)
    assert found.runtime_inputs == program.runtime_inputs
    assert recurrences_are_trees(found)
    verify_tokenwise(found, "now")
    with pytest.raises(EngineError, match="cannot be read: ValueError"):
        read_program(data, constants, layers, keys, names[1:])
