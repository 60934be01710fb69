"""Hidden states that a target keeps of every token: those of transformers, whatever happened.

Nothing that is put out depends on them, so rows are compared: after every step, of every request
that runs, over all rows that are committed by then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.artifact.manifest import Manifest
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.runtime.backends.engine_cache import features_of
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import DynamicTree, SpecPlan
from specc.speculation.taps import Taps
from tests import models
from tests.lossless import Zoo

NAME, CHUNK, NUM_TOKENS = "qwen3", 16, 20
PLANS = (
    SpecPlan.from_widths((1, 1, 1)),
    SpecPlan.from_widths((2, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(6, 3, 3)),
)
# the embedding, between the layers, and after both of them
TAPS = Taps((2, 0, 1))


def options(**changes: Any) -> CompileConfig:
    config = CompileConfig(
        plans=PLANS,
        max_batch_size=4,
        max_seq_len=models.MAX_SEQ_LEN,
        block_size=8,
        # prompts of more than one chunk
        prefill_chunk=CHUNK,
        backend="eager",
        probe=False,
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def compiled(zoo: Zoo) -> Callable[..., Path]:
    """An engine with a draft that is right now and then, of these options."""
    target, draft = zoo.checkpoint(NAME), zoo.checkpoint(NAME, draft="noisy")

    def make(name: str, taps: Taps | None = TAPS, **changes: Any) -> Path:
        def write(path: Path) -> None:
            build(target, draft, path, options(**changes), taps=taps)

        return zoo.once(f"taps-{name}", write)

    return make


def load(path: Path, **limits: Any) -> Engine:
    engine = Engine.load(path, **limits)
    for slab in engine.cache.slabs["target"]:
        # a row that was never written shall not look like one of zeros
        slab.normal_(0.0, 30.0)
    return engine


@dataclass
class Oracle:
    """Compares rows of requests with what transformers puts out for their tokens."""

    model: Any
    taps: Taps = TAPS
    num_rows: int = 0
    tolerance: float = 1e-4

    @torch.no_grad()
    def wanted(self, tokens: list[int]) -> Tensor:
        """[T, W], in a plain forward pass."""
        last: list[Tensor] = []
        hook = self.model.model.layers[-1].register_forward_hook(lambda *x: last.append(x[2]))
        output = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        hook.remove()
        states = list(output.hidden_states)
        if not self.taps.is_last_normed:
            states[-1] = last[0][0] if isinstance(last[0], tuple) else last[0]
        return torch.cat([states[b][0] for b in self.taps.boundaries], -1)

    def check(self, engine: Engine, request: Request) -> None:
        count = request.cache_len
        wanted = self.wanted(request.token_ids[:count])
        features = features_of(engine.manifest.models[0], engine.cache)
        blocks = engine.cache.block_table([request.blocks])[0].long()
        rows = torch.arange(count)
        found = features[blocks[rows // features.shape[1]], rows % features.shape[1]]
        wrong = (found.float() - wanted).abs().amax(1) > self.tolerance * (1 + wanted.abs().amax(1))
        assert not wrong.any(), f"of {count} rows: {wrong.nonzero().flatten().tolist()}"
        self.num_rows += count


def serve(
    engine: Engine,
    plan: str,
    oracle: Oracle,
    num_tokens: int = NUM_TOKENS,
    every: int = 3,
    **params: Any,
) -> EngineCore:
    """Requests of several lengths, some with a common beginning, that come one after the other.

    Args:
        engine: to serve them.
        plan: of all steps.
        oracle: looks at rows after every step.
        num_tokens: that each puts out.
        every: steps until the next one comes.
        params: of sampling.
    """
    core = EngineCore(engine, plan)
    generator = torch.Generator().manual_seed(5)

    def text(length: int) -> list[int]:
        return torch.randint(0, models.VOCAB, (length,), generator=generator).tolist()

    prefix = text(2 * CHUNK + 3)
    waiting = [text(1), prefix + text(4), text(40), prefix + text(9), prefix[:CHUNK], text(7)]
    requests: list[Request] = []
    num_steps = 0
    while waiting or core.scheduler.has_work:
        if waiting and num_steps % every == 0:
            own = SamplingParams(
                max_tokens=num_tokens, ignore_eos=True, seed=len(waiting), **params
            )
            requests.append(core.requests.make(waiting.pop(0), own))
            core.scheduler.add(requests[-1])
        assert core.advance()
        num_steps += 1
        for request in requests:
            if request.blocks and request.cache_len and not request.is_finished:
                oracle.check(engine, request)
    assert all(len(request.output_token_ids) == num_tokens for request in requests)
    return core


@pytest.mark.parametrize("plan", [plan.name for plan in PLANS])
def test_rows_are_those_of_transformers(zoo: Zoo, compiled: Callable[..., Path], plan: str) -> None:
    """Trees with rejections, chunks, requests that join, prefixes that are shared."""
    engine = load(compiled("eager"))
    oracle = Oracle(zoo.reference_model(NAME))
    stats = serve(engine, plan, oracle, temperature=1.0).scheduler.stats
    assert oracle.num_rows > 1000
    assert stats.num_cached_tokens > CHUNK
    # drafts are accepted, and rejected
    assert 1.05 < stats.mean_acceptance_length < 3.5


def test_rows_of_those_that_had_to_give_way(zoo: Zoo, compiled: Callable[..., Path]) -> None:
    """With blocks for little more than one request: rows are computed again."""
    engine = load(compiled("eager"), kv_cache_tokens=112)
    oracle = Oracle(zoo.reference_model(NAME))
    stats = serve(engine, PLANS[1].name, oracle, num_tokens=40, every=1).scheduler.stats
    assert stats.num_preemptions > 1
    assert oracle.num_rows > 1000


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [8, 0])
@pytest.mark.parametrize("plan", [plan.name for plan in PLANS])
def test_rows_of_compiled_programs(
    zoo: Zoo, compiled: Callable[..., Path], plan: str, block_size: int
) -> None:
    engine = load(compiled(f"cpu-{block_size}", backend="cpu", block_size=block_size))
    oracle = Oracle(zoo.reference_model(NAME))
    serve(engine, plan, oracle)
    assert oracle.num_rows > 1000


@pytest.mark.slow
def test_rows_after_the_final_norm_beside_integers(zoo: Zoo, compiled: Callable[..., Path]) -> None:
    """Where K and V are int8, hidden states stay in the type of the model."""
    taps = Taps((2,), is_last_normed=True)
    engine = load(compiled("int8", taps, kv_cache_dtype="int8", backend="eager"))
    target = engine.manifest.models[0]
    features = features_of(target, engine.cache)
    assert (features.dtype, features.shape[2]) == (torch.float32, 64)
    # what K and V lose in rounding is in the hidden states of later layers
    oracle = Oracle(zoo.reference_model(NAME), taps, tolerance=0.1)
    serve(engine, PLANS[0].name, oracle)
    assert oracle.num_rows > 1000


def test_what_the_engine_says(compiled: Callable[..., Path]) -> None:
    with_taps, without = (compiled(name, taps) for name, taps in (("eager", TAPS), ("no", None)))
    manifests = [json.loads((x / "manifest.json").read_text()) for x in (with_taps, without)]
    one, other = (Manifest.from_json(data) for data in manifests)
    target, plain = one.models[0], other.models[0]
    assert target.taps is not None
    assert (target.taps.boundaries, target.taps.width) == ((2, 0, 1), 3 * 64)
    assert target.kept_taps == TAPS
    assert (target.num_slabs, plain.num_slabs) == (2, 1)
    # 3 hidden states of 64 float32 a row
    grown = one.memory_plan["target"].cache - other.memory_plan["target"].cache
    assert grown == one.limits.cache_rows() * 3 * 64 * 4
    slabs = Engine.load(with_taps).cache.slabs
    assert sum(slab.nbytes for slab in slabs["target"]) == one.memory_plan["target"].cache
    assert [len(slabs[name]) for name in ("target", "draft_0")] == [2, 1]
    # engines that keep nothing are as they were
    assert all("taps" not in model for model in manifests[1]["models"])
    changed = [
        name
        for name in manifests[1]["files"]
        if manifests[0]["files"][name]["sha256"] != manifests[1]["files"][name]["sha256"]
        and name != "report.json"
    ]
    assert set(changed) == {
        "target/program.json",
        *(entry["file"] for entry in manifests[1]["plans"] if entry["name"] in _moving()),
    }


def _moving() -> set[str]:
    """Plans whose accepted rows move: of a chain they lie where they belong."""
    return {plan.name for plan in PLANS if not plan.is_in_place}


@pytest.mark.parametrize(
    ("taps", "found"),
    [
        ({"boundaries": [0, 3], "is_last_normed": False, "width": 8}, r"boundaries \[0, 3\]"),
        ({"boundaries": [], "is_last_normed": False, "width": 8}, r"boundaries \[\]"),
        ({"boundaries": [0], "is_last_normed": False, "width": 0}, "of 0 columns"),
        ({"boundaries": [0], "width": 8}, "is_last_normed is missing"),
    ],
)
def test_manifests_that_are_refused(
    compiled: Callable[..., Path], taps: dict[str, Any], found: str
) -> None:
    data = json.loads((compiled("eager") / "manifest.json").read_text())
    data["models"][0]["taps"] = taps
    with pytest.raises(EngineError, match=found):
        Manifest.from_json(data)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"backend": "onnx", "block_size": 0}, "the backend onnx"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"segments": True}, "--segments"),
    ],
)
def test_engines_that_keep_none(
    zoo: Zoo, tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError, match=f"a draft that reads hidden states, and {found}"):
        build(zoo.checkpoint(NAME), None, tmp_path / "e", options(plans=(), **changes), taps=TAPS)


def test_boundaries_that_the_target_has_not(zoo: Zoo, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="taps at boundary 7 of a target of 2 layers"):
        build(zoo.checkpoint(NAME), None, tmp_path / "e", options(plans=()), taps=Taps((1, 7)))
    assert not (tmp_path / "e").exists()
