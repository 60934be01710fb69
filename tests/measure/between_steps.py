"""Time of Python between two calls of the CPU library, and of those calls.

    OMP_NUM_THREADS=1 python -P tests/measure/between_steps.py engine/ off chain-4

One prompt, 300 tokens, greedy, a step a call (`multi_step_ms=0`); medians of the last of four runs.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from specc import LLM, SamplingParams
from specc.runtime.backends.cpu.step import NativeStep


def timed(call: Callable[..., Any], spans: list[tuple[float, float]]) -> Callable[..., Any]:
    """The same, which notes when it began and ended."""

    def run(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        made = call(*arguments, **named)
        spans.append((start, time.perf_counter()))
        return made

    return run


def main() -> None:
    spans: list[tuple[float, float]] = []
    for name in ("step", "steps", "run"):
        setattr(NativeStep, name, timed(getattr(NativeStep, name), spans))
    params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    for plan in sys.argv[2:]:
        llm = LLM(sys.argv[1], plan=plan, num_threads=1, multi_step_ms=0.0)
        for _ in range(4):
            spans.clear()
            llm.generate(["Once upon a time there was a little"], params)
        between = statistics.median(b[0] - a[1] for a, b in itertools.pairwise(spans))
        inside = statistics.median(end - start for start, end in spans)
        print(
            f"{plan}: {len(spans)} calls of {1e3 * inside:.2f} ms, {1e3 * between:.2f} ms between"
        )


if __name__ == "__main__":
    main()
