"""The cases of test_sampling_pair.py on an engine for ONNX."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from tests.runtime.test_sampling_pair import (
    ALL_CASES,
    NUM_PAIRS,
    PAIR,
    PLAN_IDS,
    check_pairs,
    make_engine,
    seeded,
)

# what onnxruntime computes is compared in the default tier; this is the sum of all of it
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("sampled-onnx"), "onnx")


@pytest.fixture(scope="module")
def target() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()


@pytest.mark.parametrize(("plan", "rule"), ALL_CASES)
def test_pairs_of_tokens_follow_the_targets_probabilities(
    engine: Engine, target: Any, plan: str, rule: str
) -> None:
    statistic, bound = check_pairs(engine, target, plan, rule, {"temperature": 0.8}, NUM_PAIRS)
    assert statistic < bound


@pytest.fixture(scope="module")
def plainly(engine: Engine) -> list[list[int]]:
    """What seeds give without speculation, one request after the other."""
    llm = LLM(engine, plan="off")
    return [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt, params in seeded(24)]


@pytest.mark.parametrize("plan", PLAN_IDS)
def test_seeds_give_the_tokens_of_plain_decoding(
    engine: Engine, plainly: list[list[int]], plan: str
) -> None:
    prompts, params = zip(*seeded(24), strict=True)
    llm = LLM(engine, plan=plan)
    outputs = llm.generate(list(prompts), list(params))
    same = [o.outputs[0].token_ids == wanted for o, wanted in zip(outputs, plainly, strict=True)]
    assert llm.get_metrics().num_accepted_tokens > 0
    # a pass of another width rounds otherwise, which may decide between two tokens once
    assert sum(same) >= len(same) - 1
