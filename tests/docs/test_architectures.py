"""The table of architectures is that of its results, which are of all architectures with tests."""

from __future__ import annotations

from tests.architecture_results import NAMES, PAGE, page, read_results


def test_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_results())


def test_every_architecture_is_in_the_results() -> None:
    rows = read_results()
    assert [row["name"] for row in rows if row["backend"] == "eager"] == list(NAMES)
    # 3 plans, 6 prompts each, 32 tokens
    assert {row["num_compared"] for row in rows} == {576}


def test_backends_that_refuse_are_marked() -> None:
    (line,) = [x for x in page(read_results()).splitlines() if x.startswith("| gpt_oss ")]
    assert line.split(" | ")[3:] == ["576", "576", "refused", "refused", "gpt-oss |"]
