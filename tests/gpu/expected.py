"""Greedy tokens of the oracles, kept: on the CPU they take longer than all else of a kind.

    python3 -P -m tests.gpu.expected KIND …

computes those of these kinds (of all without a name) on a machine without a GPU and keeps them in
build/gpu-check/tokens, which may then go to the machine with one. A name there is a hash of what
the tokens follow from; where another engine is compiled, they are computed anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build/gpu-check/tokens"
# of an engine's directory: what plain decoding reads
READ = ("target/program.json", "target/weights.safetensors", "steps/off.json")


def expected_tokens(
    engine: Path, prompts: Sequence[list[int]], num_tokens: int, kept: Path = KEPT
) -> list[list[int]]:
    """Greedy output of plain decoding, operator by operator with the oracles on the CPU.

    Args:
        engine: its directory.
        prompts: token ids.
        num_tokens: of each output.
        kept: folder of the files.
    """
    file = kept / f"{_name(engine, prompts, num_tokens)}.json"
    if file.exists():
        known: list[list[int]] = json.loads(file.read_text(encoding="utf-8"))
        return known
    from specc.runtime.engine import Engine
    from specc.runtime.llm import LLM
    from tests.gpu.kinds import tokens_of

    found = tokens_of(LLM(Engine.load(engine, backend="eager"), plan="off"), prompts, num_tokens)
    kept.mkdir(parents=True, exist_ok=True)
    _write(file, json.dumps(found))
    return found


def _write(file: Path, text: str) -> None:
    """Whole or not at all: kinds that share an engine read and write it at once."""
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, file)


def _name(engine: Path, prompts: Sequence[list[int]], num_tokens: int) -> str:
    import torch

    # versions of torch sum in other orders
    given = [list(prompts), num_tokens, str(torch.__version__)]
    content = hashlib.sha256(json.dumps(given).encode())
    for path in (*(engine / name for name in READ), *_code()):
        content.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()[:24]


def _code() -> Iterator[Path]:
    """The oracles, and what runs a graph of them."""
    for folder in ("kernels/reference", "runtime/execution", "runtime/backends/eager"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def main(names: Sequence[str]) -> None:
    from tests.gpu import kinds

    for name in names or kinds.KINDS:
        case: Any = kinds.KINDS[name]
        with tempfile.TemporaryDirectory() as scratch:
            path = kinds.compile_kind(case, Path(scratch))
            expected_tokens(path, kinds.prompts_of(case), kinds.NUM_TOKENS)
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
