"""`specc::tree_attention` against loops over Python floats: trees, chunks, windows, sinks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention_loops import (
    BUSHY,
    CHAIN,
    DEAD,
    LAYOUTS,
    NAN,
    ROOT,
    STAR,
    TREES,
    Token,
    World,
    causal_tokens,
    random_parents,
    root_path,
    tree_tokens,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(scope="module")
def attention(implementation):
    return implementation.tree_attention.default


@pytest.mark.parametrize("block_size", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(1, 1), (4, 4), (4, 2), (6, 2), (5, 1)],
    ids=["h1-kv1", "mha4", "gqa4-2", "gqa6-2", "mqa5"],
)
def test_tree_pass_equals_loops(attention, block_size, heads, kv_heads):
    lengths = [0, 5, 17, 16]
    world = World(attention, lengths, block_size=block_size, heads=heads, kv_heads=kv_heads)
    trees = [BUSHY, ROOT, CHAIN, STAR]
    world.call([tree_tokens(t, n) for t, n in zip(trees, lengths, strict=True)])


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17], ids="cache{}".format)
def test_one_sequence(attention, parents, length):
    World(attention, [length], block_size=16).call([tree_tokens(parents, length)])


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("dead_value", [NAN, 777.0], ids=["dead-nan", "dead-finite"])
@pytest.mark.parametrize("block_size", LAYOUTS)
def test_dead_tokens_write_nothing_and_give_zero(attention, block_size, dead_value, causal):
    lengths = [6, 0, 3, 2]
    world = World(attention, lengths, block_size=block_size)
    if causal:
        live = [causal_tokens(n, n + 5) for n in lengths]
    else:
        trees = [BUSHY, CHAIN, STAR, ROOT]
        live = [tree_tokens(t, n) for t, n in zip(trees, lengths, strict=True)]
    full_of_bits = Token(-1, 3, frozenset(range(64)))
    tokens = [live[0] + [DEAD], [DEAD, *live[1], DEAD, full_of_bits], [DEAD] * 3, live[3]]
    world.call(tokens, causal=causal, dead_value=dead_value)


@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e4], ids=["nan", "inf", "stale"])
@pytest.mark.parametrize("block_size", LAYOUTS)
def test_dead_node_between_live_nodes(attention, block_size, poison):
    """Node 2 was cut from the tree: its row is never written, and nobody may read it."""
    world = World(attention, [5, 0], block_size=block_size, poison=poison)
    tokens = [tree_tokens(STAR, 5), tree_tokens(BUSHY, 0)]
    tokens[0][2] = DEAD
    tokens[1][9] = DEAD
    world.call(tokens)


@pytest.mark.parametrize("sink", [0, 1, 4], ids="sink{}".format)
@pytest.mark.parametrize("window", [1, 2, 5, 6, 16, 64], ids="window{}".format)
def test_window_and_sink_of_a_tree(attention, window, sink):
    lengths = [0, 5, 6, 17]
    world = World(attention, lengths)
    trees = [t for t in (ROOT, STAR, BUSHY, CHAIN) if max(map(len, paths_of(t))) <= window]
    trees = [trees[b % len(trees)] for b in range(4)]
    world.call(
        [tree_tokens(t, n) for t, n in zip(trees, lengths, strict=True)], window=window, sink=sink
    )


# of heads whose sinks are beside, far above and far below all scores
SINKS = [0.5, 90.0, -90.0, -2.0]


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("softcap", [0.0, 0.7, 30.0], ids="softcap{}".format)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_sinks_and_softcap(attention, sinks, softcap, dtype, causal):
    """Scores are large beside the softcap, and the scale is far from 1: their order shows."""
    world = World(attention, [0, 5, 17], dim=8, value_dim=6, dtype=dtype)
    if causal:
        tokens = [causal_tokens(n, n + 5) for n in (0, 5, 17)]
    else:
        tokens = [tree_tokens(t, n) for t, n in zip((STAR, BUSHY, CHAIN), (0, 5, 17), strict=True)]
    world.call(tokens, causal=causal, window=16, sink=1, scale=0.3, sinks=sinks, softcap=softcap)


# of heads, and none that is another's
SLOPES = [0.5, 0.25, 0.03125, 0.7]


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rounds_bias", [False, True], ids=["", "rounded"])
@pytest.mark.parametrize("softcap", [0.0, 3.0], ids="softcap{}".format)
def test_slopes(attention, softcap, rounds_bias, dtype, causal):
    """Nodes of a tree stand at the positions of their depths, and not at those of their slots."""
    lengths = (0, 5, 17)
    world = World(attention, list(lengths), dim=8, value_dim=6, dtype=dtype)
    if causal:
        tokens = [causal_tokens(n, n + 5) for n in lengths]
    else:
        trees = zip((STAR, BUSHY, random_parents(20)), lengths, strict=True)
        tokens = [tree_tokens(tree, n) for tree, n in trees]
    options = {"slopes": SLOPES, "rounds_bias": rounds_bias, "softcap": softcap}
    world.call(tokens, causal=causal, window=16, sink=1, scale=0.3, **options)


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("window", [0, 4], ids="window{}".format)
@pytest.mark.parametrize("chunk", [1, 3, 8, 64], ids="chunk{}".format)
def test_chunks(attention, chunk, window, causal):
    """A path that crosses into a new chunk leaves its first nodes and all the prefix behind."""
    lengths = (0, 5, 17)
    world = World(attention, list(lengths), dim=8, value_dim=6)
    if causal:
        tokens = [causal_tokens(n, n + 9) for n in lengths]
    else:
        tokens = [tree_tokens(t, n) for t, n in zip((STAR, BUSHY, CHAIN), lengths, strict=True)]
    world.call(tokens, causal=causal, window=window, sink=2 * bool(window), chunk=chunk)


def test_chunks_of_one_level_of_a_draft(attention):
    """Nodes of levels before are in the cache, and not in the pass."""
    world = World(attention, [5, 9])
    trees = (BUSHY, random_parents(12))
    for nodes in ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9], [10, 11]):
        tokens = [tree_tokens(tree, n, nodes) for tree, n in zip(trees, (5, 9), strict=True)]
        world.call(tokens, chunk=3)


@pytest.mark.parametrize("chunk", [5, 32, 100])
def test_chunks_of_trees_of_several_words(attention, chunk):
    tree = random_parents(150, seed=3)
    chain = list(range(-1, 139))
    world = World(attention, [7, 60], capacity=220)
    world.call([tree_tokens(tree, 7), tree_tokens(chain, 60)], chunk=chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values_that_are_columns_of_keys(attention, dtype):
    """One head of latents, cached once: what writes a value writes what its key has there."""
    lengths = [0, 5, 17]
    sizes = {"kv_heads": 1, "dim": 11, "value_dim": 6, "dtype": dtype}
    world = World(attention, lengths, values_in_keys=True, **sizes)
    world.call([causal_tokens(n, n + 5) for n in lengths], causal=True)
    world.lengths = [n + 5 for n in lengths]
    trees = zip((STAR, BUSHY, CHAIN), world.lengths, strict=True)
    world.call([tree_tokens(tree, n) for tree, n in trees])


def test_rounded_slopes_of_far_keys(attention):
    """From position 256 on bfloat16 does not hold every one."""
    world = World(attention, [700], capacity=720)
    world.call([tree_tokens(BUSHY, 700)], slopes=[0.01, 0.002, 0.0003, 0.005], rounds_bias=True)


def test_slopes_of_one_level_of_a_draft(attention):
    """Nodes of levels before are in the cache, and not in the pass: their positions are known."""
    world = World(attention, [5, 9])
    trees = (BUSHY, random_parents(12))
    for nodes in ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9], [10, 11]):
        tokens = [tree_tokens(tree, n, nodes) for tree, n in zip(trees, (5, 9), strict=True)]
        world.call(tokens, slopes=SLOPES)


def test_slopes_of_trees_of_several_words(attention):
    tree = random_parents(150, seed=3)
    chain = list(range(-1, 139))
    world = World(attention, [7, 60], capacity=220)
    world.call([tree_tokens(tree, 7), tree_tokens(chain, 60)], slopes=SLOPES)


def paths_of(parents: list[int]) -> list[frozenset[int]]:
    return [root_path(parents, node) for node in range(len(parents))]


def test_siblings_of_a_wide_tree_stay_in_the_window(attention):
    """Node 20 lives at slot cache_len + 20, position cache_len + 1: a window of 2 keeps it."""
    parents = [-1] + [0] * 20
    World(attention, [9], capacity=64).call([tree_tokens(parents, 9)], window=2)


@pytest.mark.parametrize("sink", [0, 1, 4], ids="sink{}".format)
@pytest.mark.parametrize("window", [1, 2, 5, 6, 16, 64], ids="window{}".format)
def test_window_and_sink_of_a_prefill_chunk(attention, window, sink):
    lengths = [0, 5, 11]
    world = World(attention, lengths)
    tokens = [causal_tokens(n, n + 9) for n in lengths]
    world.call(tokens, causal=True, window=window, sink=sink)


@pytest.mark.parametrize("block_size", LAYOUTS)
def test_prefill_in_chunks(attention, block_size):
    """Sequences prefill in chunks of their own; each chunk reads the rows of those before it."""
    world = World(attention, [0, 0, 0], block_size=block_size)
    for chunk in ([(0, 5), (0, 1), (0, 0)], [(5, 9), (1, 1), (0, 17)], [(9, 10), (1, 8), (17, 33)]):
        world.lengths = [first for first, _ in chunk]
        world.call([causal_tokens(*span) for span in chunk], causal=True)


def test_causal_does_not_depend_on_cache_len(attention):
    """The catch-up of a draft writes slots cache_len - 1 and cache_len again, without a mask."""
    world = World(attention, [5, 1, 9])
    world.call([causal_tokens(n - 1, n + 1) for n in world.lengths], causal=True)
    world.call([causal_tokens(n - 1, n + 1) for n in world.lengths], causal=True)
    world.lengths = [0, 0, 0]
    world.call([causal_tokens(n, n + 2) for n in (6, 2, 10)], causal=True)


@pytest.mark.parametrize("poison", [NAN, 1e4], ids=["nan", "stale"])
@pytest.mark.parametrize("block_size", LAYOUTS)
def test_draft_levels_read_region_rows_of_earlier_calls(attention, block_size, poison):
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6]
    levels = [[1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]
    lengths = [7, 1, 12]
    world = World(attention, lengths, block_size=block_size, poison=poison)
    world.call([causal_tokens(n - 1, n + 1) for n in lengths], causal=True)
    for level in levels:
        world.call([tree_tokens(parents, n, level) for n in lengths])
    world.lengths = [8, 4, 12]
    chain = tree_tokens(CHAIN, 4)
    world.call([tree_tokens(ROOT, 8), chain[:2], tree_tokens(STAR, 12)])


def test_sequences_at_different_levels_share_a_call(attention):
    world = World(attention, [3, 8, 0])
    world.call([tree_tokens(BUSHY, 3, [0]), [], tree_tokens(CHAIN, 0, [0, 1])])
    world.call(
        [
            tree_tokens(BUSHY, 3, [1, 2, 3]),
            tree_tokens(STAR, 8, [0]),
            tree_tokens(CHAIN, 0, [2, 3]),
        ]
    )
    world.call(
        [
            tree_tokens(BUSHY, 3, [4, 5, 6, 7, 8, 9]),
            tree_tokens(STAR, 8, [1, 2, 3, 4, 5]),
            [],
        ]
    )


def test_second_identical_call_gives_the_same(attention):
    """A level that is fed again overwrites its own rows only."""
    world = World(attention, [6, 2])
    tokens = [tree_tokens(BUSHY, 6), tree_tokens(CHAIN, 2)]
    torch.manual_seed(1)
    first = world.call(tokens)
    torch.manual_seed(1)
    second = world.call(tokens)
    assert torch.equal(first, second)


@pytest.mark.parametrize("block_size", LAYOUTS)
def test_bits_alone_decide_in_the_region(attention, block_size):
    """No node is visible by rule: not the root, which starts the region, and not a parent."""
    lengths = [0, 5, 8]
    seen = [{0}, {1}, {1, 2}, {3}, {0, 2, 4}, {1, 3, 5}]
    tokens = [
        [Token(n + node, n + min(node, 2), frozenset(nodes)) for node, nodes in enumerate(seen)]
        for n in lengths
    ]
    World(attention, lengths, block_size=block_size).call(tokens)


LARGE_TREES = {
    "64-nodes-star": [-1] + [0] * 63,
    "65-nodes-star": [-1] + [0] * 64,
    "65-nodes-chain": list(range(-1, 64)),
    "130-nodes-random": random_parents(130),
    "parent-is-bit-63": [-1] + [0] * 63 + [63] * 4 + [64] * 3,
    "parent-is-bit-127": [-1] + [0] * 127 + [127, 63, 64],
}


@pytest.mark.parametrize("parents", LARGE_TREES.values(), ids=LARGE_TREES.keys())
@pytest.mark.parametrize("block_size", [16, 0], ids=["block16", "dense"])
def test_trees_of_several_words(attention, parents, block_size):
    lengths = [3, 0]
    world = World(
        attention, lengths, capacity=140, block_size=block_size, heads=2, kv_heads=1, dim=2
    )
    world.call([tree_tokens(parents, 3), tree_tokens(CHAIN, 0)])


@pytest.mark.parametrize("num_words", [1, 2, 5], ids="words{}".format)
def test_words_beyond_the_tree_are_zero(attention, num_words):
    World(attention, [3, 4]).call(
        [tree_tokens(BUSHY, 3), tree_tokens(STAR, 4)], num_words=num_words
    )


def test_nodes_beyond_all_words(attention):
    """Rows of a region that no word counts are seen by nobody."""
    tokens = [Token(2 + node, 2 + node, frozenset({min(node, 5)})) for node in range(70)]
    World(attention, [2], capacity=80).call([tokens], num_words=1)


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, -1.0], ids="scale{}".format)
def test_scale(attention, scale):
    World(attention, [9]).call([tree_tokens(BUSHY, 9)], scale=scale)


def test_large_scores_do_not_overflow(attention):
    # the float32 rounding of a score is multiplied by the scale
    World(attention, [9]).call([tree_tokens(BUSHY, 9)], scale=200.0, atol=1e-3)


@st.composite
def batches(draw):
    """Caches and one call: random trees, random subsets of dead tail tokens, random layout."""
    num_sequences = draw(st.integers(1, 3))
    lengths = [draw(st.integers(0, 12)) for _ in range(num_sequences)]
    causal = draw(st.booleans())
    tokens = []
    for length in lengths:
        count = draw(st.integers(0, 9))
        if causal:
            live = causal_tokens(length, length + count)
        elif count:
            parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, count)]
            live = tree_tokens(parents, length, draw(st.permutations(range(count))))
        else:
            live = []
        for _ in range(draw(st.integers(0, 2))):
            live.insert(draw(st.integers(0, len(live))), DEAD)
        tokens.append(live)
    options = {
        "causal": causal,
        "window": draw(st.sampled_from([0, 9, 10, 14])),
        "sink": draw(st.integers(0, 3)),
        "dead_value": draw(st.sampled_from([NAN, 777.0])),
    }
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]))
    layout = {
        "block_size": draw(st.sampled_from([0, 1, 2, 5, 16])),
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": draw(st.integers(1, 5)),
    }
    return lengths, layout, tokens, options


@settings(max_examples=60, deadline=None)
@given(batches())
def test_any_batch_equals_loops(attention, batch):
    lengths, layout, tokens, options = batch
    World(attention, lengths, capacity=24, **layout).call(tokens, **options)
