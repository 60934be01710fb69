"""Figures of a running server: for Prometheus, for the page, and for the log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specc.artifact.kv_rows import AUTO
from specc.runtime.service.service import Service, Update
from specc.runtime.service.state import Health, ServiceState
from specc.sampling.params import SamplingParams
from specc.server.admin import admin_families
from specc.server.load import ServerLoad
from specc.server.metric_names import OWN, BothNames
from specc.server.plan_figures import plan_families, plans_to_json
from specc.server.rates import Rates, RateWindow, RecentLatencies, hit_rate
from specc.server.tool_counts import ToolCounts
from specc.speculation.metrics import SpecStats

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20, 50, 100)
_LABEL = ["model_name"]


@dataclass
class _Group:
    """Outputs of one prompt."""

    num_outputs: int = 0
    num_ended: int = 0
    most: int = 0


class ServeMetrics(Collector):
    """Counts what goes through a server, and reads the rest from its service.

    Args:
        model_name: label of all figures.
        has_vllm_names: figures that vLLM has, too, come by its names as well.
    Attributes:
        load: requests by endpoint.
        tools: what outputs call.
    """

    def __init__(self, service: Service, model_name: str, has_vllm_names: bool = True) -> None:
        self._service = service
        self.load, self.tools = ServerLoad(), ToolCounts()
        self._label = [model_name]
        self._plans = service.engine.plans
        self._window = RateWindow()
        self._begin_s = time.monotonic()
        self._finished: Counter[str] = Counter()
        # of its own: several servers can be in one process
        self._registry = CollectorRegistry(auto_describe=False)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
        )
        self._gap = self._histogram(
            "inter_token_latency_seconds",
            "Between two updates of a request, each of one token or more.",
            _GAPS,
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Between two tokens of a request: an update's gap, shared by its tokens.",
            _GAPS,
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS
        )
        self._recent_first, self._recent_gap = RecentLatencies(), RecentLatencies()
        self._recent_queue = RecentLatencies()
        self._queue, self._prefill, self._decode, self._inference, self._mean_gap = (
            self._histogram(f"request_{name}_seconds", text, buckets)
            for name, text, buckets in (
                ("queue_time", "From arrival to the first pass.", _SECONDS),
                ("prefill_time", "From the first pass to the first token.", _SECONDS),
                ("decode_time", "From the first token to the last.", _SECONDS),
                ("inference_time", "From the first pass to the last token.", _SECONDS),
                ("time_per_output_token", "Mean between two tokens of a request.", _GAPS),
            )
        )
        self._prompt, self._output, self._most, self._limit, self._per_iteration = (
            self._histogram(name, text, _TOKENS)
            for name, text in (
                ("request_prompt_tokens", "Tokens of prompts."),
                ("request_generation_tokens", "Tokens of outputs."),
                ("request_max_num_generation_tokens", "Tokens of a prompt's longest output."),
                ("request_params_max_tokens", "Tokens that an output may have."),
                (
                    "iteration_tokens_total",
                    "Tokens of an iteration: prompts that are read, outputs.",
                ),
            )
        )
        self._num_outputs = self._histogram("request_params_n", "Outputs of a prompt.", _COUNTS)
        self._registry.register(self)
        self._pages: CollectorRegistry | BothNames = self._registry
        if has_vllm_names:
            self._pages = BothNames(self._registry)
        service.observe_iteration = self._per_iteration.observe

    def observers(
        self, jobs: Sequence[tuple[int, SamplingParams]]
    ) -> list[Callable[[Update], None]]:
        """What is called with each update of each output of a request, in the event loop.

        Args:
            jobs: prompt and options of each output.
        """
        groups = {prompt: _Group() for prompt, _ in jobs}
        for prompt, _ in jobs:
            groups[prompt].num_outputs += 1
        return [self._observer(groups[prompt], params) for prompt, params in jobs]

    def _observer(self, group: _Group, params: SamplingParams) -> Callable[[Update], None]:
        begin_s = last_s = first_s = time.perf_counter()
        num_tokens = 0

        def observe(update: Update) -> None:
            nonlocal last_s, first_s, num_tokens
            now_s, count = time.perf_counter(), len(update.token_ids)
            if count and not num_tokens:
                first_s = now_s
                self._first_token.observe(now_s - begin_s)
                self._recent_first.add(now_s - begin_s)
            elif count:
                self._recent_gap.add(now_s - last_s)
                self._gap.observe(now_s - last_s)
                for _ in range(count):
                    self._per_token.observe((now_s - last_s) / count)
            if count:
                last_s = now_s
            num_tokens += count
            if update.is_last:
                self._finished[update.finish_reason or "error"] += 1
                self._latency.observe(now_s - begin_s)
                self._output.observe(num_tokens)
                if update.metrics is not None and update.metrics.num_prompt_tokens:
                    self._prompt.observe(update.metrics.num_prompt_tokens)
                    self._phases(update.metrics, now_s - first_s)
                if num_tokens > 1:
                    self._mean_gap.observe((last_s - first_s) / (num_tokens - 1))
                if params.max_tokens is not None:
                    self._limit.observe(params.max_tokens)
                group.num_ended += 1
                group.most = max(group.most, num_tokens)
                if group.num_ended == group.num_outputs:
                    self._most.observe(group.most)
                    self._num_outputs.observe(group.num_outputs)

        return observe

    def _phases(self, stats: SpecStats, decode_s: float) -> None:
        """Of a request with a first token."""
        decode_s = min(decode_s, stats.elapsed_s)
        prefill_s = min(stats.elapsed_s - decode_s, stats.first_token_s)
        self._queue.observe(stats.first_token_s - prefill_s)
        self._recent_queue.add(stats.first_token_s - prefill_s)
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        self._inference.observe(stats.elapsed_s)

    def rates(self) -> Rates:
        return self._window.look(self._service.state())

    def to_text(self) -> bytes:
        return generate_latest(self._pages)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """For the page: what runs now, and all so far."""
        state = self._service.state()
        rates, stats = self._window.look(state), state.stats
        decision = state.decision
        return {
            "model": self._label[0],
            "health": self._service.health.value,
            "up_s": time.monotonic() - self._begin_s,
            "running": state.num_running,
            "waiting": state.num_waiting,
            "kv_cache_usage": state.cache_usage,
            "prompt_tokens_per_s": rates.prompt_tokens,
            "output_tokens_per_s": rates.output_tokens,
            "requests_per_s": rates.requests,
            "mean_acceptance_length": rates.mean_acceptance_length,
            "acceptance_rate": rates.acceptance_rate,
            "time_to_first_token": self._recent_first.to_json(),
            "inter_token_latency": self._recent_gap.to_json(),
            "queue_time": self._recent_queue.to_json(),
            "prefix_hit_rate": rates.prefix_hit_rate,
            "plans": _plans_now(state),
            "all_plans": list(self._plans),
            "predicted_tokens_per_s": decision.goodput if decision else None,
            "predicted_plain_tokens_per_s": decision.plain if decision else None,
            "measuring_latency": state.measured,
            "is_sleeping": self._service.operator.is_asleep,
            "endpoints": self.load.to_json(),
            "tools": self.tools.to_json(),
            "total": {
                "requests": stats.num_requests,
                "prompt_tokens": stats.num_prompt_tokens,
                "output_tokens": stats.num_output_tokens,
                "cached_tokens": stats.num_cached_tokens,
                "prefix_hit_rate": hit_rate(state),
                "preemptions": stats.num_preemptions,
                "prediction_draft_tokens": stats.num_prediction_draft_tokens,
                "prediction_accepted_tokens": stats.num_prediction_accepted_tokens,
                "failures": state.num_failures,
                "mean_acceptance_length": stats.mean_acceptance_length,
                "accepted_per_depth": stats.accepted_per_depth,
                **plans_to_json(state.plan_counts, self._plans),
            },
        }

    def log_line(self) -> str | None:
        """Figures of the last seconds; None where nothing happens."""
        state = self._service.state()
        rates = self._window.look(state)
        if not (state.num_running or state.num_waiting or rates.output_tokens):
            return None
        parts = [
            f"Avg prompt throughput: {rates.prompt_tokens:.1f} tokens/s",
            f"Avg generation throughput: {rates.output_tokens:.1f} tokens/s",
            f"Running: {state.num_running} reqs",
            f"Waiting: {state.num_waiting} reqs",
            f"KV cache usage: {100 * state.cache_usage:.1f}%",
        ]
        if state.prefix_queries:
            hits = 100 * state.prefix_hits / state.prefix_queries
            parts.append(f"Prefix cache hit rate: {hits:.1f}%")
        if rates.mean_acceptance_length:
            parts.append(f"Mean acceptance length: {rates.mean_acceptance_length:.2f}")
        plans = ", ".join(f"{name} × {count}" for name, count in _plans_now(state).items())
        return ", ".join(parts) + (f", Plans: {plans}" if plans else "")

    def collect(self) -> Iterator[Metric]:
        """What the service tells; prometheus_client calls this."""
        state = self._service.state()
        stats, rates = state.stats, self._window.look(state)
        yield self._gauge("num_requests_running", "Requests that run.", state.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", state.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of cache in use, 0 … 1.", state.cache_usage)
        yield self._gauge(
            "goodput_tokens_per_second", "Output tokens of the last seconds.", rates.output_tokens
        )
        predicted = state.decision.goodput if state.decision else None
        if predicted is not None:
            yield self._gauge(
                "predicted_goodput_tokens_per_second", "What the policy expects.", predicted
            )
            yield self._gauge(
                "predicted_plain_tokens_per_second",
                "What it expects of plain decoding for the same requests.",
                state.decision.plain if state.decision else 0.0,
            )
        plan = self._family(GaugeMetricFamily, "plan", "Requests that run this plan.", "plan")
        now = _plans_now(state)
        for name in self._plans:
            plan.add_metric([*self._label, name], now.get(name, 0))
        yield plan
        engine = self._service.engine
        rows = engine.manifest.kv_cache_dtype if engine.manifest else AUTO
        cache = {
            "block_size": engine.cache.shape.rows_per_block,
            "num_gpu_blocks": state.num_blocks,
            "cache_dtype": rows,
        }
        info = self._family(GaugeMetricFamily, "cache_config_info", "Of the cache; 1.", *cache)
        info.add_metric([*self._label, *map(str, cache.values())], 1)
        yield info
        healthy = self._service.health is Health.OK
        yield self._gauge("engine_healthy", "1 where requests can be served.", healthy)
        measured = 1.0 if state.measured is None else state.measured
        yield self._gauge(
            "latency_measured_ratio", "Share of the passes to be measured for goodput.", measured
        )
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked for.", state.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", state.prefix_hits),
            ("num_preemptions", "Requests that gave up their blocks.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens of requests with output.", stats.num_prompt_tokens),
            ("generation_tokens", "Output tokens.", stats.num_output_tokens),
            ("spec_decode_num_drafts", "Steps that drafted.", stats.num_spec_steps),
            ("spec_decode_num_draft_tokens", "Draft tokens.", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Those accepted.", stats.num_accepted_tokens),
            ("prediction_draft_tokens", "Of predictions.", stats.num_prediction_draft_tokens),
            (
                "prediction_accepted_tokens",
                "Those accepted.",
                stats.num_prediction_accepted_tokens,
            ),
            ("engine_failures", "Iterations that failed.", state.num_failures),
        ):
            counter = self._family(CounterMetricFamily, name, text)
            counter.add_metric(self._label, value)
            yield counter
        depths = self._family(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "Steps in which the draft token of this position was accepted.",
            "position",
        )
        for position, count in enumerate(stats.accepted_at_depth):
            depths.add_metric([*self._label, str(position)], count)
        yield depths
        ended = self._family(
            CounterMetricFamily, "request_success", "Requests by how they ended.", "finished_reason"
        )
        for reason in ("stop", "length", "timeout", "abort", "error"):
            ended.add_metric([*self._label, reason], self._finished[reason])
        yield ended
        yield from plan_families(state.plan_counts, self._plans, self._family, self._label)
        yield from self.load.families(self._family, self._label)
        yield from self.tools.families(self._family, self._label)
        yield from admin_families(self._service, self._family, self._label)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"{OWN}{name}", text, _LABEL, registry=self._registry, buckets=buckets
        )
        return histogram.labels(*self._label)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = self._family(GaugeMetricFamily, name, text)
        gauge.add_metric(self._label, value)
        return gauge

    def _family(self, kind: Any, name: str, text: str, *labels: str) -> Any:
        return kind(f"{OWN}{name}", text, labels=[*_LABEL, *labels])


def _plans_now(state: ServiceState) -> dict[str, int]:
    """Those of the last iteration, which say nothing once all requests have ended."""
    return {name: count for name, count in state.plans.items() if count and state.num_running}
