"""Jobs in forks: like processes of their own, and gone when they should be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specc.system.child_processes import ChildProcesses
from specc.system.warm_process import WarmProcess
from tests.specc.system.test_child_processes import wait_for, wait_until_gone

# imports are counted by a line in a file
MODULE = """
import os, subprocess, sys, tempfile, threading, time
with open(os.environ["IMPORTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
at_import = os.environ.get("SETTING")
tempfile.gettempdir()

def main(arguments):
    what = arguments[0]
    if what == "say":
        own = os.environ.get("SETTING"), tempfile.gettempdir()
        print(arguments[1:], at_import, *own, flush=True)
        subprocess.run(["sh", "-c", "echo grandchild; echo error >&2"], check=True)
        assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1
    elif what == "exit":
        sys.exit(int(arguments[1]))
    elif what == "fail":
        raise ValueError("a failure")
    elif what == "signal":
        os.kill(os.getpid(), int(arguments[1]))
    elif what == "wait":
        child = subprocess.Popen(["sleep", "60"])
        with open(arguments[1] + ".new", "w") as file:
            file.write(f"{child.pid}")
        os.rename(arguments[1] + ".new", arguments[1])
        child.wait()
"""


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmProcess]:
    (tmp_path / "a_warm_module.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("IMPORTS", str(tmp_path / "imports"))
    warm = WarmProcess("a_warm_module", {"SETTING": "of the import"})
    yield warm
    warm.close()


def imports(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "imports").read_text().split()]


def test_a_job_has_its_own_environment_and_output(warm: WarmProcess, tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}").mkdir()
        result = warm.run(
            ["say", f"{i}"],
            {"SETTING": f"of job {i}", "TMPDIR": f"{tmp_path}/{i}"},
            ChildProcesses(),
        )
        assert result.returncode == 0
        wanted = f"['{i}'] of the import of job {i} {tmp_path}/{i}\ngrandchild\nerror\n"
        assert result.stdout == wanted
    assert len(imports(tmp_path)) == 1


def test_ends_of_jobs(warm: WarmProcess) -> None:
    children = ChildProcesses()
    assert warm.run(["exit", "3"], {}, children).returncode == 3
    assert warm.run(["nothing"], {}, children).returncode == 0
    assert warm.run(["signal", f"{signal.SIGSEGV:d}"], {}, children).returncode == -signal.SIGSEGV
    failed = warm.run(["fail"], {}, children)
    assert failed.returncode == 1
    assert failed.stdout.endswith("ValueError: a failure\n")


def test_jobs_run_side_by_side(warm: WarmProcess, tmp_path: Path) -> None:
    children = ChildProcesses()
    with ThreadPoolExecutor(6) as pool:
        waiting = [
            pool.submit(warm.run, ["wait", f"{tmp_path}/{i}"], {}, children) for i in range(3)
        ]
        sleepers = [wait_for(tmp_path / f"{i}") for i in range(3)]
        others = [pool.submit(warm.run, ["exit", f"{i}"], {}, children) for i in range(20)]
        assert [other.result().returncode for other in others] == list(range(20))
        # those that end later than others that began later
        os.kill(sleepers[1], signal.SIGTERM)
        assert waiting[1].result().returncode == 0
        assert not waiting[0].done()
        children.end()
        assert [waiting[i].result(20).returncode for i in (0, 2)] == [-signal.SIGKILL] * 2
    for sleeper in sleepers:
        wait_until_gone(sleeper)
    # and nothing begins after the end
    assert warm.run(["exit", "0"], {}, children).returncode == -signal.SIGKILL
    assert len(imports(tmp_path)) == 1


def test_a_server_that_is_killed_ends_its_jobs_and_is_started_again(
    warm: WarmProcess, tmp_path: Path
) -> None:
    children = ChildProcesses()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(warm.run, ["wait", f"{tmp_path}/0"], {}, children)
        sleeper = wait_for(tmp_path / "0")
        os.kill(imports(tmp_path)[0], signal.SIGKILL)
        # the pipe is open until whatever the job has started ends
        os.kill(sleeper, signal.SIGKILL)
        assert waiting.result(10).returncode == -signal.SIGKILL
    assert warm.run(["exit", "0"], {}, children).returncode == 0
    assert len(set(imports(tmp_path))) == 2


def test_the_end_of_the_server_ends_its_jobs(warm: WarmProcess, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(warm.run, ["wait", f"{tmp_path}/0"], {}, ChildProcesses())
        sleeper = wait_for(tmp_path / "0")
        warm.close()
        assert waiting.result(10).returncode == -signal.SIGKILL
    wait_until_gone(sleeper)
    wait_until_gone(imports(tmp_path)[0])


def test_a_killed_parent_takes_server_and_jobs_along(warm: WarmProcess, tmp_path: Path) -> None:
    code = (
        "import sys; from specc.system.child_processes import ChildProcesses;"
        "from specc.system.warm_process import WarmProcess;"
        "WarmProcess('a_warm_module', {}).run(['wait', sys.argv[1]], {}, ChildProcesses())"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", code, f"{tmp_path}/0"])
    sleeper = wait_for(tmp_path / "0")
    process.kill()
    process.wait()
    wait_until_gone(sleeper)
    wait_until_gone(imports(tmp_path)[0])


def test_a_module_that_cannot_be_imported(tmp_path: Path) -> None:
    warm = WarmProcess("no_such_module", {})
    result = warm.run([], {}, ChildProcesses())
    assert result.returncode == 1
    assert "No module named 'no_such_module'" in result.stdout
    warm.close()


def test_an_interrupt_ends_the_job(warm: WarmProcess, tmp_path: Path) -> None:
    """In the thread that waits for it."""
    main = threading.get_ident()

    def interrupt() -> None:
        wait_for(tmp_path / "0")
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        warm.run(["wait", f"{tmp_path}/0"], {}, ChildProcesses())
    thread.join()
    wait_until_gone(wait_for(tmp_path / "0"))
    assert warm.run(["exit", "0"], {}, ChildProcesses()).returncode == 0
