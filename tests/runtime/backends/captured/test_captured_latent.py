"""Engines for CUDA whose caches hold latents (MLA): captured steps, prompts, trees, self-drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.directory import read_manifest
from specc.config import CompileConfig
from specc.kernels.cuda import attend_latent_few
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured.captures import CaptureWarning
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.runtime.backends.captured.captured_engine import greedy_tokens
from tests.runtime.backends.captured.simulated_device import SimulatedDevice

# the last is longer than a window, and comes in chunks
PROMPTS = [[5, 6, 7, 8], [*range(3, 23)]]
NUM_TOKENS = 4
WIDTHS: dict[str, Any] = {
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 20,
}
RANK, SHARED, LAYERS = 20, 8, 1
PLANS = (
    SpecPlan.from_widths((2, 1)),
    SpecPlan.from_widths((1, 1), ("self_w16_s2",)),
)

pytestmark = pytest.mark.filterwarnings(f"error::{CaptureWarning.__module__}.CaptureWarning")


def compiled(root: Path, family: str, **changes: Any) -> Path:
    """An engine for CUDA of a tiny model, and of the same one disturbed as its draft."""
    for name, noise in (("target", 0.0), ("draft", 0.05)):
        models.save_tiny(family, root / name, noise=noise, num_hidden_layers=LAYERS, **WIDTHS)
    fields: dict[str, Any] = {
        "plans": PLANS, "max_seq_len": 48, "max_batch_size": 2, "prefill_chunk": 16,
        "backend": "cuda", "probe": False,
    }  # fmt: skip
    config = CompileConfig(**(fields | changes))
    return engines.build(root / "target", root / "draft", root / f"engine-{len(changes)}", config)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("dense"), "minicpm3")


@pytest.fixture(scope="module")
def wanted(dense: Path) -> list[list[int]]:
    return greedy_tokens(dense.parent / "target", PROMPTS, NUM_TOKENS)


def generate(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


def check_captured(
    path: Path,
    plan: str,
    wanted: list[list[int]],
    device: SimulatedDevice,
    kernel: str = "attend_kernel",
) -> set[str]:
    """Replay with the interpreted kernels, on a cache whose other rows are no zeros.

    Returns:
        names of the kernels.
    """
    from tests.kernels.cuda.races import watched

    limits = CaptureLimits(sizes=(2,), max_seconds=0)
    with watched(plan) as launches:
        engine = Engine.load(path, capture=limits)
        for slabs in engine.cache.slabs.values():
            for slab in slabs:
                slab.normal_(0.0, 30.0)
        assert generate(LLM(engine, plan=plan)) == wanted
    names = {launch.name for launch in launches}
    assert {kernel, "_rope_write_latent_kernel"} <= names
    # no cache of values is written, and no head has one of its own
    assert not {"attend_few_kernel", "_write_kv_kernel"} & names
    assert "commit_kv_kernel" in names
    assert device.tapes
    return names


@pytest.mark.slow
def test_graphs_say_the_same(dense: Path, wanted: list[list[int]]) -> None:
    """Operator by operator, with the oracle."""
    for plan in ("off", *(plan.name for plan in PLANS)):
        assert generate(LLM(dense, backend="eager", plan=plan)) == wanted, plan


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["off", *(plan.name for plan in PLANS)])
def test_captured_steps_say_the_same(
    dense: Path, wanted: list[list[int]], device: SimulatedDevice, triton_kernels: Any, plan: str
) -> None:
    check_captured(dense, plan, wanted, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # as V2 Lite: queries of one weight, and two experts that all tokens take
        ("deepseek_v2", {"q_lora_rank": None, "n_shared_experts": 2}),
        ("deepseek_v3", {}),
    ],
)
def test_mixtures_say_the_same(
    family: str,
    changes: dict[str, Any],
    tmp_path: Path,
    device: SimulatedDevice,
    triton_kernels: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With experts, and latents that attention of few tokens has a kernel for; plain decoding, too.

    Which it has for bfloat16, whose tokens would not be those of transformers.
    """
    monkeypatch.setattr(attend_latent_few, "DTYPE", torch.float32)
    # the only layer has experts
    changes = {"kv_lora_rank": 64, "first_k_dense_replace": 0} | changes
    for name, value in changes.items():
        monkeypatch.setitem(WIDTHS, name, value)
    path = compiled(tmp_path, family, plans=PLANS[:1])
    wanted = greedy_tokens(tmp_path / "target", PROMPTS, NUM_TOKENS)
    for plan in ("off", PLANS[0].name):
        assert generate(LLM(path, backend="eager", plan=plan)) == wanted
        names = check_captured(path, plan, wanted, device, "attend_latent_few_kernel")
        assert {"experts_gate_up_kernel", "experts_down_kernel", "_route_kernel"} <= names
        # nor has the shared expert launches of its own
        assert "_act_and_mul_kernel" not in names


def test_a_row_is_cached_once(dense: Path) -> None:
    manifest = read_manifest(dense)
    for entry in manifest.models:
        assert all(layer.values_in_keys for layer in entry.layers)
        assert {layer.cached_columns for layer in entry.layers} == {(RANK + SHARED,)}
    program = json.loads((dense / "target/program.json").read_text())
    calls = [x for x in program["graph"]["nodes"] if x.get("target", "").startswith("specc")]
    flagged = [x["target"] for x in calls if x.get("kwargs", {}).get("values_in_keys")]
    assert flagged == ["specc.attend.default"]
    # prompts attend to latents, in chunks
    assert not any("attend_expanded" in x["target"] for x in calls)
