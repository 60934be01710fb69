"""Captured steps on a simulated device: replays equal the eager step, whatever it replays for."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from specc.errors import EngineError
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.captures import CaptureWarning
from specc.runtime.backends.captured.step_binder import StepBinder
from specc.runtime.backends.captured.step_buffers import PADDING, StepBuffers
from specc.runtime.backends.failed_operator import OperatorError
from specc.runtime.backends.program_files import read_json
from specc.runtime.backends.step_io import StepInputs, StepResult
from specc.runtime.engine import Engine
from tests.mixed_sampling import mixed_sampling
from tests.runtime.backends.captured.captured_engine import loaded
from tests.runtime.backends.captured.simulated_device import LateDevice, SimulatedDevice
from tests.tiers import every

aten = torch.ops.aten
PLANS = ("off", "chain-3", "tree-2-1")
BUCKETS = (1, 2, 4)


@dataclass
class Rig:
    """One engine twice: eager steps, and captured ones on slabs of their own."""

    eager: Engine
    other: Engine
    device: SimulatedDevice
    buffers: StepBuffers
    steps: dict[str, CapturedStep]

    def state(self, batch: int) -> StepInputs:
        """Inputs of sequences of different lengths, and caches to match."""
        shape = self.eager.cache.shape
        lengths = [9, 4, 17, 12][:batch]
        table = torch.arange(shape.num_blocks, dtype=torch.int32).view(shape.max_num_seqs, -1)
        # blocks in no order
        table = table.flip(0, 1)[:batch].contiguous()
        generator = torch.Generator().manual_seed(7)
        for name, slab in self.eager.cache.environment.items():
            if name == "history":
                slab.copy_(torch.randint(0, 80, slab.shape, generator=generator))
            else:
                slab.copy_(torch.randn(slab.shape, generator=generator))
            self.other.cache.environment[name].copy_(slab)
        rows = [(3 + b, 20 + b, length) for b, length in enumerate(lengths)]
        return StepInputs(rows, table, *mixed_sampling(batch, first=1))

    def advance_eager(self, plan: str, inputs: StepInputs) -> StepResult:
        return self.eager.steps[plan].advance(inputs, self.eager.cache.environment)

    def advance(self, plan: str, inputs: StepInputs) -> StepResult:
        return self.steps[plan].advance(inputs, self.other.cache.environment)

    def assert_same_caches(self) -> None:
        for name, slab in self.eager.cache.environment.items():
            # padding makes matrices wider, which rounds otherwise
            torch.testing.assert_close(self.other.cache.environment[name], slab)


@pytest.fixture
def rig(tiny_engine) -> Rig:
    return make_rig(tiny_engine, SimulatedDevice())


@pytest.fixture
def late_rig(tiny_engine) -> Rig:
    """On a device that runs what is queued when somebody waits for it."""
    return make_rig(tiny_engine, LateDevice())


def make_rig(tiny_engine: Path, device: SimulatedDevice) -> Rig:
    eager, other = Engine.load(tiny_engine), loaded(tiny_engine)
    shape = other.cache.shape
    buffers = StepBuffers(device, 4, shape.blocks_per_sequence, 8)
    models = {"target": other.target, "draft_0": other.drafts[0]}
    steps = {}
    for plan in other.manifest.plans:
        program = read_json(tiny_engine / plan.file)
        steps[plan.name] = CapturedStep(
            StepBinder(program, models, other.cache.environment, buffers, device), BUCKETS
        )
    return Rig(eager, other, device, buffers, steps)


def same(found: StepResult, wanted: StepResult) -> None:
    assert found[:4] == wanted[:4]


def following(inputs: StepInputs, result: StepResult) -> StepInputs:
    """Inputs of the next step, as the host would compute them."""
    made = []
    for b, (_, last, _) in enumerate(inputs.rows):
        run = [last, *result.output_tokens[b][: result.num_accepted[b] + 1]]
        made.append((run[-2], run[-1], result.next_cache_len[b]))
    return inputs._replace(rows=made)


def select(inputs: StepInputs, order: list[int]) -> StepInputs:
    """Some of the sequences, in this order."""
    rows = [inputs.rows[b] for b in order]
    return StepInputs(rows, *(tensor[order] for tensor in inputs[1:4]))


@pytest.mark.default("3-tree-2-1")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "batch",
    every(4, [1, 2, 3, 4], 2),
)
def test_replays_equal_the_eager_step(rig, plan, batch) -> None:
    inputs = rig.state(batch)
    for _ in range(4):
        wanted = rig.advance_eager(plan, inputs)
        found = rig.advance(plan, inputs)
        same(found, wanted)
        rig.assert_same_caches()
        inputs = following(inputs, wanted)
    assert len(rig.device.tapes) == 1


@pytest.mark.parametrize("plan", every(3, PLANS, 2))
def test_a_graph_serves_other_sequences_and_smaller_batches(rig, plan) -> None:
    inputs = rig.state(4)
    for batch in (4, 3, 4, 2, 1, 3):
        order = [(b * 3 + batch) % 4 for b in range(batch)]
        mine = select(inputs, order)
        same(rig.advance(plan, mine), rig.advance_eager(plan, mine))
        rig.assert_same_caches()
    assert len(rig.device.tapes) == len(BUCKETS)


@pytest.mark.default("3-tree-2-1")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_device_goes_on_before_the_host_has_read(rig, plan, batch) -> None:
    """Two steps are in flight; each result is read one step late."""
    inputs = rig.state(batch)
    pending = rig.steps[plan].submit(inputs)
    for _ in range(5):
        ahead = rig.steps[plan].submit_next(batch)
        wanted = rig.advance_eager(plan, inputs)
        same(pending.result(), wanted)
        inputs, pending = following(inputs, wanted), ahead


def test_the_host_takes_over_from_the_device(rig) -> None:
    """After steps of its own the device accepts other rows, also with less of them."""
    inputs = rig.state(4)
    step = rig.steps["chain-3"]
    step.submit(inputs).result()
    step.submit_next(4).result()
    rig.state(4)
    fewer = select(inputs, [1, 2])
    same(step.submit(fewer).result(), rig.advance_eager("chain-3", fewer))
    rig.assert_same_caches()


def test_what_is_captured_does_not_depend_on_the_data(rig) -> None:
    """The operators of a capture with full rows are those of one with padding alone."""
    inputs = rig.state(4)
    step = rig.steps["tree-2-1"]
    step.capture(4)
    rig.buffers.copy_from(inputs, 4)
    rig.device.capture(step._bound[4, False].run)
    padded, full = rig.device.tapes
    assert padded.operators == full.operators
    assert "specc.tree_attention.default" in full.operators


def test_constants_are_not_computed_at_every_replay(rig) -> None:
    rig.steps["tree-2-1"].capture(2)
    names = rig.device.tapes[0].operators
    models = [name for name in names if name.startswith("aten.arange")]
    assert models == []


def test_capture_leaves_inputs_and_caches_alone(rig) -> None:
    inputs = rig.state(2)
    rig.buffers.copy_from(inputs, 2)
    rig.steps["chain-3"].capture(2)
    rig.assert_same_caches()
    views = rig.buffers.inputs
    assert views["cache_len"][:2].tolist() == [row[2] for row in inputs.rows]
    assert views["last_tokens"][:2].tolist() == [list(row[:2]) for row in inputs.rows]
    assert torch.equal(views["block_table"][:2], inputs.block_table)
    assert torch.equal(views["sampling_values"][:2], inputs.sampling_values)
    assert torch.equal(views["sampling_words"][:2], inputs.sampling_words)


def test_padding_stays_padding(rig) -> None:
    inputs = rig.state(3)
    rig.steps["chain-3"].submit(inputs).result()
    for _ in range(3):
        rig.steps["chain-3"].submit_next(3).result()
    assert rig.buffers.cache_len[3] < PADDING // 2


@pytest.mark.parametrize("plan", ["chain-3", "tree-2-1"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_hook_stands_between_verification_and_acceptance(rig, plan, batch) -> None:
    """It sees rows of real sequences alone, and what it writes counts."""
    inputs = rig.state(batch)
    num_nodes = rig.steps[plan].plan.tree.num_nodes
    seen = []

    def hook(values: Any) -> None:
        seen.append((values["logits"].shape[0], values["tokens"].shape[0]))
        logits = values["logits"].clone()
        # every child is what the target wants
        tokens = values["tokens"]
        parents = rig.steps[plan].plan.tree.parents
        for node, parent in reversed(list(enumerate(parents))[1:]):
            for b in range(tokens.shape[0]):
                logits[b * num_nodes + parent, tokens[b, node]] = 1e9 + num_nodes - node
        values["logits"] = logits

    depth = rig.steps[plan].plan.tree.max_depth
    for steps in (rig.eager.steps, rig.steps):
        steps[plan].before_accept = hook
    wanted = rig.advance_eager(plan, inputs)
    found = rig.advance(plan, inputs)
    same(found, wanted)
    assert found.num_accepted == [depth] * batch
    assert seen == [(batch * num_nodes, batch)] * 2
    assert len(rig.device.tapes) == 3, "draft, verify, accept and commit"
    rig.steps[plan].before_accept = None
    rig.eager.steps[plan].before_accept = None
    inputs = following(inputs, wanted)
    same(rig.advance(plan, inputs), rig.advance_eager(plan, inputs))
    assert len(rig.device.tapes) == 4


@pytest.mark.slow
def test_hooks_come_and_go(rig) -> None:
    """A hook sees the values of its own graphs, also after the whole step was captured."""
    inputs = rig.state(2)
    step, eager = rig.steps["chain-3"], rig.eager.steps["chain-3"]
    seen: list[Tensor] = []
    for is_hooked in (True, False, True):
        for each in (step, eager):
            each.before_accept = (lambda v: seen.append(v["logits"].clone())) if is_hooked else None
        wanted = eager.advance(inputs, rig.eager.cache.environment)
        same(step.advance(inputs, rig.other.cache.environment), wanted)
        if is_hooked:
            torch.testing.assert_close(*seen[-2:])
        inputs = following(inputs, wanted)
    assert not torch.equal(seen[0], seen[-1])


def test_a_step_that_cannot_be_captured_runs_anyway_and_says_why(rig) -> None:
    """A host read in the middle: the operator is named once, results are right."""
    step = rig.steps["chain-3"]
    graph = step._binder.stages["accept_commit"].graph
    (accept,) = [n for n in graph.nodes if n.target is torch.ops.specc.accept.default]
    with graph.inserting_before(accept):
        graph.call_function(torch.ops.aten.equal.default, (accept.args[1], accept.args[1]))
    inputs = rig.state(3)
    with pytest.warns(CaptureWarning, match=r"chain-3 for 4 requests .* aten\.equal\.default"):
        found = step.advance(inputs, rig.other.cache.environment)
    same(found, rig.advance_eager("chain-3", inputs))
    rig.assert_same_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.advance(inputs, rig.other.cache.environment)
    assert not step.is_captured(4)


def call_before(graph: fx.Graph, target: Any, function: Any, *args: Any) -> fx.Node:
    """Call a function with the first operand of an operator, before its last call."""
    node = graph.find_nodes(op="call_function", target=target)[-1]
    with graph.inserting_before(node):
        return graph.call_function(function, (node.args[0], *args))


@pytest.mark.slow
def test_an_operator_inside_of_a_model_is_named(rig) -> None:
    """One that cannot be captured: by its own name, and that of the model."""
    module = rig.other.target._graph
    call_before(module.graph, aten.linear.default, aten.nonzero.default)
    module.recompile()
    inputs = rig.state(2)
    with pytest.warns(CaptureWarning, match=r"aten\.nonzero\.default of target \(Runtime"):
        found = rig.advance("chain-3", inputs)
    same(found, rig.advance_eager("chain-3", inputs))


@pytest.mark.parametrize("where", ["target", "step"])
def test_a_step_that_cannot_run_is_told_from_one_that_cannot_be_captured(rig, where) -> None:
    """The run before the capture fails, as where memory is out: no step of that size can run."""
    step = rig.steps["chain-3"]
    accept = step._binder.stages["accept_commit"]
    module = {"target": rig.other.target._graph, "step": accept}[where]
    operator = {"target": aten.linear, "step": torch.ops.specc.accept}[where].default
    added = call_before(module.graph, operator, aten.view.default, [7, 7, 7])
    module.recompile()
    inputs = rig.state(2)
    place = {"target": r"aten\.view\.default of target \(", "step": r"aten\.view\.default \("}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        message = f"chain-3 for 2 requests cannot run: {place[where]}"
        with pytest.raises(EngineError, match=message):
            step.advance(inputs, rig.other.cache.environment)
    assert not rig.device.tapes
    # what went wrong may be gone next time
    module.graph.erase_node(added)
    module.recompile()
    found = step.advance(inputs, rig.other.cache.environment)
    same(found, rig.advance_eager("chain-3", inputs))
    assert step.is_captured(2)


def test_a_whole_capture_keeps_no_values_of_its_stages(rig) -> None:
    """They would take memory of the pool that other graphs could use; a hook's graphs keep them."""
    step = rig.steps["tree-2-1"]
    inputs = rig.state(2)
    step.advance(inputs, rig.other.cache.environment)
    whole = step._bound[2, False].environment
    assert not {"logits", "tokens", "path", "output_tokens"} & whole.keys()
    assert {"last_tokens", "cache_len", "block_table", "parents", "target_slab_0"} <= whole.keys()
    step.before_accept = lambda values: values["logits"]
    step.advance(inputs, rig.other.cache.environment)
    assert {"logits", "tokens", "path"} <= step._bound[2, True].environment.keys()


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
def test_results_outlive_further_steps(tiny_engine, is_late) -> None:
    """A late read gives the step's own results: another LLM may run its steps in between."""
    rig = make_rig(tiny_engine, LateDevice() if is_late else SimulatedDevice())
    inputs = rig.state(4)
    plans = ["chain-3", "off", "tree-2-1", "chain-3"]
    for plan in PLANS:
        # this waits for what is queued
        rig.steps[plan].capture(1)
    queued = [rig.steps[p].submit(select(inputs, [b])) for b, p in enumerate(plans)]
    for b in (2, 0, 3, 1):
        same(queued[b].result(), rig.advance_eager(plans[b], select(inputs, [b])))


