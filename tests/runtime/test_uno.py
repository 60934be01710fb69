"""Uno: noise through an adapter proposes, and what is put out is the target's without it.

The reference is a model of transformers whose projections add the adapter's term for chosen rows:
of a pass over noise, those after the newest token. What verification computes is compared by the
bits of outputs with those of plain decoding, and by rows of the cache with those of one pass.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.compiler import build as compiler
from specc.drafters.registry import parse_draft
from specc.errors import ConfigError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.scheduling.request import Request
from specc.speculation.dynamic_tree import BudgetTree
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan
from tests.adapters import ATTENTION, adapted
from tests.lossless import Zoo
from tests.runtime.head_rig import CLOSE, owner_of
from tests.runtime.test_adapters import Rig, bits, options, params, prompts
from tests.runtime.test_views import RowOracle
from tests.runtime.test_views import serve as serve_views

DRAFT, NUMBER = "uno_a0", 0
KINDS: tuple[dict[str, Any], ...] = (
    {"modules": ("q_proj", "v_proj", "up_proj")},
    {"modules": ATTENTION},
)
PLANS = (
    SpecPlan.from_widths(()),
    SpecPlan.from_widths((1,), (DRAFT,)),
    SpecPlan.from_widths((1, 1, 1), (DRAFT,)),
    SpecPlan.from_widths((3, 2, 1), (DRAFT,)),
    SpecPlan.from_widths((2, 2, 1), (DRAFT,)),
    SpecPlan.from_dynamic(DynamicTree(8, 3, 3), DRAFT),
    SpecPlan.from_dynamic(BudgetTree.of((2, 3, 2)), DRAFT),
    SpecPlan.from_widths((2, 1), (DRAFT, "draft_0"), MERGE),
)
IDS = [plan.name for plan in PLANS]


@pytest.fixture(scope="module")
def rig(zoo: Zoo) -> Rig:
    return Rig(zoo, "llama", KINDS, False, "uno")


def path_of(rig: Rig, backend: str) -> Path:
    return rig.engine(backend, backend=backend, plans=PLANS)


@functools.cache
def load(path: Path) -> Engine:
    engine = Engine.load(path, num_threads=1)
    for slabs in engine.cache.slabs.values():
        for slab in slabs:
            slab.normal_(0.0, 30.0)
    return engine


class PassOracle:
    """Compares each pass over noise with that of the reference."""

    def __init__(self, rig: Rig, core: EngineCore) -> None:
        self._model, self._adapters = rig.model, {i: rig.adapter(i) for i in range(len(KINDS))}
        self._core, self.num_rows = core, 0
        self.noise: set[int] = set()
        target: Any = core.engine.target
        self.handle = target.register_forward_hook(
            lambda _, given, logits: self._look(given, logits)
        )

    def _look(self, given: Any, logits: Tensor) -> None:
        tokens, _, q_start, _, cache_len, _, table, logit_rows, adapters = given
        if len(logits) != len(tokens) or not self._core.scheduler.running:
            return
        depth = int(q_start[1])
        if depth < 2 or adapters[0] == adapters[1] or int(adapters[1]) != NUMBER:
            return
        for b in range(len(q_start) - 1):
            own = slice(int(q_start[b]), int(q_start[b + 1]))
            request = owner_of(self._core, table[b].tolist())
            number = -1 if request.adapter is None else request.adapter
            assert len(request.token_ids) - 1 == int(cache_len[b])
            ids = [*request.token_ids, *tokens[own].tolist()[1:]]
            assert tokens[own][0] == request.token_ids[-1]
            rows = torch.full((len(ids),), number)
            rows[len(request.token_ids) :] = NUMBER
            with torch.inference_mode(), adapted(self._model, self._adapters, rows):
                wanted = self._model(torch.tensor([ids]), use_cache=False).logits[0]
            wanted = wanted[len(request.token_ids) - 1 :]
            for place, row in enumerate(logit_rows.tolist()):
                if own.start <= row < own.stop:
                    torch.testing.assert_close(logits[place], wanted[row - own.start], **CLOSE)
                    self.num_rows += 1
            self.noise |= set(ids[len(request.token_ids) :])


class AdaptedRows(RowOracle):
    """Rows of requests that have an adapter."""

    def __init__(self, plain: Engine) -> None:
        super().__init__(plain)
        self._target = plain.target

    @torch.inference_mode()
    def rows(self, engine: Engine, request: Request) -> tuple[Tensor, Tensor]:
        number = -1 if request.adapter is None else request.adapter
        own, self._plain.target = self._plain.target, self._through(number)
        try:
            return super().rows(engine, request)
        finally:
            self._plain.target = own

    def _through(self, number: int) -> Any:
        return lambda *given: self._target(
            *given, torch.full((len(given[0]), 1), number, dtype=torch.int32)
        )


@pytest.mark.parametrize("plan", IDS[2:5])
def test_passes_and_rows(rig, plan):
    engine = load(path_of(rig, "eager"))
    core = EngineCore(engine, plan)
    oracle, rows = PassOracle(rig, core), AdaptedRows(Engine.load(path_of(rig, "eager")))
    own = [params(number, logprobs=None, max_tokens=14) for number in (None, 1, None, 0)]
    try:
        serve_views(core, prompts(4), own, lambda request: rows.check(engine, request))
    finally:
        oracle.handle.remove()
    assert oracle.num_rows > 60
    assert rows.num_rows > 60
    # tokens of everywhere
    assert len(oracle.noise) > 15


@pytest.mark.parametrize("plan", IDS[1:])
def test_outputs_are_those_of_plain_decoding(rig, plan):
    """To the bit: an adapter that is left on while verifying is another model."""
    engine = load(path_of(rig, "cpu"))
    asked = [params(number) for number in (None, 1, 0, None)]
    wanted = [bits(x) for x in LLM(engine, plan="off").generate(prompts(4), asked)]
    llm = LLM(engine, plan=plan)
    assert [bits(x) for x in llm.generate(prompts(4), asked)] == wanted
    for prompt, own, one in zip(prompts(4), asked, wanted, strict=True):
        assert bits(llm.generate([prompt], own)[0]) == one


@pytest.mark.parametrize("rule", ["greedy", "coupled", "mss", "swor"])
def test_the_first_token_is_the_targets_own(rig, rule):
    """Its row has the request's own weights: it is always accepted, and under delta by chance."""
    llm = LLM(load(path_of(rig, "cpu")), plan=PLANS[2].name)
    drawn = {} if rule == "greedy" else {"temperature": 1.0, "rule": rule, "top_p": 0.9}
    asked = [params(i, logprobs=None, max_tokens=40, seed=3, **drawn) for i in (None, 1)]
    llm.generate(prompts(2), asked)
    stats = llm.get_metrics()
    assert stats.num_spec_steps > 10
    assert stats.accepted_per_depth[0] > 0.97


def test_sampled_tokens_are_those_of_plain_decoding(rig):
    engine = load(path_of(rig, "cpu"))
    for rule in ("coupled", "delta"):
        asked = [params(i, temperature=0.9, seed=i or 7, rule=rule) for i in (None, 1, 0)]
        wanted = [bits(x) for x in LLM(engine, plan="off").generate(prompts(3), asked)]
        for plan in (IDS[3], IDS[5]):
            assert [bits(x) for x in LLM(engine, plan=plan).generate(prompts(3), asked)] == wanted


@pytest.mark.parametrize("lora", [(), ("other=DIR",)])
def test_an_adapter_that_there_is_not(rig, tmp_path, lora):
    given = tuple(x.replace("DIR", str(rig.adapter(0))) for x in lora)
    config = replace(options(plans=PLANS[1:2]), lora=given)
    with pytest.raises(ConfigError, match="--lora a0=DIR"):
        compiler.build(rig.zoo.checkpoint(rig.name), None, tmp_path / "engine", config)


def test_names():
    with pytest.raises(ConfigError, match="uno:NAME"):
        parse_draft("uno:a-b")
