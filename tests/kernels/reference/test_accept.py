"""Oracles of typed trees: against the greedy ones, float64 in Python, and case by case."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from specc.kernels.reference import core as reference
from specc.kernels.reference import sampling
from specc.kernels.reference.accept import accept_reference, draft_children_reference
from specc.kernels.reference.processing import process_reference
from specc.sampling.rows import Rule
from tests.kernels.slow_sampling import noise_of, slow_penalties, values_of, words_of

PADDING = -(1 << 30)


def accept(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    max_depth: int,
    values: Tensor,
    words: Tensor,
    cache_len: Tensor | None = None,
    image: Tensor | None = None,
    q_rows: list[int] | None = None,
    drafts: list[Tensor] | None = None,
    pages: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if cache_len is None:
        cache_len = torch.full(tokens.shape[:1], 7, dtype=torch.int32)
    if pages is None:
        pages = torch.zeros(0, 4).int(), torch.zeros(len(tokens), 0).int()
    rows = None if q_rows is None else torch.tensor(q_rows, dtype=torch.int32)
    return accept_reference(
        logits, tokens, parents, max_depth, image, rows, drafts or [], values, words,
        cache_len, *pages,
    )  # fmt: skip


def random_tree(
    generator: random.Random, batch: int, num_nodes: int, vocab: int
) -> tuple[Tensor, Tensor]:
    """Tokens and parents with dead nodes; siblings may carry equal tokens."""
    parents = torch.full((batch, num_nodes), -1, dtype=torch.int32)
    for row in parents:
        live = [0]
        for node in range(1, num_nodes):
            if generator.random() < 0.9:
                row[node] = generator.choice(live)
                live.append(node)
    tokens = [[generator.randrange(vocab) for _ in range(num_nodes)] for _ in range(batch)]
    return torch.tensor(tokens), parents


@pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.name.lower())
@pytest.mark.parametrize("kind", ["ties", "nan", "distinct"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_temperature_zero_is_the_greedy_operators(rule, kind, dtype):
    """Whatever the rule, filters and draft rows say."""
    generator = random.Random(11)
    logits = (torch.randn(6 * 9, 5) * (1 if kind == "ties" else 100)).round().to(dtype)
    if kind == "nan":
        logits[torch.rand_like(logits.float()) < 0.1] = torch.nan
    tokens, parents = random_tree(generator, 6, 9, 5)
    values = values_of(6, temperature=0.0, top_p=0.3, min_p=0.5)
    words = words_of(rule, 6, top_k=2)
    for depth in (0, 2, 8):
        found = accept(
            logits, tokens, parents, depth, values, words,
            q_rows=[-1, *[0] * 8],
            drafts=[torch.randn(6, 5)],
        )  # fmt: skip
        best = logits.argmax(dim=1).view(6, 9)
        wanted = reference.accept_winners_reference(best, tokens, parents, depth)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    columns, length = torch.arange(9).int(), torch.full((6,), 7, dtype=torch.int32)
    for k in (1, 3, 5):
        children, scores = draft_children_reference(
            logits, k, length, columns, 1, values, words, scored=True
        )
        assert torch.equal(children, reference.tree_expand_reference(logits, k))
        wanted = logits.float().log_softmax(dim=1).gather(1, children)
        assert torch.equal(scores.nan_to_num(), wanted.nan_to_num())


def test_children_of_each_rule():
    """Two sequences, two frontier nodes of depth 2 whose first columns are 5 and 8."""
    vocab, lens = 9, [4, 10]
    logits = torch.randn(4, vocab)
    columns = torch.tensor([5, 8], dtype=torch.int32)
    values = torch.cat([values_of(temperature=0.8, top_p=0.83), values_of(temperature=1.4)])
    for rule in Rule:
        words = torch.cat([words_of(rule, seed=-9), words_of(rule, seed=2**40 + 1, top_k=6)])
        tokens, scores = draft_children_reference(
            logits, 3, torch.tensor(lens).int(), columns, 2, values, words, scored=True
        )
        processed = process_reference(
            logits, values.repeat_interleave(2, 0), words.repeat_interleave(2, 0)
        )
        for row in range(4):
            b, first = row // 2, int(columns[row % 2])
            seed, position = int(words[b, 0]), lens[b] + 3
            ranked = measure = processed[row]
            if rule == Rule.DELTA:
                ranked = measure = logits[row]
            if rule == Rule.COUPLED:
                ranked = measure = ranked + noise_of(seed, position, 0, vocab)
            if rule == Rule.SWOR:
                ranked = ranked + noise_of(seed, position, 1 + 8 * first, vocab)
            wanted = ranked.sort(descending=True, stable=True).indices[:3]
            if rule == Rule.MSS:
                draws = [
                    ranked + noise_of(seed, position, 1 + 8 * (first + child), vocab)
                    for child in range(3)
                ]
                wanted = torch.stack([draw.argmax() for draw in draws])
            assert torch.equal(tokens[row], wanted)
            assert torch.equal(scores[row], measure.log_softmax(0)[wanted])
        empty = draft_children_reference(
            logits, 3, torch.tensor(lens).int(), columns, 2, values, words
        )[1]
        assert empty.shape == (4, 0)


def test_rules_of_one_batch_leave_each_other_alone():
    """What a row gets is what it gets alone, whichever rules are beside it."""
    rules = [*Rule, Rule.COUPLED]
    values = torch.cat([*(values_of(temperature=0.9) for _ in Rule), values_of(temperature=0.0)])
    words = torch.cat([words_of(rule, seed=i) for i, rule in enumerate(rules)])
    logits, lens = torch.randn(len(rules), 9), torch.arange(3, 3 + len(rules)).int()

    def drawn(rows: list[int]) -> list[torch.Tensor]:
        return list(
            draft_children_reference(
                logits[rows], 3, lens[rows], torch.tensor([2]).int(), 1, values[rows], words[rows],
                scored=True,
            )
        )  # fmt: skip

    alone = [drawn([row]) for row in range(len(rules))]
    pairs = [list(pair) for pair in itertools.permutations(range(len(rules)), 2)]
    for rows in [*pairs, list(range(len(rules)))]:
        tokens, scores = drawn(rows)
        assert torch.equal(tokens, torch.cat([alone[row][0] for row in rows]))
        assert torch.equal(scores, torch.cat([alone[row][1] for row in rows]))


def test_tokens_of_probability_zero_come_last_by_id():
    logits = torch.tensor([[0.0, 3.0, 1.0, -2.0, 3.0]])
    for rule in (Rule.COUPLED, Rule.SWOR):
        tokens, scores = draft_children_reference(
            logits, 5, torch.tensor([4]).int(), torch.tensor([1]).int(), 0,
            values_of(), words_of(rule, top_k=2),
            scored=True,
        )  # fmt: skip
        assert sorted(tokens[0, :2].tolist()) == [1, 4]
        assert tokens[0, 2:].tolist() == [0, 2, 3]
        assert scores[0, 2:].tolist() == [-torch.inf] * 3


def test_duplicate_draws_stay():
    """A sure token is drawn every time under MSS."""
    logits = torch.tensor([[0.0, 90.0, 0.0]])
    inputs = (logits, 3, torch.tensor([4]).int(), torch.tensor([1]).int(), 0)
    tokens, _ = draft_children_reference(*inputs, values_of(), words_of(Rule.MSS))
    assert tokens.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.DELTA], ids=["coupled", "delta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_coupled_and_delta_put_out_what_the_target_alone_samples(rule, dtype):
    """At every node of the walk, the token of its position's noise; the tree changes no token."""
    generator, batch, num_nodes, vocab = random.Random(2), 40, 12, 4
    logits = torch.randn(batch * num_nodes, vocab).to(dtype)
    tokens, parents = random_tree(generator, batch, num_nodes, vocab)
    values, words = values_of(batch, temperature=0.7), words_of(rule, batch)
    length = torch.arange(batch, dtype=torch.int32)
    path, accepted, output = accept(logits, tokens, parents, 3, values, words, length)
    assert int(accepted.sum()) > batch / 2
    for b in range(batch):
        count = int(accepted[b])
        rows = logits.view(batch, num_nodes, vocab)[b, path[b, : count + 1].long()]
        wanted = sampling.sample_reference(
            rows,
            values[b, 0].expand(count + 1),
            words[b, 0].expand(count + 1),
            length[b] + 1 + torch.arange(count + 1),
        )
        assert output[b, : count + 1].tolist() == wanted.tolist()
        assert output[b, count + 1 :].tolist() == [-1] * (3 - count)
        last = (parents[b] == path[b, count]) & (tokens[b] == output[b, count])
        assert count == 3 or not last[1:].any()


