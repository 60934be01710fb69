"""Greedy output of the demo pair equals transformers', token for token, but for near ties.

In bfloat16 a tie is two tokens that are closer in exact arithmetic than the target's own rounding
error at that position.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu import products
from tests.gpu.count_compiles import count_compiles
from tests.gpu.pair import ROOT, pair_engine
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
        prompts = [engine.tokenizer.encode(p).ids for p in _prompts(NUM_PROMPTS)]
        results.begin("references of transformers")
        references = [_generate(model, ids, NUM_TOKENS, device) for ids in prompts]

        def rule(prompt: Any, reference: Any, tie: Tie) -> None:
            tokens = [*prompt, *reference.tokens[: tie.position]]
            assert _error(model, exact, tokens, tie, device) > 0, tie

        chosen = require_near_tie if dtype == "float32" else rule
        for plan in engine.plans:
            results.check(plan, partial(compare, engine, plan, prompts, references, chosen))
            results.note(compiles=count())


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
    from specc.runtime.backends.captured.captured_step import CaptureWarning
    from specc.runtime.llm import LLM
    from specc.sampling.params import SamplingParams
    from tests.near_ties import forgive_near_ties

    llm = LLM(engine, plan=plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
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


def _error(model: Any, exact: Any, tokens: list[int], tie: Any, device: Device) -> float:
    """The rounded model's error at a position, less the exact distance of two tokens there."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([tokens], device=device.place)
        rounded = model(ids, use_cache=False).logits[0, -1].float()
        wanted = exact(ids, use_cache=False).logits[0, -1].float()
    gap = abs(float(wanted[tie.wanted] - wanted[tie.found]))
    return float((rounded - wanted).abs().max()) - gap


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


def _prompts(count: int) -> list[str]:
    lines = (ROOT / "examples/pair/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]
