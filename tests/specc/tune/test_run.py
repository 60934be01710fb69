"""`specc tune`: acceptance tables, pass times, and an engine that gets other plans."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specc.artifact.directory import open_engine
from specc.cli import tune as cli_tune
from specc.cli.main import app
from specc.compiler.build import build
from specc.compiler.extend import extend_engine
from specc.config import CompileConfig
from specc.cost.acceptance import expected_tokens
from specc.cost.latency_table import LatencyTable
from specc.cost.step_seconds import StepSeconds
from specc.drafters.registry import drafter_of
from specc.errors import ConfigError, EngineError
from specc.progress import PhaseTimer
from specc.runtime.engine import Engine
from specc.runtime.engine_args import EngineArgs
from specc.runtime.llm import LLM
from specc.runtime.policies.named import ProfilePolicy
from specc.runtime.profile import load_profile
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, OFF, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree
from specc.tune.acceptance import Trajectory, acceptance_of, draft_acceptance, lookup_acceptance
from specc.tune.latency import measure_latency
from specc.tune.options import TuneOptions
from specc.tune.run import Tuning, tune
from tests import engines
from tests.command_line import invoke
from tests.lossless import Zoo
from tests.specc.tune.runs import CHAIN, trajectories

TWO = ("draft_0", "draft_1")


@pytest.fixture(scope="module")
def compiled(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafts: one that is often right, and the target itself."""
    path = tmp_path_factory.mktemp("tune") / "engine"
    plans = (
        CHAIN,
        SpecPlan.from_widths((2, 1), TWO, MERGE),
        SpecPlan.from_widths((1, 1), ("suffix",)),
    )
    config = CompileConfig(
        plans=plans, max_batch_size=2, max_seq_len=128, backend="eager", probe=False
    )
    drafts = [zoo.checkpoint("llama", draft="noisy"), zoo.checkpoint("llama")]
    return engines.build(zoo.checkpoint("llama"), drafts, path, config)


@pytest.fixture
def engine_copy(compiled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled, tmp_path / "engine"))


def test_acceptance_of_ranks_is_that_of_the_tree_walks():
    """Against walks through a full tree from every root, one after the other."""
    rng = random.Random(3)
    width, depth = 3, 4
    lines = [[rng.choice([0, 0, 0, 1, 2, -1]) for _ in range(30)] for _ in range(5)]
    chains = (line[root : root + depth] for line in lines for root in range(len(line)))
    table = acceptance_of(chains, width, depth)
    for level, rank in itertools.product(range(depth), range(width)):
        reached = hits = 0
        for line in lines:
            for root in range(len(line)):
                path = line[root : root + level + 1]
                if len(path) == level + 1 and all(r >= 0 for r in path[:-1]):
                    reached += 1
                    hits += path[-1] == rank
        assert table[level][rank] == pytest.approx(hits / reached)


def test_no_outputs_accept_nothing():
    assert acceptance_of([], 2, 2) == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.default("7-0.8")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("chunk", [pytest.param(512, marks=pytest.mark.slow), 7])
def test_the_target_as_its_own_draft_is_right_at_first(
    compiled: Path, temperature: float, chunk: int
):
    """Also in pieces, also where both draw with the same noise."""
    engine = Engine.load(compiled)
    engine.prefill_chunk = chunk
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=5)
    made = trajectories(engine, params)
    free = engine.cache.allocator.num_free
    assert draft_acceptance(engine, 1, made, 2, 3) == [[1.0, 0.0]] * 3
    assert engine.cache.allocator.num_free == free
    noisy = draft_acceptance(engine, 0, made, 4, 3)
    assert all(0.1 < row[0] < 1 and row[0] > row[1] and sum(row) <= 1 for row in noisy)


@pytest.mark.slow
def test_tables_predict_what_steps_accept(compiled: Path):
    engine = Engine.load(compiled)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    made = trajectories(engine, params)
    table = draft_acceptance(engine, 0, made, 1, 3)
    llm = LLM(engine, plan=CHAIN.name)
    llm.generate([t.token_ids[: t.num_prompt] for t in made], params)
    predicted = expected_tokens(TokenTree.chain(3), table)
    assert llm.get_metrics().mean_acceptance_length == pytest.approx(predicted, abs=0.3)


def test_lookups_are_tried_at_every_position():
    request = Request("0", [1, 2, 3], SamplingParams(temperature=0), max_seq_len=64)
    request.token_ids += [1, 2, 3, 1, 2, 3, 1, 2, 3]
    made = [Trajectory(request, 3)]
    # nothing is known of the first of the nine output tokens
    table = lookup_acceptance(drafter_of("lookup-2"), made, 2)
    assert table == [[8 / 9], [7 / 7]]
    other = Request("1", [1, 2], SamplingParams(temperature=0), max_seq_len=64)
    other.token_ids += [3, 1]
    alone = lookup_acceptance(drafter_of("suffix"), [Trajectory(other, 2)], 1)
    assert alone == [[0.0]]
    # an earlier output knows what follows
    assert lookup_acceptance(drafter_of("suffix"), [*made, Trajectory(other, 2)], 1)[0][0] > 8 / 11


