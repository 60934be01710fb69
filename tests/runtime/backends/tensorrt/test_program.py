"""A model's TensorRT engine on the recorder, against its flat program; what is refused, and how."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.errors import EngineError
from specc.passes.lower.tensorrt.builder import BuildOptions
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile
from specc.runtime.backends.padded import padded_batch as padded_batch_module
from specc.runtime.backends.padded.model import WholeBatch
from specc.runtime.backends.tensorrt.program import TensorRTProgram
from specc.speculation.tree import TokenTree
from tests.flat_passes import PADDING, Inputs, causal_pass, first_level, random_tree, tree_pass
from tests.onnx_models import BothPrograms, Lowered
from tests.runtime.backends.tensorrt.recorded_engines import (
    on_recorder,
    program_of,
    recorded_engine,
)
from tests.runtime.backends.tensorrt.recorded_pass import ALIGNMENT
from tests.runtime.backends.tensorrt.recorder import (
    CAPTURE_STREAM,
    SCRATCH_BYTES,
    STREAM,
    DynamicShapesKernelSpecializationStrategy,
    ExecutionContextAllocationStrategy,
    IExecutionContext,
    Recorder,
)
from tests.tiers import every

BLOCKS, CHUNK = 5, 40
PROFILES = (
    ShapeProfile("prefill", (1, 1, 5), (1, CHUNK, CHUNK), (1, 1, 5)),
    ShapeProfile("tree", (1, 5, 5), (8, 8, 8), (8, 40, 40)),
    ShapeProfile("decode", (1, 5, 5), (1, 1, 1), (1, 5, 5)),
    ShapeProfile("two", (1, 5, 5), (2, 2, 2), (1, 5, 5)),
)
TREES = [random_tree(random.Random(3), 8) for _ in range(3)]


def prompts(starts: list[int], counts: list[int], blocks: list[int]) -> Inputs:
    """As the runner asks for them: logits of last tokens."""
    inputs = causal_pass(starts, counts, blocks)
    return inputs | {"logit_rows": inputs["q_start"][1:].long() - 1}


PASSES: dict[str, Inputs] = {
    "chunk": prompts([13], [CHUNK], [2]),
    "one-token": causal_pass([9, 70, 15], [1] * 3, [1, 2, 3]),
    "ragged": prompts([7, 33, 1], [11, 1, 14], [1, 2, 3]),
    "holes": prompts([7, 33, 1], [11, 1, 14], [4, 2, 0]),
    "trees": tree_pass([30, 7, 0], TREES, [2, 3, 4]),
    "front": first_level([1, 0], 2, [3, 4]),
    "no-part": tree_pass([9, PADDING, 0], TREES, [0, 1, 2]),
}


@dataclass
class Rig:
    """Both programs of a model, and the recorder that runs the one of TensorRT."""

    recorder: Recorder
    both: BothPrograms
    program: TensorRTProgram
    make: Callable[..., TensorRTProgram]


@pytest.fixture(params=["tensorrt_rtx", "tensorrt"])
def any_rig(request: pytest.FixtureRequest, lowered_phi: tuple[Lowered, Path]) -> Iterator[Rig]:
    yield from make_rig(lowered_phi, request.param)


@pytest.fixture
def rig(lowered_phi: tuple[Lowered, Path]) -> Iterator[Rig]:
    yield from make_rig(lowered_phi)


def make_rig(lowered_phi: tuple[Lowered, Path], name: str = "tensorrt_rtx") -> Iterator[Rig]:
    pair, directory = lowered_phi
    with on_recorder(name) as recorder:
        both = BothPrograms(pair, None, BLOCKS)

        def make(options: BuildOptions | None = None) -> TensorRTProgram:
            engine = recorded_engine(recorder, pair, directory, PROFILES, options)
            return program_of(recorder, engine, pair, both.onnx_caches)

        both.onnx = program = make()
        yield Rig(recorder, both, program, make)


def whole(program: TensorRTProgram, inputs: Inputs) -> Tensor:
    """A pass as a step runs it."""
    return WholeBatch(program)(**inputs)


@pytest.mark.parametrize("kind", every(2, PASSES))
def test_passes_equal_those_of_the_flat_program(any_rig: Rig, kind: str) -> None:
    any_rig.both.compare(PASSES[kind], 1e-5)
    assert not any_rig.recorder.mistakes
    assert not any_rig.recorder.refusals


def test_the_standard_lane_has_no_lengths(rig: Rig) -> None:
    rig.both.onnx = rig.make(BuildOptions(use_fast_lane=False))
    rig.both.compare(PASSES["trees"], 1e-5)
    (made,) = rig.recorder.enqueued
    assert "kv_lengths" not in made.shapes
    assert not rig.recorder.mistakes


def test_lengths_are_rows_up_to_the_last_node(rig: Rig) -> None:
    rig.both.compare(PASSES["trees"], 1e-5)
    (made,) = rig.recorder.enqueued
    assert made.engine.get_tensor_shape("kv_lengths") == (-1,)
    # the recorder compares them in every pass; these are of the first cache row on
    assert made.shapes["kv_lengths"] == (3,)


def test_inputs_of_a_view_are_copied_to_where_memory_begins(rig: Rig) -> None:
    """TensorRT wants addresses that 256 divides; a step's inputs are columns of one buffer."""
    inputs = PASSES["one-token"]
    wanted = rig.both.flat(**inputs)
    shifted = {
        key: value if value is None else torch.cat([value[:1], value])[1:]
        for key, value in inputs.items()
    }
    assert all(x is None or x.storage_offset() for x in shifted.values())
    torch.testing.assert_close(rig.program(**shifted), wanted)
    assert ALIGNMENT == 256


