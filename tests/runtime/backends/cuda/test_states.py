"""Hybrid engines for CUDA without a GPU: captured steps, and the kernels interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specc.errors import EngineError
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured.backend import fit_device
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from tests.runtime.hybrid_engine import save_hybrid
from tests.runtime.late_engine import Waits
from tests.runtime.test_states import greedy, prompt_of

CHAIN, TREE = SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((2, 2, 1))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 2, 3))
PLANS = [OFF, CHAIN, TREE, DYNAMIC]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "cuda"
    return save_hybrid(path, PLANS, backend="cuda", device="cuda")


class Run:
    """Outputs of prompts, and states of each request by its committed rows."""

    def __init__(self, engine: Engine, plan: str, lengths: tuple[int, ...], count: int) -> None:
        # what is queued ahead would be run already
        core = EngineCore(engine, policy=Waits(plan))
        requests = [core.requests.make(prompt_of(length), greedy(count)) for length in lengths]
        self.states: dict[tuple[int, ...], list[Tensor]] = {}
        for request in requests:
            core.scheduler.add(request)
        assert engine.cache.states is not None
        while core.scheduler.has_work:
            assert core.advance()
            for request in core.scheduler.running:
                if request.cache_len:
                    key = tuple(request.token_ids[: request.cache_len])
                    slabs = engine.cache.states.states
                    self.states[key] = [slab[:, request.state_place].clone() for slab in slabs]
        self.outputs = [request.output_token_ids for request in requests]
        self.accepted = core.scheduler.stats.num_accepted_tokens


def same_states(one: Run, other: Run) -> int:
    """How many states both have had, bit for bit the same."""
    keys = one.states.keys() & other.states.keys()
    for key in keys:
        assert all(map(torch.equal, one.states[key], other.states[key])), len(key)
    return len(keys)


@pytest.mark.default("tree-2-2-1")
@pytest.mark.parametrize("plan", PLANS[1:], ids=lambda plan: plan.name)
def test_captured_steps_leave_the_states_of_plain_decoding(directory, device, plan) -> None:
    engine = Engine.load(directory, capture=CaptureLimits.lazy())
    assert engine.backend == "cuda"
    lengths = (1, 9, 16, 33)
    plain, found = (Run(engine, name, lengths, 16) for name in (OFF.name, plan.name))
    assert found.outputs == plain.outputs
    assert found.accepted > 0
    assert same_states(plain, found) > 15
    assert device.tapes


@pytest.mark.slow
@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda plan: plan.name)
def test_the_kernels_leave_the_states_of_plain_decoding(
    directory, device, triton_kernels, plan
) -> None:
    """Steps captured with the kernels, of a prompt in two chunks; no launch races."""
    from tests.kernels.cuda.races import watched

    engine = Engine.load(directory, capture=CaptureLimits(sizes=(1,), max_seconds=-1))
    with watched(plan.name) as launches:
        plain, found = (Run(engine, name, (18,), 5) for name in (OFF.name, plan.name))
    assert found.outputs == plain.outputs
    assert same_states(plain, found) > 1
    names = {launch.name for launch in launches}
    assert names >= {"tree_conv_kernel", "tree_recurrence_kernel"}
    assert names >= {"fold_conv_kernel", "fold_recurrence_kernel"}


def test_memory_of_states_is_checked_before_it_is_taken(directory, device) -> None:
    from specc.artifact.directory import read_manifest

    manifest = read_manifest(directory)
    target = manifest.memory_plan["target"]
    needed = target.states + target.checkpoints
    assert needed > 0
    device.memory_bytes = needed - 1
    with pytest.raises(EngineError, match=r"for 3 sequences of 96 tokens, states \d+"):
        fit_device(manifest, device, CaptureLimits())
    # of one sequence its own, and those of prefixes that the engine keeps
    device.memory_bytes = target.states // 3 + target.checkpoints
    assert fit_device(manifest, device, CaptureLimits(), max_num_seqs=1).max_bytes == 0
