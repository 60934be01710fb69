"""Names that vLLM's users type: taken, ignored with a warning, or refused with a sentence."""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

import specc
from specc import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    GuidedDecodingParams,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from specc.errors import ConfigError, RequestError
from specc.sampling_params import RequestOutputKind, StructuredOutputsParams
from specc.vllm.answers import Ignored, IgnoredOptionWarning, Renamed
from specc.vllm.calls import METHODS, NAMES
from specc.vllm.engine_options import ENGINE
from specc.vllm.sampling_options import SAMPLING, STRUCTURED

IGNORED = {
    "gpu_memory_utilization": 0.9,
    "swap_space": 4,
    "max_num_batched_tokens": 8192,
    "block_size": 16,
    "enforce_eager": True,
    "enable_chunked_prefill": False,
    "compilation_config": {"level": 3},
    "limit_mm_per_prompt": {"image": 2},
    "load_format": "dummy",
    "cpu_offload_gb": 2,
    "distributed_executor_backend": "ray",
}


@pytest.fixture(scope="module")
def llm(tiny_engine) -> LLM:
    return LLM(tiny_engine)


@pytest.mark.parametrize("name", IGNORED)
def test_what_changes_no_output_is_ignored_with_one_warning(name) -> None:
    with pytest.warns(IgnoredOptionWarning, match=f"^{name} has no effect here: ") as caught:
        args = EngineArgs("engine/", **{name: IGNORED[name]})
    assert len(caught) == 1
    # it is this file's line, not one of the package
    assert caught[0].filename == __file__
    assert args == EngineArgs("engine/")


def test_a_constructor_warns_once_for_each(tiny_engine, llm) -> None:
    with pytest.warns(IgnoredOptionWarning) as caught:
        other = LLM(model=str(tiny_engine), trust_remote_code=True, **IGNORED)
    assert sorted(str(one.message).split()[0] for one in caught) == sorted(IGNORED)
    assert {one.filename for one in caught} == {__file__}
    params = SamplingParams(temperature=0, max_tokens=4)
    assert other.generate("a", params)[0].outputs == llm.generate("a", params)[0].outputs


def test_what_asks_for_nothing_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, answer in ENGINE.items():
            for value in () if isinstance(answer, Renamed) else answer.idle:
                EngineArgs("engine/", **{name: value})
        EngineArgs(model="engine/", tensor_parallel_size=1, enable_prefix_caching=True, seed=0)


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_vllms_own_names_of_options(kind) -> None:
    args = kind(model="engine/", enable_prefix_caching=False, max_model_len=64)
    assert (args.engine, args.shares_prefixes, args.max_model_len) == ("engine/", False, 64)
    with pytest.raises(ConfigError, match="quantization='awq'"):
        kind("engine/", quantization="awq")
    with pytest.raises(ConfigError, match="max_num_sequences=3") as typo:
        kind("engine/", max_num_sequences=3)
    assert typo.value.do == "pass max_num_seqs?"


def test_no_name_of_a_table_is_one_of_specc() -> None:
    """Such an entry would never be asked."""
    for kind, answers in (
        (AsyncEngineArgs, ENGINE),
        (SamplingParams, SAMPLING),
        (StructuredOutputsParams, STRUCTURED),
    ):
        own = set(inspect.signature(kind).parameters)
        assert own.isdisjoint(answers), own & set(answers)
        for answer in answers.values():
            assert not isinstance(answer, Renamed) or answer.name in own
    for name in METHODS:
        assert name not in vars(LLM) or vars(LLM)[name].__doc__.startswith("Raises RequestError")


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_there_are_not_say_why(llm, name) -> None:
    for kind, one in ((LLM, llm), (AsyncLLM, AsyncLLM.__new__(AsyncLLM))):
        with pytest.raises(RequestError) as caught:
            getattr(one, name)(["a"], object(), use_tqdm=False)
        assert caught.value.found == f"{kind.__name__}.{name}"
        assert caught.value.needed
        assert caught.value.do
    if name == "beam_search":
        assert "n gives several outputs" in caught.value.do


@pytest.mark.parametrize("name", NAMES)
def test_names_to_import_that_there_are_not_say_why(name) -> None:
    for module in ("specc", "specc.sampling_params", "specc.outputs"):
        with pytest.raises(ImportError, match=f"no {name} in {module}: .+"):
            getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError):
        specc.LLMEngin  # noqa: B018


def test_modules_are_called_as_vllms() -> None:
    from specc.inputs import TokensPrompt as Tokens
    from specc.outputs import CompletionOutput, Logprob, RequestOutput
    from specc.sampling_params import GuidedDecodingParams as Guided
    from specc.sampling_params import SamplingParams as Params

    assert (Tokens, Params, Guided) == (TokensPrompt, SamplingParams, GuidedDecodingParams)
    assert (RequestOutput, CompletionOutput) == (specc.RequestOutput, specc.CompletionOutput)
    assert Logprob(-1.0, 1).decoded_token is None
    assert AsyncLLMEngine is AsyncLLM
    assert set(specc.__all__) <= set(dir(specc))


def test_prompts_as_dicts(llm) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    (want,) = llm.generate("hello", params)
    for prompt in (
        TextPrompt(prompt="hello"),
        TokensPrompt(prompt_token_ids=want.prompt_token_ids),
        TokensPrompt(prompt_token_ids=want.prompt_token_ids, prompt="hello"),
    ):
        (output,) = llm.generate(prompt, params)
        assert output.outputs == want.outputs
        assert output.prompt_token_ids == want.prompt_token_ids
    assert len(llm.generate([TextPrompt(prompt="a"), TextPrompt(prompt="b")], params)) == 2


