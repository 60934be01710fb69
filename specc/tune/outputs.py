"""Prompts of a length, and the target's own outputs on them: what acceptance is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specc.bench.engine import tokenize
from specc.errors import ConfigError
from specc.progress import Advance, ignore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.scheduling.request import Request
from specc.sampling.generation_config import NONE
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF
from specc.tune.acceptance import Trajectory
from specc.tune.options import TuneOptions


class LongPrompts(NamedTuple):
    """What tuning runs.

    Args:
        token_ids: of each.
        is_repeated: a prompt is in it more than once: easier to draft than other text is.
    """

    token_ids: list[list[int]]
    is_repeated: bool = False


def own_outputs(
    engine: Engine,
    prompts: Sequence[str | list[int]],
    options: TuneOptions,
    advance: Advance = ignore,
) -> tuple[LongPrompts, list[Trajectory]]:
    """Prompts as they are measured with, and what the target makes of each.

    Args:
        prompts: text, or token ids.
        advance: told how many outputs are there.
    Raises:
        ConfigError: a length that leaves no room for the output.
        RequestError: a prompt is empty, or too long, or text for an engine without a tokenizer.
    """
    prompted = _prompts(engine, prompts, options)
    return prompted, _trajectories(engine, prompted.token_ids, options, advance)


def typical_context(
    engine: Engine, trajectories: Sequence[Trajectory], options: TuneOptions, max_nodes: int = 1
) -> int:
    """Committed rows of a sequence halfway, on average; with room for a tree of so many nodes."""
    lengths = [len(t.token_ids) - options.max_tokens // 2 for t in trajectories]
    mean = sum(lengths) / max(1, len(lengths))
    return max(1, min(int(mean), engine.max_seq_len - max_nodes - 1))


def params_of(options: TuneOptions, count: int) -> list[SamplingParams]:
    """Of so many requests."""
    return [
        SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=seed,
            ignore_eos=True,
        )
        for seed in range(count)
    ]


def _prompts(
    engine: Engine, prompts: Sequence[str | list[int]], options: TuneOptions
) -> LongPrompts:
    """Token ids of prompts, joined where a length is asked for.

    Raises:
        ConfigError: a length that leaves no room for the output.
        RequestError: a prompt is empty, or too long.
    """
    if options.context is None:
        return LongPrompts(tokenize(engine, prompts, options.max_tokens))
    room = min(engine.max_seq_len, engine.position_limit) - options.max_tokens
    if options.context > room:
        raise ConfigError(
            f"--context {options.context}, and {options.max_tokens} tokens are to follow",
            f"at most {max(0, room)}: the engine's max_seq_len, less what follows",
            "lower --context or --tokens, or compile with a larger --max-seq-len",
        )
    return join_prompts(tokenize(engine, prompts, 1), options.context)


def join_prompts(prompts: Sequence[list[int]], context: int) -> LongPrompts:
    """Prompts of `context` tokens each, as many as there are tokens for; one at least.

    They are joined in the order given, and no two of the results share one. Where all together
    are shorter, they are repeated.

    Args:
        prompts: token ids of each, one prompt of one token or more.
        context: tokens, 1 or more.
    """
    found: list[list[int]] = [[]]
    for prompt in prompts:
        if len(found[-1]) >= context:
            found.append([])
        found[-1] += prompt
    full = [ids[:context] for ids in found if len(ids) >= context]
    if full:
        return LongPrompts(full)
    (short,) = found
    return LongPrompts([(short * -(-context // len(short)))[:context]], is_repeated=True)


def _trajectories(
    engine: Engine, token_ids: Sequence[list[int]], options: TuneOptions, advance: Advance
) -> list[Trajectory]:
    params = params_of(options, len(token_ids))
    outputs = LLM(engine, plan=OFF.name, generation_config=NONE).generate(
        list(token_ids), params, lambda finished, total, _: advance(finished, total)
    )
    found = []
    for ids, output, own in zip(token_ids, outputs, params, strict=True):
        request = Request(output.request_id, ids, own, max_seq_len=engine.max_seq_len)
        request.token_ids += output.outputs[0].token_ids
        found.append(Trajectory(request, len(ids)))
    return found
