"""Compiling grammars of strangers: what it may cost, and that nobody else pays."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from specc.errors import OverloadError, RequestError
from specc.runtime.constraints import grammar_child, grammars, mask_maker
from specc.runtime.constraints.grammar import GrammarState
from specc.runtime.constraints.grammar_child import LIMITS
from specc.runtime.constraints.grammars import Grammars
from specc.runtime.llm import LLM
from specc.runtime.processes.bounded_pool import Cancellation, JobCancelled
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from tests.hostile_grammars import chained_gbnf, chained_lark, chained_references, many_items, slow
from tests.runtime.conftest import build_engine
from tests.runtime.constraints.test_grammar_masks import EOS, VOCAB, byte_tokenizer

SMALL = StructuredOutputsParams(regex="a[bc]")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(["<|end|>", "<|eot|>"])


@pytest.fixture(scope="module")
def shared(tokenizer) -> Any:
    made = Grammars(tokenizer, VOCAB, EOS)
    yield made
    made.close()


@pytest.fixture
def own(tokenizer, monkeypatch) -> Any:
    """Whose children have little time, and a stack for a few hundred rules."""
    limits = dataclasses.replace(LIMITS, cpu_seconds=0.5, stack_bytes=2 << 20)
    monkeypatch.setattr(grammars, "LIMITS", limits)
    made = Grammars(tokenizer, VOCAB, EOS)
    yield made
    made.close()


def allows(state: GrammarState, text: str, tokenizer: Tokenizer) -> bool:
    """Whether the grammar yields this text, and an end after it."""
    tokens = [*tokenizer.encode(text).ids, 256]
    return all(state.advance(token) for token in tokens) and state.is_over


def is_idle(made: Grammars) -> bool:
    pool = made.children
    return not (any(pool.num_open) or made._in_work)


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param({"json": chained_references(5_000)}, "7", id="references"),
        pytest.param({"grammar": chained_lark(4_000)}, "x", id="lark"),
        pytest.param({"grammar": chained_gbnf(2_000)}, "x", id="gbnf"),
        pytest.param({"choice": many_items(3_000)}, "0 item 2999", id="choice"),
        pytest.param({"json": {"enum": many_items(3_000)}}, '"0 item 2999"', id="enum"),
    ],
)
def test_large_grammars_work(shared, tokenizer, options, text) -> None:
    """Of these, the chains ended the process, and the choice failed at its first token."""
    state = shared.start(StructuredOutputsParams(**options))
    assert allows(state, text, tokenizer)
    assert not allows(shared.start(StructuredOutputsParams(**options)), "y", tokenizer)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        pytest.param({"json": chained_references(20_000)}, "20000 references", id="references"),
        pytest.param({"grammar": chained_lark(20_000)}, "20002 rules", id="lark"),
        pytest.param({"grammar": chained_gbnf(20_000)}, "20002 rules", id="gbnf"),
        pytest.param({"regex": "a" * (3 << 20)}, "3145728 characters", id="regex"),
        pytest.param({"choice": many_items(200_000)}, "characters", id="choice"),
    ],
)
def test_what_is_too_large_is_refused_unseen(options, found) -> None:
    with pytest.raises(RequestError, match=found):
        StructuredOutputsParams(**options)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        pytest.param({"regex": "(" * 100_000 + "x" + ")" * 100_000}, "regex", id="deep regex"),
        pytest.param({"grammar": "start: " + "(" * 9_000 + '"x"' + ")" * 9_000}, "deep", id="lark"),
        pytest.param({"grammar": 'root ::= "a" ' + "(" * 9_000}, "recursion", id="gbnf"),
        # their masks take seconds, or fail, some tokens later
        pytest.param(
            {"regex": "(?:a{1000}){1000}"}, "others wait|too complex|of the processor", id="masks"
        ),
        pytest.param(
            {"grammar": "start: " + " | ".join(f'"a{i}"' for i in range(3_000))},
            "too complex after",
            id="alternatives",
        ),
    ],
)
def test_what_the_library_cannot_do_is_refused_at_once(shared, options, found) -> None:
    with pytest.raises(RequestError, match=found):
        shared.start(StructuredOutputsParams(**options))


def test_each_mask_that_is_tried_has_little_time(shared, monkeypatch) -> None:
    """What a child does, in this process: one without time for a mask refuses the first."""
    child = grammar_child.GrammarChild(shared._vocabulary[0].to_data())
    assert child(list(SMALL.key))["bytes"] >= 0
    monkeypatch.setattr(grammar_child, "_MAX_MASK_S", 0.0)
    with pytest.raises(RequestError, match=r"mask 1 takes 0.0\d s, which others wait for"):
        child(list(SMALL.key))


def test_a_crash_of_the_library_costs_its_request_only(own, tokenizer) -> None:
    """Its native recursion ends the child, and nothing else."""
    for options in ({"json": chained_references(5_000)}, {"grammar": chained_lark(4_000)}):
        with pytest.raises(RequestError, match="segmentation fault") as caught:
            own.start(StructuredOutputsParams(**options))
        assert "chains" in caught.value.needed
    assert allows(own.start(SMALL), "ab", tokenizer)
    assert len(own.children.pids) == 1


def test_time_is_bounded_and_a_refusal_is_remembered(own, monkeypatch) -> None:
    params = StructuredOutputsParams(grammar=slow())
    with pytest.raises(RequestError, match=r"more than 0.5 s of the processor"):
        own.start(params)
    monkeypatch.setattr(own.children, "run", lambda *_, **__: pytest.fail("it is compiled again"))
    for start in (own.start, own.start_compiled):
        with pytest.raises(RequestError, match=r"more than 0.5 s of the processor"):
            start(params)


def test_a_child_is_small_and_quick_to_replace(shared) -> None:
    shared.start(SMALL)
    for pid in shared.children.pids:
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert "llguidance" in loaded
        assert "torch" not in loaded
        assert "numpy" not in loaded


def test_a_child_killed_by_hand_is_replaced(own, tokenizer) -> None:
    own.start(SMALL)
    (pid,) = own.children.pids
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not own.children.pids)
    other = StructuredOutputsParams(regex="x+")
    assert allows(own.start(other), "xx", tokenizer)


def test_one_that_is_cancelled_ends_and_is_not_remembered(tokenizer) -> None:
    own = Grammars(tokenizer, VOCAB, EOS)
    params, cancellation = StructuredOutputsParams(grammar=slow()), Cancellation()
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(own.start(params, cancellation))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: own.children.pids)
    cancellation.cancel()
    thread.join(10)
    assert [type(error) for error in ended] == [JobCancelled]
    assert is_idle(own)
    assert own.start_compiled(params) is None
    own.close()
    with pytest.raises(OverloadError, match="about to stop"):
        own.start(params)


def test_equal_grammars_are_compiled_once(tokenizer, monkeypatch) -> None:
    own, compiled = Grammars(tokenizer, VOCAB, EOS), []
    compile_one = own._compile

    def count(*args: Any) -> Any:
        compiled.append(args)
        time.sleep(0.1)
        return compile_one(*args)

    monkeypatch.setattr(own, "_compile", count)
    states: list[GrammarState] = []
    threads = [threading.Thread(target=lambda: states.append(own.start(SMALL))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(compiled), len(states)) == (1, 6)
    assert own.start_compiled(SMALL) is not None
    own.close()


def test_whoever_is_first_may_leave(tokenizer, monkeypatch) -> None:
    """Another request that waits for the same grammar compiles it then."""
    own, cancellation = Grammars(tokenizer, VOCAB, EOS), Cancellation()
    begun, compile_one = threading.Event(), own._compile

    def leave(source: Any, mine: Cancellation) -> Any:
        if mine is cancellation:
            begun.set()
            wait_for(lambda: own._num_waiting)
            raise JobCancelled
        return compile_one(source, mine)

    monkeypatch.setattr(own, "_compile", leave)
    errors: list[Any] = []

    def first() -> None:
        try:
            own.start(SMALL, cancellation)
        except JobCancelled as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    assert own.start(SMALL).mask() is not None
    thread.join()
    assert len(errors) == 1
    own.close()


def test_what_grammars_hold_is_bounded(tokenizer, monkeypatch) -> None:
    own = Grammars(tokenizer, VOCAB, EOS)
    params = StructuredOutputsParams(regex="|".join(many_items(3_000)))
    state = own.start(params)
    assert own._held._num_bytes > 100_000
    monkeypatch.setattr(grammars, "_MAX_HELD_BYTES", own._held._num_bytes + 1)
    with pytest.raises(OverloadError, match="MiB already"):
        own.start(StructuredOutputsParams(regex="|".join(many_items(3_000, 1))))
    monkeypatch.setattr(grammars, "_MAX_HELD_BYTES", 1 << 30)
    monkeypatch.setattr(grammars, "_MAX_CACHED_BYTES", 1)
    own.start(SMALL)
    assert own.start_compiled(params) is None
    # evicted, but held by a request
    own._held.check(0)
    assert own._held._num_bytes > 100_000
    del state
    gc.collect()
    own._held.check(0)
    assert own._held._num_bytes == 0
    own.close()


def test_a_choice_has_the_masks_of_its_rules(shared, tokenizer) -> None:
    """As a regex, whatever its items hold: all prefixes of all of them."""
    items = [
        "a/b",
        "a\nb",
        'a"b',
        "a\\b",
        "aä€𝄞",
        "a\0",
        "#&&~^$|()[]{}*+?.-_",
        "\t\r\n",
        " a",
        "<|x|>",
    ]
    items += ["a", "ab", "abc", "\\x{61}", "(?i)a", "\x7f\u2028\u0301"]
    rules = "start: " + " | ".join(json.dumps(item) for item in items if "\0" not in item)
    for item in items:
        one = shared.start(StructuredOutputsParams(choice=[i for i in items if "\0" not in i]))
        other = shared.start(StructuredOutputsParams(grammar=rules))
        tokens = tokenizer.encode(item).ids
        if "\0" not in item:
            for number, token in enumerate(tokens):
                assert one.mask() == other.mask(), (item, number)
                assert one.advance(token)
                assert other.advance(token)
            assert one.mask() == other.mask()
        assert allows(shared.start(StructuredOutputsParams(choice=items)), item, tokenizer)


def test_a_request_whose_masks_take_long_ends_alone(monkeypatch) -> None:
    engine = build_engine(eos=(256,))
    slow_one = SamplingParams(temperature=0, max_tokens=8, structured_outputs=SMALL)
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    monkeypatch.setattr(mask_maker, "_MAX_MASKS_S", 0.0)
    monkeypatch.setattr(mask_maker, "_MAX_MASK_S", 0.0)
    first, second = LLM(engine, "chain-4").generate(["ab", "cd"], [slow_one, free])
    assert first.outputs[0].finish_reason == "error"
    assert "others waited for" in first.outputs[0].stop_reason
    assert len(second.outputs[0].token_ids) == 8