@pytest.mark.slow
def test_seconds_rise_with_the_work(compiled: Path):
    engine = Engine.load(compiled)
    seconds = StepSeconds(measure_latency(engine, budget_s=0.1), requests=2, context=16)
    assert 0 < seconds.off <= seconds.verify(5)
    assert seconds.level(1, 1) > 0
    assert engine.cache.allocator.num_free == engine.cache.allocator.num_blocks


def test_extending_an_engine_keeps_what_it_links(engine_copy: Path):
    before = open_engine(engine_copy, True)
    weights = before.models[0].weights_file
    plans = [SpecPlan.from_dynamic(DynamicTree(6, 2, 3)), OFF]
    with extend_engine(engine_copy, before) as extension:
        tried = extension.try_plans([CHAIN, OFF], 20)
        assert tried.limits.max_nodes == 20
        assert set(Engine.load(extension.directory).plans) == {CHAIN.name, "off"}
        extension.commit(plans, "fixed", {})
    after = open_engine(engine_copy, True)  # all hashes agree
    assert [entry.plan for entry in after.plans] == plans
    assert after.files[weights] == before.files[weights]
    assert not (engine_copy / f"steps/{CHAIN.name}.json").exists()
    assert after.total_memory > 0
    assert [path.name for path in engine_copy.parent.iterdir()] == ["engine"]


def test_an_engine_stays_as_it_was_where_tuning_fails(engine_copy: Path):
    before = open_engine(engine_copy, True)

    def fail() -> None:
        with extend_engine(engine_copy, before) as extension:
            extension.try_plans([OFF])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert open_engine(engine_copy, True) == before
    assert [path.name for path in engine_copy.parent.iterdir()] == ["engine"]


def test_tune_writes_a_family_that_the_engine_follows(
    engine_copy: Path, monkeypatch: pytest.MonkeyPatch
):
    """As a command, which says what it has measured and chosen."""
    prompts = ["hello there", "one two three"]
    wanted = LLM(engine_copy, plan="off").generate(
        prompts, SamplingParams(temperature=0, max_tokens=20)
    )
    file = engine_copy.parent / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    tunings = []

    def tune_quickly(path: Path, texts: list[str], options: TuneOptions, *rest: Any) -> Tuning:
        options = dataclasses.replace(options, latency_s=0.1)
        tunings.append(tune(path, texts, options, *rest))
        return tunings[-1]

    monkeypatch.setattr(cli_tune, "tune", tune_quickly)
    options = ("--max-nodes", 8, "--max-depth", 3, "--tokens", 12, "--rounds", 1)
    result = invoke("tune", engine_copy, "--prompts", file, *options)
    assert result.exit_code == 0, result.output
    (tuning,) = tunings
    for batch in tuning.batches:
        assert f"chosen: {batch.chosen.name}, " in result.stdout
        assert f"batch size {batch.batch_size}\n" in result.stdout
    assert "acceptance of draft_1 by depth and rank: 1.00 " in result.stdout
    kept = ", ".join(plan.name for plan in tuning.others)
    assert f"chosen for no batch size, and still in the engine: {kept}" in result.stdout
    assert "latency of passes … " in result.stderr
    file.unlink()
    assert [batch.batch_size for batch in tuning.batches] == [1, 2]
    assert set(tuning.acceptance) == {"draft_0", "draft_1", "suffix"}
    assert tuning.acceptance["draft_1"][0][0] == 1.0
    for batch in tuning.batches:
        names = {candidate.plan.name for candidate in batch.candidates}
        # what the engine had, and what the tables say
        assert {CHAIN.name, "merge-0+1-tree-2-1", "suffix-chain-2"} < names
        assert any(name.startswith("draft1-") for name in names)
        best = max(batch.candidates, key=lambda candidate: candidate.measured)
        assert batch.chosen == (best.plan if best.measured > 1.01 else OFF)
    before = {CHAIN.name, "merge-0+1-tree-2-1", "suffix-chain-2"}
    manifest = open_engine(engine_copy, True)
    profile = json.loads((engine_copy / "profile.json").read_text())
    assert manifest.policy == "profile"
    # nothing that the engine had is gone without a word
    assert {entry.name for entry in manifest.plans} == before | {p.name for p in tuning.plans}
    assert profile["kept_plans"] == [plan.name for plan in tuning.others]
    assert set(profile["kept_plans"]) == before - {plan.name for plan in tuning.plans}
    assert profile["plans"] == {str(b.batch_size): b.chosen.name for b in tuning.batches}
    # what the policy goodput reads
    assert set(LatencyTable.from_json(profile["latency"]).drafts) == {"draft_0", "draft_1"}
    core = EngineArgs(engine_copy, policy="goodput").make_core()
    assert core.scheduler.policy.decision.goodput == 0
    llm = LLM(engine_copy)
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
    # of two requests, and of one
    assert (llm.get_metrics().num_spec_steps > 0) == tuning.batches[1].chosen.speculates
    alone = LLM(engine_copy)
    alone.generate(prompts[0], SamplingParams(temperature=0, max_tokens=20))
    assert (alone.get_metrics().num_spec_steps > 0) == tuning.batches[0].chosen.speculates


