"""Metrics of a service in the Triton Inference Server's own, named as those of `specc serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specc.runtime.service.state import Health, ServiceState

if TYPE_CHECKING:
    from specc.runtime.service.service import Service

# name → what it is; the names are those that vLLM's users know
_COUNTERS = {
    "request_success_total": "Requests that ended.",
    "num_preemptions_total": "Requests that gave up their cache blocks for others.",
    "prompt_tokens_total": "Prompt tokens of requests with a first token.",
    "generation_tokens_total": "Output tokens.",
    "prefix_cache_queries_total": "Prompt tokens looked for in the cache.",
    "prefix_cache_hits_total": "Prompt tokens found in the cache.",
    "spec_decode_num_drafts_total": "Steps that drafted, one for each request.",
    "spec_decode_num_draft_tokens_total": "Draft tokens.",
    "spec_decode_num_accepted_tokens_total": "Accepted draft tokens, bonus not counted.",
    "spec_decode_num_accepted_tokens_per_pos_total": "Accepted draft tokens of each position.",
}
_GAUGES = {
    "num_requests_running": "Requests that have cache blocks.",
    "num_requests_waiting": "Requests that wait for a place.",
    "kv_cache_usage_perc": "Share of the cache blocks in use, 0 to 1.",
    "kv_cache_blocks_used": "Cache blocks that requests use.",
    "kv_cache_blocks": "Cache blocks in all.",
    "plan_requests": "Requests of the last iteration by plan.",
    "goodput_tokens_per_second": "What the goodput policy expects; 0 with others.",
    "healthy": "1 while requests are served, 0 once the engine has failed for good.",
}

# name and labels of a value
_Key = tuple[str, tuple[tuple[str, str], ...]]


class TritonMetrics:
    """Keeps Triton's metrics in step with a service; for one thread.

    Args:
        pb_utils: Triton's module `triton_python_backend_utils`.
        labels: of every metric; they tell the instances of a model apart.
    """

    def __init__(self, service: Service, pb_utils: Any, labels: Mapping[str, str]) -> None:
        self._service = service
        self._labels = dict(labels)
        # both have to be kept: what is dropped leaves the page
        self._families = {
            name: pb_utils.MetricFamily(name=f"specc:{name}", description=text, kind=kind)
            for names, kind in (
                (_COUNTERS, pb_utils.MetricFamily.COUNTER),
                (_GAUGES, pb_utils.MetricFamily.GAUGE),
            )
            for name, text in names.items()
        }
        self._metrics: dict[_Key, Any] = {}
        self._last: dict[_Key, float] = {}
        self.update()

    def update(self) -> None:
        """Send what has changed: each value is a message to the server."""
        state, is_healthy = self._service.state(), self._service.health is not Health.DEAD
        counted, gauged = dict(_counts(state)), dict(_gauges(state, is_healthy))
        # plans that nobody runs any more
        gauged |= {key: 0.0 for key in self._last if key[0] in _GAUGES and key not in gauged}
        for key, value in counted.items():
            if (more := value - self._last.get(key, 0.0)) > 0 or key not in self._last:
                self._metric(key).increment(more)
                self._last[key] = value
        for key, value in gauged.items():
            if value != self._last.get(key):
                self._metric(key).set(value)
                self._last[key] = value

    def close(self) -> None:
        """Take all metrics off the page."""
        self._metrics.clear()
        self._families.clear()

    def _metric(self, key: _Key) -> Any:
        if key not in self._metrics:
            name, labels = key
            self._metrics[key] = self._families[name].Metric(labels=self._labels | dict(labels))
        return self._metrics[key]


def _counts(state: ServiceState) -> Iterator[tuple[_Key, float]]:
    stats = state.stats
    values = {
        "request_success_total": stats.num_requests,
        "num_preemptions_total": stats.num_preemptions,
        "prompt_tokens_total": stats.num_prompt_tokens,
        "generation_tokens_total": stats.num_output_tokens,
        "prefix_cache_queries_total": state.prefix_queries,
        "prefix_cache_hits_total": state.prefix_hits,
        "spec_decode_num_drafts_total": stats.num_spec_steps,
        "spec_decode_num_draft_tokens_total": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens_total": stats.num_accepted_tokens,
    }
    for name, value in values.items():
        yield (name, ()), float(value)
    for position, value in enumerate(stats.accepted_at_depth):
        labels = (("position", str(position)),)
        yield ("spec_decode_num_accepted_tokens_per_pos_total", labels), float(value)


def _gauges(state: ServiceState, is_healthy: bool) -> Iterator[tuple[_Key, float]]:
    values = {
        "num_requests_running": state.num_running,
        "num_requests_waiting": state.num_waiting,
        "kv_cache_usage_perc": state.cache_usage,
        "kv_cache_blocks_used": state.num_blocks_used,
        "kv_cache_blocks": state.num_blocks,
        "goodput_tokens_per_second": state.decision.goodput if state.decision else 0.0,
        "healthy": is_healthy,
    }
    for name, value in values.items():
        yield (name, ()), float(value)
    for plan, count in state.plans.items():
        yield ("plan_requests", (("plan", plan),)), float(count)
