"""Greedy output of the demo pair equals transformers', token for token, but for near ties.

In bfloat16 a tie is two tokens that are closer in exact arithmetic than what roundings can do to
both of them: twice the target's own rounding error at that position, as one logit may be off
upwards and the other one downwards.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu import products
from tests.gpu.count_compiles import count_compiles
from tests.gpu.pair import ROOT, pair_engine, pair_prompts
from tests.gpu.replay import require_graphs
from tests.gpu.results import Device, Results

NUM_PROMPTS, NUM_TOKENS = 8, 64


def check(results: Results, device: Device, dtype: str) -> None:
    """Each plan of an engine of this dtype."""
    device.prepare()
    from tests.near_ties import Tie, require_near_tie

    count = count_compiles(device)
    products.watch(results)
    results.begin("compile")
    model = load(dtype, device)
    exact = model if dtype == "float32" else load("float32", device)
    with tempfile.TemporaryDirectory() as scratch:
        engine = pair_engine(Path(scratch) / dtype, dtype)
        prompts = [engine.tokenizer.encode(p).ids for p in pair_prompts(NUM_PROMPTS)]
        results.begin("references of transformers")
        references = [_generate(model, ids, NUM_TOKENS, device) for ids in prompts]

        def rule(prompt: Any, reference: Any, tie: Tie) -> None:
            tokens = [*prompt, *reference.tokens[: tie.position]]
            error, gap = _error_and_gap(model, exact, tokens, tie, device)
            assert gap < 2 * error, f"{tie}: {gap:.4f} apart, rounded by up to {error:.4f}"

        chosen = require_near_tie if dtype == "float32" else rule
        for plan in engine.plans:
            results.check(plan, partial(compare, engine, plan, prompts, references, chosen))
            results.note(compiles=count())
        for plan in engine.plans if dtype == "float32" else ():
            run = partial(check_controls, engine, plan, prompts[0])
            results.check(f"{plan} under controls", run)
            results.note(compiles=count())


def check_controls(engine: Any, plan: str, prompt: list[int]) -> dict[str, int]:
    """Masks that come between two graphs of a step, which is queued ahead: as without that.

    A mask that is not the tree's own lets a bad word through, at which the request ends.

    Raises:
        AssertionError: other tokens, or a step that was not queued in halves.
    """
    from specc.runtime.backends.captured.pending_replay import HalfReplay
    from specc.runtime.llm import LLM
    from specc.runtime.policies.base import FixedPolicy
    from specc.sampling.params import SamplingParams

    free = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (plain,) = LLM(engine, plan=plan).generate([prompt], free)
    # of several tokens each, so that what is forbidden follows from the token before
    words = list(dict.fromkeys(word for word in plain.outputs[0].text.split() if len(word) > 3))
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, bad_words=words[:8]
    )
    found, halves = [], 0
    complete = HalfReplay.complete

    def counted(half: Any) -> Any:
        nonlocal halves
        halves += 1
        return complete(half)

    HalfReplay.complete = counted  # type: ignore[method-assign]
    try:
        for waits in (True, False):
            policy = FixedPolicy(plan)
            policy.needs_results = waits
            (output,) = LLM(engine, plan=plan, policy=policy).generate([prompt], params)
            completion = output.outputs[0]
            assert completion.finish_reason == "length", completion.stop_reason
            found.append(list(completion.token_ids))
    finally:
        HalfReplay.complete = complete  # type: ignore[method-assign]
    assert found[0] == found[1]
    assert found[0] != list(plain.outputs[0].token_ids), "nothing was forbidden"
    assert halves > 3, halves
    return {"tokens": NUM_TOKENS, "halves": halves}


def compare(
    engine: Any,
    plan: str,
    prompts: Sequence[list[int]],
    references: Sequence[Any],
    rule: Callable[..., None],
) -> dict[str, int]:
    """Tokens that were compared, and those of them that differ within `rule`, which raises.

    Raises:
        AssertionError: another token, or a step that ran operator by operator.
    """
    from specc.runtime.backends.captured.captures import CaptureWarning
    from specc.runtime.llm import LLM
    from specc.sampling.params import SamplingParams
    from tests.near_ties import forgive_near_ties

    llm = LLM(engine, plan=plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        num_ties = 0
        for ids, reference, output in zip(prompts, references, outputs, strict=True):
            found = list(output.outputs[0].token_ids)
            num_ties += len(forgive_near_ties(llm, plan, ids, found, reference, rule))
    reasons = [str(item.message) for item in caught if item.category is CaptureWarning]
    assert not reasons, reasons
    require_graphs(engine.steps[plan])
    return {"tokens": NUM_TOKENS * len(prompts), "near_ties": num_ties}


def load(dtype: str, device: Device) -> Any:
    """The demo pair's target in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    target = ROOT / "examples/pair/target"
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    return model.to(device.place).eval()


def _error_and_gap(
    model: Any, exact: Any, tokens: list[int], tie: Any, device: Device
) -> tuple[float, float]:
    """The rounded model's largest error at a position, and the exact distance of two tokens."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([tokens], device=device.place)
        rounded = model(ids, use_cache=False).logits[0, -1].float()
        wanted = exact(ids, use_cache=False).logits[0, -1].float()
    gap = abs(float(wanted[tie.wanted] - wanted[tie.found]))
    return float((rounded - wanted).abs().max()), gap


def _generate(model: Any, ids: list[int], count: int, device: Device) -> Any:
    import torch

    from tests.near_ties import Reference

    place = device.place
    with torch.inference_mode():
        result = model.generate(
            torch.tensor([ids], device=place),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64, device=place),
            max_new_tokens=count,
            # goes on after EOS, as requests with ignore_eos do; min_new_tokens would mask it
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.stack(result.logits)[:, 0].float().cpu()
    return Reference(result.sequences[0, len(ids) :].tolist(), logits)
