"""Weights in mapped files: shared, never copied, and checked while in use."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from specc.errors import EngineError
from specc.runtime.backends.program_files import MappedWeights
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams


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
    params = SamplingParams(temperature=0, max_tokens=2)
    assert llm.generate("a", params)
    os.truncate(engine / "draft-0" / "weights.safetensors", 64)
    with pytest.raises(EngineError, match="draft-0"):
        llm.generate("a", params)


# importing torch takes a second, so one process does it, and forks those that die
FORKS = """
import faulthandler, json, os, pathlib, signal, sys, torch
from specc.kernels import native
from specc.runtime.backends.program_files import MappedWeights
native.load()
root, ends = pathlib.Path(sys.argv[1]), {}
for name, code in json.load(sys.stdin).items():
    pid = os.fork()
    if not pid:
        os.dup2(os.open(root / name / "stderr", os.O_WRONLY | os.O_CREAT), 2)
        path, other = (root / name / file for file in ("weights.safetensors", "other.safetensors"))
        weights, others = MappedWeights(path), MappedWeights(other)
        exec(code)
        os._exit(0)
    ends[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(ends))
"""
# what a process does, and what it says before SIGBUS ends it
EXPLAINED = "cut while the engine was using them"
DEATHS = {
    "watched": (
        "native.watch_memory(weights['a'])\nos.truncate(path, 0)\nweights['a'].sum()",
        [1, 0],
    ),
    "last-byte": (
        "native.watch_memory(weights['a'])\nos.truncate(path, 8192)\nweights['a'][-1].item()",
        [1, 0],
    ),
    "another-file": (
        "native.watch_memory(weights['a'])\nos.truncate(other, 0)\nothers['a'].sum()",
        [0, 0],
    ),
    "forgotten": (
        "native.watch_memory(weights['a'])\nnative.forget_memory(weights['a'])\n"
        "os.truncate(path, 0)\nweights['a'].sum()",
        [0, 0],
    ),
    "watched-twice": (
        "native.watch_memory(weights['a'])\nnative.watch_memory(weights['a'])\n"
        "native.forget_memory(weights['a'])\nos.truncate(path, 0)\nweights['a'].sum()",
        [1, 0],
    ),
    "sent": (
        "native.watch_memory(weights['a'])\nos.kill(os.getpid(), signal.SIGBUS)",
        [0, 0],
    ),
    "handler-before": (
        "faulthandler.enable()\nnative.watch_memory(weights['a'])\n"
        "os.truncate(path, 0)\nweights['a'].sum()",
        [1, 1],
    ),
    "handler-before-another-file": (
        "faulthandler.enable()\nnative.watch_memory(weights['a'])\n"
        "os.truncate(other, 0)\nothers['a'].sum()",
        [0, 1],
    ),
    # it hands on by raising the signal, which has no address; nobody calls the other forever
    "handler-after": (
        "native.watch_memory(weights['a'])\nfaulthandler.enable()\n"
        "native.watch_memory(weights['b'])\nos.truncate(path, 0)\nweights['a'].sum()",
        [0, 1],
    ),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Name → how the process ended, and what it said."""
    pytest.importorskip("specc.kernels.native")
    root = tmp_path_factory.mktemp("deaths")
    for death in DEATHS:
        (root / death).mkdir()
        for file in ("weights.safetensors", "other.safetensors"):
            save_file({"a": torch.arange(4096.0), "b": torch.ones(3)}, root / death / file)
    result = subprocess.run(
        [sys.executable, "-P", "-c", FORKS, str(root)],
        input=json.dumps({death: code for death, (code, _) in DEATHS.items()}),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {
        death: (status, (root / death / "stderr").read_text())
        for death, status in json.loads(result.stdout).items()
    }


@pytest.mark.parametrize("death", DEATHS)
def test_a_process_that_reads_beyond_the_end_says_why(ends, death) -> None:
    """What is cut between two checks cannot be an exception; any other SIGBUS is none of ours."""
    counts = DEATHS[death][1]
    status, text = ends[death]
    assert status == -signal.SIGBUS, text
    assert [text.count(part) for part in (EXPLAINED, "Fatal Python error")] == counts
    if counts == [0, 0]:
        assert text == ""
