"""Outside attention each number depends on one token: the proof accepts that, and nothing else."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

from specc.errors import SpeccError, UnsupportedGraphError
from specc.kernels import ops
from specc.passes.program import emit_call
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from tests.passes.modules import Tiny, compiled


def after(function):
    """A `Tiny` whose last hidden state [1, T, 16] goes through function(self, x, positions)."""
    return type(function.__name__, (Tiny,), {"after": function})


def shift_by_padding(self, x, positions):
    return x + F.pad(x, (0, 0, 1, -1))


def scaled_by_length(self, x, positions):
    return x * x.shape[1]


def entry_of_a_table_by_length(self, x, positions):
    return x + torch.arange(1 << 21)[x.shape[1] : x.shape[1] + 1]


def counted_from_the_length(self, x, positions):
    return x + torch.arange(x.shape[1], x.shape[1] + 16)


def table_up_to_the_length(self, x, positions):
    return x + torch.arange(1 << 21)[: x.shape[1], None]


def places(self, x, positions):
    return x + torch.arange(x.shape[1])[None, :, None] * 0.1


def running_places(self, x, positions):
    return x + torch.ones(x.shape[1]).cumsum(0)[:, None]


def distance_to_place(self, x, positions):
    return x + (positions[0] - torch.arange(x.shape[1]))[:, None]


def rows_read_as_columns(self, x, positions):
    return x + x.mT.contiguous().view(1, x.shape[1], 16)


def copies_read_across(self, x, positions):
    return x + torch.cat([x, -x]).view(1, x.shape[1], 2, 16).sum(2)


def neighbors(self, x, positions):
    return x + torch.cat([x, x.flip(-1)], 1).view(1, 2, -1, 16)[:, 1]


def linear_attention(self, x, positions):
    return x @ (x.mT @ x)


def linear_attention_by_einsum(self, x, positions):
    return torch.einsum("btd,bte,btf->btf", x, x, x) + torch.einsum("btd,bsd->btd", x, x)


def outer_product(self, x, positions):
    return x + torch.outer(x[0, :, 0], x[0, :, 1]).amax(1)[None, :, None]


def rows_by_position(self, x, positions):
    return x + x[:, positions[0]]


def rows_by_constant(self, x, positions):
    return x + x[:, torch.tensor([0])]


def columns_by_position(self, x, positions):
    return x + x[..., positions[0] % 16].amax(-1, keepdim=True)


def gathered_rows(self, x, positions):
    return x + x.gather(1, positions[..., None].expand(-1, -1, 16))


def scattered_rows(self, x, positions):
    return x.scatter(1, positions[:, :, None].expand(-1, -1, 16), 0.0)


def first_token(self, x, positions):
    return x + x.select(1, 0)[:, None]


def every_other(self, x, positions):
    return x + x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]]


def sorted_rows(self, x, positions):
    return x + x[:, positions[0].argsort()]


def ranks(self, x, positions):
    return x + positions[0].argsort().argsort()[:, None]


def count_of_zeros(self, x, positions):
    return x * (x > 0).sum()


def norm_of_all(self, x, positions):
    return x / torch.linalg.vector_norm(x)


def batch_norm(self, x, positions):
    return F.batch_norm(x.mT, None, None, training=True).mT


def noise(self, x, positions):
    return x + torch.rand_like(x)


MIXING = [
    shift_by_padding, scaled_by_length, entry_of_a_table_by_length, counted_from_the_length,
    table_up_to_the_length, places, running_places, distance_to_place, rows_read_as_columns,
    copies_read_across, neighbors, linear_attention, linear_attention_by_einsum, outer_product,
    rows_by_position, rows_by_constant, columns_by_position, gathered_rows, scattered_rows,
    first_token, every_other, sorted_rows,
    ranks, count_of_zeros, norm_of_all, batch_norm, noise,
]  # fmt: skip


# those of the test below are refused with a reason that is looked at
REASONS = {
    places: "computes with the places of tokens in the pass",
    scaled_by_length: "aten.mul.Tensor computes with the number of tokens in the pass",
    linear_attention: "aten.matmul.default mixes tokens outside attention",
    outer_product: "is not known to keep tokens apart",
    neighbors: "aten.cat.default mixes tokens outside attention",
}


@pytest.mark.parametrize(
    "function", [x for x in MIXING if x not in REASONS], ids=lambda function: function.__name__
)
def test_mixing_is_refused(function):
    with pytest.raises(SpeccError) as caught:
        compiled(after(function)())
    assert type(caught.value) is UnsupportedGraphError
    assert "after fuse: " in caught.value.found, caught.value.found


@pytest.mark.parametrize(("function", "found"), REASONS.items())
def test_reason_says_what_happens(function, found):
    with pytest.raises(UnsupportedGraphError) as caught:
        compiled(after(function)())
    assert type(caught.value) is UnsupportedGraphError
    assert "after fuse: " in caught.value.found
    assert found in caught.value.found


def reductions(self, x, positions):
    x = x + x.sum(-1, keepdim=True) + x.amax(2, keepdim=True) + x.std(-1, keepdim=True)
    return x + x.norm(dim=-1, keepdim=True) + torch.logsumexp(x, -1, keepdim=True)


def shapes(self, x, positions):
    heads = x.view(1, -1, 4, 4).transpose(1, 2).contiguous().flatten(0, 1).permute(1, 0, 2)
    return x + heads.flatten(1).unflatten(1, (2, 8)).reshape(-1, 16).unsqueeze(0)


def parts(self, x, positions):
    a, b = x.chunk(2, -1)
    c, d, e = x.split([4, 8, 4], -1)
    x = torch.cat([a * b, c, e], -1) + torch.stack(d.unbind(-1), -1).repeat(1, 1, 2)
    return x + F.glu(x, -1).repeat_interleave(2, -1) + F.pad(x[..., 2:], (1, 1))


def own_products(self, x, positions):
    heads = x.view(1, -1, 4, 4)
    return x + (heads @ heads.mT @ self.place.weight[:4, :4]).flatten(2)


def tables(self, x, positions):
    table = torch.arange(64.0)[:, None] * torch.ones(16)
    x = x + table[positions] + F.embedding(positions, self.place.weight)
    return x + table.index_select(0, positions[0])


def choices(self, x, positions):
    places = x.topk(4, -1).indices
    x = x + x.gather(-1, places).sum(-1, keepdim=True) + x.sort(-1).values
    return torch.where(x > 0, x, -x).masked_fill(positions[..., None] == 3, 0.5)


def norms(self, x, positions):
    return F.rms_norm(F.layer_norm(x, [16]), [16]) + F.layer_norm(
        x.view(1, -1, 4, 4), [4, 4]
    ).flatten(2)


def constant_places(self, x, positions):
    x = torch.concat([x[..., torch.tensor([-1, 3, 5] * 5)], x[..., [2]]], -1)
    return x + x.view(1, -1, 4, 4)[:, :, torch.tensor([3, 0, 2, 1])].flatten(2)


def whole_slices(self, x, positions):
    return x[:, 0:][:, : x.shape[1]] + torch.zeros_like(x)


@pytest.mark.parametrize(
    "function",
    [
        reductions,
        shapes,
        parts,
        own_products,
        tables,
        choices,
        norms,
        whole_slices,
        constant_places,
    ],
    ids=lambda function: function.__name__,
)
def test_work_within_a_token_is_accepted(function):
    compiled(after(function)())


@pytest.mark.parametrize(
    ("order", "found"),
    [
        ((1, 0, 2), "its states is another one"),
        ((0, 1, 2), r"permute\w* is not \[tokens, …\]"),
    ],
    ids=["tokens", "heads"],
)
def test_recurrences_mix_tokens_of_their_first_dimension(order, found):
    """Which `tests/passes/rewrite/test_tree_recurrence.py` lets pass with inputs of its own."""
    program, _ = compiled(Tiny())
    (attention,) = program.calls(ops.tree_attention)
    q, k, v, *caches, q_start, _, slot, cache_len, ancestors, table = attention.args[:11]
    graph = program.graph
    with graph.inserting_before(attention):
        q, k, v = (emit_call(graph, torch.ops.aten.permute.default, x, order) for x in (q, k, v))
        g = emit_call(graph, torch.ops.aten.amax.default, v, [-1])
        where = (*caches, q_start, slot, cache_len, ancestors, table)
        emit_call(graph, ops.tree_recurrence, q, k, v, g, None, *where)
    with pytest.raises(UnsupportedGraphError, match=found):
        verify_tokenwise(program, "test")


def test_time_is_linear_in_nodes():
    """A chain of thousands of operators takes seconds of the processor at most."""
    program, _ = compiled(Tiny())
    (output,) = program.graph.find_nodes(op="output")
    node = output.args[0]
    for _ in range(6000):
        with program.graph.inserting_before(output):
            following = program.graph.call_function(torch.ops.aten.neg.default, (node,))
        following.meta["val"] = node.meta["val"]
        node = following
    output.args = (node,)
    start = time.process_time()
    verify_tokenwise(program, "fuse")
    assert time.process_time() - start < 20
