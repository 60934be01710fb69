"""Loading an engine directory."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from specc.artifact.manifest_entries import LimitsEntry, PlanEntry, TokenizerEntry
from specc.drafters.registry import drafters_of
from specc.errors import ConfigError, EngineError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan

PROMPTS = [[1, 2, 3], [40] * 20, [7]]
CHAIN = SpecPlan.from_widths((1, 1, 1, 1))


@pytest.fixture
def engine_copy(saved_engine, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_engine.path, tmp_path / "engine"))


@pytest.mark.parametrize("plan", ["off", "chain-4", "tree-3-2-1"])
def test_loaded_engine_decodes_like_the_dense_model(saved_engine, plan: str) -> None:
    llm = LLM(saved_engine.path, plan=plan)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.outputs[0].token_ids == saved_engine.greedy(prompt, 12)
    if plan == "chain-4":
        assert llm.get_metrics().acceptance_rate == 1.0


def test_facts_of_a_loaded_engine(saved_engine) -> None:
    engine = Engine.load(str(saved_engine.path))
    assert list(engine.plans) == ["off", "chain-4", "tree-3-2-1"]
    assert engine.default_plan == "chain-4"
    assert (engine.vocab_size, engine.max_seq_len, engine.position_limit) == (61, 64, 64)
    assert engine.eos_token_ids == {60}
    assert len(engine.drafts) == 1
    assert engine.cache.slabs["target"][0].shape == (1, 2, 3 * 5, 16, 1, 16)
    assert engine.tokenizer is not None
    assert engine.manifest is not None


def test_max_num_seqs_sizes_the_caches(saved_engine) -> None:
    engine = Engine.load(saved_engine.path, max_num_seqs=1)
    assert engine.cache.shape.num_blocks == 5
    for number in (0, 4):
        with pytest.raises(ConfigError, match="max_num_seqs"):
            Engine.load(saved_engine.path, max_num_seqs=number)


def test_kv_cache_tokens_size_the_pool(saved_engine) -> None:
    worst = Engine.load(saved_engine.path).cache.shape
    size = worst.block_size
    engine = Engine.load(saved_engine.path, kv_cache_tokens=4 * size + 1)
    assert engine.cache.shape.num_blocks == engine.cache.allocator.num_free == 4
    assert all(s.shape[2] == 4 for slabs in engine.cache.slabs.values() for s in slabs)
    llm = LLM(engine)
    found = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert output.outputs[0].token_ids == saved_engine.greedy(prompt, 12)
    for wrong in (size - 1, worst.num_blocks * size + 1):
        with pytest.raises(ConfigError, match=f"kv_cache_tokens {wrong}"):
            Engine.load(saved_engine.path, kv_cache_tokens=wrong)


def test_num_threads(saved_engine) -> None:
    before = torch.get_num_threads()
    try:
        Engine.load(saved_engine.path, num_threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    for wrong in (0, -1, 10_000):
        with pytest.raises(ConfigError, match=f"num_threads {wrong}"):
            Engine.load(saved_engine.path, num_threads=wrong)


def test_tokenizer_settings_of_training_are_dropped(engine_copy: Path, save_engine_to) -> None:
    engine = Engine.load(engine_copy)
    tokenizer = engine.tokenizer
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    (engine_copy / "tokenizer.json").write_text(tokenizer.to_str())
    manifest = json.loads((engine_copy / "manifest.json").read_text())
    manifest["files"]["tokenizer.json"]["bytes"] = (engine_copy / "tokenizer.json").stat().st_size
    (engine_copy / "manifest.json").write_text(json.dumps(manifest))
    reloaded = Engine.load(engine_copy, verify=False).tokenizer
    assert reloaded.encode("abcd").ids == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"draft_dtype": "float8"}, "draft_0 of dtype float8", id="dtype"),
        pytest.param(
            {"plans": (PlanEntry.of(CHAIN, "steps/chain-4.json"),)},
            "plan off among them",
            id="no-off",
        ),
        pytest.param(
            {"plans": (PlanEntry.of(CHAIN, "steps/off.json"),)},
            r"steps/off\.json holds",
            id="plan-and-file-differ",
        ),
        pytest.param(
            {
                "plans": (
                    PlanEntry.of(
                        dataclasses.replace(CHAIN, drafters=drafters_of("lookup-3")),
                        "steps/chain-4.json",
                    ),
                )
            },
            r"steps/chain-4\.json holds",
            id="plan-and-file-differ-in-the-draft",
        ),
    ],
)
def test_unusable_manifest(save_engine_to, tmp_path: Path, changes, message) -> None:
    saved = save_engine_to(tmp_path / "engine", **changes)
    with pytest.raises(EngineError, match=message):
        Engine.load(saved.path)


def test_malformed_tokenizer(engine_copy: Path) -> None:
    file = engine_copy / "tokenizer.json"
    file.write_bytes(b"{" * file.stat().st_size)
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        Engine.load(engine_copy, verify=False)


def test_dense_caches_and_no_tokenizer(save_engine_to, tmp_path: Path) -> None:
    saved = save_engine_to(
        tmp_path / "engine",
        limits=LimitsEntry(3, 64, 0, 32, 16, 512),
        tokenizer=TokenizerEntry(None, "", (60,), None, False),
    )
    llm = LLM(saved.path)
    assert llm.tokenizer is None
    assert llm.engine.cache.slabs["target"][0].shape == (1, 2, 3, 80, 1, 16)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.outputs[0].token_ids == saved.greedy(prompt, 12)
