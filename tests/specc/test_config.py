"""Plans, compile options and sampling parameters: names, defaults, and errors of three lines."""

from __future__ import annotations

import dataclasses

import pytest

from specc.config import DTYPES, OFF, CompileConfig, SamplingParams, SpecPlan
from specc.errors import ConfigError, RequestError, SpeccError, TreeError
from specc.tree import TokenTree


def assert_three_lines(error: SpeccError, *found: str) -> None:
    for text in found:
        assert text in error.found
    assert error.needed
    assert error.do
    assert str(error) == f"found:  {error.found}\nneeded: {error.needed}\ndo:     {error.do}"


@pytest.mark.parametrize(
    ("widths", "name", "kind", "num_nodes"),
    [
        pytest.param((), "off", "off", 1, id="off"),
        pytest.param((1,), "chain-1", "chain", 2, id="chain-1"),
        pytest.param([1, 1, 1, 1], "chain-4", "chain", 5, id="chain-4"),
        pytest.param((3, 2, 1), "tree-3-2-1", "tree", 16, id="tree"),
        pytest.param([2], "tree-2", "tree", 3, id="one-level"),
        pytest.param((1, 2), "tree-1-2", "tree", 4, id="tree-that-starts-as-a-chain"),
        pytest.param((10, 1), "tree-10-1", "tree", 21, id="two-digits"),
    ],
)
def test_plan_of_widths(widths, name, kind, num_nodes):
    plan = SpecPlan.from_widths(widths)
    assert (plan.name, plan.kind, plan.widths) == (name, kind, tuple(widths))
    assert plan.tree.num_nodes == num_nodes
    assert plan.tree.widths == tuple(widths)


def test_off():
    assert SpecPlan.from_widths(()) == OFF
    assert OFF.tree == TokenTree((-1,))


def test_plans_are_keys():
    assert len({SpecPlan.from_widths([2, 1]), SpecPlan.from_widths((2, 1)), OFF}) == 2


@pytest.mark.parametrize("widths", [(0,), (2, -1), (1024,), (2,) * 10], ids=str)
def test_plan_of_a_bad_tree(widths):
    with pytest.raises(TreeError) as caught:
        SpecPlan.from_widths(widths)
    assert_three_lines(caught.value, ",".join(map(str, widths)))


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
        pytest.param({"block_size": -1}, "--block-size -1", id="block-negative"),
        pytest.param({"max_seq_len": 1}, "--max-seq-len 1", id="max-seq-len-1"),
        pytest.param({"max_seq_len": 0}, "--max-seq-len 0", id="max-seq-len-0"),
    ],
)
def test_compile_option_out_of_range(options, found):
    with pytest.raises(ConfigError) as caught:
        CompileConfig(**options)
    assert_three_lines(caught.value, found)


def test_sampling_defaults():
    params = SamplingParams()
    assert params.temperature == 0
    assert params.stop_strings == ()
    assert params.speculative
    assert not params.ignore_eos


@pytest.mark.parametrize(
    ("stop", "strings"),
    [
        pytest.param("end", ("end",), id="string"),
        pytest.param(["a", "bc"], ("a", "bc"), id="list"),
        pytest.param(("a",), ("a",), id="tuple"),
        pytest.param((), (), id="none"),
        pytest.param("\n\n", ("\n\n",), id="newlines"),
    ],
)
def test_stop_strings(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings


def test_stop_strings_are_a_copy():
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("")
    assert params.stop_strings == ("a",)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        pytest.param({"max_tokens": 0}, "max_tokens=0", id="max-tokens-0"),
        pytest.param({"max_tokens": -1}, "max_tokens=-1", id="max-tokens-negative"),
        pytest.param({"temperature": 0.7}, "temperature=0.7", id="temperature"),
        pytest.param({"temperature": -1.0}, "temperature=-1.0", id="temperature-negative"),
        pytest.param({"temperature": float("nan")}, "temperature=nan", id="temperature-nan"),
        pytest.param({"stop": ""}, "empty stop string", id="stop-empty"),
        pytest.param({"stop": ["a", ""]}, "empty stop string", id="stop-one-empty"),
    ],
)
def test_sampling_option_out_of_range(options, found):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert_three_lines(caught.value, found)


@pytest.mark.parametrize(
    "instance", [OFF, CompileConfig(), SamplingParams()], ids=lambda o: type(o).__name__
)
def test_options_are_frozen(instance):
    name = dataclasses.fields(instance)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(instance, name, None)
