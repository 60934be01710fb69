from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from specc.server.memory import resident_bytes
from specc.system.huge_pages import (
    HUGE_PAGE,
    are_huge_pages_given,
    ask_for_huge_pages,
    huge_buffer,
    huge_zeros,
)
from tests.mapping_flags import mapping_flags

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)


@needs_huge_pages
def test_a_buffer_begins_with_a_huge_page_and_asks_for_all_of_them() -> None:
    buffer = huge_buffer(3 * HUGE_PAGE + 5)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (3 * HUGE_PAGE + 5,)
    assert buffer.data_ptr() % HUGE_PAGE == 0
    for place in (0, 3 * HUGE_PAGE - 1):
        assert "hg" in mapping_flags(buffer.data_ptr() + place)


@needs_huge_pages
def test_zeros_take_memory_when_they_are_touched() -> None:
    before = resident_bytes()
    zeros = huge_zeros(64 * HUGE_PAGE + 5)
    assert (zeros.shape, zeros.data_ptr() % HUGE_PAGE) == ((64 * HUGE_PAGE + 5,), 0)
    assert "hg" in mapping_flags(zeros.data_ptr())
    assert resident_bytes() - before < 8 * HUGE_PAGE
    assert not zeros.any()
    zeros[3 * HUGE_PAGE] = 7
    assert zeros.sum() == 7
    assert resident_bytes() - before < 8 * HUGE_PAGE
    zeros.fill_(1)
    assert resident_bytes() - before > 60 * HUGE_PAGE


@needs_huge_pages
def test_only_whole_pages_of_a_tensor_are_asked_for() -> None:
    """What lies beside it in its pages may be someone else's."""
    # memory of its own: what malloc gives again may have been asked for before
    memory = mmap.mmap(-1, 4 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    first = -tensor.data_ptr() % HUGE_PAGE
    part = tensor[first + 64 : first + 2 * HUGE_PAGE + 64]
    assert ask_for_huge_pages(part) is part
    assert "hg" not in mapping_flags(part.data_ptr())
    assert "hg" in mapping_flags(part.data_ptr() + HUGE_PAGE)


def test_less_than_a_page() -> None:
    assert huge_buffer(0).shape == (0,)
    assert ask_for_huge_pages(torch.empty(7)).shape == (7,)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("[always] madvise never", True),
        ("always [madvise] never", True),
        ("always madvise [never]", False),
        (None, False),
    ],
)
def test_what_linux_gives(tmp_path: Path, text: str | None, given: bool) -> None:
    file = tmp_path / "enabled"
    if text is not None:
        file.write_text(f"{text}\n")
    assert are_huge_pages_given(file) is given
