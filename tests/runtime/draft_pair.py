"""An engine whose draft is never right, and a file of weights that makes it always right."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specc.compiler.draft_weights import write_draft_weights
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.conftest import save_tiny_llama

PROMPTS = [[5, 6, 7, 8], [40, 41], [9] * 7, list(range(60, 83))]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@dataclass
class Pair:
    """What was made, and a file of the weights that the engine has."""

    target: Path
    engine: Path
    right: Path
    wrong: Path


def make_pair(root: Path, backend: str) -> Pair:
    save_tiny_llama(root / "target", 1, 1)
    save_tiny_llama(root / "draft", 2, 1)
    plans = (SpecPlan.from_widths((1, 1, 1)),)
    config = CompileConfig(
        plans=plans, max_seq_len=96, max_batch_size=4, backend=backend, block_size=4, probe=False
    )
    engine = engines.build(root / "target", root / "draft", root / "engine", config)
    for name, checkpoint in (("right", "target"), ("wrong", "draft")):
        write_draft_weights(root / checkpoint, engine, root / f"{name}.safetensors")
    return Pair(root / "target", engine, root / "right.safetensors", root / "wrong.safetensors")


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, PARAMS)]


def accepted(llm: LLM, prompts: list[list[int]] = PROMPTS) -> float:
    """Share of draft tokens that this run has accepted."""
    before = llm.get_metrics()
    tokens(llm, prompts)
    after = llm.get_metrics()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    return (after.num_accepted_tokens - before.num_accepted_tokens) / drafted


def target_bytes(engine: Engine) -> str:
    digest = hashlib.sha256()
    for key, tensor in sorted(engine.target.weights.items()):
        digest.update(key.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def draft_tensors(engine: Engine) -> dict[str, Tensor]:
    drafts = engine.draft_weights
    return {key: x.clone() for key, x in drafts.tensors(drafts.form()).items()}
