"""A prefill iteration queues all of its work before the host waits, once, for its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.runtime.backends.captured.device_link import NUM_STAGES, DeviceLink
from specc.runtime.engine import Engine
from specc.runtime.execution.prompt_ends import PendingEnds
from specc.runtime.execution.prompts import Prompts
from specc.runtime.llm import LLM
from specc.runtime.scheduling.batch import Span
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from tests.runtime.backends.captured.captured_engine import captured_engine
from tests.runtime.backends.captured.simulated_device import LateDevice
from tests.runtime.backends.captured.watched_device import WatchedDevice

GRAMMAR = StructuredOutputsParams(regex="[a-f]{2,9}")
REQUESTS = {
    "plain": [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)] * 3,
    "sampled": [SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, seed=i) for i in range(3)],
    "scored": [
        SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=4, logprobs=0),
    ],
    "masked": [
        SamplingParams(temperature=0, max_tokens=4, structured_outputs=GRAMMAR),
        SamplingParams(temperature=0, max_tokens=4, logit_bias={66: 3.0}, min_tokens=2),
        SamplingParams(temperature=0, max_tokens=4, bad_words=["a", "bc"], logprobs=1),
    ],
}
PROMPTS = ["hello", "ab" * 30, "a longer prompt"]


@dataclass
class Rig:
    engine: Engine
    device: WatchedDevice
    logs: list[list[str]]


@pytest.fixture
def rig(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Every prefill iteration is watched, from its first operator until its result is there."""
    device = WatchedDevice()
    engine = captured_engine(tiny_engine, device)
    engine.prefill_chunk = 24
    logs: list[list[str]] = []
    models = (engine.target, *engine.drafts)
    lasting = [
        *engine.cache.environment.values(),
        *(tensor for model in models for tensor in model._program.tensors.values()),
    ]
    begin = Prompts.begin

    def watched(prompts: Prompts, spans: list[Span]) -> Any:
        device.log = []
        logs.append(device.log)
        with device.watch(lasting):
            pending = begin(prompts, spans)()
            device.log.append("queued")
            found = pending.result()
        device.log = []
        done = type("Done", (), {"result": lambda _: found})()
        return lambda: done

    monkeypatch.setattr(Prompts, "begin", watched)
    return Rig(engine, device, logs)


def assert_near(found: Any, wanted: Any) -> None:
    """Log probabilities of the same tokens in the same order; a pass of more rows rounds anew."""
    assert (found is None) == (wanted is None)
    for mine, its in zip(found or (), wanted or (), strict=True):
        assert list(mine or ()) == list(its or ())
        for token, entry in (mine or {}).items():
            assert entry.rank == its[token].rank
            assert entry.logprob == pytest.approx(its[token].logprob, abs=1e-5)


@pytest.mark.default("masked-tree-2-1")
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        # each with one of the plans in turn
        pytest.param(kind, plan, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, kind in enumerate(REQUESTS)
        for j, plan in enumerate(("off", "tree-2-1"))
    ],
)
def test_nothing_waits_before_the_end(rig, tiny_engine, kind, plan) -> None:
    """Prompts of several chunks, which share passes: copies that wait, and host reads, fail."""
    eager = Engine.load(tiny_engine)
    eager.prefill_chunk = rig.engine.prefill_chunk
    wanted = LLM(eager, plan).generate(PROMPTS, REQUESTS[kind])
    rig.logs.clear()
    outputs = LLM(rig.engine, plan).generate(PROMPTS, REQUESTS[kind])
    for found, own in zip(outputs, wanted, strict=True):
        assert found.outputs[0].token_ids == own.outputs[0].token_ids
        assert_near(found.outputs[0].logprobs, own.outputs[0].logprobs)
        assert_near(found.prompt_logprobs, own.prompt_logprobs)
    assert len(rig.logs) > 2
    for log in rig.logs:
        end = log.index("queued")
        assert [entry for entry in log if entry.startswith("sync")] == []
        assert set(log[:end]) <= {"op", "fence"}
        assert log[:end].count("op") > 20
        # the one wait, of a pass that something comes from
        assert log[end + 1 :] in ([], ["wait"])
    assert rig.logs[-1][-1] == "wait"
    assert any(log[-1] == "queued" for log in rig.logs) or kind == "scored"


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda engine: engine.cache.history[0, :4].tolist(), id="read"),
        pytest.param(lambda engine: int(engine.cache.history.sum()), id="item"),
        pytest.param(lambda engine: engine.cache.history[0][torch.tensor([1, 2])], id="copy"),
        pytest.param(lambda engine: engine.cache.history.nonzero(), id="shape"),
    ],
)
def test_the_watch_sees_what_waits(rig, monkeypatch, spoil) -> None:
    first_tokens = Prompts.first_tokens

    def spoilt(runner: Prompts, *args: Any) -> Any:
        spoil(rig.engine)
        return first_tokens(runner, *args)

    monkeypatch.setattr(Prompts, "first_tokens", spoilt)
    LLM(rig.engine, "off").generate(PROMPTS[:1], REQUESTS["plain"][:1])
    (log,) = rig.logs
    assert any(entry.startswith("sync") for entry in log[: log.index("queued")])


def test_first_tokens_may_stay_pending(tiny_engine) -> None:
    """Two passes are queued before the first one's tokens are asked for; staging is not spoilt."""
    device = LateDevice()
    engine = captured_engine(tiny_engine, device)
    wanted = LLM(Engine.load(tiny_engine), "off").generate(PROMPTS, REQUESTS["plain"])
    core = LLM(engine, "off")._core
    found: list[PendingEnds] = []
    for i, prompt in enumerate(PROMPTS):
        tokens = engine.tokenizer.encode(prompt).ids
        request = core.requests.make(tokens, REQUESTS["plain"][i])
        count = engine.cache.shape.blocks_for(len(tokens), 1)
        request.blocks = engine.cache.allocator.allocate(count)
        found.append(core.runner._prompts.begin([Span(request, 0, len(tokens), (0,))])())
    first = [pending.result().first_tokens for pending in found]
    assert first == [[output.outputs[0].token_ids[0]] for output in wanted]


def test_values_are_not_spoilt_on_their_way() -> None:
    """More are sent than there are staging buffers, before the device takes the first copy."""
    device = LateDevice()
    link = DeviceLink(device)
    given = [
        [torch.full((i % 5,), i), torch.full((3, i % 3), -i, dtype=torch.int32), torch.ones(i) * i]
        for i in range(4 * NUM_STAGES)
    ]
    sent = [link.send(values) for values in given]
    device.run_all()
    for values, found in zip(given, sent, strict=True):
        for own, other in zip(values, found, strict=True):
            assert own.dtype == other.dtype
            assert torch.equal(own, other)
            assert other.data_ptr() % 16 == 0 or not other.numel()
