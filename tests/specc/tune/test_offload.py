"""`specc tune` of an engine whose weights are read from a slow disk chooses a larger tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import open_engine
from specc.config import CompileConfig
from specc.cost.latency_table import LatencyTable, PassPart
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.runtime.backends import broken_disk

# two buffers and no layer of the tiny target
BUDGET = 300_000


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is as large as the target, and often right: in memory it hardly pays."""
    root = tmp_path_factory.mktemp("tune")
    noise = models.DRAFT_NOISE["qwen3"]
    target = models.save_tiny("qwen3", root / "target", num_hidden_layers=6)
    draft = models.save_tiny("qwen3", root / "draft", noise=noise, num_hidden_layers=6)
    config = CompileConfig(
        plans=(SpecPlan.from_widths((1, 1)),), max_seq_len=models.MAX_SEQ_LEN, max_batch_size=1,
        backend="cpu", probe=False, segments=True,
    )  # fmt: skip
    return engines.build(target, draft, root / "engine", config)


def tuned(engine: Path, root: Path, *options: str) -> dict[str, Any]:
    """The profile that a process writes which reads past the page cache take longer for."""
    copy = Path(shutil.copytree(engine, root / f"engine{len(options)}"))
    prompts, switch = root / "prompts.jsonl", root / "switch"
    lines = [json.dumps({"prompt_token_ids": list(prompt)}) for prompt in models.prompts()[1:3]]
    prompts.write_text("\n".join(lines))
    switch.write_text("s")
    extra = {"BROKEN_DISK": str(switch), "BROKEN_NAME": "weights", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "specc", "tune", str(copy), "--prompts", str(prompts)]
    command += ["--batch-size", "1", "--tokens", "16", "--rounds", "1", "--threads", "1"]
    subprocess.run(
        [*command, "--max-nodes", "16", "--max-depth", "4", *options],
        env=os.environ | extra | {"LD_PRELOAD": str(broken_disk.build_shim(root))},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=300,
    )
    assert open_engine(copy).policy == "profile"
    profile: dict[str, Any] = json.loads((copy / "profile.json").read_text())
    profile["nodes"] = (
        Engine.load(copy, offload_weights=profile.get("offload_weights"))
        .plans[profile["plans"]["1"]]
        .num_nodes
    )
    return profile


@pytest.mark.slow
def test_a_larger_tree_is_chosen_where_passes_read_weights(compiled: Path, tmp_path: Path) -> None:
    """A pass takes as long as reading does, however many tokens it has."""
    memory = tuned(compiled, tmp_path)
    offloaded = tuned(compiled, tmp_path, "--offload-weights", str(BUDGET))
    assert offloaded["offload_weights"] == BUDGET
    assert "offload_weights" not in memory
    assert offloaded["nodes"] > memory["nodes"]
    (batch,) = offloaded["batches"]
    best = max(one["measured_speedup"] for one in batch["candidates"])
    assert best > 1.5
    # seven pieces of 5 ms or more, by two threads
    passes = LatencyTable.from_json(offloaded["latency"]).target
    one, many = (passes([PassPart(1, count, 16)]) for count in (1, 16))
    assert one > 0.015
    assert many < 1.5 * one
