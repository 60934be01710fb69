"""What users of vLLM type: constructors, prompts, several outputs, chats, closing."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specc.errors import ConfigError, RequestError
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams

IDS = [0, 1, 2]
SIX = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm(make_engine) -> LLM:
    return LLM(model=make_engine(), plan="tree-3-2-1")


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(np.array(IDS), id="numpy"),
        pytest.param(np.array(IDS, dtype=np.uint8), id="numpy-bytes"),
        pytest.param(torch.tensor(IDS), id="torch"),
        pytest.param(torch.tensor(IDS, dtype=torch.int32), id="torch-int32"),
        pytest.param(torch.tensor([IDS]), id="matrix"),
        pytest.param([np.array(IDS)], id="list-of-numpy"),
        pytest.param([torch.tensor(IDS)], id="list-of-torch"),
        pytest.param([np.int64(i) for i in IDS], id="numpy-numbers"),
        pytest.param([torch.tensor(i) for i in IDS], id="torch-numbers"),
        pytest.param([np.array(i) for i in IDS], id="numpy-0-d"),
        pytest.param(([np.int32(i) for i in IDS],), id="list-of-numpy-numbers"),
        pytest.param({"prompt_token_ids": np.array(IDS)}, id="dict-of-numpy"),
        pytest.param([{"prompt_token_ids": torch.tensor(IDS)}], id="dict-of-torch"),
        pytest.param({"prompt": "abc", "prompt_token_ids": None}, id="text-prompt"),
        pytest.param(
            {"prompt_token_ids": IDS, "multi_modal_data": None, "type": "token"}, id="tokens-prompt"
        ),
    ],
)
def test_forms_of_prompts(llm, greedy, prompt) -> None:
    (output,) = llm.generate(prompt, SIX)
    assert output.prompt_token_ids == IDS
    assert all(type(token) is int for token in output.prompt_token_ids)
    assert output.outputs[0].token_ids == greedy(IDS, 6)


def test_rows_of_a_matrix_are_prompts(llm) -> None:
    for matrix in (np.array([IDS, [3, 4, 5]]), torch.tensor([IDS, [3, 4, 5]])):
        outputs = llm.generate(matrix, SIX)
        assert [output.prompt_token_ids for output in outputs] == [IDS, [3, 4, 5]]


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (np.array(3), "prompts of 0 dimensions"),
        (torch.zeros(1, 1, 2, dtype=torch.int64), "prompts of 3 dimensions"),
        ([np.array([IDS])], "prompt 0 of type ndarray with 2 dimensions"),
        (np.array([1.0, 2.0]), "prompt 0 of type ndarray and dtype float64"),
        (torch.tensor([True]), "prompt 0 of type Tensor and dtype torch.bool"),
        ([[True, False]], "prompt 0 of type list"),
        (b"abc", "prompt 0 of type bytes"),
        (5, "prompts of type int"),
        (None, "neither prompts nor prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "prompt 0 with multi_modal_data"),
        ({"prompt_embeds": torch.zeros(1)}, "prompt 0 with prompt_embeds"),
        ({"input_ids": IDS}, "prompt 0, a dict with input_ids"),
        ([np.array([1, 99])], "prompt 0 holds token id 99"),
    ],
)
def test_no_forms_of_prompts(llm, prompt, found) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, SIX)
    assert caught.value.found.startswith(found)


def test_names_of_arguments(llm, greedy) -> None:
    want = greedy(IDS, 6)
    for outputs in (
        llm.generate(prompts="abc", sampling_params=SIX, use_tqdm=False),
        llm.generate("abc", params=SIX),
        llm.generate(prompt_token_ids=[IDS], sampling_params=SIX),
        llm.generate("abc", SIX, prompt_token_ids=[IDS], lora_request=None),
        llm.generate(["abc"], [SIX], priority=[3]),
        llm.generate(["abc"], (SIX,), priority=1),
    ):
        assert [output.outputs[0].token_ids for output in outputs] == [want]
    tokens = [event.token_id for event in llm.stream(prompts="abc", sampling_params=SIX)]
    assert tokens == want


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"lora_request": "x"}, "prompt 0 with lora='x'"),
        ({"sampling_param": SIX}, "sampling_param="),
        ({"sampling_params": SIX, "params": SIX}, "sampling_params and params"),
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params of type dict"),
        ({"sampling_params": [SIX, SIX]}, "1 prompts and 2 SamplingParams"),
        ({"priority": [1, 2]}, "priority=[1, 2], and 1 prompts"),
        ({"prompt_token_ids": [IDS, IDS]}, "1 prompts beside 2 prompt_token_ids"),
        ({"use_tqdm": 3}, "use_tqdm=3"),
    ],
)
def test_no_arguments(llm, options, found) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate("abc", **options)
    assert caught.value.found.startswith(found)
    assert caught.value.do


class Bar:
    made: list[Bar] = []  # noqa: RUF012

    def __init__(self, total: int, **options: Any) -> None:
        self.total, self.count, self.is_open = total, 0, True
        self.made.append(self)

    def update(self, count: int) -> None:
        self.count += count

    def close(self) -> None:
        self.is_open = False


def test_a_bar(llm, prompts, capsys) -> None:
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, n=2), use_tqdm=Bar)
    (bar,) = Bar.made
    assert (bar.total, bar.count, bar.is_open) == (len(prompts), len(prompts), False)
    llm.generate(prompts[:2], SIX, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_no_limit_goes_on_to_the_end_of_the_context(llm, make_engine, greedy) -> None:
    prompt = [1] * 80
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=None))
    assert output.outputs[0].token_ids == greedy(prompt, 16)
    assert output.outputs[0].finish_reason == "length"
    short = LLM(make_engine(), max_model_len=85)
    (output,) = short.generate([prompt], SamplingParams(temperature=0, max_tokens=None))
    assert output.outputs[0].token_ids == greedy(prompt, 5)
    with pytest.raises(RequestError, match="at most 84"):
        short.generate([[1] * 85])


@pytest.mark.default("off-1.0")
@pytest.mark.parametrize(
    ("plan", "temperature"),
    [
        ("off", 1.0),
        ("chain-4", 0.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("off", 0.0), ("chain-4", 1.0), ("tree-3-2-1", 0.0), ("tree-3-2-1", 1.0))
        ),
    ],
)
def test_n_outputs_are_those_of_their_seeds(make_engine, prompts, plan, temperature) -> None:
    """Each is what its seed gives alone, with any plan; the prompt is computed once."""
    last = (1 << 63) - 1
    some = [prompts[0], prompts[1], prompts[4]]
    params = SamplingParams(
        max_tokens=8, temperature=temperature, seed=last - 1, n=4, logprobs=1, stop_token_ids=[7]
    )
    outputs = LLM(make_engine(), plan=plan).generate(some, params)
    seeds = [last - 1, last, 0, 1]
    alone = [dataclasses.replace(params, n=1, seed=seed) for seed in seeds]
    plain = LLM(make_engine(), plan="off")
    for prompt, output in zip(some, outputs, strict=True):
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert output.num_cached_tokens == 3 * ((len(prompt) - 1) // 4 * 4)
        assert output.metrics.num_requests == 4
        wanted = plain.generate([prompt] * 4, alone)
        for completion, want in zip(output.outputs, wanted, strict=True):
            (other,) = want.outputs
            assert completion.token_ids == other.token_ids
            assert completion.text == other.text
            assert completion.finish_reason == other.finish_reason
            assert completion.cumulative_logprob == pytest.approx(
                other.cumulative_logprob, abs=1e-3
            )


def test_n_without_a_seed_draws_each(llm) -> None:
    params = SamplingParams(max_tokens=12, temperature=2.0, n=4)
    (output,) = llm.generate("abc", params)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4


def test_n_without_shared_prefixes(make_engine, prompts, greedy) -> None:
    llm = LLM(make_engine(), enable_prefix_caching=False)
    (output,) = llm.generate(
        [prompts[4]], SamplingParams(temperature=0, max_tokens=5, n=3, prompt_logprobs=0)
    )
    assert [c.token_ids for c in output.outputs] == [greedy(prompts[4], 5)] * 3
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None


def test_followers_outlive_their_leader(make_engine, prompts, greedy) -> None:
    """It leaves in the middle of its prompt, or is preempted there: they go on alone."""
    llm = LLM(make_engine(prefill_chunk=5, max_num_seqs=2), plan="chain-4")
    core = llm._open
    for leave in (core.scheduler.abort, core.scheduler._preempt):
        group = core.requests.make_outputs(
            [*prompts[4], int(leave is core.scheduler.abort)],
            SamplingParams(temperature=0, max_tokens=4, n=2),
        )
        for request in group:
            core.scheduler.add(request)
        assert core.advance()
        assert core.scheduler.running == group[:1]
        leave(group[0])
        while core.advance():
            pass
        assert group[1].output_token_ids == greedy(group[1].token_ids[:34], 4)


def test_an_llms_seed(make_engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5)
    found = [
        [o.outputs[0].token_ids for o in LLM(make_engine(), seed=seed).generate(["a", "a"], params)]
        for seed in (3, 3, 4)
    ]
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 1},
        {"trust_remote_code": True, "dtype": "auto", "enforce_eager": True, "quantization": None},
        {"dtype": torch.float32, "max_model_len": 96, "seed": 0},
        {"enable_prefix_caching": True, "disable_log_stats": True, "max_logprobs": 20},
    ],
)
def test_options_of_vllm(make_engine, options) -> None:
    assert LLM(make_engine(), **options).generate("abc", SIX)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2, and an engine that was cut for 1"),
        ({"quantization": "awq"}, "quantization='awq'"),
        ({"max_model_len": 97}, "max_model_len=97"),
        ({"max_logprobs": 50}, "max_logprobs=50"),
        ({"speculative_config": {"model": "x"}}, "speculative_config={'model': 'x'}"),
        ({"tokenizer": "x"}, "tokenizer='x'"),
        ({"seed": -1}, "seed=-1"),
        ({"shares_prefix": True}, "shares_prefix=True"),
    ],
)
def test_no_options_of_vllm(make_engine, options, found) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(make_engine(), **options)
    assert caught.value.found == found
    assert caught.value.needed
    assert caught.value.do


def test_dtypes(tiny_engine) -> None:
    for dtype in ("float32", "float", "auto", torch.float32, None):
        LLM(tiny_engine, dtype=dtype)
    for dtype in ("half", "bfloat16", "bf16", torch.float16):
        with pytest.raises(ConfigError, match="an engine of float32"):
            LLM(tiny_engine, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("best_of", 3, "pass n"),
        ("use_beam_search", True, "n gives several outputs"),
        ("length_penalty", 0.5, "leave it out"),
        ("logits_processors", [print], "structured_outputs"),
        ("detokenize", False, "leave it out"),
        ("truncate_prompt_tokens", 4, "cut the token ids"),
        ("max_new_tokens", 3, "pass max_tokens"),
        ("temprature", 1.0, "pass temperature?"),
    ],
)
def test_options_of_requests_that_there_are_not(name, value, part) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{"temperature": 0, name: value})
    assert caught.value.found.startswith(f"{name}=")
    assert part in caught.value.do


def test_options_of_requests_that_ask_for_nothing() -> None:
    idle = {"best_of": None, "use_beam_search": False, "detokenize": True, "logits_processors": []}
    assert SamplingParams(**{"temperature": 0, **idle}, max_tokens=3) == SamplingParams(
        temperature=0, max_tokens=3
    )
    with pytest.raises(RequestError):
        # a flag is no number
        SamplingParams(temperature=0, length_penalty=True)


def test_n_and_counts_in_their_ranges() -> None:
    for options in ({"n": 0}, {"n": 129}, {"n": True}, {"n": 2.0}, {"prompt_logprobs": 21}):
        with pytest.raises(RequestError):
            SamplingParams(**{"temperature": 0, **options})


@pytest.fixture
def chatty(tiny_engine: Path, tmp_path: Path) -> Path:
    """The tiny engine, with a chat template."""
    for file in tiny_engine.iterdir():
        (tmp_path / file.name).symlink_to(file)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}A{{ extra }}:{% endif %}"
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return tmp_path


def test_chat(chatty, tmp_path) -> None:
    llm = LLM(chatty)
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, SIX, use_tqdm=False)
    assert output.prompt == "user: hi\nA:"
    (same,) = llm.generate("user: hi\nA:", SIX)
    assert output.prompt_token_ids == same.prompt_token_ids
    assert output.outputs == same.outputs
    outputs = llm.chat(
        [messages, [*messages, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]],
        [SIX, SIX],
        chat_template_kwargs={"extra": "!"},
    )
    assert [o.prompt for o in outputs] == ["user: hi\nA!:", "user: hi\nassistant: a\nA!:"]
    (output,) = llm.chat(messages, SIX, add_generation_prompt=False)
    assert output.prompt == "user: hi\n"
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}")
    assert llm.chat(messages, SIX, chat_template=other)[0].prompt == "hi"
    with pytest.raises(RequestError, match="no messages"):
        llm.chat([], SIX)
    with pytest.raises(RequestError, match="tools="):
        llm.chat(messages, SIX, tools=[{"name": "f"}])


def test_no_chat_without_a_template(llm) -> None:
    with pytest.raises(RequestError, match="an engine without a chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_the_tokenizer(llm, chatty, make_engine) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("abc") == IDS
    assert tokenizer.decode(IDS) == tokenizer.decode(torch.tensor(IDS)) == "abc"
    assert tokenizer.decode(1) == "b"
    assert tokenizer.batch_decode([IDS, [1]]) == ["abc", "b"]
    assert tokenizer.convert_ids_to_tokens([0, 1]) == ["a", "b"]
    assert tokenizer.convert_tokens_to_ids(["a", "b"]) == [0, 1]
    assert tokenizer.convert_tokens_to_ids("c") == 2
    assert tokenizer.get_vocab()["a"] == 0
    assert len(tokenizer) == tokenizer.vocab_size + 1
    assert tokenizer.tokenizer is llm.tokenizer
    messages = [{"role": "user", "content": "hi"}]
    own = LLM(chatty).get_tokenizer()
    text = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "user: hi\nA:"
    assert own.apply_chat_template(messages) == own.encode("user: hi\n")
    engine = make_engine()
    engine.tokenizer = None
    with pytest.raises(RequestError, match="an engine without a tokenizer"):
        LLM(engine).get_tokenizer()


def test_closed_it_releases_its_memory_and_refuses(tiny_engine) -> None:
    with LLM(tiny_engine) as llm:
        stream = llm.stream("abc", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        next(stream)
        references = [weakref.ref(llm.engine), weakref.ref(llm.engine.cache)]
    with pytest.raises(RequestError, match="was closed"):
        next(stream)
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.stream("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        llm.get_metrics,
        llm.get_tokenizer,
        lambda: llm.engine,
    ):
        with pytest.raises(RequestError, match="was closed"):
            call()
    llm.close()
    del stream
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_an_engine_outlives_the_llm_that_is_closed(make_engine) -> None:
    engine = make_engine()
    with LLM(engine) as llm:
        next(llm.stream("abc", SIX))
    assert engine.cache.allocator.num_free == engine.cache.allocator.num_blocks
    assert LLM(engine).generate("abc", SIX)
