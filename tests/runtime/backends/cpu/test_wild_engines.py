"""Engines in which somebody has changed numbers, words and tensors: refused or run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path

import pytest

from specc.config import CompileConfig
from specc.errors import SpeccError
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.conftest import TinyModels
from tests.specc.artifact.hostile_engines import HOSTILE, copy_engine, numbers, replaced, write

# what a change may take until it is refused, or has written six tokens
MOST_S = 60
_REFUSED, _RAN, _FAULT = 10, 11, 12


@pytest.fixture(scope="module")
def tiny(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plans = (SpecPlan.from_widths((2, 1)),)
    config = CompileConfig(plans=plans, max_seq_len=96, max_batch_size=4, backend="cpu")
    path = tmp_path_factory.mktemp("wild") / "tiny"
    return engines.build(tiny_models.target, tiny_models.draft, path, config)


def _change(engine: Path, rng: random.Random) -> str:
    """Change a file, so that its hash fits; what was changed."""
    names = sorted(
        str(path.relative_to(engine))
        for path in engine.rglob("*")
        if path.suffix in (".json", ".safetensors") and "tokenizer" not in path.name
    )
    name = rng.choice(names)
    content = (engine / name).read_bytes()
    places = list(numbers(data := json.loads(content))) if name.endswith(".json") else []
    if places and rng.random() < 0.8:
        for _ in range(rng.choice((1, 1, 1, 3))):
            value = rng.choice((*HOSTILE, rng.randrange(300), 1 << rng.randrange(64)))
            data = replaced(data, place := rng.choice(places), value)
            # a number may have become none
            places = list(numbers(data))
            if not places:
                break
        write(engine, name, data)
        return f"{name} {place} {value!r}"
    # any byte: of a tensor, of a header, of a word of JSON
    raw = bytearray(content)
    end = len(raw) if name.endswith(".json") or rng.random() < 0.5 else min(len(raw), 2048)
    for _ in range(rng.choice((1, 2, 8))):
        raw[rng.randrange(end)] = rng.randrange(256)
    if rng.random() < 0.1:
        del raw[rng.randrange(len(raw)) :]
    write(engine, name, bytes(raw))
    return f"{name} bytes"


def _run(engine: Path) -> int:
    try:
        llm = LLM(engine, backend="cpu")
        llm.generate([[1, 2, 3, 4, 5]] * 2, SamplingParams(temperature=0.0, max_tokens=6))
    except SpeccError:
        return _REFUSED
    return _RAN


def _outcome(engine: Path) -> int:
    """Exit code of a process that runs it; a signal's number, negative."""
    child = os.fork()
    if child == 0:
        code = _FAULT
        try:
            signal.alarm(MOST_S)
            code = _run(engine)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_changed_engines_are_refused_or_run(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`make sanitize` with SPECC_WILD_ENGINES=10000 sees what no exit code tells."""
    outcomes: dict[int, int] = {_REFUSED: 0, _RAN: 0}
    # a first run loads what all others share
    assert _run(tiny) == _RAN
    faults: list[str] = []
    for seed in range(int(os.environ.get("SPECC_WILD_ENGINES", "40"))):
        engine = copy_engine(tiny, tmp_path / str(seed))
        changed = _change(engine, random.Random(seed))
        outcome = _outcome(engine)
        shutil.rmtree(engine)
        if outcome in outcomes:
            outcomes[outcome] += 1
        else:
            faults.append(f"{seed}: {changed}: {outcome}, {capfd.readouterr().err[-300:]}")
    assert not faults, "\n".join(faults)
    # some change nothing that is computed, or say what could have been said
    assert min(outcomes.values()) > 0
