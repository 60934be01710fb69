"""A model's segments as instructions, and weights that may stay in a file."""

from __future__ import annotations

import ctypes
import logging
import re
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from specc.artifact.offload import OffloadPlan, Piece
from specc.artifact.segments import SegmentedModel
from specc.errors import EngineError
from specc.kernels.ranks import rank_error
from specc.kernels.weight_stream import WeightStream
from specc.runtime.backends.cpu.native_calls import Pool, functions, made
from specc.runtime.backends.cpu.program import CpuProgram, run_program, with_ancestors
from specc.runtime.backends.program_files import takes_mass, takes_states

_log = logging.getLogger(__name__)
# the sentences of kernels/cpu/weight_stream.cpp
_FAILED = re.compile(
    r".*(?: cannot be read at byte \d+: | ends at byte \d+, within the weights: "
    r"|: no byte of the weights was read for ).*"
)


class CpuSegments:
    """As `CpuProgram`, of a model that was compiled as segments.

    Args:
        model: the segments.
        weights: key → tensor of each weight and constant.
        caches: per layer of the whole model, the k and v cache [blocks, block_size, HK, D].
        offload: what stays in the file; None: whatever the system keeps of it.
        file: of the weights, where some of them stay in it.
        pool: memory of the engine's programs; None: its own.
        reserve: bytes that its values are known to take.
        states: per layer of the whole model that keeps some, see `CpuProgram`.
    Raises:
        EngineError: an input has no weight, or instructions cannot run.
    """

    def __init__(
        self,
        model: SegmentedModel,
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        offload: OffloadPlan | None = None,
        file: Path | None = None,
        pool: Pool | None = None,
        reserve: int = 0,
        states: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self.name, self.weights = model.name, weights
        self.offload = offload
        self._pool = Pool() if pool is None else pool
        programs = [model.program(number) for number in range(len(model.segments))]
        self.stream: WeightStream | None = None
        bound, pieces = dict(weights), {}
        if offload is not None and file is not None:
            bound |= _copied(file, offload.kept, weights)
            if offload.streamed:
                self.stream = open_stream(file, offload.streamed)
                if not self.stream.is_direct():
                    _log.warning(
                        "%s is on a file system without O_DIRECT: weights are read through the"
                        " page cache",
                        file,
                    )
            for place, piece in enumerate(offload.streamed):
                assert self.stream is not None
                pieces[piece.segment] = place
                bound |= _views(self.stream.piece(place), piece, weights)
        self._segments = [
            CpuProgram(
                program,
                bound,
                [caches[i] for i in segment.layers],
                self._pool,
                reserve,
                [states[i] for i in segment.states],
            )
            for program, segment in zip(programs, model.segments, strict=True)
        ]
        count = len(self._segments)
        pointers = (ctypes.c_void_p * count)(*[program.pointer for program in self._segments])
        places = (ctypes.c_int64 * count)(*[pieces.get(number, -1) for number in range(count)])
        library = functions()
        self.pointer = made(
            library.specc_segments_new(
                pointers,
                places,
                count,
                None if self.stream is None else self.stream.handle,
                takes_mass(programs[0]),
                takes_states(programs[0]),
            )
        )
        self._finalizer = weakref.finalize(self, library.specc_program_free, self.pointer)
        self._finalizer.atexit = False

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Run over flat tokens; inputs and result are those of `ModelProgram.forward`.

        Raises:
            EngineError: weights that stay in the file could not be read.
            RankError: another rank is why a collective failed, whatever it could not read.
        """
        try:
            return run_program(self.pointer, self._pool, with_ancestors(inputs))
        except RuntimeError as error:
            raise rank_error(error) or stream_error(error) or error from None

    @property
    def python_names(self) -> list[str]:
        """Operators without a kernel, of each instruction that calls one."""
        return [name for program in self._segments for name in program.python_names]

    @property
    def num_threads(self) -> int:
        return self._segments[0].num_threads

    def set_num_threads(self, count: int) -> None:
        """Threads of every pass, whichever thread calls."""
        for program in self._segments:
            program.set_num_threads(count)


def open_stream(file: Path, pieces: Sequence[Piece], direct: bool = True) -> WeightStream:
    """What reads pieces of a file while others are used; see kernels/cpu/weight_stream.h.

    Args:
        file: of the weights.
        pieces: in the order in which a pass uses them.
        direct: past the page cache, where the file system can.
    Raises:
        EngineError: the file cannot be opened, or there is no memory for the buffers.
    """
    offsets, sizes = [p.offset for p in pieces], [p.size for p in pieces]
    try:
        return WeightStream(file, offsets, sizes, direct)
    except RuntimeError as error:
        raise EngineError(
            str(error).strip().splitlines()[0],
            "a readable file of weights, and memory for two segments of it",
            "check its permissions, or compile or copy the engine again",
        ) from error


def _views(data: Tensor, piece: Piece, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a piece, in its bytes; their order in the file is that of the piece's keys."""
    found, begin = {}, 0
    for key in piece.keys:
        like = weights[key]
        size = like.numel() * like.itemsize
        found[key] = data[begin : begin + size].view(like.dtype).view(like.shape)
        begin += size
    return found


def _copied(
    file: Path, pieces: Sequence[Piece], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weights that stay, in memory of their own; nothing of the file is left in the page cache."""
    found: dict[str, Tensor] = {}
    for piece in pieces:
        # one piece at a time through the same reader; its buffer goes when it is copied
        stream = open_stream(file, [piece])
        try:
            stream.acquire(0)
        except RuntimeError as error:
            raise EngineError(
                str(error).strip().splitlines()[0],
                "a readable file of weights",
                "compile or copy the engine again",
            ) from error
        found |= _views(stream.piece(0), piece, weights)
    return found


def stream_error(error: BaseException) -> EngineError | None:
    """Why a file of weights could not be read, where that is what failed; None: something else."""
    match = _FAILED.search(str(error))
    if match is None:
        return None
    return EngineError(
        match.group(),
        "a file of weights that can be read, unchanged, while the engine runs",
        "see what the system says of the disk, or copy the engine again; the next pass reads anew",
    )
