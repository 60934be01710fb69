"""TensorRT's runtime without a GPU: what its Python module has, on onnxruntime, and stricter.

A recorded plan holds the ONNX file that an engine is built from, and the ranges of its profiles. An
enqueue reads and writes memory at the very addresses that were set, when it is enqueued and at
every replay of a graph that it was captured in. What TensorRT refuses returns False, as there, and
is kept in `refusals`. What it would do wrongly without a word fails, and is kept in `mistakes`;
only cache rows past the end are dropped silently, as TensorRT drops them, and counted.
"""

from __future__ import annotations

import enum
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import onnx
import onnxruntime
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from specc.passes.lower.tensorrt.builder import FAST, BuildOptions
from specc.passes.lower.tensorrt.fast_attention import LENGTHS
from specc.passes.lower.tensorrt.lower import BuildReport
from specc.passes.lower.tensorrt.onnx_attention import read_form
from specc.passes.lower.tensorrt.shape_profile import (
    ShapeProfile,
    loosen_batch,
    merge_profiles,
    profile_shapes,
)
from specc.runtime.backends.onnx import program as onnx_program
from specc.tensorrt.layers import LayerReport
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.runtime.backends.captured.tape import Tape
from tests.runtime.backends.tensorrt.recorded_pass import ALIGNMENT, Memory, Pass, Piece

# bytes that every recorded engine asks for
SCRATCH_BYTES = 3000
STREAM, CAPTURE_STREAM = 11, 12
_NUMBERS = itertools.count()
_PASSES: WeakValueDictionary[int, Pass] = WeakValueDictionary()
# what tapes record of an enqueue: its number, and no tensor
_LIBRARY = torch.library.Library("trt_recorder", "DEF")
_LIBRARY.define("enqueue(int number) -> ()")
_LIBRARY.impl("enqueue", lambda number: _PASSES[number].run(), "CompositeExplicitAutograd")


class DataType(enum.Enum):
    FLOAT = 1
    HALF = 10
    BF16 = 16
    INT32 = 6
    INT64 = 7
    BOOL = 9


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class EngineValidity(enum.Enum):
    VALID = 0
    SUBOPTIMAL = 1
    INVALID = 2


class RecordedDevice(SimulatedDevice):
    """A simulated device with a stream for captures."""

    def __init__(self) -> None:
        super().__init__()
        self._is_on_stream = False

    @property
    def is_capturing(self) -> bool:
        return self.tape is not None

    def capture(self, run: Callable[[], object]) -> Tape:
        self._is_on_stream = True
        try:
            return super().capture(run)
        finally:
            self._is_on_stream = False

    def make_tape(self) -> Tape:
        tape = super().make_tape()
        # enqueues know addresses
        tape.keeps_own = True
        return tape

    def stream_handle(self) -> int:
        return CAPTURE_STREAM if self._is_on_stream else STREAM


class Recorder:
    """Stands for the module `tensorrt_rtx`, or `tensorrt`.

    `enqueued` lists passes in the order in which Python enqueued them, `runs` in the order in which
    they ran, replays included; `contexts` are all that were made.

    Args:
        name: of the module; full TensorRT has no runtime configuration of shapes.
    """

    __version__ = "1.7.1"

    def __init__(self, device: RecordedDevice, name: str = "tensorrt_rtx") -> None:
        self.__name__ = name
        self.device = device
        self.memory = Memory()
        # tapes know them by number alone
        self._every_pass: list[Pass] = []
        self.enqueued: list[Pass] = []
        self.runs: list[Pass] = []
        self.contexts: list[IExecutionContext] = []
        self.mistakes: list[str] = []
        self.refusals: list[str] = []
        self.num_dropped = 0
        # what a test changes: engines as they are loaded, answers of the runtime
        self.alter: Callable[[ICudaEngine], object] = lambda engine: None
        self.validity: tuple[EngineValidity, int] = (EngineValidity.VALID, 0)
        self.DataType = DataType
        self.ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
        if name == "tensorrt_rtx":
            self.DynamicShapesKernelSpecializationStrategy = (
                DynamicShapesKernelSpecializationStrategy
            )
            self.EngineValidity = EngineValidity

    def Runtime(self, logger: object) -> Runtime:
        return Runtime(self, logger)

    def fail(self, mistake: str) -> None:
        """Raises AssertionError: TensorRT would go on with wrong results."""
        self.mistakes.append(mistake)
        raise AssertionError(mistake)

    def refuse(self, reason: str) -> bool:
        self.refusals.append(reason)
        return False

    def note(self, made: Pass) -> None:
        self._every_pass.append(made)
        self.enqueued.append(made)

    def forget(self) -> None:
        """Begin new lists."""
        for record in (self.enqueued, self.runs):
            record.clear()


