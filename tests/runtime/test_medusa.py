"""Engines whose draft is Medusa heads: logits, outputs, and heads that are always right."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specc.artifact.manifest import Manifest
from specc.bench.step_bytes import model_bytes
from specc.cli.render import head_lines
from specc.compiler.build import build
from specc.compiler.in_memory import load_config
from specc.errors import ConfigError, SpeccError
from specc.runtime.backends.program_files import read_json
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from tests import engines, models
from tests.heads import CASES, LAYERS, VOCAB, WIDTH, write_head
from tests.lossless import Zoo
from tests.medusa_heads import (
    MEDUSA_CASES,
    MedusaCase,
    MedusaReference,
    draw_tensors,
    write_medusa,
    write_tensors,
)
from tests.runtime.block_rig import BlockOracle
from tests.runtime.draft_cases import (
    SIZES,
    compiler_of,
    open_target,
    outputs,
    serve_in_little_room,
    serve_with_pauses,
    write_target,
)
from tests.runtime.head_rig import (
    BLOCK,
    CHAIN,
    CLOSE,
    DYNAMIC,
    TREE,
    load,
    options,
    owner_of,
    prompts_of,
    serve,
)
from tests.tiers import every

NAME = "vllm"


class MedusaOracle(BlockOracle):
    """Compares what heads compute in an engine with their formulas. They keep no rows."""

    def check_rows(self, engine: Engine, request: Request) -> None:
        assert request.draft_lens[self.number] == 0
        self.num_rows += 1

    def _look(self, core: EngineCore, given: Sequence[Any], logits: Tensor) -> None:
        cache_len, table, logit_rows = given[4], given[6], given[7]
        requests = [owner_of(core, row.tolist()) for row in table]
        assert logit_rows.tolist() == list(range(len(requests)))
        found = logits.view(len(requests), -1, logits.shape[1])
        for b, request in enumerate(requests):
            assert int(cache_len[b]) == request.cache_len == len(request.token_ids) - 1
            taps = self.taps(request, request.cache_len)
            wanted = self.reference.proposed(taps, request.token_ids[-1])
            torch.testing.assert_close(found[b], wanted, **CLOSE)
            self.num_passes += 1


@pytest.fixture(scope="module")
def target(zoo: Zoo) -> Path:
    return write_target(zoo)


@pytest.fixture(scope="module")
def oracle_of(target: Path) -> Callable[..., MedusaOracle]:
    model = open_target(target)

    def make(name: str = NAME, number: int = 0) -> MedusaOracle:
        case = MEDUSA_CASES[name]
        reference: Any = MedusaReference(case, draw_tensors(case))
        return MedusaOracle(model, reference, number)

    return make


@pytest.fixture(scope="module")
def compiled(zoo: Zoo, target: Path) -> Callable[..., Path]:
    return compiler_of(zoo, target, "medusa", MEDUSA_CASES, write_medusa, NAME)


@pytest.mark.parametrize("plan", every(3, [CHAIN, TREE, DYNAMIC], 1), ids=lambda plan: plan.name)
def test_logits_of_every_depth(
    plan: SpecPlan, compiled: Callable[..., Path], oracle_of: Callable[..., MedusaOracle]
) -> None:
    """Chunks, requests that join, prefixes that are shared, acceptances and rejections."""
    core, oracle = EngineCore(load(compiled()), plan.name), oracle_of()
    oracle.watch(core)
    if plan.is_static:
        oracle.check_trees(core, plan)
    params = {"rule": "mss"} if plan.is_static else {}
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5, **params)
    stats = core.scheduler.stats
    assert oracle.num_passes > 15
    assert not plan.is_static or oracle.num_nodes > 50
    assert stats.num_cached_tokens > 2 * BLOCK
    assert stats.mean_acceptance_length > 1.0


def test_requests_that_had_to_give_way(
    compiled: Callable[..., Path], oracle_of: Callable[..., MedusaOracle]
) -> None:
    oracle = oracle_of()
    serve_in_little_room(compiled(), oracle)
    assert oracle.num_passes > 30


def test_heads_that_did_not_draft_for_a_while(
    compiled: Callable[..., Path], oracle_of: Callable[..., MedusaOracle]
) -> None:
    """They have nothing to read of what came without them."""
    oracle = oracle_of()
    serve_with_pauses(compiled(), oracle)
    assert oracle.num_passes == 8


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "vllm-one" else pytest.mark.slow)
             for x in MEDUSA_CASES if x != NAME]
)  # fmt: skip
def test_heads_of_every_layout(
    name: str, compiled: Callable[..., Path], oracle_of: Callable[..., MedusaOracle]
) -> None:
    path, case = compiled(name, plans=(TREE,)), MEDUSA_CASES[name]
    core, oracle = EngineCore(load(path), TREE.name), oracle_of(name)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK)[1:4], num_tokens=6, temperature=1.5)
    assert oracle.num_passes > 5
    # every head reads a projection, its own or that of all
    assert core.engine.manifest is not None
    program = read_json(path / core.engine.manifest.models[1].program_file)
    layer = WIDTH * (WIDTH + case.has_bias)
    floats = case.num_heads * (case.num_layers * layer + case.rows * WIDTH)
    columns = 8 * VOCAB if case.kept < VOCAB else 0
    assert model_bytes(program).weights == 4 * floats + columns


@pytest.mark.parametrize("plan", every(3, [CHAIN, TREE, DYNAMIC], 2), ids=lambda plan: plan.name)
def test_outputs_are_those_without_drafts(plan: SpecPlan, compiled: Callable[..., Path]) -> None:
    engine = Engine.load(compiled())
    assert outputs(EngineCore(engine, plan.name)) == outputs(EngineCore(engine, "off"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, "faster-file"])
@pytest.mark.parametrize("block_size", [BLOCK, 0])
def test_compiled_programs(name: str, block_size: int, compiled: Callable[..., Path]) -> None:
    path = compiled(name, f"cpu-{block_size}", backend="cpu", block_size=block_size)
    engine = Engine.load(path)
    plain = outputs(EngineCore(engine, "off"))
    for plan in (CHAIN, TREE, DYNAMIC):
        assert outputs(EngineCore(engine, plan.name)) == plain


MERGED = SpecPlan.from_widths((2, 1), ("draft_0", "draft_1"), MERGE)
VOTED = SpecPlan.from_widths((1, 1), ("draft_0", "draft_1", "lookup-3"), VOTE)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [MERGED, VOTED], ids=lambda plan: plan.name)
def test_beside_other_drafts(
    plan: SpecPlan, zoo: Zoo, target: Path, oracle_of: Callable[..., MedusaOracle]
) -> None:
    sizes = {**SIZES, "num_hidden_layers": 1}
    other = zoo.once("head-beside", lambda path: models.save_tiny("llama", path, 77, **sizes))
    heads = zoo.once(f"medusa-{NAME}", lambda path: write_medusa(path, MEDUSA_CASES[NAME]))
    path = zoo.once(
        "medusas-beside",
        lambda made: engines.build(target, [other, heads], made, options(plans=(MERGED, VOTED))),
    )
    core, oracle = EngineCore(load(path), plan.name), oracle_of(NAME, 1)
    oracle.watch(core)
    texts = prompts_of(BLOCK)[1:3]
    found = serve(core, oracle, texts, num_tokens=8, temperature=1.5)
    assert oracle.num_passes > 4
    oracle.reset()
    plain = serve(EngineCore(load(path), "off"), oracle, texts, num_tokens=8, temperature=1.5)
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in plain]


@pytest.mark.slow
def test_trees_in_tiles(
    compiled: Callable[..., Path], oracle_of: Callable[..., MedusaOracle]
) -> None:
    tiled = replace(TREE, name="tiled", tile=4)
    core = EngineCore(load(compiled(NAME, "tiles", plans=(tiled,))), tiled.name)
    oracle = oracle_of()
    oracle.watch(core)
    assert core.engine.plans[tiled.name].tile == tiled.tile
    found = serve(core, oracle, prompts_of(BLOCK)[:3])
    oracle.reset()
    plain = serve(EngineCore(core.engine, "off"), oracle, prompts_of(BLOCK)[:3])
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in plain]


DEPTH = 4
PLANTED = MedusaCase("vLLM", DEPTH, has_bias=False, boundaries=(2,))


@pytest.fixture(scope="module")
def planted(zoo: Zoo) -> tuple[Path, Path]:
    """A target that counts, id by id, and heads that count on."""

    def count(path: Path) -> None:
        models.save_tiny("llama", path, **{**SIZES, "num_hidden_layers": 2})
        tensors = load_file(path / "model.safetensors")
        generator = torch.Generator().manual_seed(2)
        rows = torch.nn.functional.normalize(torch.randn(VOCAB, WIDTH, generator=generator))
        for key in tensors:
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[key].zero_()
        tensors["model.norm.weight"].fill_(1.0)
        tensors["model.embed_tokens.weight"] = rows
        tensors["lm_head.weight"] = rows.roll(1, 0)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})

    def count_on(path: Path, counted: Path) -> None:
        write_medusa(path, PLANTED)
        rows = load_file(counted / "model.safetensors")["model.embed_tokens.weight"]
        tensors = {f"w.{j}.0": torch.zeros(WIDTH, WIDTH) for j in range(DEPTH)}
        # the head after that of the target is about the token after the next one
        tensors |= {f"out.{j}": rows.roll(2 + j, 0) for j in range(DEPTH)}
        write_tensors(path, PLANTED, tensors)

    target = zoo.once("medusa-counting", count)
    return target, zoo.once("medusa-planted", lambda path: count_on(path, target))


DEEP = (
    SpecPlan.from_widths((1,) * DEPTH),
    SpecPlan.from_widths((2, 1, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(9, 2, DEPTH)),
)


@pytest.mark.parametrize("backend", ["eager", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", DEEP, ids=lambda plan: plan.name)
def test_planted_heads_are_right_in_every_step(
    plan: SpecPlan, backend: str, zoo: Zoo, planted: tuple[Path, Path]
) -> None:
    config = options(plans=DEEP, backend=backend)
    path = zoo.once(
        f"medusas-planted-{backend}", lambda made: engines.build(*planted, made, config)
    )
    core, num_steps = EngineCore(load(path), plan.name), 3
    prompts = [[5], list(range(20, 31)), [90, 91]]
    params = SamplingParams(temperature=0, max_tokens=1 + num_steps * (DEPTH + 1), ignore_eos=True)
    requests = [core.requests.make(prompt, params) for prompt in prompts]
    for request in requests:
        core.scheduler.add(request)
    while core.scheduler.has_work:
        core.advance()
    for prompt, request in zip(prompts, requests, strict=True):
        wanted = [(prompt[-1] + 1 + i) % VOCAB for i in range(params.max_tokens)]
        assert request.output_token_ids == wanted
    stats = core.scheduler.stats
    assert stats.mean_acceptance_length == DEPTH + 1


def test_what_the_engine_says(compiled: Callable[..., Path]) -> None:
    engine = Engine.load(compiled())
    manifest = engine.manifest
    assert manifest is not None
    one, heads = manifest.models
    assert one.taps is not None
    assert (one.taps.boundaries, one.taps.is_last_normed, one.taps.width) == (
        (LAYERS,),
        True,
        WIDTH,
    )
    assert heads.head is not None
    assert (heads.head.kind, heads.head.layout, heads.head.width) == ("medusa", "vLLM", 0)
    assert (heads.layers, heads.slabs, heads.vocab_size) == ((), (), VOCAB)
    assert engine.cache.slabs["draft_0"] == []
    memory = manifest.memory_plan["draft_0"]
    assert memory.cache == 0
    # of 4 heads, and of the 3 levels of a tree, for each of 4 sequences
    assert memory.logits == 4 * (4 + 3) * VOCAB * 4
    # of each head, until they are joined
    assert memory.workspace >= 4 * 4 * VOCAB * 4
    assert [len(entry.blocks) for entry in manifest.plans] == [1, 1, 1, 0]
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    told = "\n".join(head_lines(manifest))
    assert "draft_0 is a set of Medusa heads (medusa, files of vLLM): it reads the target" in told
    assert "4 heads read one row: 4 tokens a pass" in told
    assert "was trained for" not in told


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"plans": (SpecPlan.from_widths((1,) * 5),)}, "chain-5 of depth 5, and draft_0, which"),
        ({"backend": "onnx", "block_size": 0}, "a set of Medusa heads .draft_0., and the"),
        ({"draft_kv": ("window=16,sink=2",)}, "--draft-kv window=16,sink=2, and the set of Medusa"),
        ({"draft_dtype": ("bfloat16",)}, "in bfloat16, which reads hidden states of float32"),
    ],
)
def test_what_heads_do_not_go_with(
    zoo: Zoo, target: Path, tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    heads = zoo.once(f"medusa-{NAME}", lambda path: write_medusa(path, MEDUSA_CASES[NAME]))
    with pytest.raises(SpeccError, match=found) as raised:
        build(target, heads, tmp_path / "e", options(**{"plans": (), **changes}))
    assert raised.value.do
    assert not (tmp_path / "e").exists()


def test_heads_that_read_other_places(zoo: Zoo, target: Path, tmp_path: Path) -> None:
    heads = zoo.once(f"medusa-{NAME}", lambda path: write_medusa(path, MEDUSA_CASES[NAME]))
    head = zoo.once("head-safeailab", lambda path: write_head(path, CASES["safeailab"]))
    with pytest.raises(SpeccError, match=r"boundaries 8 \(the last after the final norm\)"):
        build(target, [heads, head], tmp_path / "e", options(plans=()))


@pytest.mark.parametrize("name", [NAME, "faster"])
def test_shapes_alone_have_no_hidden_states(name: str, tmp_path: Path) -> None:
    """Named for what they are, by their configuration: no weights need be there."""
    write_medusa(tmp_path, MEDUSA_CASES[name])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="--synthetic and the Medusa heads") as raised:
        load_config(tmp_path)
    assert "--synthetic TARGET --draft eagle3" in raised.value.do
