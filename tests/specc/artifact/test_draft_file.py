"""A file of new weights is taken as a whole, or refused with its reason, whoever has written it."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from specc.artifact.draft_file import DraftForm, DraftTensor, NewWeights, opened, read_new_weights
from specc.artifact.quantized_layout import QuantizedLayout, pack
from specc.errors import SpeccError, WeightError

INT4 = QuantizedLayout.named("int4-g32-zeros")
FORM = DraftForm(
    "draft_0",
    "ab" * 32,
    {
        "norm": DraftTensor(torch.float32, (8,)),
        "proj": DraftTensor(torch.bfloat16, (4, 6)),
        "table": DraftTensor(torch.int64, (5,)),
        "packed": DraftTensor(torch.uint8, INT4.stored_shape((32, 64)), INT4, 64),
    },
)
Change = Callable[[dict[str, Any]], None]


def packed(scale: float = 1.0, zero: int = 8) -> torch.Tensor:
    levels = torch.arange(32 * 64).remainder(16).to(torch.uint8).view(32, 64)
    scales, zeros = torch.full((32, 2), scale), torch.full((32, 2), 8)
    stored = pack(levels, scales, zeros, INT4)
    if zero != 8:
        # behind the scales of the first header; pack itself would refuse it
        stored[0, 4 * 32 : 4 * 32 + 2] = torch.tensor(list(struct.pack("<h", zero))).byte()
    return stored


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "norm": torch.randn(8),
        "proj": torch.randn(4, 6, dtype=torch.bfloat16),
        "table": torch.tensor([3, 1, 4, 1, 5]),
        "packed": packed(),
    }


OWN = tensors()


def write(path: Path, changed: dict[str, torch.Tensor] | None = None, **metadata: str) -> Path:
    save_file(tensors() | (changed or {}), path, FORM.metadata | metadata)
    return path


def read(path: Path, folder: Path | None = None) -> NewWeights:
    return read_new_weights(path, FORM, OWN, folder)


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewritten(path: Path, change: Change) -> Path:
    header, data = parts(path)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_values_are_those_of_the_file(tmp_path: Path) -> None:
    changed = {"norm": torch.arange(8.0), "packed": packed(0.5)}
    found = read(write(tmp_path / "new", changed))
    for key, value in (tensors() | changed).items():
        assert torch.equal(found.tensors[key], value), key
    assert len(found.digest) == 64
    assert read(write(tmp_path / "other")).digest != found.digest


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"norm": torch.full((8,), float("inf"))}, "not finite"),
        ({"proj": torch.full((4, 6), float("nan"), dtype=torch.bfloat16)}, "not finite"),
        ({"packed": packed(float("inf"))}, "finite"),
        ({"packed": packed(float("nan"))}, "finite"),
        ({"packed": packed(zero=-3)}, "zero points"),
        ({"packed": packed(zero=3000)}, "zero points"),
        ({"table": torch.tensor([3, 1, 4, 1, 1 << 40])}, "places in a table"),
        ({"norm": torch.zeros(9)}, "norm is"),
        ({"norm": torch.zeros(8, dtype=torch.float16)}, "norm is"),
        ({"more": torch.zeros(1)}, "more"),
    ],
)
def test_what_no_draft_can_take(
    changed: dict[str, torch.Tensor], word: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightError, match=word):
        read(write(tmp_path / "new", changed))


def test_another_engines(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="another engine"):
        read(write(tmp_path / "new", identity="cd" * 32))
    save_file(tensors(), tmp_path / "plain")
    with pytest.raises(WeightError, match="no file of new weights"):
        read(tmp_path / "plain")


HEADERS: dict[str, Change] = {
    "lacks one": lambda h: h.pop("norm"),
    "overlap": lambda h: h["norm"].update(data_offsets=h["norm"]["data_offsets"][:1] * 2),
    # numbers that a draft could take
    "the same bytes twice": lambda h: h["proj"].update(
        data_offsets=[h["norm"]["data_offsets"][0], h["norm"]["data_offsets"][0] + 48]
    ),
    "beyond the end": lambda h: h["norm"].update(data_offsets=[1 << 40, (1 << 40) + 32]),
    "before the begin": lambda h: h["norm"].update(data_offsets=[-32, 0]),
    "a fraction": lambda h: h["norm"].update(data_offsets=[0.0, 32.0]),
    "truth": lambda h: h["norm"].update(data_offsets=[False, True]),
    "three offsets": lambda h: h["norm"].update(data_offsets=[0, 32, 64]),
    "no offsets": lambda h: h["norm"].pop("data_offsets"),
    "no object": lambda h: h.update(norm=[1, 2]),
    "a shape of another": lambda h: h["norm"].update(shape=[1 << 62, 4]),
    "more fields": lambda h: h["norm"].update(strides=[1]),
    "no metadata": lambda h: h.pop("__metadata__"),
    "metadata of another kind": lambda h: h.update(__metadata__=["format"]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str, tmp_path: Path) -> None:
    with pytest.raises(WeightError):
        read(rewritten(write(tmp_path / "new"), HEADERS[name]))


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_lengths_of_headers(length: int, tmp_path: Path) -> None:
    path = write(tmp_path / "new")
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(WeightError, match="header of"):
        read(path)


@pytest.mark.parametrize(
    "text",
    [b"[" * 5000 + b"]" * 5000, b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff" * 16, b"[]", b"7 "],
)
def test_headers_that_are_no_objects(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "new"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(WeightError, match="header"):
        read(path)


@pytest.mark.parametrize("count", [0, 4, 8, 100, -1])
def test_files_that_end_early(count: int, tmp_path: Path) -> None:
    path = write(tmp_path / "new")
    path.write_bytes(path.read_bytes()[:count])
    with pytest.raises(WeightError):
        read(path)


def test_more_than_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "new")
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(WeightError, match="are said"):
        read(path)


@settings(max_examples=150)
@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_no_byte_of_a_header_leads_elsewhere(
    place: int, change: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "flipped")
    data = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    data[place % length] ^= change
    path.write_bytes(data)
    try:
        found = read(path)
    except SpeccError:
        return
    # white space, or a word of the metadata that nobody reads
    assert all(torch.equal(found.tensors[key], value) for key, value in tensors().items())


def test_what_is_no_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    ended = threading.Event()

    def look() -> None:
        for name in ("pipe", ".", "absent"):
            with pytest.raises(WeightError):
                read(tmp_path / name)
        ended.set()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    assert ended.wait(10), "it waits for a writer"


def test_outside_of_the_folder(tmp_path: Path) -> None:
    folder, beside = tmp_path / "weights", tmp_path / "weights-of-others"
    for directory in (folder, folder / "deeper", beside):
        directory.mkdir()
    write(beside / "new")
    write(folder / "deeper" / "new")
    (folder / "link").symlink_to(beside / "new")
    (folder / "directory").symlink_to(beside)
    (folder / "good-link").symlink_to("deeper/new")
    for name in (
        beside / "new", "../weights-of-others/new", "link", "directory/new", "/etc/hostname",
        "/etc/shadow", "../absent", "/proc/self/environ",
    ):  # fmt: skip
        with pytest.raises(WeightError, match="outside"):
            read(Path(name), folder)
    for name in ("deeper/new", "good-link", folder / "deeper" / "new", "../weights/deeper/new"):
        assert read(Path(name), folder).digest
    # the folder itself may be a link
    (tmp_path / "alias").symlink_to(folder)
    assert read(Path("deeper/new"), tmp_path / "alias").digest
    with pytest.raises(WeightError, match="No such file"), opened(Path("absent"), folder):
        pass


def test_a_file_that_changes_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked at is what is taken, whatever becomes of the file meanwhile."""
    path = write(tmp_path / "new")
    from specc.artifact import draft_file

    check = draft_file._check_values

    def and_then(*given: Any) -> None:
        check(*given)
        path.write_bytes(b"\0" * path.stat().st_size)

    monkeypatch.setattr(draft_file, "_check_values", and_then)
    found = read(path)
    assert all(torch.equal(found.tensors[key], value) for key, value in tensors().items())
