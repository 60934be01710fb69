"""Reports in a terminal: lines, cells, and tables that lose nothing where it is narrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

from specc.cli import render

# of columns that may be folded: narrower than this they cannot be read
_LEAST_FOLDED = 16


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines that the terminal folds, not rich: they can be copied and searched."""
    for line in lines:
        console.print(line, soft_wrap=True)


def cell(value: float | None, form: str = ".2f") -> str:
    """A figure in a table; nothing where nobody measured it."""
    return "" if value is None else f"{value:{form}}"


def print_table(console: Console, table: Table, num_keys: int = 1) -> None:
    """Print a table of `render.make_table`, in parts where the console is too narrow.

    rich cuts off what has no room, figures and whole columns alike. Here each part has the first
    columns again, and as many of the others as fit.

    Args:
        num_keys: first columns, which name the rows.
    """
    parts = _parts(table, console.width, num_keys)
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(table if len(parts) == 1 else _columns_of(table, [*range(num_keys), *part]))


def _parts(table: Table, width: int, num_keys: int) -> list[list[int]]:
    """Columns of each part, without the keys, which are in all of them."""
    gap = table.padding[1]
    widths = [_least_width(column) + gap for column in table.columns]
    parts: list[list[int]] = [[]]
    used = sum(widths[:num_keys])
    for number, own in enumerate(widths[num_keys:], start=num_keys):
        # the last column needs no gap after it
        if parts[-1] and used + own - gap > width:
            parts.append([])
            used = sum(widths[:num_keys])
        parts[-1].append(number)
        used += own
    return parts


def _least_width(column: Column) -> int:
    """Characters without which a column loses something."""
    widest = max(cell_len(line) for cell in _texts(column) for line in cell.split("\n"))
    return widest if column.no_wrap else min(widest, _LEAST_FOLDED)


def _texts(column: Column) -> Sequence[str]:
    return [str(column.header), *map(str, column.cells)]


def _columns_of(table: Table, numbers: Sequence[int]) -> Table:
    chosen = [table.columns[number] for number in numbers]
    part = render.make_table([])
    part.show_header = table.show_header
    for column in chosen:
        part.add_column(
            column.header,
            justify=column.justify,
            no_wrap=column.no_wrap,
            overflow=column.overflow,
        )
    for row, cells in zip(table.rows, zip(*(c.cells for c in chosen), strict=True), strict=True):
        part.add_row(*cells, style=row.style)
    return part
