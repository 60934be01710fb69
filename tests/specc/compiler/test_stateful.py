"""Targets whose layers keep states: what is kept of prefixes, other plans, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.artifact.backends import facts_of
from specc.artifact.directory import read_manifest
from specc.artifact.manifest import Manifest
from specc.cli.render_states import state_lines, states_table
from specc.compile_request import CompileRequest
from specc.compiler.build import build
from specc.compiler.extend import extend_engine
from specc.compiler.state_checkpoints import with_checkpoints
from specc.errors import ConfigError
from specc.passes.frontend.trace import trace
from specc.passes.program import Program, StateLayer
from specc.refusals import refuse
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from tests.specc.compiler.builds import NUM_TOKENS, PROMPTS, Custom, options, refused

LOOKUP = SpecPlan.from_widths((1, 1), ("lookup-2",))
SELF = SpecPlan.from_widths((1, 1), ("self_w16_s4",))


class Hybrid(Custom):
    """A convolution and a gated delta rule before the attention."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.conv = nn.Parameter(torch.randn(32, 4) * 0.5)
        self.gates = nn.Linear(32, 8)

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids)
        mixed = torch.ops.specc.dense_conv(x, self.conv, None, activation="silu")
        q, k, v = mixed.split([8, 8, 16], -1)
        q, k = (item.unflatten(-1, (2, 4)) for item in (q, k))
        q, k = (item * torch.rsqrt((item * item).sum(-1, keepdim=True) + 1e-6) for item in (q, k))
        decay, beta = self.gates(x).split([4, 4], -1)
        seen = torch.ops.specc.dense_recurrence(
            q, k, v.unflatten(-1, (4, 4)), -F.softplus(decay), beta.sigmoid()
        )
        x = x + F.pad(seen.flatten(2), (0, 16))
        sizes = [count * self.dim for count in (4, 2, 2)]
        q, k, v = self.qkv(F.layer_norm(x, (32,))).split(sizes, -1)
        q, k, v = (item.unflatten(-1, (-1, self.dim)).transpose(1, 2) for item in (q, k, v))
        mask = position_ids[0][:, None] >= position_ids[0][None]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.head((x + self.out(attended.transpose(1, 2).flatten(2))) * self.gain)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "engine"
    build(Hybrid(), None, path, options(LOOKUP, backend="eager"))
    return path


@pytest.fixture(scope="module")
def program() -> Program:
    made = trace(Custom(), "target")
    made.state_layers = [StateLayer("conv", "conv", (3, 32), 32, torch.float32)]
    return made


@pytest.fixture(scope="module")
def manifest(engine: Path) -> Manifest:
    return read_manifest(engine)


def test_what_the_engine_says(manifest: Manifest) -> None:
    target, limits = manifest.models[0], manifest.limits
    assert [(x.kind, x.shape, x.columns) for x in target.state_layers] == [
        ("conv", (3, 32), 32),
        ("recurrence", (4, 4, 4), 8 + 16 + 4 + 4),
    ]
    # blocks of 16: two for each of two sequences, of 256 tokens as any other engine
    assert (limits.state_checkpoints, limits.state_grid) == (4, 256)
    state, row = 4 * (3 * 32 + 4 * 4 * 4), 4 * (32 + 32)
    memory = manifest.memory_plan["target"]
    assert memory.states == 2 * (state + 3 * row)
    # and two that are on their way
    assert memory.checkpoints == (4 + 2) * state
    lines = " ".join(state_lines(manifest))
    assert "replay rows of 3 nodes" in lines
    assert "states of 4 prefixes are kept" in lines
    assert "multiples of 256 tokens" in lines
    table = states_table(manifest.models)
    assert [list(column.cells) for column in table.columns][1:4] == [
        ["1", "1"], ["convolution", "delta rule"], ["3 × 32", "4 × 4 × 4"]
    ]  # fmt: skip


def test_lookups_change_no_token(engine: Path) -> None:
    loaded = Engine.load(engine)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found, wanted = (
        [output.outputs[0].token_ids for output in LLM(loaded, plan=plan).generate(PROMPTS, params)]
        for plan in (LOOKUP.name, OFF.name)
    )
    assert found == wanted


def test_larger_trees_have_more_replay_rows(engine: Path, manifest: Manifest) -> None:
    deeper = dataclasses.replace(LOOKUP, widths=(1,) * 5, name="lookup2-chain-5")
    with extend_engine(engine, manifest) as extension:
        found = extension.try_plans([OFF, deeper])
        states = Engine.load(extension.directory).cache.states
    before = manifest.memory_plan["target"]
    row = manifest.models[0].replay_bytes
    assert found.memory_plan["target"].states == before.states + 2 * 3 * row
    assert found.memory_plan["target"].checkpoints == before.checkpoints
    assert states is not None
    assert [slab.shape[2] for slab in states.replay] == [6, 6]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, (4, 256)),
        ({"state_checkpoints": 7, "state_grid": 32}, (7, 32)),
        ({"state_checkpoints": 0}, (0, 0)),
        ({"block_size": 0}, (0, 0)),
        ({"block_size": 48}, (4, 288)),
    ],
    ids=str,
)
def test_how_many_are_kept(program, changes, wanted, manifest: Manifest) -> None:
    config = options(**changes)
    limits = dataclasses.replace(
        manifest.limits, block_size=config.block_size, state_checkpoints=0, state_grid=0
    )
    found = with_checkpoints(limits, config, program, torch.float32)
    assert (found.state_checkpoints, found.state_grid) == wanted


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_captured_steps_of_several_ranks_fold_nothing(option) -> None:
    facts = dataclasses.replace(facts_of("cuda"), keeps_states=True)
    config = options(**{option: 2})
    with pytest.raises(ConfigError, match="ranks that replay captured steps do not fold states"):
        refuse(CompileRequest(config, (), facts, facts.options, keeps_states=True))
    refuse(CompileRequest(config, (), facts_of("cpu"), facts.options, keeps_states=True))


@pytest.mark.parametrize("backend", ["onnx", "tensorrt"])
def test_backends_without_states(backend) -> None:
    facts = facts_of(backend)
    with pytest.raises(ConfigError) as caught:
        refuse(CompileRequest(options(), (), facts, facts.options, keeps_states=True))
    assert caught.value.do == "pass --backend cpu"


def test_a_hybrid_is_told_apart_when_it_is_traced(tmp_path) -> None:
    config = options(SELF, backend="eager", segments=True)
    found = refused(ConfigError, tmp_path, Hybrid(), None, config)
    assert found == "--draft self:window=16,sink=4, and --segments"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"state_grid": 24}, "--state-grid 24, and blocks of 16 tokens"),
        ({"state_grid": 32, "block_size": 0}, "and a cache of one block a sequence"),
    ],
    ids=str,
)
def test_grids_that_no_block_ends_at(program, changes, found, manifest: Manifest) -> None:
    config = options(**changes)
    limits = dataclasses.replace(manifest.limits, block_size=config.block_size)
    with pytest.raises(ConfigError) as caught:
        with_checkpoints(limits, config, program, torch.float32)
    assert found in caught.value.found


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"state_checkpoints": 3}, "--state-checkpoints 3"), ({"state_grid": 32}, "--state-grid 32")],
)
def test_options_for_states_of_others_are_refused(
    program, changes, found, manifest: Manifest
) -> None:
    program = dataclasses.replace(program, state_layers=[])
    with pytest.raises(ConfigError) as caught:
        with_checkpoints(manifest.limits, options(**changes), program, torch.float32)
    assert caught.value.found == f"{found}, and a target that attends to all of its tokens"
