"""Engines of every other kind: their tokens are those of the same graphs on the CPU, and replays.

Self-drafts, quantized weights, a mixture, cached latents, a hybrid, a head that reads hidden
states, block drafters, Medusa heads, offloaded weights, lookups and merged trees, in float32. Each
is compiled here, run operator by operator with the oracles on the CPU, and then in captured steps
on the device. Tokens do not depend on what drafts propose: of block drafters and Medusa heads, what
the target accepts is compared, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu import products
from tests.gpu.count_compiles import count_compiles
from tests.gpu.expected import expected_accepted, expected_tokens
from tests.gpu.pair import ROOT
from tests.gpu.replay import compare, require_graphs
from tests.gpu.results import Device, Results

NUM_TOKENS, MAX_SEQ_LEN, BATCH = 32, 256, 4
# tokens of the prompts: below and above the budgets of self-drafts
PROMPT_LENGTHS = (3, 40, 90, 150)
REPLAYED = 3


@dataclass(frozen=True)
class Kind:
    """An engine.

    Args:
        plans: names of widths, drafts and rule: arguments of `SpecPlan.from_widths`; or `dynamic`
            and the arguments of `DynamicTree`.
        drafts: writes a checkpoint of the draft into a directory; None for no model.
        target: writes that of the target; None is the demo pair's.
        budget: share of the target's bytes that stay on the device; None is all.
        vocab: of the target.
        compares_drafts: as many tokens of each depth are accepted as on the CPU.
    """

    plans: tuple[tuple[Any, ...], ...]
    drafts: Callable[[Path], object] | None = None
    target: Callable[[Path], object] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    budget: float | None = None
    vocab: int = 2000
    compares_drafts: bool = False


def _pair_draft(path: Path) -> None:
    path.symlink_to(ROOT / "examples/pair/draft")


def _hybrid(path: Path) -> None:
    path.symlink_to(ROOT / "examples/hybrid/target")


def _mixture(path: Path, noise: float = 0.0) -> None:
    from tests import models

    models.save_tiny("qwen3_moe", path, noise=noise)


def _latents(path: Path, noise: float = 0.0) -> None:
    """DeepSeek V3 with the latent of the published models, of few and small heads."""
    from tests import models

    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32}
    models.save_tiny("deepseek_v3", path, noise=noise, v_head_dim=32, **widths)


def _head_target(path: Path) -> None:
    from tests import heads, models

    sizes = {"hidden_size": heads.WIDTH, "intermediate_size": 48, "vocab_size": heads.VOCAB}
    models.save_tiny("llama", path, num_hidden_layers=heads.LAYERS, **sizes)


def _head(path: Path) -> None:
    from tests.heads import CASES, write_head

    write_head(path, CASES["safeailab"])


def _block(path: Path, name: str) -> None:
    from tests.block_heads import BLOCK_CASES, write_block

    write_block(path, BLOCK_CASES[name])


def _medusa(path: Path) -> None:
    from tests.medusa_heads import MEDUSA_CASES, write_medusa

    write_medusa(path, MEDUSA_CASES["vllm"])


def _hydra(path: Path, name: str) -> None:
    from tests.draft_kinds.test_hydra import HYDRA_CASES, write_hydra

    write_hydra(path, HYDRA_CASES[name])


def _pard(path: Path) -> None:
    from tests.draft_kinds.pard import write_pard

    write_pard(path, "qwen3-padded")


def _peagle(path: Path) -> None:
    from tests.draft_kinds.peagle import PEAGLE_CASES, write_peagle

    write_peagle(path, PEAGLE_CASES["vllm-peagle"])


_CHAIN = ((1, 1, 1),)
_TREE = ((3, 2, 1),)
_DYNAMIC = ("dynamic", 8, 3, 3)
_MERGED = ((2, 1), ("draft_0", "lookup-2"), "merge")


def _of_one_pass(drafts: Callable[[Path], object]) -> Kind:
    """Of a draft that proposes all depths in one pass."""
    plans = (_CHAIN, _TREE, _DYNAMIC, _MERGED)
    return Kind(plans, drafts, _head_target, vocab=96, compares_drafts=True)


KINDS = {
    "self-drafts": Kind(
        (
            ((1, 1, 1), ("self_w64_s4",)),
            ((2, 2), ("self_w32_s16",)),
            ((1, 1), ("self_w16_s0_b32",)),
            ((1, 1), ("self_w64_s4", "lookup-2"), "merge"),
        )
    ),
    "lookups": Kind((((1, 1, 1, 1), ("lookup-2",)), ((1, 1, 1), ("suffix",)))),
    "int8": Kind((_CHAIN, _TREE), _pair_draft, options={"quantize": "int8"}),
    "int4": Kind((_CHAIN, _TREE), _pair_draft, options={"quantize": "int4"}),
    "fp8": Kind((_CHAIN, _TREE), _pair_draft, options={"quantize": "fp8"}),
    "mixture": Kind((_TREE,), partial(_mixture, noise=0.05), _mixture, vocab=96),
    "mla": Kind(
        (_CHAIN, _TREE, ((1, 1), ("self_w32_s16",))),
        partial(_latents, noise=0.05),
        _latents,
        vocab=96,
    ),
    # gated delta rules, and what their states are after steps of any plan
    "hybrid": Kind((_CHAIN, _TREE, _DYNAMIC), _pair_draft, _hybrid),
    "head": Kind((_CHAIN, _TREE), _head, _head_target, vocab=96),
    # blocks whose layers differ in what their rows see, and logits that tokens before them change
    "block": _of_one_pass(partial(_block, name="z-lab-mixed")),
    "dspark": _of_one_pass(partial(_block, name="dspark-speculators")),
    "dspark-rnn": _of_one_pass(partial(_block, name="dspark-rnn")),
    "medusa": _of_one_pass(_medusa),
    "pard": _of_one_pass(_pard),
    "peagle": _of_one_pass(_peagle),
    "hydra": _of_one_pass(partial(_hydra, name="mlp")),
    "hydra-prefix": _of_one_pass(partial(_hydra, name="prefix")),
    "offloaded": Kind((_CHAIN, _TREE), _pair_draft, budget=0.75),
}


def check(results: Results, device: Device, kind: str) -> None:
    """Each plan of an engine of this kind."""
    device.prepare()
    import torch

    from specc.runtime.backends.capture_limits import CaptureLimits
    from specc.runtime.engine import Engine
    from specc.runtime.execution.batch_rows import last_tokens_of
    from tests.mixed_sampling import mixed_sampling

    case = KINDS[kind]
    count = count_compiles(device)
    products.watch(results)
    with tempfile.TemporaryDirectory() as scratch:
        results.begin("compile")
        path = compile_kind(case, Path(scratch))
        prompts = prompts_of(case)
        results.begin("the same graphs on the CPU")
        wanted = expected_tokens(path, prompts, NUM_TOKENS)
        accepted = {}
        for plan in compared_plans(case):
            results.begin(f"{plan} on the CPU")
            accepted[plan] = expected_accepted(path, plan, prompts, NUM_TOKENS)
        options: dict[str, Any] = {"capture": CaptureLimits.lazy()}
        if case.budget is not None:
            weights = path / "target" / "weights.safetensors"
            options["offload_weights"] = int(case.budget * weights.stat().st_size)
        results.begin("load")
        engine = Engine.load(path, **options)
        for plan in engine.plans:
            run = partial(_generate, engine, plan, prompts, wanted, accepted.get(plan))
            results.check(f"{plan}, tokens", run)
            results.note(compiles=count())
        shape = engine.cache.shape
        table = torch.arange(shape.num_blocks, dtype=torch.int32).view(shape.max_num_seqs, -1)
        num_last = last_tokens_of(engine.plans.values())
        for plan, step in engine.steps.items():
            if any(_is_hosts(draft) for draft in step.plan.drafts):
                continue
            rows = [(*range(5 + b, 5 + b + num_last), 11 + 7 * b) for b in range(REPLAYED)]
            inputs = (rows, table[:REPLAYED], *mixed_sampling(REPLAYED))
            run = partial(compare, engine, step, inputs, device)
            results.check(f"{plan}, replays", run)
            results.note(compiles=count())


def compile_kind(case: Kind, root: Path) -> Path:
    """The engine's directory."""
    from specc.compiler.build import build
    from specc.config import CompileConfig

    target = ROOT / "examples/pair/target"
    if case.target is not None:
        target = root / "target"
        case.target(target)
    drafts = []
    if case.drafts is not None:
        drafts.append(root / "draft")
        case.drafts(drafts[0])
    plans = tuple(map(_plan_of, case.plans))
    config = CompileConfig(
        plans=plans, max_seq_len=MAX_SEQ_LEN, max_batch_size=BATCH, backend="cuda", probe=False,
        **case.options,
    )  # fmt: skip
    build(target, drafts, root / "engine", config)
    return root / "engine"


