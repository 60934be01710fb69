"""Engines whose draft is Medusa heads: logits, outputs, and heads that are always right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.bench.step_bytes import model_bytes
from specc.compiler.in_memory import load_config
from specc.errors import ConfigError
from specc.runtime.backends.program_files import read_json
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.speculation.plans import DynamicTree, SpecPlan
from tests import engines, models
from tests.draft_kinds.medusa import RIGS
from tests.heads import VOCAB, WIDTH
from tests.lossless import Zoo
from tests.medusa_heads import MEDUSA_CASES, MedusaCase, write_medusa, write_tensors
from tests.runtime.draft_cases import SIZES
from tests.runtime.head_rig import TREE, load, options

(RIG,) = RIGS


def test_what_programs_read(zoo: Zoo) -> None:
    """Every head reads a projection, its own or that of all."""
    for name in ("vllm-one", "faster"):
        path, case = RIG.engine(zoo, name, plans=(TREE,)), MEDUSA_CASES[name]
        manifest = Engine.load(path).manifest
        assert manifest is not None
        program = read_json(path / manifest.models[1].program_file)
        layer = WIDTH * (WIDTH + case.has_bias)
        floats = case.num_heads * (case.num_layers * layer + case.rows * WIDTH)
        columns = 8 * VOCAB if case.kept < VOCAB else 0
        assert model_bytes(program).weights == 4 * floats + columns


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


def test_memory_of_heads(zoo: Zoo) -> None:
    manifest = Engine.load(RIG.engine(zoo)).manifest
    assert manifest is not None
    heads, memory = manifest.models[1], manifest.memory_plan["draft_0"]
    assert (heads.layers, heads.slabs, heads.vocab_size) == ((), (), VOCAB)
    # of 4 heads, and of the 3 levels of a tree, for each of 4 sequences
    assert memory.logits == 4 * (4 + 3) * VOCAB * 4
    # of each head, until they are joined
    assert memory.workspace >= 4 * 4 * VOCAB * 4


@pytest.mark.parametrize("name", ["vllm", "faster"])
def test_shapes_alone_have_no_hidden_states(name: str, tmp_path: Path) -> None:
    """Named for what they are, by their configuration: no weights need be there."""
    write_medusa(tmp_path, MEDUSA_CASES[name])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="--synthetic and the Medusa heads") as raised:
        load_config(tmp_path)
    assert "--synthetic TARGET --draft eagle3" in raised.value.do
