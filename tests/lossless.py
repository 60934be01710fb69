"""Greedy decoding against `transformers.generate`: engines, references, and what is compared."""

from __future__ import annotations

import copy
import fcntl
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.near_ties import (
    Reference,
    Tie,
    TieRule,
    argmax_by_width,
    forgive_near_ties,
    greedy_params,
    is_within_rounding,
    require_near_tie,
)

PLANS = tuple(
    SpecPlan.from_widths(widths) for widths in ((), (1,), (1, 1, 1, 1), (2, 2, 1), (3, 2, 1, 1))
)
PLAN_IDS = [plan.name for plan in PLANS]
BATCH_SIZES = (1, 5)
BLOCK_SIZES = (16, 0)
# the slow tier: which draft, and which of the two layouts
FULL_MATRIX = pytest.mark.parametrize(
    ("draft", "other"),
    [("noisy", False), ("noisy", True), ("target", True), ("random", False)],
    ids=["noisy", "noisy-other-layout", "target", "random"],
)
_SEEDS = {"target": 0, "noisy": 0, "random": 77}


@dataclass
class Outcome:
    stats: SpecStats
    num_compared: int = 0
    ties: list[Tie] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_compared": self.num_compared,
            "forgiven_ties": [asdict(tie) for tie in self.ties],
            "mean_acceptance_length": round(self.stats.mean_acceptance_length, 3),
            "accepted_per_depth": [round(x, 3) for x in self.stats.accepted_per_depth],
        }


