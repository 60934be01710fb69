"""The compiler refuses a C++ function that is not what its operator's schema says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from specc.system.cxx_compiler import find_compiler
from tests.kernel_flags import SOURCE_DIR


def said(tmp_path: Path, function: str, name: str) -> str:
    """Errors of a source with one operator."""
    source = tmp_path / "operator.cpp"
    source.write_text(
        f'#include "operator.h"\nnamespace specc {{\n{function}\n'
        f'SPECC_OPERATOR("{name}", call);\n}}\n'
    )
    command = [find_compiler(), "-std=c++20", "-fsyntax-only", "-I", str(SOURCE_DIR), str(source)]
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.default(
    "void call(const Tensor&, const Tensor&, const Tensor&, const Tensor&) {}-commit_kv"
)
@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("void call(const Tensor&, const Tensor&, const Tensor&, const Tensor&) {}", "commit_kv"),
        ("Tensor call(const Tensor& x, const Tensor*, int64_t) { return x; }", "other::linear"),
    ],
)
def test_what_fits_is_compiled(tmp_path, function, name):
    name = name if "::" in name else f"specc::{name}"
    assert said(tmp_path, function, name) == ""


@pytest.mark.default("void call(const Tensor&, const Tensor&, const Tensor&, int64_t) {}")
@pytest.mark.parametrize(
    "function",
    [
        # an argument less, one that may be absent, a number of another kind, a result
        "void call(const Tensor&, const Tensor&, const Tensor&) {}",
        "void call(const Tensor&, const Tensor&, const Tensor&, const Tensor*) {}",
        "void call(const Tensor&, const Tensor&, const Tensor&, int64_t) {}",
        "Tensor call(const Tensor& x, const Tensor&, const Tensor&, const Tensor&) { return x; }",
    ],
)
def test_what_differs_is_refused(tmp_path, function):
    errors = said(tmp_path, function, "specc::commit_kv")
    assert "specc::commit_kv has other arguments than its schema" in errors


def test_what_no_table_knows_is_refused(tmp_path):
    errors = said(tmp_path, "void call(const Tensor&) {}", "specc::nobody")
    assert "specc::nobody has other arguments than its schema" in errors
