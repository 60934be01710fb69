"""Names that `specc` itself has: lazy, listed, typed, and of the modules that define them."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import specc


@pytest.mark.parametrize("name", specc.__all__)
def test_names_are_those_of_their_modules(name):
    found = getattr(specc, name)
    # vLLM has two names for one class
    assert found.__name__ == {"AsyncLLMEngine": "AsyncLLM"}.get(name, name)
    assert found.__module__ == specc._EXPORTS[name]
    assert inspect.getdoc(found)


def test_lists_agree():
    """What is exported, listed, shown by dir(), and known to type checkers."""
    tree = ast.parse(Path(specc.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.asname
        for node in tree.body
        if isinstance(node, ast.If)
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert set(specc.__all__) == set(specc._EXPORTS) == typed
    assert set(specc.__all__) <= set(dir(specc))
    with pytest.raises(AttributeError, match="no attribute 'Enginee'"):
        specc.Enginee  # noqa: B018


def test_options_of_an_engine_load_no_torch():
    """They are for command lines and configuration, too, which are read before anything loads."""
    code = (
        "import sys; from specc import EngineArgs;"
        " args = EngineArgs('engine/', plan='off', max_num_seqs=2);"
        " assert (args.engine, args.plan, args.max_num_seqs) == ('engine/', 'off', 2);"
        " print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr
