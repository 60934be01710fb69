"""A model's program as instructions: as the backend eager has it, without Python inside."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.graph_io import read_graph
from specc.errors import EngineError
from specc.kernels.native_calls import CODES
from specc.runtime.backends.cpu.encoder import Encoder
from specc.runtime.backends.cpu.native_calls import (
    NativeTensor,
    Pool,
    checked,
    describe,
    describe_all,
    error_text,
    functions,
    made,
    tensor_at,
)
from specc.runtime.backends.cpu.python_calls import take_error
from specc.runtime.backends.program_files import (
    bind_weights,
    check_program,
    slab_of,
    takes_adapters,
    takes_mass,
    takes_states,
)

_DO = "compile the engine again"
# what the texts of the library begin with, and those that are about the machine
_REFUSES, _NO_MEMORY = "specc: ", "specc: no memory"
# position of `ancestors` in the inputs of a program
_ANCESTORS = 5
# values of a loop that take a thread as long as sharing them among threads does
_WORK_OF_BARRIERS = 41_000


class CpuProgram:
    """A model's instructions with its weights and caches bound.

    Args:
        program: content of `program.json`.
        weights: key → tensor of each weight and constant input.
        caches: per layer, the k and v cache [blocks, block_size, HK, D].
        pool: memory of the engine's programs; None: its own.
        reserve: bytes that its values are known to take.
        states: per layer that keeps some, states [places, …] and replay rows [places, R, W].
    Raises:
        EngineError: an input has no weight, or one of another shape or dtype; or instructions that
            cannot run.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        pool: Pool | None = None,
        reserve: int = 0,
        states: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        check_program(program, len(caches), len(states))
        self.name: str = program["name"]
        self.weights = weights
        self._pool = Pool() if pool is None else pool
        self._library = functions()
        self._encoder, result = encode(program)
        entries = program["inputs"]
        given = [i for i, entry in enumerate(entries) if entry["kind"] == "input"]
        slots = (ctypes.c_int64 * len(given))(*given)
        self.pointer = made(
            self._library.specc_program_new(self._encoder.code, slots, len(given), result)
        )
        self._finalizer = weakref.finalize(self, self._library.specc_program_free, self.pointer)
        self._finalizer.atexit = False
        # their memory is used as it is
        self._bound: list[Tensor] = []
        own = iter(bind_weights(program, weights))
        for slot, entry in enumerate(entries):
            if (slab := slab_of(entry, caches, states)) is not None:
                self._bind(slot, slab)
            elif entry["kind"] != "input":
                self._bind(slot, next(own))
        self._watch()
        checked(self._library.specc_program_flat(self.pointer, takes_mass(program)))
        if takes_states(program):
            checked(self._library.specc_program_states(self.pointer))
        if takes_adapters(program):
            checked(self._library.specc_program_adapters(self.pointer))
        for entry in entries:
            if entry["name"] in ("hidden", "feature_rows") and entry["kind"] == "input":
                # one more input, last
                sizes = [-1 if size is None else size for size in entry["shape"]]
                found, code = (ctypes.c_int64 * len(sizes))(*sizes), _code_of(entry["dtype"])
                checked(self._library.specc_program_hidden(self.pointer, found, len(sizes), code))
        self._limits = narrow_rows(program), reserve
        self.set_num_threads(torch.get_num_threads())

    def __call__(self, *inputs: Tensor | None, hidden: Tensor | None = None) -> Tensor:
        """Run over flat tokens; inputs and result are those of `ModelProgram.forward`."""
        given = with_ancestors(inputs)
        return run_program(self.pointer, self._pool, given if hidden is None else [*given, hidden])

    @property
    def python_names(self) -> list[str]:
        """Operators without a kernel, of each instruction that calls one."""
        return self._encoder.python_names

    @property
    def num_threads(self) -> int:
        return int(self._library.specc_program_threads(self.pointer))

    def set_num_threads(self, count: int) -> None:
        """Threads of every pass, whichever thread calls."""
        checked(self._library.specc_program_limits(self.pointer, count, *self._limits))

    def set_narrow_rows(self, count: int) -> None:
        """Rows up to which a pass is one of a team of threads (kernels/cpu/team.h)."""
        self._limits = count, self._limits[1]
        self.set_num_threads(self.num_threads)

    def _bind(self, slot: int, tensor: Tensor) -> None:
        self._bound.append(tensor)
        found = describe(tensor)
        checked(self._library.specc_program_bind(self.pointer, slot, ctypes.byref(found)))

    def _watch(self) -> None:
        """Let a process that a cut file of weights kills say why."""
        storages = (weight.untyped_storage() for weight in self._bound)
        for begin, size in {item.data_ptr(): item.nbytes() for item in storages}.items():
            if begin:
                checked(self._library.specc_program_watch(self.pointer, begin, size))


