"""docs/guide/compatibility.md is the table of refusals; this file, run as a program, writes it."""

from __future__ import annotations

import re
from pathlib import Path

from specc.compile_request import Backends
from specc.refusals import REFUSALS

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "compatibility.md"
_HEAD = """# What does not go together

`specc compile` refuses these pairs before it opens a model, or once it has read the headers of the
checkpoints: the error names both, says why, and what to do. Everything else may be combined. The
table is `specc/refusals.py`; `python tests/docs/test_compatibility.py` writes this page.

| | and | what is needed | what to do |
|---|---|---|---|
"""


def page() -> str:
    lines = []
    for row in REFUSALS:
        takers = row.other.takers if isinstance(row.other, Backends) else ()
        if isinstance(row.other, Backends) and row.other.name == "backends ":
            # every backend has it; those that others register may not
            continue
        words = row.words(row.one.name, row.other.name)
        if row.other.name.startswith("self:"):
            words["b"] = "one of the two"
        # what depends on the backend that was asked for
        words |= {"quantized": "…", "kind": "…", "dtypes": "another dtype", "dtype": "…"}
        cells = (row.one.name, row.other.name, row.needed, row.do)
        assert takers or not isinstance(row.other, Backends), f"no backend takes {row.one.name}"
        text = " | ".join(cell.format(**words).replace("|", "\\|") for cell in cells)
        lines.append(f"| {text} |")
    return _HEAD + "\n".join(lines) + "\n"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_text_can_be_shown():
    for row in REFUSALS:
        words = row.words("--one 1", "--other 2") | dict.fromkeys(
            ("quantized", "kind", "dtypes", "dtype"), "x"
        )
        for text in (row.found, row.needed, row.do):
            assert not re.search(r"[{}]", text.format(**words)), text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
