"""Greedy output of the oracles, kept: on the CPU it takes longer than all else of a kind.

    python3 -P -m tests.gpu.expected KIND …

computes that of these kinds (of all without a name) on a machine without a GPU and keeps it in
build/gpu-check/tokens, which may then go to the machine with one. A name there is a hash of what
the output follows from; where another engine is compiled, it is computed anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build/gpu-check/tokens"
# of an engine's directory: what plain decoding reads
READ = ("target/program.json", "target/weights.safetensors", "steps/off.json")
# what its draft models are
DRAFTS = ("draft-*/program.json", "draft-*/weights.safetensors")


def expected_tokens(
    engine: Path, prompts: Sequence[list[int]], num_tokens: int, kept: Path = KEPT
) -> list[list[int]]:
    """Greedy output of plain decoding, operator by operator with the oracles on the CPU.

    Args:
        prompts: token ids.
    """
    from tests.gpu.kinds import tokens_of

    def compute() -> list[list[int]]:
        return tokens_of(_oracle(engine, "off"), prompts, num_tokens)

    files = [engine / name for name in READ]
    found: list[list[int]] = _known(files, [list(prompts), num_tokens], compute, kept)
    return found


def expected_accepted(
    engine: Path, plan: str, prompts: Sequence[list[int]], num_tokens: int, kept: Path = KEPT
) -> list[int]:
    """How many tokens of depth 1, 2, … the same output has, with a plan of draft models.

    Args:
        prompts: token ids.
    """
    from tests.gpu.kinds import accepted_of, tokens_of

    def compute() -> list[int]:
        llm = _oracle(engine, plan)
        tokens_of(llm, prompts, num_tokens)
        return accepted_of(llm)

    drafts = [path for pattern in DRAFTS for path in sorted(engine.glob(pattern))]
    files = [engine / name for name in (*READ, f"steps/{plan}.json")] + drafts
    found: list[int] = _known(files, [list(prompts), num_tokens, plan], compute, kept)
    return found


def _oracle(engine: Path, plan: str) -> Any:
    from specc.runtime.engine import Engine
    from specc.runtime.llm import LLM

    return LLM(Engine.load(engine, backend="eager"), plan=plan)


def _known(
    files: Sequence[Path], given: Sequence[Any], compute: Callable[[], Any], kept: Path
) -> Any:
    """What is kept of these files and arguments; computed, and kept, where it is not."""
    file = kept / f"{_name(files, given)}.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    found = compute()
    kept.mkdir(parents=True, exist_ok=True)
    _write(file, json.dumps(found))
    return found


def _write(file: Path, text: str) -> None:
    """Whole or not at all: kinds that share an engine read and write it at once."""
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, file)


def _name(files: Sequence[Path], given: Sequence[Any]) -> str:
    import torch

    # versions of torch sum in other orders
    content = hashlib.sha256(json.dumps([*given, str(torch.__version__)]).encode())
    for path in (*files, *_code()):
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
            given = kinds.prompts_of(case), kinds.NUM_TOKENS
            expected_tokens(path, *given)
            for plan in kinds.compared_plans(case):
                expected_accepted(path, plan, *given)
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
