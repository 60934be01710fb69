"""Engines with a random head of each kind: outputs are the target's, and acceptance is the head's.

The slow tier leaves its figures in build/head_distribution.json.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.passes.drafters.lattice import Lattice
from specc.passes.drafters.path_score import wide
from specc.passes.step import draft_levels
from specc.runtime.engine import Engine
from specc.sampling.rows import Rule
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.assistants import (
    ASSISTANT_CASES,
    AssistantReference,
    TargetRows,
    write_assistant,
)
from tests.assistants import draw_tensors as draw_assistant
from tests.block_heads import BLOCK_CASES, write_block
from tests.block_heads import draw_tensors as draw_block
from tests.block_reference import BlockReference
from tests.draft_kinds.mtp import with_module
from tests.draft_kinds.pard import PardReference
from tests.draft_kinds.peagle import PEAGLE_CASES, PeagleReference, Read, draw_peagle, write_peagle
from tests.draft_kinds.test_hydra import HYDRA_CASES, HydraReference, write_hydra
from tests.draft_kinds.test_hydra import draw_tensors as draw_hydra
from tests.head_reference import Reference, hidden_states
from tests.heads import CASES, WIDTH, write_head
from tests.heads import draw_tensors as draw_head
from tests.kernels.distribution import VOCAB
from tests.lilicorr_reference import LiLiCorrCase
from tests.lossless import Zoo
from tests.medusa_heads import MEDUSA_CASES, MedusaReference, write_medusa
from tests.medusa_heads import draw_tensors as draw_medusa
from tests.mtp import MtpReference, write_target
from tests.runtime.head_draws import (
    PROMPT,
    Exact,
    Head,
    accepted_by,
    collect_draws,
    draw,
    fitted,
    row_of,
)
from tests.runtime.head_rig import BUDGET, CHAIN, DYNAMIC, TREE, load, options

LAYERS, PLACES = 4, (2, 3)
# kind → a head with logits for some of the target's tokens, where the layout has that
HEADS = {
    "eagle3": replace(
        CASES["speculators-3.1"],
        rows=4,
        vocab=VOCAB,
        boundaries=PLACES,
        config={"norm_output": True, "eagle_aux_hidden_state_layer_ids": list(PLACES)},
    )
}
# likes what the target does: whatever it reads in place of what it has to, it proposes worse tokens
FITTED = "eagle3-fitted"
HEADS[FITTED] = HEADS["eagle3"]
BLOCKS = {
    "dflash": replace(
        BLOCK_CASES["z-lab"],
        rows=VOCAB,
        vocab=VOCAB,
        boundaries=PLACES,
        config={"num_target_layers": LAYERS, "block_size": 5},
    ),
    "dspark": replace(BLOCK_CASES["dspark-speculators"], rows=4, vocab=VOCAB, boundaries=PLACES),
    # what is added for the token before depends on a row's hidden state, or on all tokens before
    "dspark-gated": replace(
        BLOCK_CASES["dspark-gated"],
        rows=VOCAB,
        vocab=VOCAB,
        boundaries=PLACES,
        config={"num_target_layers": LAYERS, "block_size": 4},
    ),
    "dspark-rnn": replace(BLOCK_CASES["dspark-rnn"], rows=4, vocab=VOCAB, boundaries=PLACES),
    # among some tokens of each row alone, by the token before, or by which of them it is
    "dflash2": replace(
        BLOCK_CASES["dflash2"],
        rows=VOCAB,
        vocab=VOCAB,
        boundaries=PLACES,
        candidates=4,
        config={"is_causal": False, "num_target_layers": LAYERS},
    ),
    "lilicorr": replace(
        BLOCK_CASES["lilicorr"],
        rows=VOCAB,
        vocab=VOCAB,
        boundaries=PLACES,
        lilicorr=LiLiCorrCase(width=12, layers=2, heads=3, scale=1.5),
        config={"block_size": 5, "num_target_layers": LAYERS},
    ),
}
MEDUSA = "medusa"
# with logits for some of the target's tokens, of rows in another order
MEDUSAS = {MEDUSA: replace(MEDUSA_CASES["vllm"], kept=4, rows=4, vocab=VOCAB, boundaries=(LAYERS,))}
MTP = "glm4_moe"
# heads that read the tokens drafted before, and the hidden states of all tokens
HYDRAS = {
    "hydra": replace(HYDRA_CASES["mlp"], vocab=VOCAB, boundaries=(LAYERS,)),
    "hydra_prefix": replace(HYDRA_CASES["prefix"], vocab=VOCAB, boundaries=(LAYERS,)),
}
# reads tokens and masks alone; its mask is none of the target's ids
PARD = "pard"
PARD_SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 48, "head_dim": 8, "vocab_size": VOCAB + 2,
    "pard_token": VOCAB + 1,
}  # fmt: skip
# the mask is one of the target's ids, as all that it reads are
PEAGLES = {
    "peagle": replace(
        PEAGLE_CASES["speculators-peagle"],
        rows=4,
        vocab=VOCAB,
        boundaries=PLACES,
        config={
            **PEAGLE_CASES["speculators-peagle"].config,
            "eagle_aux_hidden_state_layer_ids": list(PLACES),
            "mask_token_id": VOCAB - 1,
        },
    )
}
# over the target's own cache
ASSISTANTS = {"gemma4_assistant": replace(ASSISTANT_CASES["llama"], vocab=VOCAB)}
KINDS = ("eagle3", "mtp", *BLOCKS, MEDUSA, *HYDRAS, PARD, *PEAGLES, *ASSISTANTS)
PLANS = (CHAIN, TREE, DYNAMIC, BUDGET)
BATCH = 64
NUM_DRAWS = 20_000
# of kinds whose pass says which tokens may follow: to leave one out is to bias
MANY_DRAWS = 200_000
OF_CANDIDATES = ("dflash2", "lilicorr")
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
}  # fmt: skip
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
    zoo: Zoo, checkpoint: Callable[[str], Path], target_of: Callable[[str], Any]
) -> Callable[..., Engine]:
    def write(kind: str, path: Path) -> object:
        if kind in BLOCKS:
            return write_block(path, BLOCKS[kind])
        if kind in MEDUSAS:
            return write_medusa(path, MEDUSAS[kind])
        if kind in HYDRAS:
            return write_hydra(path, HYDRAS[kind])
        if kind in PEAGLES:
            return write_peagle(path, PEAGLES[kind])
        if kind == PARD:
            return models.save_tiny("qwen3", path, 31, **PARD_SIZES)
        if kind in ASSISTANTS:
            return write_assistant(path, ASSISTANTS[kind])
        write_head(path, HEADS[kind])
        if kind == FITTED:
            tensors = tensors_of(kind, target_of(kind))
            save_file(tensors, path / "model.safetensors")
        return path

    def make(kind: str, backend: str = "cpu", plans: tuple[SpecPlan, ...] = PLANS) -> Engine:
        target, config = checkpoint(kind), config_of(backend=backend, plans=plans)
        if kind == "mtp":
            build = {"builder": with_module, "key": ("mtp",)}
            heads: Any = ()
        else:
            build, heads = {}, zoo.once(f"drawn-{kind}", lambda path: write(kind, path))
        return load(
            zoo.once(
                f"drawn-{kind}-{backend}-{len(plans)}",
                lambda path: engines.build(target, heads, path, config, **build),
            )
        )

    return make


@pytest.fixture(scope="module")
def exact_of(target_of: Callable[[str], Any]) -> Callable[[str], Exact]:
    known: dict[str, Exact] = {}

    def make(kind: str) -> Exact:
        if kind not in known:
            target = target_of(kind)
            known[kind] = Exact(target, head_of(kind, target))
        return known[kind]

    return make


def tensors_of(kind: str, target: Any) -> dict[str, Tensor]:
    """Of a head's checkpoint."""
    tensors = draw_head(HEADS[kind])
    return fitted(HEADS[kind], tensors, target) if kind == FITTED else tensors


