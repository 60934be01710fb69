"""Weights in mapped files: shared, never copied, and checked while in use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from specc.config import SamplingParams
from specc.errors import EngineError
from specc.runtime.llm import LLM
from specc.runtime.mapped_weights import MappedWeights


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.arange(4096.0), "b": torch.ones(3)}, path)
    return path


def test_a_cut_file_is_found(file) -> None:
    weights = MappedWeights(file)
    assert weights["a"][7] == 7
    weights.check()
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(EngineError, match="was cut to") as caught:
        weights.check()
    assert "renaming" in caught.value.do


def test_a_replaced_file_goes_on(file) -> None:
    weights = MappedWeights(file)
    save_file({"a": torch.zeros(1)}, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)
    weights.check()
    assert weights["a"][4095] == 4095


def test_the_descriptor_is_closed(file) -> None:
    before = len(os.listdir("/proc/self/fd"))
    weights = MappedWeights(file)
    assert len(os.listdir("/proc/self/fd")) > before
    del weights
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_file(tmp_path) -> None:
    with pytest.raises(EngineError, match="nothing"):
        MappedWeights(tmp_path / "nothing.safetensors")


def test_an_engine_whose_weights_are_cut_says_so(tiny_engine, tmp_path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    llm = LLM(engine)
    params = SamplingParams(max_tokens=2)
    assert llm.generate("a", params)
    os.truncate(engine / "draft-0" / "weights.safetensors", 64)
    with pytest.raises(EngineError, match="draft-0"):
        llm.generate("a", params)


def test_a_process_that_reads_behind_the_end_says_why(file) -> None:
    """The library explains SIGBUS: what is cut between two checks cannot be an exception."""
    pytest.importorskip("specc.kernels.native")
    code = f"""
import os, pathlib, torch
from specc.kernels import native
from specc.runtime.mapped_weights import MappedWeights
native.load(native.build())
native.explain_bus_errors()
weights = MappedWeights(pathlib.Path({str(file)!r}))
os.truncate({str(file)!r}, 0)
weights["a"].sum()
"""
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert result.returncode == -7, result.stderr
    assert "cut while the engine was using them" in result.stderr