def test_cache_rows_of_the_first_sequence_are_where_a_pass_begins(rig: Rig) -> None:
    """A pass over neighbours gets the address of the first, for input and output."""
    rig.both.compare(prompts([4, 6], [3, 3], [3, 4]), 1e-5)
    (made,) = rig.recorder.enqueued
    for name, cache in rig.program._caches.items():
        assert made.pieces[name].address == cache[3].data_ptr()
        assert made.pieces[f"{name}_out"].address == cache[3].data_ptr()


def test_profiles_are_chosen_by_their_nodes(rig: Rig) -> None:
    """Of those that hold a shape, the one that is tuned nearest to it."""
    for batch, nodes, rows, wanted in (
        (1, 1, 1, 2), (5, 1, 5, 2), (2, 2, 2, 3), (2, 3, 2, 0), (1, 40, 1, 0), (2, 8, 16, 1),
        # a tree whose leaves alone have logits: as a prompt
        (5, 8, 5, 0),
    ):  # fmt: skip
        assert rig.program._profile_of(batch, nodes, rows) == wanted, (batch, nodes, rows)


@pytest.mark.parametrize(
    ("batch", "nodes", "rows"), [(6, 1, 6), (1, 41, 1), (2, 3, 6), (1, 9, 9), (0, 1, 1)]
)
def test_a_shape_of_no_profile_is_refused(rig: Rig, batch: int, nodes: int, rows: int) -> None:
    with pytest.raises(EngineError) as caught:
        rig.program._context(batch, nodes, rows)
    assert f"{batch} sequences × {nodes} nodes with {rows} rows" in caught.value.found
    assert "1 … 5 × 1 … 40, 1 … 5 rows; 1 … 5 × 8, 8 … 40 rows" in caught.value.needed
    assert "--prefill-chunk" in caught.value.do
    assert not rig.recorder.contexts


def test_a_shape_that_tensorrt_refuses_is_an_error(rig: Rig) -> None:
    """Ranges of one input that are narrower than those of the tokens."""
    for profile in rig.program._engine._profiles:
        profile["positions"] = [[1, 1], [1, 1], [1, 1]]
    with pytest.raises(EngineError, match="a pass of 2 sequences × 3 nodes"):
        rig.program(**causal_pass([4, 6], [3, 3], [0, 1]))
    # and a later pass does not find a context that was half made
    with pytest.raises(EngineError, match="a pass of 2 sequences × 3 nodes"):
        rig.program(**causal_pass([4, 6], [3, 3], [0, 1]))
    assert not rig.recorder.enqueued


