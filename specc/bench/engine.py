"""The engine's own contenders, one a plan, and the margin after a token that differs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from specc.bench.dice import make_hook
from specc.bench.rounds import OFF, Difference, Measurement
from specc.errors import RequestError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import RequestOutput
from specc.sampling.generation_config import NONE
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats

# two best logits that are closer than this may change places with the width of a pass
_NEAR_TIE = 1e-4
_MOST_MARGINS = 20


class EngineContender:
    """Generates with one plan of a loaded engine.

    Args:
        batches: token ids of prompts, by batch; the batches run one after another.
        max_tokens: output tokens of each prompt; end-of-sequence tokens do not end it.
        synthetic: acceptance probabilities by sibling rank, instead of real acceptance.
        params: of the requests of a batch, by index; None is greedy.
        policy: name of what chooses among the engine's plans, `plan` first; None never does.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        plan: str,
        batches: Sequence[Sequence[list[int]]],
        max_tokens: int,
        synthetic: Sequence[float] | None = None,
        params: Sequence[SamplingParams] | None = None,
        policy: str | None = None,
    ) -> None:
        self.name = name
        self.plan: str | None = plan
        self._engine = engine
        self._policy = policy
        self._step = engine.steps[plan]
        self._batches = batches
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._params = list(params or [greedy] * max(map(len, batches)))
        self._make_hook = make_hook(synthetic, self._step.plan)

    def run(self) -> Measurement:
        # prompts repeat from run to run: rows that an earlier one left would make them cost nothing
        llm = LLM(
            self._engine,
            plan=self._step.plan.name,
            policy=self._policy,
            shares_prefixes=False,
            generation_config=NONE,
        )
        hook = self._make_hook() if self._make_hook else None
        self._step.before_accept = hook
        try:
            begin = time.perf_counter()
            outputs = [llm.generate(batch, self._params[: len(batch)]) for batch in self._batches]
            elapsed_s = time.perf_counter() - begin
        finally:
            self._step.before_accept = None
        excluded_s = hook.seconds if hook else 0.0
        elapsed_s -= excluded_s
        return measurement_of(
            llm.get_metrics(),
            [list(o.outputs[0].token_ids) for batch in outputs for o in batch],
            elapsed_s,
            excluded_s,
        )


def measurement_of(
    stats: SpecStats, outputs: list[list[int]], elapsed_s: float, excluded_s: float = 0.0
) -> Measurement:
    """What an engine's counters say of a run.

    Args:
        outputs: token ids of each prompt's output.
        elapsed_s: seconds of all generate calls.
        excluded_s: seconds that were taken off them.
    """
    decode_s = elapsed_s - stats.prefill_s
    stage_ms = {
        "draft": stats.draft_ms_per_step,
        "verify": stats.verify_ms_per_step,
        "accept_commit": stats.commit_ms_per_step,
    }
    passes = max(stats.num_step_passes, 1)
    if stats.whole_s:  # steps that are one graph, whose stages nobody times apart
        stage_ms["step"] = 1000 * stats.whole_s / passes
    stage_ms["host"] = 1000 * decode_s / passes - sum(stage_ms.values())
    return Measurement(
        outputs=outputs,
        elapsed_s=elapsed_s,
        first_token_s=stats.time_to_first_token,
        decode_s=decode_s,
        num_decode_tokens=stats.num_output_tokens - stats.num_first_tokens,
        num_steps=stats.num_step_passes,
        num_request_steps=stats.num_steps,
        mean_acceptance_length=stats.mean_acceptance_length if stats.num_spec_steps else None,
        accepted_per_depth=stats.accepted_per_depth,
        stage_ms=stage_ms,
        excluded_s=excluded_s,
    )


def _decode_plainly(
    engine: Engine, prompts: Sequence[str | list[int]], count: int
) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return LLM(engine, plan=OFF, generation_config=NONE).generate(list(prompts), params)


def tokenize(
    engine: Engine, prompts: Sequence[str | list[int]], max_tokens: int
) -> list[list[int]]:
    """Token ids of each prompt, as the engine feeds them.

    Raises:
        RequestError: a prompt is empty, or prompt and output are longer than the engine allows:
            the contenders would not emit the same number of tokens.
    """
    # one output token: this also reads every page of the weights once
    outputs = _decode_plainly(engine, prompts, 1)
    token_ids = [list(output.prompt_token_ids) for output in outputs]
    room = min(engine.max_seq_len, engine.position_limit)
    for index, ids in enumerate(token_ids):
        if len(ids) + max_tokens > room:
            raise RequestError(
                f"prompt {index} has {len(ids)} tokens, and {max_tokens} are to follow",
                f"at most {room} together, the engine's max_seq_len",
                "lower --tokens, shorten the prompt, or compile with a larger --max-seq-len",
            )
    return token_ids


def add_margins(
    engine: Engine,
    prompts: Sequence[list[int]],
    reference: Sequence[list[int]],
    differences: Sequence[Difference],
) -> list[Difference]:
    """Say of the first differences how close the target's two best logits were."""
    result = list(differences)
    for i, item in enumerate(result[:_MOST_MARGINS]):
        best = _best_logits(engine, prompts[item.prompt], reference[item.prompt][: item.position])
        if best is not None:
            margin = float(best[0] - best[1])
            eps = torch.finfo(best.dtype).eps
            is_near_tie = margin <= max(_NEAR_TIE, 2 * eps * float(best[0].abs()))
            result[i] = dataclasses.replace(item, margin=margin, is_near_tie=is_near_tie)
    return result


def _best_logits(engine: Engine, prompt: list[int], output: list[int]) -> Tensor | None:
    """The target's two best logits after prompt and output; None where this cannot tell.

    The last of these tokens is decoded once more, in a step of plain decoding.
    """
    if not output:
        return None
    seen: list[Tensor] = []
    step = engine.steps[OFF]
    step.before_accept = lambda values: seen.append(values["logits"][0].topk(2).values)
    try:
        (result,) = _decode_plainly(engine, [prompt + output[:-1]], 2)
    finally:
        step.before_accept = None
    # prefill in one piece may decide a near tie of its own another way
    return seen[0] if seen and result.outputs[0].token_ids[0] == output[-1] else None
