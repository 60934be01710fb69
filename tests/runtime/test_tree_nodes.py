"""Every node of a tree, accepted or not, sees its own path and nothing else.

Outputs show only what the target accepted; a wrong mask bit of a node that is hardly ever accepted
would not change them. So all nodes of real steps are compared with the Hugging Face models, each
on the tokens of its path alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree
from tests import models
from tests.lossless import PLANS, Zoo

TREES = PLANS[2:]
NUM_STEPS = 3
NUM_TOKENS = 24


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(
            name,
            plan,
            id=f"{name}-{plan.name}",
            marks=[] if i == (2 if name == "mistral" else 1) else [pytest.mark.slow],
        )
        for name in ("mistral", "gpt2")
        for i, plan in enumerate(TREES)
    ],
)
def test_nodes_see_their_own_path(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, name: str, plan: SpecPlan
) -> None:
    index = list(models.DRAFT_NOISE).index(name) % 2
    engine = zoo.engine(name, "noisy", block_size=(16, 0)[index], prefill_chunk=(7, 64)[index])
    steps: list[dict[str, Tensor]] = []
    run = engine.steps[plan.name].run

    def record(environment: dict[str, Tensor]) -> dict[str, float]:
        before = {"cache_len": environment["cache_len"].clone()}
        seconds = run(environment)
        steps.append(before | {key: environment[key].clone() for key in ("tokens", "logits")})
        return seconds

    monkeypatch.setattr(engine.steps[plan.name], "run", record)
    prompts = models.prompts()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm = LLM(engine, plan=plan.name)
    # whole steps, with all requests in them: prompts go first, in passes of their own
    llm._runner.shares_pass = False
    spans = llm._scheduler._prompts
    llm._scheduler._prompts = dataclasses.replace(spans, shares_pass=False)
    outputs = llm.generate(prompts, params)
    texts = [p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)]
    target = zoo.reference_model(name)
    draft = zoo.reference_model(name, draft="noisy")
    # with all requests at work, rows are in the order of the prompts
    full = [step for step in steps if len(step["cache_len"]) == len(prompts)][:NUM_STEPS]
    assert len(full) == NUM_STEPS
    for step in full:
        logits = step["logits"].view(len(prompts), plan.tree.num_nodes, -1)
        for row, text in enumerate(texts):
            known = text[: int(step["cache_len"][row])]
            tokens = step["tokens"][row]
            wanted = logits_by_path(target, plan.tree, known, tokens)
            torch.testing.assert_close(logits[row], wanted, atol=1e-4, rtol=1e-4)
            proposals = logits_by_path(draft, plan.tree, known, tokens)
            for node in sorted(set(range(plan.tree.num_nodes)) - plan.tree.leaves):
                children = list(plan.tree.children(node))
                best = proposals[node].topk(len(children)).indices
                assert tokens[children].tolist() == best.tolist()


@torch.inference_mode()
def logits_by_path(model: Any, tree: TokenTree, known: list[int], tokens: Tensor) -> Tensor:
    """[N, V]: each node's logits, in a plain pass over the known tokens and the node's path.

    `known` are the tokens before the root, `tokens` is [N], the token of each node.
    """
    paths = []
    for node in tree.leaves:
        path = [node]
        while path[0] != 0:
            path.insert(0, tree.parents[path[0]])
        paths.append(path)
    prefix = torch.tensor([known] * len(paths))
    result = model(torch.cat([prefix, tokens[torch.tensor(paths)]], dim=1)).logits
    wanted = result.new_empty(tree.num_nodes, result.shape[-1])
    for i, path in enumerate(paths):
        wanted[path] = result[i, len(known) :]
    return wanted
