"""Whether an engine of `--backend aot-inductor` runs, is captured, and says what the graphs say.

    PYTHONPATH=. python -P -m tests.gpu.aot_packages

prints JSON about the demo pair. A process of its own: a capture that fails may leave torch in any
state.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.pair import ROOT

BACKEND = "aot-inductor"


def compare(
    target: str, draft: str, plan: tuple[int, ...], prompts: Sequence[list[int]], count: int
) -> dict[str, Any]:
    """Compile a pair with and without packages, and generate with both.

    Args:
        target: directory.
        draft: directory.
        plan: widths.
        prompts: token ids, at most two prompts: engines are for two sequences.
        count: output tokens of each.
    """
    from specc.compiler.build import build
    from specc.config import CompileConfig
    from specc.runtime.llm import LLM
    from specc.sampling.params import SamplingParams
    from specc.speculation.plans import SpecPlan

    os.environ["SPECC_EXPERIMENTAL"] = BACKEND
    # the process that compiles finds specc where this one did
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    found: dict[str, Any] = {}
    outputs = []
    with tempfile.TemporaryDirectory() as scratch:
        for backend in (BACKEND, "cuda"):
            config = CompileConfig(
                plans=(SpecPlan.from_widths(plan),),
                max_seq_len=count + max(map(len, prompts)),
                max_batch_size=2,
                backend=backend,
            )
            path = Path(scratch) / backend
            begin = time.perf_counter()
            manifest = build(target, draft, path, config).manifest
            name = backend.replace("-", "_")
            found[f"{name}_compile_s"] = round(time.perf_counter() - begin, 1)
            found[f"{name}_packages"] = sum(file.endswith(".pt2") for file in manifest.files)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                llm = LLM(path)
                results = llm.generate(list(prompts), params)
            outputs.append([list(result.outputs[0].token_ids) for result in results])
            step = llm.engine.steps[manifest.default_plan]
            found[f"{name}_captured"] = [step.is_captured(size) for size in step.buckets]
            found[f"{name}_warnings"] = sorted({str(item.message)[:300] for item in caught})
            found[f"{name}_ms_per_step"] = round(llm.get_metrics().ms_per_step, 3)
    found["equal_tokens"] = [first_difference(a, b) for a, b in zip(*outputs, strict=True)]
    found["tokens"] = count
    return found


def first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens up to the first difference; the code rounds elsewhere, so a tie may end them."""
    pairs = zip(first, second, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(first))


def main() -> None:
    pair = ROOT / "examples/pair"
    prompts = [list(range(20, 60)), list(range(300, 320))]
    found = compare(str(pair / "target"), str(pair / "draft"), (1,) * 4, prompts, 64)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
