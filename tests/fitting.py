"""What tests of fitting share: a tiny target, texts of it, and an engine beside a walk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.fit.chains import Followed
from specc.fit.target import Target
from specc.fit.texts import Texts
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import models
from tests.heads import LAYERS, VOCAB, WIDTH

BOUNDARIES = (2, 4, 5)


def tiny_target() -> Target:
    module = models.build_model(
        "llama",
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return Target(module, "tiny", None, ())


def read(
    target: Target,
    tokens: Tensor,
    context: int,
    is_greedy: bool = False,
    is_exact: bool = False,
) -> Texts:
    """Rows of one length, learned from the token at `context` on."""
    begins = torch.full((len(tokens),), context)
    ends = torch.full((len(tokens),), tokens.shape[1])
    return target.read(tokens, BOUNDARIES, begins, ends, is_greedy, is_exact)


def written(target: Target, prompts: Tensor, length: int) -> Tensor:
    """[n, context + length], prompts with the target's greedy output."""
    return torch.tensor(target.write(prompts.tolist(), length, 0.0, is_exact=True))


def check_walk(
    target: Target, draft: Path, prompts: Tensor, wanted: Tensor, walked: Followed, root: Path
) -> None:
    """Compare a walk with what an engine does.

    Args:
        target: of `tiny_target`.
        prompts: [n, length].
        wanted: [n, 20], the target's greedy output.
    """
    target.module.save_pretrained(root / "target")
    models.byte_tokenizer().save(str(root / "target" / "tokenizer.json"))
    plan = SpecPlan.from_widths((1,) * len(walked.accepted_at_depth))
    config = CompileConfig(
        plans=(plan,), max_batch_size=8, max_seq_len=64, backend="eager", probe=False
    )
    build(root / "target", draft, root / "engine", config)
    engine, found = Engine.load(root / "engine"), {}
    params: Any = SamplingParams(temperature=0, max_tokens=wanted.shape[1], ignore_eos=True)
    for name in ("off", plan.name):
        llm = LLM(engine, plan=name)
        found[name] = [
            list(output.outputs[0].token_ids) for output in llm.generate(prompts.tolist(), params)
        ]
    assert found["off"] == found[plan.name] == wanted.tolist()
    stats = llm.get_metrics()
    assert stats.num_steps == walked.steps
    assert stats.accepted_per_depth == pytest.approx(list(walked.accepted_at_depth), abs=1e-3)
    assert stats.mean_acceptance_length == pytest.approx(walked.acceptance_length, abs=1e-3)