@pytest.mark.slow
def test_the_device_runs_behind_the_host(late_rig) -> None:
    """Nothing waits but a read of a result, and that for no more than its step."""
    inputs = late_rig.state(2)
    step, device = late_rig.steps["chain-3"], late_rig.device
    assert isinstance(device, LateDevice)
    step.capture(2)
    device.run_all()
    first = step.submit(inputs)
    # inputs, step, results
    assert device.num_waiting == 3
    second = step.submit_next(2)
    assert device.num_waiting == 5
    wanted = late_rig.advance_eager("chain-3", inputs)
    same(first.result(), wanted)
    assert device.num_waiting == 2
    inputs = following(inputs, wanted)
    wanted = late_rig.advance_eager("chain-3", inputs)
    same(second.result(), wanted)


def test_when_a_step_can_go_on(rig) -> None:
    inputs = rig.state(2)
    step = rig.steps["chain-3"]
    pending = step.submit(inputs)
    assert pending.can_go_on
    further = step.submit_next(2)
    assert further.can_go_on
    assert not pending.can_go_on
    other = rig.steps["off"].submit(inputs)
    assert other.can_go_on
    assert not further.can_go_on
    step.before_accept = lambda values: None
    assert not step.submit(inputs).can_go_on


def test_a_step_follows_only_requests_whose_state_the_device_has(rig) -> None:
    inputs = rig.state(2)
    step = rig.steps["chain-3"]
    step.submit(inputs, ["a", "b"], [False, False])
    assert step.can_follow([0, 1], ["a", "b"])
    assert not step.can_follow([0, 1], ["a", "c"])
    # it keeps the states of those that have no part in a step
    step.submit(rig.state(1), ["d"], [False])
    assert step.can_follow([0], ["b"])


