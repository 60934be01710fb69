"""A model's compiled segments: one program for each kind, and weights that may stay in a file."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.artifact.offload import OffloadPlan, Piece
from specc.artifact.segments import SegmentedModel
from specc.errors import EngineError
from specc.kernels.ranks import rank_error
from specc.kernels.weight_stream import WeightStream
from specc.runtime.backends.cpu.compiled_program import (
    CompiledProgram,
    unpacked_package,
    with_ancestors,
)
from specc.runtime.backends.program_files import takes_mass

_log = logging.getLogger(__name__)
# the sentences of kernels/cpu/weight_stream.cpp
_FAILED = re.compile(
    r".*(?: cannot be read at byte \d+: | ends at byte \d+, within the weights: "
    r"|: no byte of the weights was read for ).*"
)


class CompiledSegments:
    """As `CompiledProgram`, of a model that was compiled as segments.

    Args:
        model: the segments.
        packages: the `.pt2` of each kind, and its sha256.
        weights: key → tensor of each weight and constant.
        caches: per layer of the whole model, the k and v cache [blocks, block_size, HK, D].
        offload: what stays in the file; None: whatever the system keeps of it.
        file: of the weights, where some of them stay in it.
    Raises:
        EngineError: a package cannot be loaded or was altered, or an input has no weight.
    """

    def __init__(
        self,
        model: SegmentedModel,
        packages: Sequence[tuple[Path, str | None]],
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        offload: OffloadPlan | None = None,
        file: Path | None = None,
    ) -> None:
        self.name, self.weights = model.name, weights
        self.offload = offload
        programs = [model.program(number) for number in range(len(model.segments))]
        self.native = torch.classes.specc.SegmentedProgram(takes_mass(programs[0]))
        self.stream: WeightStream | None = None
        bound, pieces = dict(weights), {}
        if offload is not None and file is not None:
            bound |= _copied(file, offload.kept, weights)
            if offload.streamed:
                self.stream = open_stream(file, offload.streamed)
                self.native.set_stream(self.stream.handle)
                if not self.stream.is_direct():
                    _log.warning(
                        "%s is on a file system without O_DIRECT: weights are read through the"
                        " page cache",
                        file,
                    )
            for place, piece in enumerate(offload.streamed):
                pieces[piece.segment] = place
                bound |= _views(self.stream.piece(place), piece, weights)
        with contextlib.ExitStack() as stack:
            paths = [stack.enter_context(unpacked_package(*package)) for package in packages]
            self._segments = [
                CompiledProgram(
                    program,
                    packages[segment.kind][0],
                    bound,
                    [caches[layer] for layer in segment.layers],
                    unpacked=paths[segment.kind],
                )
                for program, segment in zip(programs, model.segments, strict=True)
            ]
        for number, program in enumerate(self._segments):
            self.native.add(program.native, pieces.get(number, -1))

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Run over flat tokens; inputs and result are those of `ModelProgram.forward`.

        Raises:
            EngineError: weights that stay in the file could not be read.
            RankError: another rank is why a collective failed, whatever it could not read.
        """
        try:
            return self.native.run(with_ancestors(inputs))
        except RuntimeError as error:
            raise rank_error(error) or stream_error(error) or error from None

    def call_in(self, runner: Any, result: int) -> None:
        """Let a native runner of steps call it; arguments follow."""
        runner.call_segments(self.native, result)


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
