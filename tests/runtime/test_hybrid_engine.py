"""Engines of targets whose layers keep states, on the backends that take them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specc.bench.text_scores import ScoredEngine
from specc.errors import EngineError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from specc.tune.timed_pass import time_pass
from tests.runtime.hybrid_engine import save_hybrid
from tests.runtime.test_states import greedy, prompt_of
from tests.specc.artifact.hostile_engines import copy_engine, write

CHAIN, TREE = SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((2, 2, 1))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 2, 3))
PLANS = [OFF, CHAIN, TREE, DYNAMIC]
PROMPTS = [prompt_of(length) for length in (1, 9, 16, 33)]
TOKENS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an engine for each backend."""
    made = tmp_path_factory.mktemp("hybrid")
    for backend in ("eager", "cpu"):
        save_hybrid(made / backend, PLANS, backend=backend)
    return made


@pytest.fixture(scope="module", params=["eager", "cpu"])
def engine(request: pytest.FixtureRequest, directory: Path) -> Engine:
    return Engine.load(directory / request.param)


class Recorded:
    """Outputs, and states of each request by its committed rows."""

    def __init__(self, engine: Engine, plan: str, multi_step_s: float = 0.0) -> None:
        self.core = EngineCore(engine, plan, shares_prefixes=False, multi_step_s=multi_step_s)
        self.requests = [self.core.requests.make(p, greedy(TOKENS)) for p in PROMPTS]
        self.states: dict[tuple[str, int], list[Tensor]] = {}
        for request in self.requests:
            self.core.scheduler.add(request)
        states = engine.cache.states
        assert states is not None
        while self.core.scheduler.has_work:
            assert self.core.advance()
            for request in self.core.scheduler.running:
                if request.cache_len:
                    key = request.request_id, request.cache_len
                    place = request.state_place
                    self.states[key] = [slab[:, place].clone() for slab in states.states]

    @property
    def outputs(self) -> list[list[int]]:
        return [request.output_token_ids for request in self.requests]


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Recorded:
    return Recorded(engine, OFF.name)


@pytest.mark.parametrize("plan", PLANS[1:], ids=lambda plan: plan.name)
def test_states_are_those_of_plain_decoding(
    engine: Engine, plain: Recorded, plan: SpecPlan
) -> None:
    """Bit for bit, whatever was accepted."""
    found = Recorded(engine, plan.name)
    assert found.outputs == plain.outputs
    stats = found.core.scheduler.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    compared = 0
    for key, states in found.states.items():
        if key in plain.states:
            compared += 1
            for own, wanted in zip(states, plain.states[key], strict=True):
                assert torch.equal(own, wanted), key
    assert compared > 20


def test_steps_in_a_row(directory: Path) -> None:
    """In one call of the library; with prefixes, until states are to be kept."""
    engine = Engine.load(directory / "cpu")
    plain = Recorded(engine, OFF.name)
    for plan in (OFF, CHAIN):
        found = Recorded(engine, plan.name, multi_step_s=60.0)
        assert found.outputs == plain.outputs
        for key in found.states.keys() & plain.states.keys():
            assert all(map(torch.equal, found.states[key], plain.states[key])), key
    hits = []
    for seconds in (0.0, 60.0):
        engine.cache.allocator.forget_all()
        assert engine.cache.states is not None
        engine.cache.states.checkpoints.forget_all()
        core = EngineCore(engine, CHAIN.name, multi_step_s=seconds)
        prompt = list(PROMPTS[1])
        for _ in range(2):
            request = core.requests.make(prompt, greedy(TOKENS))
            core.scheduler.add(request)
            while not request.is_finished:
                core.advance()
            prompt = [*request.token_ids, 1, 2]
        hits.append((request.stats.num_cached_tokens, request.output_token_ids))
    assert hits[0] == hits[1]
    assert hits[0][0] == 32


def test_a_program_that_reads_other_states_is_refused(directory: Path, tmp_path: Path) -> None:
    for place in (-1, 2):
        other = copy_engine(directory / "eager", tmp_path / f"engine{place}")
        program = json.loads((other / "target/program.json").read_text())
        next(x for x in program["inputs"] if x["kind"] == "state")["layer"] = place
        write(other, "target/program.json", program)
        with pytest.raises(EngineError, match="input 14 of target"):
            Engine.load(other)


def test_passes_that_are_timed_change_no_states(engine: Engine) -> None:
    """Of trees, and of more tokens than a tree can have."""
    states = engine.cache.states
    assert states is not None
    for slab in states.states:
        slab.normal_()
    before = [slab.clone() for slab in states.states]
    table = engine.cache.block_table([[0, 1, 2, 3], [4, 5, 6, 7]])
    for width in (1, 3, states.sizes.num_rows + 1):
        assert time_pass(engine, engine.target, table, 2, width) > 0
    assert all(map(torch.equal, states.states, before))


def test_texts_are_read_in_parts(engine: Engine) -> None:
    scored, tokens = ScoredEngine(engine), prompt_of(30)
    whole = scored.read(tokens, 0)
    parts = torch.cat([scored.read(tokens[:11], 0), scored.read(tokens[11:], 11)])
    torch.testing.assert_close(parts, whole)
    assert not torch.allclose(scored.read(tokens[11:], 11), whole[11:])
