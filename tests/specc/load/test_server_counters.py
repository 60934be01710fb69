"""Counters of speculation in a server's metrics."""

from __future__ import annotations

import pytest

from specc.load.http_client import parse_metrics

METRICS = """\
# HELP specc:spec_decode_num_drafts_total Steps that drafted.
# TYPE specc:spec_decode_num_drafts_total counter
specc:spec_decode_num_drafts_total{model_name="a"} 40.0
specc:spec_decode_num_drafts_created{model_name="a"} 1.7e+09
specc:spec_decode_num_draft_tokens_total{model_name="a"} 80.0
specc:spec_decode_num_accepted_tokens_total{model_name="a"} 36.0
specc:spec_decode_num_accepted_tokens_per_pos_total{model_name="a",position="1"} 12.0
specc:spec_decode_num_accepted_tokens_per_pos_total{model_name="a",position="0"} 24.0
specc:num_requests_running{model_name="a"} 3.0
"""
# as servers wrote them before their counters had types and suffixes; two engines of one server
UNTYPED = """\
vllm:spec_decode_num_drafts{engine="0"} 1
vllm:spec_decode_num_drafts{engine="1"} 2
vllm:spec_decode_num_draft_tokens{engine="0",text="a \\"b\\" } c"} 4
vllm:spec_decode_num_accepted_tokens{engine="0"} 3
vllm:spec_decode_num_accepted_tokens_per_pos{engine="0",position="0"} 2
vllm:spec_decode_num_accepted_tokens_per_pos{engine="1",position="0"} 1
"""


@pytest.mark.parametrize(
    ("text", "counted"),
    [(METRICS, (40, 80, 36, [24, 12])), (UNTYPED, (3, 4, 3, [3]))],
    ids=["specc", "untyped"],
)
def test_counters_of_speculation(text, counted):
    stats = parse_metrics(text)
    assert stats is not None
    assert counted == (
        stats.num_spec_steps,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.accepted_at_depth,
    )


def test_a_server_without_speculation():
    assert parse_metrics("python_info 1.0\n") is None


def test_what_is_no_metrics():
    with pytest.raises(ValueError, match="invalid metric name"):
        parse_metrics("<html>\n")
