"""Pieces of a draft that obeys a grammar which cannot run, or cannot be captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.errors import EngineError
from specc.runtime.backends.captured.captures import CaptureWarning
from specc.runtime.backends.captured.masked_draft import _MaskedPass
from specc.runtime.backends.captured.step_scores import StepKind
from tests.runtime.backends.captured import test_captured_step, test_extended_step
from tests.runtime.backends.captured.simulated_device import SimulatedDevice

PIECES = StepKind(is_masked=True, is_late=True, reads_draft=True, masks_drafts=True)
PLAN, BATCH = "tree-2-1", 2
# method of a pass that fails, and what errors call that
FAILURES = [("mask", "masks of a draft"), ("leave", "reading what a draft is fed")]


def fail(
    monkeypatch: pytest.MonkeyPatch, method: str, device: SimulatedDevice, in_capture: bool
) -> None:
    """Memory runs out there: in captures alone, or whenever it is called."""
    original = getattr(_MaskedPass, method)

    def failing(own: _MaskedPass, *args: Any) -> None:
        if device.tape is not None or not in_capture:
            raise torch.OutOfMemoryError("CUDA out of memory")
        original(own, *args)

    monkeypatch.setattr(_MaskedPass, method, failing)


@pytest.mark.parametrize(("method", "name"), FAILURES)
def test_pieces_that_cannot_run_say_what_to_do(tiny_engine, monkeypatch, method, name) -> None:
    rig = test_captured_step.make_rig(tiny_engine, SimulatedDevice())
    fail(monkeypatch, method, rig.device, in_capture=False)
    with pytest.raises(EngineError, match=f"{name} .*OutOfMemory(.|\n)*lower max_num_seqs"):
        rig.steps[PLAN].capture(BATCH, PIECES)


@pytest.mark.default("leave-reading what a draft is fed")
@pytest.mark.parametrize(("method", "name"), FAILURES)
def test_pieces_that_cannot_be_captured_run_all_the_same(
    tiny_engine, monkeypatch, method, name
) -> None:
    """Operator by operator, and that is found out once for each size of a batch."""
    rig = test_extended_step.make_rig(tiny_engine, SimulatedDevice(), monkeypatch)
    fail(monkeypatch, method, rig.device, in_capture=True)
    cases = test_extended_step.CASES["grammars"]
    wanted = rig.run(rig.eager, PLAN, cases)
    with pytest.warns(CaptureWarning, match=f"operator by operator.* {name} .*OutOf") as warned:
        test_extended_step.assert_same(rig.run(rig.engine, PLAN, cases), wanted)
    assert (PLAN, 0) in rig.steps
    messages = [str(warning.message) for warning in warned]
    assert len(messages) == len(set(messages))
