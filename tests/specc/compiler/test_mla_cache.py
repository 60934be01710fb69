"""`--mla-cache`, from the option to engines: planned, written, run, cut, refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import open_engine, read_manifest
from specc.artifact.manifest import Manifest
from specc.artifact.mla_cache import AUTO, EXPANDED, LATENT
from specc.bench.step_bytes import step_bytes
from specc.cli import render
from specc.compiler.build import build
from specc.compiler.reshard import reshard_engine
from specc.config import CompileConfig
from specc.errors import ConfigError, UnsupportedAttentionError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from tests import engines
from tests import quantized_checkpoints as made
from tests.models import MAX_SEQ_LEN, save_tiny
from tests.runtime.ranks.conftest import OPTIONS

# of keys, of the part that heads share, of values, and of the latent
WIDTHS = {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 20}
LAYERS, HEADS = 2, 4
PLANS = (
    SpecPlan.from_widths((2, 2, 1)),
    SpecPlan.from_widths((1, 1, 1), ("self_w32_s4",)),
    SpecPlan.from_widths((1, 1), ("self_w32_s4_b32",)),
    SpecPlan.from_widths((2, 1), ("self_l0",)),
)
# the last is longer than the windows of the drafts
PROMPTS = [[5, 17, 3, 99, 41, 7, 7], [64], [*range(1, 70)]]
BACKENDS = ["eager", pytest.param("cpu", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_tiny("deepseek_v3", root / "target", **WIDTHS)
    save_tiny("deepseek_v3", root / "draft", noise=0.1, **WIDTHS)
    # without experts, whose layers are too heavy to be cut from those before them
    save_tiny("minicpm3", root / "dense", **WIDTHS)
    save_tiny("llama", root / "llama")
    return root


def config_for(*plans: SpecPlan, **changes: Any) -> CompileConfig:
    fields: dict[str, Any] = {
        "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "prefill_chunk": 64, "probe": False,
        "backend": "eager",
    }  # fmt: skip
    return CompileConfig(plans=plans, **(fields | changes))


def load(path: Path, **options: Any) -> Engine:
    """An engine whose rows that nobody wrote are no zeros."""
    engine = Engine.load(path, **options)
    for slabs in engine.cache.slabs.values():
        for slab in slabs:
            if slab.is_floating_point():
                slab.normal_(0.0, 30.0)
            else:
                slab.random_(-128, 127)
    return engine


def generate(engine: Engine, plan: str = "off", num_tokens: int = 24) -> list[list[int]]:
    llm = LLM(engine, plan=plan)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    outputs = [list(item.outputs[0].token_ids) for item in llm.generate(PROMPTS, params)]
    if plan != "off":
        assert llm.get_metrics().num_accepted_tokens > 0, plan
    return outputs


@pytest.fixture(scope="module")
def wanted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What an engine of expanded keys and values says, also with a tree."""
    path = tmp_path_factory.mktemp("expanded") / "engine"
    build(models / "target", models / "draft", path, config_for(PLANS[0], mla_cache=EXPANDED))
    engine = load(path)
    found = generate(engine)
    assert generate(engine, PLANS[0].name) == found
    return found


