"""Steps of several graphs on a device that computes nothing while it captures.

It runs each part once before its capture, as CUDA does, so that part reads what the graphs before
it have left.
"""

from __future__ import annotations

import gc
import warnings

import pytest

from specc.runtime.backends.captured.captures import CaptureWarning
from specc.runtime.backends.captured.step_scores import StepKind
from tests.runtime.backends.captured.simulated_device import LateDevice, SimulatedDevice
from tests.runtime.backends.captured.test_captured_step import Rig, make_rig, same

BATCH = 2


@pytest.fixture(params=[SimulatedDevice, LateDevice], ids=["at once", "late"])
def rig(tiny_engine, request) -> Rig:
    return make_rig(tiny_engine, request.param())


@pytest.fixture(autouse=True)
def all_is_captured():
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        yield


@pytest.mark.default("at once-tree-2-1", "late-tree-2-1")
@pytest.mark.parametrize("plan", ["off", "tree-2-1"])
def test_each_stage_reads_what_the_graph_before_it_computes(rig, plan) -> None:
    step, seen = rig.steps[plan], []
    step.before_accept = lambda values: seen.append(values["tokens"].tolist())
    step.capture(BATCH)
    assert len(rig.device.tapes) == len(step._binder.stages)
    inputs = rig.state(BATCH)
    same(rig.advance(plan, inputs), rig.advance_eager(plan, inputs))
    rig.assert_same_caches()
    assert seen


def test_parts_around_late_masks_read_what_the_graph_before_them_computes(rig) -> None:
    step = rig.steps["tree-2-1"]
    kind = StepKind(is_masked=True, is_late=True, reads_draft=True)
    step.capture(BATCH, kind)
    assert step.is_captured(BATCH, kind)
    assert len(rig.device.tapes) == 2
    read = step._bound[BATCH, kind].environment
    assert int(read["tokens"].max()) < read["logits"].shape[1]
    assert not bool(read["logits"].isnan().any())


def test_a_capture_displaces_a_step_that_waits_for_its_masks(rig) -> None:
    """It replays parts: what verification has left in memory that graphs share is gone."""
    waiting = rig.buffers.half = object()
    rig.steps["tree-2-1"].capture(BATCH, StepKind(is_masked=True, is_late=True, reads_draft=True))
    assert rig.buffers.half is not waiting


def test_a_graph_that_is_only_measured_reads_what_is_there(rig) -> None:
    """The step that it was captured from has constants that nobody else holds."""
    step, inputs = rig.steps["tree-2-1"], rig.state(BATCH)
    graph = step.capture_alone(BATCH, is_dependent=False)
    gc.collect()
    rig.buffers.copy_from(inputs, BATCH)
    graph.replay()
    rig.device.record_event().synchronize()
    found = step.to_result(rig.buffers.results[:BATCH], 0.0)
    same(found, rig.advance_eager("tree-2-1", inputs))
    rig.assert_same_caches()


def test_a_capture_of_parts_writes_no_row_of_a_sequence(rig) -> None:
    inputs = rig.state(BATCH)
    rig.buffers.copy_from(inputs, BATCH)
    rig.steps["tree-2-1"].before_accept = lambda values: None
    rig.steps["tree-2-1"].capture(BATCH)
    rig.device.record_event().synchronize()
    rig.assert_same_caches()
    assert rig.buffers.inputs["cache_len"][:BATCH].tolist() == [row[2] for row in inputs.rows]
