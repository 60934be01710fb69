"""`--batch-invariant`: a request's logits have the same bits whatever else an engine does.

Log probabilities of prompts and outputs are compared, to the bit, with those of plain decoding of
each request alone, whose prompt is one chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.directory import read_manifest
from specc.artifact.manifest import Manifest
from specc.cli.render import weight_lines
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.lossless import Zoo
from tests.tiers import only

CHAIN, TREE = SpecPlan.from_widths((1, 1, 1, 1)), SpecPlan.from_widths((3, 2, 1))
# latents that are narrower than what they expand to: from 16 tokens of a prompt on it would pay
LATENT = {"qk_nope_head_dim": 8, "v_head_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "latent": ("deepseek_v3", LATENT, {}),
    "windows": ("gemma3-tied", {}, {}),
    "experts": ("mixtral", {}, {}),
    "states": ("lfm2", {}, {}),
    "bfloat16": ("qwen3", {}, {"dtype": "bfloat16"}),
    "int4": ("qwen3", {}, {"quantize": "int4", "quantize_group": 32}),
    "int8-rows": ("qwen3", {}, {"kv_cache_dtype": "int8"}),
    "int4-draft": ("qwen3", {}, {"draft_quantize": "int4"}),
}
SCORED = SamplingParams(
    max_tokens=24, temperature=0, logprobs=3, prompt_logprobs=2, ignore_eos=True
)
LONG, SHORT = 64, 13
Compiled = Callable[..., Path]


@pytest.fixture(scope="module")
def compiled(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Engines whose prompts are one chunk of LONG tokens, or several of SHORT."""
    root = tmp_path_factory.mktemp("invariant")

    @functools.cache
    def make(case: str, chunk: int = LONG, is_invariant: bool = True) -> Path:
        name, changes, options = CASES[case]
        config = CompileConfig(
            plans=(CHAIN, TREE),
            max_batch_size=5,
            max_seq_len=models.MAX_SEQ_LEN,
            block_size=4,
            prefill_chunk=chunk,
            batch_invariant=is_invariant,
            backend="cpu",
            probe=False,
            **options,
        )
        pair = [zoo.checkpoint(name, draft=draft, **changes) for draft in ("target", "noisy")]
        return engines.build(*pair, root / f"{case}-{chunk}-{is_invariant}", config)

    return make


def scores(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Log probabilities of prompts and outputs, of prompts that are decoded together."""
    found = llm.generate(prompts, SCORED)
    return [(x.prompt_logprobs, x.outputs[0].token_ids, x.outputs[0].logprobs) for x in found]


def alone(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    return [scores(LLM(engine, plan="off"), [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("case", only(["latent", "windows"], CASES))
def test_bits_are_those_of_plain_decoding_alone(case: str, compiled: Compiled) -> None:
    # of 40, 33, 16, 7 and 1 tokens: the long ones are at it when there is no more room
    prompts = [list(prompt) for prompt in reversed(models.prompts())]
    engine = Engine.load(compiled(case))
    wanted = alone(engine, prompts)
    for plan in ("off", CHAIN.name, TREE.name):
        assert scores(LLM(engine, plan=plan), prompts) == wanted, plan
    # whose prompts come in parts, beside steps of others, and again after they have given way
    room = max(map(len, prompts)) + SCORED.max_tokens + 16
    crowded = Engine.load(compiled(case, SHORT), kv_cache_tokens=room // 4 * 4)
    llm = LLM(crowded, plan=TREE.name)
    assert scores(llm, prompts) == wanted
    assert llm.get_metrics().num_preemptions > 0


def test_prompts_that_expand_latents_have_other_bits(compiled: Compiled) -> None:
    """Without the option: so the test above would see what it is there for."""
    prompts = [list(prompt) for prompt in models.prompts()]
    one, several = (Engine.load(compiled("latent", chunk, False)) for chunk in (LONG, SHORT))
    assert alone(one, prompts) != alone(several, prompts)


def test_the_manifest_and_inspect_say_so(compiled: Compiled) -> None:
    manifest = read_manifest(compiled("windows"))
    assert manifest.batch_invariant
    assert any("same bits" in line for line in weight_lines(manifest))
    data = manifest.to_json()
    assert Manifest.from_json(data).batch_invariant
    with pytest.raises(EngineError, match="batch_invariant is true, of the backend eager"):
        Manifest.from_json(data | {"backend": "eager"})


@pytest.mark.parametrize(
    "backend", [x for x in backend_names() if "batch_invariant" not in facts_of(x).options]
)
def test_other_backends_do_not_promise_it(backend: str, zoo: Zoo, tmp_path: Path) -> None:
    config = CompileConfig(backend=backend, batch_invariant=True, probe=False)
    with pytest.raises(ConfigError, match="--batch-invariant with backend") as raised:
        engines.build(zoo.checkpoint("qwen3"), [], tmp_path / "e", config)
    assert "--backend cpu" in raised.value.do


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_do_not_promise_it(ranks: str) -> None:
    with pytest.raises(ConfigError, match="--batch-invariant, and --"):
        CompileConfig(batch_invariant=True, **{ranks: 2})