@pytest.fixture(scope="module", params=BACKENDS)
def built(models: Path, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Path:
    path = tmp_path_factory.mktemp("engines") / "engine"
    config = config_for(*PLANS, backend=request.param)
    return engines.build(models / "target", models / "draft", path, config)


def test_every_plan_gives_what_expanded_keys_do(built: Path, wanted: list[list[int]]) -> None:
    engine = load(built)
    for plan in ("off", *(plan.name for plan in PLANS)):
        assert generate(engine, plan) == wanted, plan


@pytest.mark.slow  # programs of networks are compared by test_padded_latent.py of passes
def test_networks_give_what_expanded_keys_do(
    models: Path, tmp_path: Path, wanted: list[list[int]]
) -> None:
    """On onnxruntime, whose caches have one row of each token and layer."""
    path = tmp_path / "engine"
    config = config_for(PLANS[0], backend="onnx")
    compilation = build(models / "target", models / "draft", path, config)
    manifest = compilation.manifest
    assert all(layer.values_in_keys for item in manifest.models for layer in item.layers)
    engine = load(path)
    (slab,) = engine.cache.slabs["target"]
    assert (*slab.shape[:2], *slab.shape[3::2]) == (LAYERS, 1, 1, 28)
    for plan in ("off", PLANS[0].name):
        assert generate(engine, plan) == wanted, plan
    # and its graph without onnxruntime
    assert generate(load(path, backend="eager"), PLANS[0].name) == wanted


@pytest.mark.slow
def test_prompts_that_begin_alike_share_rows(built: Path, wanted: list[list[int]]) -> None:
    llm = LLM(load(built), plan=PLANS[0].name)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    for round in range(2):
        (output,) = llm.generate([PROMPTS[2]], params)
        assert output.outputs[0].token_ids == wanted[2]
        assert (output.num_cached_tokens or 0) >= 64 * round


def test_second_programs_take_the_same_caches(built: Path) -> None:
    manifest = read_manifest(built)
    files = [item.program_file for item in (*manifest.models, *manifest.self_drafts)]
    # of the target, the draft, and the self-draft of one layer
    assert len(files) == 3
    for file in files:
        inputs = json.loads((built / file).read_text())["inputs"]
        assert {(x["part"], *x["shape"]) for x in inputs if x["kind"] == "cache"} == {
            ("k", 1, 28), ("v", 1, 20),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "rows", "columns", "says"),
    [
        (AUTO, "auto", 28, "the first 20 columns of its key"),
        (LATENT, "int8", 28 + 4 + 20 + 4, "values of 20"),
        (EXPANDED, "auto", HEADS * (20 + 16), "values of 16"),
    ],
)
def test_what_is_planned_and_said(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
    rows: str,
    columns: int,
    says: str,
) -> None:
    config = config_for(mla_cache=choice, kv_cache_dtype=rows)
    compilation = build(models / "target", None, tmp_path / "engine", config)
    manifest = open_engine(tmp_path / "engine")
    assert Manifest.from_json(manifest.to_json()) == manifest
    engine = load(tmp_path / "engine")
    (slab,) = engine.cache.slabs["target"]
    row_bytes = LAYERS * columns * (1 if rows == "int8" else 4)
    assert slab.nbytes == row_bytes * manifest.limits.cache_rows()
    assert manifest.memory_plan["target"].cache == slab.nbytes
    assert step_bytes(tmp_path / "engine", manifest, OFF, 10, 1).kv_cache == 10 * row_bytes
    monkeypatch.setenv("COLUMNS", "200")
    console = render.make_console()
    with console.capture() as capture:
        console.print(render.layers_table(manifest.models))
    assert says in " ".join(capture.get().split())
    counts = [x.rewrites for x in compilation.records if x.phase == "latent"]
    assert counts == ([] if choice == EXPANDED else [LAYERS])


@pytest.mark.slow
def test_rows_of_int8_give_what_off_does(models: Path, tmp_path: Path) -> None:
    config = config_for(*PLANS[:2], kv_cache_dtype="int8")
    engines.build(models / "target", models / "draft", tmp_path / "engine", config)
    engine = load(tmp_path / "engine")
    off = generate(engine)
    for plan in PLANS[:2]:
        assert generate(engine, plan.name) == off


@pytest.mark.slow
def test_segments_run_as_a_whole_does(
    models: Path, tmp_path: Path, wanted: list[list[int]]
) -> None:
    build(models / "target", None, tmp_path / "engine", config_for(segments=True))
    assert read_manifest(tmp_path / "engine").segments is not None
    assert generate(load(tmp_path / "engine")) == wanted


@pytest.mark.slow
def test_weights_of_heads_are_not_quantized(models: Path, tmp_path: Path) -> None:
    config = config_for(PLANS[0], quantize="int8")
    engines.build(models / "target", models / "draft", tmp_path / "engine", config)
    inputs = json.loads((tmp_path / "engine/target/program.json").read_text())["inputs"]
    for name, is_quantized in (("kv_b_proj", False), ("kv_a_proj", False), ("q_b_proj", True)):
        found = {"quantized_of" in x for x in inputs if name in x.get("key", "")}
        # kv_a_proj has 28 outputs, fewer than a block
        assert found == {is_quantized}, name
    engine = load(tmp_path / "engine")
    assert generate(engine, PLANS[0].name) == generate(engine)


@pytest.mark.slow
@pytest.mark.parametrize("form", [made.whole(), made.float8_blocks(32)], ids=["int8", "fp8"])
def test_quantized_checkpoints(models: Path, tmp_path: Path, form: made.Format) -> None:
    """Wk and Wv are read as what their integers stand for, and that is said."""
    source = models / "target"
    written = made.write_checkpoint(source, tmp_path, form.config, form.writer, made.is_projection)
    config = config_for(weight_only=True)
    compilation = build(written.quantized, None, tmp_path / "engine", config)
    (warning,) = (text for text in compilation.warnings if "quantized weights" in text)
    assert "model.layers.0.self_attn.kv_b_proj.weight" in warning
    engine = load(tmp_path / "engine")
    assert engine.manifest.models[0].layers[0].values_in_keys
    build(written.exact, None, tmp_path / "plain", config_for(mla_cache=EXPANDED))
    assert generate(engine) == generate(load(tmp_path / "plain"))


