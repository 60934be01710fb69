"""Quantized caches for CUDA, without a GPU: a simulated device, kernels interpreted.

Tokens of every plan are those of plain decoding, in float32, on a CPU with the same rows: codes
that differ are next to a tie, and none of these is.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.directory import read_manifest
from specc.artifact.kv_rows import FP8, INT8, QUANTIZED_ROWS
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.kernels import ops
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import FUSE_PHASES, TRACED_PHASES, Pipeline
from specc.passes.rewrite.quantize_caches import QuantizeCaches
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from tests import engines, models
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.traces import trace_once

# the last one is longer than a piece, and than gpt-oss's window
PROMPTS = [[5, 6, 7, 8], [*range(3, 23)]]
TREE = SpecPlan.from_widths((2, 1))
# a self-draft chooses blocks where layers have no windows of their own
SELF = {"gpt_oss": "self_w16_s4"}


def plans_of(family: str) -> tuple[SpecPlan, ...]:
    return TREE, SpecPlan.from_widths((1, 1), (SELF.get(family, "self_w16_s4_b16"),))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine of a tiny model, drafted by the same one disturbed."""
    root = tmp_path_factory.mktemp("quantized")

    def make_one(family: str, backend: str, **options: Any) -> Path:
        sizes = {"num_hidden_layers": 2} if family == "gpt_oss" else {"num_hidden_layers": 1}
        for name, noise in (("target", 0.0), ("draft", 0.05)):
            if not (root / family / name).exists():
                models.save_tiny(family, root / family / name, noise=noise, **sizes)
        config = CompileConfig(
            backend=backend, probe=False, plans=plans_of(family), max_seq_len=80, max_batch_size=2,
            prefill_chunk=16, **options,
        )  # fmt: skip
        path = root / family / "-".join((backend, *map(str, options.values())))
        if not path.exists():
            engines.build(root / family / "target", root / family / "draft", path, config)
        return path

    return make_one


def generate(engine: Engine | Path, plan: str, count: int, **loaded: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = LLM(engine, plan=plan, **loaded).generate(PROMPTS, params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def plain(make: Any, family: str, kind: str, count: int) -> list[list[int]]:
    """Of an engine for the CPU."""
    return generate(make(family, "eager", kv_cache_dtype=kind), "off", count)


def spoiled(path: Path) -> Engine:
    """Loaded with rows that nobody has written: their scales are NaN."""
    engine = Engine.load(path, capture=CaptureLimits(sizes=(2,), max_seconds=0))
    for slabs in engine.cache.slabs.values():
        for slab in slabs:
            assert slab.dtype in (torch.int8, torch.uint8)
            slab.view(torch.int8).fill_(-1)
    return engine


@pytest.mark.parametrize("kind", QUANTIZED_ROWS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_captured_steps_say_what_plain_decoding_does(
    make: Any, device: SimulatedDevice, family: str, kind: str
) -> None:
    """With the oracles of the operators."""
    path = make(family, "cuda", kv_cache_dtype=kind)
    assert read_manifest(path).kv_cache_dtype == kind
    wanted = plain(make, family, kind, 16)
    assert len(set(wanted[1])) > 2
    for plan in (OFF, *plans_of(family)):
        assert generate(spoiled(path), plan.name, 16) == wanted, plan.name
    assert device.tapes


@pytest.mark.slow  # kernels are interpreted, element by element
@pytest.mark.parametrize(
    ("family", "kind"),
    # with norms of heads, and without rotation, for what is done to keys in int8
    [*itertools.product(("llama", "gpt_oss"), QUANTIZED_ROWS), ("qwen3", INT8), ("gpt2", INT8)],
)
@pytest.mark.parametrize("number", range(3), ids=["off", "tree", "self"])
def test_the_kernels_say_the_same(
    make: Any, device: SimulatedDevice, triton_kernels: None, family: str, kind: str, number: int
) -> None:
    """A prompt in pieces, then steps; no launch races."""
    from tests.kernels.cuda.races import watched

    plan = (OFF, *plans_of(family))[number].name
    path = make(family, "cuda", kv_cache_dtype=kind)
    wanted = plain(make, family, kind, 4)
    with watched(plan) as launches:
        assert generate(spoiled(path), plan, 4) == wanted
    names = {launch.name for launch in launches}
    writes = (
        ("_hadamard_kernel", "_write_kv_kernel") if family == "gpt2" else ("_rope_write_kernel",)
    )
    assert {"attend_kernel", "commit_kv_kernel", *writes} <= names
    assert not {name for name in names if name.endswith("norm_rope_write_kernel")}


@pytest.mark.parametrize("kind", [None, INT8])
def test_quantized_rows_are_written_apart_from_products(kind: str | None) -> None:
    """A program of the product has some columns of a row, and no scale."""
    program = trace_once(models.build_model("llama"), "target")
    quantized = (("rows", (partial(QuantizeCaches, kind),)),) if kind else ()
    Pipeline((*TRACED_PHASES, *quantized, *FUSE_PHASES, *cuda_phases(64))).run(program)
    fused = program.calls(ops.add_norm_rope_write, ops.embed_norm_rope_write)
    apart = program.calls(ops.rope_write)
    layers = len(program.layers)
    assert (len(fused), len(apart)) == ((0, layers) if kind else (layers, 0))


def test_latents_stay_in_the_type_of_the_model(make: Any) -> None:
    """Attention over latents reads no codes: keys and values of each head are cached."""
    path = make("minicpm3", "cuda", kv_cache_dtype=FP8)
    for entry in read_manifest(path).models:
        assert not any(layer.values_in_keys for layer in entry.layers)
        assert all(layer.num_kv_heads > 1 for layer in entry.layers)
    with pytest.raises(ConfigError) as caught:
        make("minicpm3", "cuda", kv_cache_dtype=FP8, mla_cache="latent")
    assert caught.value.found == ("--mla-cache latent with --kv-cache-dtype fp8, and backend cuda")
