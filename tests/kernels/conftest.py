"""Both implementations of each operator: the oracle, and the C++ that a process may load.

Loading the C++ holds for the rest of the process: `specc::` is the C++ from then on. Here the
oracles are therefore operators of a namespace of their own, with the same schemas and fakes, and
what a test calls depends on no test that ran before it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.kernels import ops
from specc.kernels.reference import commit, core, latent, slab_rows
from specc.kernels.reference.block_mass import block_mass_reference
from tests.native_library import load_native

NAMES = (
    "tree_attention", "attend_expanded", "linear", "tree_expand", "accept_winners", "commit_kv",
    "tree_rows", "commit_rows", "next_tokens", "write_rows", "take_rows",
)  # fmt: skip
_ORACLES = torch.library.Library("specc_reference", "DEF")

for _name in NAMES:
    _schema = str(getattr(ops, _name)._schema)
    _ORACLES.define(_schema.removeprefix("specc::"))
    _oracle = f"{_name}_reference"
    _module = next(m for m in (core, commit, latent, slab_rows) if hasattr(m, _oracle))
    _ORACLES.impl(_name, getattr(_module, _oracle), "CompositeExplicitAutograd")
    torch.library.register_fake(f"specc_reference::{_name}", ops.FAKES[_name], lib=_ORACLES)
_ORACLES.define(str(ops.block_mass._schema).removeprefix("specc::"))
_ORACLES.impl("block_mass", block_mass_reference, "CompositeExplicitAutograd")


@pytest.fixture(scope="session")
def reference_operators() -> Any:
    return torch.ops.specc_reference


@pytest.fixture(scope="session")
def native_operators() -> Any:
    load_native()
    return torch.ops.specc_cpu


@pytest.fixture(
    scope="module",
    params=["reference_operators", "native_operators"],
    ids=["reference", "native"],
)
def implementation(request: pytest.FixtureRequest) -> Any:
    """Namespace of operators; a test that takes it runs once with each."""
    return request.getfixturevalue(request.param)