@pytest.mark.slow
def test_ranks_have_the_latent_whole(models: Path, tmp_path: Path, wanted: list[list[int]]) -> None:
    """Wk and Wv are cut by heads; an engine that is cut anew is what is compiled for ranks."""
    whole, cut, again = (tmp_path / name for name in ("whole", "cut", "again"))
    build(models / "target", None, whole, config_for(PLANS[3]))
    build(models / "target", None, cut, config_for(PLANS[3], tensor_parallel_size=2))
    reshard_engine(whole, again, 2)
    manifests = [open_engine(path) for path in (whole, cut, again)]
    assert [item.memory_plan["target"].cache for item in manifests[1:]] == [
        manifests[0].memory_plan["target"].cache
    ] * 2
    same = {"created": "", "files": {}}
    first, second = (dataclasses.replace(item, **same) for item in manifests[1:])
    assert first == second
    entry = first.models[0]
    assert all(layer.values_in_keys and layer.num_heads == 2 for layer in entry.layers)
    for file in (entry.program_file, entry.shard_file, entry.rank_file(1)):
        assert (again / file).read_bytes() == (cut / file).read_bytes(), file
    shard = json.loads((cut / entry.shard_file).read_text())
    (key,) = {x["key"] for x in shard["weights"] if "layers.0.self_attn.kv_b_proj" in x["key"]}
    plan = next(x for x in shard["weights"] if x["key"] == key)
    assert plan["shape"] == [HEADS * 28, 20]
    assert [part["parts"] for part in plan["cuts"][0]] == [2]
    led = Engine.load(cut, ranks=OPTIONS)
    try:
        assert generate(led) == wanted
    finally:
        led.close()


@pytest.mark.slow
def test_stages_have_their_latents(models: Path, tmp_path: Path) -> None:
    build(models / "dense", None, tmp_path / "whole", config_for())
    build(models / "dense", None, tmp_path / "stages", config_for(pipeline_parallel_size=2))
    led = Engine.load(tmp_path / "stages", ranks=OPTIONS)
    try:
        assert generate(led) == generate(load(tmp_path / "whole"))
    finally:
        led.close()


# as GLM-4.7-Flash in half precision: heads can vote on blocks, and latents could not
ONE_WIDTH = {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20, "kv_lora_rank": 124}
BLOCKS = SpecPlan.from_widths((1, 1), ("self_w32_s4_b32",))


@pytest.fixture(scope="module")
def one_width(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    path: Path = tmp_path_factory.mktemp("one") / "target"
    save_tiny("minicpm3", path, **ONE_WIDTH, **heads)
    return path


@pytest.mark.slow
def test_heads_that_vote_stay_expanded(one_width: Path, tmp_path: Path) -> None:
    for plan, is_latent in ((PLANS[1], True), (BLOCKS, False)):
        config = config_for(plan, backend="cuda", dtype="float32")
        manifest = build(one_width, None, tmp_path / plan.name, config).manifest
        assert {layer.values_in_keys for layer in manifest.models[0].layers} == {is_latent}


def test_latents_that_cannot_vote(models: Path, one_width: Path, tmp_path: Path) -> None:
    """Advice is what helps: expanded keys where their backend knows them and they can vote."""
    config = config_for(BLOCKS, backend="cuda", dtype="float32", mla_cache=LATENT)
    with pytest.raises(ConfigError) as caught:
        build(one_width, None, tmp_path / "engine", config)
    assert "latents of 132 columns in float32" in caught.value.found
    assert caught.value.do == "leave out --mla-cache, or choose no blocks"
    # nor could the keys that they expand to
    wide = ONE_WIDTH | {"qk_nope_head_dim": 124, "v_head_dim": 16}
    two = save_tiny("minicpm3", tmp_path / "two", **wide)
    with pytest.raises(ConfigError) as caught:
        build(two, None, tmp_path / "engine", config_for(BLOCKS, backend="cuda", dtype="float32"))
    assert caught.value.found.endswith("and latents of 132 in float32")
    assert caught.value.do == "pass --dtype bfloat16, or --draft self:window=32,sink=4"


def test_what_cannot_be(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config_for(mla_cache="absorbed")
    assert caught.value.found == "--mla-cache absorbed"
    assert caught.value.needed == "auto or latent or expanded"
    with pytest.raises(ConfigError) as caught:
        build(models / "llama", None, tmp_path / "engine", config_for(mla_cache=LATENT))
    assert "--mla-cache latent" in caught.value.found
    config = config_for(mla_cache=LATENT, backend="tensorrt", decomposable_attention=True)
    with pytest.raises(UnsupportedAttentionError) as refused:
        build(models / "target", None, tmp_path / "engine", config)
    assert "keys of 28 columns and values of 20, and backend tensorrt" in refused.value.found
    assert refused.value.do == "compile with --backend cpu"
    # without them, keys and values of two widths are left
    config = config_for(mla_cache=EXPANDED, backend="onnx")
    with pytest.raises(UnsupportedAttentionError) as refused:
        build(models / "target", None, tmp_path / "engine", config)
    assert "keys of 20 columns and values of 16, and backend onnx" in refused.value.found
    assert not (tmp_path / "engine").exists()
