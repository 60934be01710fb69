"""Pieces of a file, read in a circle into two buffers while others are used."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specc.artifact.offload import PAGE, Piece
from specc.errors import RankError
from specc.kernels import native
from specc.runtime.backends.cpu.segments import CpuSegments, open_stream, stream_error
from specc.runtime.backends.cpu.step import NativeStep
from tests.mapping_flags import mapping_flags

# offsets that are no pages, sizes from a part of a page to several reads
SIZES = (5 * PAGE + 12, 100, 9 * 1024 * 1024 + 4, 3 * PAGE, 77 * PAGE + 64)
START = 2 * PAGE + 520


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    native.load()


def make(path: Path, sizes: tuple[int, ...]) -> tuple[np.ndarray, list[Piece]]:
    generator = np.random.default_rng(3)
    data = generator.integers(0, 256, START + sum(sizes), dtype=np.uint8)
    path.write_bytes(data.tobytes())
    pieces, offset = [], START
    for number, size in enumerate(sizes):
        pieces.append(Piece(number, offset, size, ()))
        offset += size
    return data, pieces


def use(stream: Any, data: np.ndarray, piece: Piece) -> None:
    stream.acquire(piece.segment)
    wanted = torch.from_numpy(data[piece.offset : piece.offset + piece.size])
    # long enough for the thread to read whatever it may
    time.sleep(0.005)
    assert torch.equal(stream.piece(piece.segment), wanted), piece
    stream.release(piece.segment)


def use_all(stream: Any, data: np.ndarray, pieces: list[Piece]) -> None:
    for piece in pieces:
        use(stream, data, piece)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("direct", [True, False])
def test_each_piece_is_there_whenever_it_is_used(tmp_path: Path, count: int, direct: bool) -> None:
    data, pieces = make(tmp_path / "weights", SIZES[:count])
    stream = open_stream(tmp_path / "weights", pieces, direct)
    addresses = [stream.piece(piece.segment).data_ptr() for piece in pieces]
    for _ in range(4):
        for piece in pieces:
            use(stream, data, piece)
    assert addresses == [stream.piece(piece.segment).data_ptr() for piece in pieces]
    # what has a buffer of its own is read once; else each pass reads all, and two pieces ahead
    whole = sum(piece.span for piece in pieces)
    if count <= 2:
        assert stream.bytes_read() <= whole
    else:
        assert 3 * whole < stream.bytes_read() <= 5 * whole
    assert stream.is_direct() or not direct or not _takes_direct(tmp_path)


def test_a_piece_of_several_reads_is_whole_when_it_is_there(tmp_path: Path) -> None:
    """Two threads read it; two such pieces share a buffer, so its end is not there from before."""
    large = 41 * 1024 * 1024 + 4
    data, pieces = make(tmp_path / "weights", (large, 100, large))
    stream = open_stream(tmp_path / "weights", pieces)
    for piece in pieces * 3:
        stream.acquire(piece.segment)
        # the end first: it is what is read last
        found, end = stream.piece(piece.segment).numpy(), piece.offset + piece.size
        assert np.array_equal(found[-4096:], data[max(piece.offset, end - 4096) : end])
        assert np.array_equal(found, data[piece.offset : end])
        stream.release(piece.segment)


def test_buffers_are_huge_pages_where_the_system_has_them(tmp_path: Path) -> None:
    """All of a buffer but its end; reading into small pages takes twice as long, and a core."""
    huge = 2 * 1024 * 1024
    sizes = (5 * huge + 12, PAGE, 3 * huge)
    data, pieces = make(tmp_path / "weights", sizes)
    stream = open_stream(tmp_path / "weights", pieces)
    use_all(stream, data, pieces)
    begin = stream.piece(0).data_ptr() - pieces[0].offset % PAGE
    assert begin % huge == 0
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in mapping_flags(begin)
        assert "hg" in mapping_flags(begin + 5 * huge - 1)
        assert "hg" not in mapping_flags(begin + 5 * huge)


def _takes_direct(directory: Path) -> bool:
    try:
        os.close(os.open(directory / "weights", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_pass_that_ended_early_leaves_nothing_behind(tmp_path: Path) -> None:
    """The next one begins with the first piece, whatever was read ahead."""
    data, pieces = make(tmp_path / "weights", SIZES)
    stream = open_stream(tmp_path / "weights", pieces)
    for last in range(len(pieces)):
        for piece in pieces[: last + 1]:
            use(stream, data, piece)
    for piece in pieces:
        use(stream, data, piece)


def test_a_file_that_is_cut_is_named_and_read_again_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    data, pieces = make(path, SIZES)
    stream = open_stream(path, pieces)
    for piece in pieces:
        use(stream, data, piece)
    os.truncate(path, pieces[2].offset + 5 * PAGE)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"weights ends at byte .* it was cut while") as caught:
        use_all(stream, data, pieces * 2)
    assert time.monotonic() - begin < 5
    error = stream_error(caught.value)
    assert error is not None
    assert re.fullmatch(
        rf"{re.escape(str(path))} ends at byte \d+, within the weights: it was cut while the engine"
        " was using it",
        error.found,
    )
    with open(path, "r+b") as file:
        file.write(data.tobytes())
    for piece in pieces:
        use(stream, data, piece)


def test_reading_goes_on_while_a_piece_is_used(tmp_path: Path) -> None:
    """The next piece is there without a wait, if the one before is used for long enough."""
    data, pieces = make(tmp_path / "weights", (SIZES[2],) * 4)
    stream = open_stream(tmp_path / "weights", pieces)
    for piece in pieces:
        use(stream, data, piece)
    shares = []
    for _ in range(5):
        begin = stream.seconds()
        for piece in pieces:
            stream.acquire(piece.segment)
            time.sleep(0.1)
            stream.release(piece.segment)
        reading, waited = (b - a for a, b in zip(begin, stream.seconds(), strict=True))
        shares.append(waited / reading)
        # a disk that others use may take longer once
        if shares[-1] < 0.5:
            return
    raise AssertionError(shares)


def test_other_errors_are_none_of_a_stream() -> None:
    assert stream_error(RuntimeError("weights of shape [2, 3], not [3, 2]")) is None


@pytest.mark.parametrize("kind", [CpuSegments, NativeStep])
def test_what_another_rank_could_not_read_is_an_error_of_ranks(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text quotes that of the rank, and the next pass would not read anew."""
    quoted = RankError("rank 1: weights cannot be read at byte 8: gone", "all ranks", "start again")

    error = RuntimeError(f"{quoted}\nException raised from a program")
    monkeypatch.setattr("specc.runtime.backends.cpu.program.failed", lambda: error)
    monkeypatch.setattr("specc.runtime.backends.cpu.step.failed", lambda: error)
    made: Any = object.__new__(kind)
    made.pointer, made._pool = 0, SimpleNamespace(pointer=0)
    monkeypatch.setattr(
        "specc.runtime.backends.cpu.program.functions",
        lambda: SimpleNamespace(specc_program_run=lambda *_: None),
    )
    call = made if kind is CpuSegments else lambda *_: made._check(-1)
    with pytest.raises(RankError) as caught:
        call(*[torch.zeros(1)] * 8)
    assert caught.value.found == quoted.found


def test_a_device_that_gives_no_byte_is_named(tmp_path: Path) -> None:
    """As of a device that stops, nothing is read: the buffer of the third piece is in use."""
    _, pieces = make(tmp_path / "weights", SIZES)
    stream = open_stream(tmp_path / "weights", pieces)
    stream.acquire(0)
    stream.set_patience(0.3)
    with pytest.raises(RuntimeError, match="no byte of the weights was read for") as caught:
        stream.acquire(2)
    error = stream_error(caught.value)
    assert error is not None
    assert error.found.endswith("the device does not answer")
