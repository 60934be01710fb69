"""Engines with a random head of each kind: outputs are the target's, and acceptance is the head's.

The slow tier leaves its figures in build/head_distribution.json.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.drafters.registry import drafters_of
from specc.passes.drafters.lattice import Lattice
from specc.passes.drafters.path_score import wide
from specc.passes.step import draft_levels
from specc.runtime.engine import Engine
from specc.sampling.rows import Rule
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.block_heads import write_block
from tests.draft_kinds.mtp import with_module
from tests.kept import content_hash
from tests.lossless import Zoo
from tests.mtp import write_target
from tests.runtime.drawn_heads import (
    ASSISTANTS,
    BLOCKS,
    DOMINOS,
    FITTED,
    JETSPEC,
    KINDS,
    MTP,
    PARD,
    PEAGLES,
    SIZES,
    UNO,
    UNO_DRAFT,
    VOCAB,
    XPRESSES,
    head_of,
    write_draft,
)
from tests.runtime.head_draws import (
    PROMPT,
    Exact,
    accepted_by,
    collect_draws,
    draw,
    row_of,
)
from tests.runtime.head_rig import BUDGET, CHAIN, DYNAMIC, TREE, load, options

PLANS = (CHAIN, TREE, DYNAMIC, BUDGET)
BATCH = 64
NUM_DRAWS = 20_000
MANY_DRAWS = 200_000
# whose pass says which tokens may follow: to leave one out is to bias
OF_CANDIDATES = ("dflash2", "lilicorr")
# of which there are many draws
MANY = (JETSPEC, *OF_CANDIDATES, *DOMINOS, *XPRESSES, PARD, *PEAGLES, *ASSISTANTS, UNO)
CASES_OF_ALL = [
    (kind, plan, rule)
    for kind in KINDS
    for plan in PLANS
    for rule in (Rule if plan is not DYNAMIC else (Rule.COUPLED, Rule.DELTA))
]


def ids(value: Any) -> str:
    return value if isinstance(value, str) else value.name.lower()


def config_of(**changes: Any) -> CompileConfig:
    """Prompts of a whole batch are read in one pass, so that steps are full."""
    chunk = BATCH * len(PROMPT)
    changes = {"plans": PLANS, **changes}
    return options(max_batch_size=BATCH, max_seq_len=24, prefill_chunk=chunk, **changes)


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    path = request.config.rootpath / "build" / "head_distribution.json"
    yield from collect_draws(path, len(CASES_OF_ALL))


@pytest.fixture(scope="module")
def checkpoint(zoo: Zoo) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        if kind == "mtp":
            return zoo.once("drawn-mtp", lambda path: write_target(MTP, path, vocab=VOCAB))
        return zoo.once("drawn-target", lambda path: models.save_tiny("llama", path, **SIZES))

    return make


@pytest.fixture(scope="module")
def target_of(checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    from transformers import AutoModelForCausalLM

    def make(kind: str) -> Any:
        path = checkpoint(kind)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    return make


@pytest.fixture(scope="module")
def engine_of(
    zoo: Zoo, checkpoint: Callable[[str], Path], draft_of: Callable[[str], Path]
) -> Callable[..., Engine]:
    def with_adapter(target: Path, _: object, path: Path, config: CompileConfig) -> None:
        build(target, (), path, replace(config, lora=(f"a0={draft_of(UNO)}",)))

    def make(kind: str, backend: str = "cpu", plans: tuple[SpecPlan, ...] = PLANS) -> Engine:
        target, how = checkpoint(kind), {}
        heads: Any = ()
        if kind == "mtp":
            how = {"builder": with_module, "key": ("mtp",)}
        elif kind == UNO:
            how = {"builder": with_adapter, "key": (UNO, content_hash(draft_of(UNO)))}
            plans = tuple(replace(plan, drafters=drafters_of(UNO_DRAFT)) for plan in plans)
        else:
            heads = draft_of(kind)
        config = config_of(backend=backend, plans=plans)
        return load(
            zoo.once(
                f"drawn-{kind}-{backend}-{len(plans)}",
                lambda path: engines.build(target, heads, path, config, **how),
            )
        )

    return make


@pytest.fixture(scope="module")
def draft_of(zoo: Zoo, target_of: Callable[[str], Any]) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        return zoo.once(
            f"drawn-{kind}", lambda path: write_draft(kind, path, lambda: target_of(kind))
        )

    return make


@pytest.fixture(scope="module")
def exact_of(
    target_of: Callable[[str], Any], draft_of: Callable[[str], Path]
) -> Callable[[str], Exact]:
    known: dict[str, Exact] = {}

    def make(kind: str) -> Exact:
        if kind not in known:
            target = target_of(kind)
            adapter = draft_of(UNO) if kind == UNO else None
            known[kind] = Exact(target, head_of(kind, target, adapter))
        return known[kind]

    return make


def check(
    engine: Engine,
    exact: Exact,
    kind: str,
    plan: SpecPlan,
    rule: Rule,
    num: int,
    depth: int = 3,
) -> dict[str, Any]:
    """Draw and compare, of static trees also what is accepted of the first depths; figures."""
    name = f"{kind}-{plan.name}-{rule.name.lower()}"
    drawn = draw(engine, plan, rule, num, zlib.crc32(name.encode()) << 20)
    outcome = exact.outcome(drawn)
    assert outcome.is_lossless, outcome
    assert outcome.num_draws == num
    assert outcome.accepted_per_step > 0.02, "hardly anything was speculated"
    found = exact.acceptances(drawn, rule, plan.widths[:depth])
    for one in found:
        assert one.chi_square < one.bound, one
    return row_of({"case": name}, outcome, found)


# of all but the first, what a mutant changes is seen
FEW = [("eagle3", 64), *((kind, 640) for kind in (FITTED, *KINDS))]


# the default tier has what children are drawn from, and draws of operators
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num"), [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in FEW]
)
def test_trees_in_an_interpreted_engine(
    engine_of: Callable[..., Engine], exact_of: Callable[[str], Exact], kind: str, num: int
) -> None:
    depth = 1 if num == FEW[0][1] else 3
    check(engine_of(kind, "eager"), exact_of(kind), kind, TREE, Rule.MSS, num, depth)


def test_a_model_that_reads_masks(
    engine_of: Callable[..., Engine], exact_of: Callable[[str], Exact]
) -> None:
    check(engine_of(PARD), exact_of(PARD), PARD, TREE, Rule.MSS, 1280)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "plan", "rule"), CASES_OF_ALL, ids=ids)
def test_every_case(
    engine_of: Callable[..., Engine],
    exact_of: Callable[[str], Exact],
    figures: list[dict[str, Any]],
    kind: str,
    plan: SpecPlan,
    rule: Rule,
) -> None:
    num = MANY_DRAWS if kind in MANY else NUM_DRAWS
    figures.append(check(engine_of(kind), exact_of(kind), kind, plan, rule, num))


@pytest.mark.parametrize("kind", OF_CANDIDATES)
def test_a_few_draws(
    engine_of: Callable[..., Engine], exact_of: Callable[[str], Exact], kind: str
) -> None:
    engine = engine_of(kind, plans=(TREE,))
    check(engine, exact_of(kind), kind, TREE, Rule.SWOR, 640)


def compile_told_of_rows(target: Path, draft: Path, root: Path, plan: SpecPlan) -> None:
    """An engine whose step verifies with the rows of a pass, of all tokens, where children were
    drawn by what a score makes of their candidates.
    """
    feed, draw_children = Lattice.feed_level, draft_levels.children
    scored: list[Any] = []

    def feed_level(self: Lattice, g: Any, *given: Any) -> Any:
        scored[:] = [feed(self, g, *given)]
        count, depth = given[3], given[4]
        row = g.call(torch.ops.aten.slice.Tensor, self.levels[depth], 1, 0, -self.width)
        return wide(g, row, count)

    def children(g: Any, logits: Any, *given: Any, **named: Any) -> Any:
        return draw_children(g, scored[0], *given, **named)

    with (
        mock.patch.object(Lattice, "feed_level", feed_level),
        mock.patch.object(draft_levels, "children", children),
    ):
        # not one of those that are kept: its sources are others
        build(target, draft, root, config_of(backend="cpu", plans=(plan,)))


@pytest.mark.parametrize("num", [1280, pytest.param(MANY_DRAWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("dflash2", Rule.SWOR),
        pytest.param("dflash2", Rule.MSS, marks=pytest.mark.slow),
        pytest.param("lilicorr", Rule.MSS, marks=pytest.mark.slow),
        pytest.param("lilicorr", Rule.SWOR, marks=pytest.mark.slow),
    ],
    ids=ids,
)
def test_rows_told_in_place_of_scores_are_refused(
    checkpoint: Callable[[str], Path],
    exact_of: Callable[[str], Exact],
    tmp_path: Path,
    kind: str,
    rule: Rule,
    num: int,
) -> None:
    """What `test_a_few_draws` and `test_every_case` pass where rules are told what was drawn from;
    by few draws, acceptance alone tells.
    """
    write_block(tmp_path / "draft", BLOCKS[kind])
    compile_told_of_rows(checkpoint(kind), tmp_path / "draft", tmp_path / "engine", TREE)
    drawn = draw(load(tmp_path / "engine"), TREE, rule, num, zlib.crc32(b"told") << 20)
    exact = exact_of(kind)
    outcome, found = exact.outcome(drawn), exact.acceptances(drawn, rule, TREE.widths)
    assert found[0].chi_square > 2 * found[0].bound, found
    if num == MANY_DRAWS:
        assert outcome.chi_square > 2 * outcome.chi_square_bound, outcome


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("rule", Rule, ids=ids)
def test_what_is_accepted(rule: Rule, count: int) -> None:
    """The formulas, beside draws as the rules are described."""
    generator, num = torch.Generator().manual_seed(4), 40_000
    p, q = (3 * torch.rand(2, 5, generator=generator, dtype=torch.float64)).softmax(1)
    q[1] = 0.0
    q = q / q.sum()

    def noise() -> Tensor:
        return -torch.empty(num, 5, dtype=torch.float64).exponential_(generator=generator).log()

    def best(scores: Tensor) -> Tensor:
        return scores.topk(count, dim=1).indices

    shared = noise()
    drawn = {
        Rule.COUPLED: lambda: best(q.log() + shared),
        Rule.DELTA: lambda: best(q.log().expand(num, -1)),
        Rule.MSS: lambda: torch.stack([(q.log() + noise()).argmax(1) for _ in range(count)], 1),
        Rule.SWOR: lambda: best(q.log() + noise()),
    }[rule]()
    if rule in (Rule.COUPLED, Rule.DELTA):
        winner = (p.log() + shared).argmax(1)
        kept = winner[(drawn == winner[:, None]).any(1)]
    else:
        uniform = torch.rand(num, count, generator=generator, dtype=torch.float64)
        kept = tried(p, q, drawn, uniform, rule)
    found = torch.bincount(kept, minlength=5).double() / num
    torch.testing.assert_close(found, accepted_by(rule, p, q, count), atol=0.012, rtol=0.0)


def tried(p: Tensor, q: Tensor, drawn: Tensor, uniform: Tensor, rule: Rule) -> Tensor:
    """Tokens that are accepted, of rows of draws; see `Rule`."""
    left, source = (x.expand(len(drawn), -1) for x in (p, q))
    open_, accepted = torch.ones(len(drawn)).bool(), []
    for token, u in zip(drawn.T[..., None], uniform.T[..., None], strict=True):
        is_kept = (u * source.gather(1, token) <= left.gather(1, token))[:, 0] & open_
        accepted.append(token[is_kept, 0])
        open_ = open_ & ~is_kept
        left = (left - source).clamp(min=0)
        left = left / left.sum(1, keepdim=True)
        if rule == Rule.SWOR:
            source = source.scatter(1, token, 0.0)
            source = source / source.sum(1, keepdim=True)
    return torch.cat(accepted)
