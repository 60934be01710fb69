"""Weights read into memory: the same values, at places that kernels like, and only with room."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specc.errors import ConfigError, EngineError
from specc.runtime.backends import held_weights
from specc.runtime.backends.base import LoadLimits
from specc.runtime.backends.held_weights import HeldWeights, check_mmap, load_weights
from specc.runtime.backends.program_files import MappedWeights
from specc.system.huge_pages import HUGE_PAGE
from tests.mapping_flags import mapping_flags

MB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    torch.manual_seed(5)
    rows = torch.randn(3, 5)
    tensors = {
        "floats": torch.randn(700, 1000),
        "halves": rows.half(),
        "bfloats": rows.bfloat16(),
        "eights": rows.to(torch.float8_e4m3fn),
        "bytes": torch.randint(0, 255, (20, 1, 7), dtype=torch.uint8),
        "signed": torch.tensor(-3, dtype=torch.int8),
        "longs": torch.tensor([[1 << 40]]),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
    }
    save_file(tensors, path)
    return path


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


def test_they_are_those_of_the_file(file: Path) -> None:
    held, mapped = HeldWeights(file), MappedWeights(file)
    assert held.keys() == mapped.keys()
    for key, tensor in mapped.items():
        found = held[key]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.is_contiguous()
        assert bits(found.reshape(-1)) == bits(tensor.reshape(-1)), key


def test_each_begins_at_a_line_of_the_caches_and_none_lies_in_another(file: Path) -> None:
    held = [tensor for tensor in HeldWeights(file).values() if tensor.numel()]
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in held)
    assert all(begin % 64 == 0 for begin, _ in places)
    for (begin, size), (following, _) in itertools.pairwise(places):
        assert begin + size <= following


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
def test_they_are_in_huge_pages(file: Path) -> None:
    held = HeldWeights(file)
    begin = min(tensor.data_ptr() for tensor in held.values() if tensor.numel())
    assert begin % HUGE_PAGE == 0
    assert "hg" in mapping_flags(begin)
    assert "hg" in mapping_flags(held["floats"].data_ptr())


def test_what_becomes_of_the_file_does_not_matter(file: Path) -> None:
    held, mapped = HeldWeights(file), MappedWeights(file)
    before = held["floats"].clone()
    with open(file, "r+b") as data:
        data.seek(-400_000, os.SEEK_END)
        data.write(bytes(400_000))
    assert torch.equal(held["floats"], before)
    assert not torch.equal(mapped["floats"], before)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nothing"):
        HeldWeights(tmp_path / "nothing.safetensors")


def test_a_cut_file(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(EngineError, match=r"weights\.safetensors"):
        HeldWeights(file)


def test_a_file_that_is_cut_while_it_is_read(file: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(EngineError, match=r"weights\.safetensors ends at byte \d+"):
        HeldWeights(file)


@pytest.mark.parametrize(
    ("limits", "gives", "free_mb", "holds"),
    [
        pytest.param({}, True, 512, True, id="room"),
        pytest.param({}, False, 512, False, id="no-huge-pages"),
        pytest.param({}, True, 256, False, id="no-room"),
        pytest.param({}, True, None, False, id="room-unknown"),
        pytest.param({"offload_weights": "auto"}, True, 512, False, id="offloaded"),
        pytest.param({"mmap": False}, False, None, True, id="as-asked-for"),
        pytest.param({"mmap": True}, True, 512, False, id="mapped-as-asked-for"),
    ],
)
def test_which_are_held(
    file: Path,
    monkeypatch: Any,
    limits: dict[str, Any],
    gives: bool,
    free_mb: int | None,
    holds: bool,
) -> None:
    monkeypatch.setattr(held_weights, "are_huge_pages_given", lambda: gives)
    free = None if free_mb is None else free_mb * MB
    monkeypatch.setattr(held_weights, "free_bytes", lambda: free)
    weights = load_weights({"target": file}, LoadLimits(**limits))
    assert type(weights["target"]) is (HeldWeights if holds else MappedWeights)


def test_no_room_for_what_shall_be_held(file: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(held_weights, "free_bytes", lambda: 2 * MB)
    with pytest.raises(EngineError, match=r"weights of .* with --no-mmap, and .* free"):
        load_weights({"target": file}, LoadLimits(mmap=False))


def test_processes_that_load_at_once_wait_for_each_other(file: Path, monkeypatch: Any) -> None:
    """What one has taken, the next one sees."""
    order: list[str] = []

    def choose(*_: Any) -> bool:
        order.append("begin")
        time.sleep(0.05)
        order.append("end")
        return True

    monkeypatch.setattr(held_weights, "choose_mmap", choose)
    threads = [
        threading.Thread(target=load_weights, args=({"target": file}, LoadLimits()))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["begin", "end"] * 2


@pytest.mark.parametrize(
    ("given", "found", "needed"),
    [
        (("eager", False, None), "--no-mmap with backend eager", "backend cpu, which reads"),
        (("cuda", True, None), "--mmap with backend cuda", "backend cpu, which reads"),
        (("cpu", False, "auto"), "--no-mmap with --offload-weights", "one of them"),
    ],
)
def test_refused(given: tuple[str, bool, str | None], found: str, needed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_mmap(*given)
    assert caught.value.found == found
    assert needed in caught.value.needed


@pytest.mark.parametrize(
    "given", [("cuda", None, None), ("cpu", True, "auto"), ("cpu", False, None)]
)
def test_not_refused(given: tuple[str, bool | None, str | None]) -> None:
    check_mmap(*given)
