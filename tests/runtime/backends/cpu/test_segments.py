"""Segments beside the same target as a whole: logits, caches and tokens; the bits are the same.

A segment has the operators of the whole, which is cut after its last phase. Each architecture is
compiled twice; figures are left in build/compiled_segments.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.config import CompileConfig
from specc.runtime.backends.cpu.program import CpuProgram
from specc.runtime.backends.cpu.segments import CpuSegments
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.lossless import Zoo, collect_figures
from tests.near_ties import Reference, forgive_near_ties, greedy_params
from tests.passes.shard.lockstep import assert_alike
from tests.runtime.backends.cpu.cpu_pair import Pair
from tests.runtime.backends.cpu.test_program import NARROW, pass_inputs

pytestmark = pytest.mark.slow

NAMES = (*models.ARCHITECTURES, "gemma3-tied")
# no draft to compile
PLAN = SpecPlan.from_widths((1, 1, 1), ("lookup-2",))
NUM_TOKENS = 48
# causal, and trees of one word of ancestors; beyond NARROW loops run on all threads
PASSES = [(1, None), (2, 1), (40, None), (NARROW, 1), (NARROW + 1, None), (200, None), (7, 1)]


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    yield from collect_figures(request.config.rootpath / "build" / "compiled_segments.json")


def compiled(zoo: Zoo, name: str, segments: bool) -> Path:
    config = CompileConfig(
        plans=(PLAN,),
        max_seq_len=models.MAX_SEQ_LEN,
        max_batch_size=5,
        backend="cpu",
        probe=False,
        segments=segments,
    )
    return zoo.once(
        f"{'segments' if segments else 'whole'}-{name}",
        lambda path: engines.build(zoo.checkpoint(name), (), path, config),
    )


@pytest.mark.parametrize("name", NAMES)
def test_compiled_segments_are_the_compiled_model(
    zoo: Zoo, figures: list[dict[str, Any]], name: str
) -> None:
    paths = [compiled(zoo, name, segments) for segments in (True, False)]
    cut, whole = map(Engine.load, paths)
    assert isinstance(cut.target, CpuSegments)
    assert isinstance(whole.target, CpuProgram)
    figures.append({"model": name} | compare_passes(Pair(paths[0], cut, whole)))
    figures[-1] |= compare_tokens(cut, whole, name)


def compare_passes(pair: Pair) -> dict[str, Any]:
    """Logits of all rows, and what is in all caches, after each pass."""
    pair.fill_caches()
    num_equal, largest = 0, 0.0
    with torch.inference_mode():
        for seed, (num_tokens, words) in enumerate(PASSES):
            inputs = pass_inputs(pair.eager, num_tokens, words, seed=seed)
            found, wanted = (e.target(*inputs) for e in (pair.compiled, pair.eager))
            assert_alike(found, wanted)
            parts = [(found, wanted), *caches(pair)]
            for one, other in parts:
                scale = other.abs().max().item()
                largest = max(largest, (one - other).abs().max().item() / scale)
            num_equal += all(torch.equal(one, other) for one, other in parts)
    assert num_equal == len(PASSES)
    return {"num_passes": len(PASSES), "equal_passes": num_equal, "largest_difference": largest}


def caches(pair: Pair) -> list[tuple[torch.Tensor, torch.Tensor]]:
    wanted = pair.eager.cache.environment
    found = pair.compiled.cache.environment
    assert found.keys() == wanted.keys()
    return [(found[name], wanted[name]) for name in wanted if found[name].is_floating_point()]


def compare_tokens(cut: Engine, whole: Engine, name: str) -> dict[str, Any]:
    """Greedy, token by token, off and with a chain."""
    prompts = models.prompts()
    wanted = [reference(whole, prompt) for prompt in prompts]
    ties = []
    for plan in ("off", PLAN.name):
        llm = LLM(cut, plan=plan, shares_prefixes=False)
        outputs = llm.generate([list(prompt) for prompt in prompts], greedy_params(NUM_TOKENS))
        for prompt, output, known in zip(prompts, outputs, wanted, strict=True):
            case = f"segments of {name} {plan} prompt of {len(prompt)}"
            ties += forgive_near_ties(llm, case, prompt, output.outputs[0].token_ids, known)
    return {
        "num_compared": 2 * len(prompts) * NUM_TOKENS,
        "forgiven_ties": [asdict(tie) for tie in ties],
    }


def reference(whole: Engine, prompt: Sequence[int]) -> Reference:
    """What the whole program generates, and its logits there, of one pass over all of it."""
    llm = LLM(whole, plan="off", shares_prefixes=False)
    (output,) = llm.generate([list(prompt)], greedy_params(NUM_TOKENS))
    tokens = list(output.outputs[0].token_ids)
    given = torch.tensor([*prompt, *tokens[:-1]])
    places = torch.arange(len(given))
    table = torch.arange(whole.cache.shape.blocks_per_sequence, dtype=torch.int32)[None]
    with torch.inference_mode():
        logits = whole.target(
            given,
            places,
            torch.tensor([0, len(given)], dtype=torch.int32),
            places.int(),
            torch.zeros(1, dtype=torch.int32),
            None,
            table,
            places[len(prompt) - 1 :],
        )
    return Reference(tokens, logits)
