"""Commands of README.md and docs run as they are written.

Every block has a directory of its own, as a reader's checkout: what `FILES` names lies in it, and
`engine/`, an engine of the demo pair, unless the block writes one. Blocks that need more than that
say so where they are, see `tests/docs/blocks.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, shell_blocks

PAIR = ROOT / "examples" / "pair"
# name → what a reader has there
FILES = {
    "prompt.txt": "def main():",
    "prompts.jsonl": '{"prompt": "def read_lines(path):"}\n{"prompt": "class Stack:\\n"}\n',
}
COMPILE = f"specc compile --target {PAIR}/target --draft {PAIR}/draft --tree 3,2,1 --tree 1,1,1,1"
# what a user's error is, which docs show word for word
ERROR = ("found:", "needed:", "do:")
# of a block: it ends within a minute on an idle machine
LIMIT_S = 600


def environment() -> dict[str, str]:
    """That of a reader's shell, with `specc` of this environment in it."""
    own = {"SPECC_BACKEND", "TRITON_INTERPRET", "PYTHONPATH"}
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def shell(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=directory,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engine")
    done = shell(f"{COMPILE} -o engine/", directory)
    assert done.returncode == 0, done.stdout
    return directory / "engine"


def run(block: Block, directory: Path) -> None:
    """Run a block; commands whose output is a user's error print that, and end with code 2."""
    (directory / "examples").symlink_to(ROOT / "examples")
    for name, text in FILES.items():
        (directory / name).write_text(text, encoding="utf-8")
    for script, printed in block.commands():
        done = shell(script, directory)
        error = [line for line in printed if line.startswith(ERROR)]
        assert done.returncode == (2 if error else 0), f"{script}\n{done.stdout}"
        assert error == [line for line in done.stdout.split("\n") if line.startswith(ERROR)]


# what two pages show runs once, from the first of them
BLOCKS = [
    *{block.lines: block for block in reversed(shell_blocks()) if block.reason is None}.values()
][::-1]
# what a reader sees of README.md before anything else
FIRST = next(block for block in BLOCKS if block.page.name == "README.md")
OTHERS = [block for block in BLOCKS if block is not FIRST]
# page → why its blocks are in the slow tier; seconds of all of them on a busy machine, 2026-11-23
WHY_SLOW = {
    "docs/design/synthetic.md": "it traces shapes of 8B and 1B: 30 s",
    "docs/guide/start.md": "they compile, and measure beside transformers: 250 s",
    "docs/guide/bench.md": "they measure, one of them beside transformers: 115 s",
    "docs/guide/drafts.md": "each compiles an engine with other plans: 150 s",
}


# it compiles and runs: twelve seconds; its parts have tests of their own
@pytest.mark.slow
def test_the_first_screen(tmp_path: Path) -> None:
    assert len(FIRST.commands()) == 2
    run(FIRST, tmp_path)


def test_each_slow_page_says_why() -> None:
    assert {block.name.partition(":")[0] for block in OTHERS} == set(WHY_SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("block", OTHERS, ids=lambda block: block.name)
def test_commands_run_as_written(block: Block, tmp_path: Path, request: pytest.FixtureRequest):
    script = "\n".join(command for command, _ in block.commands())
    if "engine/" in script and "-o engine/" not in script:
        shutil.copytree(request.getfixturevalue("engine"), tmp_path / "engine")
    run(block, tmp_path)
