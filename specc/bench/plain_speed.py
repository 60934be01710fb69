"""How fast plain decoding is on this machine: a few steps of it after a run.

What a plan saves in passes says nothing about what its drafts cost. So whoever asks for figures of
a run gets the speed of plain decoding beside them, of sequences like those of the run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF

# iterations: those that count, and those before them, which warm up
_STEPS, _WARMUP = 16, 2
# seconds of them that are enough, and in which prompts are read at most, as far as can be foreseen
_ENOUGH_S, _PROMPTS_S = 2.0, 5.0
# that count at least, however long they take
_LEAST_STEPS = 3


@dataclass(frozen=True)
class PlainSpeed:
    """Plain decoding, measured.

    Args:
        tokens_per_s: of all sequences together, without their prompts.
        batch_size: sequences that ran together.
        context: committed rows of each, on average.
    """

    tokens_per_s: float
    num_steps: int
    batch_size: int
    context: int

    def ratio(self, stats: SpecStats) -> float | None:
        """How many times as fast a run decoded, its prompts left out; None where it did not."""
        rate = decode_tokens_per_s(stats)
        return rate / self.tokens_per_s if rate and self.tokens_per_s else None


def decode_tokens_per_s(stats: SpecStats) -> float:
    """Tokens a second of a run, without first ones and what their prompts took."""
    seconds = stats.elapsed_s - stats.prefill_s
    tokens = stats.num_output_tokens - stats.num_first_tokens
    return tokens / seconds if seconds > 0 else 0.0


def measure_plain(
    engine: Engine, sequences: Sequence[Sequence[int]], stats: SpecStats
) -> PlainSpeed | None:
    """Continue sequences by plain decoding, as many at once as ran together.

    Args:
        engine: with nobody else at work.
        sequences: token ids of prompts and outputs of a run; these are continued.
        stats: of the run: its batches, and how long its prompts took.
    Returns:
        None where there is nothing to compare with: no step drafted, or no sequence has room.
    """
    if not stats.num_spec_steps or not stats.num_step_passes:
        return None
    room = min(engine.max_seq_len, engine.position_limit) - _STEPS - _WARMUP - 1
    size = max(1, min(len(sequences), round(stats.num_steps / stats.num_step_passes)))
    chosen = [list(ids[:room]) for ids in sequences[:size] if ids and room > 0]
    if not chosen:
        return None
    core = EngineCore(engine, OFF.name)
    own = core.scheduler.stats
    # prompts of the run are in the cache, as long as it has room for them
    num_read = stats.num_prompt_tokens - stats.num_cached_tokens
    expected_s = stats.prefill_s / max(1, num_read) * sum(map(len, chosen))
    share = min(1.0, _PROMPTS_S / expected_s) if expected_s else 1.0
    chosen = [ids[: max(1, int(share * len(ids)))] for ids in chosen]
    params = SamplingParams(max_tokens=_STEPS + _WARMUP + 1, temperature=0.0, ignore_eos=True)
    requests = [core.requests.make(ids, params) for ids in chosen]
    for request in requests:
        core.scheduler.add(request)
    rates: list[float] = []
    try:
        while own.num_first_tokens < len(requests) and core.scheduler.has_work:
            core.advance()
        steps, spent_s = -_WARMUP, 0.0
        while core.scheduler.has_work and steps < _STEPS:
            before, begin_s = own.num_output_tokens, time.perf_counter()
            core.advance()
            seconds = time.perf_counter() - begin_s
            if own.num_output_tokens == before:
                continue  # queued on a device: the next one has its tokens
            steps += 1
            if steps <= 0:
                continue
            rates.append((own.num_output_tokens - before) / seconds)
            spent_s += seconds
            if spent_s > _ENOUGH_S and len(rates) >= _LEAST_STEPS:
                break
    finally:
        for request in requests:
            core.scheduler.abort(request)
        core.in_flight.settle()
    if not rates:
        return None
    context = sum(map(len, chosen)) // len(chosen)
    return PlainSpeed(statistics.median(rates), len(rates), len(chosen), context)
