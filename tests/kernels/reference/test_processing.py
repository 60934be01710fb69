"""Oracles of what a row of logits is sampled from, and of the noise that decides."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specc.kernels.reference import sampling
from specc.kernels.reference.processing import penalize_reference, process_reference
from specc.sampling.rows import Rule
from tests.kernels.slow_sampling import (
    noise_of,
    slow_penalties,
    slow_probabilities,
    values_of,
    words_of,
)


def grid_of_options() -> list[tuple[float, float, int, float]]:
    return [
        (temperature, min_p, top_k, top_p)
        for temperature in (0.25, 1.0, 2.0)
        for min_p in (0.0, 0.04, 0.3, 1.0)
        for top_k in (0, 1, 3, 8, 200)
        for top_p in (1.0, 0.9137, 0.513, 0.0)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["ties", "distinct", "masked"])
def test_processing_equals_float64(kind, dtype):
    """Multiples of 1/4 tie and are exact in bfloat16, after division by the temperature, too."""
    logits = torch.randint(-12, 13, (20, 11)) / 4
    if kind == "distinct":
        logits = torch.stack([torch.randperm(11) / 4 for _ in range(20)])
    if kind == "masked":
        logits[torch.rand(20, 11) < 0.6] = -torch.inf
        logits[:, 4] = 0.5
    num_compared = num_dropped = 0
    for temperature, min_p, top_k, top_p in grid_of_options():
        values = values_of(20, temperature=temperature, min_p=min_p, top_p=top_p)
        words = words_of(Rule.COUPLED, 20, top_k=top_k)
        scores = process_reference(logits.to(dtype), values, words)
        assert scores.dtype == torch.float32
        found = [slow_probabilities(x, temperature, min_p, top_k, top_p) for x in logits.tolist()]
        known = [row for row, wanted in enumerate(found) if wanted is not None]
        wanted, got = torch.tensor([found[row] for row in known]), scores[known]
        torch.testing.assert_close(got.softmax(dim=-1), wanted, rtol=2e-6, atol=1e-9)
        assert torch.equal(got > -torch.inf, wanted > 0)
        num_compared += len(known)
        num_dropped += int((wanted == 0).sum())
    assert num_compared > 0.9 * 20 * 240
    assert num_dropped > num_compared


def test_rows_have_their_own_options():
    logits = torch.randn(3, 11)
    values = torch.cat([values_of(temperature=t, top_p=p) for t, p in ((0.5, 0.6), (1.3, 1.0))])
    values = torch.cat([values, values_of(temperature=0.0, top_p=0.1, min_p=0.9)])
    words = torch.cat([words_of(Rule.MSS, top_k=k) for k in (0, 4, 1)])
    scores = process_reference(logits, values, words)
    for b in range(3):
        alone = process_reference(logits[b : b + 1], values[b : b + 1], words[b : b + 1])
        assert torch.equal(scores[b], alone[0])
    assert torch.equal(scores[2], logits[2])


PENALTIES = [
    {"repetition": 1.3, "presence": 0.0, "frequency": 0.0},
    {"repetition": 0.8, "presence": 0.25, "frequency": 0.0},
    {"repetition": 1.0, "presence": -0.5, "frequency": 0.375},
    {"repetition": 1.7, "presence": 0.5, "frequency": -0.25},
]


@pytest.mark.parametrize("options", PENALTIES, ids=str)
@pytest.mark.parametrize("num_prompt", [0, 3, 8, 50])
def test_penalties_are_those_of_vllm(options, num_prompt):
    generator = random.Random(num_prompt)
    for dtype in (torch.float32, torch.bfloat16):
        context = [generator.randrange(7) for _ in range(8)]
        logits = torch.randn(12).to(dtype)
        got = penalize_reference(
            logits, torch.tensor([*context, -1, 12, 500]), num_prompt, values_of(**options)[0]
        )
        wanted = slow_penalties(logits.tolist(), context, num_prompt, options)
        torch.testing.assert_close(got, torch.tensor(wanted), rtol=1e-6, atol=1e-6)


def test_noise_of_purposes_and_columns_differs():
    vocab, counter = 700, torch.arange(700)
    purposes = [
        0,
        *(sampling.purpose_of_column(p, torch.tensor(c)) for p in (1, 2) for c in (0, 1)),
    ]
    assert [int(p) for p in purposes] == [0, 1, 9, 2, 10]
    rows = torch.stack([noise_of(5, 9, int(p), vocab) for p in purposes])
    assert len(rows.unique()) > 0.99 * rows.numel()
    default = sampling.gumbel_reference(torch.tensor(5), torch.tensor(9), counter)
    assert torch.equal(rows[0], default)
    correlation = torch.corrcoef(rows) - torch.eye(5)
    assert float(correlation.abs().max()) < 5 / math.sqrt(vocab)


@pytest.mark.parametrize(("seed", "offset", "column"), [(5, 9, 0), (-7, 2**33 + 1, 40), (1, -3, 2)])
def test_uniform_is_word_zero_of_counter_zero(seed, offset, column):
    mask = 2**32 - 1
    words = sampling.philox_reference(
        tuple(torch.tensor([c]) for c in (0, 2 + 8 * column, offset & mask, (offset >> 32) & mask)),
        tuple(torch.tensor([k & mask]) for k in (seed, seed >> 32)),
    )
    found = sampling.uniform_reference(*(torch.tensor(x) for x in (seed, offset, column)))
    assert float(found) == pytest.approx((int(words[0]) + 0.5) * 2.0**-32, rel=1e-6)
    assert found.dtype == torch.float32


def test_uniforms_fill_the_unit_interval():
    numbers = sampling.uniform_reference(
        torch.tensor(3), torch.arange(4000)[:, None], torch.arange(5)
    ).flatten()
    assert 0 < float(numbers.min()) < 1e-3
    assert 1 - 1e-3 < float(numbers.max()) < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 60
