"""A rank of a stage is lost: it is named, the open request gets an error, nobody is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from specc.artifact.directory import read_manifest
from specc.errors import EngineError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests import models
from tests.lossless import Zoo
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.ranks.lose_ranks import PHASES, SIGNALS, lose
from tests.runtime.ranks.test_stages import staged_path

KILL, STOP = SIGNALS


def cases() -> list[Any]:
    """Each stage of two, in every phase, and ranks of stages of two."""
    made: list[Any] = [
        ((1, 2), rank, number, phase, 1)
        for rank in (0, 1)
        for number in SIGNALS
        for phase in PHASES
    ]
    made += [((2, 2), rank, number, "verify", 1) for rank in (1, 2, 3) for number in SIGNALS]
    made += [((1, 3), 1, number, phase, 1) for number in SIGNALS for phase in ("prefill", "verify")]
    made += [
        ((1, 2), rank, number, phase, 4)
        for rank in (0, 1)
        for number in SIGNALS
        for phase in ("draft", "verify")
    ]
    return [
        pytest.param(
            *case,
            id=f"tp-{case[0][0]}-pp-{case[0][1]}-rank-{case[1]}-{case[2].name}-{case[3]}"
            + (f"-of-{case[4]}" if case[4] > 1 else ""),
        )
        for case in made
    ]


# the default tier loses a rank of a cut engine: test_cut_ranks.py
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rank", "number", "phase", "num_requests"), cases())
def test_a_rank_of_a_stage_is_lost(
    zoo: Zoo,
    shape: tuple[int, int],
    rank: int,
    number: signal.Signals,
    phase: str,
    num_requests: int,
) -> None:
    """Of several requests, one batch is in each stage: all of them get the error."""
    # two layers are too few for three stages
    engine = staged_path(zoo, *shape, name="llama" if shape[1] < 3 else "gemma3")
    lose(engine, shape[0] * shape[1], rank, number, phase, num_requests).check()


def test_a_file_of_a_stage_that_is_missing_or_another_stages(zoo: Zoo, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(staged_path(zoo, 1, 2), tmp_path / "engine"))
    first, second = (copy / name for name in read_manifest(copy).rank_files)
    assert [path.parent.name for path in (first, second)] == ["stage-0", "stage-1"]
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(EngineError) as caught:
        Engine.load(copy, ranks=OPTIONS)
    assert caught.value.found == f"{second} is missing"
    second.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(EngineError, match="is of another engine, or was altered"):
        Engine.load(copy, ranks=OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "local"), [(1, 1), (2, 2), (2, 1)])
def test_launches_of_several_hosts_meet_over_tcp(
    zoo: Zoo, tmp_path: Path, tensor: int, local: int
) -> None:
    """As torchrun starts them: `local` ranks on each host, with stages between or across hosts."""
    path, size = staged_path(zoo, tensor, 2), 2 * tensor
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    prompts = tmp_path / "prompts.jsonl"
    given = models.prompts()[1]
    prompts.write_text(json.dumps({"prompt_token_ids": given}) + "\n", encoding="utf-8")
    command = [sys.executable, "-P", "-m", "specc", "run", str(path), "--prompts", str(prompts)]
    command += ["--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--json"]
    command += ["--plan", "tree-3-2-1"]
    processes = [
        subprocess.Popen(
            [*command, "--oversubscribe"],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank % local),
                "LOCAL_WORLD_SIZE": str(local),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = "\n".join(text for _, text in said)
    assert [process.returncode for process in processes] == [0] * size, told
    assert [text for text, _ in said[1:]] == [""] * (size - 1)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    whole = Engine.load(staged_path(zoo, 1, 1))
    (wanted,) = LLM(whole, plan="tree-3-2-1").generate([given], params)
    assert json.loads(said[0][0])["outputs"][0]["token_ids"] == list(wanted.outputs[0].token_ids)
