"""Captured steps of batches without filters: graphs of their own, and the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specc.kernels.cuda.launch import is_unfiltered
from specc.runtime.backends.captured.step_scores import UNFILTERED
from tests.mixed_sampling import mixed_sampling
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.runtime.backends.captured.test_captured_step import PLANS, Rig, following, make_rig, same

SAMPLING = ("sampling_values", "sampling_words")


@pytest.fixture
def rig(tiny_engine) -> Rig:
    return make_rig(tiny_engine, SimulatedDevice())


class Replays:
    """Whether each replay of a device was of a graph that was captured `unfiltered`."""

    def __init__(self, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[bool] = []
        capture = device.capture

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.specc.accept.default:
                    kinds.add(is_unfiltered())
                return func(*args, **(kwargs or {}))

        kinds: set[bool] = set()

        def noted(run: Any) -> Any:
            kinds.clear()
            with Noting():
                tape = capture(run)
            (kind,) = kinds
            replay = tape.replay
            monkeypatch.setattr(tape, "replay", lambda: (self.found.append(kind), replay()))
            return tape

        monkeypatch.setattr(device, "capture", noted)


@pytest.mark.default("off")
@pytest.mark.parametrize("plan", PLANS)
def test_batches_without_filters_have_a_graph_of_their_own(rig, plan, monkeypatch) -> None:
    """Chosen by what is in the batch, for steps ahead too; never while a hook looks in."""
    replays = Replays(rig.device, monkeypatch)
    step = rig.steps[plan]
    step.skips_filters = True
    mixed = rig.state(3)
    plain = mixed._replace(**dict(zip(SAMPLING, mixed_sampling(3, is_greedy=True), strict=True)))
    same(rig.advance(plan, mixed), rig.advance_eager(plan, mixed))
    assert len(rig.device.tapes) == 1
    pending = step.submit(plain)
    for _ in range(2):
        ahead = step.submit_next(3)
        wanted = rig.advance_eager(plan, plain)
        same(pending.result(), wanted)
        plain, pending = following(plain, wanted), ahead
    pending.result()
    plain = following(plain, rig.advance_eager(plan, plain))
    assert len(rig.device.tapes) == 2
    mixed = plain._replace(**dict(zip(SAMPLING, mixed_sampling(3, first=1), strict=True)))
    same(rig.advance(plan, mixed), rig.advance_eager(plan, mixed))
    assert replays.found == [False, True, True, True, False]
    assert step.is_captured(4)
    assert step.is_captured(4, UNFILTERED)


def test_without_the_option_one_graph_serves_all(rig, monkeypatch) -> None:
    replays = Replays(rig.device, monkeypatch)
    greedy = dict(zip(SAMPLING, mixed_sampling(2, is_greedy=True), strict=True))
    rig.advance("off", rig.state(2)._replace(**greedy))
    assert (replays.found, len(rig.device.tapes)) == ([False], 1)
