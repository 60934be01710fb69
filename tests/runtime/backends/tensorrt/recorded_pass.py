"""One enqueue of a recorded TensorRT engine: memory at addresses, and onnxruntime over it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from specc.passes.lower.tensorrt.fast_attention import LENGTHS

if TYPE_CHECKING:
    from tests.runtime.backends.tensorrt.recorder import ICudaEngine, IExecutionContext, Recorder

# of every address that TensorRT gets
ALIGNMENT = 256
# numbers of onnx.TensorProto.DataType, which those of the recorder's DataType are, too
_DTYPES = {
    1: torch.float32,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    16: torch.bfloat16,
}


@dataclass(frozen=True)
class Piece:
    """An address inside of a tensor's memory, which is begin … end - 1."""

    address: int
    begin: int
    end: int
    storage: StorageWeakRef

    @property
    def is_alive(self) -> bool:
        return not self.storage.expired()


class Memory:
    """Whose memory the addresses are that anybody asked for last."""

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}

    def note(self, piece: Piece) -> None:
        self._pieces[piece.address] = piece

    def at(self, address: int) -> Piece | None:
        return self._pieces.get(address)


@dataclass(eq=False)
class Pass:
    """An enqueue, to be run now and at every replay.

    Args:
        profile: that was active.
        shapes: input → shape.
        pieces: input or output → memory.
        scratch: memory that the pass may overwrite.
    """

    recorder: Recorder
    engine: ICudaEngine
    context: IExecutionContext
    profile: int
    shapes: dict[str, tuple[int, ...]]
    pieces: dict[str, Piece]
    scratch: Piece

    @property
    def model(self) -> str:
        return self.engine._model

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sequences, nodes, rows of logits."""
        return (*self.shapes["tokens"], self.shapes["logit_rows"][0])  # type: ignore[return-value]

    def run(self) -> None:
        """Read and write memory as the engine would.

        Raises:
            AssertionError: memory is not there, or holds what no pass may get.
        """
        self.recorder.runs.append(self)
        if not self.scratch.is_alive:
            self.recorder.fail("scratch memory was freed")
        found = {name: self.tensor(name) for name in self.engine._names}
        # inputs that lie in it are lost
        size = self.engine.device_memory_size_v2
        _at(self.scratch.address, torch.uint8, (size,)).fill_(0xFF)
        self._check(found)
        write_index, nodes = found["write_index"], self.sizes[1]
        length = self._length()
        if int(write_index.max()) + nodes > length:
            self._run_dropping(found, length)
        else:
            self._run(found)

    def tensor(self, name: str) -> Tensor:
        """The memory of an input or output."""
        piece = self.pieces[name]
        shape = self._shape(name)
        dtype = _DTYPES[self.engine._dtypes[name].value]
        if not piece.is_alive:
            self.recorder.fail(f"memory of {name} was freed")
        if piece.end - piece.address < torch.Size(shape).numel() * dtype.itemsize:
            self.recorder.fail(f"too little memory for {name} of {list(shape)}")
        return _at(piece.address, dtype, shape)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name == "logits":
            return self.sizes[2], self.engine._shapes[name][1]
        return self.shapes[self.engine._aliases.get(name) or name]

    def _length(self) -> int:
        """Rows of a sequence in the caches."""
        return next(self.engine._shapes[x][2] for x in self.engine._aliases.values() if x)

    def _check(self, found: dict[str, Tensor]) -> None:
        batch, nodes, _ = self.sizes
        ends = found["write_index"] + nodes
        if int(found["write_index"].min()) < 0:
            self.recorder.fail("rows before a cache")
        if LENGTHS in found and not torch.equal(found[LENGTHS].long(), ends):
            self.recorder.fail(f"{LENGTHS} {found[LENGTHS].tolist()}, rows up to {ends.tolist()}")
        rows = torch.arange(self._length())
        for name, mask in found.items():
            if not name.startswith("mask"):
                continue
            if not bool(mask.any(-1).all()):
                self.recorder.fail(f"{name} with a row that is masked as a whole")
            # such keys are left out in the fast lane
            if bool((mask & (rows >= ends.view(batch, 1, 1, 1))).any()):
                self.recorder.fail(f"{name} lets a token see rows beyond those of the pass")

    def _run(self, found: dict[str, Tensor]) -> None:
        session = self.engine._session
        binding = session.io_binding()
        inputs = {item.name for item in session.get_inputs()}
        for name, value in found.items():
            if name == LENGTHS:
                continue
            element = self.engine._dtypes[name].value
            bind = binding.bind_input if name in inputs else binding.bind_output
            bind(name, "cpu", 0, element, list(value.shape), value.data_ptr())
        session.run_with_iobinding(binding)

    def _run_dropping(self, found: dict[str, Tensor], length: int) -> None:
        """Rows up to the end are written, and those after it are not; the logits are anything."""
        nodes = self.sizes[1]
        write_index = found["write_index"]
        staged = dict(found)
        staged["write_index"] = write_index.clamp(max=length - nodes)
        for output, source in self.engine._aliases.items():
            if source is not None:
                staged[source] = staged[output] = found[source].clone()
        self._run(staged)
        for b, first in enumerate(write_index.tolist()):
            count = min(max(length - first, 0), nodes)
            self.recorder.num_dropped += nodes - count
            begin = int(staged["write_index"][b])
            for source in filter(None, self.engine._aliases.values()):
                rows = staged[source][b, :, begin : begin + count]
                found[source][b, :, first : first + count] = rows


def _at(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    """Memory as a tensor, without a copy."""
    count = torch.Size(shape).numel()
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