def slow_walk(
    target: list[list[float]],
    proposals: dict[int, list[tuple[int, int, int, int]]],
    drafts: list[list[float]],
    seed: int,
    length: int,
    without_replacement: bool,
) -> tuple[list[int], list[int]]:
    """MSS or SWOR over Python floats; proposals of a node: (column, child, token, draft row)."""
    node, path, output = 0, [0], []
    while True:
        probs, position = list(target[node]), length + len(path)
        rows = {g: list(q) for g, q in enumerate(drafts)}
        for column, child, token, g in proposals.get(node, []):
            q = [float(t == token) for t in range(len(probs))] if g < 0 else list(rows[g])
            if sum(q) <= 0.0 or q[token] == 0.0:
                continue
            q = [x / sum(q) for x in q]
            if g >= 0 and without_replacement:
                rows[g][token] = 0.0
            number = sampling.uniform_reference(
                torch.tensor(seed), torch.tensor(position), torch.tensor(column)
            )
            if float(number) * q[token] <= probs[token]:
                path.append(child)
                output.append(token)
                break
            probs = [max(p - x, 0.0) for p, x in zip(probs, q, strict=True)]
            probs = [p / sum(probs) for p in probs]
        else:
            noise = noise_of(seed, position, sampling.TOKEN_NOISE, len(probs)).tolist()
            scores = [
                math.log(p) + g if p > 0 else -math.inf for p, g in zip(probs, noise, strict=True)
            ]
            return path, [*output, scores.index(max(scores))]
        node = path[-1]


