"""A model's TensorRT engine over caches that it updates in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specc.artifact.cache_rows import CacheRows, Reach, cache_output
from specc.errors import EngineError
from specc.runtime.backends.graph_device import GraphDevice
from specc.runtime.backends.padded.model import PaddedModel
from specc.runtime.backends.padded.padded_batch import PaddedBatch, named_caches, named_inputs

# [B] int32 keys of each sequence that may be attended to; engines of the fast lane read it
LENGTHS = "kv_lengths"


class TensorRTProgram(PaddedModel):
    """Enqueues an engine on the device's stream; nothing waits for it.

    Every shape of a pass in a step has an execution context of its own: a context whose shapes
    change must run once outside of a capture before it can be captured, and the passes of one step
    have different shapes. Passes between steps are never captured and have as many shapes as there
    are prompts, so one context of each profile takes them. The contexts share one piece of scratch
    memory, since they run in turn.

    Args:
        trt: the module, see `specc.tensorrt.library.load`.
        engine: deserialized.
        caches: per layer, the k and v cache [sequences, HK, L, D] on the device, contiguous.
        reaches: of the layers, each once.
    Raises:
        EngineError: the engine takes other inputs, or its caches have another shape or dtype.
    """

    def __init__(
        self,
        name: str,
        trt: Any,
        engine: Any,
        caches: Sequence[tuple[Tensor, Tensor]],
        reaches: Sequence[Reach],
        rows: CacheRows,
        graphs: GraphDevice,
    ) -> None:
        dtypes = {
            trt.DataType.FLOAT: torch.float32,
            trt.DataType.HALF: torch.float16,
            trt.DataType.BF16: torch.bfloat16,
            trt.DataType.INT32: torch.int32,
            trt.DataType.INT64: torch.int64,
            trt.DataType.BOOL: torch.bool,
        }
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        by_name = named_caches(caches)
        _check_names(name, names, {reach.mask_input for reach in reaches}, by_name)
        width = int(engine.get_tensor_shape("logits")[1])
        super().__init__(name, reaches, rows, width, dtypes[engine.get_tensor_dtype("logits")])
        self._trt = trt
        self._engine = engine
        self._caches = by_name
        self._graphs = graphs
        self._has_lengths = LENGTHS in names
        self._dtypes = {item: dtypes[engine.get_tensor_dtype(item)] for item in names}
        for item, cache in self._caches.items():
            _check_cache(name, item, engine.get_tensor_shape(item), self._dtypes[item], cache)
            # else a pass would work on a copy
            if (alias := engine.get_aliased_input_tensor(cache_output(item))) != item:
                raise EngineError(
                    f"{name}: {cache_output(item)} shares memory with {alias} in the TensorRT"
                    " engine",
                    f"with {item}, so that the cache is updated in place",
                    "compile the engine again",
                )
        self._profiles = [_Profile(engine, i) for i in range(engine.num_optimization_profiles)]
        # (profile, batch, nodes, rows) → context; (profile,) → that of passes between steps
        self._contexts: dict[tuple[int, ...], Any] = {}
        self._is_between = False
        num_bytes = int(engine.device_memory_size_v2)
        self._scratch = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=graphs.device)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """A pass between steps, see `PaddedModel.forward`."""
        self._is_between = True
        try:
            return super().forward(*inputs, **named)
        finally:
            self._is_between = False

    def run(self, first: int, batch: int, given: PaddedBatch) -> Tensor:
        """See `PaddedModel.run`.

        Raises:
            EngineError: no profile of the engine has this shape, or TensorRT refuses the pass.
        """
        nodes, asked = given.tokens.shape[1], given.logit_rows.shape[0]
        context = self._context(batch, nodes, asked)
        inputs = named_inputs(given)
        if self._has_lengths:
            inputs[LENGTHS] = given.write_index + nodes
        # torch takes freed memory again in the order of the stream: the pass has read it by then
        for item, value in inputs.items():
            kept = value.to(self._dtypes[item]).contiguous()
            # TensorRT wants addresses that 256 divides: memory of its own begins at one
            kept = kept.clone() if kept.storage_offset() else kept
            inputs[item] = kept
            self._set_address(context, item, kept)
        for item, cache in self._caches.items():
            self._set_address(context, item, cache[first])
            self._set_address(context, cache_output(item), cache[first])
        logits = torch.empty(asked, self.width, dtype=self.dtype, device=self._graphs.device)
        self._set_address(context, "logits", logits)
        if not context.execute_async_v3(self._graphs.stream_handle()):
            raise EngineError(
                f"{self.name}: TensorRT refused a pass of {batch} × {nodes} tokens",
                "an engine that runs on this GPU",
                "look at the messages above; compile the engine again on this machine",
            )
        return logits

    def _set_address(self, context: Any, item: str, value: Tensor) -> None:
        # else it would go on with the address of the pass before
        if not context.set_tensor_address(item, value.data_ptr()):
            raise EngineError(
                f"{self.name}: TensorRT refused the memory of {item}",
                "an engine that runs on this GPU",
                "look at the messages above; compile the engine again on this machine",
            )

    def _context(self, batch: int, nodes: int, asked: int) -> Any:
        """A context with these shapes, made at their first use."""
        profile = self._profile_of(batch, nodes, asked)
        key = (profile,) if self._is_between else (profile, batch, nodes, asked)
        context = self._contexts.get(key)
        if context is None:
            context = self._make_context(profile)
        elif not self._is_between:
            return context
        sizes = {"batch": batch, "nodes": nodes, "rows": asked}
        for item, shape in _shapes(self._masks(), self._caches, self._has_lengths, sizes).items():
            if not context.set_input_shape(item, shape):
                raise self._no_profile(batch, nodes, asked)
        self._contexts[key] = context
        return context

    def _make_context(self, profile: int) -> Any:
        context = self._engine.create_execution_context(self._context_options())
        if context is not None:
            context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
            stream = self._graphs.stream_handle()
            if context.set_optimization_profile_async(profile, stream):
                return context
        raise EngineError(
            f"{self.name}: TensorRT makes no execution context",
            "an engine that runs on this GPU, and memory for it",
            "look at the messages above; lower max_num_seqs if memory ran out",
        )

    def _context_options(self) -> Any:
        """Scratch memory is given; TensorRT-RTX compiles kernels at the first run."""
        trt = self._trt
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        kinds = getattr(trt, "DynamicShapesKernelSpecializationStrategy", None)
        if kinds is None:
            return strategy
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        # a kernel that is swapped in later would not be in a captured graph, and nobody waits for
        # one of each length of a prompt
        kind = kinds.LAZY if self._is_between else kinds.EAGER
        config.dynamic_shapes_kernel_specialization_strategy = kind
        return config

    def _masks(self) -> dict[str, int]:
        return {reach.mask_input: self._rows.total for reach in self._reaches}

    def _profile_of(self, batch: int, nodes: int, asked: int) -> int:
        """The profile that is tuned nearest to a shape, of those that hold it."""
        fitting = [
            (abs(profile.tuned_nodes - nodes), i)
            for i, profile in enumerate(self._profiles)
            if profile.holds(batch, nodes, asked)
        ]
        if not fitting:
            raise self._no_profile(batch, nodes, asked)
        return min(fitting)[1]

    def _no_profile(self, batch: int, nodes: int, asked: int) -> EngineError:
        known = "; ".join(str(profile) for profile in self._profiles)
        return EngineError(
            f"{self.name}: a pass of {batch} sequences × {nodes} nodes with {asked} rows of logits",
            f"a shape of one of the engine's profiles: {known}",
            "compile the engine with this plan, and a --max-batch-size and --prefill-chunk that"
            " hold it",
        )


class _Profile:
    """Ranges of one optimization profile."""

    def __init__(self, engine: Any, index: int) -> None:
        low, tuned, high = (
            tuple(shape) for shape in engine.get_tensor_profile_shape("tokens", index)
        )
        least, _, most = (
            tuple(shape) for shape in engine.get_tensor_profile_shape("logit_rows", index)
        )
        self._low, self._high = (*low, *least), (*high, *most)
        self.tuned_nodes = tuned[1]

    def holds(self, batch: int, nodes: int, asked: int) -> bool:
        sizes = (batch, nodes, asked)
        return all(a <= x <= b for a, x, b in zip(self._low, sizes, self._high, strict=True))

    def __str__(self) -> str:
        spans = [
            f"{low}" if low == high else f"{low} … {high}"
            for low, high in zip(self._low, self._high, strict=True)
        ]
        return "{} × {}, {} rows".format(*spans)


def _shapes(
    masks: dict[str, int], caches: dict[str, Tensor], has_lengths: bool, sizes: dict[str, int]
) -> dict[str, tuple[int, ...]]:
    """Shape of every input."""
    batch, nodes = sizes["batch"], sizes["nodes"]
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (batch, nodes),
        "positions": (batch, nodes),
        "write_index": (batch,),
        "logit_rows": (sizes["rows"],),
    }
    shapes |= {name: (batch, 1, nodes, length) for name, length in masks.items()}
    shapes |= {name: (batch, *cache.shape[1:]) for name, cache in caches.items()}
    return shapes | ({LENGTHS: (batch,)} if has_lengths else {})


def _check_names(name: str, found: list[str], masks: set[str], caches: dict[str, Tensor]) -> None:
    wanted = {"tokens", "positions", "write_index", "logit_rows", "logits", *masks}
    wanted |= caches.keys() | {cache_output(item) for item in caches}
    if odd := sorted((set(found) - {LENGTHS}) ^ wanted):
        raise EngineError(
            f"{name}: a TensorRT engine with inputs or outputs {', '.join(odd[:4])} too many or too"
            " few",
            "those of the engine's ONNX file",
            "compile the engine again",
        )


def _check_cache(
    name: str, item: str, shape: Sequence[int], dtype: torch.dtype, cache: Tensor
) -> None:
    """A cache of another length would be read and written at wrong places."""
    if tuple(shape)[1:] != tuple(cache.shape[1:]) or dtype != cache.dtype:
        raise EngineError(
            f"{name}: {item} is {dtype} {list(shape)[1:]} in the TensorRT engine",
            f"{cache.dtype} {list(cache.shape[1:])}, as the manifest says",
            "compile the engine again",
        )
