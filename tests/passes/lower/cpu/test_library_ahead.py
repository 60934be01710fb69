"""The operators' library is built beside what comes before it, and ends with that."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from specc.compiler import build as compiler
from specc.compiler.backends.eager import BACKEND
from specc.config import CompileConfig
from specc.errors import CompilerError
from specc.kernels import native
from specc.passes.lower.cpu import lower
from specc.passes.lower.cpu.lower import library_ahead
from specc.system.child_processes import ChildProcesses


def test_what_builds_it_ends_with_the_block(monkeypatch):
    began, code = threading.Event(), []

    def build(children: ChildProcesses) -> bytes:
        began.set()
        code.append(children.run(["sleep", "30"]).returncode)
        return b""

    monkeypatch.setattr(native, "build_library", build)
    with library_ahead():
        assert began.wait(60)  # beside this block
    assert code == [-9]


def test_an_error_is_left_out(monkeypatch):
    """Nor is it printed: what needs the library says it."""
    untold: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", untold.append)
    tried = threading.Event()

    def build(children: ChildProcesses) -> bytes:
        tried.set()
        raise CompilerError("g++ failed", "a compiler", "set CXX")

    monkeypatch.setattr(native, "build_library", build)
    with library_ahead():
        assert tried.wait(60)
    assert not untold


def test_a_program_that_fails_does_not_wait_for_it(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    began, asked, codes = threading.Event(), threading.Event(), []
    build = native.build_library

    def build_library(children: ChildProcesses) -> bytes:
        if threading.current_thread().name != "specc-library":
            assert began.wait(60)
            asked.set()
        return build(children)

    def compile_it(compiler, scratch, children):
        began.set()
        codes.append(children.run(["sleep", "30"]).returncode)
        raise CompilerError("g++ was killed", "a compiler", "try again")

    def fail(program, children):
        # what copies the library is about to wait for it
        assert asked.wait(60)
        raise CompilerError("no such program", "another", "write it")

    monkeypatch.setattr(native, "_compile", compile_it)
    monkeypatch.setattr(native, "build_library", build_library)
    monkeypatch.setattr(lower, "compile_package", fail)
    monkeypatch.setattr(lower, "program_to_json", lambda program: {})
    monkeypatch.setattr(lower, "CPU_PHASES", ())
    packages = [lower.CpuPackage(None, tmp_path / "program.pt2")]
    with library_ahead(), pytest.raises(CompilerError, match="no such program"):
        lower.lower_cpu(packages, tmp_path / "library.so")
    # both were killed, or not begun any more
    assert set(codes) == {-9}


def test_what_needs_it_waits_for_what_was_begun(monkeypatch, tmp_path):
    """One build, whoever asks."""
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    began, go_on, built = threading.Event(), threading.Event(), []

    def compile_it(compiler, scratch, children):
        built.append(threading.current_thread().name)
        began.set()
        assert go_on.wait(60)
        made = scratch / native.LIBRARY_NAME
        made.write_bytes(b"made once")
        return made

    monkeypatch.setattr(native, "_compile", compile_it)
    with library_ahead():
        assert began.wait(60)
        threading.Timer(0.2, go_on.set).start()
        assert native.build_library(ChildProcesses()) == b"made once"
    assert built == ["specc-library"]


def test_a_compilation_begins_it_before_it_traces(monkeypatch, tiny_models, tmp_path):
    events: list[str] = []

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        events.append("ahead")
        yield
        events.append("end")

    monkeypatch.setattr(type(BACKEND), "ahead", ahead)
    compiler.build(
        tiny_models.target,
        None,
        tmp_path / "engine",
        CompileConfig(backend="eager", max_seq_len=64),
        listen=lambda event: events.append(event.phase),
    )
    assert events.index("check models") < events.index("ahead") < events.index("load models")
    assert events[-1] == "end"
