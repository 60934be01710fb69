"""What `specc tune` measures of a draft over the target's cache."""

from __future__ import annotations

from pathlib import Path

import torch

from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from specc.tune.acceptance import STRIDE
from specc.tune.drafters.assistant import assistant_acceptance, assistant_chains
from tests import engines
from tests.assistants import (
    ASSISTANT_CASES,
    AssistantReference,
    TargetRows,
    double,
    draw_tensors,
    write_assistant,
)
from tests.lossless import Zoo
from tests.specc.tune.runs import LENGTH, PROMPT, drawn

CASE, CHILDREN, DEPTH = ASSISTANT_CASES["llama"], 48, 3


def test_chains_are_those_of_steps(zoo: Zoo, target: Path) -> None:
    """By depth and root: rows after a root are there, and no level sees them."""
    draft = zoo.once("assistant-llama", lambda path: write_assistant(path, CASE))
    config = CompileConfig(
        plans=(SpecPlan.from_widths((1, 1)),), max_batch_size=2, max_seq_len=64, block_size=4,
        prefill_chunk=7, backend="eager", probe=False,
    )  # fmt: skip
    path = zoo.once("assistants-tune", lambda made: engines.build(target, draft, made, config))
    engine = Engine.load(path)
    reference = AssistantReference(CASE, draw_tensors(CASE), TargetRows(double(target)))
    trajectory, expected = drawn(0), []
    tokens = trajectory.token_ids
    for root in range(PROMPT, LENGTH - 1, STRIDE):
        chain = []
        for level in range(min(DEPTH, LENGTH - 1 - root)):
            path_ids = tokens[root + 1 : root + 1 + level]
            best = reference.logits(tokens[: root + 1], path_ids).topk(CHILDREN).indices.tolist()
            wanted = tokens[root + level + 1]
            chain.append(best.index(wanted) if wanted in best else -1)
        expected.append(chain)
    with torch.inference_mode():
        assert assistant_chains(engine, 0, trajectory, CHILDREN, DEPTH) == expected
    assert len({rank for chain in expected for rank in chain}) > 3
    table = assistant_acceptance(engine, 0, [trajectory], CHILDREN, DEPTH)
    found = [chain[0] >= 0 for chain in expected]
    assert abs(sum(table[0]) - sum(found) / len(found)) < 1e-9
