"""How sharp a draft should be is learned from the target's outputs, and changes none of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.artifact.directory import read_manifest
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.progress import PhaseTimer
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import DynamicTree, SpecPlan
from specc.speculation.sharpness import sharpened
from specc.tune.acceptance import draft_acceptance, sharpened_acceptance
from specc.tune.options import TuneOptions
from specc.tune.run import tune
from specc.tune.sharpness import FACTORS, choose_factors
from tests import models
from tests.lossless import Zoo
from tests.specc.tune.runs import CHAIN, trajectories

# the draft is the target, but for a head that is so many times as large: with this factor of its
# logits it is the target
FACTOR = 0.5
TREE = SpecPlan.from_widths((2, 2, 1))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 2, 3))


SHARP = {plan: sharpened(plan, {"draft_0": [FACTOR]}) for plan in (CHAIN, TREE, DYNAMIC)}


@pytest.fixture(scope="module")
def make(zoo: Zoo) -> Callable[..., Path]:
    target = zoo.once("sharp-target", lambda path: models.save_tiny("qwen2", path))

    def write_draft(path: Path) -> None:
        models.save_tiny("qwen2", path)
        file = path / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["lm_head.weight"] / FACTOR
        save_file(tensors, file, {"format": "pt"})

    draft = zoo.once("sharp-draft", write_draft)

    def engine(label: str, *plans: SpecPlan, backend: str = "eager") -> Path:
        config = CompileConfig(
            plans=plans, max_batch_size=4, max_seq_len=128, backend=backend, probe=False
        )
        return zoo.once(f"sharp-{label}", lambda path: build(target, draft, path, config))

    return engine


@pytest.fixture(scope="module")
def compiled(make: Callable[..., Path]) -> Path:
    return make("engine", CHAIN, *SHARP.values())


def accepted_a_step(path: Path, plan: str, **params: object) -> tuple[float, list[list[int]]]:
    llm = LLM(Engine.load(path), plan=plan)
    prompts = [list(prompt) for prompt in models.prompts()[:3]]
    own = [
        SamplingParams(max_tokens=33, ignore_eos=True, seed=i, **{"temperature": 0, **params})
        for i in range(3)
    ]
    outputs = llm.generate(prompts, own)
    length = llm.get_metrics().mean_acceptance_length
    return length, [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "rule",
    [
        "coupled",
        pytest.param("delta", marks=pytest.mark.slow),
        pytest.param("mss", marks=pytest.mark.slow),
        "swor",
    ],
)
def test_rules_are_told_what_children_were_drawn_from(compiled: Path, rule: str) -> None:
    """Then the draft is the target: every child is accepted, and else it is not."""
    given = {"temperature": 1.0, "rule": rule}
    before, _ = accepted_a_step(compiled, CHAIN.name, **given)
    after, outputs = accepted_a_step(compiled, SHARP[CHAIN].name, **given)
    of_tree, _ = accepted_a_step(compiled, SHARP[TREE].name, **given)
    if rule == "delta":
        # the best child of a draft is the same however sharp it is
        assert after == before
    else:
        assert before < 3.5
        assert after > 3.9
        assert of_tree > 3.9
    if rule in ("coupled", "delta"):
        assert outputs == accepted_a_step(compiled, "off", **given)[1]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coupled", "mss"])
def test_steps_in_cpp(make: Callable[..., Path], rule: str) -> None:
    path = make("compiled", *SHARP.values(), backend="cpu")
    given = {"temperature": 1.0, "rule": rule}
    for plan in (CHAIN, TREE):
        accepted, outputs = accepted_a_step(path, SHARP[plan].name, **given)
        assert accepted > 3.9
        if rule == "coupled":
            assert outputs == accepted_a_step(path, "off", **given)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        CHAIN,
        pytest.param(TREE, marks=pytest.mark.slow),
        pytest.param(DYNAMIC, marks=pytest.mark.slow),
    ],
    ids=lambda plan: plan.name,
)
def test_outputs_are_those_without_drafts(compiled: Path, plan: SpecPlan) -> None:
    name = SHARP[plan].name
    for temperature in (0.0, 0.7, 1.0):
        _, found = accepted_a_step(compiled, name, temperature=temperature)
        assert found == accepted_a_step(compiled, "off", temperature=temperature)[1]


def test_the_factor_that_makes_the_draft_its_target(compiled: Path) -> None:
    engine = Engine.load(compiled)
    params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=1.0, seed=5)
    made = trajectories(engine, params)
    plain = draft_acceptance(engine, 0, made, 1, 3)
    table, factors = sharpened_acceptance(engine, 0, made, 1, 3)
    assert factors == [FACTOR] * 3
    assert plain[0][0] < 0.9
    assert min(row[0] for row in table) > 0.98


@pytest.mark.slow
def test_tune_keeps_what_it_has_learned(make: Callable[..., Path], tmp_path: Path) -> None:
    """In the manifest, the steps and the profile; greedy tuning learns nothing."""
    for temperature in (0.0, 1.0):
        path = tmp_path / str(temperature)
        shutil.copytree(make("plain", CHAIN), path)
        options = TuneOptions(
            batch_sizes=(1,), max_nodes=4, max_depth=3, max_tokens=24, rounds=1, latency_s=0.1,
            temperature=temperature,
        )  # fmt: skip
        tuning = tune(
            path, [list(p) for p in models.prompts()], options, PhaseTimer(lambda _: None)
        )
        (batch,) = tuning.batches
        measured = {one.plan.name: one.mean_acceptance_length for one in batch.candidates}
        wanted = SHARP[CHAIN].name
        if temperature:
            assert tuning.sharpness == {"draft_0": [FACTOR] * 3}
            assert measured[wanted] > measured[CHAIN.name] + 0.5
            profile = json.loads((path / "profile.json").read_text())
            assert profile["sharpness"] == tuning.sharpness
            kept = {entry.name: entry.plan.sharpness for entry in read_manifest(path).plans}
            chosen = [plan for plan in tuning.plans if plan.speculates]
            assert all(kept[plan.name] == plan.sharpness for plan in chosen)
        else:
            assert tuning.sharpness == {}
            assert wanted not in measured


def lines_of(*hits: str) -> list[list[int]]:
    return [[0 if x == "x" else -1 for x in line] for line in hits]


def test_chance_chooses_nothing() -> None:
    ranks = {x: lines_of("xo" * 50) for x in FACTORS}
    assert choose_factors(ranks, 3) == [1.0] * 3
    # two places better of a hundred, and two worse of the rest
    ranks[0.5] = lines_of("xx" * 2 + "xo" * 47 + "oo")
    assert choose_factors(ranks, 1) == [1.0]
    ranks[0.5] = lines_of("xx" * 5 + "xo" * 45)
    assert choose_factors(ranks, 1) == [0.5]


def test_depths_count_places_that_chains_reach() -> None:
    """After a hit another factor is right than after a miss."""
    ranks = {
        1.0: lines_of("oooo" * 25),
        0.5: lines_of("xooo" * 25),
        2.0: lines_of("oxoo" * 25),
        # right more often than any other, and never after a hit
        3.0: lines_of("ooxx" * 25),
    }
    assert choose_factors({1.0: ranks[1.0], 0.5: ranks[0.5], 2.0: ranks[2.0]}, 2) == [0.5, 2.0]
    assert choose_factors(ranks, 1) == [3.0]
    assert torch.tensor(FACTORS).diff().gt(0).all()
    assert 1.0 in FACTORS
