"""Drafts in another dtype than the target, and than each other: what comes out is the target's."""

from __future__ import annotations

import pytest
import torch

from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from tests import engines, models
from tests.drafts import DRAFTS, TWO
from tests.lossless import Zoo
from tests.tiers import every

PLANS = (
    SpecPlan.from_widths((2, 1, 1)),
    SpecPlan.from_dynamic(DynamicTree(8, 3, 3)),
    SpecPlan.from_widths((2, 1), TWO, MERGE),
    SpecPlan.from_widths((1, 1, 1), TWO, VOTE),
)


@pytest.fixture(scope="module", params=["eager", pytest.param("cpu", marks=pytest.mark.slow)])
def engine(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory, request) -> Engine:
    path = tmp_path_factory.mktemp("dtypes") / "engine"
    config = CompileConfig(
        plans=PLANS,
        draft_dtype=("bfloat16", "float32"),
        max_batch_size=4,
        max_seq_len=models.MAX_SEQ_LEN,
        backend=request.param,
        probe=False,
    )
    drafts = [zoo.checkpoint("qwen3", draft=draft) for draft in DRAFTS]
    return Engine.load(engines.build(zoo.checkpoint("qwen3"), drafts, path, config))


def test_each_model_has_its_own(engine: Engine) -> None:
    wanted = {"target": torch.float32, "draft_0": torch.bfloat16, "draft_1": torch.float32}
    assert {model.name: model.dtype for model in engine.manifest.models} == {
        name: str(dtype).removeprefix("torch.") for name, dtype in wanted.items()
    }
    slabs = engine.cache.slabs
    assert {name: {s.dtype for s in slabs[name]} for name in wanted} == {
        name: {dtype} for name, dtype in wanted.items()
    }
    # the drafts are of one shape: half the bytes of a float32 cache, weights as they are stored
    memory = engine.manifest.memory_plan
    assert 2 * memory["draft_0"].cache == memory["draft_1"].cache
    assert memory["draft_0"].weights < 0.6 * memory["draft_1"].weights


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(4, [plan.name for plan in PLANS]))
def test_greedy_and_seeded_output_is_the_targets(zoo: Zoo, engine: Engine, plan: str) -> None:
    prompts = [list(prompt) for prompt in models.prompts()][:4]
    greedy = SamplingParams(temperature=0, max_tokens=models.NUM_TOKENS, ignore_eos=True)
    llm = LLM(engine, plan=plan)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True):
        wanted = zoo.reference("qwen3", prompt, models.NUM_TOKENS).tokens
        assert output.outputs[0].token_ids == wanted
    # the bf16 draft is right often enough that its rows and caches matter
    assert llm.get_metrics().mean_acceptance_length > 1.2
    seeded = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, top_p=0.9, seed=i)
        for i in range(len(prompts))
    ]
    found = [o.outputs[0].token_ids for o in LLM(engine, plan=plan).generate(prompts, seeded)]
    wanted = [o.outputs[0].token_ids for o in LLM(engine, plan="off").generate(prompts, seeded)]
    assert found == wanted


@pytest.mark.parametrize("rule", [pytest.param("mss", marks=pytest.mark.slow), "swor"])
def test_rules_that_read_q_take_rows_of_two_dtypes(engine: Engine, rule: str) -> None:
    """Tokens are drawn from bf16 and float32 rows, and verified against the same."""
    # merged trees keep multiplicity, which is mss
    plan = "tree-2-1-1" if rule == "swor" else "merge-0+1-tree-2-1"
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, seed=i, rule=rule)
        for i in range(4)
    ]
    prompts = [list(prompt) for prompt in models.prompts()][:4]
    llm = LLM(engine, plan=plan)
    outputs = llm.generate(prompts, params)
    assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)
    assert llm.get_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("dtypes", "num_drafts", "found"),
    [
        (("bfloat16",), 0, "1 times --draft-dtype, and 0 draft models"),
        (("bfloat16", "float32"), 1, "2 times --draft-dtype, and 1 draft models"),
        (("bfloat16", "float32"), 3, "2 times --draft-dtype, and 3 draft models"),
    ],
)
def test_as_many_as_drafts(dtypes: tuple[str, ...], num_drafts: int, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        CompileConfig(draft_dtype=dtypes).dtypes_of(num_drafts)
    assert error.value.found == found


def test_which_draft_gets_which() -> None:
    assert CompileConfig().dtypes_of(2) == ["float32"] * 3
    assert CompileConfig(draft_dtype=("bfloat16",)).dtypes_of(2) == ["float32", *["bfloat16"] * 2]
    both = CompileConfig(dtype="bfloat16", draft_dtype=("float32", "bfloat16"))
    assert both.dtypes_of(2) == ["bfloat16", "float32", "bfloat16"]
    with pytest.raises(ConfigError, match="--draft-dtype int8"):
        CompileConfig(draft_dtype=("int8",))
