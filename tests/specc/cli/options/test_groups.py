"""Options that commands share: what dataclasses make of them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from specc.cli.options.bench import BenchOptions, ShapesOptions
from specc.cli.options.load import LoadOptions, TrafficOptions
from specc.cli.options.sampling import SamplingOptions
from specc.errors import ConfigError
from specc.runtime.engine_args import EngineArgs
from specc.sampling.generation_config import _OPTIONS
from specc.sampling.params import SamplingParams


def test_sampling_is_as_params_have_it():
    assert SamplingParams(**SamplingOptions().given()) == SamplingParams()
    assert SamplingOptions().given().keys().isdisjoint(_OPTIONS.values())
    options = SamplingOptions(
        temperature=0.5, logit_bias=("3=1.5",), stop=("a", "b"), bad_words=("c",), seed=0, top_k=4
    )
    params = SamplingParams(**options.given())
    assert params.logit_bias == {3: 1.5}
    assert (params.stop_strings, params.bad_words) == (("a", "b"), ("c",)) or (
        list(params.stop_strings),
        list(params.bad_words),
    ) == (["a", "b"], ["c"])
    assert options.given("seed", "min_p") == {"seed": 0}
    assert options.unused_when_greedy() == ["--seed", "--top-k"]


def test_every_sampling_option_is_a_field_of_the_params():
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {field.name for field in dataclasses.fields(SamplingOptions)} <= known


@pytest.mark.parametrize(
    ("kind", "values", "found"),
    [
        (BenchOptions, {"tokens": 1}, "tokens=1"),
        (BenchOptions, {"num_prompts": 0}, "num_prompts=0"),
        (BenchOptions, {"against": ("vllm",)}, "--against vllm"),
        (ShapesOptions, {"context": 0}, "context=0"),
        (LoadOptions, {"num_requests": 0}, "num_requests=0"),
        (LoadOptions, {"timeout": 0.0}, "timeout=0.0"),
        (LoadOptions, {"warmup": -1}, "warmup=-1"),
    ],
)
def test_a_value_outside_is_refused_before_anything_loads(kind, values, found):
    with pytest.raises(ConfigError) as caught:
        kind(**values)
    assert caught.value.found == found


def test_settings_of_a_load_say_all_but_secrets_and_outputs():
    args = EngineArgs("engine/", max_num_seqs=3, num_threads=1, backend="eager", verify=False)
    options = LoadOptions(plot=Path("p.svg"), api_key="secret", json="r.json", args=args)
    settings = options.settings()
    assert "secret" not in str(settings)
    assert not {"json", "args", "engine", "num_prompts"} & settings.keys()
    of_engine = {name: settings[name] for name in ("max_num_seqs", "threads", "backend", "verify")}
    assert of_engine == {"max_num_seqs": 3, "threads": 1, "backend": "eager", "verify": False}
    assert (settings["plot"], settings["output_tokens"]) == ("p.svg", "128")


@pytest.mark.parametrize(
    ("name", "wrong", "needed"),
    [
        ("rounds", 0, "1 or more"),
        ("num_requests", 0, "1 or more"),
        ("max_concurrency", 0, "1 or more"),
        ("timeout", 0.0, "above 0"),
        ("timeout", math.nan, "above 0"),
        ("warmup", -1, "0 or more"),
    ],
)
def test_the_ranges_of_a_load_are_said_by_its_options(name, wrong, needed):
    """What they are made into has no ranges of its own."""
    with pytest.raises(ConfigError, match=f"{name}=.*\n.*{needed}"):
        LoadOptions(**{name: wrong})
    with pytest.raises(ConfigError, match=name):
        TrafficOptions(**{name: wrong})
