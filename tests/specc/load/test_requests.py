"""Arrivals, lengths and prompts of loads: their statistics, and that a seed says it all."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise

import pytest

from specc.errors import ConfigError
from specc.load.arrivals import Arrivals, parse_on_off, parse_rates
from specc.load.lengths import LengthDistribution
from specc.load.request import Workload

COUNT = 20_000


def gaps(arrivals: Arrivals, count: int = COUNT, seed: int = 1) -> list[float]:
    return [b - a for a, b in pairwise([0.0, *arrivals.draw(count, seed)])]


def lengths(text: str, count: int = COUNT) -> list[int]:
    distribution = LengthDistribution.parse(text, "--output-tokens")
    dice = random.Random(5)
    return [distribution.draw(dice) for _ in range(count)]


def workload(**options: object) -> Workload:
    given = {"num_requests": 40, "output_tokens": LengthDistribution.parse("uniform:1-9", "")}
    return Workload(**(given | options))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(rate, burstiness):
    found = gaps(Arrivals(rate, burstiness))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / rate, rel=0.05)
    # of a gamma distribution: 2 at a burstiness of ¼, 1 of a Poisson process, ½ at 4
    assert statistics.pstdev(found) / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_a_poisson_process_has_exponential_gaps():
    """Not only their spread: half of them are below ln 2 over the rate, 5 % above 3 over it."""
    found = gaps(Arrivals(4.0))
    assert sum(gap < math.log(2) / 4 for gap in found) / COUNT == pytest.approx(0.5, abs=0.01)
    assert sum(gap > 3 / 4 for gap in found) / COUNT == pytest.approx(math.exp(-3), abs=0.005)


def test_constant_arrivals_and_all_at_once():
    assert Arrivals(4.0, math.inf).draw(3, 0) == [0.25, 0.5, 0.75]
    assert Arrivals(math.inf).draw(3, 0) == [0.0, 0.0, 0.0]


def test_pauses_keep_the_mean_rate_and_no_request_comes_in_them():
    times = Arrivals(10.0, on_off=(2.0, 6.0)).draw(COUNT, 3)
    assert times == sorted(times)
    assert COUNT / times[-1] == pytest.approx(10.0, rel=0.05)
    assert all(time % 8.0 <= 2.0 + 1e-6 for time in times)
    # within a phase they come four times as fast
    inside = [b - a for a, b in pairwise(times) if a // 8 == b // 8]
    assert statistics.fmean(inside) == pytest.approx(1 / 40, rel=0.05)


def test_a_seed_says_it_all_and_a_rate_only_scales():
    one = Arrivals(2.0, 0.5).draw(50, 7)
    assert Arrivals(2.0, 0.5).draw(50, 7) == one
    assert Arrivals(2.0, 0.5).draw(50, 8) != one
    assert Arrivals(8.0, 0.5).draw(50, 7) == pytest.approx([time / 4 for time in one])


def test_rates_and_phases_are_read():
    assert parse_rates("1,2.5,inf,1") == [1.0, 2.5, math.inf]
    assert parse_on_off("2,8") == (2.0, 8.0)
    assert parse_on_off(None) is None


@pytest.mark.parametrize("text", ["0", "-1", "nan", "1,,2", "fast"])
def test_rates_that_make_no_load(text):
    with pytest.raises(ConfigError):
        parse_rates(text)


@pytest.mark.parametrize("text", ["1", "1,2,3", "a,b"])
def test_phases_that_are_not_two_numbers(text):
    with pytest.raises(ConfigError):
        parse_on_off(text)


@pytest.mark.parametrize(
    ("burstiness", "on_off"), [(0.0, None), (math.nan, None), (1.0, (0.0, 1.0)), (1.0, (1.0, -1.0))]
)
def test_arrivals_that_cannot_be(burstiness, on_off):
    with pytest.raises(ConfigError):
        Arrivals(1.0, burstiness, on_off)


def test_fixed_and_uniform_lengths():
    assert set(lengths("12", 50)) == {12}
    found = lengths("uniform:3-6")
    for value in (3, 4, 5, 6):
        assert found.count(value) / COUNT == pytest.approx(0.25, abs=0.02)
    assert set(found) == {3, 4, 5, 6}


def test_lognormal_lengths_have_their_mean_and_spread():
    found = lengths("lognormal:200,0.5")
    assert statistics.fmean(found) == pytest.approx(200, rel=0.02)
    assert statistics.pstdev(found) == pytest.approx(100, rel=0.05)
    cut = lengths("lognormal:200,0.5,100-300")
    assert (min(cut), max(cut)) == (100, 300)
    assert set(lengths("lognormal:50,0", 20)) == {50}


@pytest.mark.parametrize(
    "text", ["0", "-3", "uniform:5-3", "uniform:0-3", "lognormal:0,1", "lognormal:1.2.3,1", "many"]
)
def test_lengths_that_cannot_be(text):
    with pytest.raises(ConfigError, match="--prompt-tokens"):
        LengthDistribution.parse(text, "--prompt-tokens")


def test_prompts_are_parts_of_the_text_with_lengths_of_their_own():
    load = workload(
        prompt_tokens=LengthDistribution.parse("uniform:5-8", ""),
        texts=["abc", "defgh"],
        tokenize=lambda text: [ord(letter) - ord("a") for letter in text],
    )
    requests = load.requests(Arrivals(5.0))
    assert {len(request.prompt) for request in requests} == {5, 6, 7, 8}
    for request in requests:
        assert request.num_prompt_tokens == len(request.prompt)
        # the text over and over, from anywhere
        assert all((b - a) % 8 == 1 for a, b in pairwise(request.prompt))
    assert len({request.prompt[0] for request in requests}) > 4


def test_prompts_as_they_are_come_equally_often_and_as_text_without_a_tokenizer():
    load = workload(num_requests=9, texts=["a", "bc", "def"])
    requests = load.requests(Arrivals(5.0))
    assert sorted(r.prompt for r in requests) == ["a"] * 3 + ["bc"] * 3 + ["def"] * 3
    assert {request.num_prompt_tokens for request in requests} == {None}
    counted = workload(num_requests=9, texts=["a", "bc", "def"], tokenize=list)
    sizes = sorted(request.num_prompt_tokens for request in counted.requests(Arrivals(5.0)))
    assert sizes == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_rounds_differ_and_rates_share_all_but_the_times():
    load = workload(prompt_tokens=LengthDistribution.parse("uniform:5-50", ""))
    slow, fast = load.requests(Arrivals(1.0)), load.requests(Arrivals(9.0))
    sizes = [(r.num_prompt_tokens, r.num_output_tokens) for r in slow]
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in fast] == sizes
    assert load.requests(Arrivals(1.0)) == slow
    other = load.requests(Arrivals(1.0), 1)
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in other] != sizes
    assert [r.arrival_s for r in other] != [r.arrival_s for r in slow]


def test_a_time_limit_leaves_out_what_comes_later():
    every = workload(texts=["a"]).requests(Arrivals(4.0))
    some = workload(texts=["a"], max_seconds=3.0).requests(Arrivals(4.0))
    assert [r.arrival_s for r in some] == [r.arrival_s for r in every if r.arrival_s <= 3.0]
    assert 0 < len(some) < len(every)
    with pytest.raises(ConfigError, match="no request within"):
        workload(texts=["a"], max_seconds=1e-9).requests(Arrivals(4.0))


def test_workloads_that_cannot_be():
    with pytest.raises(ConfigError, match="tokenizer"):
        workload(prompt_tokens=LengthDistribution.parse("4", ""), texts=["a"])
