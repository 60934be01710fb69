"""One engine under several `LLM`s, and one that is replaced while an `LLM` runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.artifact.directory import read_manifest
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest_entries import FileEntry
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.system.files import hash_file

PROMPTS = [[5, 6, 7, 8], [40, 41], [9] * 7]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROCESS = """
import json, sys
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
llm = LLM(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
outputs = llm.generate(json.loads(sys.argv[2]), params)
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def generate(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_engine, tmp_path / "engine")


def replace(engine: Path) -> None:
    """As a compilation with --force does, with other weights."""
    manifest = read_manifest(engine)
    other = shutil.copytree(engine, engine.parent / "other")
    for model in manifest.models:
        file = other / model.weights_file
        weights = load_file(file)
        generator = torch.Generator().manual_seed(3)
        mixed = {
            key: value + torch.randn(value.shape, generator=generator)
            for key, value in weights.items()
        }
        file.unlink()
        save_file(mixed, file)
    with EngineWriter(engine, force=True) as writer:
        for name in manifest.files:
            file = other / name
            writer.link_file(file, name, FileEntry(hash_file(file), file.stat().st_size))
        writer.commit(manifest)
    shutil.rmtree(other)


def test_two_in_one_process(engine: Path) -> None:
    expected = generate(LLM(engine))
    one, two = LLM(engine), LLM(engine, plan="off")
    assert generate(one) == generate(two) == expected
    # each has caches of its own, also where requests of the other are under way
    streams = zip(one.stream(PROMPTS[0], PARAMS), two.stream(PROMPTS[0], PARAMS), strict=True)
    found = [(mine.token_id, other.token_id) for mine, other in streams]
    assert found == [(token, token) for token in expected[0]]


@pytest.mark.slow
def test_two_processes(engine: Path) -> None:
    expected = generate(LLM(engine))
    command = [sys.executable, "-P", "-c", PROCESS, str(engine), json.dumps(PROMPTS)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        found, _ = process.communicate("go\n", timeout=120)
        assert json.loads(found) == expected
        assert process.returncode == 0


def test_an_engine_that_is_replaced_while_it_runs(engine: Path) -> None:
    """A process that runs the old one keeps it: a file that is mapped outlives its name."""
    llm = LLM(engine)
    expected = generate(llm)
    replace(engine)
    assert generate(llm) == expected
    new = LLM(engine)
    assert generate(new) != expected, "it is another engine"
    assert generate(llm) == expected
    shutil.rmtree(engine)
    assert generate(llm) == expected
