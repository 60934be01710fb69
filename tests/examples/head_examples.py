"""What the tests of trainers share: the script, a target, and an engine beside a walk."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import models
from tests.heads import LAYERS, VOCAB, WIDTH

_EXAMPLES = Path(__file__).parents[2] / "examples" / "training"
_MODULES = (
    "train_block_drafter", "block_drafter", "train_eagle_head", "eagle_head", "train_hybrid",
    "delta_rule", "head_files", "head_loop", "head_loss", "head_prompts", "head_texts",
    "head_training", "hybrid_eval", "hybrid_model", "pair_data", "pair_eval", "pair_parts",
    "pair_policy",
)  # fmt: skip


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """An example; it and the modules beside it are no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "passive")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.syspath_prepend(str(_EXAMPLES))
        for module in _MODULES:
            patch.delitem(sys.modules, module, raising=False)
        yield importlib.import_module(name)
        for module in _MODULES:
            sys.modules.pop(module, None)


def tiny_target() -> Any:
    return models.build_model(
        "llama",
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ).eval()


def check_walk(
    target: Any, draft: Path, prompts: Tensor, wanted: Tensor, walked: dict[str, Any], root: Path
) -> None:
    """Compare a walk with what an engine does.

    Args:
        target: of `tiny_target`.
        prompts: [n, length].
        wanted: [n, 20], the target's greedy output.
    """
    target.save_pretrained(root / "target")
    models.byte_tokenizer().save(str(root / "target" / "tokenizer.json"))
    plan = SpecPlan.from_widths((1,) * len(walked["accepted_at_depth"]))
    config = CompileConfig(
        plans=(plan,), max_batch_size=8, max_seq_len=64, backend="eager", probe=False
    )
    build(root / "target", draft, root / "engine", config)
    engine, found = Engine.load(root / "engine"), {}
    params = SamplingParams(temperature=0, max_tokens=wanted.shape[1], ignore_eos=True)
    for name in ("off", plan.name):
        llm = LLM(engine, plan=name)
        found[name] = [
            list(output.outputs[0].token_ids) for output in llm.generate(prompts.tolist(), params)
        ]
    assert found["off"] == found[plan.name] == wanted.tolist()
    stats = llm.get_metrics()
    assert stats.num_steps == walked["steps"]
    assert stats.accepted_per_depth == pytest.approx(walked["accepted_at_depth"], abs=1e-3)
    assert stats.mean_acceptance_length == pytest.approx(walked["acceptance_length"], abs=1e-3)
