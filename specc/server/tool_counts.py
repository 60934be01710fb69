"""How often the model calls tools, where it may."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, Metric


@dataclass
class ToolCounts:
    """For one event loop; of outputs that have ended, and could call tools.

    Args:
        num_outputs: all of them.
        num_calling: those with a call.
        num_calls: that they hold.
        num_cut: those of them that ended before their arguments did.
    """

    num_outputs: int = 0
    num_calling: int = 0
    num_calls: int = 0
    num_cut: int = 0

    def add(self, num_calls: int, num_whole: int) -> None:
        """Count one output."""
        self.num_outputs += 1
        self.num_calling += num_calls > 0
        self.num_calls += num_calls
        self.num_cut += num_calls - num_whole

    def to_json(self) -> dict[str, int]:
        return {
            "outputs": self.num_outputs,
            "outputs_with_calls": self.num_calling,
            "calls": self.num_calls,
            "cut_calls": self.num_cut,
        }

    def families(self, family: Callable[..., Any], label: Sequence[str]) -> Iterator[Metric]:
        """Figures of all this; see `admin_families`."""
        quiet, whole = self.num_outputs - self.num_calling, self.num_calls - self.num_cut
        for name, text, values in (
            (
                "tool_outputs",
                "Outputs that could call tools.",
                {"tool_call": self.num_calling, "no_tool_call": quiet},
            ),
            ("tool_calls", "Calls of tools.", {"whole": whole, "cut": self.num_cut}),
        ):
            counter = family(CounterMetricFamily, name, text, "outcome")
            for outcome, value in values.items():
                counter.add_metric([*label, outcome], value)
            yield counter
