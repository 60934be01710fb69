"""Tables on narrow terminals: every figure and every verdict is there."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from specc.cli import render
from specc.cli.print_table import print_table

COLUMNS = ("tokens/s", "least – most", "× off", "first token", "length", "even at", "identical")
ROWS = (
    ("off", "2023.2", "1999.1 – 2044.8", "1.00", "3 ms", "1.00", "", "yes"),
    ("speculative tree-3-2-1", "3023.2", "2999.1 – 3044.8", "1.50", "3 ms", "2.74", "1.9",
     "19 of 20, near ties"),
)  # fmt: skip


def printed(table, width: int, num_keys: int = 1) -> list[str]:
    out = io.StringIO()
    print_table(Console(file=out, width=width, markup=False, highlight=False), table, num_keys)
    return out.getvalue().splitlines()


def table_of_runs():
    table = render.make_table(("run", *COLUMNS), ("run", *COLUMNS))
    for row in ROWS:
        table.add_row(*row)
    return table


@pytest.mark.parametrize("width", [60, 72, 80, 100, 132, 200])
def test_nothing_is_lost(width):
    lines = printed(table_of_runs(), width)
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    assert "…" not in text
    for word in (*COLUMNS, *(cell for row in ROWS for cell in row)):
        assert word in text


def test_one_part_where_there_is_room():
    assert len(printed(table_of_runs(), 132)) == 3
    # two parts, a line between them, and the rows' names in both
    lines = printed(table_of_runs(), 80)
    assert len(lines) == 7
    assert lines[3].strip() == ""
    assert sum("speculative tree-3-2-1" in line for line in lines) == 2


def test_text_is_folded_rather_than_moved():
    table = render.make_table(("what", "found"))
    table.add_row("C++ compiler", "a long text of many words " * 8)
    lines = printed(table, 60)
    assert lines[0].split() == ["what", "found"]
    assert " ".join(" ".join(lines[1:]).split()).count("many words") == 8


def test_rows_keep_their_style_and_order():
    table = render.make_table(("model", "weights", "total"), ("weights", "total"))
    table.add_row("target", "26.0 MiB", "111.6 MiB")
    table.add_row("total", "29.3 MiB", "137.5 MiB", style="bold")
    assert [line.split()[0] for line in printed(table, 20) if line.strip()] == [
        "model", "target", "total", "model", "target", "total",
    ]  # fmt: skip


def test_several_columns_may_name_a_row():
    table = render.make_table(("req/s", "policy", *COLUMNS), ("req/s", *COLUMNS))
    table.columns[1].no_wrap = True
    for rate, row in zip(("0.5", "32"), ROWS, strict=True):
        table.add_row(rate, *row)
    lines = printed(table, 70, num_keys=2)
    assert sum("32  speculative tree-3-2-1" in line for line in lines) == lines.count("") + 1 > 1