class Runtime:
    def __init__(self, recorder: Recorder, logger: object) -> None:
        assert logger is not None
        self._recorder = recorder

    def get_engine_validity(self, buffer: bytes) -> tuple[EngineValidity, int]:
        return self._recorder.validity

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        head, separator, model = bytes(serialized_engine).partition(b"\0")
        if not separator:
            return None
        engine = ICudaEngine(self._recorder, json.loads(head), model)
        self._recorder.alter(engine)
        return engine


class ICudaEngine:
    """An engine; tests alter what it says, which lies in `_` attributes."""

    def __init__(self, recorder: Recorder, head: dict[str, Any], model: bytes) -> None:
        proto = onnx.load_from_string(model)
        self._recorder = recorder
        self._model = head["model"]
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, DataType] = {}
        for item in (*proto.graph.input, *proto.graph.output):
            tensor = item.type.tensor_type
            self._shapes[item.name] = tuple(
                dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim
            )
            self._dtypes[item.name] = DataType(tensor.elem_type)
        self._inputs = [item.name for item in proto.graph.input]
        self._aliases = dict(map(reversed, head["caches"]))
        self._profiles: list[dict[str, list[list[int]]]] = head["profiles"]
        if head["has_lengths"]:
            self._inputs.append(LENGTHS)
            self._shapes[LENGTHS], self._dtypes[LENGTHS] = (-1,), DataType.INT32
        self._names = list(self._shapes)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        # products by quantized weights with rows as they are, not rounded to int8
        options.add_session_config_entry(onnx_program._ACCURACY, onnx_program._FLOATS)
        self._session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )

    @property
    def num_io_tensors(self) -> int:
        return len(self._names)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    @property
    def device_memory_size_v2(self) -> int:
        return SCRATCH_BYTES

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get_tensor_dtype(self, name: str) -> DataType:
        return self._dtypes[name]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._aliases.get(name)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self._profiles[profile_index][name]]

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, runtime_config: Any) -> IExecutionContext | None:
        """Of a configuration, or of a strategy, as the two overloads have it."""
        given = runtime_config
        is_config = isinstance(given, IRuntimeConfig)
        strategy = given._strategy if is_config else given
        if strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            self._recorder.fail(f"{strategy}: every context takes memory of its own")
        kernels = given.dynamic_shapes_kernel_specialization_strategy if is_config else None
        if self._recorder.device.is_capturing:
            self._recorder.fail("a context made inside of a capture")
        context = IExecutionContext(self._recorder, self, kernels)
        self._recorder.contexts.append(context)
        return context


class IRuntimeConfig:
    __slots__ = ("_strategy", "dynamic_shapes_kernel_specialization_strategy")

    def __init__(self) -> None:
        self._strategy = ExecutionContextAllocationStrategy.STATIC
        kinds = DynamicShapesKernelSpecializationStrategy
        self.dynamic_shapes_kernel_specialization_strategy = kinds.LAZY

    def set_execution_context_allocation_strategy(
        self, strategy: ExecutionContextAllocationStrategy
    ) -> None:
        self._strategy = strategy


