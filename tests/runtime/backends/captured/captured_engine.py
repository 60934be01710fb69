"""An engine whose steps are captured and whose programs run on a simulated device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.captured.backend import DeviceModel, DeviceOperators
from specc.runtime.backends.captured.captured_runner import CapturedRunner
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.device_link import DeviceLink
from specc.runtime.backends.captured.engine_steps import make_buffers
from specc.runtime.backends.captured.step_binder import StepBinder
from specc.runtime.backends.captured.step_buffers import StepBuffers
from specc.runtime.backends.eager.step import EagerStep
from specc.runtime.backends.program_files import read_json
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from tests.runtime.backends.captured.simulated_device import SimulatedDevice


def captured_engine(path: Path, device: SimulatedDevice, plans: Sequence[SpecPlan] = ()) -> Engine:
    """An engine of plain graphs as `cuda_backend` would have it; graphs are captured at first use.

    Args:
        device: that its steps, its prefill passes and its link use.
        plans: that it gets besides its own; their rows fit into its cache.
    """
    engine = loaded(path)
    models = models_of(engine)
    cache = engine.cache
    programs = {e.name: read_json(path / e.file) for e in engine.manifest.plans}
    programs |= {plan.name: step_program(engine, plan) for plan in plans}
    known = [entry.plan for entry in engine.manifest.plans]
    buffers = make_buffers(device, cache, [*known, *plans], len(models))
    sizes = tuple(range(1, cache.shape.max_num_seqs + 1))
    engine.steps = {
        name: CapturedStep(StepBinder(program, models, cache.environment, buffers, device), sizes)
        for name, program in programs.items()
    }
    engine.target, *engine.drafts = [DeviceModel(model, device) for model in models.values()]
    engine.operators, engine.link = DeviceOperators(device), DeviceLink(device)
    engine.backend, engine.runner_type = "cuda", CapturedRunner
    return engine


def loaded(path: Path) -> Engine:
    """An engine whose programs run unseen, as those that a backend has changed."""
    engine = Engine.load(path)
    for model in models_of(engine).values():
        model._rehearsal = None
    return engine


def eager_engine(path: Path, plans: Sequence[SpecPlan] = ()) -> Engine:
    """An engine for the backend eager, with more plans; what a captured one is compared with."""
    engine = Engine.load(path)
    models = models_of(engine)
    for plan in plans:
        engine.steps[plan.name] = EagerStep(step_program(engine, plan), models)
    return engine


def models_of(engine: Engine) -> dict[str, Any]:
    models = {"target": engine.target}
    return models | {f"draft_{i}": draft for i, draft in enumerate(engine.drafts)}


def step_program(engine: Engine, plan: SpecPlan) -> dict[str, Any]:
    assert plan.num_rows <= engine.cache.shape.max_nodes
    slabs = {name: len(own) for name, own in engine.cache.slabs.items()}
    made = fuse_step(plan, slabs, block_size=engine.cache.shape.block_size)
    program: dict[str, Any] = json.loads(json.dumps(made.to_json()))
    return program


def capture_steps(engine: Engine, path: Path) -> None:
    """Let an engine run captured steps of 1, 2 or 4 sequences, and its programs as they are."""
    device, shape = SimulatedDevice(), engine.cache.shape
    buffers = StepBuffers(device, 4, shape.blocks_per_sequence, 8)
    engine.steps = {
        plan.name: CapturedStep(
            StepBinder(
                read_json(path / plan.file),
                models_of(engine),
                engine.cache.environment,
                buffers,
                device,
            ),
            (1, 2, 4),
        )
        for plan in engine.manifest.plans
    }
    engine.runner_type = CapturedRunner


def greedy_tokens(
    target: Path, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """What transformers generates without a cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    found = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(num_tokens):
            with torch.inference_mode():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found
