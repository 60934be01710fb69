"""Figures of a load against cases that were computed by hand."""

from __future__ import annotations

import pytest

from specc.cli.bench.serve_table import block_of
from specc.errors import ConfigError
from specc.load.figures import figures_of, is_good, parse_objectives
from specc.load.result import Chunk, LoadRun, RequestResult
from specc.load.simulated import measured_acceptance
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan


def result(index: int = 0, start: float = 1.0, times=((1.1, 1), (1.3, 3), (1.4, 1)), **options):
    """By default: 100 ms to the first token, 300 ms for the other four."""
    chunks = [Chunk(*chunk) for chunk in times]
    given = {
        "arrival_s": start,
        "start_s": start,
        "end_s": chunks[-1].time_s,
        "chunks": chunks,
        "first_s": chunks[0].time_s,
        "num_prompt_tokens": 10,
        "num_output_tokens": sum(chunk.num_tokens for chunk in chunks),
        "finish_reason": "length",
    }
    return RequestResult(index, **(given | options))


def failure(error: str) -> RequestResult:
    return RequestResult(9, 0.0, 0.0, 4.0, num_prompt_tokens=10, error=error)


FOUR = LoadRun(
    [
        result(0, queue_s=0.02),
        # one token: no time of further ones, no gap
        result(1, 2.0, ((2.5, 1),), queue_s=0.04),
        result(2, 0.0, ((0.2, 1), (1.0, 2))),
        failure("timeout"),
        failure("timeout"),
        failure("HTTP 500: oh"),
    ],
    duration_s=4.0,
    stats=SpecStats(
        num_spec_steps=10,
        num_draft_tokens=20,
        num_accepted_tokens=9,
        accepted_at_depth=[6, 3],
    ),
)


def test_a_request_times_its_tokens():
    one = result()
    assert (one.ttft_s, one.latency_s) == pytest.approx((0.1, 0.4))
    assert one.tpot_s == pytest.approx(0.3 / 4)
    # chunks, however many tokens each of them has
    assert one.gaps_s == pytest.approx([0.2, 0.1])
    assert result(times=((1.5, 1),)).tpot_s is None


def test_figures_of_four_requests():
    figures = figures_of(FOUR)
    assert (figures["completed"], figures["failed"]) == (3, 3)
    assert figures["errors"] == {"timeout": 2, "HTTP 500: oh": 1}
    # failed ones count neither their prompts nor their tokens
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 9)
    assert figures["request_throughput"] == pytest.approx(3 / 4)
    assert figures["output_throughput"] == pytest.approx(9 / 4)
    assert figures["total_token_throughput"] == pytest.approx(39 / 4)
    # 100, 500 and 200 ms
    assert figures["mean_ttft_ms"] == pytest.approx(800 / 3)
    assert figures["median_ttft_ms"] == pytest.approx(200)
    assert figures["p90_ttft_ms"] == pytest.approx(200 + 0.8 * 300)
    assert figures["p99_ttft_ms"] == pytest.approx(200 + 0.98 * 300)
    # 300/4 and 800/2 ms
    assert figures["mean_tpot_ms"] == pytest.approx((75 + 400) / 2)
    assert figures["mean_itl_ms"] == pytest.approx((200 + 100 + 800) / 3)
    # 400, 500 and 1000 ms
    assert figures["mean_e2el_ms"] == pytest.approx(1900 / 3)
    assert figures["mean_queue_ms"] == pytest.approx(30)
    assert (figures["request_goodput"], figures["num_good"]) == (None, None)


def test_acceptance_is_named_as_vllm_names_it():
    figures = figures_of(FOUR)
    assert figures["spec_decode_acceptance_rate"] == pytest.approx(45)
    assert figures["spec_decode_acceptance_length"] == pytest.approx(1.9)
    assert figures["spec_decode_num_drafts"] == 10
    assert figures["spec_decode_draft_tokens"] == 20
    assert figures["spec_decode_accepted_tokens"] == 9
    assert figures["spec_decode_per_position_acceptance_rates"] == pytest.approx([0.6, 0.3])


def test_what_nobody_measured_is_null():
    simulated = [RequestResult(0, 0.0, 0.0, 2.0, first_s=1.0, num_output_tokens=5)]
    figures = figures_of(LoadRun(simulated, 2.0, is_virtual=True))
    assert figures["mean_tpot_ms"] == pytest.approx(250)
    assert (figures["mean_itl_ms"], figures["mean_queue_ms"]) == (None, None)
    assert figures["spec_decode_acceptance_length"] is None
    nothing = figures_of(LoadRun([failure("x")], 1.0))
    assert (nothing["mean_e2el_ms"], nothing["p99_ttft_ms"], nothing["completed"]) == (
        None,
        None,
        0,
    )


