"""Figures by two names: specc's, and those of vLLM, which dashboards ask for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

OWN, _VLLMS = "specc:", "vllm:"
# vLLM leaves these to a package, with its names
_OF_HTTP = OWN + "http_requests"
# figures that vLLM has not got; all others have its names and meanings
_ONLY_OWN = frozenset(
    OWN + name
    for name in (
        "goodput_tokens_per_second", "predicted_goodput_tokens_per_second", "plan",
        "engine_healthy", "engine_failures", "draft_weights_version", "draft_reloads",
        "draft_reload_failures",
        "prediction_draft_tokens", "prediction_accepted_tokens", "plan_steps", "plan_drafts",
        "plan_draft_tokens", "plan_accepted_tokens", "plan_accepted_tokens_per_pos",
        "tool_outputs", "tool_calls",
    )
)  # fmt: skip


class BothNames:
    """Figures by their own names, and those that vLLM has by its names, too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            if family.name in _ONLY_OWN:
                continue
            theirs = "" if family.name == _OF_HTTP else _VLLMS
            name = family.name.replace(OWN, theirs)
            other = Metric(name, family.documentation, family.type, family.unit)
            other.samples = [
                sample._replace(name=sample.name.replace(OWN, theirs)) for sample in family.samples
            ]
            yield other