def test_a_write_past_the_end_is_refused(rig: Rig) -> None:
    last = rig.both.rows.slots
    rig.program(**causal_pass([last - 4], [4], [1]))
    rig.recorder.forget()
    before = [part.clone() for pair in rig.both.onnx_caches for part in pair]
    for inputs in (causal_pass([last - 3], [4], [1]), causal_pass([last], [1], [1])):
        with pytest.raises(EngineError, match=f"slots up to {last - 1}"):
            rig.program(**inputs)
    assert not rig.recorder.enqueued
    after = [part for pair in rig.both.onnx_caches for part in pair]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_why_writes_past_the_end_are_refused(rig: Rig) -> None:
    """TensorRT drops them, and says that all is well: here after the rim of a sequence."""
    total = rig.both.rows.slots + rig.both.rows.scratch
    wanted = rig.both.flat_caches[0][0][1].clone()
    whole(rig.program, causal_pass([total - 3], [8], [0]) | {"logit_rows": torch.arange(8)})
    assert rig.recorder.num_dropped == 5
    assert not rig.recorder.refusals
    assert torch.equal(rig.both.as_flat(rig.both.onnx_caches[0][0])[1], wanted)


def test_contexts_of_steps_keep_their_shapes(rig: Rig) -> None:
    tree, other = PASSES["trees"], tree_pass([3, 4], TREES[:2], [0, 1])
    for inputs in (tree, other, tree):
        whole(rig.program, inputs)
    one, two, three = rig.recorder.enqueued
    assert one.context is three.context is not two.context
    # between steps, one for all, and not one of a step's
    for inputs in (tree, other):
        rig.program(**inputs)
    *_, four, five = rig.recorder.enqueued
    assert four.context is five.context
    assert four.context not in (one.context, two.context)
    kinds = DynamicShapesKernelSpecializationStrategy
    assert one.context._kernels is kinds.EAGER
    assert four.context._kernels is kinds.LAZY


def test_a_shape_has_a_context_for_its_rows_of_logits(rig: Rig) -> None:
    """A captured pass keeps the shapes of its own context."""
    inputs = tree_pass([3, 4], TREES[:2], [0, 1])
    every = len(inputs["tokens"])
    for rows in (every, every - 1, every):
        whole(rig.program, inputs | {"logit_rows": torch.arange(rows)})
    one, two, three = rig.recorder.enqueued
    assert one.context is three.context is not two.context
    assert not rig.recorder.mistakes


def test_contexts_share_memory_that_is_large_enough(rig: Rig) -> None:
    for inputs in PASSES.values():
        rig.program(**inputs)
    scratch = {made.scratch.address for made in rig.recorder.enqueued}
    assert scratch == {rig.program._scratch.data_ptr()}
    assert rig.program._scratch.numel() >= SCRATCH_BYTES


def test_full_tensorrt_takes_a_strategy(any_rig: Rig) -> None:
    options = any_rig.program._context_options()
    if any_rig.recorder.__name__ == "tensorrt":
        assert options is ExecutionContextAllocationStrategy.USER_MANAGED
    else:
        assert options._strategy is ExecutionContextAllocationStrategy.USER_MANAGED


def test_capture_begins_after_an_enqueue_with_the_same_shapes(rig: Rig) -> None:
    """And a replay reads inputs where they lay: what Python made once is not made again."""
    inputs = tree_pass([30, 7], TREES[:2], [0, 1])
    wanted = whole(rig.program, inputs)
    found: list[Tensor] = []
    tape = rig.recorder.device.capture(lambda: found.append(whole(rig.program, inputs)))
    captured = found[-1]
    tape.replay()
    torch.testing.assert_close(captured, wanted)
    inputs["tokens"].copy_(inputs["tokens"].flip(0))
    tape.replay()
    torch.testing.assert_close(captured, whole(rig.program, inputs))
    assert not torch.equal(captured, wanted)
    assert not rig.recorder.mistakes


