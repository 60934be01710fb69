"""The trained hybrid under everything that requests may ask for, beside plain solo runs.

Prompts that share prefixes around multiples of the grid, more of them than run together, a cache
that is too small for all, clients that leave, faults, plans by dice; weights, caches and arithmetic
of each kind.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from specc.config import CompileConfig
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import RequestOutput
from specc.runtime.service.service import Service
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.plans import DynamicTree, SpecPlan
from tests import engines
from tests.interleavings import Figures, Moody, NearTies, Solo, run_interleaving
from tests.soak import assert_sound, run_soak

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HYBRID, PAIR = EXAMPLES / "hybrid" / "target", EXAMPLES / "pair"
PLANS = (
    SpecPlan.from_widths((1,) * 4),
    SpecPlan.from_widths((2, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(12, 3, 4)),
    SpecPlan.from_widths((1,) * 6, ("suffix",)),
)
NAMES = ["off", *(plan.name for plan in PLANS)]
GRID = 16
# around multiples of the grid, and of a chunk of 96
LENGTHS = (255, 256, 257, 511, 513, 96, 97, 255, 17, 16)
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8-cache": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "int8": {"dtype": "float32", "quantize": "int8"},
    "int4": {"dtype": "float32", "quantize": "int4"},
    "q4_k_m": {"dtype": "float32", "quantize": "q4_k_m"},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}

# the default tier has tiny hybrids: test_states.py, test_state_prefixes.py, test_hybrid_engine.py
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = CompileConfig(
        plans=PLANS, max_batch_size=4, max_seq_len=1024, backend="cpu", probe=False,
        state_grid=GRID, state_checkpoints=6, prefill_chunk=96, **KINDS[request.param],
    )  # fmt: skip
    made = tmp_path_factory.mktemp(f"hybrid-{request.param}") / "engine"
    return engines.build(HYBRID, PAIR / "draft", made, config)


@pytest.fixture(scope="module")
def text() -> list[int]:
    """Tokens of the pair's held-out prompts."""
    tokenizer = Tokenizer.from_file(str(HYBRID / "tokenizer.json"))
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [token for line in lines for token in tokenizer.encode(json.loads(line)["prompt"]).ids]


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True} | options)


def assert_all_free(engine: Engine) -> None:
    """Blocks, places of states, and checkpoints that nobody finds."""
    states, pool = engine.cache.states, engine.cache.allocator
    assert states is not None
    assert pool.num_free == pool.num_blocks
    assert states.num_free == states.sizes.num_places
    checkpoints = states.checkpoints
    assert len(checkpoints._free) + len(checkpoints._place_of) == states.sizes.num_kept


class Plain:
    """Outputs of requests that have an engine to themselves, each computed once."""

    def __init__(self, path: Path) -> None:
        self._llm = LLM(Engine.load(path, max_num_seqs=1), plan="off", shares_prefixes=False)
        self._known: dict[tuple[Any, ...], RequestOutput] = {}

    def generate(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        key = tuple(prompt), repr(params)
        if key not in self._known:
            (self._known[key],) = self._llm.generate([prompt], params)
        return self._known[key]


def check(
    engine: Engine, plan: str, solo: Plain, prompts: list[list[int]], params: SamplingParams
) -> LLM:
    """Outputs, and what is said of their probabilities, beside those of solo runs."""
    llm = LLM(engine, plan=plan)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        wanted = solo.generate(prompt, params)
        for one, other in zip(output.outputs, wanted.outputs, strict=True):
            assert one.token_ids == other.token_ids, (plan, len(prompt), params)
            for entries, own in zip(one.logprobs or (), other.logprobs or (), strict=True):
                for token in entries.keys() & own.keys():
                    close = pytest.approx(own[token].logprob, abs=1e-3)
                    assert entries[token].logprob == close
    assert_all_free(engine)
    return llm


@pytest.mark.parametrize("rows", [None, 1040])
def test_prompts_with_common_prefixes(path: Path, text: list[int], rows: int | None) -> None:
    engine = Engine.load(path, kv_cache_tokens=rows)
    solo = Plain(path)
    prompts = [text[:length] + [7 * i] * (i % 3) for i, length in enumerate(LENGTHS)]
    for plan in NAMES:
        metrics = check(engine, plan, solo, prompts, greedy(24)).get_metrics()
        assert metrics.num_cached_tokens > 0
        assert plan == "off" or metrics.num_accepted_tokens > 0


def test_outputs_of_every_kind(path: Path, text: list[int]) -> None:
    engine = Engine.load(path)
    solo = Plain(path)
    prompts = [text[:50], text[100:217], text[:300], text[:32], text[:64]]
    document = StructuredOutputsParams(json=SCHEMA)
    for plan in NAMES:
        check(engine, plan, solo, prompts, greedy(20, temperature=0.8, n=3, seed=5, logprobs=2))
        check(engine, plan, solo, prompts, greedy(12, prompt_logprobs=2))
        whole = {"ignore_eos": False, "structured_outputs": document}
        check(engine, plan, solo, prompts, greedy(60, **whole))
        check(engine, plan, solo, prompts, greedy(60, temperature=1.0, seed=2, **whole))


def test_clients_that_leave(path: Path, text: list[int]) -> None:
    engine = Engine.load(path, kv_cache_tokens=1040)
    solo = Plain(path)
    for plan in NAMES:
        llm = LLM(engine, plan=plan)
        prompts = [text[:length] for length in (255, 257, 513, 33, 256)]
        streams = [llm.stream([prompt], greedy(60)) for prompt in prompts]
        first = [next(streams[0]).token_id]
        for number in range(8):
            event = next(streams[number % 5])
            first += [event.token_id] * (number % 5 == 0)
        streams[1].close()
        streams[3].close()
        first += [event.token_id for event in streams[0]]
        wanted = solo.generate(prompts[0], greedy(60))
        assert first == wanted.outputs[0].token_ids
        for stream in streams:
            stream.close()
        check(engine, plan, solo, prompts[:4], greedy(200))


def test_any_order_of_events_and_faults(path: Path, text: list[int]) -> None:
    engine, other = Engine.load(path, kv_cache_tokens=1040), Engine.load(path, max_num_seqs=2)
    prompts = [text[:length] for length in (3, 15, 16, 17, 33, 65, 129, 255, 257)]
    solo, judge, figures = Solo(other), NearTies(other), Figures()
    for seed in range(4):
        run_interleaving(engine, solo, seed, prompts, figures, judge, max_tokens=40)
    assert figures.num_cached_tokens > 0
    assert figures.num_ties <= figures.num_compared // 20
    assert_all_free(engine)
    core = EngineCore(engine, policy=Moody(NAMES, random.Random(1)))
    with Service(core) as service:
        found = run_soak(
            service, solo, judge, prompts, num_requests=400, seconds=1, faults=0.02, max_tokens=48
        )
        assert_sound(service, found)
    assert found.num_compared > 100
    assert_all_free(engine)
