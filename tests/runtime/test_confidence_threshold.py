"""`--confidence-threshold`: how it comes to an engine, and where it would change nothing."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.manifest_entries import ParallelEntry
from specc.errors import ConfigError, RequestError
from specc.runtime.core import EngineCore
from specc.runtime.llm import LLM
from specc.runtime.policies.base import FixedPolicy
from specc.runtime.runner import Runner
from specc.sampling.params import SamplingParams
from tests import engines
from tests.block_heads import BLOCK_CASES, write_block
from tests.lossless import Zoo
from tests.runtime.draft_cases import write_target
from tests.runtime.head_rig import CHAIN, DYNAMIC, TREE, load, options


@pytest.fixture(scope="module")
def compiled(zoo: Zoo) -> Callable[..., Path]:
    """An engine with a block drafter."""
    target = write_target(zoo)

    def make(name: str = "z-lab", label: str = "eager", **changes: Any) -> Path:
        drafter = zoo.once(f"block-{name}", lambda path: write_block(path, BLOCK_CASES[name]))

        def write(path: Path) -> None:
            engines.build(target, drafter, path, options(**changes))

        return zoo.once(f"blocks-{name}-{label}", write)

    return make


def test_the_option_comes_to_steps_and_requests(compiled: Callable[..., Path]) -> None:
    """Of `LLM`: all drafts end at once where none can be as likely as that."""
    engine = load(compiled("dspark-deepspec"))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(engine, plan=CHAIN.name) as llm:
        plain = llm.generate([[3, 4, 5]], params)[0].outputs[0].token_ids
        assert llm.get_metrics().num_draft_tokens > 0
    with LLM(engine, plan=CHAIN.name, confidence_threshold=1.0) as llm:
        assert llm.generate([[3, 4, 5]], params)[0].outputs[0].token_ids == plain
        assert llm.get_metrics().num_draft_tokens == 0
        with pytest.raises(RequestError, match="rule='mss', and --confidence-threshold"):
            llm.generate([[3, 4, 5]], SamplingParams(temperature=1.0, rule="mss"))


def test_where_no_drafter_says_how_sure_it_is(compiled: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"threshold 0\.5, and the plan chain-3") as caught:
        EngineCore(load(compiled()), CHAIN.name, confidence_threshold=0.5)
    assert caught.value.needed.startswith("a chain or a static tree of a DSpark drafter")
    with pytest.raises(ConfigError, match=r"threshold 0\.5, and an engine of the plans chain-3, "):
        EngineCore(load(compiled()), policy="best", confidence_threshold=0.5)


def test_a_threshold_that_would_change_nothing(compiled: Callable[..., Path]) -> None:
    """The plan in use counts, and what is refused is said as it is."""
    engine = load(compiled("dspark-deepspec"))
    for plan in (DYNAMIC.name, "off"):
        with pytest.raises(ConfigError, match=f"and the plan {plan}, of which no part") as caught:
            EngineCore(engine, plan, confidence_threshold=0.5)
        assert caught.value.needed.endswith(f": {CHAIN.name}, {TREE.name}")
        assert caught.value.do == f"leave it out, or pass --plan {CHAIN.name}"
    # a policy may choose the others, too
    EngineCore(engine, policy=FixedPolicy(DYNAMIC.name), confidence_threshold=0.5)
    # of an engine whose drafter has lost its head
    steps = {name: copy(step) for name, step in engine.steps.items()}
    for step in steps.values():
        bare = {block.name: block.without_confidence() for block in step.plan.models}
        step.plan = step.plan.with_drafters(bare)
    with pytest.raises(ConfigError, match=f"and the plan {TREE.name}") as caught:
        EngineCore(replace(engine, steps=steps), TREE.name, confidence_threshold=0.5)
    assert caught.value.needed.startswith("a chain or a static tree of a DSpark drafter that has")


def test_a_threshold_where_whole_trees_are_verified(compiled: Callable[..., Path]) -> None:
    engine = load(compiled("dspark-deepspec"))
    assert engine.manifest is not None
    two = replace(engine.manifest, parallel=ParallelEntry(2, ("target",)))
    # ranks, and passes over padded batches
    padded = replace(engine, backend="tensorrt", runner_type=Runner)
    for other in (padded, replace(engine, manifest=two)):
        with pytest.raises(ConfigError, match="ask no drafter how much to verify") as caught:
            EngineCore(other, TREE.name, confidence_threshold=0.5)
        assert caught.value.needed == "an engine of the backends cpu, cuda or eager, of one rank"


def test_a_threshold_and_trees_in_tiles(compiled: Callable[..., Path]) -> None:
    engine = load(compiled("dspark-deepspec"))
    step = copy(engine.steps[CHAIN.name])
    step.plan = replace(step.plan, tile=2)
    engine = replace(engine, steps={CHAIN.name: step})
    with pytest.raises(ConfigError, match="chain-3, whose trees are verified in tiles") as caught:
        EngineCore(engine, confidence_threshold=0.5)
    assert caught.value.do == "leave it out, or compile with a larger --max-logits-mb"
