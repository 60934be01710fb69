"""Engines whose target has stages generate what the whole one does, and keep the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import read_manifest
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.ranks.answers import checksum
from specc.sampling.params import SamplingParams
from tests import models
from tests.lossless import Zoo
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.ranks.test_led_engine import (
    COUPLED,
    GRAMMAR,
    GREEDY,
    LOGPROBS,
    MSS,
    NUM_TOKENS,
    PLAN_IDS,
    cases,
    generate,
    params,
    rule_of,
)
from tests.runtime.ranks.test_sharded_engine import FEW, PLAIN, TOLERANCE, path_of

# ranks of a stage, and stages
SHAPES = [(1, 2), (2, 2)]
SHAPE_IDS = ["pp-2", "tp-2-pp-2"]


def staged_path(
    zoo: Zoo, tensor: int, stages: int, backend: str = "eager", name: str = "llama"
) -> Path:
    """A compiled engine, whole or in stages."""
    return path_of(zoo, name, backend, tensor, stages)


class Engines:
    """Whole engines, and one in stages, that are open."""

    def __init__(self, zoo: Zoo) -> None:
        self._zoo = zoo
        self._open: dict[Any, Engine] = {}

    def whole(self, backend: str = "eager", name: str = "llama", **options: Any) -> Engine:
        return self._load((1, 1), backend, name, **options)

    def staged(
        self, shape: tuple[int, int], backend: str = "eager", name: str = "llama", **options: Any
    ) -> Engine:
        key = (shape, backend, name, *options.items())
        if key not in self._open:
            self.close()
        ranks = replace(OPTIONS, num_ranks=shape[0] * shape[1])
        return self._load(shape, backend, name, ranks=ranks, **options)

    def _load(self, shape: tuple[int, int], backend: str, name: str, **options: Any) -> Engine:
        key = (shape, backend, name, *(item for item in options.items() if item[0] != "ranks"))
        if key not in self._open:
            path = staged_path(self._zoo, *shape, backend, name)
            self._open[key] = Engine.load(path, **options)
        return self._open[key]

    def close(self) -> None:
        """End the ranks of the engine that has stages."""
        for key in [key for key in self._open if key[0] != (1, 1)]:
            self._open.pop(key).close()


@pytest.fixture(scope="module")
def load(zoo: Zoo) -> Iterator[Engines]:
    loaded = Engines(zoo)
    yield loaded
    loaded.close()


def assert_same(
    whole: Engine,
    staged: Engine,
    plan: str,
    given: list[SamplingParams],
    micro_batches: int | None = 1,
) -> None:
    """One batch at a time is as wide as that of one stage, so rows are the same, too."""
    wanted = generate(LLM(whole, plan=plan), given)
    llm = LLM(staged, plan=plan, micro_batches=micro_batches)
    found = generate(llm, given)
    assert (llm._in_flight.num_beside > NUM_TOKENS // 8) == (micro_batches != 1)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert len({tuple(tokens) for tokens, _ in wanted}) > 1
    for (_, mine), (_, other) in zip(found, wanted, strict=True):
        assert (mine is None) == (other is None)
        for row, expected in zip(mine or [], other or [], strict=True):
            assert row == pytest.approx(expected, abs=TOLERANCE)


def assert_same_rows(whole: Engine, staged: Engine) -> None:
    """Of stages of one rank each: the layers of all of them are those of the whole target."""
    (slab,) = whole.cache.slabs["target"]
    manifest = staged.manifest
    assert manifest is not None
    wanted = [checksum([slab[list(stage.layers)]]) for stage in manifest.stages]
    assert staged.target.leader.checksums(staged.cache.slabs["target"]) == wanted  # type: ignore[attr-defined]


@pytest.mark.parametrize(("plan", "options"), cases({"off-greedy", "tree-3-2-1-greedy"}))
def test_two_stages_generate_what_one_does(
    load: Engines, plan: str, options: dict[str, Any]
) -> None:
    whole, staged = load.whole(**FEW), load.staged((1, 2), **FEW)
    assert_same(whole, staged, plan, params(4, **rule_of(plan, options)))
    assert_same_rows(whole, staged)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES[:1], ids=SHAPE_IDS[:1])
def test_requests_that_give_way_and_prefixes_that_are_shared(
    load: Engines, shape: tuple[int, int]
) -> None:
    whole, staged = load.whole(**FEW), load.staged(shape, **FEW)
    given = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True) for _ in range(4)]
    llm = LLM(staged, plan="tree-3-2-1", micro_batches=1)
    assert generate(llm, given) == generate(LLM(whole, plan="tree-3-2-1"), given)
    assert llm.get_metrics().num_preemptions > 0
    assert_same_rows(whole, staged)
    prompt, found = models.prompts()[-1], []
    for engine in (whole, staged):
        llm = LLM(engine, plan="tree-3-2-1")
        llm.generate([prompt], given[0])
        again = llm.generate([[*prompt, 1, 2], [*prompt, 3]], given[:2])
        assert llm.get_metrics().num_cached_tokens > 0
        found.append([output.outputs[0].token_ids for output in again])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "options"), cases())
def test_stages_of_two_ranks_generate_what_one_rank_does(
    load: Engines, plan: str, options: dict[str, Any]
) -> None:
    given = params(4, **rule_of(plan, options))
    assert_same(load.whole(), load.staged((2, 2)), plan, given)


@pytest.mark.slow
def test_stages_of_two_ranks(load: Engines) -> None:
    """Sums within a stage, tokens that its ranks draw, and logits that they gather."""
    for options in (GREEDY, MSS):
        assert_same(load.whole(), load.staged((2, 2)), "tree-3-2-1", params(3, **options))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixtral"])
def test_compiled_stages(load: Engines, name: str, shape: tuple[int, int]) -> None:
    whole, staged = load.whole("cpu", name), load.staged(shape, "cpu", name)
    for plan in PLAN_IDS:
        for options in (GREEDY, PLAIN, COUPLED, MSS, LOGPROBS, GRAMMAR):
            if not (plan.startswith("tiles") and options in (LOGPROBS, GRAMMAR)):
                given = params(3, **rule_of(plan, options))
                assert_same(whole, staged, plan, given)
                assert_same(whole, staged, plan, given, micro_batches=None)


def test_a_rank_has_its_part_alone(zoo: Zoo) -> None:
    """Files, caches and memory of a stage; the manifest says what the whole is."""
    path = staged_path(zoo, 1, 2)
    manifest, whole = read_manifest(path), read_manifest(staged_path(zoo, 1, 1))
    assert manifest.num_ranks == 2
    assert manifest.models[0].num_parameters == whole.models[0].num_parameters
    sizes = [(path / name).stat().st_size for name in manifest.rank_files]
    total = whole.memory_plan["target"].weights
    # frequencies of positions are in all stages
    assert total <= sum(stage.memory.weights for stage in manifest.stages) < total + 1024
    for size, stage in zip(sizes, manifest.stages, strict=True):
        assert stage.memory.weights <= size < stage.memory.weights + 8192
        assert 0.3 < stage.memory.weights / total < 0.7
    caches = [stage.memory.cache for stage in manifest.stages]
    assert sum(caches) == whole.memory_plan["target"].cache
    assert min(caches) > 0
