"""`specc tune` of self-drafts: their acceptance, budgets, contexts, and critical lengths."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specc.config import CompileConfig
from specc.cost.acceptance import expected_tokens
from specc.cost.critical_length import CriticalLength, best_critical_length
from specc.cost.latency_table import LatencyTable, PassSeconds
from specc.cost.step_seconds import StepSeconds
from specc.drafters.registry import drafter_of, drafters_of
from specc.drafters.self import SelfDraft
from specc.drafters.views import View
from specc.progress import PhaseTimer
from specc.runtime.backends.step import Model
from specc.runtime.backends.step_io import StepResult
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.policies.base import FixedPolicy
from specc.runtime.scheduling.batch import StepGroup
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree
from specc.tune.acceptance import chains_over, self_acceptance
from specc.tune.candidates import candidates, views_to_measure
from specc.tune.options import TuneOptions
from specc.tune.outputs import LongPrompts, join_prompts
from specc.tune.run import tune
from tests import engines, models
from tests.command_line import invoke
from tests.lossless import Zoo
from tests.specc.tune.runs import CHAIN, trajectories


@pytest.fixture(scope="module")
def viewing(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target alone, which drafts with what it sees of its last rows."""
    path = tmp_path_factory.mktemp("views") / "engine"
    config = CompileConfig(
        plans=tuple(SpecPlan.from_widths((1,) * n, ("self_w16_s4",)) for n in (2, 4)),
        max_batch_size=2, max_seq_len=128, block_size=4, backend="eager", probe=False,
    )  # fmt: skip
    return engines.build(zoo.checkpoint("llama"), [], path, config)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_acceptance_of_views(viewing: Path, temperature: float):
    """All rows are the target; fewer are right less often; and the cache is left as it was."""
    engine = Engine.load(viewing)
    engine.prefill_chunk = 7
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=5)
    runs = trajectories(engine, params)
    views = [SelfDraft(view) for view in (View(124, 0), View(16, 4), View(4, 0))]
    whole, some, few = self_acceptance(engine, views, runs, 3, 4)
    assert whole == [[1.0, 0.0, 0.0]] * 4
    assert 0 < few[0][0] < some[0][0] < 1
    assert engine.cache.allocator.num_free == engine.cache.allocator.num_blocks


@pytest.mark.slow
def test_tuning_of_a_view(viewing: Path, tmp_path: Path):
    directory = Path(shutil.copytree(viewing, tmp_path / "engine"))
    options = TuneOptions(
        batch_sizes=(1,), max_tokens=12, max_nodes=6, max_depth=3, rounds=1, latency_s=0.1
    )
    tuning = tune(directory, [list(p) for p in models.prompts()[3:]], options, PhaseTimer())
    assert tuning.acceptance.keys() == {"self_w16_s4"}
    (batch,) = tuning.batches
    plans = [candidate.plan for candidate in batch.candidates]
    assert plans
    assert all(plan.drafts == ("self_w16_s4",) for plan in plans)
    profile = json.loads((directory / "profile.json").read_text())
    assert profile["latency"]["drafts"] == {}
    # the policy that reads them knows what views cost
    llm = LLM(Engine.load(directory), policy="goodput")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    off = LLM(Engine.load(directory), plan="off").generate(models.prompts(), params)
    found = llm.generate(models.prompts(), params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in off]


class Recorder(FixedPolicy):
    """Keeps what the first step of each request accepted."""

    def __init__(self, plan: str) -> None:
        super().__init__(plan)
        self.accepted: dict[str, int] = {}

    def observe(self, group: StepGroup, step: StepResult) -> None:
        for request, count in zip(group.requests, step.num_accepted, strict=True):
            self.accepted.setdefault(request.request_id, count)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_chains_of_a_view_are_those_of_its_steps(viewing: Path, temperature: float):
    """From every root, what a step of the engine accepts: its rows, positions and noise."""
    engine = Engine.load(viewing)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=5)
    (run,) = trajectories(engine, params)[:1]
    tokens, start = run.token_ids, run.num_prompt
    (chains,) = chains_over(engine, [SelfDraft(View(16, 4))], run, 1, 4)
    roots = range(start - 1, len(tokens) - 1, 4)
    assert [len(chain) for chain in chains] == [min(4, len(tokens) - 1 - root) for root in roots]
    seen = set()
    for root, chain in zip(roots[1:-1], chains[1:-1], strict=True):
        policy = Recorder("selfw16s4-chain-4")
        llm = LLM(engine, policy=policy)
        # the root itself comes from the prompt's pass, all others from one step
        own = dataclasses.replace(params, max_tokens=6)
        (output,) = llm.generate([tokens[:root]], own)
        assert output.outputs[0].token_ids[:2] == tokens[root : root + 2]
        (accepted,) = policy.accepted.values()
        assert accepted == next((n for n, rank in enumerate(chain) if rank), len(chain))
        seen.add(accepted)
    assert len(seen) > 1


class Passes:
    """Keeps the inputs and the logits of a model's passes."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.seen: list[tuple[list[Tensor], Tensor]] = []

    def __call__(self, *inputs: Tensor) -> Tensor:
        logits = self.model(*inputs)
        self.seen.append((list(inputs), logits))
        return logits

    @property
    def levels(self) -> list[tuple[list[Tensor], Tensor]]:
        """Those of one token over a view."""
        return [(inputs, logits) for inputs, logits in self.seen if inputs[5] is not None]


def test_levels_write_the_rows_of_their_positions_and_leave_nothing(viewing: Path):
    """In the sequence's own blocks; logits after another view's levels are bitwise the same."""
    engine = Engine.load(viewing)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (run,) = trajectories(engine, params)[:1]
    wide, narrow = SelfDraft(View(16, 4)), SelfDraft(View(4, 0))
    target = engine.target
    found = []
    for views in ([wide], [wide, narrow]):
        engine.target = passes = Passes(target)
        chains_over(engine, views, run, 1, 4)
        found.append(passes)
    alone, both = found
    roots = range(run.num_prompt - 1, len(run.token_ids) - 1, 4)
    wanted = [root + level for root in roots for level in range(4)]
    wanted = [position for position in wanted if position < len(run.token_ids) - 1]
    assert [int(inputs[1]) for inputs, _ in alone.levels] == wanted
    (table,) = {tuple(inputs[6][0].tolist()) for inputs, _ in both.seen if inputs[5] is None}
    size = engine.cache.shape.block_size
    for inputs, _ in both.levels:
        assert int(inputs[0]) == run.token_ids[int(inputs[1])]
        slot, position = int(inputs[3]), int(inputs[1])
        assert inputs[6][0, slot // size] == table[position // size]
        assert slot % size == position % size
    mine, rest = [], list(both.levels)
    for root in roots:
        # those of one view, then those of the other
        count = min(4, len(run.token_ids) - 1 - root)
        mine += [logits for _, logits in rest[:count]]
        rest = rest[2 * count :]
    assert len(mine) == len(alone.levels)
    assert all(torch.equal(a, b) for a, (_, b) in zip(mine, alone.levels, strict=True))


def test_prompts_are_joined_and_repeated():
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9]]
    assert join_prompts(prompts, 4) == LongPrompts([[1, 2, 3, 4], [6, 7, 8, 9]])
    assert join_prompts(prompts, 9) == LongPrompts([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    assert join_prompts(prompts[:2], 12) == LongPrompts([[1, 2, 3, 4, 5] * 2 + [1, 2]], True)


def test_budgets_that_are_tried():
    """Those that hold a block and that the shortest prompt outgrows."""
    drafts = drafters_of("draft_0", "self_w64_s4", "suffix")
    assert views_to_measure(drafts[:1], 16, 4096) == []
    windows = [view.window for view in views_to_measure(drafts, 16, 600)]
    assert windows == [64, 128, 256, 512]
    assert [v.window for v in views_to_measure(drafts, 16, 512 + 16 + 15)] == [64, 128, 256]
    assert [v.window for v in views_to_measure(drafts, 256, 4096)] == [64, 256, 512, 1024]
    # the engine's own is measured however short prompts are
    assert [v.window for v in views_to_measure(drafts, 16, 10)] == [64]


def test_the_best_three_plans_of_self_drafts_are_measured_whole():
    """Of all budgets, chains and trees, by the tables; and what the engine has."""
    table = LatencyTable(PassSeconds({1: 1.0, 64: 1.5}, {1: 1e-3, 9: 1.5e-3}, "target"))
    acceptance = {
        f"self_w{window}_s4": [[rate, 0.05]] * 8
        for window, rate in ((128, 0.5), (256, 0.85), (512, 0.9), (1024, 0.91))
    }
    seconds = {draft: StepSeconds(table, drafter_of(draft), 4, 20_000) for draft in acceptance}
    options = TuneOptions(max_nodes=9)
    found = candidates(acceptance, seconds, [CHAIN], options)
    assert found.pop(CHAIN, 0) is None
    (dynamic,) = [plan for plan in found if plan.dynamic]
    assert found.pop(dynamic) is None
    assert len(found) == 3
    # by exhaustive search over chains of all lengths, none of another budget is better
    every = {
        (draft, n): expected_tokens(TokenTree.chain(n), rows)
        / (seconds[draft].of(TokenTree.chain(n)) / seconds[draft].off)
        for draft, rows in acceptance.items()
        for n in range(1, 9)
    }
    assert max(found.values()) >= max(every.values())
    left_out = set(acceptance) - {plan.drafts[0] for plan in found}
    assert all(every[draft, n] <= min(found.values()) for draft in left_out for n in range(1, 9))


@pytest.mark.slow
def test_tuning_at_a_context(viewing: Path, tmp_path: Path):
    """Joined prompts, and the critical length in the profile, on the screen and in `inspect`."""
    directory = Path(shutil.copytree(viewing, tmp_path / "engine"))
    file = tmp_path / "ids.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6, 7]}\n', encoding="utf-8")
    args = ["--prompts", file, "--tokens", 12, "--max-nodes", 6, "--max-depth", 3, "--rounds", 1]
    short = invoke("tune", directory, *args, "--batch-size", 1)
    assert "acceptance was not measured at long context; --context N" in short.stdout
    assert json.loads((directory / "profile.json").read_text())["critical_lengths"] == []
    result = invoke("tune", directory, *args, "--context", 60)
    assert result.exit_code == 0, result.stderr
    assert "self-drafts after prompts of 60 tokens, in which prompts are repeated" in result.stdout
    profile = json.loads((directory / "profile.json").read_text())
    assert profile["contexts"] == [60, 60]
    lengths = [CriticalLength.from_json(one) for one in profile["critical_lengths"]]
    assert [one.batch_size for one in lengths] == [1, 2]
    latency = LatencyTable.from_json(profile["latency"])
    for one in lengths:
        again = best_critical_length(
            latency, View.named(one.draft), profile["acceptance"][one.draft], one.batch_size, 3
        )
        assert again == one
    shown = invoke("inspect", directory).stdout
    for text in (result.stdout, shown):
        assert "self:window=16,sink=4" in text
        assert text.count("never") + text.count(" tokens") >= 2
        assert "self-drafts pay" in text
    refused = invoke("tune", directory, *args, "--context", 117)
    assert refused.exit_code == 2
    assert "--context 117" in refused.stderr
    assert "at most 116" in refused.stderr