def test_the_stream_is_that_of_the_capture(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = []
    execute = IExecutionContext.execute_async_v3
    monkeypatch.setattr(
        IExecutionContext,
        "execute_async_v3",
        lambda context, stream: streams.append(stream) or execute(context, stream),
    )
    inputs = PASSES["trees"]
    whole(rig.program, inputs)
    rig.recorder.device.capture(lambda: whole(rig.program, inputs))
    assert streams == [STREAM, CAPTURE_STREAM, CAPTURE_STREAM]


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("execute_async_v3", "TensorRT refused a pass of 3 × 8 tokens"),
        ("set_tensor_address", "TensorRT refused the memory of tokens"),
        ("set_optimization_profile_async", "TensorRT makes no execution context"),
        ("set_input_shape", "a pass of 3 sequences × 8 nodes with 24 rows"),
    ],
)
def test_what_tensorrt_refuses_is_an_error(
    rig: Rig, method: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IExecutionContext, method, lambda *_: False)
    with pytest.raises(EngineError, match=re.escape(found)) as caught:
        rig.program(**PASSES["trees"])
    assert caught.value.needed
    assert caught.value.do
    assert not rig.recorder.runs


def test_no_context_is_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = type(rig.program._engine)
    monkeypatch.setattr(engine, "create_execution_context", lambda *_: None)
    with pytest.raises(EngineError, match="makes no execution context") as caught:
        rig.program(**PASSES["trees"])
    assert "max_num_seqs" in caught.value.do


def pop_name(engine: Any, name: str) -> None:
    engine._names.remove(name)


def add_name(engine: Any, name: str) -> None:
    engine._names.append(name)
    engine._shapes[name], engine._dtypes[name] = (-1,), engine._dtypes["tokens"]


@pytest.mark.parametrize(
    ("alter", "found"),
    [
        (lambda e: e._aliases.pop("k_cache_0_out"), "k_cache_0_out shares memory with None"),
        (
            lambda e: e._aliases.update(v_cache_1_out="k_cache_1"),
            "v_cache_1_out shares memory with k_cache_1",
        ),
        (
            lambda e: e._shapes.update(k_cache_1=(-1, 4, 96, 16)),
            "k_cache_1 is torch.float32 [4, 96",
        ),
        (
            lambda e: e._dtypes.update(v_cache_0=e._recorder.DataType.HALF),
            "v_cache_0 is torch.float16 [4, 144",
        ),
        (lambda e: pop_name(e, "write_index"), "write_index too many or too few"),
        (lambda e: pop_name(e, "mask"), "mask too many or too few"),
        (lambda e: pop_name(e, "v_cache_1_out"), "v_cache_1_out too many or too few"),
        (lambda e: add_name(e, "mask_window_16"), "mask_window_16 too many or too few"),
        (lambda e: add_name(e, "past_lengths"), "past_lengths too many or too few"),
    ],
)
def test_engines_of_other_programs_are_refused(rig: Rig, alter: Any, found: str) -> None:
    rig.recorder.alter = alter
    with pytest.raises(EngineError, match=re.escape(found)) as caught:
        rig.make()
    assert "compile the engine again" in caught.value.do


def test_a_mask_without_a_key_would_show(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass of the runtime has one; were it so, TensorRT would divide by zero, and not tell."""
    masks = padded_batch_module.attention_masks

    def empty(*args: Any) -> dict[int, Tensor]:
        found = masks(*args)
        for mask in found.values():
            mask[0, 0, 0] = False
        return found

    monkeypatch.setattr(padded_batch_module, "attention_masks", empty)
    with pytest.raises(AssertionError, match="masked as a whole"):
        rig.program(**tree_pass([5], [TokenTree.chain(3)], [0]))
