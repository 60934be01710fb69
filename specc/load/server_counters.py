"""Counters of speculation that a server tells in Prometheus' text format."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from specc.speculation.metrics import SpecStats

# name of a sample, without the server's → field of SpecStats
_FIELDS = {
    "spec_decode_num_drafts": "num_spec_steps",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
_PER_DEPTH = "spec_decode_num_accepted_tokens_per_pos"


def parse_metrics(text: str) -> SpecStats | None:
    """Counters named as vLLM's, summed over engines and models; None where there are none.

    Raises:
        ValueError: not Prometheus' text.
    """
    stats, depths = SpecStats(), dict[int, int]()
    is_known = False
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # older servers name their counters without the suffix
            name = sample.name.partition(":")[2].removesuffix("_total")
            if name in _FIELDS:
                is_known = True
                total = getattr(stats, _FIELDS[name]) + round(sample.value)
                setattr(stats, _FIELDS[name], total)
            elif name == _PER_DEPTH and "position" in sample.labels:
                depth = int(sample.labels["position"])
                depths[depth] = depths.get(depth, 0) + round(sample.value)
    stats.accepted_at_depth = [depths.get(i, 0) for i in range(max(depths, default=-1) + 1)]
    return stats if is_known else None
