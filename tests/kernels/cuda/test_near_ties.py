"""Near ties are accepted either way, and what is wrong by more than one is not."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from specc.kernels.cuda import row_filters
from specc.kernels.reference.accept import accept_reference, draft_children_reference
from specc.kernels.reference.processing import process_reference
from specc.kernels.reference.sampling import gumbel_reference, uniform_reference
from specc.sampling.rows import Rule, Word
from tests.kernels.cuda import cases_accept, cases_draft_children, near_ties
from tests.kernels.cuda.near_ties import (
    UndecidedError,
    is_permitted_cut,
    permitted_rows,
    permitted_walks,
)
from tests.kernels.cuda.typed_trees import MIXED, Forest, Row, forest, options_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def kept_counts(logits: Tensor, row: Row) -> list[int]:
    values, words, _ = options_of([row], 0)
    return [int((x > -torch.inf).sum()) for x in permitted_rows(logits, values[0], words[0])]


@pytest.mark.parametrize("seed", range(3))
def test_rows_without_a_near_tie_have_the_oracles_cut_alone(seed):
    """Every other cut is wrong, the neighbors by one token, too."""
    rows = [row for row in MIXED if row.temperature > 0]
    logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(seed)) * 2
    values, words, _ = options_of(rows, 0)
    wanted = process_reference(logits, values, words)
    for row, scores in enumerate(wanted):
        (only,) = permitted_rows(logits[row], values[row], words[row])
        assert torch.equal(only, scores)
        order = logits[row].argsort(descending=True)
        num_kept = int((scores > -torch.inf).sum())
        for count in range(max(1, num_kept - 2), min(300, num_kept + 2) + 1):
            kept = torch.zeros(300, dtype=torch.bool)
            kept[order[:count]] = True
            is_permitted = is_permitted_cut(kept, logits[row], values[row], words[row])
            assert is_permitted == (count == num_kept)
        # as many tokens, and not the best
        kept = torch.zeros(300, dtype=torch.bool)
        kept[order[-num_kept:]] = True
        if num_kept < 300:
            assert not is_permitted_cut(kept, logits[row], values[row], words[row])


def floats_around(x: float, count: int) -> Tensor:
    """2 count + 1 neighboring floats below 0, the nearest to x in their middle, descending."""
    bits = torch.tensor([x]).view(torch.int32) + torch.arange(-count, count + 1, dtype=torch.int32)
    return bits.view(torch.float32)


# where the kernels' logarithm and the oracle's exponential differ by a float, and where not
@pytest.mark.parametrize("min_p", [0.3, 0.1, 0.95, 0.4, 1 / 3, 0.99, 0.5, 0.01, 0.9, 1e-5])
def test_min_p_keeps_what_the_logarithm_or_the_exponential_does(min_p, device):
    """Of neighboring floats; every other cut is wrong, by one token, too."""
    row = Row(min_p=min_p)
    logits = torch.cat([torch.zeros(1), floats_around(math.log(min_p), 40)])
    values, words, cache_len = options_of([row], 0)
    wanted = int((process_reference(logits[None], values, words) > -torch.inf).sum())
    stats = row_filters.row_filters(
        *(x.to(device) for x in (logits[None], values, words, cache_len)),
        filtered=tuple(Rule),
        weighed=(),
    )
    found = int((logits >= stats[0, 1].cpu()).sum())
    assert sorted(kept_counts(logits, row)) == sorted({wanted, found})
    assert 1 < min(wanted, found) < max(wanted, found) + 1 < len(logits)
    # one float of the difference; next to 1, where those are fine, two of the weight
    cuts = logits[[found - 1, wanted - 1]].double().exp().float().view(torch.int32)
    assert abs(found - wanted) <= 1 or abs(int(cuts[0] - cuts[1])) <= 2
    for count in range(1, len(logits) + 1):
        kept = torch.arange(len(logits)) < count
        is_permitted = is_permitted_cut(kept, logits, values[0], words[0])
        assert is_permitted == (count in (wanted, found))


@pytest.mark.parametrize(
    ("top_p", "counts"),
    [(0.75, [3, 2]), (0.75 - 4e-6, [3, 2]), (0.75 + 1e-3, [3]), (0.75 - 1e-3, [2])],
)
def test_a_mass_next_to_top_p(top_p, counts):
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert kept_counts(logits, Row(top_p=top_p)) == counts


def test_a_near_tie_of_min_p_changes_what_top_p_is_a_share_of():
    """With the second token, the best is three quarters of what is left; else all of it."""
    # the float that the logarithm of 1/3 keeps, and its exponential does not
    (near,) = [x for x in floats_around(-math.log(3), 3) if x.exp() < 1 / 3][:1]
    logits = torch.tensor([0.0, float(near), -1.6])
    # with the second token it is 0.75 of both, and enough; alone, all
    assert kept_counts(logits, Row(min_p=1 / 3, top_p=0.8)) == [2, 1]
    assert kept_counts(logits, Row(min_p=1 / 3, top_p=0.7)) == [1]
    assert kept_counts(logits, Row(min_p=0.3, top_p=0.8)) == [2]


# probabilities of four tokens, of which top_p = 0.8 keeps the first two or three
SHARES = (0.6, 0.2, 0.12, 0.08)


@pytest.mark.parametrize(
    ("num_kept", "shift", "is_right"),
    [
        (2, 0.0, True), (3, 0.0, True), (2, 9e-6, True), (3, -9e-6, True),
        (2, 2e-5, False), (3, -2e-5, False), (4, 0.0, False), (1, 0.0, False), (3, 0.1, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_gpu", [True, False], ids=["gpu", "cpu"])
def test_scores_are_those_of_the_tokens_that_a_near_tie_leaves(
    num_kept, shift, is_right, is_gpu, monkeypatch
):
    """The child is the same either way; elsewhere than on a GPU one way is right."""
    logits = torch.tensor([SHARES]).log()
    row = Row(Rule.MSS, top_p=0.8, length=7)
    assert kept_counts(logits[0], row) == [3, 2]
    values, words, cache_len = options_of([row], 4)
    (wanted, scores) = draft_children_reference(
        logits, 1, cache_len, torch.tensor([1]), 0, values, words, True
    )  # fmt: skip
    assert wanted.item() == 0
    exact = [math.log(SHARES[0] / sum(SHARES[:count])) for count in range(1, 5)]
    of_oracle = min(range(4), key=lambda i: abs(exact[i] - scores.item())) + 1

    def children(*_: object) -> tuple[Tensor, Tensor]:
        return wanted, torch.tensor([[exact[num_kept - 1] + shift]])

    monkeypatch.setattr(cases_draft_children, "draft_children", children)
    monkeypatch.setattr(cases_draft_children, "logits_of", lambda *_: logits)
    if is_gpu:
        monkeypatch.setattr(near_ties, "INEXACT", ("cpu",))

    def check() -> None:
        cases_draft_children.check_draft_children([row], (1,), 4, 1, torch.float32, CPU)

    if is_right and (is_gpu or num_kept == of_oracle):
        check()
        return
    with pytest.raises(AssertionError, match="row 0: found"):
        check()


def test_top_k_and_greedy_rows_have_no_near_ties():
    logits = torch.tensor([1.0, 1.0 - 1e-7, 1.0 - 2e-7, 0.0])
    assert kept_counts(logits, Row(top_k=2)) == [2]
    assert kept_counts(logits, Row(temperature=0.0, top_p=0.1)) == [4]


def walks_of(inputs: Forest) -> list[tuple]:
    path, _, output = accept_reference(*inputs.arguments())
    return [
        (tuple(one), tuple(other))
        for one, other in zip(path.tolist(), output.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("widths", "options"),
    [
        ((2, 1), {}),
        ((3,), {"kind": "some"}),
        ((2,), {"num_sources": 2, "seed": 1}),
        ((1, 2), {"kind": "given", "seed": 2}),
        ((2, 2), {"kind": "holes", "seed": 3}),
        ((2, 1), {"max_depth": 1}),
        ((6,), {"seed": 4}),
        ((6,), {"seed": 5}),
    ],
    ids=["drawn", "some", "merged", "given", "holes", "cut", "six", "six-more"],
)
def test_walks_without_a_near_tie_are_the_oracles_alone(widths, options):
    inputs = forest(MIXED, widths, 40, torch.float32, **options)
    for b, wanted in enumerate(walks_of(inputs)):
        assert permitted_walks(inputs, b) == {wanted}


def planted(rule: Rule, logits: list[float], draft: list[float], token: int) -> Forest:
    """One proposal below the root, drawn from a draft."""
    inputs = cases_accept.given_tree(
        rule, [0, token], [-1, 0], torch.tensor([logits, logits]), [torch.tensor([draft])],
        [-1, 0], 1,
    )  # fmt: skip
    inputs.logits = inputs.logits.double().float()
    return inputs


@pytest.mark.parametrize("rule", [Rule.MSS, Rule.SWOR])
@pytest.mark.parametrize(
    ("share", "num_walks", "is_entered"),
    [(1 + 1e-7, 2, None), (1 - 1e-7, 2, None), (1 + 1e-3, 1, True), (1 - 1e-3, 1, False)],
)
def test_a_proposal_next_to_its_uniform(rule, share, num_walks, is_entered):
    """P is a share of u · q, which decides, and q is 0.9."""
    inputs = planted(rule, [0.0] * 4, [0.0] * 4, 1)
    offset = torch.tensor(int(inputs.cache_len[0]) + 1)
    uniform = float(uniform_reference(inputs.words[0, Word.SEED], offset, torch.tensor(1)))
    p = 0.9 * uniform * share
    rest = (1 - p) / 3
    target = torch.tensor([rest, p, rest, rest]).double().log()
    inputs.logits = target.float().repeat(2, 1)
    inputs.draft_logits = [torch.tensor([[0.1 / 3, 0.9, 0.1 / 3, 0.1 / 3]]).log()]
    walks = permitted_walks(inputs, 0)
    assert len({path for path, _ in walks}) == num_walks
    assert walks >= set(walks_of(inputs))
    if is_entered is not None:
        assert [path for path, _ in walks] == [(0, 1 if is_entered else -1)]


@pytest.mark.parametrize(("gap", "num_tokens"), [(1e-7, 2), (-1e-7, 2), (1e-3, 1), (-1e-3, 1)])
def test_samples_of_what_is_left_next_to_each_other(gap, num_tokens):
    """The two best of log P + noise differ by a gap."""
    inputs = planted(Rule.MSS, [0.0] * 4, [0.0] * 4, 1)
    # nothing is proposed: P is sampled from
    inputs.parents = torch.full((1, 2), -1, dtype=torch.int32)
    offset = torch.tensor(int(inputs.cache_len[0]) + 1)
    noise = gumbel_reference(inputs.words[0, Word.SEED], offset, torch.arange(4)).double()
    target = -noise
    target[2:] -= 5.0
    target[1] += gap
    inputs.logits = target.float().repeat(2, 1)
    tokens = {output[0] for _, output in permitted_walks(inputs, 0)}
    assert len(tokens) == num_tokens
    assert tokens <= {0, 1}


def test_what_errors_alone_would_decide_is_refused():
    """The target gives a proposal nothing, and everything else as its draft does: to 1e-7."""
    inputs = planted(Rule.MSS, [0.0, -1e-8, 0.0, 0.0], [0.0] * 4, 1)
    wanted = set(walks_of(inputs))
    assert permitted_walks(inputs, 0) == wanted
    uniforms = []

    def one(*args: Tensor) -> Tensor:
        uniforms.append(args)
        return torch.tensor(1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_ties, "uniform_reference", one)
        with pytest.raises(UndecidedError, match="a rejection leaves"):
            permitted_walks(inputs, 0)
    assert uniforms


def test_the_rule_holds_on_a_gpu_alone_and_for_near_ties_alone():
    check = near_ties.check_equal_or_near
    check([1, 2], [1, 2], CPU, lambda row: False)
    check([1, 3], [1, 2], CUDA, lambda row: row == 1)
    with pytest.raises(AssertionError, match="row 1: found 3; needed 2"):
        check([1, 3], [1, 2], CPU, lambda row: True)
    with pytest.raises(AssertionError, match="row 0: found 4; needed 1"):
        check([4, 3], [1, 2], CUDA, lambda row: row == 1)


@pytest.fixture
def inexact(monkeypatch: pytest.MonkeyPatch):
    """Let the interpreter's exp and log err as a GPU's, by up to a relative error, not monotone."""

    def apply(error: float) -> None:
        generator = np.random.default_rng(1)

        def erring(function):
            def method(self, arg: TensorHandle) -> TensorHandle:
                exact = function(arg.data.astype(np.float64))
                noise = 1 + error * generator.uniform(-1, 1, np.shape(exact))
                return TensorHandle((exact * noise).astype(arg.data.dtype), arg.dtype.scalar)

            return method

        monkeypatch.setattr(InterpreterBuilder, "create_exp", erring(np.exp))
        monkeypatch.setattr(InterpreterBuilder, "create_log", erring(np.log))

    return apply


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="errors of the interpreter")
@pytest.mark.parametrize(("error", "is_near"), [(2.0**-22, True), (2e-3, False)])
def test_kernels_on_an_inexact_device_end_in_near_ties_or_are_wrong(
    error, is_near, inexact, monkeypatch
):
    """Tokens in steps of 1 % around both thresholds, some of them ties, and errors of two sizes."""
    rows = [Row(Rule.MSS, top_p=0.5), Row(Rule.MSS, min_p=0.5), Row(top_p=0.3, min_p=0.01)]
    logits = torch.arange(200).float().mul(-0.01).repeat(len(rows), 1)
    # equal weights: the share of each is a tie
    logits[0] = 0.0
    logits[2] -= 0.3
    monkeypatch.setattr(near_ties, "INEXACT", ("cpu",))
    inexact(error)
    if is_near:
        cases_accept.check_filters(rows, logits, CPU)
        return
    with pytest.raises(AssertionError):
        cases_accept.check_filters(rows, logits, CPU)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="errors of the interpreter")
@pytest.mark.parametrize("min_p", [0.5, 0.3, 1.0, 0.01])
def test_the_cut_of_min_p_does_not_depend_on_exp(min_p, inexact):
    """Tokens in steps of 0.2 %, and an exp that errs by more and is not monotone."""
    inexact(5e-3)
    logits = torch.arange(900).float().mul(-2e-3 if min_p > 0.1 else -6e-3)[None]
    num_dropped = cases_accept.check_filters([Row(min_p=min_p)], logits, CPU, weighed=())
    assert 0 < num_dropped < 900
