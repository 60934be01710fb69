"""Rounds, medians, spread, break-even and the comparison of outputs, without a model."""

from __future__ import annotations

import pytest

from specc.bench.rounds import (
    Difference,
    Measurement,
    Spread,
    break_even_length,
    find_differences,
    identity,
    order_of_round,
    run_rounds,
    summarize,
)


def measurement(outputs=((1, 2, 3, 4),), elapsed_s=1.0, prefill_s=0.25, num_steps=3, **more):
    outputs = [list(tokens) for tokens in outputs]
    return Measurement(
        outputs=outputs,
        elapsed_s=elapsed_s,
        first_token_s=prefill_s,
        decode_s=elapsed_s - prefill_s,
        num_decode_tokens=sum(map(len, outputs)) - len(outputs),
        num_steps=num_steps,
        num_request_steps=num_steps,
        **more,
    )


class Fake:
    """Notes when it runs and takes longer each time."""

    plan = None

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.calls = name, log, 0

    def run(self) -> Measurement:
        self.log.append(self.name)
        self.calls += 1
        return measurement(elapsed_s=float(self.calls))


def test_rounds_are_interleaved_and_the_order_rotates():
    log: list[str] = []
    seen: list[tuple[int, int, str]] = []
    contenders = [Fake(name, log) for name in "abc"]
    rounds = run_rounds(contenders, 3, 1, lambda *told: seen.append((*told, "")[:3]))
    assert "".join(log) == "cab" + "abc" + "bca" + "cab"
    # warm-up is not counted: the first counted run of each is its second
    assert [[m.elapsed_s for m in own] for own in rounds.measured] == [[2.0, 3.0, 4.0]] * 3
    assert [m.elapsed_s for m in rounds.of("b")] == [2.0, 3.0, 4.0]
    # what comes next, and at the end nothing
    assert seen == [(done, 12, name) for done, name in enumerate([*"cababcbcacab", ""])]


def test_every_contender_comes_first_as_often_as_last():
    orders = [order_of_round(number, 3) for number in range(3)]
    assert (
        sorted(order[0] for order in orders) == sorted(order[-1] for order in orders) == [0, 1, 2]
    )
    assert all(sorted(order) == [0, 1, 2] for order in orders)


def test_spread():
    assert Spread.of([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0)
    assert Spread.of([1.0, 2.0]).median == 1.5


def test_rates_of_a_measurement():
    m = measurement(elapsed_s=2.0, prefill_s=0.5, num_steps=3)
    assert m.tokens_per_s == 2.0
    assert m.decode_tokens_per_s == 2.0
    assert m.ms_per_step == 500.0
    nothing = measurement(outputs=((1,),), elapsed_s=0.0, prefill_s=0.0, num_steps=0)
    assert (nothing.ms_per_step, nothing.decode_tokens_per_s) == (0.0, 0.0)


def test_break_even():
    assert break_even_length(30.0, 12.0) == 2.5
    assert break_even_length(30.0, 0.0) is None


def test_summary_takes_medians_and_compares_within_rounds():
    # the machine slows down by half in the last round: ratios do not notice
    off = [measurement(elapsed_s=s, prefill_s=0.0) for s in (1.0, 1.0, 2.0)]
    fast = [
        measurement(elapsed_s=s, prefill_s=0.0, num_steps=1, mean_acceptance_length=3.0)
        for s in (0.5, 0.5, 1.0)
    ]
    figures = summarize(fast, off, off)
    assert figures["tokens_per_s"] == 8.0
    assert (figures["tokens_per_s_min"], figures["tokens_per_s_max"]) == (4.0, 8.0)
    assert figures["tokens_per_s_rounds"] == [8.0, 8.0, 4.0]
    assert figures["speedup_over_off"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    # 500 ms for a step that drafts, 333 ms for a plain one
    assert figures["break_even_acceptance_length"] == pytest.approx(1.5)
    # against another system's plain decoding, which takes twice as long
    slow = [measurement(elapsed_s=s, prefill_s=0.0) for s in (2.0, 2.0, 4.0)]
    figures = summarize(fast, off, slow)
    assert figures["break_even_acceptance_length"] == pytest.approx(0.75)
    assert figures["speedup_over_off"]["median"] == 2.0
    plain = summarize(off, off, off)
    assert plain["speedup_over_off"] is None
    assert plain["break_even_acceptance_length"] is None


def test_equal_outputs_are_identical():
    reference = [[1, 2], [3]]
    assert find_differences(reference, [measurement(reference)] * 2) == []
    assert identity([], 2)["identical"] is True


def test_a_mismatch_in_one_round_is_found():
    reference = [[1, 2, 3], [4, 5, 6]]
    good = measurement(reference)
    bad = measurement([[1, 2, 3], [4, 9, 6]])
    differences = find_differences(reference, [good, bad, good])
    assert differences == [Difference(1, 1, 5, 9)]
    result = identity(differences, 2)
    assert (result["identical"], result["identical_prompts"], result["identical_share"]) == (
        False,
        1,
        0.5,
    )


@pytest.mark.parametrize(
    ("got", "want"),
    [
        pytest.param([1, 2], Difference(0, 2, 3, None), id="shorter"),
        pytest.param([1, 2, 3, 4], Difference(0, 3, None, 4), id="longer"),
        pytest.param([], Difference(0, 0, 1, None), id="empty"),
    ],
)
def test_lengths_count(got, want):
    assert find_differences([[1, 2, 3]], [measurement([got])]) == [want]


def test_the_earliest_of_two_differences_is_reported():
    rounds = [measurement([[1, 2, 9]]), measurement([[1, 8, 9]])]
    assert find_differences([[1, 2, 3]], rounds) == [Difference(0, 1, 2, 8)]
