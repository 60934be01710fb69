"""Drafts that are the target: over views, over blocks that are chosen, with fewer layers."""

from __future__ import annotations

import json

import pytest
import torch

from specc.artifact.backends import facts_of
from specc.compiler.build import build
from specc.errors import ConfigError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests.models import save_tiny
from tests.specc.compiler.builds import Custom, options, refused

VIEW = SpecPlan.from_widths((1, 1), ("self_w32_s4",))


@pytest.mark.parametrize(
    ("window", "sink", "changes", "found"),
    [
        (15, 4, {}, "--draft self:window=15,sink=4, and blocks of 16 rows"),
        (64, 4, {"max_seq_len": 80}, "in sequences of at most 80 tokens"),
        (16, 60, {"max_seq_len": 80}, "in sequences of at most 80 tokens"),
        (64, 4, {"block_size": 0}, "and --block-size 0"),
        (64, 4, {"backend": "onnx"}, "and the backend onnx"),
        (64, 4, {"backend": "tensorrt"}, "and the backend tensorrt"),
    ],
)
def test_views_that_cannot_be(models, tmp_path, window, sink, changes, found):
    plan = SpecPlan.from_widths((1, 1), (f"self_w{window}_s{sink}",))
    changes = {"max_seq_len": 200, "block_size": 16} | changes
    with pytest.raises(ConfigError) as caught:
        build(models / "target", None, tmp_path / "engine", options(plan, **changes))
    assert found in caught.value.found
    assert not list(tmp_path.iterdir())


def test_a_view_that_just_fits(models, tmp_path):
    """One block, and a budget one block below the longest sequence."""
    for window, length in ((16, 200), (48, 65)):
        plan = SpecPlan.from_widths((1, 1), (f"self_w{window}_s4",))
        config = options(plan, max_seq_len=length, block_size=16, backend="eager")
        manifest = build(models / "target", None, tmp_path / str(window), config).manifest
        assert [model.name for model in manifest.models] == ["target"]
        assert manifest.default_plan == plan.name


BLOCKS = SpecPlan.from_widths((1, 1, 1), ("self_w4_s0_b8",))


@pytest.mark.parametrize(
    ("view", "changes", "found"),
    [
        ("self_w16_s0_b15", {}, "--draft self:blocks=15,window=16,sink=0, and blocks of 16 rows"),
        ("self_w16_s4_b48", {"max_seq_len": 80}, "in sequences of at most 80 tokens"),
        ("self_w16_s4_b16", {"backend": "onnx"}, "and the backend onnx"),
    ],
)
def test_chosen_blocks_that_cannot_be(models, tmp_path, view, changes, found):
    config = options(
        SpecPlan.from_widths((1, 1), (view,)),
        **{"max_seq_len": 200, "block_size": 16} | changes,
    )
    assert found in refused(ConfigError, tmp_path, models / "target", None, config)


def test_only_engines_that_choose_blocks_ask_for_votes(models, tmp_path):
    """In all layers of the target, not in a draft; programs of other engines are what they were."""
    programs = {}
    chain = SpecPlan.from_widths((1,))
    kinds = {"off": (chain,), "window": (chain, VIEW), "blocks": (chain, VIEW, BLOCKS)}
    for name, plans in kinds.items():
        config = options(*plans, max_seq_len=64, block_size=4, backend="eager")
        manifest = build(models / "target", models / "draft", tmp_path / name, config).manifest
        for model in manifest.models:
            programs[name, model.name] = (tmp_path / name / model.program_file).read_text()
    for model in ("target", "draft_0"):
        assert programs["window", model] == programs["off", model]
    assert programs["blocks", "draft_0"] == programs["off", "draft_0"]
    found = json.loads(programs["blocks", "target"])
    inputs = [(entry["name"], entry["kind"]) for entry in found["inputs"]]
    place = inputs.index(("mass", "input"))
    assert inputs[place - 1] == ("logit_rows", "input")
    assert {kind for _, kind in inputs[place + 1 :]} == {"cache"}
    calls = [node.get("target") for node in found["graph"]["nodes"]]
    assert calls.count("specc.block_mass.default") == calls.count("specc.tree_attention.default")
    before = json.loads((tmp_path / "window" / f"steps/{VIEW.name}.json").read_text())
    after = json.loads((tmp_path / "blocks" / f"steps/{VIEW.name}.json").read_text())
    assert before == after


