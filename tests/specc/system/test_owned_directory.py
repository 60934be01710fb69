"""Directories go with their owners, also with those that are killed, and with no others."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from specc.system.owned_directory import owned_directory, remove_abandoned

HOLD = """
import sys
from pathlib import Path
from specc.system.owned_directory import owned_directory
with owned_directory(Path(sys.argv[1]), "mine-") as directory:
    (directory / "file").write_text("x")
    print(directory, flush=True)
    sys.stdin.read()
"""


def hold(parent: Path) -> tuple[subprocess.Popen, Path]:
    """A process that owns a directory."""
    command = [sys.executable, "-P", "-c", HOLD, str(parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_it_is_private_and_goes(tmp_path: Path) -> None:
    with owned_directory(tmp_path, "mine-") as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "a").mkdir()
        (directory / "a/b").write_text("x")
    assert names(tmp_path) == []
    with pytest.raises(ZeroDivisionError), owned_directory(tmp_path, "mine-"):
        _ = 1 / 0
    assert names(tmp_path) == []


def test_what_a_killed_owner_left_goes_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    killed, left = hold(tmp_path)
    living, kept = hold(tmp_path)
    (tmp_path / "other-1.lock").touch()
    (tmp_path / "mine-of-somebody").mkdir()
    (tmp_path / "mine-0123456789ab/made-again").mkdir(parents=True)
    killed.kill()
    killed.wait()
    try:
        assert left.exists(), "SIGKILL lets nobody clean up"
        with owned_directory(tmp_path, "mine-"):
            assert not left.exists()
            assert not (tmp_path / "mine-0123456789ab").exists(), "it has no lock"
            assert (kept / "file").exists()
            assert not left.with_name(f"{left.name}.lock").exists()
    finally:
        living.communicate("")
    assert names(tmp_path) == ["mine-of-somebody", "other-1.lock"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Where everybody may write, anybody may give such a name to what is not theirs."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / "mine-1.lock").symlink_to(precious / "file")
    (parent / "mine-2.lock").touch()
    (parent / "mine-2").symlink_to(precious)
    remove_abandoned(parent, "mine-")
    assert (precious / "file").read_text() == "x"


def test_many_at_once(tmp_path: Path) -> None:
    """Each cleans up before it begins: no one may take what another is about to use."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(20):
                with owned_directory(tmp_path, "mine-") as directory:
                    (directory / "file").write_text("x")
                    assert (directory / "file").exists()
        except Exception as error:  # what a thread raises is not the test's
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert names(tmp_path) == []
