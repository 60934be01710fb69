"""What drafts that read hidden states have to go through, of whichever kind they are.

Heads, block drafters and Medusa heads are tested alike: engines over one target, with one draft,
served while an oracle looks at every pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specc.runtime.core import EngineCore
from specc.sampling.params import SamplingParams
from tests import models
from tests.heads import LAYERS, VOCAB, WIDTH
from tests.lossless import Zoo
from tests.runtime.head_rig import BLOCK, TREE, load, prompts_of, serve

SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
}  # fmt: skip
# requests of which any draft has to leave the output as it is
ALL_KINDS = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8})


def write_target(zoo: Zoo) -> Path:
    return zoo.once("head-target", lambda path: models.save_tiny("llama", path, **SIZES))


def open_target(path: Path) -> Any:
    """The target as transformers runs it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def serve_in_little_room(path: Path, oracle: Any) -> None:
    """With blocks for little more than one request: rows are computed again, of both models."""
    core = EngineCore(load(path, kv_cache_tokens=76), TREE.name)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=20, every=1)
    assert core.scheduler.stats.num_preemptions > 1


def serve_with_pauses(path: Path, oracle: Any) -> None:
    """Eight steps without the draft, four with it, twice: it reads what it has missed."""
    core = EngineCore(load(path), TREE.name)
    oracle.watch(core)
    request = core.requests.make(
        prompts_of(BLOCK)[2], SamplingParams(temperature=0, max_tokens=40, seed=1)
    )
    core.scheduler.add(request)
    policies = {name: EngineCore(core.engine, name).scheduler.policy for name in ("off", TREE.name)}
    for i in range(24):
        core.scheduler.use(policies["off" if i % 12 < 8 else TREE.name])
        core.advance()
        oracle.check_rows(core.engine, request)
    assert request.output_token_ids
    assert not request.is_finished


def outputs(core: EngineCore, *kinds: Any) -> list[list[int]]:
    """Of greedy, drawn and filtered requests beside each other, or of other kinds."""
    kinds = kinds or ALL_KINDS
    requests = [
        core.requests.make(
            prompt,
            SamplingParams(max_tokens=16, seed=i, **{"temperature": 0, **kinds[i % len(kinds)]}),
        )
        for i, prompt in enumerate(prompts_of(BLOCK, seed=9))
    ]
    for request in requests:
        core.scheduler.add(request)
    while core.scheduler.has_work:
        core.advance()
    return [request.output_token_ids for request in requests]
