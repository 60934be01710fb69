"""The recorder is TensorRT's interface, and finds what TensorRT would do wrongly without a word."""

from __future__ import annotations

import ast
import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.passes.lower.tensorrt.shape_profile import ShapeProfile
from specc.runtime.backends.tensorrt import backend as trt_backend
from specc.runtime.backends.tensorrt import program as trt_program
from specc.speculation.tree import TokenTree
from tests.flat_passes import tree_pass
from tests.onnx_models import BothPrograms
from tests.runtime.backends.tensorrt import recorder as trt_recorder
from tests.runtime.backends.tensorrt.recorded_engines import (
    on_recorder,
    program_of,
    recorded_engine,
)
from tests.runtime.backends.tensorrt.recorder import (
    SCRATCH_BYTES,
    STREAM,
    ExecutionContextAllocationStrategy,
    IExecutionContext,
    Recorder,
)

PROFILES = (ShapeProfile("tree", (1, 2, 2), (3, 3, 3), (3, 6, 6)),)
CLASSES = ("Runtime", "ICudaEngine", "IExecutionContext", "IRuntimeConfig")
ENUMS = (
    "DataType", "ExecutionContextAllocationStrategy", "EngineValidity",
    "DynamicShapesKernelSpecializationStrategy",
)  # fmt: skip


@pytest.fixture(scope="module")
def real() -> Any:
    return pytest.importorskip("tensorrt_rtx")


def signatures(method: Any) -> list[list[str]]:
    """Names of the arguments of each overload, as the bindings' documentation has them."""
    pattern = re.compile(rf"^(?:\d+\. )?{method.__name__}\(self: [^,)]+(.*)\) ->", re.MULTILINE)
    found = pattern.findall(method.__doc__)
    return [re.findall(r", (\w+): ", text) for text in found]


