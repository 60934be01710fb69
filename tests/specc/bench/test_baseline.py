"""The baseline: same prompts, same number of tokens, counted passes."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from specc.bench import baseline as bench_transformers
from specc.bench.baseline import ASSISTED, PLAIN, STATIC, TransformersContender, make_contenders
from specc.bench.engine import EngineContender, add_margins, tokenize
from specc.bench.rounds import Difference
from specc.errors import RequestError
from specc.runtime.engine import Engine
from specc.runtime.scheduling.prefix_cache import PrefixCache

PROMPTS = [[70, 71, 72, 73, 74], [80, 81], [90, 91, 92]]
CONSTANT_3 = {
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}


@pytest.fixture(scope="module")
def model(tiny_models):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_models.target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(tiny_engine) -> Engine:
    return Engine.load(tiny_engine, verify=False)


def one_by_one(prompts=PROMPTS) -> list[list[list[int]]]:
    return [[prompt] for prompt in prompts]


@pytest.fixture(scope="module")
def off_outputs(engine) -> list[list[int]]:
    return EngineContender(engine, "off", "off", one_by_one(), 20).run().outputs


def test_plain_generation_emits_what_the_engine_does(model, off_outputs):
    found = TransformersContender(PLAIN, model, one_by_one(), 20).run()
    assert found.outputs == off_outputs
    # the prompt's pass yields the first token, a step each other one
    assert found.num_steps == found.num_request_steps == 3 * 19
    assert found.num_decode_tokens == 3 * 19
    assert found.mean_acceptance_length is None
    assert 0 < found.first_token_s < found.elapsed_s
    assert 0 < found.decode_s < found.elapsed_s


def test_a_batch_is_padded_on_the_left(model, off_outputs):
    found = TransformersContender(PLAIN, model, [PROMPTS[:2], PROMPTS[2:]], 20).run()
    assert found.outputs == off_outputs
    assert found.num_steps == 2 * 19
    assert found.num_request_steps == 3 * 19


def test_end_of_sequence_does_not_end_the_output(tiny_models):
    """Every token is made EOS, as a checkpoint may say: the work stays the same."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(tiny_models.target, dtype=torch.float32)
    model.config.eos_token_id = list(range(260))
    model.generation_config = GenerationConfig(eos_token_id=list(range(260)), do_sample=True)
    found = TransformersContender(PLAIN, model, one_by_one(), 12).run()
    assert [len(tokens) for tokens in found.outputs] == [12] * 3


def test_passes_of_assisted_generation_are_counted(model, off_outputs):
    """With the target as its own draft, each pass yields 4 tokens: 17 take 5 passes."""
    draft = copy.deepcopy(model)
    found = TransformersContender(ASSISTED, model, one_by_one(), 17, draft, CONSTANT_3).run()
    assert found.outputs == [tokens[:17] for tokens in off_outputs]
    assert found.mean_acceptance_length == 17 / 5
    assert found.num_steps == 3 * 4


