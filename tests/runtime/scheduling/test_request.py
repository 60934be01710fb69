"""Where a request ends: exactly where plain decoding would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from specc.runtime.outputs.detokenizer import Detokenizer
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams

# the first bytes of an emoji, and the token that ends an output
HALF, EOS = 5, 6
PROMPT = [0, 1, 2]


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "d": 3, "cd": 4, "ðŁ": HALF}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


TOKENIZER = make_tokenizer()


def make_request(*, max_seq_len: int = 100, is_streamed: bool = False, **params) -> Request:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 50, **params})
    detokenizer = Detokenizer(
        TOKENIZER,
        PROMPT,
        sampling.stop_strings,
        sampling.include_stop_str_in_output,
        frozenset({EOS}) if sampling.skip_special_tokens else frozenset(),
    )
    return Request(
        "0",
        PROMPT,
        sampling,
        max_seq_len=max_seq_len,
        eos_token_ids=frozenset({EOS}),
        detokenizer=detokenizer,
        is_streamed=is_streamed,
    )


@pytest.mark.parametrize(
    ("params", "tokens", "taken", "text", "reason", "stop"),
    [
        pytest.param({}, [0, EOS, 1], 2, "a", "stop", None, id="eos"),
        pytest.param({"ignore_eos": True}, [0, EOS, 1], 3, "ab", None, None, id="ignore-eos"),
        pytest.param({"stop_token_ids": [1]}, [0, 1, 2], 2, "a", "stop", 1, id="stop-token"),
        pytest.param(
            {"stop_token_ids": [EOS], "ignore_eos": True}, [0, EOS], 2, "a", "stop", EOS,
            id="stop-token-is-eos",
        ),
        pytest.param(
            {"stop_token_ids": [1], "include_stop_str_in_output": True},
            [0, 1, 2], 2, "ab", "stop", 1, id="stop-token-included",
        ),
        pytest.param({"max_tokens": 2}, [0, 1, 2], 2, "ab", "length", None, id="max-tokens"),
        pytest.param({"max_tokens": 1}, [0, 1, 2], 1, "a", "length", None, id="one-token"),
        pytest.param({"max_tokens": 2}, [0, EOS], 2, "a", "stop", None, id="eos-before-length"),
        pytest.param({"stop": "bc"}, [0, 1, 2, 0], 3, "a", "stop", "bc", id="across-tokens"),
        pytest.param({"stop": "bc"}, [0, 1, 4, 0], 3, "a", "stop", "bc", id="inside-a-token"),
        pytest.param(
            {"stop": ["d", "bc"]}, [0, 1, 4, 0], 3, "a", "stop", "bc", id="first-in-text-wins"
        ),
        pytest.param(
            {"stop": "bc", "include_stop_str_in_output": True},
            [0, 1, 4, 0], 3, "abc", "stop", "bc", id="included-but-not-behind",
        ),
        pytest.param(
            {"stop": "bc", "max_tokens": 3}, [0, 1, 2], 3, "a", "stop", "bc",
            id="stop-string-before-length",
        ),
        pytest.param({"stop": "aab"}, [0, 0, 0, 1], 4, "a", "stop", "aab", id="overlapping-prefix"),
        pytest.param({"stop": "bc"}, [0, 1, EOS], 3, "ab", "stop", None, id="half-a-stop-string"),
        pytest.param(
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            [0, EOS], 2, "a<eos>", "stop", None, id="eos-shown",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_single", [True, False], ids=["plain", "one-step"])
def test_end(params, tokens, taken, text, reason, stop, is_single) -> None:
    request = make_request(**params)
    if is_single:
        for token in tokens:
            if request.is_finished:
                break
            assert request.append([token]) == 1
    else:
        assert request.append(tokens) == taken
    (completion,) = request.to_output().outputs
    assert completion.token_ids == tokens[:taken]
    assert completion.text == request.text
    assert (completion.finish_reason, completion.stop_reason) == (reason, stop)
    # while a request runs, text may still be held back
    assert text == completion.text


@pytest.mark.parametrize("params", [{"max_tokens": 2}, {}], ids=["length", "eos"])
def test_incomplete_character_at_the_end_is_shown(params) -> None:
    request = make_request(**params, is_streamed=True)
    request.append([0, HALF, EOS])
    assert request.text == "a\ufffd"
    assert [event.text for event in request.events][:2] == (
        ["a", "\ufffd"] if params else ["a", ""]
    )


def test_stop_string_that_the_last_token_reveals() -> None:
    """Held back as a possible emoji up to the end, then cut like any other."""
    request = make_request(max_tokens=2, stop="\ufffd")
    request.append([0, HALF])
    assert request.text == "a"
    assert (request.finish_reason, request.stop_reason) == ("stop", "\ufffd")


def test_context_limit() -> None:
    request = make_request(max_seq_len=5)
    assert request.append([0, 1, 2]) == 2
    assert len(request.token_ids) == 5
    assert request.finish_reason == "length"


STEPS = st.lists(st.lists(st.integers(0, EOS), min_size=1, max_size=5), min_size=1, max_size=8)


@given(
    STEPS,
    st.lists(st.text("abcd\ufffd", min_size=1, max_size=4), max_size=2),
    st.integers(1, 12),
    st.lists(st.integers(0, EOS), max_size=1),
    st.booleans(),
)
def test_steps_of_any_length_end_like_single_tokens(
    steps: list[list[int]], stop: list[str], max_tokens: int, stop_ids: list[int], ignore: bool
) -> None:
    params = {
        "stop": stop, "max_tokens": max_tokens, "stop_token_ids": stop_ids, "ignore_eos": ignore
    }  # fmt: skip
    wide, single = make_request(**params, is_streamed=True), make_request(**params)
    for step in steps:
        if not wide.is_finished:
            wide.append(step)
    for token in [token for step in steps for token in step]:
        if not single.is_finished:
            single.append([token])
    assert wide.to_output().outputs == single.to_output().outputs
    events = list(wide.events)
    assert [event.token_id for event in events] == wide.output_token_ids
    assert [event.finished for event in events[:-1]] == [False] * (len(events) - 1)
    if wide.is_finished:
        assert "".join(event.text for event in events) == wide.text
        assert events[-1].finish_reason == wide.finish_reason
        assert events[-1].stop_reason == wide.stop_reason
        assert events[-1].metrics is wide.stats
    else:
        assert wide.text.startswith("".join(event.text for event in events))


def test_request_without_tokenizer_has_no_text() -> None:
    request = Request("0", PROMPT, SamplingParams(temperature=0, max_tokens=2), max_seq_len=10)
    request.append_first(7)
    request.append([8, 9])
    output = request.to_output()
    assert output.outputs[0].token_ids == [7, 8]
    assert output.outputs[0].text == ""
    assert output.prompt_token_ids == PROMPT
    assert output.metrics.num_requests == 1
    assert output.metrics.time_to_first_token > 0
    assert output.metrics.elapsed_s > 0
