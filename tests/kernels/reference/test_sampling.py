"""Oracles of sampling and of trees whose shape is data, against vectors, counts and Python."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from specc.kernels.reference import sampling as reference
from specc.speculation.tree import TokenTree
from tests.kernels.cuda.cases_merge import candidate_tree, random_forest
from tests.kernels.cuda.cases_sampling import (
    PHILOX_VECTORS,
    chi_square,
    chi_square_bound,
    draws,
    exact_noise,
)

ROWS = 40_000


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX_VECTORS)
def test_philox_vectors_of_random123(counter, key, words):
    got = reference.philox_reference(
        tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([k]) for k in key)
    )
    assert [int(word) for word in got] == list(words)


def test_noise_of_a_token_takes_its_word_of_its_counter():
    """Of every counter that the first 2048 tokens touch, all four words are used, once."""
    bits = {}
    seed, offset = 0x0123456789ABCDEF, -5
    for counter in range(512):
        words = reference.philox_reference(
            tuple(torch.tensor([c]) for c in (counter, 0, offset & (2**32 - 1), 2**32 - 1)),
            tuple(torch.tensor([k]) for k in (0x89ABCDEF, 0x01234567)),
        )
        for word in range(4):
            token = counter // 128 * 512 + word * 128 + counter % 128
            bits[token] = int(words[word])
    assert sorted(bits) == list(range(2048))
    noise = reference.gumbel_reference(
        torch.tensor(seed), torch.tensor(offset), torch.arange(2048)
    ).double()
    exact = [exact_noise(bits[token]) for token in range(2048)]
    assert (noise - torch.tensor(exact, dtype=torch.float64)).abs().max() < 2e-6


@pytest.mark.parametrize("bits", [0, 1, 2, 255, 2**20, 2**31, 2**32 - 2**9, 2**32 - 1])
def test_extreme_bits_give_finite_exact_noise(monkeypatch, bits):
    """The smallest fractions decide an argmax: their logarithm keeps its relative precision."""
    words = (torch.full((1,), bits),) * 4
    monkeypatch.setattr(reference, "philox_reference", lambda counter, key: words)
    zero = torch.zeros(1, dtype=torch.int64)
    noise = reference.gumbel_reference(zero, zero, zero)
    assert noise.isfinite().all()
    assert float(noise) == pytest.approx(exact_noise(bits), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0], ids="t{}".format)
def test_samples_follow_the_distribution(temperature):
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, float("-inf"), 1.5])
    probs = torch.softmax(logits / temperature, dim=0)
    counts = draws(reference.sample_reference, logits, temperature, ROWS)
    assert counts[6] == 0
    bound = chi_square_bound(6)
    live = probs > 0
    assert chi_square(counts[live], probs[live]) < bound
    # the same counts against a distribution that is a little off
    control = torch.softmax(logits / (temperature * 1.1), dim=0)
    assert chi_square(counts[live], control[live]) > bound


@pytest.mark.slow
def test_samples_of_a_wide_vocabulary_reach_all_words():
    """Tokens of all four words of a counter, and of several counters, are equally likely."""
    vocab = 3000
    counts = draws(reference.sample_reference, torch.zeros(vocab), 1.0, 1000, chunk=500)
    groups = counts[:2560].view(20, 128).sum(1)
    groups = torch.cat([groups, counts[2560:].sum()[None]])
    probs = torch.tensor([128.0] * 20 + [vocab - 2560.0]) / vocab
    assert chi_square(groups, probs) < chi_square_bound(20)


@pytest.mark.parametrize("by", ["offset", "seed"])
def test_samples_of_neighbouring_rows_are_independent(by):
    """Joint counts of rows 2i and 2i + 1, whose offsets or seeds differ by one."""
    vocab = 6
    logits = torch.linspace(-1, 1, vocab).expand(ROWS, vocab)
    running, zero = torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.int64)
    seed, offset = (zero, running) if by == "offset" else (running, zero)
    tokens = reference.sample_reference(logits, torch.ones(ROWS), seed, offset).view(-1, 2)
    counts = torch.bincount(tokens[:, 0] * vocab + tokens[:, 1], minlength=vocab * vocab)
    probs = torch.softmax(logits[0], dim=0)
    assert chi_square(counts, torch.outer(probs, probs).flatten()) < chi_square_bound(35)
    same = reference.sample_reference(logits, torch.ones(ROWS), seed // 2, offset // 2).view(-1, 2)
    assert torch.equal(same[:, 0], same[:, 1])


def test_temperature_zero_is_argmax():
    logits = torch.randint(0, 4, (50, 33)).float()
    logits[3, 5] = float("nan")
    zero = torch.zeros(50)
    integers = torch.arange(50)
    tokens = reference.sample_reference(logits, zero, integers, integers)
    assert torch.equal(tokens, logits.argmax(dim=-1))


def paths(tokens: list[int], parents: list[int], live: list[bool]) -> list[tuple[int, ...]]:
    """Tokens from below the root to each live node, root included as the empty path."""
    found: list[tuple[int, ...] | None] = []
    for node, parent in enumerate(parents):
        above = () if node == 0 else found[parent] if live[node] else None
        found.append(above if node == 0 or above is None else (*above, tokens[node]))
    return [path for path in found if path is not None]


@pytest.mark.parametrize("seed", range(12), ids="seed{}".format)
def test_merged_tree_has_the_union_of_paths(seed):
    generator = random.Random(seed)
    tokens, parents, start = random_forest(generator, 3, [5, 1, 9, 6][: 2 + seed % 3])
    merged, merged_parents, image, count = reference.merge_trees_reference(tokens, parents, start)
    assert merged.shape[1] == 1 + tokens.shape[1] - (len(start) - 1)
    for b in range(3):
        wanted = []
        for first, last in itertools.pairwise(start.tolist()):
            row, above = tokens[b, first:last].tolist(), parents[b, first:last].tolist()
            live = [True]
            for parent in above[1:]:
                live.append(parent >= 0 and live[parent])
            wanted.extend(paths(row, above, live))
        above = merged_parents[b].tolist()
        live = [node == 0 or parent >= 0 for node, parent in enumerate(above)]
        got = paths(merged[b].tolist(), above, live)
        assert sorted(set(wanted)) == sorted(got)
        assert live == sorted(live, reverse=True)
        assert all(parent < node for node, parent in enumerate(above))
        # multiplicity: as many proposals as paths that end there
        assert count[b, : len(got)].tolist() == [wanted.count(path) for path in got]
        assert count[b, len(got) :].sum() == 0
        assert torch.bincount(image[b][image[b] >= 0], minlength=len(above)).equal(count[b])


@pytest.mark.parametrize("kind", ["distinct", "ties", "masked", "nan"])
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 20], ids="n{}".format)
def test_rerank_keeps_the_best_nodes_and_their_parents(num_nodes, kind):
    tokens, parents, scores = candidate_tree(random.Random(5), 4, 20, kind)
    got = reference.rerank_tree_reference(tokens, parents, scores, num_nodes)
    for b in range(4):
        value = [(math.isnan(s), -s if s == s else 0.0) for s in scores[b].tolist()]
        order = sorted(range(1, 20), key=lambda m: (*value[m], m))
        best = sorted([0, *order[: num_nodes - 1]])
        assert got[2][b].tolist() == best
        assert got[0][b].tolist() == [int(tokens[b, m]) for m in best]
        above = [best.index(int(parents[b, m])) if m else -1 for m in best]
        assert got[1][b].tolist() == above


@pytest.mark.parametrize("num_nodes", [1, 5, 64, 65, 130], ids="n{}".format)
def test_ancestor_words_are_those_of_a_static_tree(num_nodes):
    generator = random.Random(num_nodes)
    trees = [
        TokenTree((-1, *(generator.randrange(max(0, n - 3), n) for n in range(1, num_nodes))))
        for _ in range(2)
    ]
    parents = torch.tensor([tree.parents for tree in trees], dtype=torch.int32)
    words, depths = reference.ancestor_words_reference(parents)
    assert torch.equal(words, torch.cat([tree.ancestor_words() for tree in trees]))
    assert depths.tolist() == [depth for tree in trees for depth in tree.depths]


def test_dead_nodes_have_no_ancestors():
    words, depths = reference.ancestor_words_reference(
        torch.tensor([[-1, 0, 1, -1, -1]], dtype=torch.int32)
    )
    assert words.tolist() == [[1], [3], [7], [0], [0]]
    assert depths.tolist() == [0, 1, 2, 0, 0]


def test_outputs_stay_on_the_device_and_in_their_dtypes():
    outputs: tuple[Tensor, ...] = reference.merge_trees_reference(
        torch.zeros(2, 3, dtype=torch.int64),
        torch.tensor([[-1, 0, -1]] * 2, dtype=torch.int32),
        torch.tensor([0, 2, 3], dtype=torch.int32),
    )
    assert [o.dtype for o in outputs] == [torch.int64, torch.int32, torch.int32, torch.int32]
