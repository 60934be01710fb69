"""Block drafters in captured steps: the rows that they keep, and outputs, whatever was queued."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.block_heads import BLOCK_CASES, draw_tensors, write_block
from tests.block_reference import BlockReference
from tests.lossless import Zoo
from tests.runtime.block_rig import BlockOracle
from tests.runtime.draft_cases import SIZES, write_target
from tests.runtime.head_rig import BLOCK, CHAIN, DYNAMIC, TREE, load, options, prompts_of, serve
from tests.tiers import only

# a block whose rows see each other, ones whose layers differ, and logits that tokens change
CASES = (
    "z-lab", "z-lab-mixed", "speculators-mixed", "dspark-deepspec", "dspark-speculators",
    "dspark-gated", "dspark-rnn",
)  # fmt: skip
MERGED = SpecPlan.from_widths((2, 1), ("draft_0", "draft_1"), "merge")
VOTED = SpecPlan.from_widths((1, 1), ("draft_0", "draft_1", "lookup-3"), "vote")
SLOW = pytest.mark.slow
Make = Callable[..., tuple[Path, BlockOracle]]


@pytest.fixture(scope="module")
def engine_of(zoo: Zoo) -> Make:
    """An engine for CUDA, which needs no GPU to compile, and what its drafter computes."""
    target = write_target(zoo)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ends = (model.get_input_embeddings(), model.get_output_embeddings())

    def make(
        name: str, label: str = "cuda", has_other: bool = False, **changes: Any
    ) -> tuple[Path, BlockOracle]:
        drafts = [zoo.once(f"block-{name}", lambda path: write_block(path, BLOCK_CASES[name]))]
        if has_other:
            sizes = {**SIZES, "num_hidden_layers": 1}
            other = zoo.once("head-beside", lambda p: models.save_tiny("llama", p, 77, **sizes))
            drafts.insert(0, other)
        config = options(backend="cuda", **changes)
        path = zoo.once(
            f"blocks-{name}-{label}", lambda made: engines.build(target, drafts, made, config)
        )
        weights = (end.weight.detach() for end in ends)
        case = BLOCK_CASES[name]
        reference = BlockReference(case, draw_tensors(case), *weights)
        return path, BlockOracle(model, reference, int(has_other))

    return make


def outputs(core: EngineCore, oracle: BlockOracle, device: Any, **given: Any) -> list[list[int]]:
    """Of requests whose rows were right after every step."""
    oracle.reset()
    requests = serve(core, oracle, prompts_of(BLOCK), temperature=1.0, **given)
    assert device.tapes
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize(
    ("name", "plan"),
    only(
        ["dspark-speculators-tree"],
        [
            pytest.param(name, plan, id=f"{name}-{kind}")
            for name in CASES
            for kind, plan in (("chain", CHAIN), ("tree", TREE), ("dynamic", DYNAMIC))
        ],
    ),
)
def test_rows_of_captured_steps(name: str, plan: SpecPlan, engine_of: Make, device: Any) -> None:
    """Steps are queued ahead of results; graphs run with the oracles of their operators."""
    path, oracle = engine_of(name)
    engine = load(path, capture=CaptureLimits.lazy())
    found = outputs(EngineCore(engine, plan.name), oracle, device)
    assert oracle.num_rows > 300
    assert engine.steps[plan.name].is_captured(1)
    plain = load(path, capture=CaptureLimits.lazy())
    assert found == outputs(EngineCore(plain, "off"), oracle, device)


@pytest.mark.parametrize(
    ("name", "plan"),
    only(
        ["dspark-speculators-tree"],
        [
            pytest.param(name, plan, id=f"{name}-{kind}")
            for name in CASES
            for kind, plan in (("chain", CHAIN), ("tree", TREE))
        ],
    ),
)
def test_logits_of_captured_steps(name: str, plan: SpecPlan, engine_of: Make, device: Any) -> None:
    """What children of every node are drawn from; rows do not depend on what is proposed."""
    path, oracle = engine_of(name)
    core = EngineCore(load(path, capture=CaptureLimits.lazy()), plan.name)
    oracle.check_trees(core, plan)
    outputs(core, oracle, device, num_tokens=6)
    assert core.engine.steps[plan.name].is_captured(1)
    assert oracle.num_nodes > 10 * (plan.num_nodes - len(plan.tree.leaves))


def test_blocks_beyond_the_last_position(engine_of: Make, device: Any) -> None:
    """A sequence ends where the engine's positions do; a block is longer than its tree is deep."""
    name = "z-lab-mixed"
    path, _ = engine_of(name, "cuda-chain", plans=(CHAIN,))
    engine, found = Engine.load(path, capture=CaptureLimits.lazy()), []
    prompt = [token for text in prompts_of(BLOCK) for token in text][: engine.max_seq_len - 9]
    for plan in (CHAIN.name, "off"):
        core = EngineCore(engine, plan)
        params = SamplingParams(max_tokens=1000, ignore_eos=True, temperature=1.0, seed=1)
        request = core.requests.make(prompt, params)
        core.scheduler.add(request)
        while core.scheduler.has_work:
            core.advance()
        found.append(request.token_ids)
    assert found[0] == found[1]
    assert len(found[0]) == engine.max_seq_len
    # the last root that has positions for its tree has none for all rows of its block
    last_root = engine.position_limit - 1 - CHAIN.max_depth
    assert last_root + BLOCK_CASES[name].size > engine.position_limit


