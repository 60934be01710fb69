"""Tensors that `specc::tree_attention` takes: their types and layouts, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.attention_loops import (
    BUSHY,
    CANARY,
    CHAIN,
    DEAD,
    LAYOUTS,
    ROOT,
    STAR,
    World,
    causal_tokens,
    root_path,
    to_words,
    tree_tokens,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(scope="module")
def attention(implementation):
    return implementation.tree_attention.default


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("block_size", LAYOUTS)
def test_bfloat16(attention, block_size, causal):
    world = World(attention, [21, 0], block_size=block_size, dtype=torch.bfloat16, dim=16)
    if causal:
        world.call([causal_tokens(n, n + 6) for n in world.lengths], causal=True)
    else:
        world.call([[*tree_tokens(BUSHY, 21), DEAD], tree_tokens(CHAIN, 0)])


def test_softmax_of_bfloat16_runs_in_float32(attention):
    """1000 equal keys: a bfloat16 sum of weights would stop growing at 256."""
    world = World(
        attention, [1000], capacity=1008, block_size=16, dtype=torch.bfloat16, heads=1, kv_heads=1
    )
    world.call([tree_tokens(ROOT, 1000)], scale=0.0)


def test_cache_of_another_dtype(reference_operators):
    """The oracle alone: in C++ a cache has the dtype of its model; it refuses others (below)."""
    attention = reference_operators.tree_attention.default
    world = World(attention, [7, 2], cache_dtype=torch.bfloat16)
    world.call([tree_tokens(BUSHY, 7), tree_tokens(STAR, 2)])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_dtype_of_positions_and_slots(reference_operators, index_dtype):
    """The oracle alone: the C++ takes what the schema says, int64 positions and int32 slots."""
    attention = reference_operators.tree_attention.default
    world = World(attention, [7, 2], position_dtype=index_dtype, slot_dtype=index_dtype)
    world.call([tree_tokens(BUSHY, 7), [*tree_tokens(STAR, 2), DEAD]], window=5, sink=1)
    world.call([causal_tokens(7, 9), [DEAD]], causal=True)


def test_values_of_another_head_size(attention):
    World(attention, [7, 0], dim=6, value_dim=3).call(
        [tree_tokens(BUSHY, 7), tree_tokens(CHAIN, 0)]
    )


def test_caches_are_views_of_a_slab(attention):
    """A layer's cache is `slab[layer, part]`; the other layers keep every byte."""
    world = World(attention, [5, 0])
    slab = torch.full((3, 2, *world.caches[0].shape), CANARY)
    for part in (0, 1):
        slab[1, part] = world.caches[part]
    world.caches = [slab[1, 0], slab[1, 1]]
    world.call([tree_tokens(BUSHY, 5), tree_tokens(CHAIN, 0)])
    assert (slab[[0, 2]] == CANARY).all()


def plain_inputs(causal: bool = False, dtype: torch.dtype = torch.float32) -> tuple:
    """Arguments of a small call without NaN: two sequences of 3 and 2 tokens, 4 and 0 rows."""
    parents = [[-1, 0, 0], [-1, 0]]
    words = [to_words(root_path(tree, node), 1) for tree in parents for node in range(len(tree))]
    return (
        torch.randn(4, 5, 8, dtype=dtype),
        torch.randn(2, 5, 8, dtype=dtype),
        torch.randn(2, 5, 6, dtype=dtype),
        torch.randn(5, 4, 2, 8, dtype=dtype),
        torch.randn(5, 4, 2, 6, dtype=dtype),
        torch.tensor([0, 3, 5], dtype=torch.int32),
        torch.tensor([4, 5, 6, 0, 1] if causal else [4, 5, 5, 0, 1]),
        torch.tensor([4, 5, 6, 0, 1], dtype=torch.int32),
        torch.tensor([4, 0], dtype=torch.int32),
        None if causal else torch.tensor(words),
        torch.tensor([[3, 1], [2, 4]], dtype=torch.int32),
    )


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layout_of_the_output(attention, causal, dtype):
    """[H, Nt, DV] that lies as [Nt, H, DV], from the fake too."""
    args = plain_inputs(causal, dtype)
    with FakeTensorMode() as mode:
        fakes = [None if a is None else mode.from_tensor(a) for a in args]
        fake = attention(*fakes, scale=0.5)
    for out in (fake, attention(*args, scale=0.5)):
        assert (out.shape, out.dtype, out.stride()) == ((4, 5, 6), dtype, (6, 24, 1))


