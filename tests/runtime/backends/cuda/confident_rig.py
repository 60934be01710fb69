"""Drafters that say how much of each tree is verified, and what comes of requests with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.llm import LLM
from specc.runtime.policies.base import Policy
from specc.runtime.scheduling.batch import Batch, RunResult
from specc.sampling.params import SamplingParams
from tests import models
from tests.block_heads import BLOCK_CASES, write_block
from tests.runtime.draft_cases import SIZES
from tests.runtime.head_rig import load
from tests.runtime.live_rig import COUNTERS, ScriptedNodes

PROMPTS = [[5, 6, 7, 8], [40, 41], [9] * 7, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]
# random drafters are about as sure of all that they propose
THRESHOLD = 0.5


def write_target(path: Path) -> None:
    """Mostly the token before is the likeliest next one: drafts can know that."""
    models.save_tiny("llama", path, tie_word_embeddings=False, **SIZES)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for key in tensors:
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[key] *= 0.3
    rows = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"], dim=-1)
    tensors["lm_head.weight"] = 1.5 * rows
    save_file(tensors, file, metadata={"format": "pt"})


def write_drafter(path: Path, name: str) -> None:
    """It proposes the token before, too, and is as sure of that as its random head says."""
    write_block(path, BLOCK_CASES[name])
    file = path / "model.safetensors"
    tensors = load_file(file)
    rows = torch.nn.functional.normalize(tensors["markov_head.markov_w1.weight"], dim=-1)
    tensors["markov_head.markov_w1.weight"] = 2.0 * rows
    tensors["markov_head.markov_w2.weight"] = 10.0 * rows
    save_file(tensors, file)


class Cut(ScriptedNodes):
    """The policy leaves out a part of each tree, too: the same on every backend."""

    needs_results = True


class Served(NamedTuple):
    """What came of some requests.

    `steps` are of each request, by its id: live nodes and accepted tokens; `batches` are the live
    nodes of each.
    """

    tokens: list[list[int]]
    steps: dict[str, list[tuple[int, int]]]
    counters: list[Any]
    batches: list[tuple[int, ...]]
    llm: LLM


def params(rule: str | None, **more: Any) -> list[SamplingParams]:
    hot = {} if rule is None else {"temperature": 1.0, "rule": rule}
    return [
        SamplingParams(
            max_tokens=10 + i, ignore_eos=True, seed=i, **{"temperature": 0, **hot}, **more
        )
        for i in range(len(PROMPTS))
    ]


def served(
    path: Path,
    name: str | None,
    policy: Policy,
    own: Sequence[SamplingParams],
    threshold: float = THRESHOLD,
    prompts: Sequence[list[int]] = PROMPTS,
    **limits: Any,
) -> Served:
    if name is None:
        limits.setdefault("capture", CaptureLimits.lazy())
    llm = LLM(load(path, backend=name, **limits), policy=policy, confidence_threshold=threshold)
    scheduler = llm._core.scheduler
    postprocess = scheduler.postprocess
    steps: dict[str, list[tuple[int, int]]] = {}
    batches = []

    def noted(batch: Batch, result: RunResult) -> None:
        for group, step in zip(batch.groups, result.steps, strict=True):
            if not group.plan.speculates:
                continue
            batches.append(group.live)
            rows = zip(group.requests, group.live, step.num_accepted, strict=True)
            for request, live, num_accepted in rows:
                # of steps ahead, rows that nobody reads
                if not request.is_finished:
                    steps.setdefault(request.request_id, []).append((live, num_accepted))
        postprocess(batch, result)

    scheduler.postprocess = noted
    outputs = llm.generate(list(prompts[: len(own)]), own)
    stats = llm.get_metrics()
    tokens = [output.outputs[0].token_ids for output in outputs]
    return Served(tokens, steps, [getattr(stats, name) for name in COUNTERS], batches, llm)
