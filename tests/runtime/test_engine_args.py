"""How an engine is opened: one dataclass, whoever asks."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from specc.errors import ConfigError, EngineError, RequestError
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.engine import Engine
from specc.runtime.engine_args import AsyncEngineArgs, EngineArgs
from specc.runtime.engine_checks import check_cut
from specc.runtime.llm import LLM
from specc.runtime.policies.base import FixedPolicy
from specc.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"num_threads": 0}, "num_threads 0"),
        ({"num_threads": 1 + len(os.sched_getaffinity(0))}, "num_threads "),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": True}, "seed=True"),
        ({"max_logprobs": 21}, "max_logprobs=21"),
        ({"max_waiting": 0}, "max_waiting=0"),
    ],
)
def test_a_value_that_no_engine_has_is_refused_before_it_loads(values, found):
    with pytest.raises(ConfigError) as caught:
        AsyncEngineArgs("/no/such/engine", **values)
    assert caught.value.found.startswith(found)


def test_vllms_names_are_taken():
    args = EngineArgs.of_engine(
        model="engine/", enable_prefix_caching=False, trust_remote_code=True, dtype="auto"
    )
    assert args == EngineArgs("engine/", shares_prefixes=False, dtype="auto")
    # None is what it is without the name
    assert EngineArgs.of_engine(engine="e", enable_prefix_caching=None).shares_prefixes


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "neither engine nor model"),
        ({"engine": "a", "model": "b"}, "model='b'"),
        ({"engine": "a", "data_parallel_size": 2}, "data_parallel_size=2"),
        ({"engine": "a", "max_waiting": 5}, "max_waiting=5"),
    ],
)
def test_what_there_is_not_is_answered(given, found):
    with pytest.raises(ConfigError, match=found):
        EngineArgs.of_engine(**given)


@pytest.mark.parametrize(
    ("given", "needed", "do"),
    [
        ({"kv_cache_dtype": "int8"}, "compiled for", "--kv-cache-dtype"),
        ({"quantization": "awq"}, "compiled with", "--quantize"),
    ],
)
def test_what_there_is_by_another_name_is_said(given, needed, do):
    with pytest.raises(ConfigError) as caught:
        EngineArgs.of_engine(engine="a", **given)
    assert needed in caught.value.needed
    assert do in caught.value.do


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_the_number_of_ranks_and_stages_is_the_engines(name):
    manifest = SimpleNamespace(dtype="float32", tensor_parallel_size=2, stages=("a", "b"))
    engine = SimpleNamespace(manifest=manifest, max_seq_len=64)
    for given in (None, 2):
        check_cut(engine, **{name: given})
    for given in (1, 4):
        with pytest.raises(ConfigError, match=f"{name}={given}, and an engine that was cut for 2"):
            check_cut(engine, **{name: given})
    manifest.tensor_parallel_size, manifest.stages = 1, ()
    check_cut(engine, **{name: 1})
    with pytest.raises(ConfigError, match=f"{name}=2, and an engine that was cut for 1"):
        check_cut(engine, **{name: 2})


def test_a_checkpoint_is_no_engine(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="compile it first"):
        EngineArgs(tmp_path).load()
    with pytest.raises(EngineError, match="a model of the hub"):
        EngineArgs("owner/model").load()
    with pytest.raises(ConfigError, match="an engine of type int"):
        EngineArgs(5).load()  # type: ignore[arg-type]


def test_a_core_runs_as_the_options_say(saved_engine):
    args = EngineArgs(
        saved_engine.path, "chain-4", max_num_seqs=1, shares_prefixes=False, max_model_len=40
    )
    core = args.make_core()
    assert core.engine.cache.shape.max_num_seqs == 1
    core.requests.make([1] * 38, SamplingParams(temperature=0, max_tokens=2))
    with pytest.raises(RequestError, match="max_seq_len is 40"):
        core.requests.make([1] * 40, SamplingParams(temperature=0, max_tokens=1))
    with pytest.raises(ConfigError, match="max_model_len=4000"):
        EngineArgs(saved_engine.path, max_model_len=4000).load()


def test_where_weights_are_is_asked_of_the_engine(saved_engine):
    for mmap, name in ((True, "--mmap"), (False, "--no-mmap")):
        with pytest.raises(ConfigError, match=f"{name} with backend eager"):
            EngineArgs(saved_engine.path, mmap=mmap).load()


def test_adaptive_verification_asks_for_goodput_by_name(saved_engine):
    engine = Engine.load(saved_engine.path)
    for options, found in (
        ({"plan": "chain-4"}, "the policy fixed"),
        ({"policy": FixedPolicy("chain-4")}, "a policy of type FixedPolicy"),
    ):
        with pytest.raises(ConfigError, match=f"--adaptive-verification, and {found}"):
            EngineArgs(engine, adapts_verification=True, **options).make_core()
    with LLM(engine, policy="goodput", adapts_verification=True) as llm:
        output = llm.generate(
            [[3, 4, 5]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        )[0]
        assert output.outputs[0].token_ids == saved_engine.greedy([3, 4, 5], 9)


def test_a_confidence_threshold_asks_for_a_drafter_that_has_one(saved_engine):
    engine, found = Engine.load(saved_engine.path), r"threshold 0\.5, and the plan chain-4\n"
    with pytest.raises(ConfigError, match=found):
        EngineArgs(engine, "chain-4", confidence_threshold=0.5).make_core()
    with pytest.raises(ConfigError, match=found):
        LLM(engine, plan="chain-4", confidence_threshold=0.5)
    for value in (-0.1, 1.1):
        with pytest.raises(ConfigError, match=f"confidence_threshold={value}"):
            EngineArgs(engine, confidence_threshold=value)
    LLM(engine, plan="chain-4", confidence_threshold=0.0).close()


def test_options_of_loading_come_before_it(saved_engine):
    engine = Engine.load(saved_engine.path)
    assert EngineArgs(engine, "off", shares_prefixes=False).load() is engine
    own = inspect.signature(Engine.load).parameters.keys() - {"cls", "path", "ranks"}
    flags = dict.fromkeys(("verify", "overlaps", "oversubscribes"), True)
    values = {"capture": CaptureLimits(), "backend": "eager", "num_threads": 1} | flags
    for name in own:
        options: dict[str, Any] = {name: values.get(name, 3)}
        with pytest.raises(ConfigError, match=f"{name}, and an Engine that is loaded"):
            EngineArgs(engine, **options).load()
    with pytest.raises(ConfigError, match=r"(?s)max_num_seqs, offload_weights, and .*pass them"):
        LLM(engine, max_num_seqs=2, offload_weights="1GB")


def test_options_of_an_engine_that_was_loaded_by_them(saved_engine):
    args = AsyncEngineArgs(saved_engine.path, "off", max_num_seqs=1, num_threads=1, max_waiting=3)
    loaded = args.of_loaded(args.load())
    assert (loaded.plan, loaded.max_waiting, loaded.max_num_seqs) == ("off", 3, None)
    assert loaded.load() is loaded.engine


def test_llm_opens_what_the_options_name(saved_engine):
    with LLM.from_engine_args(EngineArgs(saved_engine.path, "off", max_num_seqs=1)) as llm:
        assert llm.engine.cache.shape.max_num_seqs == 1
        assert not llm.get_metrics().num_spec_steps


def test_every_option_of_llm_is_a_field():
    of_vllm = {"model", "enable_prefix_caching", "vllm"}
    names = inspect.signature(LLM).parameters.keys() - of_vllm
    assert names <= {field.name for field in fields(EngineArgs)}


def test_options_are_read_without_torch():
    """Triton settles the devices of a process, and --help answers, before torch loads."""
    code = (
        "import sys; from specc.runtime.engine_args import AsyncEngineArgs;"
        "AsyncEngineArgs('e', num_threads=1); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
