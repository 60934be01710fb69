"""A model's ONNX program on onnxruntime: caches are bound once and updated in place."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specc.artifact.cache_rows import CacheRows, Reach, cache_output, reaches_of
from specc.errors import EngineError
from specc.runtime.backends.padded.model import PaddedModel
from specc.runtime.backends.padded.padded_batch import PaddedBatch, named_caches, named_inputs
from specc.system.extras import install_command

if TYPE_CHECKING:
    import onnxruntime

    from specc.artifact.model_entry import ModelEntry

# TensorProto.DataType
_ELEMENT_TYPES = {
    torch.float32: 1,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.bfloat16: 16,
}
# of quantized weights: rows stay float32, while the default rounds them to int8
_ACCURACY, _FLOATS = "session.qdq_matmulnbits_accuracy_level", "1"
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
# slots → rows of a sequence, and the caches of every layer
Grow = Callable[[int], tuple[int, Sequence[tuple[Tensor, Tensor]]]]
_MAX_BINDINGS = 64


class _Bound(NamedTuple):
    """A binding, and the memory of its inputs and of the logits."""

    binding: Any
    inputs: dict[str, Tensor]
    logits: Tensor


class OnnxProgram(PaddedModel):
    """A session of a model's ONNX file over caches that it updates in place.

    Args:
        caches: per layer, the k and v cache [blocks, HK, L, D], contiguous.
        reaches: of the layers, each once.
        grow: called with a number of slots; returns the rows that a sequence has by then, and the
            caches. None where they never change.
    Raises:
        EngineError: the session takes other inputs.
    """

    def __init__(
        self,
        name: str,
        session: onnxruntime.InferenceSession,
        caches: Sequence[tuple[Tensor, Tensor]],
        reaches: Sequence[Reach],
        rows: CacheRows,
        grow: Grow | None = None,
    ) -> None:
        (logits,) = (item for item in session.get_outputs() if item.name == "logits")
        self._made = _dtype_of(logits.type)
        # what the operators of a step on a CPU read
        dtype = torch.float32 if self._made is torch.float16 else self._made
        super().__init__(name, reaches, rows, int(logits.shape[1]), dtype)
        self._session = session
        self._caches = named_caches(caches)
        masks = {reach.mask_input for reach in reaches}
        wanted = {"tokens", "positions", "write_index", "logit_rows"} | masks
        _check_inputs(name, session, wanted | self._caches.keys())
        # (first block, sequences, nodes, rows of logits) → memory
        self._bindings: dict[tuple[int, int, int, int], _Bound] = {}
        self._grow = grow
        self._length: int | None = None

    def reserve(self, num_slots: int) -> int | None:
        """See `PaddedModel.reserve`; longer caches are other tensors, which are bound anew."""
        if self._grow is None:
            return None
        length, caches = self._grow(num_slots)
        if length != self._length:
            self._length, self._caches = length, named_caches(caches)
            self._bindings.clear()
        return length

    def run(self, first: int, batch: int, given: PaddedBatch) -> Tensor:
        inputs = named_inputs(given)
        bound = self._bound(first, batch, inputs)
        for name, value in inputs.items():
            bound.inputs[name].copy_(value)
        self._session.run_with_iobinding(bound.binding)
        # the next pass of this shape overwrites them
        return bound.logits.to(self.dtype, copy=True)

    def _bound(self, first: int, batch: int, inputs: dict[str, Tensor]) -> _Bound:
        """Memory for passes of one shape over these blocks: binding costs more than copying."""
        key = (first, batch, inputs["tokens"].shape[1], inputs["logit_rows"].shape[0])
        if (bound := self._bindings.get(key)) is not None:
            return bound
        binding = self._session.io_binding()
        for name, cache in self._caches.items():
            part = cache[first : first + batch]
            _bind(binding.bind_input, name, part)
            _bind(binding.bind_output, cache_output(name), part)
        buffers = {
            name: torch.empty_like(value, memory_format=torch.contiguous_format)
            for name, value in inputs.items()
        }
        for name, buffer in buffers.items():
            _bind(binding.bind_input, name, buffer)
        logits = torch.empty(key[3], self.width, dtype=self._made)
        _bind(binding.bind_output, "logits", logits)
        # prompts have passes of many shapes
        if len(self._bindings) >= _MAX_BINDINGS:
            del self._bindings[next(iter(self._bindings))]
        self._bindings[key] = _Bound(binding, buffers, logits)
        return self._bindings[key]


def load_onnx(
    path: Path,
    model: ModelEntry,
    caches: Sequence[tuple[Tensor, Tensor]],
    rows: CacheRows,
    grow: Grow | None = None,
) -> OnnxProgram:
    """A model of an engine on onnxruntime's CPU provider; arguments as of `OnnxProgram`.

    Raises:
        EngineError: there is no onnxruntime, or one that cannot run the file.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineError(
            "an engine for ONNX, and no onnxruntime",
            "onnxruntime, which runs it",
            f"{install_command('onnx')}, or run its graphs with --backend eager",
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    file = path / model.onnx_file
    # where the model is not read from a file, that of the weights cannot be found beside it
    options.add_session_config_entry(_WEIGHTS_FOLDER, str(file.parent))
    options.add_session_config_entry(_ACCURACY, _FLOATS)
    source: str | bytes = str(file) if grow is None else any_length(file)
    try:
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the package's own exceptions have no common base
        raise EngineError(
            f"{file}, which onnxruntime {onnxruntime.__version__} cannot run: {_first_line(error)}",
            _needed(model.dtype),
            "pip install -U onnxruntime, compile with --dtype float32, or run the engine's graphs"
            " with --backend eager",
        ) from error
    return OnnxProgram(model.name, session, caches, reaches_of(model.layers), rows, grow)


def can_grow() -> bool:
    """Whether files can be read for caches of any length, which needs the package onnx."""
    return importlib.util.find_spec("onnx") is not None


def any_length(file: Path) -> bytes:
    """A model's ONNX file whose caches may have any number of rows.

    Files state a fixed number, which TensorRT needs. onnxruntime attends to every row that a cache
    has, whatever the mask says, so that a short cache is worth having.
    """
    import onnx

    try:
        model = onnx.load(str(file), load_external_data=False)
    except Exception as error:  # of protobuf, or of the system
        raise EngineError(
            f"{file} cannot be read: {_first_line(error)}", "an ONNX file", "copy the engine again"
        ) from error
    graph = model.graph
    # inferred shapes would contradict what is bound
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        dims = value.type.tensor_type.shape.dim
        place = 2 if "_cache_" in value.name else 3 if value.name.startswith("mask") else None
        if place is not None:
            dims[place].Clear()
            dims[place].dim_param = "cache_rows"
    return model.SerializeToString()


def _needed(dtype: str) -> str:
    if dtype == "bfloat16":
        return "float32 or float16: its CPU provider does not compute in bfloat16"
    return "an onnxruntime with the operators TensorScatter and Attention of opset 24"


def _bind(bind: Any, name: str, value: Tensor) -> None:
    bind(name, "cpu", 0, _ELEMENT_TYPES[value.dtype], list(value.shape), value.data_ptr())


def _check_inputs(name: str, session: Any, wanted: set[str]) -> None:
    found = {item.name for item in session.get_inputs()}
    if found != wanted:
        raise EngineError(
            f"{name}: an ONNX file with inputs {', '.join(sorted(found ^ wanted)[:4])}"
            " too many or too few",
            ", ".join(sorted(wanted)[:8]),
            "compile the engine again",
        )


def _dtype_of(text: str) -> torch.dtype:
    names = {"float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return names[text.removeprefix("tensor(").removesuffix(")")]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
