"""The C++ of `specc::draft_children` and `specc::accept` against the oracles.

Tokens and nodes are compared exactly. Noise is exact to the last bit, and so is all that follows
from it; what goes through exponentials may differ by their last bit (see `sampling_cases`).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.kernels.reference.accept import accept_reference, draft_children_reference
from specc.kernels.reference.sampling import DRAW_NOISE, TOKEN_NOISE, gumbel_reference
from specc.sampling.rows import Rule, Value, Word
from tests.kernels import sampling_cases as cases
from tests.kernels.sampling_cases import INF, int32, options

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def unchanged(args: tuple) -> list[Tensor]:
    flat = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
    return [x.clone() for x in flat if isinstance(x, Tensor)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases.drafts)
def test_draft_children(operators, draft):
    check_draft_children(operators, draft)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, derandomize=True)
@given(cases.drafts)
def test_draft_children_for_long(operators, draft):
    check_draft_children(operators, draft)


def check_draft_children(operators, draft):
    args = draft.make()
    before = unchanged(args)
    tokens, scores = operators.draft_children(*args)
    want_tokens, want_scores = draft_children_reference(*args)
    is_live = (args[2] >= 0).repeat_interleave(draft.frontier)
    assert torch.equal(tokens[is_live], want_tokens[is_live])
    torch.testing.assert_close(scores[is_live], want_scores[is_live], rtol=0, atol=1e-5)
    assert (tokens.dtype, scores.dtype) == (torch.int64, torch.float32)
    assert (tokens.shape, scores.shape) == (want_tokens.shape, want_scores.shape)
    # padding: whatever they are, they are tokens
    assert ((tokens >= 0) & (tokens < draft.vocab)).all()
    assert all(map(torch.equal, unchanged(args), before))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(cases.verified)
def test_accept(operators, case):
    check_accept(operators, case)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, derandomize=True)
@given(cases.verified)
def test_accept_for_long(operators, case):
    check_accept(operators, case)


def check_accept(operators, case):
    args = case.make()
    before = unchanged(args)
    got = operators.accept(*args)
    for one, other in zip(got, accept_reference(*args), strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
    assert all(map(torch.equal, unchanged(args), before))


@pytest.mark.slow
def test_cases_reach_what_they_should():
    """The tests above accept nothing and whole chains, by all rules, and end in residuals."""
    want = {(rule, count) for rule in ("greedy", 0, 1, 2, 3) for count in range(4)}
    seen = set()
    for seed in range(150):
        if seen == want:
            break
        case = cases.Verified(
            seed=seed,
            batch=4,
            vocab=33,
            levels=((1, 2), (1, 2), (1, 1)),
            noise=0.1,
            dtypes=(torch.float32, torch.float32),
            padding=0,
            dead=0.0,
            undrawn=0.2,
            strange=0.0,
            merged=True,
            shared=False,
            missing_levels=0,
        )
        args = case.make()
        _, num_accepted, _ = accept_reference(*args)
        for b in range(4):
            is_sampled = bool(args[7][b, Value.TEMPERATURE] >= 1e-5)
            rule = int(args[8][b, Word.RULE]) if is_sampled else "greedy"
            if args[9][b] >= 0:
                seen.add((rule, int(num_accepted[b])))
    assert seen == want


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    length=st.integers(0, 2**31 - 100),
    depth=st.integers(0, 60),
    column=st.integers(0, 10**6),
    vocab=st.sampled_from(cases.VOCABS),
)
def test_noise_is_exact_to_the_last_bit(operators, seed, length, depth, column, vocab):
    """Logits that cancel the noise leave ties of 0: a bit more or less would change the order."""
    offset = torch.tensor(length + depth + 1)
    for rule, purpose in (
        (Rule.COUPLED, TOKEN_NOISE),
        (Rule.SWOR, DRAW_NOISE + 8 * column),
        (Rule.MSS, DRAW_NOISE + 8 * column),
    ):
        noise = gumbel_reference(torch.tensor(seed), offset, torch.arange(vocab), purpose)
        num_children = 1 if rule == Rule.MSS else vocab
        tokens, _ = operators.draft_children(
            -noise[None],
            num_children,
            int32(length),
            int32(column),
            depth,
            *options(rule, seed=seed),
        )
        assert tokens[0].tolist() == list(range(num_children))
        # and a single unit in the last place wins, wherever it is
        winner = seed % vocab
        raised = -noise
        raised[winner] = torch.nextafter(raised[winner], torch.tensor(INF))
        tokens, _ = operators.draft_children(
            raised[None], 1, int32(length), int32(column), depth, *options(rule, seed=seed)
        )
        assert tokens[0].tolist() == [winner]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    rule=st.sampled_from([Rule.COUPLED, Rule.MSS, Rule.SWOR]),
    temperature=st.floats(0.0078125, 30, width=32),
    vocab=st.sampled_from(cases.VOCABS),
)
def test_s_is_exact_to_the_last_bit(operators, seed, rule, temperature, vocab):
    """What s and noise leave of each other is the rounding of both alone, and that has an order."""
    values, words = options(rule, seed=seed, temperature=temperature)
    purpose = TOKEN_NOISE if rule == Rule.COUPLED else DRAW_NOISE + 8 * 3
    noise = gumbel_reference(torch.tensor(seed), torch.tensor(8), torch.arange(vocab), purpose)
    args = (-noise[None] * values[0, 0], min(vocab, 20), int32(5), int32(3), 2, values, words)
    got, _ = operators.draft_children(*args)
    want, _ = draft_children_reference(*args)
    assert torch.equal(got, want)


# two seconds each, in the oracle; the cases above have both types
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
def test_large_vocabulary(operators, dtype):
    """Every rule with two of the filters, each in a row of its own; some tokens stand out."""
    torch.manual_seed(3)
    filters = (
        {},
        {"top_p": 0.9},
        {"top_k": 50, "top_p": 0.95},
        {"min_p": 0.02, "temperature": 0.3},
    )
    rows = [
        options(rule, seed=9, **filters[(i + j) % 4]) for i, rule in enumerate(Rule) for j in (0, 1)
    ]
    values, words = map(torch.cat, zip(*rows, strict=True))
    logits = 2.5 * torch.randn(len(rows), 128_256)
    logits[:, 50_000:50_040] += 10
    lengths = torch.arange(len(rows), dtype=torch.int32)
    args = (logits.to(dtype), 3, lengths, int32(4), 2, values, words)
    got, _ = operators.draft_children(*args)
    want, _ = draft_children_reference(*args)
    assert torch.equal(got, want)


def kept_tokens(operators, logits: list[float], **changes: float) -> list[int]:
    """Tokens that filters leave, by their scores: SWOR's order, -inf for the others."""
    row = torch.tensor([logits], dtype=torch.float32)
    tokens, scores = operators.draft_children(
        row, len(logits), int32(7), int32(0), 0, *options(Rule.SWOR, **changes), True
    )
    return sorted(tokens[0][scores[0] > -INF].tolist())


LN2 = 0.6931471805599453


@pytest.mark.parametrize(
    ("logits", "changes", "kept"),
    [
        pytest.param([3, 1, 2, 1, 1, 0], {"top_k": 3}, [0, 1, 2, 3, 4], id="ties-of-the-third"),
        pytest.param([3, 1, 2, 1, 1, 0], {"top_k": 2}, [0, 2], id="two"),
        pytest.param([3, 1, 2, 1, 1, 0], {"top_k": 6}, [0, 1, 2, 3, 4, 5], id="all"),
        pytest.param([3, 1, 2, 1, 1, 0], {"top_k": 5}, [0, 1, 2, 3, 4], id="all-but-one"),
        # weights 1, 1/2, 1/4, 1/8, 1/8: prefixes .5, .75, .875 of the sum
        pytest.param([0, -LN2, -2 * LN2, -3 * LN2, -3 * LN2], {"top_p": 0.49}, [0], id="p-1"),
        pytest.param([0, -LN2, -2 * LN2, -3 * LN2, -3 * LN2], {"top_p": 0.51}, [0, 1], id="p-2"),
        pytest.param([0, -LN2, -2 * LN2, -3 * LN2, -3 * LN2], {"top_p": 0.74}, [0, 1], id="p-2b"),
        pytest.param([0, -LN2, -2 * LN2, -3 * LN2, -3 * LN2], {"top_p": 0.76}, [0, 1, 2], id="p-3"),
        pytest.param(
            [0, -LN2, -2 * LN2, -3 * LN2, -3 * LN2], {"top_p": 0.9}, [0, 1, 2, 3, 4], id="p-ties"
        ),
        pytest.param([0, -LN2, -2 * LN2], {"top_p": 0.0}, [0], id="p-0-keeps-the-best"),
        pytest.param([1, 1, 1, 1], {"top_p": 0.01}, [0, 1, 2, 3], id="p-of-equal-ones"),
        pytest.param([0, -LN2, -2 * LN2], {"min_p": 0.51}, [0], id="min-p-1"),
        pytest.param([0, -LN2, -2 * LN2], {"min_p": 0.49}, [0, 1], id="min-p-2"),
        pytest.param([5, 4, 5], {"min_p": 1.0}, [0, 2], id="min-p-is-1"),
        # top_k leaves 1 and 1/2: the best alone is two thirds of these, half of all
        pytest.param(
            [0, -LN2, -2 * LN2, -3 * LN2, -3 * LN2], {"top_k": 2, "top_p": 0.6}, [0], id="k-then-p"
        ),
        # min_p leaves the same two
        pytest.param(
            [0, -LN2, -2 * LN2, -3 * LN2, -3 * LN2], {"min_p": 0.4, "top_p": 0.6}, [0], id="min-p-p"
        ),
        # k counts all tokens, not those that min_p left
        pytest.param([0, -LN2, -2 * LN2, -9], {"min_p": 0.4, "top_k": 3}, [0, 1], id="min-p-k"),
        # the temperature comes first: weights 1, 1/4
        pytest.param([0, -LN2], {"temperature": 0.5, "min_p": 0.3}, [0], id="temperature"),
        pytest.param([-INF, 0, -INF], {"top_k": 2}, [1], id="fewer-than-k"),
    ],
)
def test_filters(operators, logits, changes, kept):
    assert kept_tokens(operators, logits, **changes) == kept
    # as many as make several registers; -inf is none of them
    padded = [-INF] * 100 + logits + [-INF] * 100
    assert kept_tokens(operators, padded, **changes) == [100 + token for token in kept]