class IExecutionContext:
    def __init__(self, recorder: Recorder, engine: ICudaEngine, kernels: Any) -> None:
        self._recorder = recorder
        self._engine = engine
        self._kernels = kernels
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        # shapes of the last enqueue outside of a capture
        self._ran: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, Piece] = {}
        self._scratch: Piece | None = None

    def set_device_memory(self, memory: int, size: int) -> None:
        piece = self._piece("scratch memory", memory)
        if size < SCRATCH_BYTES or piece.end - memory < size:
            self._recorder.fail(f"{size} bytes of scratch memory for {SCRATCH_BYTES}")
        self._scratch = piece

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._check_stream(stream_handle)
        if self._recorder.device.is_capturing:
            self._recorder.fail("a profile set inside of a capture")
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            return self._recorder.refuse(f"profile {profile_index}")
        self._profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        shape = tuple(shape)
        if name not in self._engine._inputs or self._profile is None:
            return self._recorder.refuse(f"a shape of {name}, profile {self._profile}")
        if self._recorder.device.is_capturing and self._shapes.get(name) != shape:
            self._recorder.fail(f"the shape of {name} changed inside of a capture")
        low, _, high = self._range(name)
        if len(shape) != len(low) or not all(
            a <= x <= b for a, x, b in zip(low, shape, high, strict=True)
        ):
            return self._recorder.refuse(f"{name} of {list(shape)}, not {low} … {high}")
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine._names:
            return self._recorder.refuse(f"an address of {name}")
        self._pieces[name] = self._piece(name, memory)
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        recorder, engine = self._recorder, self._engine
        self._check_stream(stream_handle)
        if missing := set(engine._inputs) - self._shapes.keys():
            return recorder.refuse(f"no shape of {sorted(missing)}")
        if missing := set(engine._names) - self._pieces.keys():
            return recorder.refuse(f"no address of {sorted(missing)}")
        if self._scratch is None:
            return recorder.refuse("no scratch memory")
        sizes = {len(self._shapes[name]) and self._shapes[name][0] for name in engine._inputs}
        if sizes - {self._shapes["tokens"][0], self._shapes["logit_rows"][0]}:
            return recorder.refuse(f"several batch sizes: {sorted(sizes)}")
        for output, source in engine._aliases.items():
            if self._pieces[output].address != self._pieces[source].address:
                recorder.fail(f"{output} at another address than {source}")
        if recorder.device.is_capturing:
            if self._ran != self._shapes:
                recorder.fail("the first enqueue with these shapes inside of a capture")
            if self._kernels is DynamicShapesKernelSpecializationStrategy.LAZY:
                recorder.fail("a capture of kernels that will be exchanged")
        else:
            self._ran = dict(self._shapes)
        made = Pass(
            recorder, engine, self, self._profile or 0, dict(self._shapes), dict(self._pieces),
            self._scratch,
        )  # fmt: skip
        number = next(_NUMBERS)
        _PASSES[number] = made
        recorder.note(made)
        torch.ops.trt_recorder.enqueue(number)
        return True

    def _range(self, name: str) -> list[list[int]]:
        """Smallest, tuned and largest shape; a fixed one where the profile has none."""
        profile = self._engine._profiles[self._profile or 0]
        return profile.get(name) or [list(self._engine._shapes[name])] * 3

    def _piece(self, what: str, address: int) -> Piece:
        piece = self._recorder.memory.at(address)
        if piece is None or not piece.is_alive:
            self._recorder.fail(f"{what} at an address of no tensor")
        # memory of a GPU begins at such addresses; of a CPU, it need not
        if (address - piece.begin) % ALIGNMENT:
            self._recorder.fail(f"{what} at an address that {ALIGNMENT} does not divide")
        return piece

    def _check_stream(self, handle: int) -> None:
        if handle != self._recorder.device.stream_handle():
            self._recorder.fail(f"work queued on stream {handle}")


def record_engine(
    model: Path, plan: Path, profiles: Sequence[ShapeProfile], options: BuildOptions | None = None
) -> BuildReport:
    """Write a recorded plan; stands for `specc.passes.lower.tensorrt.lower.build_engine`."""
    options = options or BuildOptions()
    form = read_form(onnx.load(str(model), load_external_data=False))
    merged = merge_profiles([loosen_batch(profile) for profile in profiles], form.rows)
    lane = FAST if options.use_fast_lane else "standard"
    has_lengths = lane == FAST
    dims = form.dims | ({LENGTHS: ("batch",)} if has_lengths else {})
    caches = [(cache.input, cache.output) for cache in form.caches]
    head = {
        "model": model.parent.name,
        "profiles": [profile_shapes(profile, dims) for profile, _ in merged],
        "caches": caches,
        "has_lengths": has_lengths,
    }
    # with its weights inside
    data = json.dumps(head).encode() + b"\0" + onnx.load(str(model)).SerializeToString()
    plan.write_bytes(data)
    return BuildReport(
        tensorrt="recorded",
        lane=lane,
        fallback=None,
        compute_capability=options.compute_capability,
        dtype=form.dtype,
        profiles=tuple(
            {"names": names, "batch": p.batch, "nodes": p.nodes, "rows": p.rows}
            for p, names in merged
        ),
        attentions=(),
        caches=tuple(caches),
        inputs=tuple(dims),
        layers=LayerReport((), ()),
        reads_lengths=None,
        num_bytes=len(data),
        weights_bytes=None,
        activation_bytes=SCRATCH_BYTES,
        seconds=0.0,
        timing_cache=None,
        warnings=(),
    )


def watch_addresses(recorder: Recorder, patch: Any) -> None:
    """Let the recorder know whose memory an address is, from now on."""
    data_ptr = torch.Tensor.data_ptr

    def noted(tensor: torch.Tensor) -> int:
        address = data_ptr(tensor)
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        recorder.memory.note(
            Piece(address, begin, begin + storage.nbytes(), StorageWeakRef(storage))
        )
        return address

    patch.setattr(torch.Tensor, "data_ptr", noted)