def compared_plans(case: Kind) -> list[str]:
    """Names of those whose drafts are compared."""
    return [_plan_of(plan).name for plan in case.plans if case.compares_drafts]


def _plan_of(plan: tuple[Any, ...]) -> Any:
    from specc.speculation.plans import MERGE, DynamicTree, SpecPlan

    if plan[0] == "dynamic":
        return SpecPlan.from_dynamic(DynamicTree(*plan[1:]))
    names = {"merge": MERGE, "suffix": "suffix"}
    widths, *rest = plan
    known = [tuple(names.get(n, n) for n in r) if isinstance(r, tuple) else names[r] for r in rest]
    return SpecPlan.from_widths(widths, *known)


def tokens_of(llm: Any, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy output."""
    from specc.sampling.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(list(prompts), params)]


def accepted_of(llm: Any) -> list[int]:
    """Tokens of depth 1, 2, … that its requests have accepted."""
    return list(llm.get_metrics().accepted_at_depth)


def _generate(
    engine: Any,
    plan: str,
    prompts: Sequence[list[int]],
    wanted: Sequence[list[int]],
    accepted: Sequence[int] | None = None,
) -> dict[str, float]:
    """Raises AssertionError: other tokens or drafts, or a step that ran operator by operator."""
    from specc.runtime.llm import LLM

    llm = LLM(engine, plan=plan)
    found = tokens_of(llm, prompts, NUM_TOKENS)
    for i, (own, other) in enumerate(zip(found, wanted, strict=True)):
        place = next((k for k, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), None)
        assert place is None, f"prompt {i}, token {place}: {own[place]}, not {other[place]}"
    require_graphs(engine.steps[plan])
    if accepted is not None:
        own = accepted_of(llm)
        assert own == accepted, f"accepted at depth 1, 2, …: {own}, not {accepted}"
    length = llm.get_metrics().mean_acceptance_length
    return {"tokens": NUM_TOKENS * len(prompts), "mean_acceptance_length": length}


def _is_hosts(draft: str) -> bool:
    """Whether the host chooses what it proposes or sees: a step that is repeated is another."""
    from specc.drafters.views import View

    view = View.named(draft)
    return draft == "suffix" or bool(view and view.chosen)


def prompts_of(case: Kind) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, case.vocab, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS
    ]
