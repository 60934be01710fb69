"""specc's Triton model on a real service, where engines fail, hang or go away."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from specc.runtime.constraints import grammars
from specc.runtime.core import EngineCore
from specc.runtime.llm import LLM
from specc.runtime.service.service import Service
from specc.runtime.triton import model as triton_model
from specc.runtime.triton import responses
from specc.runtime.triton.model import TritonModel
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from specc.triton.tensors import OUTPUTS
from tests.hostile_grammars import slow
from tests.runtime.conftest import build_engine
from tests.runtime.triton import utils as pb_utils

ALL = [tensor.name for tensor in OUTPUTS]


class Model(TritonModel):
    pb_utils = pb_utils


def arguments(engine, **parameters):
    config = {
        "model_transaction_policy": {"decoupled": True},
        "parameters": {
            key: {"string_value": str(value)}
            for key, value in {"engine": engine, "drain_s": 0.2, **parameters}.items()
        },
    }
    return {
        "model_config": json.dumps(config), "model_repository": "/m", "model_version": "1",
        "model_name": "m", "model_instance_kind": "MODEL", "model_instance_name": "m_0",
        "model_instance_device_id": "0",
    }  # fmt: skip


@pytest.fixture
def start(saved_engine) -> Iterator:
    pb_utils.MetricFamily.values.clear()
    pb_utils.Logger.lines.clear()
    models = []

    def begin(**parameters):
        model = Model()
        model.initialize(arguments(saved_engine.path, **parameters))
        models.append(model)
        return model

    yield begin
    for model in models:
        model.finalize()


def ask(text="abc", **values):
    kinds = {bool: bool, int: np.int32, float: np.float32, bytes: object}
    values = {"text_input": text} | values
    given = {n: v.encode() if isinstance(v, str) else v for n, v in values.items()}
    tensors = {n: np.array([[v]], dtype=kinds[type(v)]) for n, v in given.items()}
    return pb_utils.Request(ALL, **tensors)


def finish(*requests):
    for request in requests:
        assert request.sender.has_ended.wait(20)
    time.sleep(0.12)  # two looks at which requests are cancelled
    assert not any(request.sender.wrong_calls for request in requests)


def metric(name):
    return pb_utils.MetricFamily.values[f"specc:{name}"].value


def eventually(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_answers_are_what_the_engine_generates(start, saved_engine):
    want = LLM(saved_engine.path).generate(
        "abc", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    )[0]
    model = start()
    options = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "return_output_ids": True}
    options |= {"exclude_input_in_output": False}
    requests = [ask(stream=stream, **options) for stream in (True, False)]
    assert model.execute(requests) is None
    finish(*requests)
    for request in requests:
        values = [response.values for response in request.sender.responses]
        tokens = np.concatenate([v["output_ids"][0] for v in values]).tolist()
        assert tokens == want.outputs[0].token_ids
        assert all(v["output_ids"].dtype == np.int32 for v in values)
        text = b"".join(v["text_output"][0, 0] for v in values).decode()
        # the prompt comes once, however many responses there are
        assert text == "abc" + want.outputs[0].text
        assert values[-1]["finish_reason"].tolist() == [[b"length"]]
        assert not any("finish_reason" in v for v in values[:-1])
    assert len(requests[1].sender.responses) == 1 < len(requests[0].sender.responses)


def test_scores_of_the_prompt_come_once(start, saved_engine):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=2)
    want = LLM(saved_engine.path).generate("abc", params)[0].prompt_logprobs
    model = start()
    options = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
    request = ask(stream=True, prompt_logprobs=2, **options)
    model.execute([request, plain := ask(**options)])
    finish(request, plain)
    first, *others = [response.values for response in request.sender.responses]
    (found,) = first["prompt_logprobs"][0]
    assert json.loads(found) == [
        row and {str(token): pytest.approx(entry.logprob, abs=1e-5) for token, entry in row.items()}
        for row in want
    ]
    assert len(json.loads(found)) == 3
    assert others
    assert not any("prompt_logprobs" in v for v in others)
    assert "prompt_logprobs" not in plain.sender.responses[0].values


def test_predictions_and_salts(start, monkeypatch):
    """A prediction is verified, and a salt parts callers."""
    engine = build_engine(plans=[OFF, SpecPlan.from_widths((1,) * 4, ("suffix",))])
    service = Service(EngineCore(engine, OFF.name))
    monkeypatch.setattr(triton_model, "_load", lambda args: service)
    model, options = start(), {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    options |= {"text": "abcdefghijklmnopqrstu", "return_perf_metrics": True}

    def answer(**more):
        before = service.core.scheduler.stats.num_cached_tokens
        model.execute([request := ask(**options, **more)])
        finish(request)
        values = request.sender.responses[0].values
        cached = service.core.scheduler.stats.num_cached_tokens - before
        names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
        return values["text_output"][0, 0].decode(), [int(values[n][0, 0]) for n in names], cached

    text, counts, _ = answer(cache_salt="a")
    assert counts == [0, 0]
    found, counts, cached = answer(cache_salt="b", prediction=text + "zz")
    assert (found, counts, cached) == (text, [20, 2], 0)
    assert answer(cache_salt="a")[2] > 0


def test_counters_grow_by_what_is_new(start):
    model = start()
    for total in (2, 4):
        model.execute([request := ask(max_tokens=2, ignore_eos=True)])
        finish(request)
        assert eventually(lambda total=total: metric("generation_tokens_total") == total)


def test_execute_never_raises(start):
    model = start()
    broken = ask()
    broken.inputs = lambda: 1 / 0
    requests = [broken, ask(max_tokens=0), ask(text=""), ask(max_tokens=2)]
    model.execute(requests)
    finish(*requests)
    errors = [request.sender.error for request in requests]
    assert [e and e.code for e in errors] == ["internal", "invalid", "invalid", None]
    assert "by zero" not in str(errors[0])
    assert any("ZeroDivision" in line for line in pb_utils.Logger.lines)


def test_a_client_that_leaves_is_noticed_before_its_first_token(start, monkeypatch):
    # asleep, it would look for the next time when the test is over
    monkeypatch.setattr(responses, "_IDLE_S", 60.0)
    model = start()
    model.execute([first := ask(max_tokens=2)])
    finish(first)
    gate = threading.Event()
    advance = model._service.core.advance
    model._service.core.advance = lambda: gate.wait(10) and advance()
    time.sleep(0.3)  # nothing is open: the thread sleeps
    request = ask(max_tokens=60, ignore_eos=True)
    request.sender.is_gone = True
    model.execute([request])
    assert eventually(lambda: model._service._cancelled)
    gate.set()
    finish(request)
    assert request.sender.error.code == "cancelled"
    assert len(request.sender.responses) == 1
    assert eventually(lambda: metric("kv_cache_blocks_used") == 0)


def test_a_failed_step_costs_its_requests_only(start, monkeypatch):
    model = start()
    advance = model._service.core.advance
    failures = iter([True])

    def fail():
        has_run = advance()
        if next(failures, False):
            raise RuntimeError("/secret/path is broken")
        return has_run

    monkeypatch.setattr(model._service.core, "advance", fail)
    model.execute([request := ask()])
    finish(request)
    assert request.sender.error.code == "unavailable"
    assert "secret" not in str(request.sender.error)
    model.execute([after := ask(max_tokens=3)])
    finish(after)
    assert after.sender.error is None
    assert metric("healthy") == 1


@pytest.mark.parametrize("on_fault", ["refuse", "stop"])
def test_an_engine_that_failed_for_good_is_seen(start, monkeypatch, on_fault):
    model = start(on_fault=on_fault)
    killed = []
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))

    def fail():
        raise RuntimeError("broken")

    monkeypatch.setattr(model._service.core, "advance", fail)
    for _ in range(3):
        model.execute([request := ask()])
        finish(request)
        assert request.sender.error.code == "unavailable"
    assert eventually(lambda: metric("healthy") == 0)
    model.execute([request := ask()])
    finish(request)
    assert request.sender.error.code == "unavailable"
    assert "out of use" in str(request.sender.error)
    assert killed == ([(os.getppid(), signal.SIGTERM)] if on_fault == "stop" else [])


def test_too_many_are_refused(start):
    model = start(max_num_seqs=1, max_waiting=1)
    gate = threading.Event()
    advance = model._service.core.advance
    model._service.core.advance = lambda: gate.wait(10) and advance()
    requests = [ask(max_tokens=2) for _ in range(8)]
    model.execute(requests)
    gate.set()
    finish(*requests)
    codes = [r.sender.error.code for r in requests if r.sender.error]
    assert codes
    assert set(codes) == {"unavailable"}
    assert len(codes) < 8


@pytest.mark.parametrize("hangs", [False, True])
def test_unloading_ends_open_requests(start, hangs):
    """Those that run get `drain_s`; whatever hangs then is answered, too."""
    model = start()
    gate = threading.Event()
    wait = partial(gate.wait, 10) if hangs else partial(time.sleep, 0.05)
    model._service.core.advance = lambda: (wait(), True)[1]
    model.execute([request := ask(max_tokens=60, ignore_eos=True)])
    begin = time.monotonic()
    model.finalize()
    # the gate would open after 10 s
    assert time.monotonic() - begin < 8
    finish(request)
    assert request.sender.error.code == "unavailable"
    gate.set()
    model.finalize = lambda: None


def test_what_is_wrong_with_an_engine_is_in_the_log(tmp_path, saved_engine):
    for told in (arguments(tmp_path), arguments(saved_engine.path, plan="chain-9")):
        with pytest.raises(pb_utils.TritonModelException, match="needed: "):
            Model().initialize(told)


def test_devices_are_settled_before_torch(saved_engine):
    told = arguments(saved_engine.path, gpu_device_ids="0")
    assert "torch" in sys.modules
    with pytest.raises(pb_utils.TritonModelException, match="torch was imported before"):
        Model().initialize(told)


def guided(text):
    return ask(guided_decoding_guide_type="ebnf_grammar", guided_decoding_guide=text)


def test_a_grammar_is_compiled_while_others_are_served(start, monkeypatch):
    """Triton hands in a request when the one before it was taken."""
    limits = dataclasses.replace(grammars.LIMITS, cpu_seconds=0.7)
    monkeypatch.setattr(grammars, "LIMITS", limits)
    model = start()
    hostile, plain, other = guided(slow()), ask(max_tokens=4), guided('root ::= "ab"')
    model.execute([hostile, plain, other])
    finish(plain, other)
    assert not hostile.sender.has_ended.is_set()
    assert other.sender.error is None
    finish(hostile)
    assert hostile.sender.error.code == pb_utils.TritonError.INVALID_ARG
    assert eventually(lambda: not model._beginning)


def test_a_model_that_ends_compiles_nothing(start):
    model = start()
    hostile = guided(slow())
    model.execute([hostile])
    assert eventually(lambda: model._service.engine.grammars.children.pids)
    model.finalize()
    finish(hostile)
    assert hostile.sender.error.code == pb_utils.TritonError.UNAVAILABLE
