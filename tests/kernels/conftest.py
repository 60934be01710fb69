"""Both implementations of each operator: the oracle, and the C++ that a process may load.

Loading the C++ holds for the rest of the process: `specc::` is the C++ from then on. Here the
oracles are therefore operators of a namespace of their own, with the same schemas and fakes, and
what a test calls depends on no test that ran before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specc.kernels.ops import of_cpu
from tests.native_library import load_native

_ORACLES = torch.library.Library("specc_reference", "DEF")

for _operator in of_cpu():
    _ORACLES.define(_operator.schema)
    _ORACLES.impl(_operator.name, _operator.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specc_reference::{_operator.name}", _operator.fake, lib=_ORACLES)


@pytest.fixture(scope="session")
def reference_operators() -> Any:
    return torch.ops.specc_reference


@pytest.fixture(scope="session")
def native_operators() -> Any:
    load_native()
    return torch.ops.specc_cpu


@pytest.fixture(scope="session")
def operators(native_operators: Any) -> Any:
    return native_operators


@pytest.fixture
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture(
    scope="module",
    params=["reference_operators", "native_operators"],
    ids=["reference", "native"],
)
def implementation(request: pytest.FixtureRequest) -> Any:
    """Namespace of operators; a test that takes it runs once with each."""
    return request.getfixturevalue(request.param)