@pytest.mark.slow
def test_an_engine_that_chooses_blocks(models, tmp_path):
    """Compiled and as graphs: the same tokens as without, from the same drafts."""
    config = options(BLOCKS, max_seq_len=64, block_size=4, backend="cpu")
    build(models / "target", None, tmp_path / "engine", config)
    prompts = [[5, 17, 3, 99, 41, 7, 7] * 3, [64], list(range(1, 30))]
    params = SamplingParams(temperature=0, max_tokens=34, ignore_eos=True)
    found = {}
    for backend in ("cpu", "eager"):
        engine = Engine.load(tmp_path / "engine", backend=backend)
        for plan in ("off", BLOCKS.name):
            llm = LLM(engine, plan=plan, shares_prefixes=False)
            outputs = llm.generate(prompts, [params] * 3)
            stats = llm.get_metrics()
            tokens = [output.outputs[0].token_ids for output in outputs]
            found[backend, plan] = tokens, stats.num_spec_steps, stats.num_accepted_tokens
    for backend in ("cpu", "eager"):
        assert found[backend, BLOCKS.name][0] == found[backend, "off"][0] == found["cpu", "off"][0]
    assert found["cpu", BLOCKS.name] == found["eager", BLOCKS.name]


@pytest.mark.slow
def test_a_view_of_a_sliding_window(tmp_path):
    """A second program, unless no sequence outgrows the window."""
    config = options(VIEW, max_seq_len=64, block_size=16, backend="eager")
    for window, names in ((63, ["self_w32_s4"]), (64, [])):
        path = tmp_path / str(window)
        manifest = build(Custom(window=window), None, path, config).manifest
        assert [entry.name for entry in manifest.self_drafts] == names
        assert (path / "self-w32-s4" / "program.json").exists() == bool(names)
        assert ("self_drafts" in json.loads((path / "manifest.json").read_text())) == bool(names)
    found = refused(ConfigError, tmp_path, Custom(window=32), None, config)
    assert found.startswith("--draft self:window=32,sink=4; no layer of the target sees more than")


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "target"
    save_tiny("llama", path)
    return path


@pytest.mark.parametrize(
    ("draft", "changes", "found"),
    [
        ("self_l0to2", {}, "--draft self:layers=0-2, and a target of 2 layers"),
        ("self_x2", {}, "--draft self:skip=2, and a target of 2 layers"),
        ("self_x0to1", {}, "--draft self:skip=0-1, and a target of 2 layers"),
        ("self_l0to1", {}, "--draft self:layers=0-1, all 2 layers of the target"),
        ("self_l0_w8_s4", {}, "--draft self:layers=0,window=8,sink=4, and blocks of 16 rows"),
        (
            "self_l0_w64_s4",
            {},
            "--draft self:layers=0,window=64,sink=4, in sequences of at most 64",
        ),
        ("self_l0", {"block_size": 0}, "--draft self:layers=0 and --block-size 0"),
        ("self_l0_w16_s4_b16", {}, "--draft self:layers=0,blocks=16,window=16,sink=4: blocks, and"),
        ("self_l0", {"backend": "onnx"}, "--draft self:layers=0 and the backend onnx"),
    ],
)
def test_self_drafts_that_cannot_be(two_layers, tmp_path, draft, changes, found):
    plan = SpecPlan.from_widths((1, 1), (draft,))
    changes = {"block_size": 16, "backend": "eager"} | changes
    with pytest.raises(ConfigError) as caught:
        build(two_layers, None, tmp_path / "engine", options(plan, **changes))
    assert found in caught.value.found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_module", [False, True], ids=["checkpoint", "module"])
def test_heads_too_large_to_vote(tmp_path, monkeypatch, is_module):
    """Of a checkpoint before anything is traced; of a module, as soon as its layers are known."""
    target = Custom(dim=136)
    if not is_module:
        target = save_tiny("qwen3", tmp_path / "target", head_dim=136)
        monkeypatch.setattr("specc.compiler.build.compile_models", None)
    chain = SpecPlan.from_widths((1,), ("self_w16_s4_b16",))
    config = options(chain, max_seq_len=60, block_size=16, backend="cuda")
    found = refused(ConfigError, tmp_path, target, None, config)
    assert found == "--draft self:blocks=16,window=16,sink=4, and heads of 136 in float32"


def test_what_votes_is_what_the_kernel_takes():
    """What is refused early is what the kernel itself refuses."""
    from specc.kernels.cuda.block_mass import most_head_dim

    facts = facts_of("cuda")
    assert {x: facts.most_voting_dim(x) for x in facts.dtypes} == {
        x: most_head_dim(getattr(torch, x)) for x in facts.dtypes
    }
    assert facts_of("cpu").most_voting_dim("float32") is None
