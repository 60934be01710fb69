"""A second writer of one output is refused at once, and a dead one is in nobody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from specc.artifact.engine_writer import EngineWriter
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.errors import OutputError

WRITER = """
import sys
from specc.artifact.engine_writer import EngineWriter
with EngineWriter(sys.argv[1], force=len(sys.argv) > 2):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path):
    """A process that writes an engine, and goes on until it is told."""
    command = [sys.executable, "-P", "-c", WRITER, str(tmp_path / "engine")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_compilation_does_no_work(writer, tiny_models, tmp_path):
    phases: list[str] = []
    for force in (False, True):
        with pytest.raises(OutputError, match="is being written by another process"):
            build(
                tiny_models.target, None, tmp_path / "engine", CompileConfig(), force=force,
                listen=lambda event: phases.append(event.phase),
            )  # fmt: skip
    assert phases == []
    # the first one has lost nothing; another output is free
    (staging,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert staging.name.startswith(".engine.partial-")
    assert {path.name for path in tmp_path.iterdir()} == {staging.name, f"{staging.name}.lock"}
    with EngineWriter(tmp_path / "other"):
        pass


@pytest.mark.slow
def test_a_killed_writer_blocks_nobody(writer, tmp_path):
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    with EngineWriter(tmp_path / "engine"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_with_the_number_of_a_living_process(tmp_path):
    """Numbers come again: what counts is the lock."""
    (tmp_path / f".engine.partial-{os.getppid()}").mkdir()
    with EngineWriter(tmp_path / "engine"):
        pass


def test_a_leftover_whose_name_is_digits_alone(tmp_path):
    """Random names are hexadecimal: one in 300 looks like a number, and like no process."""
    (tmp_path / ".engine.partial-123456789012").mkdir()
    with EngineWriter(tmp_path / "engine"):
        pass
    assert list(tmp_path.iterdir()) == []
