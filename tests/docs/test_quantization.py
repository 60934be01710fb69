"""The table of backends in docs/quantization.md is what their facts say."""

from __future__ import annotations

import re
from pathlib import Path

from specc.artifact.backends import backend_names, facts_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quantization.md"


def test_the_table_of_backends() -> None:
    part = PAGE.read_text(encoding="utf-8").partition("\n## Backends\n")[2].partition("\n## ")[0]
    found = {}
    for line in part.splitlines():
        if line.startswith("| `"):
            names, kinds = line.split("|")[1:3]
            for name in re.findall(r"`(\w+)`", names):
                found[name] = kinds.strip()
    assert found == {
        name: ", ".join(facts_of(name).quantized) or "none" for name in backend_names()
    }