def test_a_step_that_would_leave_the_cache_is_not_queued(rig) -> None:
    inputs = rig.state(2)
    step = rig.steps["chain-3"]
    before = step.submit(inputs)
    slab = next(iter(rig.other.cache.environment.values()))
    rows, table = inputs.rows, inputs.block_table
    behind = [rows[0], (*rows[1][:2], table.shape[1] * slab.shape[3])]
    with pytest.raises(EngineError, match="committed rows and 4 nodes"):
        step.submit(inputs._replace(rows=behind))
    with pytest.raises(EngineError, match="column 0 of sequence 0"):
        step.submit(inputs._replace(block_table=torch.full_like(table, slab.shape[2])))
    assert before.can_go_on


def test_no_step_goes_on_from_the_inputs_of_one_that_was_interrupted(rig, monkeypatch) -> None:
    inputs = rig.state(2)
    pending = rig.steps["chain-3"].submit(inputs)
    other = rig.steps["off"]
    monkeypatch.setattr(other, "_queue", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        other.submit(inputs)
    assert not pending.can_go_on


@pytest.mark.slow
def test_a_step_that_is_not_captured_does_not_go_on(rig, monkeypatch) -> None:
    """It could run and wait, while the results of the last one are ready to be read."""

    def refuse(run: Any) -> None:
        raise OperatorError("aten.item", None, RuntimeError("refused"))

    monkeypatch.setattr(rig.device, "capture", refuse)
    inputs = rig.state(2)
    with pytest.warns(CaptureWarning, match=r"aten\.item \(RuntimeError: refused\)"):
        pending = rig.steps["chain-3"].submit(inputs)
    assert not pending.can_go_on


def test_seconds_of_steps_that_were_queued_together_do_not_overlap(rig) -> None:
    inputs = rig.state(1)
    step = rig.steps["chain-3"]
    step.capture(1)
    begin = time.perf_counter()
    pending = step.submit(inputs)
    seconds = 0.0
    for _ in range(5):
        ahead = step.submit_next(1)
        time.sleep(0.01)
        seconds += pending.result().stage_s["step"]
        pending = ahead
    time.sleep(0.05)
    seconds += pending.result().stage_s["step"]
    assert 0.1 < seconds <= time.perf_counter() - begin
