"""The cache answers with what was put into it, or not at all; and it is the user's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specc.errors import CompilerError
from specc.system.cxx_compiler import find_compiler
from specc.system.file_cache import FileCache
from tests.file_limits import file_size_limit

NAME = "programs/key.pt2"


class Maker:
    """Makes a file and counts how often; the content may differ from time to time, as code does."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.count = 0
        self.seconds = seconds

    def __call__(self, scratch: Path) -> Path:
        self.count += 1
        time.sleep(self.seconds)
        made = scratch / "made"
        made.write_bytes(b"content %d " % self.count * 100)
        return made


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    return FileCache(tmp_path / "cache")


def files(cache: FileCache) -> list[str]:
    return sorted(str(p.relative_to(cache.root)) for p in cache.root.rglob("*") if p.is_file())


def test_a_file_is_made_once(cache: FileCache) -> None:
    maker = Maker()
    first = cache.obtain(NAME, maker)
    assert cache.obtain(NAME, maker) == first == cache.path(NAME).read_bytes()
    assert maker.count == 1
    assert files(cache) == [NAME, f"{NAME}.sha256"]
    command = ["sha256sum", "-c", "key.pt2.sha256"]
    assert subprocess.run(command, cwd=cache.path(NAME).parent).returncode == 0


@pytest.mark.parametrize("damage", ["empty", "cut", "altered", "no hash", "another hash", "absent"])
def test_a_damaged_file_is_made_again(cache: FileCache, damage: str) -> None:
    maker = Maker()
    data = cache.obtain(NAME, maker)
    path, hash_path = cache.path(NAME), cache.path(f"{NAME}.sha256")
    if damage == "no hash":
        hash_path.unlink()
    elif damage == "another hash":
        hash_path.write_bytes(b"\xff" * 70)
    elif damage == "absent":
        path.unlink()
    else:
        cut = {"empty": b"", "cut": data[:-1], "altered": data[:-1] + b"x"}
        path.write_bytes(cut[damage])
    assert cache.read(NAME) is None
    again = cache.obtain(NAME, maker)
    assert maker.count == 2
    assert again == cache.read(NAME) == path.read_bytes() != data


def test_of_many_one_makes_it(cache: FileCache) -> None:
    """Threads, each with its own open file of the lock, as processes have."""
    cache.obtain(NAME, Maker())
    cache.path(NAME).write_bytes(b"")
    maker, found = Maker(seconds=0.05), []
    threads = [
        threading.Thread(target=lambda: found.append(cache.obtain(NAME, maker))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert maker.count == 1
    assert found == [cache.path(NAME).read_bytes()] * 8
    assert files(cache) == [NAME, f"{NAME}.sha256"]


def test_another_file_does_not_wait(cache: FileCache) -> None:
    with cache._turn(NAME):
        assert cache.obtain("programs/other.pt2", Maker())


def test_directories_are_the_user_s(cache: FileCache) -> None:
    cache.obtain(NAME, Maker())
    for path in (cache.root, *cache.root.rglob("*")):
        if path.is_dir():
            assert path.stat().st_mode & 0o777 == 0o700, path


@pytest.mark.parametrize("place", ["", "programs"])
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_what_others_may_write_is_not_used(cache: FileCache, place: str, mode: int) -> None:
    maker = Maker()
    cache.obtain(NAME, maker)
    (cache.root / place).chmod(mode)
    for _ in range(2):
        with pytest.raises(CompilerError, match="others may write to the cache directory") as e:
            cache.obtain(NAME, maker)
        cache.path(NAME).unlink(missing_ok=True)
    assert str(cache.root / place) in e.value.found
    assert maker.count == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("place", ["", "programs"])
def test_another_user_s_cache_is_not_used(cache: FileCache, place: str) -> None:
    cache.obtain(NAME, Maker())
    os.chown(cache.root / place, 12345, -1)
    with pytest.raises(CompilerError, match="belongs to user 12345") as caught:
        cache.obtain(NAME, Maker())
    assert "SPECC_CACHE_DIR" in caught.value.do


def test_a_full_disk_leaves_the_old_file_or_none(cache: FileCache) -> None:
    def large(scratch: Path) -> Path:
        made = scratch / "made"
        made.write_bytes(b"x" * 5000)
        return made

    with file_size_limit(10), pytest.raises(OSError, match="too large"):
        cache.obtain(NAME, large)
    # the hash is longer than that
    with file_size_limit(10), pytest.raises(CompilerError) as caught:
        cache.obtain(
            NAME, lambda scratch: (scratch / "made").write_bytes(b"x") and scratch / "made"
        )
    assert "SPECC_CACHE_DIR" in caught.value.do
    assert files(cache) == []


KILLED = """
import sys, time
from pathlib import Path
from specc.system.file_cache import FileCache
def make(scratch):
    (scratch / "half").write_text("x")
    print("making", flush=True)
    time.sleep(60)
FileCache(Path(sys.argv[1])).obtain(sys.argv[2], make)
"""


def test_what_a_killed_process_left_goes_with_the_next_one(cache: FileCache) -> None:
    command = [sys.executable, "-P", "-c", KILLED, str(cache.root), NAME]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "making\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert any(name.endswith("half") for name in files(cache))
    maker = Maker()
    cache.obtain(NAME, maker)
    assert maker.count == 1
    assert files(cache) == [NAME, f"{NAME}.sha256"]


def test_a_damaged_compiler_script_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    compiler = find_compiler()
    monkeypatch.setenv("CXX", f"{compiler} -O1")
    script = Path(find_compiler())
    text = script.read_text()
    script.write_text("#!/bin/sh\ntouch planted\n")
    assert find_compiler() == str(script)
    assert script.read_text() == text
