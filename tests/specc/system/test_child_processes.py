"""Children end with their parent, and with what they have started."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from specc.system.child_processes import run_child


def wait_for(path: Path) -> int:
    """A process id that a shell writes."""
    for _ in range(500):
        if path.exists() and (text := path.read_text().strip()):
            return int(text)
        time.sleep(0.02)
    raise AssertionError(f"no {path}")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> None:
    for _ in range(500):
        if not is_running(pid):
            return
        time.sleep(0.02)
    raise AssertionError(f"{pid} runs")


def test_output_and_environment() -> None:
    result = run_child(["sh", "-c", "echo $A; echo no >&2; exit 3"], {"A": "b"})
    assert (result.returncode, result.stdout, result.stderr) == (3, "b\n", "no\n")


def run_in_child(*command: str) -> subprocess.Popen[bytes]:
    code = "import sys; from specc.system.child_processes import run_child; run_child(sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-P", "-c", code, *command], stderr=subprocess.DEVNULL)


def test_an_interrupt_takes_grandchildren_along(tmp_path: Path) -> None:
    process = run_in_child("sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    grandchild = wait_for(tmp_path / "pid")
    process.send_signal(signal.SIGINT)
    process.wait()
    wait_until_gone(grandchild)


def test_a_killed_parent_takes_its_child_along(tmp_path: Path) -> None:
    child = f"""
import os, time
from specc.system.child_processes import die_with_parent
die_with_parent()
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
time.sleep(60)
"""
    process = run_in_child(sys.executable, "-P", "-c", child)
    pid = wait_for(tmp_path / "pid")
    process.kill()
    process.wait()
    wait_until_gone(pid)
