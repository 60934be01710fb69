"""The library of the C++ operators, for tests that call them."""

from __future__ import annotations

import pytest

from specc.errors import CompilerError
from specc.kernels import native
from specc.system.cxx_compiler import find_compiler


def load_native() -> None:
    """Build and load it; a test is skipped where the machine has no compiler for it.

    A compiler that refuses the sources is a failure: a kernel that is broken must not skip its own
    tests.
    """
    try:
        find_compiler()
    except CompilerError as error:
        pytest.skip(str(error))
    native.load(native.build())