@pytest.mark.slow
def test_tune_prunes_where_it_is_told_to(engine_copy: Path):
    """Prompts are token ids here, which an engine without a tokenizer takes, too."""
    lines = engine_copy.parent / "ids.jsonl"
    lines.write_text('{"prompt_token_ids": [5, 6, 7], "max_tokens": 3}\n')
    options = ("--batch-size", 1, "--max-nodes", 4, "--max-depth", 2, "--tokens", 4, "--rounds", 1)
    result = invoke("tune", engine_copy, "--prompts", lines, *options, "--prune")
    assert result.exit_code == 0, result.stderr
    manifest = open_engine(engine_copy, True)
    profile = json.loads((engine_copy / "profile.json").read_text())
    left = {entry.name for entry in manifest.plans}
    assert left == {profile["plans"]["1"], "off"}
    assert profile["removed_plans"]
    assert not left & set(profile["removed_plans"])
    assert f"removed from the engine: {', '.join(profile['removed_plans'])}" in result.stdout
    assert "ignored here: max_tokens" in result.stderr
    assert "┃" not in result.stdout


def test_a_profile_picks_by_the_number_of_sequences():
    policy = ProfilePolicy({1: "a", 4: "b", 8: "off"})
    chosen = [policy.choose(count, None) for count in (0, 1, 3, 4, 7, 8, 100)]
    assert chosen == ["a", "a", "a", "b", "b", "off", "off"]


def test_a_profile_of_unknown_plans_is_refused(engine_copy: Path):
    with extend_engine(engine_copy, open_engine(engine_copy)) as extension:
        extension.commit([OFF], "profile", {"plans": {"1": "chain-77"}})
    with pytest.raises(EngineError, match="chain-77") as error:
        Engine.load(engine_copy)
    assert error.value.do == "run specc tune again"


@pytest.mark.parametrize(
    ("tuned", "loaded", "told"),
    [
        (None, None, None),
        (4096, 4096, None),
        ("auto", "auto", None),
        (4096, None, "for 4.0 KiB of memory for weights, and it runs with all weights in memory"),
        (None, "auto", "all weights in memory, and it runs with auto of memory for weights: run"),
        (4096, 8192, "runs with 8.0 KiB of memory for weights: run specc tune with --offload-"),
    ],
)
def test_a_profile_of_another_budget_is_said_aloud(
    engine_copy: Path, caplog: pytest.LogCaptureFixture, tuned: object, loaded: object, told: str
):
    """Its plans are those that pay where passes read weights, or where they do not."""
    with extend_engine(engine_copy, open_engine(engine_copy)) as extension:
        given = {} if tuned is None else {"offload_weights": tuned}
        extension.commit([OFF], "profile", {"plans": {"1": "off"}, **given})
    profile = load_profile(engine_copy, open_engine(engine_copy), {"off": None}, loaded)  # type: ignore[dict-item]
    assert profile["plans"] == {"1": "off"}
    said = [record.getMessage() for record in caplog.records]
    assert [told in text for text in said] == [True] if told else said == []


def test_what_cannot_be_tuned(zoo: Zoo, compiled: Path, tmp_path: Path):
    config = CompileConfig(max_batch_size=2, max_seq_len=64, backend="eager", probe=False)
    build(zoo.checkpoint("llama"), None, tmp_path / "plain", config)
    with pytest.raises(ConfigError, match="an engine without drafts"):
        tune(tmp_path / "plain", ["a"], TuneOptions(), PhaseTimer())
    with pytest.raises(ConfigError, match="--batch-size 3"):
        tune(compiled, ["a"], TuneOptions((3,)), PhaseTimer())


def test_what_a_command_is_refused_for(compiled: Path, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    args = ["tune", str(compiled), "--prompts", str(file), "--tokens", "6", "--rounds", "1"]
    file.write_text('{"prompt": "hello"}\n{"prompt": 3}\n', encoding="utf-8")
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert "line 2" in result.stderr
    for option, value in (("--max-nodes", "1"), ("--rounds", "0"), ("--temperature", "-1")):
        result = CliRunner().invoke(app, [*args, option, value])
        assert result.exit_code == 2
        assert f"{option} {value}" in result.stderr or f"{option} -1.0" in result.stderr
