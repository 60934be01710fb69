"""An engine whose steps are queued ahead of their results, for tests of streams on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.runtime.in_flight import InFlight
from specc.runtime.policies.base import Policy
from specc.runtime.scheduling.batch import Batch, RunResult
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import SpecPlan
from tests.runtime.late_engine import Rig, late_rig

PLANS = ("off", "chain-3", "tree-2-1")
PROMPTS = [[5, 6, 7, 8], [40, 41], [9] * 7, list(range(60, 83)), [200]]
MAX_SEQ_LEN = 64


@contextlib.contextmanager
def counting_rig(tiny_models: Any, path: Path) -> Iterator[Rig]:
    """Of three requests with blocks of four rows; counts steps ahead, and rows that are dropped."""
    plans = tuple(SpecPlan.from_widths(widths) for widths in ((2, 1), (1, 1, 1)))
    config = CompileConfig(
        plans=plans, max_seq_len=MAX_SEQ_LEN, max_batch_size=3, block_size=4, backend="cuda"
    )
    with late_rig(tiny_models, path, config) as made, pytest.MonkeyPatch.context() as patch:
        hold, postprocess = InFlight._hold, Scheduler.postprocess

        def counted(loop: InFlight, *queued: Any) -> None:
            made.num_ahead += len(loop.queued)
            hold(loop, *queued)

        def watched(scheduler: Scheduler, batch: Batch, result: RunResult) -> None:
            requests = [s for group in batch.groups for s in group.requests]
            made.num_dropped += sum(s not in scheduler.running for s in requests)
            postprocess(scheduler, batch, result)

        patch.setattr(InFlight, "_hold", counted)
        patch.setattr(Scheduler, "postprocess", watched)
        yield made


COUNTERS = (
    "num_requests", "num_prompt_tokens", "num_output_tokens", "num_steps", "num_spec_steps",
    "num_draft_tokens", "num_accepted_tokens", "num_trimmed_tokens", "accepted_at_depth",
    "num_prefill_passes", "num_step_passes", "num_first_tokens",
)  # fmt: skip


def counters(stats: SpecStats | None) -> dict[str, Any]:
    assert stats is not None
    return {name: getattr(stats, name) for name in COUNTERS}


def whole_outputs(rig: Rig) -> list[tuple[list[int], str]]:
    """Tokens and text of each prompt, as long as it can be: stops are chosen from them."""
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    outputs = rig.llm("off", overlaps=False).generate(PROMPTS, params)
    return [(list(output.outputs[0].token_ids), output.outputs[0].text) for output in outputs]


class ByLoad(Policy):
    """Chains for few, plain decoding for many; `needs_results` as the test says."""

    needs_results = True

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return "chain-3" if num_running < 2 else "off"
