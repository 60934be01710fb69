"""Sums of blocks: the same for chunks of any size, and every altered byte is found, also once."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from specc.artifact import block_sums
from specc.artifact.block_sums import BlockSums, digits_of, read_in_blocks
from specc.errors import EngineError

BLOCK = 256


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sums, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(block_sums, "_STEP_BYTES", 100)


def write(path: Path, size: int) -> tuple[bytes, str]:
    data = os.urandom(size)
    path.write_bytes(data)
    blocks = [data[begin : begin + BLOCK] for begin in range(0, size, BLOCK)]
    return data, "".join(f"{zlib.crc32(block):08x}" for block in blocks)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
@pytest.mark.parametrize("chunk", [1, 7, BLOCK, 3 * BLOCK])
def test_sums_do_not_depend_on_chunks(tmp_path, size, chunk):
    data, expected = write(tmp_path / "file", size)
    sums = BlockSums()
    for begin in range(0, size, chunk):
        sums.update(data[begin : begin + chunk])
    assert sums.hex() == expected
    assert digits_of(size) == len(expected)


# what is kept: nothing, all, and parts that begin and end within blocks, or take several
PARTS = {
    "none": [],
    "all": [(0, 1000)],
    "parts": [(3, 10), (13, 300), (500, 12), (512, 256), (999, 1)],
    "empty": [(10, 0), (20, 5)],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("is_known", [True, False], ids=["compared", "unknown"])
def test_parts_are_filled(tmp_path, parts, is_known):
    data, sums = write(tmp_path / "file", 1000)
    targets = [(offset, memoryview(bytearray(size))) for offset, size in parts]
    read_in_blocks(tmp_path / "file", sums if is_known else "", targets)
    for (offset, size), (_, target) in zip(parts, targets, strict=True):
        assert bytes(target) == data[offset : offset + size]


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
def test_any_flipped_bit_is_found(tmp_path, parts):
    data, sums = write(tmp_path / "file", 1000)
    for place in (0, 12, 13, BLOCK - 1, BLOCK, 511, 700, 999):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        (tmp_path / "file").write_bytes(changed)
        targets = [(offset, memoryview(bytearray(size))) for offset, size in parts]
        with pytest.raises(EngineError, match="altered the weights") as caught:
            read_in_blocks(tmp_path / "file", sums, targets)
        begin = place // BLOCK * BLOCK
        assert f"bytes {begin} … {min(begin + BLOCK, 1000) - 1} of" in caught.value.found


def test_blocks_that_change_places_are_found(tmp_path):
    data, sums = write(tmp_path / "file", 3 * BLOCK)
    swapped = data[BLOCK : 2 * BLOCK] + data[:BLOCK] + data[2 * BLOCK :]
    (tmp_path / "file").write_bytes(swapped)
    with pytest.raises(EngineError, match="altered the weights"):
        read_in_blocks(tmp_path / "file", sums)


def test_a_shorter_file_is_refused(tmp_path):
    data, sums = write(tmp_path / "file", 1000)
    (tmp_path / "file").write_bytes(data[:600])
    with pytest.raises(EngineError):
        read_in_blocks(tmp_path / "file", sums, [(0, memoryview(bytearray(1000)))])
    for size in (512, 1000 + BLOCK):
        (tmp_path / "file").write_bytes((data + data)[:size])
        with pytest.raises(EngineError, match=f"{size} bytes"):
            read_in_blocks(tmp_path / "file", sums)