def public(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_those_of_the_module(real: Any, name: str) -> None:
    """Every attribute, and the names and the number of the arguments of every method."""
    mine, theirs = getattr(trt_recorder, name), getattr(real, name)
    assert public(mine)
    for attribute in public(mine):
        value = inspect.getattr_static(mine, attribute)
        assert hasattr(theirs, attribute), attribute
        other = inspect.getattr_static(theirs, attribute)
        if not inspect.isfunction(value):
            assert isinstance(other, property), attribute
            continue
        wanted = signatures(getattr(theirs, attribute))
        assert wanted, attribute
        assert [*inspect.signature(value).parameters][1:] in wanted, attribute


def test_arguments_that_drift_are_found(real: Any) -> None:
    assert signatures(real.IExecutionContext.set_device_memory) == [["memory", "size"]]
    assert ["strategy"] in signatures(real.ICudaEngine.create_execution_context)
    assert ["runtime_config"] in signatures(real.ICudaEngine.create_execution_context)
    assert signatures(real.IExecutionContext.execute_async_v3) == [["stream_handle"]]


@pytest.mark.parametrize("name", ENUMS)
def test_members_are_those_of_the_module(real: Any, name: str) -> None:
    mine: type[enum.Enum] = getattr(trt_recorder, name)
    theirs = getattr(real, name).__members__
    assert {member.name for member in mine} <= theirs.keys()
    if name != "DataType":
        assert {member.name: member.value for member in mine} == {
            key: int(value) for key, value in theirs.items()
        }


def test_answers_have_the_types_of_the_module(real: Any) -> None:
    from specc.tensorrt import library as trt

    runtime = real.Runtime(trt.logger())
    state, diagnostics = runtime.get_engine_validity(bytes(400))
    assert state == real.EngineValidity.INVALID
    assert isinstance(diagnostics, int)
    assert runtime.deserialize_cuda_engine(bytes(400)) is None


def test_the_runtime_asks_for_nothing_else(real: Any) -> None:
    """Every attribute of an engine, a context, a configuration or the module that it names."""
    owners = {
        "engine": "ICudaEngine", "_engine": "ICudaEngine", "context": "IExecutionContext",
        "config": "IRuntimeConfig", "runtime": "Runtime",
    }  # fmt: skip
    seen = set()
    for module in (trt_program, trt_backend):
        for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            name = getattr(owner, "id", None) or getattr(owner, "attr", None)
            if name in owners:
                kind = getattr(real, owners[name])
                assert hasattr(kind, node.attr), f"{owners[name]}.{node.attr}"
                seen.add(owners[name])
            elif name in ("trt", "_trt"):
                assert hasattr(real, node.attr), node.attr
                seen.add("module")
    assert seen == {*CLASSES, "module"}


class Bound:
    """A context with everything set for a pass of two sequences; `kept` is the inputs' memory."""

    def __init__(self, recorder: Recorder, pair: Any, directory: Path) -> None:
        self.recorder = recorder
        self.both = BothPrograms(pair, None, 2)
        self.engine = recorded_engine(recorder, pair, directory, PROFILES)
        program = program_of(recorder, self.engine, pair, self.both.onnx_caches)
        self.both.onnx = self.program = program
        self.inputs = tree_pass([5, 7], [TokenTree.chain(2)] * 2, [0, 1])
        self.kept: dict[str, torch.Tensor] = {}
        set_address = IExecutionContext.set_tensor_address

        def keep(item: IExecutionContext, name: str, memory: int) -> bool:
            done = set_address(item, name, memory)
            if name in item._engine._inputs or name == "logits":
                value = trt_recorder.Pass(
                    recorder, item._engine, item, 0, item._shapes, item._pieces, item._scratch
                ).tensor(name)  # type: ignore[arg-type]
                with torch.inference_mode(False):
                    self.kept[name] = value.clone()
            return done

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(IExecutionContext, "set_tensor_address", keep)
            self.logits = program(**self.inputs)
        (self.context,) = recorder.contexts
        # memory of the inputs was let go: from here on it is here
        for name in self.kept:
            if name not in program._caches:
                self.set(name, self.kept[name])

    def set(self, name: str, value: torch.Tensor) -> None:
        assert self.context.set_tensor_address(name, value.data_ptr())

    def enqueue(self) -> bool:
        return self.context.execute_async_v3(self.recorder.device.stream_handle())


@pytest.fixture
def bound(lowered_phi: Any) -> Iterator[Bound]:
    with on_recorder() as recorder:
        # passes are counted, and mistakes are made inside of a capture
        recorder.device.runs_first = False
        yield Bound(recorder, *lowered_phi)


def test_a_pass_as_it_should_be(bound: Bound) -> None:
    """Every test below changes one thing."""
    bound.kept["logits"].zero_()
    assert bound.enqueue()
    torch.testing.assert_close(bound.kept["logits"], bound.logits)
    assert not bound.recorder.mistakes
    assert not bound.recorder.refusals


def test_what_tensorrt_refuses(bound: Bound) -> None:
    context, refusals = bound.context, bound.recorder.refusals
    assert not context.set_input_shape("tokens", (3, 3))
    assert not context.set_input_shape("tokens", (2, 4))
    assert not context.set_input_shape("k_cache_0", (2, 4, 143, 16))
    assert not context.set_input_shape("other", (2, 3))
    assert not context.set_tensor_address("other", bound.logits.data_ptr())
    assert not context.set_optimization_profile_async(1, STREAM)
    assert len(refusals) == 6
    fresh = bound.engine.create_execution_context(ExecutionContextAllocationStrategy.USER_MANAGED)
    assert fresh is not None
    assert not fresh.execute_async_v3(STREAM)
    assert "no shape" in refusals[-1]
    fresh._shapes, fresh._profile = dict(context._shapes), 0
    assert not fresh.execute_async_v3(STREAM)
    assert "no address" in refusals[-1]
    fresh._pieces = dict(context._pieces)
    assert not fresh.execute_async_v3(STREAM)
    assert "no scratch memory" in refusals[-1]
    context._shapes["write_index"] = (1,)
    assert not bound.enqueue()
    assert "batch sizes" in refusals[-1]


def free_tokens(bound: Bound) -> None:
    bound.set("tokens", bound.kept["tokens"].clone())
    bound.enqueue()


def let_an_output_be_elsewhere(bound: Bound) -> None:
    bound.set("k_cache_0_out", bound.both.onnx_caches[0][1])
    bound.enqueue()


def give_little_memory(bound: Bound) -> None:
    small = torch.zeros(5, dtype=torch.int64)
    bound.kept["small"] = small
    bound.set("positions", small)
    bound.enqueue()


def misalign_tokens(bound: Bound) -> None:
    wide = bound.kept["wide"] = torch.zeros(7, dtype=torch.int64)
    bound.set("tokens", wide[1:])


def misalign_scratch(bound: Bound) -> None:
    scratch = bound.kept["scratch"] = torch.zeros(SCRATCH_BYTES + 64, dtype=torch.uint8)
    bound.context.set_device_memory(scratch[64:].data_ptr(), SCRATCH_BYTES)


def give_little_scratch(bound: Bound) -> None:
    scratch = bound.kept["scratch"] = torch.zeros(SCRATCH_BYTES - 1, dtype=torch.uint8)
    bound.context.set_device_memory(scratch.data_ptr(), SCRATCH_BYTES - 1)


def promise_too_much_scratch(bound: Bound) -> None:
    scratch = bound.kept["scratch"] = torch.zeros(SCRATCH_BYTES - 1, dtype=torch.uint8)
    bound.context.set_device_memory(scratch.data_ptr(), SCRATCH_BYTES)


def use_another_stream(bound: Bound) -> None:
    bound.context.execute_async_v3(STREAM + 7)


def mask_a_row(bound: Bound) -> None:
    bound.kept["mask"][1, 0, 2] = False
    bound.enqueue()


def see_behind(bound: Bound) -> None:
    bound.kept["mask"][0, 0, 0, 10] = True
    bound.enqueue()


def forget_nodes(bound: Bound) -> None:
    bound.kept["kv_lengths"] -= 3
    bound.enqueue()


def write_in_front(bound: Bound) -> None:
    bound.kept["write_index"][0] = -1
    bound.kept["kv_lengths"][0] = 2
    bound.enqueue()


def change_shapes_in_a_capture(bound: Bound) -> None:
    bound.recorder.device.capture(lambda: bound.context.set_input_shape("tokens", (1, 3)))


def begin_in_a_capture(bound: Bound) -> None:
    bound.context._ran = {}
    bound.recorder.device.capture(bound.enqueue)


def capture_lazy_kernels(bound: Bound) -> None:
    bound.recorder.device.capture(bound.enqueue)


def make_a_context_in_a_capture(bound: Bound) -> None:
    strategy = ExecutionContextAllocationStrategy.USER_MANAGED
    bound.recorder.device.capture(lambda: bound.engine.create_execution_context(strategy))


def take_memory_for_each_context(bound: Bound) -> None:
    bound.engine.create_execution_context(bound.engine.create_runtime_config())


def free_what_a_graph_reads(bound: Bound) -> None:
    bound.context._kernels = None
    tape = bound.recorder.device.capture(bound.enqueue)
    tape.replay()
    assert not bound.recorder.mistakes
    del bound.kept["positions"]
    tape.replay()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (free_tokens, "memory of tokens was freed"),
        (let_an_output_be_elsewhere, "k_cache_0_out at another address than k_cache_0"),
        (give_little_memory, "too little memory for positions"),
        (misalign_tokens, "tokens at an address that 256 does not divide"),
        (misalign_scratch, "scratch memory at an address that 256 does not divide"),
        (give_little_scratch, f"{SCRATCH_BYTES - 1} bytes of scratch memory"),
        (promise_too_much_scratch, f"{SCRATCH_BYTES} bytes of scratch memory"),
        (use_another_stream, "queued on stream"),
        (mask_a_row, "mask with a row that is masked as a whole"),
        (see_behind, "mask lets a token see rows beyond those of the pass"),
        (forget_nodes, "kv_lengths [7, 9], rows up to [10, 12]"),
        (write_in_front, "rows before a cache"),
        (change_shapes_in_a_capture, "the shape of tokens changed inside of a capture"),
        (begin_in_a_capture, "the first enqueue with these shapes inside of a capture"),
        (capture_lazy_kernels, "kernels that will be exchanged"),
        (make_a_context_in_a_capture, "a context made inside of a capture"),
        (take_memory_for_each_context, "takes memory of its own"),
        (free_what_a_graph_reads, "memory of positions was freed"),
    ],
)
def test_what_tensorrt_would_do_without_a_word(bound: Bound, change: Any, found: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(found)):
        change(bound)
    assert len(bound.recorder.mistakes) == 1