@pytest.mark.parametrize("rule", [Rule.MSS, Rule.SWOR], ids=["mss", "swor"])
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("has_image", [True, False], ids=["image", "identity"])
def test_tried_proposals_equal_float64(rule, dtype, has_image):
    """Random columns onto a tree with dead nodes: multiplicity, one-hot ones, two draft tensors."""
    generator, batch, num_nodes, vocab = random.Random(5), 60, 8, 5
    num_columns = 15 if has_image else num_nodes
    logits = torch.randn(batch * num_nodes, vocab).to(dtype)
    drafts = [torch.randn(batch * f, vocab).to(dtype) for f in (3, 1)]
    values = values_of(batch, temperature=0.9, top_p=0.93)
    words = words_of(rule, batch, top_k=4)
    tokens, parents = random_tree(generator, batch, num_nodes, vocab)
    q_rows = [-1] + [generator.randrange(-1, 4) for _ in range(num_columns - 1)]
    image = None
    if has_image:
        image = torch.randint(-1, num_nodes, (batch, num_columns), dtype=torch.int32)
    length = torch.arange(batch, dtype=torch.int32) * 5
    path, accepted, output = accept(
        logits, tokens, parents, 7, values, words, length, image, q_rows, drafts
    )  # fmt: skip

    def probabilities(rows: Tensor, per_sequence: int) -> list[list[list[float]]]:
        options = (x.repeat_interleave(per_sequence, 0) for x in (values, words))
        probs = process_reference(rows, *options).softmax(dim=1).double()
        return probs.view(batch, per_sequence, vocab).tolist()

    target, first, second = (
        probabilities(rows, count) for rows, count in ((logits, 8), (drafts[0], 3), (drafts[1], 1))
    )
    columns = torch.arange(num_nodes).expand(batch, -1) if image is None else image
    for b in range(batch):
        proposals: dict[int, list[tuple[int, int, int, int]]] = {}
        for column, node in enumerate(columns[b].tolist()):
            if node > 0 and parents[b, node] >= 0:
                entry = (column, node, int(tokens[b, node]), q_rows[column])
                proposals.setdefault(int(parents[b, node]), []).append(entry)
        wanted_path, wanted = slow_walk(
            target[b],
            proposals,
            [*first[b], *second[b]],
            int(words[b, 0]),
            int(length[b]),
            rule == Rule.SWOR,
        )
        rest = [-1] * (8 - len(wanted_path))
        assert path[b].tolist() == wanted_path + rest
        assert output[b].tolist() == wanted + rest
        assert int(accepted[b]) == len(wanted) - 1
    assert len(accepted.unique()) > 2


