"""Children end with their parent, and with what they have started."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from specc.system.child_processes import ChildProcesses


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
    result = ChildProcesses().run(["sh", "-c", "echo $A; echo no >&2; exit 3"], {"A": "b"})
    assert (result.returncode, result.stdout, result.stderr) == (3, "b\n", "no\n")


def test_the_end_takes_grandchildren_along(tmp_path: Path) -> None:
    children = ChildProcesses()
    results: list[subprocess.CompletedProcess] = []
    command = ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"]
    thread = threading.Thread(target=lambda: results.append(children.run(command)))
    thread.start()
    grandchild = wait_for(tmp_path / "pid")
    children.end()
    thread.join(10)
    assert results[0].returncode < 0
    wait_until_gone(grandchild)
    # and nothing begins after the end
    assert children.run(["touch", str(tmp_path / "late")]).returncode < 0
    assert not (tmp_path / "late").exists()


def test_a_killed_parent_takes_its_child_along(tmp_path: Path) -> None:
    child = f"""
import os, time
from specc.system.child_processes import end_with_parent
end_with_parent()
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
time.sleep(60)
"""
    parent = (
        "import sys; from specc.system.child_processes import ChildProcesses as C;"
        "C().run(sys.argv[1:])"
    )
    command = [sys.executable, "-P", "-c", parent, sys.executable, "-P", "-c", child]
    process = subprocess.Popen(command)
    pid = wait_for(tmp_path / "pid")
    process.kill()
    process.wait()
    wait_until_gone(pid)


def test_a_child_whose_parent_has_gone_before_it_looked(tmp_path: Path) -> None:
    """It takes seconds to import torch, and the parent may be killed meanwhile."""
    child = f"""
import os, time
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
while os.getppid() == int(os.environ["SPECC_PARENT_PROCESS"]):
    time.sleep(0.01)
from specc.system.child_processes import end_with_parent
end_with_parent()
open({str(tmp_path / "late")!r}, "w").close()
"""
    code = (
        "import sys; from specc.system.child_processes import ChildProcesses as C;"
        "C().run(sys.argv[1:])"
    )
    command = [sys.executable, "-P", "-c", code, sys.executable, "-P", "-c", child]
    process = subprocess.Popen(command)
    pid = wait_for(tmp_path / "pid")
    process.kill()
    process.wait()
    wait_until_gone(pid)
    assert not (tmp_path / "late").exists()