@SLOW
@pytest.mark.parametrize("plan", [MERGED, VOTED], ids=lambda plan: plan.name)
@pytest.mark.parametrize("name", ["z-lab", "dspark-deepspec"])
def test_beside_other_drafts(name: str, plan: SpecPlan, engine_of: Make, device: Any) -> None:
    path, oracle = engine_of(name, "cuda-beside", True, plans=(MERGED, VOTED))
    engine = load(path, capture=CaptureLimits.lazy())
    found = outputs(EngineCore(engine, plan.name), oracle, device, num_tokens=8)
    plain = load(path, capture=CaptureLimits.lazy())
    assert found == outputs(EngineCore(plain, "off"), oracle, device, num_tokens=8)


@SLOW
@pytest.mark.parametrize("name", ["z-lab", "dspark-deepspec"])
def test_trees_in_tiles(name: str, engine_of: Make, device: Any) -> None:
    """The target passes over parts of the tree; the drafter over its block as ever."""
    tiled = SpecPlan("tiled", (2, 2, 1), tile=4 if name == "z-lab" else 1)
    path, oracle = engine_of(name, "cuda-tiles", plans=(tiled,))
    engine = load(path, capture=CaptureLimits.lazy())
    found = outputs(EngineCore(engine, "tiled"), oracle, device)
    plain = load(path, capture=CaptureLimits.lazy())
    assert found == outputs(EngineCore(plain, "off"), oracle, device)


@SLOW
@pytest.mark.parametrize(
    ("name", "plan"),
    [("z-lab-mixed", TREE), ("speculators-mixed", TREE), ("dspark-speculators", DYNAMIC)],
    ids=["z-lab-mixed", "speculators-mixed", "dspark-speculators"],
)
def test_rows_of_the_kernels(
    name: str, plan: SpecPlan, engine_of: Make, device: Any, triton_kernels: None
) -> None:
    """All of it with the Triton kernels, in their interpreter: one request, a few steps."""
    path, oracle = engine_of(name)
    core = EngineCore(load(path, capture=CaptureLimits(sizes=(1,), max_seconds=-1)), plan.name)
    serve(core, oracle, prompts_of(BLOCK)[4:5], num_tokens=6)
    assert oracle.num_rows > 20


@SLOW
def test_a_long_prompt_in_one_pass(engine_of: Make, device: Any, triton_kernels: None) -> None:
    """More tokens than a word has bits, where the program itself says what rows see."""
    path, oracle = engine_of("z-lab-mixed", "cuda-long", max_seq_len=128, prefill_chunk=100)
    core = EngineCore(load(path, capture=CaptureLimits(sizes=(1,), max_seconds=-1)), TREE.name)
    prompt = [token for text in prompts_of(BLOCK) for token in text] * 2
    serve(core, oracle, [prompt[:90]], num_tokens=4)
    assert oracle.num_rows > 90


@SLOW
@pytest.mark.parametrize(("chunk", "pads"), [(7, False), (100, True)])
def test_words_follow_the_chunk(chunk: int, pads: bool, engine_of: Make) -> None:
    """Not the length of sequences: a word has a bit for every token of a short pass."""
    sizes = {"prefill_chunk": chunk, "max_seq_len": 200, "plans": (TREE,)}
    path, _ = engine_of("z-lab-mixed", f"chunk-{chunk}", **sizes)
    graph = json.loads((path / "draft-0" / "program.json").read_text())["graph"]
    assert any("constant_pad" in node.get("target", "") for node in graph["nodes"]) == pads
