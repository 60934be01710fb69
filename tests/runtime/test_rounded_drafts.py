"""Drafts that are the target with quantized weights: `--draft self:int8`.

What such a draft is to compute, a target that is compiled with `--quantize` says: the same logits,
bit for bit. What is drafted changes no output, so rows that are committed, and how much is
accepted, are looked at, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specc.artifact.directory import read_manifest
from specc.cli.render import self_draft_lines
from specc.compiler.reshard import reshard_engine
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, SpecPlan
from tests import engines, models
from tests.runtime.test_views import RowOracle, serve
from tests.tiers import every

# one layer of Gemma 3 sees all rows, the others 16; its head is tied to its embedding
NAME = "gemma3-tied"
INT4 = SpecPlan.from_widths((1, 1, 1), ("self_int4",))
PLANS = [
    INT4,
    SpecPlan.from_widths((2, 2, 1), ("self_int8",)),
    SpecPlan.from_widths((1, 1, 1), ("self_fp8_w8_s4",)),
    SpecPlan.from_widths((2, 1), ("self_int8_x0", "lookup-2"), MERGE),
]
LENGTHS = (3, 11, 16, 17, 21)


def config(backend: str, plans: Any = PLANS, **changes: Any) -> CompileConfig:
    sizes: dict[str, Any] = {"max_seq_len": 96, "max_batch_size": 5, "prefill_chunk": 16}
    more = {"block_size": 4, "probe": False} | changes
    return CompileConfig(plans=tuple(plans), backend=backend, **sizes, **more)


class Made:
    """An engine with such drafts, its checkpoint and an oracle of committed rows."""

    def __init__(self, root: Path, backend: str) -> None:
        self.root = root
        self.target = models.save_tiny(NAME, root / "target")
        self.path = engines.build(self.target, [], root / "engine", config(backend))
        self.engine = Engine.load(self.path)
        self.oracle = RowOracle(Engine.load(self.path, backend="eager"))
        torch.manual_seed(3)
        for slabs in self.engine.cache.slabs.values():
            for slab in slabs:
                slab.normal_(0.0, 30.0)


@pytest.fixture(scope="module", params=["eager", pytest.param("cpu", marks=pytest.mark.slow)])
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("plan", every(4, PLANS), ids=lambda plan: plan.name)
def test_tokens_and_rows_are_those_of_off(made: Made, plan: SpecPlan) -> None:
    dice = torch.Generator().manual_seed(11)
    texts = [torch.randint(0, models.VOCAB, (n,), generator=dice).tolist() for n in LENGTHS]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=i, temperature=i % 3 / 2)
        for i in range(5)
    ]
    off, own = (EngineCore(made.engine, x, shares_prefixes=False) for x in ("off", plan.name))
    before = made.oracle.num_rows
    found = serve(own, texts, params, lambda r: made.oracle.check(made.engine, r))
    assert found == serve(off, texts, params, lambda r: None)
    assert made.oracle.num_rows - before > 150
    stats = own.scheduler.stats
    assert stats.num_accepted_tokens > 0
    if plan is INT4:
        # the target itself would have all of them accepted
        assert stats.num_accepted_tokens < stats.num_spec_steps * plan.max_depth * 0.9


def logits(program: Any) -> Tensor:
    """After each token of a prompt, of a fresh sequence."""
    tokens = torch.arange(3, 19)
    count = len(tokens)
    with torch.inference_mode():
        return program(
            tokens,
            torch.arange(count),
            torch.tensor([0, count], dtype=torch.int32),
            torch.arange(count, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            None,
            torch.arange(count // 4 + 1, dtype=torch.int32)[None],
            torch.arange(count),
        )


@pytest.mark.default("eager-int8")
@pytest.mark.parametrize("quantize", ["int8", pytest.param("int4", marks=pytest.mark.slow), "fp8"])
def test_a_draft_is_the_target_that_is_compiled_with_quantize(made: Made, quantize: str) -> None:
    plain = Engine.load(made.path, backend="eager")
    path = made.root / quantize
    off = config("eager", [SpecPlan.from_widths(())], quantize=quantize)
    quantized = Engine.load(engines.build(made.target, [], path, off))
    draft = next(
        program
        for name, program in plain.self_drafts.items()
        if name in (f"self_{quantize}", f"self_{quantize}_w8_s4")
    )
    # no sequence of these lengths outgrows a window but that of fp8
    found, want = logits(draft), logits(quantized.target)
    seen = slice(0, 8) if quantize == "fp8" else slice(None)
    assert torch.equal(found[seen], want[seen])
    assert not torch.equal(found, logits(plain.target))


def test_bytes_are_told(made: Made) -> None:
    manifest = read_manifest(made.path)
    held = load_file(made.path / "target" / "weights.safetensors")
    assert manifest.memory_plan["target"].weights == sum(item.nbytes for item in held.values())
    # the head has 8 bits in int4, too, and is there once
    assert sum(key.startswith("lm_head.weight:int8") for key in held) == 1
    layouts = {key.rpartition(":")[2] for key in held if ":" in key}
    assert {"int8", "int4-g64", "fp8"} <= layouts
    lines = self_draft_lines(manifest)
    assert (
        "self_int4 runs 3 of 3 layers of the target (0-2) on copies of its weights in int4-g64 and"
        " its caches" in lines
    )
    assert manifest.models[0].quantization is None


@pytest.mark.parametrize(
    ("draft", "options", "found"),
    [
        ("self_int8", {"backend": "onnx"}, "--draft self:int8 and the backend onnx"),
        ("self_int8", {"backend": "tensorrt"}, "--draft self:int8 and the backend tensorrt"),
        pytest.param(
            "self_int8",
            {"quantize": "int8"},
            "and a target whose weights are in int8, too",
            marks=pytest.mark.slow,
        ),
        ("self_int4_w16_s4_b16", {}, "blocks, and other weights"),
    ],
)
def test_drafts_that_cannot_be(made: Made, tmp_path: Path, draft, options, found) -> None:
    from specc.compiler.build import build

    given, plan = {"backend": "eager"} | options, SpecPlan.from_widths((1, 1), (draft,))
    backend = given.pop("backend")
    with pytest.raises(ConfigError) as caught:
        build(made.target, None, tmp_path / "engine", config(backend, [plan], **given))
    assert found in caught.value.found
    assert caught.value.do


@pytest.mark.parametrize("options", [{"pipeline_parallel_size": 2}, {"segments": True}])
def test_stages_and_segments_are_refused(options) -> None:
    with pytest.raises(ConfigError, match="--draft self:int4"):
        config("eager", [INT4], **options)


@pytest.mark.slow
def test_such_engines_are_not_cut(made: Made, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"o_proj.weight:int4-g64, .* and 2 ranks"):
        reshard_engine(made.path, tmp_path / "cut", 2)
