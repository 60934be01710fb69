"""A load's results as figures, named as those of `vllm bench serve`, and which were good enough."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specc.close_name import advice
from specc.errors import ConfigError
from specc.load.result import LoadRun, RequestResult
from specc.percentile import percentile
from specc.speculation.metrics import SpecStats

PERCENTILES = (90, 99)
# figure → how readers know it
TIMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "queue": "Queue",
}
# time to first token, time of each further token, end-to-end latency; as `vllm bench serve`
OBJECTIVES = ("ttft", "tpot", "e2el")


def figures_of(run: LoadRun, objectives: Mapping[str, float] | None = None) -> dict[str, Any]:
    """All figures of a run, for JSON: times in milliseconds, null where nothing was measured.

    Args:
        objectives: see `parse_objectives`; none leaves goodput null.
    """
    done = [result for result in run.results if result.is_ok]
    failed = [result for result in run.results if not result.is_ok]
    duration = run.duration_s
    inputs = sum(result.num_prompt_tokens for result in done)
    outputs = sum(result.num_output_tokens for result in done)
    num_good = sum(is_good(result, objectives) for result in done) if objectives else None
    figures: dict[str, Any] = {
        "completed": len(done),
        "failed": len(failed),
        "errors": dict(Counter(result.error or "no output" for result in failed).most_common()),
        "duration_s": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _ratio(len(done), duration),
        "output_throughput": _ratio(outputs, duration),
        "total_token_throughput": _ratio(inputs + outputs, duration),
        "num_good": num_good,
        "request_goodput": None if num_good is None else _ratio(num_good, duration),
    }
    samples = {
        "ttft": [result.ttft_s for result in done],
        "tpot": [result.tpot_s for result in done if result.tpot_s is not None],
        "itl": [gap for result in done for gap in result.gaps_s],
        "e2el": [result.latency_s for result in done],
        "queue": [result.queue_s for result in done if result.queue_s is not None],
    }
    for name, seconds in samples.items():
        figures |= _times(name, [1000 * value for value in seconds])
    figures |= acceptance_of(run.stats)
    figures["plan_shares"] = dict(run.plan_shares)
    return figures


def acceptance_of(stats: SpecStats | None) -> dict[str, Any]:
    """What became of drafts: null where nobody counted, zeros where nothing was drafted."""
    if stats is None:
        return dict.fromkeys(_acceptance(SpecStats()))
    return _acceptance(stats)


def _acceptance(stats: SpecStats) -> dict[str, Any]:
    return {
        "spec_decode_acceptance_rate": 100 * stats.acceptance_rate,
        "spec_decode_acceptance_length": stats.mean_acceptance_length,
        "spec_decode_num_drafts": stats.num_spec_steps,
        "spec_decode_draft_tokens": stats.num_draft_tokens,
        "spec_decode_accepted_tokens": stats.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": stats.accepted_per_depth,
    }


def _times(name: str, values: list[float]) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        f"mean_{name}_ms": statistics.fmean(values) if values else None,
        f"median_{name}_ms": statistics.median(values) if values else None,
        f"std_{name}_ms": statistics.pstdev(values) if values else None,
    }
    for percent in PERCENTILES:
        found[f"p{percent}_{name}_ms"] = percentile(values, percent)
    return found


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Read `ttft:200 tpot:50 e2el:2000`, also with commas or in several parts.

    Returns:
        name → milliseconds at most.
    Raises:
        ConfigError: another name, or no number above 0.
    """
    found: dict[str, float] = {}
    for part in re.split(r"[\s,]+", " ".join(texts).strip()):
        if not part:
            continue
        name, _, value = part.partition(":")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name not in OBJECTIVES or not number > 0:
            raise ConfigError(
                f"--goodput {part}",
                f"one of {', '.join(OBJECTIVES)}, a colon, and milliseconds above 0",
                advice(name, OBJECTIVES, 'for example --goodput "ttft:200 tpot:50 e2el:2000"')
                if name not in OBJECTIVES
                else 'for example --goodput "ttft:200 tpot:50 e2el:2000"',
            )
        found[name] = number
    return found


def is_good(result: RequestResult, objectives: Mapping[str, float]) -> bool:
    """Whether a request ended and kept all objectives; one token has no time of further ones."""
    if not result.is_ok:
        return False
    seconds = {"ttft": result.ttft_s, "tpot": result.tpot_s or 0.0, "e2el": result.latency_s}
    return all(1000 * seconds[name] <= most for name, most in objectives.items())
