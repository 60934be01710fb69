"""Figures of a server: they are those of the engine's counters, and any Prometheus reads them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specc.runtime.service.state import ServiceState
from specc.server.rates import MAX_LATENCIES, RateWindow, RecentLatencies
from specc.speculation.metrics import SpecStats
from tests.specc.server.serving import Server, serve, slow_down, wait_for

BODY = {"prompt": ["hello", "abc"], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds",
    "time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_time_per_output_token_seconds",
    "request_max_num_generation_tokens", "request_params_max_tokens", "request_params_n",
    "iteration_tokens_total",
)  # fmt: skip
# what vLLM's dashboards for Grafana ask for
DASHBOARDS = (
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count", "prompt_tokens_total", "generation_tokens_total",
    "inter_token_latency_seconds_bucket", "inter_token_latency_seconds_sum",
    "time_to_first_token_seconds_bucket", "time_to_first_token_seconds_count",
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_success_total",
    "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum", "request_inference_time_seconds_sum",
    "request_max_num_generation_tokens_sum", "iteration_tokens_total_bucket",
    "request_params_n_bucket", "request_params_max_tokens_bucket",
    "request_time_per_output_token_seconds_bucket", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "cache_config_info",
    "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total",
)  # fmt: skip


def samples(server: Server, prefix: str = "specc:") -> dict[tuple[str, str], float]:
    """(name, values of the labels besides the model's) → value."""
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.name.startswith(("specc:", "vllm:", "http_requests"))
        assert family.documentation
        if not family.name.startswith(prefix) or family.name.endswith("_info"):
            continue
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            found[sample.name.removeprefix(prefix), " ".join(labels.values())] = sample.value
    return found


def test_metrics_are_the_engines_counters(server) -> None:
    server.complete(**BODY)
    server.complete(**BODY | {"stream": False, "n": 2, "seed": 1, "temperature": 0.7})
    server.wait_until_published()
    stats = server.service.core.scheduler.stats
    found = samples(server)
    for name, value in (
        ("prompt_tokens_total", stats.num_prompt_tokens),
        ("generation_tokens_total", stats.num_output_tokens),
        ("num_preemptions_total", 0),
        ("spec_decode_num_drafts_total", stats.num_spec_steps),
        ("spec_decode_num_draft_tokens_total", stats.num_draft_tokens),
        ("spec_decode_num_accepted_tokens_total", stats.num_accepted_tokens),
        ("prefix_cache_queries_total", 24),
        ("prefix_cache_hits_total", stats.num_cached_tokens),
        ("num_requests_running", 0),
        ("num_requests_waiting", 0),
        ("kv_cache_usage_perc", 0),
        ("engine_failures_total", 0),
        ("engine_healthy", 1),
    ):
        assert found[name, ""] == value, name
    assert stats.num_accepted_tokens > 0
    depths = [found["spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(4)]
    assert depths == stats.accepted_at_depth
    assert found["request_success_total", "length"] == 6
    assert found["request_success_total", "abort"] == 0
    assert found["request_generation_tokens_sum", ""] == stats.num_output_tokens == 72
    assert found["request_prompt_tokens_sum", ""] == stats.num_prompt_tokens == 24
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds",
        "request_time_per_output_token_seconds", "request_params_max_tokens",
    ):  # fmt: skip
        assert found[f"{name}_count", ""] == 6
    assert found["request_params_max_tokens_sum", ""] == 72
    # by prompt: two of one output, two of two
    assert found["request_max_num_generation_tokens_count", ""] == 4
    assert found["request_max_num_generation_tokens_sum", ""] == 48
    assert (found["request_params_n_count", ""], found["request_params_n_sum", ""]) == (4, 6)
    # each token in one iteration
    assert found["iteration_tokens_total_sum", ""] == 24 + 72
    phases = sum(
        found[f"request_{name}_time_seconds_sum", ""] for name in ("queue", "prefill", "decode")
    )
    total = found["e2e_request_latency_seconds_sum", ""]
    assert 0 < found["request_inference_time_seconds_sum", ""] <= phases + 0.01
    # the engine has each a little later, and a little shorter
    assert 0.5 * total < phases <= total + 0.01
    # every token but the first of each request
    assert found["time_per_output_token_seconds_count", ""] == 66
    gaps = found["inter_token_latency_seconds_sum", ""]
    assert found["time_per_output_token_seconds_sum", ""] == pytest.approx(gaps)
    firsts = found["time_to_first_token_seconds_sum", ""]
    assert found["e2e_request_latency_seconds_sum", ""] == pytest.approx(firsts + gaps, abs=0.05)
    for name in HISTOGRAMS:
        assert found[f"{name}_bucket", "+Inf"] == found[f"{name}_count", ""]


def test_vllms_names_have_the_same_figures(server) -> None:
    """So its dashboards show them, unless nobody wants the page twice as long."""
    server.complete(**BODY)
    server.wait_until_published()
    text = server.get("/metrics").text
    for name in DASHBOARDS:
        assert f"\nvllm:{name}{{" in text, name
    own, others = samples(server), samples(server, "vllm:")
    assert len(others) > 100
    assert others.items() <= own.items()
    missing = {name for name, _ in own} - {name for name, _ in others}
    assert missing == {
        "goodput_tokens_per_second", "plan", "engine_healthy", "engine_failures_total",
        "prediction_draft_tokens_total", "prediction_accepted_tokens_total",
        "draft_reload_failures_total", "plan_steps_total", "plan_drafts_total",
        "plan_draft_tokens_total", "plan_accepted_tokens_total",
        "plan_accepted_tokens_per_pos_total", "tool_outputs_total", "tool_calls_total",
        # which has no prefix there
        "http_requests_total",
    }  # fmt: skip
    shape = server.engine.cache.shape
    info = (
        f'block_size="{shape.rows_per_block}",cache_dtype="auto",model_name="tiny",num_gpu_blocks="'
    )
    assert f"vllm:cache_config_info{{{info}" in text
    with serve(vllm_metrics=False) as plain:
        assert "vllm:" not in plain.get("/metrics").text


def test_what_runs_is_seen(server) -> None:
    undo = slow_down(server, 0.03)
    with server.http.stream(
        "POST",
        server.base + "/v1/completions",
        json=BODY | {"stream": True, "n": 3, "max_tokens": 80},
    ) as answer:
        lines = answer.iter_lines()  # kept: the connection ends with it
        next(lines)
        wait_for(lambda: samples(server)["num_requests_running", ""] == 3, "nothing runs")
        found, now = samples(server), server.get("/stats").json()
        assert found["num_requests_waiting", ""] == 3
        assert 0 < found["kv_cache_usage_perc", ""] <= 1
        wait_for(lambda: samples(server)["plan", "chain-4"] > 0, "no plan runs")
        assert samples(server)["plan", "off"] == 0
        assert (now["running"], now["waiting"], now["health"]) == (3, 3, "ok")
        assert now["all_plans"] == list(server.engine.plans)
        wait_for(lambda: server.app.state.metrics.log_line() is not None, "no line")
        line = server.app.state.metrics.log_line()
        assert "Running: 3 reqs, Waiting: 3 reqs" in line
    undo()
    server.wait_until_idle()
    found = samples(server)
    assert found["plan", "chain-4"] == 0
    # the client went away in the middle
    assert found["request_success_total", "abort"] > 0
    assert (
        server.get("/stats").json()["total"]["output_tokens"]
        == found["generation_tokens_total", ""]
    )


def test_rates_are_of_the_last_seconds() -> None:
    def state(output: int, steps: int = 0, accepted: int = 0) -> ServiceState:
        stats = SpecStats(
            num_output_tokens=output,
            num_spec_steps=steps,
            num_accepted_tokens=accepted,
            num_draft_tokens=2 * steps,
        )
        return ServiceState(0, 0, 0, 0, 0, 0, 0, {}, None, stats, 0.0)

    window = RateWindow()
    assert window.look(state(100), 0.0).output_tokens == 0
    rates = window.look(state(150, 20, 30), 1.0)
    assert (rates.output_tokens, rates.mean_acceptance_length) == (50, 2.5)
    assert rates.acceptance_rate == 0.75
    # bursts of 50 tokens every five seconds
    for second in range(2, 13):
        rates = window.look(state(150 + 50 * (second // 5), 20, 30), float(second))
        if second >= 7:
            # the 50 tokens of the first second are older than the window, one burst is in it
            assert rates.output_tokens == pytest.approx(10)
    assert rates.mean_acceptance_length == 0
    # a scraper that looks once a minute sees the minute's mean
    assert window.look(state(850), 72.0).output_tokens == pytest.approx(10, abs=0.5)
    assert window.look(state(850), 140.0).output_tokens == 0


@pytest.mark.slow
def test_latencies_and_prefix_hits_of_the_last_seconds() -> None:
    with serve() as server:
        nothing = server.get("/stats").json()
        assert nothing["time_to_first_token"] == {"count": 0, "p50_s": None, "p99_s": None}
        assert nothing["prefix_hit_rate"] is nothing["total"]["prefix_hit_rate"] is None
        undo = slow_down(server, 0.02)
        for _ in range(2):
            server.complete(prompt="abcdefghijkl", temperature=0, max_tokens=30, ignore_eos=True)
        undo()
        wait_for(lambda: server.get("/stats").json()["time_to_first_token"]["count"] == 2, "none")
        found, now = samples(server), server.get("/stats").json()
        gaps = now["inter_token_latency"]
        assert gaps["count"] == found["inter_token_latency_seconds_count", ""] > 4
        # each update comes after a slowed step
        assert 0.015 < gaps["p50_s"] <= gaps["p99_s"] < 60
        assert 0.02 < now["time_to_first_token"]["p50_s"] <= now["time_to_first_token"]["p99_s"]
        # the second prompt was in the cache, but for its last token's block
        hits, asked = (found[f"prefix_cache_{name}_total", ""] for name in ("hits", "queries"))
        assert 0 < hits < asked
        assert now["total"]["prefix_hit_rate"] == hits / asked


def test_percentiles_are_of_the_last_minute() -> None:
    recent = RecentLatencies()
    assert recent.percentiles(50, now_s=0.0) == (0, [None])
    for i in range(200):
        recent.add(float(i), now_s=float(i))
    # those of the seconds 140 … 199
    assert recent.percentiles(0, 50, 100, now_s=200.0) == (60, [140.0, 169.5, 199.0])
    assert recent.percentiles(50, now_s=259.0) == (1, [199.0])
    assert recent.percentiles(50, now_s=260.0) == (0, [None])
    for i in range(3 * MAX_LATENCIES):
        recent.add(float(i), now_s=300.0)
    assert recent.percentiles(0, now_s=300.0) == (MAX_LATENCIES, [2.0 * MAX_LATENCIES])


def test_lines_are_logged_while_there_is_work(caplog) -> None:
    with caplog.at_level("INFO", "specc.serve"), serve(log_every_s=0.02) as server:
        slow_down(server, 0.01)
        server.complete(**BODY)
        wait_for(lambda: bool(caplog.messages), "no line")
        assert "Avg generation throughput" in caplog.messages[0]


def test_the_page_needs_nothing_from_elsewhere(server) -> None:
    answer = server.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    text = answer.text
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    # every figure that it reads is there
    now = server.get("/stats").json()
    names = (
        "output_tokens_per_s", "running", "waiting", "kv_cache_usage", "plans", "health",
        "time_to_first_token", "inter_token_latency", "queue_time", "prefix_hit_rate",
        "endpoints",
    )  # fmt: skip
    for name in names:
        assert f"now.{name}" in text
        assert name in now


def test_several_servers_in_one_process_count_for_themselves(server) -> None:
    with serve() as other:
        assert samples(other)["generation_tokens_total", ""] == 0
        assert samples(server)["generation_tokens_total", ""] > 0