class OnGpu:
    """A module that says it is on a GPU, with what transformers compiled for it."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self._compiled_call = object()


class Tensors:
    """Stands for what a failing run holds on the device."""


def fail_with(
    monkeypatch: pytest.MonkeyPatch, failures: dict[str, BaseException]
) -> list[weakref.ref]:
    """Let runs of these names fail; returns references to what they held."""
    held: list[weakref.ref] = []

    class Contender:
        def __init__(self, name: str, *args: object, **options: object) -> None:
            self.name = name

        def run(self) -> None:
            tensors = Tensors()
            tensors.cycle = tensors  # type: ignore[attr-defined]
            held.append(weakref.ref(tensors))
            if self.name in failures:
                raise failures.pop(self.name)

    monkeypatch.setattr(bench_transformers, "TransformersContender", Contender)
    return held


ERRORS = (
    (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "CUDA out of memory.)"),
    (RuntimeError("\ncudagraph: captured\nmore"), "RuntimeError: cudagraph: captured)"),
    (BackendCompilerFailed(print, ValueError("odd"), None), "BackendCompilerFailed: "),
    (AssertionError(), "AssertionError"),
    (ValueError("other vocabularies\nmore"), "refuses it (other vocabularies)"),
)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        pytest.param(
            name,
            *error,
            id=f"{name}-{type(error[0]).__name__}",
            marks=[pytest.mark.slow] if (i + j) % 2 else [],
        )
        for i, name in enumerate((ASSISTED, STATIC))
        for j, error in enumerate(ERRORS)
    ],
)
def test_one_that_fails_leaves_the_others(monkeypatch, name, error, words):
    """A note with the error's first line; what the run held and what was compiled is gone."""
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    held = fail_with(monkeypatch, {name: error})
    del error
    target = OnGpu()
    found, (note,) = make_contenders(target, OnGpu(), [[[1]]], 4, 3)
    assert [item.name for item in found] == [n for n in (PLAIN, ASSISTED, STATIC) if n != name]
    assert note.startswith(f"{name} is left out: ")
    assert words in note
    assert "more" not in note
    assert "Tried" not in note
    assert resets == [1]
    assert not hasattr(target, "_compiled_call")
    assert len(held) == 2


def test_what_a_failed_run_held_is_freed(monkeypatch):
    """Cycles too, which otherwise live until somebody collects."""
    held = fail_with(monkeypatch, {STATIC: RuntimeError("no memory")})
    gc.disable()
    try:
        found, _ = make_contenders(OnGpu(), None, [[[1]]], 4, 0)
        assert [item.name for item in found] == [PLAIN]
        assert held[0]() is None
    finally:
        gc.enable()


def test_an_interrupt_is_no_failure(monkeypatch):
    fail_with(monkeypatch, {STATIC: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        make_contenders(OnGpu(), None, [[[1]]], 4, 0)


def test_every_run_computes_its_prompts(engine, off_outputs, monkeypatch):
    """Rows that a run before left are not looked for: nobody else is given any."""
    contender = EngineContender(engine, "off", "off", one_by_one([[*PROMPTS[0] * 8]]), 4)
    first = contender.run()

    def find(self, request):
        raise AssertionError("a prompt is looked for among earlier ones")

    monkeypatch.setattr(PrefixCache, "find", find)
    assert contender.run().outputs == first.outputs


def test_the_margin_is_that_of_the_targets_logits(engine, model, off_outputs):
    differences = [Difference(1, 0, 3, 4), Difference(1, 7, 3, 4), Difference(2, 19, 3, 4)]
    found = add_margins(engine, PROMPTS, off_outputs, differences)
    # nothing was decoded before the first token
    assert (found[0].margin, found[0].is_near_tie) == (None, None)
    for item in found[1:]:
        ids = PROMPTS[item.prompt] + off_outputs[item.prompt][: item.position]
        with torch.inference_mode():
            best = model(torch.tensor([ids])).logits[0, -1].topk(2).values
        assert item.margin == pytest.approx(float(best[0] - best[1]), abs=1e-5)
        assert item.is_near_tie is (item.margin < 1e-4)
    assert engine.steps["off"].before_accept is None


def test_a_tie_is_called_one(engine, off_outputs, monkeypatch):
    """Two equal logits on top."""
    monkeypatch.setattr(
        "specc.bench.engine._best_logits", lambda *args: torch.tensor([8.0, 8.0 - 1e-5])
    )
    (found,) = add_margins(engine, PROMPTS, off_outputs, [Difference(0, 5, 3, 4)])
    assert found.is_near_tie is True


def test_prompts_must_leave_room_for_equal_work(engine):
    ids = tokenize(engine, ["ab", "abc"], 93)
    assert [len(item) for item in ids] == [2, 3]
    with pytest.raises(RequestError) as caught:
        tokenize(engine, ["ab", "abc"], 94)
    assert "prompt 1 has 3 tokens" in caught.value.found
