"""Compile options: defaults, ranges, and errors of three lines."""

from __future__ import annotations

import dataclasses

import pytest

from specc.config import CompileConfig
from specc.dtypes import DTYPES
from specc.errors import ConfigError, SpeccError
from specc.speculation.plans import OFF, SpecPlan


def assert_three_lines(error: SpeccError, *found: str) -> None:
    for text in found:
        assert text in error.found
    assert error.needed
    assert error.do
    assert str(error) == f"found:  {error.found}\nneeded: {error.needed}\ndo:     {error.do}"


def test_compile_defaults():
    config = CompileConfig()
    assert config.plans == ()
    assert config.dtype in DTYPES
    assert config.max_seq_len is None


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": "bfloat16"}, id="bf16"),
        pytest.param({"max_batch_size": 1}, id="batch-1"),
        pytest.param({"prefill_chunk": 1}, id="chunk-1"),
        pytest.param({"max_logits_mb": 1}, id="logits-1"),
        pytest.param({"block_size": 0}, id="dense"),
        pytest.param({"block_size": 1}, id="block-1"),
        pytest.param({"max_seq_len": 2}, id="shortest"),
        pytest.param({"plans": (SpecPlan.from_widths((2, 2)), OFF)}, id="plans"),
    ],
)
def test_compile_options_at_their_limits(options):
    config = CompileConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(
    ("options", "found"),
    [
        pytest.param({"dtype": "float64"}, "float64", id="dtype"),
        pytest.param({"dtype": ""}, "dtype", id="dtype-empty"),
        pytest.param({"max_batch_size": 0}, "--max-batch-size 0", id="batch-0"),
        pytest.param({"max_batch_size": -3}, "--max-batch-size -3", id="batch-negative"),
        pytest.param({"prefill_chunk": 0}, "--prefill-chunk 0", id="chunk-0"),
        pytest.param({"max_logits_mb": 0}, "--max-logits-mb 0", id="logits-0"),
        pytest.param({"max_logits_mb": (1 << 20) + 1}, "--max-logits-mb", id="logits-too-many"),
        pytest.param({"block_size": -1}, "--block-size -1", id="block-negative"),
        pytest.param({"max_seq_len": 1}, "--max-seq-len 1", id="max-seq-len-1"),
        pytest.param({"max_seq_len": 0}, "--max-seq-len 0", id="max-seq-len-0"),
    ],
)
def test_compile_option_out_of_range(options, found):
    with pytest.raises(ConfigError) as caught:
        CompileConfig(**options)
    assert_three_lines(caught.value, found)


@pytest.mark.parametrize(
    "instance",
    [OFF, CompileConfig()],
    ids=lambda o: type(o).__name__,
)
def test_options_are_frozen(instance):
    name = dataclasses.fields(instance)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(instance, name, None)