def verify(
    operators,
    logits: Tensor,
    values: Tensor,
    words: Tensor,
    tokens: list[int],
    history: list[int],
    length: int,
) -> list[int]:
    """Output of a chain of tokens, all children of one another, under MSS without a draft row."""
    parents = int32([-1, *range(len(tokens) - 1)])
    args = (torch.tensor([tokens]), parents, len(tokens) - 1, None, None, [], values, words)
    blocks = torch.tensor([history], dtype=torch.int32)
    got = operators.accept(logits, *args, int32(length), blocks, int32([0]))
    for one, other in zip(
        got, accept_reference(logits, *args, int32(length), blocks, int32([0])), strict=True
    ):
        assert torch.equal(one, other)
    return got[2][0].tolist()


def test_penalties_count_prompt_and_output_apart(operators):
    """Greedy over logits that penalties alone decide; every token has another history."""
    history, length = [4, 4, 1, 2, 2, 2, 3, 9], 7
    logits = torch.zeros(1, 12)
    for num_prompt, changes, best in (
        # token 3 stands at position 6, the root 5 at 7; all others are free
        (0, {"presence": -1.0}, 1),
        (0, {"frequency": -1.0}, 2),
        (3, {"presence": -1.0}, 2),
        (6, {"presence": -1.0}, 3),
        (7, {"presence": -1.0}, 5),
        (8, {"presence": -1.0}, 0),
        (6, {"presence": 1.0}, 0),
    ):
        values, words = options(temperature=0, num_prompt=num_prompt, **changes)
        assert verify(operators, logits, values, words, [5], history, length) == [best]
    # repetition counts both, divides positive logits and multiplies others
    values, words = options(temperature=0, repetition=2.0, num_prompt=100)
    logits = torch.tensor([[-4.0, -4, -4, -4, -1, -1, -3, -4, -4, -4, -4, -4]])
    # 4 and 5 came and fall to -2, which is still the most: of the two, the lower
    assert verify(operators, logits, values, words, [5], history, length) == [4]
    assert verify(operators, -logits, values, words, [5], history, length) == [0]
    # first repetition, then what is subtracted: 3 / 2 - 1 < 1 < 3 / (2 - 1)
    values, words = options(temperature=0, repetition=2.0, presence=1.0)
    logits = torch.tensor([[1.0, -9, -9, 3, -9, -9]])
    assert verify(operators, logits, values, words, [5], history, length) == [0]


def test_penalties_count_the_path_and_are_forgotten(operators):
    """Each accepted token is counted once; the next sequence begins without them."""
    values, words = options(Rule.DELTA, batch=2, temperature=0, frequency=1.0)
    # 3 is the best until it came 3 times more often than the others
    logits = torch.tensor([[0.0, 0, 0, 2.5]]).repeat(10, 1)
    tokens = torch.tensor([[3, 3, 3, 3, 3]] * 2)
    parents = int32([-1, 0, 1, 2, 3]).expand(2, -1)
    history, table = torch.zeros(1, 4, dtype=torch.int32), int32([0], [0])
    path, count, output = operators.accept(
        logits, tokens, parents, 4, None, None, [], values, words, int32(0, 0), history, table
    )
    assert output.tolist() == [[3, 3, 0, -1, -1]] * 2
    assert count.tolist() == [2, 2]
    assert path.tolist() == [[0, 1, 2, -1, -1]] * 2