def test_rows_past_the_end_are_dropped(bound: Bound) -> None:
    """The pass says that all is well; rows up to the end are written, and no other one."""
    (k_cache, _), *_ = bound.both.onnx_caches
    total = bound.both.rows.total
    wanted = k_cache[1, :, 9:11].clone()
    before = k_cache.clone()
    bound.kept["write_index"][1] = total - 2
    bound.kept["kv_lengths"][1] = total + 1
    assert bound.enqueue()
    assert bound.recorder.num_dropped == 1
    # the first layer's keys do not depend on what is attended to
    torch.testing.assert_close(k_cache[1, :, total - 2 :], wanted)
    assert torch.equal(k_cache[1, :, : total - 2], before[1, :, : total - 2])
    assert not bound.recorder.mistakes


def test_a_replay_reads_and_writes_where_the_capture_did(bound: Bound) -> None:
    bound.context._kernels = None
    tape = bound.recorder.device.capture(bound.enqueue)
    bound.kept["logits"].zero_()
    tape.replay()
    torch.testing.assert_close(bound.kept["logits"], bound.logits)
    # what is set later is not what was captured
    other = torch.zeros_like(bound.logits)
    bound.set("logits", other)
    tape.replay()
    assert not other.any()
    assert [len(bound.recorder.enqueued), len(bound.recorder.runs)] == [2, 4]
