"""Requests and parameters of a model as the Triton Inference Server hands them on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specc.errors import ConfigError, RequestError
from specc.runtime.triton.options import TritonOptions
from specc.runtime.triton.request import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOP_WORDS,
    read_request,
)
from specc.sampling.generation_config import SamplingDefaults
from specc.sampling.params import SamplingParams
from specc.server import config as serve_config
from specc.triton.tensors import INPUTS, OUTPUTS

ALL = [tensor.name for tensor in OUTPUTS]
DTYPES = {"STRING": object, "BOOL": bool, "FP32": np.float32, "INT32": np.int32, "UINT64": "u8"}
KINDS = {tensor.name: tensor.kind for tensor in INPUTS}


def read(parameters="", requested=ALL, shape=(1, -1), defaults={}, **values):  # noqa: B006
    tensors = {}
    for name, value in values.items():
        many = [v.encode() if isinstance(v, str) else v for v in np.atleast_1d(value).tolist()]
        tensors[name] = np.array(many, dtype=DTYPES[KINDS.get(name, "STRING")]).reshape(shape)
    return read_request(tensors, parameters, requested, SamplingDefaults(defaults))


def test_stops_are_limited_as_over_http():
    http = serve_config.MAX_STOP_STRINGS, serve_config.MAX_STOP_CHARACTERS
    assert http == (MAX_STOP_WORDS, MAX_STOP_CHARACTERS)
    assert serve_config.MAX_STOP_TOKEN_IDS == MAX_STOP_TOKEN_IDS


def test_text_alone():
    asked = read(text_input="hé")
    assert asked.prompt == "hé"
    assert asked.params == SamplingParams(stop=[])
    assert (asked.is_streamed, asked.echoed, asked.priority, asked.timeout_s) == (0, "", 0, None)
    assert asked.outputs == {"text_output", "finish_reason"}


def test_what_is_left_out_is_as_the_checkpoint_has_it():
    own = {"temperature": 0.5, "top_k": 7, "max_tokens": 9}
    asked = read(text_input="a", top_k=3, defaults=own)
    assert asked.params == SamplingParams(**own | {"top_k": 3}, stop=[])


@pytest.mark.parametrize("shape", [(-1,), (1, -1), (-1, 1)])
def test_all_options(shape):
    values = {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "seed": 2**62 + 1, "rule": "delta", "logprobs": 2, "ignore_eos": True,
        "prompt_logprobs": 3, "lora": "sql",
        "include_stop_str_in_output": True, "skip_special_tokens": False, "speculative": False,
        "min_tokens": 4, "allowed_token_ids": [3, 9],
    }  # fmt: skip
    asked = read(
        shape=shape,
        text_input="a",
        stop_words=["x", "", "yz"],
        stop_token_ids=[4, 5],
        bad_words=["a b", ""],
        logit_bias_ids=[7, 9],
        logit_bias_values=[-1.5, 2.0],
        guided_decoding_guide_type="regex",
        guided_decoding_guide="a+",
        prediction="b c",
        cache_salt="mine",
        priority=-3,
        timeout=1.5,
        stream=True,
        exclude_input_in_output=False,
        **values,
    )
    got = asked.params
    assert {name: getattr(got, name) for name in values} == values
    assert got.stop_strings == ("x", "yz")  # an empty one is none
    assert list(got.stop_token_ids) == [4, 5]
    assert (got.bad_words, got.logit_bias) == (["a b"], {7: -1.5, 9: 2.0})
    assert got.structured_outputs is not None
    assert (got.structured_outputs.kind, got.structured_outputs.text) == ("regex", "a+")
    assert (asked.priority, asked.timeout_s, asked.is_streamed) == (-3, 1.5, True)
    assert (asked.echoed, asked.prediction, asked.cache_salt) == ("a", "b c", "mine")
    assert {"logprobs", "cumulative_logprob", "prompt_logprobs"} <= set(asked.outputs)


def test_parameters_are_inputs_by_another_way():
    told = json.dumps({"id": "7", "triton_x": 1, "temperature": 1, "stop_words": "x", "seed": 3})
    asked = read(told, text_input="a")
    assert (asked.params.temperature, asked.params.seed) == (1, 3)
    assert asked.params.stop_strings == ("x",)


def test_outputs_follow_flags_or_what_the_client_names():
    asked = read(text_input="a", return_num_input_tokens=True, return_perf_metrics=False)
    assert asked.outputs == {"text_output", "finish_reason", "num_input_tokens"}
    asked = read(text_input="a", return_perf_metrics=True)
    assert {"acceptance_rate", "last_token_time_ns"} <= set(asked.outputs)
    asked = read(requested=["output_ids"], text_input="a", return_perf_metrics=True)
    assert asked.outputs == {"output_ids"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "neither text_input nor input_ids"),
        ({"text_input": "a", "input_ids": [1]}, "text_input and input_ids"),
        ({"text_input": ["a", "b"]}, r"text_input of shape \[1, 2\]"),
        ({"text_input": []}, r"text_input of shape \[1, 0\]"),
        ({"text_input": b"\xff"}, "text_input holds bytes"),
        ({"text_input": "a", "stop_words": [b"\xff"]}, "stop_words holds bytes"),
        ({"text_input": "a", "stop_words": ["ab"] * 17}, "17 stop_words of 34"),
        ({"text_input": "a", "stop_words": ["a" * 1025]}, "1 stop_words of 1025"),
        ({"text_input": "a", "stop_token_ids": [1] * 257}, "257 stop_token_ids"),
        ({"text_input": "a", "max_tokens": -1}, "max_tokens=-1"),
        ({"text_input": "a", "temperature": float("nan")}, "temperature=nan"),
        ({"text_input": "a", "stop_token_ids": [-1]}, "stop_token_ids="),
        ({"text_input": "a", "min_tokens": 17}, "min_tokens=17"),
        ({"text_input": "a", "logit_bias_ids": [1]}, "logit_bias_ids of 1"),
        (
            {"text_input": "a", "logit_bias_ids": [1, 1], "logit_bias_values": [1.0, 2.0]},
            "1 of them different",
        ),
        (
            {"text_input": "a", "logit_bias_ids": [1], "logit_bias_values": [float("nan")]},
            "logit_bias=",
        ),
        ({"text_input": "a", "seed": 2**63}, "seed="),
        ({"text_input": "a", "timeout": 0.0}, "timeout 0"),
        ({"text_input": "a", "timeout": float("inf")}, "timeout inf"),
        ({"text_input": "a", "guided_decoding_guide": "x"}, "guide_type None with"),
        ({"text_input": "a", "guided_decoding_guide_type": "regex"}, "'regex' without"),
        ({"text_input": "a", "guided_decoding_guide_type": "xml"}, "'xml'"),
        ({"input_ids": [1], "exclude_input_in_output": False}, "with input_ids"),
        ({"text_input": "a", "parameters": '{"x": 1}'}, "'x'"),
        ({"text_input": "a", "parameters": '{"max_tokens": "5"}'}, "max_tokens of type str"),
        ({"text_input": "a", "parameters": '{"max_tokens": true}'}, "max_tokens of type bool"),
        ({"text_input": "a", "parameters": '{"stream": 1}'}, "stream of type int"),
        ({"text_input": "a", "parameters": '{"text_input": "b"}'}, "as an input and as a param"),
        ({"text_input": "a", "parameters": '{"x": "un"quoted"}'}, "no JSON"),
    ],
)
def test_what_is_wrong_is_named(values, says):
    with pytest.raises(RequestError, match=says):
        read(**values)


def arguments(parameters=(), decoupled=True, kind="CPU", name="m_0_1", device="0"):
    config = {
        "model_transaction_policy": {"decoupled": decoupled},
        "parameters": {key: {"string_value": value} for key, value in dict(parameters).items()},
    }
    return {
        "model_config": json.dumps(config),
        "model_repository": "/models/m",
        "model_version": "3",
        "model_name": "m",
        "model_instance_kind": kind,
        "model_instance_name": name,
        "model_instance_device_id": device,
    }


def test_parameters_of_a_model():
    told = {"plan": "off", "max_num_seqs": "8", "num_threads": "2", "verify": "true"}
    options = TritonOptions.from_args(arguments(told | {"drain_s": "0.5", "on_fault": "stop"}), {})
    args = options.args
    assert str(args.engine) == "/models/m/3/engine"
    assert (args.plan, args.max_num_seqs, args.num_threads, args.verify) == ("off", 8, 2, True)
    assert (options.drain_s, options.stops_server) == (0.5, True)
    assert options.labels == {"model": "m", "version": "3", "instance": "m_0_1"}
    elsewhere = TritonOptions.from_args(arguments({"engine": "/e"}), {})
    assert str(elsewhere.args.engine) == "/e"


@pytest.mark.parametrize(
    ("changes", "seen", "devices"),
    [
        ({"kind": "CPU"}, None, ""),
        ({"kind": "MODEL"}, "0,1", None),
        ({"kind": "GPU", "device": "1"}, None, "1"),
        ({"kind": "GPU", "device": "1"}, "4,6", "6"),
        ({"name": "m_0_0", "parameters": {"gpu_device_ids": "0,1;2,3"}}, None, "0,1"),
        ({"name": "m_0_1", "parameters": {"gpu_device_ids": "0,1;2,3"}}, None, "2,3"),
        ({"name": "m", "parameters": {"gpu_device_ids": "1,0"}}, "GPU-a,GPU-b", "GPU-b,GPU-a"),
    ],
)
def test_devices_of_an_instance(changes, seen, devices):
    environ = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    options = TritonOptions.from_args(arguments(**changes), environ)
    assert options.devices == devices
    options.place(environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == (seen if devices is None else devices)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"decoupled": False}, "not decoupled"),
        ({"parameters": {"max_num_seq": "8"}}, "parameter max_num_seq"),
        ({"parameters": {"max_num_seqs": "0"}}, "max_num_seqs '0'"),
        ({"parameters": {"num_threads": "two"}}, "num_threads 'two'"),
        ({"parameters": {"drain_s": "-1"}}, "drain_s '-1'"),
        ({"parameters": {"verify": "yes"}}, "verify 'yes'"),
        ({"parameters": {"gpu_device_ids": "0;"}}, "gpu_device_ids"),
        ({"parameters": {"gpu_device_ids": "0"}}, "for instance 1"),
        ({"kind": "GPU", "device": "2"}, "device 2"),
    ],
)
def test_wrong_parameters_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        TritonOptions.from_args(arguments(**changes), {"CUDA_VISIBLE_DEVICES": "0,1"})