class Zoo:
    """Checkpoints, engines and references, each made once.

    Args:
        root: directory for checkpoints and engines; processes of one session may share it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        # a method's cache would keep every zoo alive
        self.checkpoint = functools.cache(self._checkpoint)
        self.compiled = functools.cache(self._compiled)
        self.engine = functools.cache(self._engine)
        self.reference_model = functools.cache(self._reference_model)
        # the number of tokens that were asked for, of which there are fewer after an EOS
        self._references: dict[tuple[Any, ...], tuple[int, Reference]] = {}

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """A directory of the session; of the processes that ask, the first makes it.

        Args:
            make: writes it, where nothing is yet.
        """
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_dir():
                # under another name until it is whole
                scratch = path.with_name(f"{name}.scratch")
                shutil.rmtree(scratch, ignore_errors=True)
                make(scratch)
                scratch.rename(path)
        return path

    def reference(
        self, name: str, prompt: Sequence[int], num_tokens: int, **changes: Any
    ) -> Reference:
        """Greedy continuation of a prompt by `transformers.generate`; see `reference_model`."""
        key = (name, tuple(prompt), *changes.items())
        asked, known = self._references.get(key, (0, None))
        if known is None or asked < num_tokens:
            known = generate(self.reference_model(name, **changes), prompt, num_tokens)
            self._references[key] = num_tokens, known
        return Reference(known.tokens[:num_tokens], known.logits[:num_tokens])

    def _reference_model(self, name: str, dtype: str = "float32", **changes: Any) -> Any:
        path = self.checkpoint(name, **changes)
        return models.read_model(name, path, getattr(torch, dtype))

    def _checkpoint(self, name: str, draft: str = "target", **changes: Any) -> Path:
        noise = models.draft_noise(name) if draft == "noisy" else 0.0
        return self.once(
            "-".join(map(str, (name, draft, *changes.values()))),
            lambda path: models.save_tiny(name, path, _SEEDS[draft], noise, **changes),
        )

    def _compiled(
        self,
        name: str,
        draft: str,
        block_size: int,
        prefill_chunk: int,
        max_seq_len: int,
        dtype: str,
        backend: str,
        **changes: Any,
    ) -> Path:
        config = CompileConfig(
            plans=PLANS,
            dtype=dtype,
            max_batch_size=max(BATCH_SIZES),
            max_seq_len=max_seq_len,
            block_size=block_size,
            prefill_chunk=prefill_chunk,
            backend=backend,
            probe=False,
        )
        target, other = (
            self.checkpoint(name, **changes),
            self.checkpoint(name, draft=draft, **changes),
        )
        layout = f"{block_size}-{prefill_chunk}-{max_seq_len}"
        return self.once(
            "-".join(map(str, ("engine", name, draft, layout, dtype, backend, *changes.values()))),
            lambda path: engines.build(target, other, path, config),
        )

    def _engine(
        self,
        name: str,
        draft: str = "noisy",
        *,
        block_size: int = 16,
        prefill_chunk: int = 64,
        max_num_seqs: int | None = None,
        max_seq_len: int = models.MAX_SEQ_LEN,
        dtype: str = "float32",
        backend: str = "eager",
        **changes: Any,
    ) -> Engine:
        """An engine with all plans; `draft` is the target itself, with noise, or random."""
        layout = block_size, prefill_chunk, max_seq_len
        path = self.compiled(name, draft, *layout, dtype, backend, **changes)
        engine = Engine.load(path, max_num_seqs=max_num_seqs)
        for slabs in engine.cache.slabs.values():
            for slab in slabs:
                # whoever attends to a row that was never written shall not get zeros
                slab.normal_(0.0, 30.0)
        if engine.cache.states is not None:
            for slab in (*engine.cache.states.states, *engine.cache.states.replay):
                slab.normal_(0.0, 30.0)
        return engine


@functools.cache
def shared_zoo(root: Path) -> Zoo:
    """The zoo of a test session; what it holds on disk, workers of pytest-xdist share.

    Args:
        root: temporary directory of this process.
    """
    return Zoo((root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "zoo")


def run_case(
    zoo: Zoo,
    name: str,
    engine: Engine,
    plan: str,
    prompts: Sequence[Sequence[int]],
    num_tokens: int = models.NUM_TOKENS,
    rule: TieRule = require_near_tie,
    **changes: Any,
) -> Outcome:
    """Generate with a plan and compare all tokens with the reference.

    Raises:
        AssertionError: a token differs where the reference has no near tie, or the lengths do.
    """
    llm = LLM(engine, plan=plan)
    outputs = llm.generate([list(prompt) for prompt in prompts], greedy_params(num_tokens))
    outcome = Outcome(llm.get_metrics())
    for prompt, output in zip(prompts, outputs, strict=True):
        reference = zoo.reference(name, prompt, num_tokens, **changes)
        case = f"{name} {plan} batch {len(prompts)} prompt of {len(prompt)}"
        found = output.outputs[0].token_ids
        outcome.ties += forgive_near_ties(llm, case, prompt, found, reference, rule)
        outcome.num_compared += num_tokens
    return outcome


def layout_of(name: str, other: bool = False) -> dict[str, int]:
    """Cache layout and prefill chunk of an architecture in the default tier, or the other one."""
    names = [*models.DRAFT_NOISE, *models.MORE_ARCHITECTURES]
    index = (names.index(name) + other) % 2
    # 7 cuts every prompt but the first two
    return {"block_size": BLOCK_SIZES[index], "prefill_chunk": (7, 64)[index]}


def check_matrix(
    zoo: Zoo,
    name: str,
    plan: SpecPlan,
    draft: str,
    num_tokens: int = models.NUM_TOKENS,
    **options: Any,
) -> list[Outcome]:
    """All prompts in one batch, then one of them alone; `options` are those of `Zoo.engine`."""
    engine = zoo.engine(name, draft, **options)
    prompts = models.prompts()
    alone = prompts[PLANS.index(plan)]
    return [
        run_case(zoo, name, engine, plan.name, batch, num_tokens) for batch in (prompts, [alone])
    ]


def check_full_acceptance(zoo: Zoo, name: str, plan: SpecPlan, **options: Any) -> list[Outcome]:
    """`check_matrix` with a draft that equals the target: all that it proposes is accepted."""
    outcomes = check_matrix(zoo, name, plan, "target", **options)
    for outcome, batch in zip(outcomes, reversed(BATCH_SIZES), strict=True):
        wanted = full_acceptance(plan, models.NUM_TOKENS)
        stats = vars(outcome.stats)
        found = {key: stats[key] for key in wanted}
        assert found == {key: batch * count for key, count in wanted.items()}
    return outcomes


def check_all_plans(zoo: Zoo, name: str, draft: str, **options: Any) -> list[dict[str, Any]]:
    """Every plan; returns a row of figures for each case."""
    rows = []
    for plan in PLANS:
        if draft == "target" and plan.widths:
            found = check_full_acceptance(zoo, name, plan, **options)
        else:
            found = check_matrix(zoo, name, plan, draft, **options)
        for outcome, batch in zip(found, reversed(BATCH_SIZES), strict=True):
            case = {"model": name, "draft": draft, "plan": plan.name, "batch": batch} | options
            rows.append(case | outcome.to_json())
    return rows


def check_join_and_leave(zoo: Zoo, name: str, engine: Engine, plan: str, plain: int = -1) -> None:
    """Requests of several lengths, more than run together: the batch changes between steps.

    Request `plain` runs without speculation.
    """
    lengths = [9, 33, 5, 64, 17]
    llm = LLM(engine, plan=plan)
    prompts = models.prompts()
    params = [
        SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, speculative=index != plain
        )
        for index, length in enumerate(lengths)
    ]
    outputs = llm.generate(prompts, params)
    for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
        whole = zoo.reference(name, prompt, models.NUM_TOKENS)
        reference = Reference(whole.tokens[:length], whole.logits[:length])
        forgive_near_ties(llm, plan, prompt, output.outputs[0].token_ids, reference)


def check_bfloat16(zoo: Zoo, name: str, engine: Engine) -> None:
    """As precise as the target alone: a mismatch needs a position where its rounding decides.

    Either its argmax changes with the width of the pass, or the two tokens are closer in exact
    arithmetic than the target's own error there. The latter is for code that rounds elsewhere
    than the target does: compiled code keeps float32 in fused loops.
    """
    model = zoo.reference_model(name, dtype="bfloat16")
    exact = copy.deepcopy(model).float()

    def require_rounding_to_matter(prompt: Sequence[int], reference: Reference, tie: Tie) -> None:
        tokens = [*prompt, *reference.tokens[: tie.position]]
        choices = argmax_by_width(model, tokens) | argmax_by_width(exact, tokens)
        is_near = is_within_rounding(model, exact, tokens, tie.wanted, tie.found)
        assert len(choices) > 1 or is_near, f"the target alone decides for {choices}: {tie}"

    for plan in ("off", "tree-3-2-1-1"):
        prompts, rule = models.prompts(), require_rounding_to_matter
        outcome = run_case(zoo, name, engine, plan, prompts, 32, rule, dtype="bfloat16")
        # of 160 tokens; the plans meet the same ones
        assert len(outcome.ties) <= 3


def collect_figures(path: Path) -> Iterator[list[dict[str, Any]]]:
    """For fixtures: the list that gets the rows of `check_all_plans`; written at the end."""
    rows: list[dict[str, Any]] = []
    yield rows
    _write_figures(path, rows)


def _write_figures(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows with their sums."""
    path.parent.mkdir(exist_ok=True)
    summary = {
        "num_cases": len(rows),
        "num_compared_tokens": sum(row["num_compared"] for row in rows),
        "num_forgiven_ties": sum(len(row["forgiven_ties"]) for row in rows),
        "cases": rows,
    }
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def full_acceptance(plan: SpecPlan, num_tokens: int) -> dict[str, int]:
    """Counters of one request whose every proposal is accepted, as speculation.metrics counts."""
    longest = len(plan.widths) + 1
    # prefill yields the first token
    num_steps, rest = divmod(num_tokens - 1, longest)
    sizes = [plan.tree.depths.count(depth) for depth in range(1, longest)]
    counters = {
        "num_steps": num_steps,
        "num_draft_tokens": num_steps * sum(sizes),
        "num_accepted_tokens": num_steps * (longest - 1),
        "num_trimmed_tokens": 0,
    }
    if rest:
        # the last emitted token of a trimmed step counts as its bonus token
        counters["num_steps"] += 1
        counters["num_draft_tokens"] += sum(sizes[: rest - 1])
        counters["num_accepted_tokens"] += rest - 1
        counters["num_trimmed_tokens"] += longest - rest
    return counters


def generate(model: Any, prompt: Sequence[int], num_tokens: int, **options: Any) -> Reference:
    ids = torch.tensor([list(prompt)])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    tokens = result.sequences[0, len(prompt) :].tolist()
    return Reference(tokens, torch.stack(result.logits)[:, 0])
