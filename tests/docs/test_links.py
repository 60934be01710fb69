"""Links of README.md, docs and examples lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks_of

ALL = [*PAGES, ROOT / "docs" / "results" / "README.md", *sorted((ROOT / "examples").rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]*)\)")
# a path of a page or picture that prose, a docstring or a message names
_MENTION = re.compile(r"(?<![\w/.-])docs/(?:[\w-]+/)?[\w-]+\.(?:md|svg)\b")
# of onnxruntime-genai's repository
_ELSEWHERE = {"docs/speculative_decoding.md"}
_NAMED = ("specc", "passes", "runtime", "kernels", "tests", "examples")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    inside = {
        n for block in blocks_of(page) for n in range(block.line, block.line + len(block.lines) + 1)
    }
    lines = page.read_text(encoding="utf-8").split("\n")
    heads = [x for n, x in enumerate(lines, 1) if re.match("#+ ", x) and n not in inside]
    names = [re.sub(r"^#+ |[`*]|\[|\]\([^)]*\)", "", head).strip().lower() for head in heads]
    return {re.sub(r"[^\w -]", "", name).replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        file = (page.parent / path).resolve() if path else page
        if "://" in path:
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def test_pages_that_files_name_exist() -> None:
    files = [*ALL, ROOT / "Makefile"]
    for folder in _NAMED:
        kinds = {".py", ".md", ".cpp", ".h", ".yaml", ".toml", ".html"}
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in kinds]
    broken = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in _MENTION.findall(file.read_text(encoding="utf-8"))
        if name not in _ELSEWHERE and not (ROOT / name).exists()
    ]
    assert broken == []


def test_anchors_are_those_of_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n```sh\n# no heading\n```\n## vLLM's [d](e) f-g\n", encoding="utf-8")
    assert anchors(page) == {"a-b-c", "vllms-d-f-g"}
