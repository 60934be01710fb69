"""Engines of another number of stages: what compiling the checkpoint for so many would write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specc.compiler.build import build
from specc.compiler.reshard import reshard_engine
from specc.config import CompileConfig
from specc.errors import ConfigError, SpeccError
from tests import models
from tests.specc.compiler.test_reshard import compare, config_for
from tests.traces import shared_traces

SLOW = pytest.mark.slow
# ranks of a stage, and stages
Shape = tuple[int, int]
# into stages, out of them, and across
FEW = (((1, 1), (1, 2)), ((1, 2), (1, 1)))
CHANGES = (
    *FEW,
    ((2, 1), (1, 2)),
    ((1, 1), (2, 2)),
    ((2, 2), (1, 1)),
    ((2, 2), (1, 2)),
    ((1, 2), (2, 2)),
    ((2, 2), (2, 1)),
)


def compiled(root: Path, checkpoint: Path, shape: tuple[int, int], backend: str) -> Path:
    path = root / f"fresh-{shape[0]}-{shape[1]}"
    config: CompileConfig = config_for(shape[0], pipeline_parallel_size=shape[1], backend=backend)
    with shared_traces():
        build(checkpoint, None, path, config)
    return path


@pytest.mark.parametrize(
    ("name", "backend", "changes"),
    [
        pytest.param("gemma3-tied", "eager", FEW, id="gemma3-tied-eager-few"),
        pytest.param("gemma3-tied", "eager", CHANGES, id="gemma3-tied-eager", marks=SLOW),
        pytest.param("llama", "cpu", CHANGES, id="llama-cpu", marks=SLOW),
    ],
)
def test_across_stages(
    tmp_path: Path, name: str, backend: str, changes: tuple[tuple[Shape, Shape], ...]
) -> None:
    """A head that is the embedding is in two stages; blocks are taken apart and made anew."""
    checkpoint = models.save_tiny(name, tmp_path / "checkpoint")
    engines = {
        shape: compiled(tmp_path, checkpoint, shape, backend)
        for shape in dict.fromkeys(shape for change in changes for shape in change)
    }
    for before, after in changes:
        output = tmp_path / f"from-{before[0]}-{before[1]}-to-{after[0]}-{after[1]}"
        reshard_engine(engines[before], output, after[0], num_stages=after[1])
        compare(output, engines[after])
    with pytest.raises(ConfigError, match="an engine of 1 rank in each of 2 stages"):
        reshard_engine(engines[1, 2], tmp_path / "same", 1)
    (*_, short) = sorted((engines[1, 2] / "target/stage-1").glob("*.weights.safetensors"))
    short.write_bytes(short.read_bytes()[:-1])
    with pytest.raises(SpeccError, match=re.escape(short.name)):
        reshard_engine(engines[1, 2], tmp_path / "short", 1, num_stages=1)
