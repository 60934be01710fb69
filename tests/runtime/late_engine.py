"""An engine on a device that runs late, and a guard of the blocks that its steps reach into."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.config import CompileConfig
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured import backend as captured_backend
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.policies.base import FixedPolicy
from tests import engines
from tests.runtime.backends.captured.simulated_device import LateDevice
from tests.runtime.backends.captured.tape import Tape


class Waits(FixedPolicy):
    """The same plan, and no step ahead of the results: what overlap is compared with."""

    needs_results = True


@dataclass
class Rig:
    """One engine on a device that runs late; steps ahead of results, and rows nobody read."""

    engine: Engine
    device: LateDevice
    num_ahead: int = 0
    num_dropped: int = 0
    path: Path = Path()

    def llm(self, plan: str, *, overlaps: bool = True) -> LLM:
        return LLM(self.engine, plan=plan, policy=(FixedPolicy if overlaps else Waits)(plan))

    def is_idle(self, llm: LLM) -> bool:
        allocator = self.engine.cache.allocator
        return (
            not llm._scheduler.has_work
            and allocator.num_free == allocator.num_blocks
            and self.device.num_waiting == 0
        )


@contextlib.contextmanager
def late_rig(
    models: Any,
    path: Path,
    config: CompileConfig,
    device: LateDevice | None = None,
    **options: Any,
) -> Iterator[Rig]:
    """Compile the tiny pair for a device that runs late, and load it there, guarded.

    Args:
        path: of the engine, beside which the draft is saved.
        config: for the backend `cuda`.
        device: that runs late; None makes one.
        options: of `Engine.load`.
    """
    draft = save_draft(models, path.parent / "draft")
    engines.build(models.target, draft, path, config)
    device = device or LateDevice()
    options = {"capture": CaptureLimits.lazy(), **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(captured_backend, "cuda_device", lambda: device)
        rig = Rig(Engine.load(path, **options), device, path=path)
        guard_blocks(rig)
        yield rig


def save_draft(models: Any, path: Path) -> Path:
    """The target with noise: it accepts some of the draft's tokens, sometimes all of a step."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(models.target)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(path)
    shutil.copy(models.target / "tokenizer.json", path)
    return path


def guard_blocks(rig: Rig) -> None:
    """Blocks that a step reaches into must be somebody's, and of one sequence; freed ones change.

    A sequence reaches from its first row to the last node of the plan's tree, wherever the step
    before, which the host may not have read yet, has left it; in the history, to the bonus token,
    which may come one place behind.

    And the second part of a step comes right after its first: it finds what that has left in memory
    that all graphs share.
    """
    cache, steps = rig.engine.cache, rig.engine.steps
    buffers = steps["off"]._buffers
    allocator, free = cache.allocator, cache.allocator.free

    def poisoned(blocks: list[int]) -> None:
        free(blocks)
        # prefixes of ended requests stay as they are
        blocks = [b for b in blocks if not allocator.is_used(b) and not allocator.has_key(b)]
        for name, slab in cache.environment.items():
            if name == "history":
                slab[blocks] = 777
            else:
                slab[:, :, blocks] = 777.0

    before: list[Tape] = []

    def check(tape: Tape) -> None:
        replayed = [
            (step, bucket, tapes)
            for step in steps.values()
            for (bucket, _), tapes in step._captured.items()
            if tape in tapes
        ]
        if not replayed:
            assert int(buffers.cache_len[0]) < 0, "real rows in a part of a step being captured"
            before[:] = [tape]
            return
        ((step, bucket, parts),) = replayed
        if (place := parts.index(tape)) > 0:
            assert before == [parts[place - 1]], "a part of a step after that of another"
        before[:] = [tape]
        taken: list[int] = []
        written: list[int] = []
        size = cache.shape.rows_per_block
        for b in range(bucket):
            length, plan = int(buffers.cache_len[b]), step.plan
            rows = length + max(plan.num_rows, plan.max_depth + 2)
            if length >= 0:
                # beyond the table nothing is recorded
                count = -(-rows // cache.shape.rows_per_block)
                taken += buffers.block_table[b, :count].tolist()
                written += buffers.block_table[b, :count].tolist()[length // size :]
        assert all(allocator.is_used(block) for block in taken), "a block that is free"
        assert all(taken.count(block) == 1 for block in written), "a block of two sequences"
        assert not any(allocator.has_key(block) for block in written), "a block that others read"

    allocator.free = poisoned
    rig.device.before_replay = check
