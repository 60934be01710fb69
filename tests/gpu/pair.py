"""The demo pair, compiled for the GPU, and its prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def pair_engine(path: Path, dtype: str, capture: Any = None) -> Any:
    """Compile it into `path` and load it; `capture` are `CaptureLimits`."""
    from specc.api import compile_with
    from specc.config import CompileConfig
    from specc.runtime.engine import Engine
    from specc.speculation.plans import SpecPlan

    plans = (SpecPlan.from_widths((1,) * 4), SpecPlan.from_widths((3, 2, 1)))
    config = CompileConfig(plans=plans, dtype=dtype, max_seq_len=512, backend="cuda", probe=False)
    pair = ROOT / "examples/pair"
    compile_with(str(pair / "target"), str(pair / "draft"), path, config)
    return Engine.load(path, capture=capture)


def pair_prompts(count: int) -> list[str]:
    """Texts that its models were trained on the likes of."""
    lines = (ROOT / "examples/pair/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]
