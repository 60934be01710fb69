"""Low-rank terms of adapters: the oracle, and the kernel, whose rows are what they are alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.kernels.more_calls import random_lora


def dense(arguments: dict[str, Tensor]) -> Tensor:
    """By matrices as large as the weight, token by token."""
    x, base = arguments["input"].double(), arguments["base"].double()
    out, start = base.clone(), 0
    pieces, scales = arguments["pieces"].tolist(), arguments["scales"].tolist()
    for (adapter, column, columns, row, rank), scale in zip(pieces, scales, strict=True):
        delta = torch.zeros(base.shape[1], x.shape[1], dtype=torch.float64)
        up = arguments["up"][start : start + rank * columns].view(rank, columns).double()
        start += rank * columns
        delta[column : column + columns] = (
            scale * up.T @ arguments["down"][row : row + rank].double()
        )
        own = arguments["adapters"] == adapter
        out += own * (x @ delta.T)
    return out


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_terms(implementation, dtype, seed):
    arguments = random_lora(random.Random(seed), dtype, tokens=11)
    found, wanted = implementation.add_lora(**arguments), dense(arguments)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    scale = wanted.abs().max()
    assert ((found.double() - wanted).abs() <= tolerance * scale).all()
    # not by chance: terms are as large as the product
    assert (found.float() - arguments["base"].float()).abs().max() > 0.1 * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_what_it_is_alone(implementation, dtype):
    """Whatever adapters its neighbors have, and how many there are."""
    arguments = random_lora(random.Random(3), dtype, tokens=23, num_adapters=3)
    together = implementation.add_lora(**arguments)
    for token in range(23):
        own = slice(token, token + 1)
        alone = {name: arguments[name][own] for name in ("base", "input", "adapters")}
        assert torch.equal(implementation.add_lora(**arguments | alone), together[own])
    none = arguments["adapters"][:, 0] < 0
    assert none.any()
    assert torch.equal(together[none], arguments["base"][none])


def test_the_kernel_has_the_same_bits_on_any_number_of_threads(native_operators):
    arguments = random_lora(random.Random(5), torch.float32, tokens=40, wide=True)
    before = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(native_operators.add_lora(**arguments))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_adapters_without_a_piece(implementation):
    """Beside this product; they have one beside another."""
    arguments = random_lora(random.Random(3), torch.float32, tokens=4)
    for number in (99, -2, 2**31 - 1):
        arguments["adapters"].fill_(number)
        assert torch.equal(implementation.add_lora(**arguments), arguments["base"])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pieces", lambda x: x[0, 1].fill_(1000)),
        ("pieces", lambda x: x[0, 3].fill_(1000)),
        ("pieces", lambda x: x[-1, 4].fill_(-1)),
        ("up", lambda x: x.resize_(1)),
        ("up", lambda x: x.resize_(100_000).zero_()),
        ("scales", lambda x: x.resize_(x.numel() + 1)),
    ],
    ids=["column", "row", "rank", "few", "many", "scales"],
)
def test_what_reaches_beyond_is_refused(native_operators, name, change):
    """Engines are anybody's files."""
    arguments = random_lora(random.Random(3), torch.float32, tokens=4)
    change(arguments[name])
    with pytest.raises(RuntimeError):
        native_operators.add_lora(**arguments)
