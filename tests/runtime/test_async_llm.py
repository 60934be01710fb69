"""`AsyncLLM`: many tasks, one engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

import specc
from specc.errors import FaultError, RequestError
from specc.runtime import async_llm
from specc.runtime.async_llm import AsyncLLM
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import RequestOutput
from specc.sampling.params import SamplingParams

WAIT_S = 60


@pytest.fixture(scope="module")
def llm(make_engine) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(make_engine(), plan="tree-3-2-1")
    yield llm
    llm.close()


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    found = [output async for output in outputs]
    assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
    for before, after in itertools.pairwise(found):
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert other.token_ids[: len(one.token_ids)] == one.token_ids
            assert other.text.startswith(one.text)
    return found[-1]


async def until_idle(llm: AsyncLLM) -> None:
    pool = llm.engine.cache.allocator
    async with asyncio.timeout(WAIT_S):
        while pool.num_free != pool.num_blocks:
            await asyncio.sleep(0.005)


async def until_open(llm: AsyncLLM, count: int) -> None:
    """Until so many outputs have their names."""
    async with asyncio.timeout(WAIT_S):
        while llm._running._num_open != count:
            await asyncio.sleep(0.001)


def run(work: object) -> object:
    async def bounded() -> object:
        async with asyncio.timeout(WAIT_S):
            return await work  # type: ignore[misc]

    return asyncio.run(bounded())


def test_tasks_get_what_llm_gives(llm: AsyncLLM, make_engine, prompts) -> None:
    alone = LLM(make_engine(), plan="off")
    params = [
        SamplingParams(
            max_tokens=9, temperature=i % 2, seed=i, n=1 + i % 3, logprobs=1, prompt_logprobs=i % 2
        )
        for i in range(len(prompts))
    ]

    async def all_at_once() -> list[RequestOutput]:
        works = (last(llm.generate(p, o, f"r{i}")) for i, (p, o) in enumerate(zip(prompts, params)))  # noqa: B905
        return await asyncio.gather(*works)

    found = run(all_at_once())
    assert [output.request_id for output in found] == [f"r{i}" for i in range(len(prompts))]
    for output, want in zip(found, alone.generate(prompts, params), strict=True):
        assert output.prompt_token_ids == want.prompt_token_ids
        assert output.metrics.num_output_tokens == want.metrics.num_output_tokens
        for one, other in zip(output.outputs, want.outputs, strict=True):
            assert (one.index, one.token_ids, one.text) == (
                other.index,
                other.token_ids,
                other.text,
            )
            assert one.finish_reason == other.finish_reason
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
        assert output.prompt_logprobs is not None
        for mine, theirs in zip(output.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
            assert mine.keys() == theirs.keys()


def test_text_and_names(llm: AsyncLLM) -> None:
    output = run(last(llm.generate("abc", SamplingParams(temperature=0, max_tokens=3))))
    assert output.prompt == "abc"
    assert output.prompt_token_ids == [0, 1, 2]
    assert output.request_id


def test_a_cancelled_task_ends_its_request(llm: AsyncLLM, prompts) -> None:
    long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, n=2)

    async def leave() -> None:
        task = asyncio.create_task(last(llm.generate(prompts[4], long, "left")))
        # one that is still being handed in would take its name a moment later
        await until_open(llm, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_open(llm, 0)
        await until_idle(llm)
        # the name is free again, and leaving the loop ends the request, too
        async for _ in llm.generate(prompts[4], long, "left"):
            break
        await until_idle(llm)

    run(leave())


def test_abort_ends_a_request_with_what_it_has(llm: AsyncLLM, prompts) -> None:
    async def abort() -> RequestOutput:
        found = []
        params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
        async for output in llm.generate(prompts[0], params, "mine"):
            found.append(output)
            await llm.abort("mine")
        await llm.abort("mine")
        await llm.abort("nobody's")
        return found[-1]

    output = run(abort())
    assert output.finished
    assert output.outputs[0].finish_reason in ("abort", "length")


def test_abort_reaches_outputs_that_are_not_handed_in_yet(llm: AsyncLLM, prompts, monkeypatch):
    """Three of four outputs still wait for their turn when the request is aborted."""
    handed_in = []

    async def slowly(service, prompt, params, **options):
        stream = await in_thread(service, prompt, params, **options)
        handed_in.append(options["request_id"])
        if len(handed_in) == 1:
            await llm.abort("mine")
        return stream

    in_thread = async_llm._in_thread
    monkeypatch.setattr(async_llm, "_in_thread", slowly)

    async def abort() -> RequestOutput:
        params = SamplingParams(max_tokens=90, ignore_eos=True, n=4, temperature=1.0, seed=1)
        output = await last(llm.generate(prompts[0], params, "mine"))
        await until_idle(llm)
        return output

    output = run(abort())
    assert len(handed_in) == 4
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 4


def test_errors(llm: AsyncLLM, prompts) -> None:
    async def fail() -> None:
        with pytest.raises(RequestError, match="has no tokens"):
            await last(llm.generate([], None))
        first = llm.generate(prompts[1], SamplingParams(temperature=0, max_tokens=50), "same")
        await anext(first)
        with pytest.raises(RequestError, match="'same', which an open request has"):
            await last(llm.generate(prompts[1], None, "same"))
        await first.aclose()

    run(fail())


def test_a_failed_step_is_raised(make_engine, prompts, monkeypatch) -> None:
    llm = AsyncLLM(make_engine())

    def fail(batch: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(llm._running.core.runner, "run", fail)
        with pytest.raises(FaultError):
            run(last(llm.generate(prompts[0], SamplingParams(temperature=0, n=2))))
    assert run(last(llm.generate(prompts[0]))).finished
    llm.close()


def test_closed(make_engine, prompts) -> None:
    async def close() -> None:
        async with AsyncLLM(make_engine(), seed=3) as llm:
            outputs = llm.generate(
                prompts[0], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
            )
            await anext(outputs)
            assert (await llm.get_metrics()).num_requests == 0
        rest = [output async for output in outputs]
        assert rest[-1].finished
        with pytest.raises(RequestError, match="was closed"):
            await anext(llm.generate(prompts[0]))
        with pytest.raises(RequestError, match="was closed"):
            llm.get_tokenizer()
        llm.shutdown()

    run(close())


def test_it_is_exported() -> None:
    assert specc.AsyncLLM is AsyncLLM
    assert specc.RequestOutput is RequestOutput