def head_of(kind: str, target: Any) -> Head:
    """Logits of a reference of the head: by formulas, or by transformers."""
    ends = (target.get_input_embeddings(), target.get_output_embeddings())
    embedding, head = (end.weight.detach() for end in ends)
    if kind == PARD:
        model = PardReference(models.build_model("qwen3", 31, **PARD_SIZES), VOCAB)
        return lambda tokens, path: model.after(torch.tensor(tokens[:-1]), tokens[-1], path)
    if kind in PEAGLES:
        masked = PeagleReference(PEAGLES[kind], draw_peagle(PEAGLES[kind]), embedding)

        def logits_of_masks(tokens: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
            taps = hidden_states(target, tokens[:-1], masked.case.boundaries)
            return masked.after(Read(taps, list(tokens)), tokens[-1], path)

        return logits_of_masks
    if kind in ASSISTANTS:
        case, rows = ASSISTANTS[kind], TargetRows(copy.deepcopy(target).double())
        assistant = AssistantReference(case, draw_assistant(case), rows)
        return lambda tokens, path: assistant.logits(tokens, path).float()
    if kind not in ("mtp", *HEADS):
        block: Any
        if kind in MEDUSAS:
            block = MedusaReference(MEDUSAS[kind], draw_medusa(MEDUSAS[kind]))
        elif kind in HYDRAS:
            block = HydraReference(HYDRAS[kind], draw_hydra(HYDRAS[kind]), embedding)
        else:
            block = BlockReference(BLOCKS[kind], draw_block(BLOCKS[kind]), embedding, head)
        boundaries = block.case.boundaries

        def logits(tokens: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
            taps = hidden_states(target, tokens[:-1], boundaries)
            return block.after(taps, tokens[-1], path)

        return logits
    reference: Reference | MtpReference
    if kind == "mtp":
        reference = MtpReference(target, MTP)
    else:
        reference = Reference(HEADS[kind], tensors_of(kind, target), embedding)

    def logits_of_rows(tokens: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        taps = hidden_states(target, tokens[:-1], reference.case.boundaries)
        return reference.logits(taps, tokens, path)

    return logits_of_rows


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
@pytest.mark.parametrize("rule", Rule, ids=ids)
@pytest.mark.parametrize("kind", [PARD, *PEAGLES])
def test_many_draws_of_masks(
    engine_of: Callable[..., Engine], exact_of: Callable[[str], Exact], kind: str, rule: Rule
) -> None:
    for plan in (TREE, BUDGET):
        check(engine_of(kind), exact_of(kind), kind, plan, rule, 10 * NUM_DRAWS)


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
    num = MANY_DRAWS if kind in OF_CANDIDATES else NUM_DRAWS
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