def test_guided_decoding_is_structured_outputs(llm) -> None:
    with pytest.warns(IgnoredOptionWarning, match="backend"):
        guided = GuidedDecodingParams(choice=["left", "right"], backend="xgrammar")
    params = SamplingParams(guided_decoding=guided, temperature=0)
    assert params.structured_outputs is guided
    assert llm.generate("a", params)[0].outputs[0].text in ("left", "right")
    with pytest.raises(RequestError, match="exactly one of"):
        GuidedDecodingParams(choice=["a"], regex="a")
    with pytest.raises(RequestError, match="structural_tag"):
        GuidedDecodingParams(structural_tag="{}")
    with pytest.raises(RequestError, match="structured_outputs alone"):
        SamplingParams(guided_decoding=guided, structured_outputs=guided)
    assert SamplingParams(guided_decoding=None) == SamplingParams()


@pytest.mark.parametrize("count", [0, 2])
def test_log_probabilities_have_the_texts_of_their_tokens(llm, count) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=count, prompt_logprobs=count)
    (output,) = llm.generate("hello", params)
    decode = llm.tokenizer.decode
    rows = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
    assert len(rows) > 4
    for row in rows:
        assert len(row) >= max(count, 1)
        for token, entry in row.items():
            assert entry.decoded_token == decode([token], skip_special_tokens=False)
            assert entry.logprob <= 0 < entry.rank
    assert output.prompt_logprobs[0] is None
    events = [event.logprobs for event in llm.stream("hello", params)]
    assert events == output.outputs[0].logprobs

    async def asynchronously() -> Any:
        async with AsyncLLM(llm.engine.directory) as other:
            async for found in other.generate("hello", params):
                last = found
        return last

    found = asyncio.run(asynchronously())
    assert found.outputs[0].logprobs == output.outputs[0].logprobs
    assert found.prompt_logprobs == output.prompt_logprobs


def test_outputs_have_the_attributes_that_programs_read(llm) -> None:
    (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=2))
    completion = output.outputs[0]
    for name in (
        "lora_request",
        "encoder_prompt",
        "encoder_prompt_token_ids",
        "kv_transfer_params",
    ):
        assert getattr(output, name) is None
    assert completion.lora_request is None
    assert completion.finished()
    assert completion.cumulative_logprob is completion.logprobs is None
    assert copy.deepcopy(output) == output


def test_what_an_asynchronous_engine_yields(tiny_engine, llm) -> None:
    """As vLLM's example of streaming has it, with its engine's own arguments."""
    base = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}
    (want,) = llm.generate("hello", SamplingParams(**base))
    wanted = want.outputs[0]

    async def collect() -> dict[RequestOutputKind, list[Any]]:
        args = AsyncEngineArgs(model=str(tiny_engine), disable_log_requests=True)
        engine = AsyncLLMEngine.from_engine_args(args)
        found = {}
        for kind in RequestOutputKind:
            params = SamplingParams(**base, output_kind=kind)
            outputs = engine.generate(
                prompt="hello", sampling_params=params, request_id=kind.name, lora_request=None
            )
            found[kind] = [output async for output in outputs]
        engine.shutdown()
        return found

    found = asyncio.run(collect())
    deltas = [output.outputs[0] for output in found[RequestOutputKind.DELTA]]
    assert [token for one in deltas for token in one.token_ids] == wanted.token_ids
    assert "".join(one.text for one in deltas) == wanted.text
    assert [row for one in deltas for row in one.logprobs] == wanted.logprobs
    assert [one.finish_reason for one in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len(deltas) > 1
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY):
        *before, last = found[kind]
        assert last.outputs == [wanted]
        assert bool(before) == (kind is RequestOutputKind.CUMULATIVE)
    with pytest.raises(RequestError, match="output_kind=1"):
        SamplingParams(output_kind=1)


def test_arguments_that_an_asynchronous_engine_has_not(tiny_engine) -> None:
    async def ask(**options: Any) -> None:
        async with AsyncLLM(tiny_engine) as llm:
            async for _ in llm.generate("a", SamplingParams(max_tokens=1), "x", **options):
                pass

    asyncio.run(ask(trace_headers=None))
    for name in ("lora_request", "prompt_adapter_request", "temperature"):
        with pytest.raises(RequestError, match=name):
            asyncio.run(ask(**{name: object()}))


def test_every_ignored_option_has_a_sentence_or_is_quiet() -> None:
    for name, answer in ENGINE.items():
        if isinstance(answer, Ignored) and answer.because:
            assert not answer.because.endswith("."), name
            assert Path(name).name == name


def test_options_that_change_are_those_of_later_requests(llm) -> None:
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens, params.ignore_eos = 0, 6, True
    stream = llm.stream("hello", params)
    first = next(stream)
    params.max_tokens, params.seed = 2, 4
    tokens = [first.token_id, *(event.token_id for event in stream)]
    assert len(tokens) == 6
    assert llm.generate("hello", params)[0].outputs[0].token_ids == tokens[:2]


def test_a_tokenizer_can_be_waited_for(tiny_engine) -> None:
    async def ask() -> list[int]:
        async with AsyncLLM(tiny_engine) as llm:
            return (await llm.get_tokenizer()).encode("ab")

    assert asyncio.run(ask()) == LLM(tiny_engine).get_tokenizer().encode("ab")