def encode(program: Mapping[str, Any]) -> tuple[Encoder, int]:
    """A program's instructions, whose inputs are its first values; and the slot of its result."""
    graph = read_graph(program["graph"])
    inputs = graph.find_nodes(op="placeholder")
    if len(inputs) != len(program["inputs"]):
        raise EngineError(
            f"{program['name']} has {len(program['inputs'])} inputs, its graph takes {len(inputs)}",
            "as many",
            _DO,
        )
    result = next(iter(graph.find_nodes(op="output"))).args[0]
    if not isinstance(result[0] if isinstance(result, list | tuple) else result, fx.Node):
        raise EngineError(f"{program['name']} returns {result!r:.60}", "a tensor", _DO)
    return encode_graph(graph)


def encode_graph(graph: fx.Graph) -> tuple[Encoder, int]:
    """A graph's instructions, whose inputs are its first values; and the slot of its result."""
    encoder = Encoder(num_values(graph))
    for node in graph.find_nodes(op="placeholder"):
        encoder.slots[node] = encoder.input()
    encoder.stage()
    for node in graph.nodes:
        if node.op == "call_function":
            encoder.function(node)
    (output,) = graph.find_nodes(op="output")
    result: Any = output.args[0]
    slot = encoder.slot(result[0] if isinstance(result, list | tuple) else result)
    encoder.keep([slot])
    encoder.finish()
    return encoder, slot


def num_values(graph: fx.Graph) -> int:
    """Slots that a graph's values take at most."""
    found = 0
    for node in graph.nodes:
        found += max(1, str(node.meta.get("described", "")).count("["), len(node.users))
        if isinstance(node.target, torch._ops.OpOverload):
            found += len(node.target._schema.returns)
    return found


def run_program(pointer: int, pool: Pool, inputs: Sequence[Tensor]) -> Tensor:
    """Run a program of the library.

    Raises:
        RuntimeError: it cannot take these inputs; or what an operator raised.
    """
    library = functions()
    found = NativeTensor()
    result = library.specc_program_run(
        pointer, pool.pointer, describe_all(inputs), len(inputs), ctypes.byref(found)
    )
    if not result:
        raise failed()
    try:
        return tensor_at(found).clone(memory_format=torch.contiguous_format)
    finally:
        library.specc_result_free(result)


def failed() -> BaseException:
    """What a call of a program has raised."""
    if (error := take_error()) is not None:
        return error
    return RuntimeError(error_text())


def refusal(error: BaseException) -> EngineError | None:
    """What an operator of the library says of arguments that it does not take; None: other errors.

    Whoever calls a step hands it what it was compiled for, so it is the engine that is wrong.
    """
    text = str(error)
    if not text.startswith(_REFUSES) or text.startswith(_NO_MEMORY):
        return None
    return EngineError(
        text.removeprefix(_REFUSES).strip().splitlines()[0],
        "an engine whose operators take what its step hands them",
        "compile it again; if that does not help, report it with the engine's manifest.json",
    )


def _code_of(name: str) -> int:
    return CODES[getattr(torch, name)]


def narrow_rows(program: Mapping[str, Any]) -> int:
    """Rows of a pass up to which loops between products take less time than barriers of threads.

    Loops go over as many values of a row as the widest product takes, in feed-forward blocks;
    more threads gain where rows × width is above 24,000, and at 64 rows in any case: measured with
    two threads at widths of 768 and 5120 (docs/design/cpu.md).

    Args:
        program: content of `program.json`.
    """
    widths = [1]
    for entry in program["inputs"]:
        if entry["kind"] == "weight":
            matrix = entry.get("blocks_of") or entry.get("quantized_of") or entry["shape"]
            widths += matrix[-1:] if len(matrix) >= 2 else []
    return min(64, max(1, _WORK_OF_BARRIERS // max(widths)))


def with_ancestors(inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Inputs of a pass as native programs take them: no ancestors are none of width 0."""
    given = list(inputs)
    if given[_ANCESTORS] is None:
        # no words at all: causal
        assert given[0] is not None
        given[_ANCESTORS] = torch.empty(given[0].shape[0], 0, dtype=torch.int64)
    return given  # type: ignore[return-value]