def test_each_proposal_of_a_merged_node_takes_its_q_from_the_target():
    """P = 1/4; both drafts propose token 1, and the second one's q leaves nothing of token 0."""
    seeds = 300
    tokens = torch.tensor([[0, 1]] * seeds)
    parents = torch.tensor([[-1, 0]], dtype=torch.int32).expand(seeds, -1)
    logits = torch.zeros(2 * seeds, 4)
    drafts = [torch.tensor([q]).log().repeat(seeds, 1) for q in ((0.1, 0.7, 0.1, 0.1),) * 2]
    drafts[1] = torch.tensor([[0.4, 0.4, 0.1, 0.1]]).log().repeat(seeds, 1)
    values, words = values_of(seeds), words_of(Rule.MSS, seeds)
    counts = {}
    for image in ([0, 1, -1], [0, 1, 1]):
        columns = torch.tensor([image] * seeds, dtype=torch.int32)
        _, accepted, output = accept(
            logits, tokens, parents, 1, values, words, None, columns, [-1, 0, 1], drafts
        )  # fmt: skip
        rest = output[accepted == 0, 0]
        counts[image[2]] = torch.bincount(rest, minlength=4).tolist(), int(accepted.sum())
    # a second try accepts nothing that a first one has rejected
    assert counts[1][1] == counts[-1][1] == pytest.approx(seeds * 0.25 / 0.7, abs=35)
    assert counts[-1][0][1] == counts[1][0][0] == counts[1][0][1] == 0
    assert min(counts[-1][0][i] for i in (0, 2, 3)) > 40
    assert min(counts[1][0][i] for i in (2, 3)) > 70


def test_swor_takes_its_tried_tokens_from_its_own_row_alone():
    """All of q on the first token: the second proposal of the row is dead, another row's is not."""
    tokens = torch.tensor([[0, 1, 2]])
    parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    sure = torch.tensor([[-torch.inf, 0.0, -torch.inf, -torch.inf]])
    image = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    outcomes = {}
    for rule in (Rule.MSS, Rule.SWOR):
        for q_rows in ([-1, 0, 0], [-1, 0, -1]):
            entered = set()
            for seed in range(40):
                path, _, _ = accept(
                    logits, tokens, parents, 1, values_of(), words_of(rule, seed=seed),
                    None, image, q_rows, [sure],
                )  # fmt: skip
                entered.add(int(path[0, 1]))
            outcomes[rule, q_rows[2]] = entered
    # token 1 is never accepted; a proposal of no probability is not tried, a sure one is
    assert outcomes[Rule.MSS, 0] == outcomes[Rule.SWOR, 0] == {-1}
    assert outcomes[Rule.MSS, -1] == outcomes[Rule.SWOR, -1] == {-1, 2}


@pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.name.lower())
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_penalties_count_history_root_and_path(rule, temperature):
    """As if the logits had been penalized before, each node's by the tokens down to it."""
    batch, num_nodes, vocab, generator = 30, 7, 6, random.Random(8)
    logits = torch.randn(batch, num_nodes, vocab)
    tokens, parents = random_tree(generator, batch, num_nodes, vocab)
    drafts = [torch.randn(batch, vocab)]
    q_rows = [-1] + [0] * (num_nodes - 1)
    history = torch.randint(0, vocab, (50, 4), dtype=torch.int32)
    table = torch.randperm(50)[: batch * 1].view(batch, 1).repeat(1, 3).int()
    table[:, 1:] = torch.randint(0, 50, (batch, 2))
    length = torch.randint(0, 13, (batch,), dtype=torch.int32)
    length[:3] = torch.tensor([0, 4, 12])
    options = {"repetition": 1.4, "presence": 0.3, "frequency": 0.7}
    values = values_of(batch, temperature=temperature, **options)
    words = words_of(rule, batch, prompt=3)
    penalized = logits.clone()
    for b in range(batch):
        rows = [int(history[table[b, p // 4], p % 4]) for p in range(int(length[b]))]
        for node in range(num_nodes):
            line, above = [int(tokens[b, node])], int(parents[b, node])
            while above >= 0:
                line.insert(0, int(tokens[b, above]))
                above = int(parents[b, above])
            row = logits[b, node].tolist()
            penalized[b, node] = torch.tensor(slow_penalties(row, rows + line, 3, options))
    shared = (words, length, None, q_rows, drafts)
    found = accept(
        logits.flatten(0, 1), tokens, parents, 6, values, *shared, pages=(history, table)
    )
    plain = values_of(batch, temperature=temperature)
    wanted = accept(penalized.flatten(0, 1), tokens, parents, 6, plain, *shared)
    unpenalized = accept(logits.flatten(0, 1), tokens, parents, 6, plain, *shared)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[2], unpenalized[2])


@pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.name.lower())
def test_padding_rows_read_nothing_and_change_no_other(rule):
    """Their history, table, image and parents may hold anything."""
    logits, drafts = torch.randn(6, 5), [torch.randn(3, 5)]
    tokens, parents = torch.tensor([[0, 1]] * 3), torch.tensor([[-1, 0]] * 3).int()
    length = torch.tensor([3, PADDING, 5], dtype=torch.int32)
    values, words = values_of(3, repetition=1.5), words_of(rule, 3)
    history = torch.randint(0, 5, (2, 4), dtype=torch.int32)
    table = torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    image = torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    inputs = (logits, tokens, parents, 1, values, words, length, image, [-1, 0], drafts)
    wanted = accept(*inputs, pages=(history, table))
    assert [output[1].tolist() for output in wanted] == [[0, -1], 0, [0, -1]]
    table[1], image[1], parents[1], tokens[1] = 1 << 30, 99, 77, 1 << 40
    logits[2:4], drafts[0][1], values[1] = torch.nan, torch.nan, torch.nan
    found = accept(*inputs, pages=(history, table))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    columns = torch.tensor([1], dtype=torch.int32)
    children, _ = draft_children_reference(drafts[0], 2, length, columns, 0, values, words, True)
    assert bool(((children >= 0) & (children < 5)).all())


def test_max_depth_ends_the_walk():
    tokens = torch.tensor([[0, 1, 1, 1]])
    parents = torch.tensor([[-1, 0, 1, 2]], dtype=torch.int32)
    logits = torch.tensor([[-torch.inf, 0.0]]).repeat(4, 1)
    for rule in Rule:
        for depth in range(4):
            path, accepted, output = accept(
                logits, tokens, parents, depth, values_of(), words_of(rule)
            )
            assert path.tolist() == [list(range(depth + 1))]
            assert output.tolist() == [[1] * (depth + 1)]
            assert accepted.tolist() == [depth]