def by_column(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, 0)[::2]


# argument, what becomes of it, what the error says
REFUSED = [
    pytest.param(5, torch.Tensor.long, "q_start is .* int32", id="q_start-i64"),
    pytest.param(6, torch.Tensor.int, "position is .* int64", id="position-i32"),
    pytest.param(7, torch.Tensor.long, "slot is .* int32", id="slot-i64"),
    pytest.param(8, torch.Tensor.long, "cache_len is .* int32", id="cache_len-i64"),
    pytest.param(9, torch.Tensor.int, "ancestors is .* int64", id="ancestors-i32"),
    pytest.param(9, torch.Tensor.float, "ancestors is .* int64", id="ancestors-fp32"),
    pytest.param(10, torch.Tensor.long, "block_table is .* int32", id="block_table-i64"),
    *(
        pytest.param(i, torch.Tensor.bfloat16, "one dtype", id=f"{name}-bf16")
        for i, name in enumerate(["q", "k", "v", "k_cache", "v_cache"])
    ),
    *(
        pytest.param(i, by_column, "last dimension .* contiguous", id=f"{name}-by-column")
        for i, name in enumerate(["q", "k", "v", "k_cache", "v_cache"])
    ),
    pytest.param(6, every_other, "position is", id="position-strided"),
    pytest.param(7, every_other, "slot is", id="slot-strided"),
    pytest.param(6, lambda x: x[1:], "metadata fits", id="position-short"),
    pytest.param(9, lambda x: x[1:], "a row for each token", id="ancestors-short"),
    pytest.param(10, lambda x: x[1:], "metadata fits", id="block_table-short"),
    pytest.param(0, lambda x: x[1:], "divides that of heads", id="three-heads-on-two"),
    pytest.param(1, lambda x: x[:, 1:], "q, k and v agree", id="k-short"),
    pytest.param(1, lambda x: x[..., 1:], "caches fit", id="k-narrow"),
]


@pytest.mark.parametrize(("index", "change", "message"), REFUSED)
def test_native_refuses_what_it_cannot_read(native_operators, index, change, message):
    args = list(plain_inputs())
    copies = [args[3].clone(), args[4].clone()]
    args[index] = change(args[index])
    with pytest.raises(RuntimeError, match=f"specc: .*{message}"):
        native_operators.tree_attention(*args, scale=0.5)
    for cache, copy in zip(args[3:5], copies, strict=True):
        assert torch.equal(cache.float(), copy.to(cache.dtype).float())


def test_native_refuses_half_precision(native_operators):
    args = [x.half() if i < 5 else x for i, x in enumerate(plain_inputs())]
    with pytest.raises(RuntimeError, match="float32 and bfloat16"):
        native_operators.tree_attention(*args, scale=0.5)


def test_no_tokens(attention):
    args = list(plain_inputs())
    args[:3] = [tensor[:, :0] for tensor in args[:3]]
    args[5] = torch.zeros(3, dtype=torch.int32)
    args[6:8] = [tensor[:0] for tensor in args[6:8]]
    args[9] = args[9][:0]
    caches = [args[3].clone(), args[4].clone()]
    assert attention(*args, scale=0.5).shape == (4, 0, 6)
    assert torch.equal(args[3], caches[0])
    assert torch.equal(args[4], caches[1])
