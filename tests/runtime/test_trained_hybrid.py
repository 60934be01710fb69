"""The trained hybrid, compiled with the pair's draft: output is that of transformers.

A few tokens of a few prompts in the default tier; the slow tier has all prompts and drafts, alone
and in batches, and documents in JSON with drafts that look tokens up.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import DynamicTree, SpecPlan
from tests import engines
from tests.near_ties import Reference, forgive_near_ties, greedy_params

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HYBRID, PAIR = EXAMPLES / "hybrid" / "target", EXAMPLES / "pair"
CHAIN, TREE = SpecPlan.from_widths((1,) * 4), SpecPlan.from_widths((2, 2, 1))
SUFFIX = SpecPlan.from_widths((1,) * 6, ("suffix",))
LOOKUP = SpecPlan.from_widths((1,) * 6, ("lookup-3",))
PLANS = (CHAIN, TREE, SpecPlan.from_dynamic(DynamicTree(12, 3, 4)), SUFFIX, LOOKUP)
NAMES = ["off", *(plan.name for plan in PLANS)]
BATCH = 8
# of a long run
POSITIONS = 2048


@pytest.fixture(scope="module")
def target() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(HYBRID, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Token ids of the pair's held-out prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(HYBRID)
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return compiled(tmp_path_factory.mktemp("hybrid"), (CHAIN, TREE, SUFFIX))


@pytest.fixture(scope="module")
def all_plans(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return compiled(tmp_path_factory.mktemp("hybrid-all"), PLANS)


def compiled(
    root: Path,
    plans: tuple[SpecPlan, ...],
    models: tuple[Path, Path] = (HYBRID, PAIR / "draft"),
    **changes: Any,
) -> Engine:
    config = CompileConfig(
        plans=plans,
        dtype="float32",
        max_batch_size=BATCH,
        max_seq_len=1024,
        backend="cpu",
        probe=False,
    )
    config = replace(config, **changes)
    return Engine.load(engines.build(*models, root / "engine", config))


def with_positions(root: Path, checkpoint: Path) -> Path:
    """The checkpoint for longer texts: it rotates by any position, and was trained on fewer."""
    path = root / checkpoint.name
    shutil.copytree(checkpoint, path)
    config = json.loads((path / "config.json").read_bytes())
    config["max_position_embeddings"] = POSITIONS
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def generate(target: Any, prompt: list[int], num_tokens: int) -> Reference:
    result = target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        eos_token_id=None,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = result.sequences[0, len(prompt) :].tolist()
    return Reference(tokens, torch.stack(result.logits)[:, 0])


def check(
    engine: Engine, plan: str, prompts: list[list[int]], references: list[Reference]
) -> float:
    """Compare outputs of all prompts together; returns the tokens a step."""
    llm = LLM(engine, plan=plan)
    outputs = llm.generate(prompts, greedy_params(len(references[0].tokens)))
    length = llm.get_metrics().mean_acceptance_length
    for prompt, output, reference in zip(prompts, outputs, references, strict=True):
        found = output.outputs[0].token_ids
        forgive_near_ties(llm, f"{plan}, {len(prompt)} tokens", prompt, found, reference)
    return length or 1.0


@torch.no_grad()
def test_it_has_learned_the_pairs_language(target: Any, prompts: list[list[int]]) -> None:
    config, own = target.config, json.loads((PAIR / "target" / "config.json").read_bytes())
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert 2e6 < target.num_parameters() < 4e6
    for name in ("tokenizer.json", "tokenizer_config.json"):
        # so that prompts are the same, and the pair's draft fits
        assert (HYBRID / name).read_bytes() == (PAIR / "target" / name).read_bytes()
    assert config.max_position_embeddings == own["max_position_embeddings"]
    total = count = 0.0
    for prompt in prompts[:8]:
        ids = torch.tensor([prompt])
        logits = target(ids, use_cache=False).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += len(prompt) - 1
    # of 2,048 tokens; what its teacher's losses are is in examples/pair/README.md
    assert total / count < 0.5 * math.log(config.vocab_size)


def test_a_few_outputs_are_those_of_transformers(
    target: Any, prompts: list[list[int]], engine: Engine
) -> None:
    chosen = [prompts[0], prompts[5][:17], prompts[9][:64]]
    references = [generate(target, prompt, 40) for prompt in chosen]
    assert check(engine, "off", chosen, references) == 1.0
    assert check(engine, CHAIN.name, chosen, references) > 1.5
    assert check(engine, TREE.name, chosen, references) > 1.5
    assert check(engine, SUFFIX.name, chosen[:1], references[:1]) >= 1.0


def test_a_fitted_head_drafts_for_it(target: Any, prompts: list[list[int]], tmp_path: Path) -> None:
    """Hidden states of layers that keep states are those that the head was fitted to."""
    own = compiled(tmp_path, (CHAIN,), (HYBRID, HYBRID.parent / "eagle"))
    references = [generate(target, prompt, 40) for prompt in prompts[:4]]
    assert check(own, CHAIN.name, prompts[:4], references) > 1.4


def test_a_node_takes_a_tenth_of_a_snapshot(engine: Engine) -> None:
    """Three layers of 512 inputs a convolution, and 8 heads of 32 × 32 with 4 of keys."""
    assert engine.manifest is not None
    model = engine.manifest.models[0]
    assert [(slab.kind, slab.num_layers) for slab in model.state_slabs] == [
        ("conv", 3),
        ("recurrence", 3),
    ]
    assert model.state_bytes == 3 * 4 * (3 * 512 + 8 * 32 * 32)
    assert model.replay_bytes == 3 * 4 * (512 + 4 * 32 + 8 * 32 + 2 * 8)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, BATCH])
def test_all_outputs_are_those_of_transformers(
    target: Any, prompts: list[list[int]], all_plans: Engine, batch: int
) -> None:
    references = [generate(target, prompt, 128) for prompt in prompts]
    lengths: dict[str, list[float]] = {name: [] for name in NAMES}
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        for name in NAMES:
            lengths[name].append(check(all_plans, name, prompts[part], references[part]))
    mean = {name: sum(values) / len(values) for name, values in lengths.items()}
    assert mean["off"] == 1.0
    # a tree of three levels beside a chain of four
    assert mean[CHAIN.name] > 1.8
    assert mean[TREE.name] > 1.8


@pytest.mark.slow
def test_thousands_of_tokens_are_those_of_transformers(
    target: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Whatever a state loses or gains in a step would add up."""
    models = with_positions(tmp_path, HYBRID), with_positions(tmp_path, PAIR / "draft")
    engine = compiled(tmp_path, PLANS, models, max_seq_len=POSITIONS, prefill_chunk=16)
    chosen = [prompts[0][:40], prompts[5][:17]]
    references = [generate(target, prompt, 2000) for prompt in chosen]
    for name in NAMES:
        assert (check(engine, name, chosen, references) > 1.0) == (name != "off")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [SUFFIX.name, LOOKUP.name, CHAIN.name])
def test_documents_are_valid_and_those_of_off(all_plans: Engine, plan: str) -> None:
    """The case in which drafts that are right elsewhere have left states behind a step."""
    path = Path(__file__).parents[1] / "measure" / "structured.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules[path.stem] = script
    spec.loader.exec_module(script)
    texts = script.read_prompts([PAIR / file.name for file in script.FILES], 4)
    wanted: dict[str, list[list[int]]] = {}
    params = SamplingParams(max_tokens=400, temperature=0)
    for name in ("off", plan):
        row = script.measure_plan(all_plans, name, texts, params, wanted)
        assert row["num_valid"] == row["num_as_off"] == row["num_outputs"] == 20
    assert row["tokens_per_step"] > 1.05
