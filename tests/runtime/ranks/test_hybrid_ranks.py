"""Targets whose layers keep states on several ranks, in stages and in segments.

Their greedy output equals `transformers.generate`, token for token, with every kind of plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import read_manifest
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests import engines, hybrids, models
from tests.lossless import Zoo, run_case
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.test_hybrid_architectures import PLANS, prompts

NUM_TOKENS = 16
TP: dict[str, Any] = {"tensor_parallel_size": 2}
PP: dict[str, Any] = {"pipeline_parallel_size": 2}
SHAPES: Mapping[str, dict[str, Any]] = {
    "whole": {}, "tp-2": TP, "pp-2": PP, "tp-2-pp-2": TP | PP, "segments": {"segments": True},
    "tp-2-segments": TP | {"segments": True},
}  # fmt: skip
OFF, CHAIN, TREE, DYNAMIC = PLANS
# whose layers cannot be parted: a value of the first one is read by all others
TOGETHER = ("zamba2",)


def path_of(zoo: Zoo, name: str, backend: str, shape: str) -> Path:
    """Chunks of 48 tokens, and states of prefixes every 32."""
    config = CompileConfig(
        plans=PLANS, dtype="float32", max_batch_size=4, max_seq_len=240, block_size=16,
        prefill_chunk=48, backend=backend, probe=False, state_grid=32, state_checkpoints=8,
        **SHAPES[shape],
    )  # fmt: skip
    files = zoo.checkpoint(name), zoo.checkpoint(name, draft="noisy")
    key = f"hybrid-ranks-{name}-{backend}-{shape}"
    return zoo.once(key, lambda path: engines.build(*files, path, config))


class Engines:
    """Engines that are open, at most one of them on several ranks."""

    def __init__(self, zoo: Zoo) -> None:
        self._zoo = zoo
        self._open: dict[Any, Engine] = {}

    def __call__(self, name: str, backend: str, shape: str, **options: Any) -> Engine:
        key = name, backend, shape, *options.items()
        if key not in self._open:
            self.close()
            path = path_of(self._zoo, name, backend, shape)
            count = read_manifest(path).num_ranks
            ranks = {} if count == 1 else {"ranks": replace(OPTIONS, num_ranks=count)}
            engine = Engine.load(path, **ranks, **options)
            assert engine.cache.states is not None
            for slab in (*engine.cache.states.states, *engine.cache.states.replay):
                slab.normal_(0.0, 30.0)
            self._open[key] = engine
        return self._open[key]

    def close(self) -> None:
        for engine in self._open.values():
            engine.close()
        self._open.clear()


@pytest.fixture(scope="module")
def load(zoo: Zoo) -> Iterator[Engines]:
    loaded = Engines(zoo)
    yield loaded
    loaded.close()


def cases() -> list[Any]:
    """One for each way of parting in the default tier."""
    usual = {("qwen3_5", "eager", "tp-2"), ("lfm2", "eager", "pp-2"), ("lfm2", "cpu", "segments")}
    return [
        pytest.param(*case, marks=() if case in usual else pytest.mark.slow, id="-".join(case))
        for name in models.HYBRIDS
        for backend in ("eager", "cpu")
        for shape in list(SHAPES)[1:]
        if shape == "tp-2" or name not in TOGETHER
        for case in [(name, backend, shape)]
    ]


@pytest.mark.parametrize(("name", "backend", "shape"), cases())
def test_greedy_equals_generate(
    zoo: Zoo, load: Engines, name: str, backend: str, shape: str
) -> None:
    engine = load(name, backend, shape)
    given = [prompt for prompt in prompts() if len(prompt) < 200]
    for plan in PLANS:
        outcome = run_case(zoo, name, engine, plan.name, given, NUM_TOKENS)
        assert outcome.num_compared == NUM_TOKENS * len(given)
        if plan.speculates:
            assert outcome.stats.mean_acceptance_length > 1.02, plan.name


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tp-2", "pp-2", "segments"])
@pytest.mark.parametrize("name", hybrids.COVERING)
def test_requests_that_give_way_and_prefixes_that_are_shared(
    zoo: Zoo, load: Engines, name: str, shape: str
) -> None:
    """A cache without room for all; then turns of a chat, which go on from states of the turns
    before: as many tokens are found as in the engine of one rank.
    """
    given = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found: list[Any] = []
    for kind in ("whole", shape):
        engine = load(name, "cpu", kind, kv_cache_tokens=176)
        for plan in (OFF, CHAIN, TREE):
            llm = LLM(engine, plan=plan.name)
            outputs = llm.generate([list(x) for x in prompts()[3:7]], given)
            assert llm.get_metrics().num_preemptions > 0
            tokens = [output.outputs[0].token_ids for output in outputs]
            llm, prompt = LLM(engine, plan=plan.name), list(prompts()[4])
            for _ in range(2):
                (output,) = llm.generate([prompt], replace(given, max_tokens=24))
                prompt = [*prompt, *output.outputs[0].token_ids, 1, 2]
                tokens.append(output.outputs[0].token_ids)
            found.append((tokens, llm.get_metrics().num_cached_tokens))
            assert found[-1][1] >= 32
    assert found[: len(found) // 2] == found[len(found) // 2 :]


@pytest.mark.slow
def test_a_rank_has_its_part_alone(zoo: Zoo) -> None:
    """Its states and replay rows, which its memory plan counts."""
    whole, cut, staged = (
        read_manifest(path_of(zoo, "qwen3_5", "cpu", shape)) for shape in ("whole", "tp-2", "pp-2")
    )
    memory = [manifest.memory_plan["target"] for manifest in (whole, cut)]
    assert 2 * memory[1].states == memory[0].states
    assert 2 * memory[1].checkpoints == memory[0].checkpoints
    stages = [stage.memory for stage in staged.stages]
    assert sum(x.states for x in stages) == memory[0].states
    assert min(x.states for x in stages) > 0
    layers = [layer for stage in staged.stages for layer in stage.state_layers]
    assert layers == list(range(len(whole.models[0].state_layers)))