def test_goodput_counts_requests_that_keep_all_objectives():
    one = result()  # 100 ms, 75 ms a token, 400 ms
    assert is_good(one, {"ttft": 101, "tpot": 76, "e2el": 401})
    assert not is_good(one, {"ttft": 99})
    assert not is_good(one, {"ttft": 101, "tpot": 74})
    assert not is_good(one, {"ttft": 101, "e2el": 399})
    assert not is_good(failure("x"), {"ttft": 1e9})
    # one token has no further ones that could be late
    assert is_good(result(times=((1.1, 1),)), {"tpot": 1})
    # 100, 500 and 200 ms to the first token, 75 and 400 ms a token; 4 s
    assert figures_of(FOUR, {"ttft": 300})["request_goodput"] == pytest.approx(2 / 4)
    figures = figures_of(FOUR, {"ttft": 300, "tpot": 100})
    assert (figures["num_good"], figures["request_goodput"]) == (1, 1 / 4)


def test_objectives_are_read_as_vllm_writes_them():
    want = {"ttft": 200.0, "tpot": 50.0, "e2el": 2000.0}
    assert parse_objectives(["ttft:200 tpot:50 e2el:2000"]) == want
    assert parse_objectives(["ttft:200,tpot:50", "e2el:2000"]) == want
    assert parse_objectives([]) == {}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:0", "ttft:nan", "itl:5", "ttft:1:2"])
def test_objectives_that_cannot_be(text):
    with pytest.raises(ConfigError, match="goodput"):
        parse_objectives([text])


def test_the_block_has_the_lines_of_vllm():
    lines = [" ".join(line.split()) for line in block_of(figures_of(FOUR, {"ttft": 300}))]
    for line in (
        "Successful requests: 3",
        "Failed requests: 3",
        "Benchmark duration (s): 4.00",
        "Total input tokens: 30",
        "Total generated tokens: 9",
        "Request throughput (req/s): 0.75",
        "Request goodput (req/s): 0.50",
        "Mean TTFT (ms): 266.67",
        "P99 E2EL (ms): 990.00",
        "Acceptance rate (%): 45.00",
        "Acceptance length: 1.90",
        "Drafts: 10",
        "Draft tokens: 20",
        "Accepted tokens: 9",
        "Position 1: 30.00",
    ):
        assert line in lines
    plain = "\n".join(block_of(figures_of(LoadRun([result()], 1.0, SpecStats()))))
    assert "Speculative" not in plain
    assert "goodput" not in plain


CHAIN_2, CHAIN_4 = SpecPlan.from_widths((1, 1)), SpecPlan.from_widths((1, 1, 1, 1))
TREE = SpecPlan.from_widths((3, 2, 1))
PLANS = {plan.name: plan for plan in (OFF, CHAIN_2, CHAIN_4, TREE)}


def counts(steps: int, *depths: int) -> SpecStats:
    return SpecStats(num_spec_steps=steps, accepted_at_depth=list(depths))


def test_measured_acceptance_is_of_the_plans_that_reach_a_depth():
    table = measured_acceptance(
        {"off": SpecStats(), "chain-2": counts(100, 60, 30), "chain-4": counts(100, 70, 42, 21, 7)},
        PLANS,
    )
    # depth 3 of chain-4 alone: 21 of the 42 that it had at depth 2, not of 72
    assert [row[0] for row in table] == pytest.approx([0.65, 72 / 130, 0.5, 1 / 3])
    assert all(row[1] == 0 for row in table)


def test_what_a_tree_accepts_beyond_a_chain_is_the_second_rank():
    table = measured_acceptance(
        {"chain-2": counts(100, 60, 30), "tree-3-2-1": counts(100, 75, 45, 20)}, PLANS
    )
    assert table[0] == pytest.approx([0.6, 0.15])
    assert table[1] == pytest.approx([0.5, 0.1])
    # the last level of the tree has one child each: it says nothing about other ranks
    assert len(table) == 2


def test_acceptance_without_a_run_that_drafts():
    with pytest.raises(ConfigError, match="no run"):
        measured_acceptance({"off": SpecStats(num_steps=3)}, PLANS)
