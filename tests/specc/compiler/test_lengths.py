"""How long sequences may be: positions, rotary lengths, and the rows that caches hold."""

from __future__ import annotations

import types

import pytest

from specc.artifact.manifest import Manifest
from specc.cli.render import cache_room, rotary_lines
from specc.compiler.build import build
from specc.errors import ConfigError, UnsupportedRotaryError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests.models import build_model, save_tiny
from tests.specc.compiler.builds import NUM_TOKENS, PROMPTS, TREE, Custom, options, refused


def test_longer_than_the_models_positions(models, tmp_path):
    config = options(max_seq_len=257)
    found = refused(ConfigError, tmp_path, models / "target", None, config)
    assert found == "--max-seq-len 257; the target model has 256 positions"


def test_longer_than_the_drafts_positions(models, tmp_path):
    draft = build_model("llama", num_hidden_layers=1, max_position_embeddings=32)
    config = options(SpecPlan.from_widths((1,)), max_seq_len=33)
    found = refused(ConfigError, tmp_path, models / "target", draft, config)
    assert "the draft 0 model has 32 positions" in found


@pytest.mark.parametrize(
    ("positions", "length"),
    [
        pytest.param(40, 40, marks=pytest.mark.slow),
        (100_000, 64),
        pytest.param(None, 64, marks=pytest.mark.slow),
    ],
)
def test_max_seq_len_defaults_to_the_models_positions(tmp_path, positions, length):
    """Custom has a table of 64 positions, whatever a config says."""
    target = Custom()
    if positions:
        target.config = types.SimpleNamespace(max_position_embeddings=positions)
    config = options(max_seq_len=None)
    limits = build(target, None, tmp_path / "engine", config).manifest.limits
    assert limits.max_seq_len == length


def test_dynamic_rotary_of_a_module(models, tmp_path):
    target = build_model("llama", num_hidden_layers=1)
    target.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    found = refused(UnsupportedRotaryError, tmp_path, target, None, options(max_seq_len=300))
    assert "LlamaForCausalLM: rotary scaling dynamic" in found


@pytest.mark.slow
def test_one_rotary_length_for_every_position(tmp_path):
    """Beyond a model's own length: said aloud, in the manifest, and the same with a draft."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    changes = {"rope_parameters": rope, "num_hidden_layers": 1, "max_position_embeddings": 32}
    target = save_tiny("llama", tmp_path / "model", **changes)
    config = options(TREE, backend="eager", max_seq_len=96, rope_length=128)
    compilation = build(target, target, tmp_path / "engine", config)
    assert sum("--rope-length 128" in text for text in compilation.warnings) == 2
    models = Manifest.from_json(compilation.manifest.to_json()).models
    assert [(model.rope_length, model.max_position) for model in models] == [(128, 128)] * 2
    assert "pass of 128 tokens" in rotary_lines(compilation.manifest)[0]
    engine = Engine.load(tmp_path / "engine")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain, tree = (
        [output.outputs[0].token_ids for output in LLM(engine, plan=plan).generate(PROMPTS, params)]
        for plan in ("off", TREE.name)
    )
    assert plain == tree
    assert all(len(tokens) == 40 for tokens in plain)


def test_a_cache_of_fewer_tokens(models, tmp_path):
    """Said at compile: planned, loaded and shown; a load may still say another size."""
    config = options(backend="eager", kv_cache_tokens=53)
    manifest = build(models / "target", None, tmp_path / "engine", config).manifest
    worst = build(models / "target", None, tmp_path / "worst", options(backend="eager")).manifest
    assert Manifest.from_json(manifest.to_json()).limits.kv_cache_tokens == 53
    # blocks of 16: three of them, where two sequences of 64 tokens need five each
    assert worst.memory_plan["target"].cache * 3 == manifest.memory_plan["target"].cache * 10
    assert manifest.memory_of((0,)) == manifest.total_memory
    assert manifest.memory_of((0,), kv_cache_tokens=1000) == worst.total_memory
    assert manifest.memory_of((0,), max_num_seqs=1) == manifest.total_memory
    assert "caches hold 48 tokens" in cache_room(manifest)
    assert cache_room(worst) == ""
    for kv_cache_tokens, num_blocks in ((None, 3), (16, 1), (160, 10)):
        engine = Engine.load(tmp_path / "engine", kv_cache_tokens=kv_cache_tokens)
        assert engine.cache.shape.num_blocks == num_blocks
    llm, other = LLM(Engine.load(tmp_path / "engine")), LLM(Engine.load(tmp_path / "worst"))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found, expected = (
        [output.outputs[0].token_ids for output in item.generate(PROMPTS, params)]
        for item in (llm, other)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"kv_cache_tokens": 15}, "--kv-cache-tokens 15"),
        ({"kv_cache_tokens": 161}, "--kv-cache-tokens 161"),
        ({"kv_cache_tokens": 64, "block_size": 0}, "a cache of one block a sequence"),
    ],
)
def test_caches_that_cannot_be(models, tmp_path, changes, found):
    config = options(backend="eager", **changes)
    assert found in refused(ConfigError, tmp_path, models / "target", None, config)
