"""Self-drafts that run a second program of the target: fewer layers, or windows in the operators.

As with views, tokens alone tell little: K and V of every layer are compared with those of plain
decoding. What a draft sees is compared with the model of transformers that has these layers alone,
and caches that are poisoned show which of them it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specc.config import CompileConfig
from specc.runtime.backends.program_files import read_json
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from tests import engines, models
from tests.runtime.test_views import RowOracle, serve
from tests.tiers import every

# those of Gemma 3: the second one sees all rows, the others 16
LAYERS = 3
WHOLE = "self_w88_s0"
LLAMA = [
    SpecPlan.from_widths((1,), ("self_x1",)),
    SpecPlan.from_widths((1, 1, 1, 1), ("self_l0to1",)),
    SpecPlan.from_widths((3, 2, 1), ("self_x0",)),
    SpecPlan.from_dynamic(DynamicTree(6, 3, 3), "self_l1"),
    # fewer layers over a short block table
    SpecPlan.from_widths((1, 1, 1), ("self_l0to1_w8_s4",)),
    SpecPlan.from_widths((2, 1), ("self_x1", "self_w8_s4", "lookup-2"), MERGE),
    SpecPlan.from_widths((1, 1, 1), ("self_x2", "self_x0_w8_s0", "suffix"), VOTE),
]
GEMMA = [
    # windows of the operators, and the whole table
    SpecPlan.from_widths((1, 1, 1, 1), ("self_w8_s4",)),
    SpecPlan.from_widths((3, 2, 1), ("self_w32_s0",)),
    SpecPlan.from_widths((1, 1), ("self_l0_2",)),
    SpecPlan.from_widths((2, 1), ("self_l0to1_w8_s4",)),
    # no layer of this one slides: a short table again
    SpecPlan.from_widths((1, 1), ("self_l1_w8_s4",)),
    SpecPlan.from_dynamic(DynamicTree(6, 3, 3), "self_w8_s0"),
]
EXACT = {
    "llama": [
        SpecPlan.from_widths((1, 1, 1, 1), ("self_l0to2_w88_s4",)),
        SpecPlan.from_widths((3, 2, 1), ("self_l0to2_w88_s4",)),
    ],
    "gemma3": [SpecPlan.from_widths(w, (WHOLE,)) for w in ((1, 1, 1, 1), (3, 2, 1))],
}
CASES = [("llama", plan) for plan in LLAMA] + [("gemma3", plan) for plan in GEMMA]
IDS = [f"{name}-{plan.name}" for name, plan in CASES]


def in_turn(batches: Sequence[int]) -> list[Any]:
    """Each draft with one of these; with the others in the slow tier."""
    return [
        pytest.param(
            *case,
            batch,
            id=f"{label}-{batch}",
            marks=[] if (i + j) % 2 == 0 else [pytest.mark.slow],
        )
        for i, (case, label) in enumerate(zip(CASES, IDS, strict=True))
        for j, batch in enumerate(batches)
    ]


LENGTHS = (3, 11, 12, 15, 16, 17, 20, 21, 40)


class Made:
    """An engine, its plain twin, and the model that both are of."""

    def __init__(self, root: Path, name: str, plans: Sequence[SpecPlan]) -> None:
        models.save_tiny(name, root / "target", num_hidden_layers=LAYERS)
        config = CompileConfig(
            plans=tuple(plans), max_seq_len=96, max_batch_size=5, block_size=4,
            prefill_chunk=16, backend="eager", probe=False,
        )  # fmt: skip
        self.path = engines.build(root / "target", [], root / "engine", config)
        self.engine, plain = Engine.load(self.path), Engine.load(self.path)
        self.model = models.build_model(name, num_hidden_layers=LAYERS)
        self.oracle = RowOracle(plain)
        self._plain = LLM(Engine.load(self.path), plan="off")
        torch.manual_seed(3)
        for slab in self.engine.cache.slabs["target"]:
            slab.normal_(0.0, 30.0)

    def plainly(self, texts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in self._plain.generate(texts, params)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    known: dict[str, Made] = {}
    plans = {"llama": [*LLAMA, *EXACT["llama"]], "gemma3": [*GEMMA, *EXACT["gemma3"]]}

    def make(name: str) -> Made:
        if name not in known:
            known[name] = Made(tmp_path_factory.mktemp(name), name, plans[name])
        return known[name]

    return make


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    dice = torch.Generator().manual_seed(11)
    return [torch.randint(0, models.VOCAB, (n,), generator=dice).tolist() for n in LENGTHS]


@pytest.mark.default("llama-merge-selfx1+selfw8s4+lookup2-tree-2-1-5")
@pytest.mark.parametrize(("name", "plan", "batch"), every(4, in_turn([1, 5]), 1))
def test_greedy_tokens_and_rows(
    made: Callable[[str], Made], texts: list[list[int]], name: str, plan: SpecPlan, batch: int
) -> None:
    """Ragged batches, around the ends of windows and of what a view sees."""
    own = made(name)
    chosen = texts if batch > 1 else texts[3::5]
    core = EngineCore(own.engine, plan.name, shares_prefixes=False)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    before = own.oracle.num_rows
    for first in range(0, len(chosen), batch):
        part = chosen[first : first + batch]
        wanted = own.plainly(part, [params] * len(part))
        found = serve(core, part, [params] * len(part), lambda r: own.oracle.check(own.engine, r))
        assert found == wanted
    assert core.scheduler.stats.num_spec_steps > 10
    assert own.oracle.num_rows - before > 200


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan", "batch"), every(6, in_turn([5]), 5))
def test_seeded_tokens_and_rows(
    made: Callable[[str], Made], texts: list[list[int]], name: str, plan: SpecPlan, batch: int
) -> None:
    own, chosen = made(name), texts[3 : 3 + batch]
    mixed = [
        (1.0, {}), (0.7, {"top_p": 0.9}), (1.0, {"repetition_penalty": 1.2}),
        (1.0, {"rule": "delta"}), (0.5, {"top_k": 5, "presence_penalty": 0.3}),
    ]  # fmt: skip
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, seed=i, temperature=t, **options)
        for i, (t, options) in enumerate(mixed)
    ]
    wanted = own.plainly(chosen, params)
    core = EngineCore(own.engine, plan.name, shares_prefixes=False)
    assert serve(core, chosen, params, lambda r: own.oracle.check(own.engine, r)) == wanted


@pytest.mark.default("llama-selfl0to2w88s4-tree-3-2-1-swor", "gemma3-selfw88s0-chain-4-coupled")
@pytest.mark.parametrize(
    ("name", "plan", "rule"),
    every(
        3,
        [
            pytest.param(name, plan, rule, id=f"{name}-{plan.name}-{rule or 'greedy'}")
            for name, plans in EXACT.items()
            for plan in plans
            for rule in ("", "coupled", "swor", "mss")
            if rule in ("", "coupled") or plan.is_static
        ],
    ),
)
def test_all_layers_and_all_rows_are_always_right(
    made: Callable[[str], Made], texts: list[list[int]], name: str, plan: SpecPlan, rule: str
) -> None:
    """The draft is the target: weights, caches, windows, positions and noise agree."""
    own = made(name)
    sampled = {"temperature": 1.0, "rule": rule} if rule else {"temperature": 0.0}
    count = 1 + 4 * (plan.max_depth + 1)
    params = [
        SamplingParams(max_tokens=count, ignore_eos=True, seed=i, **{"temperature": 0, **sampled})
        for i in range(5)
    ]
    llm = LLM(own.engine, plan=plan.name)
    llm.generate(texts[4:9], params)
    assert llm.get_metrics().mean_acceptance_length == plan.max_depth + 1


def root_logits(engine: Engine, draft: str, tokens: list[int], table: Tensor) -> Tensor:
    """What a self-draft makes of the last token, after those before it have passed the target."""
    count = len(tokens) - 1
    places = torch.arange(count)
    engine.target(
        torch.tensor(tokens[:-1]), places, torch.tensor([0, count], dtype=torch.int32),
        places.int(), torch.zeros(1, dtype=torch.int32), None, table, torch.tensor([0]),
    )  # fmt: skip
    return draft_pass(engine, draft, tokens, table)


def draft_pass(engine: Engine, draft: str, tokens: list[int], table: Tensor) -> Tensor:
    slot = torch.tensor([len(tokens) - 1], dtype=torch.int32)
    return engine.self_drafts[draft](
        torch.tensor(tokens[-1:]), slot.long(), torch.tensor([0, 1], dtype=torch.int32),
        slot, slot, torch.ones(1, 1, dtype=torch.int64), table, torch.tensor([0]),
    )  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_early_exit_is_the_model_of_its_first_layers(
    made: Callable[[str], Made], texts: list[list[int]], name: str
) -> None:
    """Their rows are those that the shorter model computes, so that it says what a draft sees."""
    own = made(name)
    model = models.build_model(name, num_hidden_layers=LAYERS)
    model.model.layers = nn.ModuleList(list(model.model.layers)[:2])
    model.config.num_hidden_layers = 2
    blocks = own.engine.cache.allocator.allocate(own.engine.cache.shape.blocks_per_sequence)
    table = own.engine.cache.block_table([blocks])
    draft = "self_l0to1" if name == "llama" else "self_l0to1_w8_s4"
    for text in texts:
        found = root_logits(own.engine, draft, text, table)[0]
        wanted = model(torch.tensor([text]), use_cache=False).logits[0, -1]
        is_close = torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
        # a narrower window sees as much of a short text, and less of a long one
        assert is_close == (name == "llama" or len(text) <= 8), len(text)
    own.engine.cache.allocator.free(blocks)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "draft", "kept"),
    [("llama", "self_x0", (1, 2)), ("llama", "self_l1", (1,)), ("gemma3", "self_l0_2", (0, 2))],
)
def test_caches_that_are_read_and_written(
    made: Callable[[str], Made], texts: list[list[int]], name: str, draft: str, kept: tuple[int]
) -> None:
    """Those of its own layers, by the target's numbers: others may hold anything, and keep it."""
    own = made(name)
    cache, text = own.engine.cache, texts[-1]
    blocks = cache.allocator.allocate(cache.shape.blocks_per_sequence)
    table = cache.block_table([blocks])
    wanted = root_logits(own.engine, draft, text, table)
    (slab,) = cache.slabs["target"]
    count = len(text) - 1
    held, rows = slab.clone(), torch.arange(count)
    skipped = [number for number in range(LAYERS) if number not in kept]
    places = torch.tensor(blocks)[rows // 4], rows % 4
    root = blocks[count // 4], count % 4
    for layer in range(LAYERS):
        slab.copy_(held)
        slab[layer][:, *places] = torch.nan
        slab[:, :, *root] = 7.0
        before = slab.clone()
        found = draft_pass(own.engine, draft, text, table)
        assert torch.equal(found, wanted) == (layer in skipped), layer
        changed = (slab != before) & ~(slab.isnan() & before.isnan())
        # the row of the token, in K and V of each layer that it has, and nothing else
        places_changed = changed.flatten(4).any(-1).nonzero().tolist()
        assert places_changed == [[number, part, *root] for number in kept for part in (0, 1)]
    slab.copy_(held)
    cache.allocator.free(blocks)


def test_steps_call_the_program_of_their_draft(made: Callable[[str], Made]) -> None:
    """Its own one, fed the root alone and then one level after the other; or the target's."""
    for name, plans in (("llama", LLAMA), ("gemma3", GEMMA)):
        path, windowed = made(name).path, made(name).engine.manifest.windowed
        own = {entry.name for entry in made(name).engine.manifest.self_drafts}
        for plan in plans:
            stages = read_json(path / f"steps/{plan.name}.json")["stages"]
            calls = [n for n in stages[0]["graph"]["nodes"] if n["op"] == "call_module"]
            drafts = [draft.name for draft in plan.self_drafts]
            assert {node["target"] for node in calls} == {
                d if d in own else "target" for d in drafts
            }
            # none is a causal pass, which would write rows of committed tokens
            assert all(node["args"][5] is not None for node in calls)
            # what sees all rows, or counts its window in positions, has the block table of all rows
            whole = {d.name for d in plan.self_drafts if d.view is None} | windowed
            for node in calls:
                table = node["args"][6]
                assert (table == {"node": "block_table"}) == (node["target"] in whole)


def test_weights_are_those_of_the_target(made: Callable[[str], Made]) -> None:
    """One mapped file, and no second copy of anything."""
    engine = made("llama").engine
    own = {tensor.data_ptr() for tensor in engine.target.tensors.values()}
    names = {draft.name for plan in LLAMA for draft in plan.self_drafts if draft.layers is not None}
    assert engine.self_drafts.keys() == names | {"self_l0to2_w88_s4"}
    for program in engine.self_drafts.values():
        assert program.weights is engine.target.weights
        assert {tensor.data_ptr() for tensor in program.tensors.values()} <= own
    assert len(engine.mapped_weights) == 1
    assert set(engine.cache.slabs) == {"target"}


def test_manifest_and_what_runs_over_a_short_table(made: Callable[[str], Made]) -> None:
    manifest = made("gemma3").engine.manifest
    found = {entry.name: (entry.layers, entry.is_windowed) for entry in manifest.self_drafts}
    assert found == {
        "self_w8_s4": ((0, 1, 2), True),
        "self_w32_s0": ((0, 1, 2), True),
        "self_l0_2": ((0, 2), False),
        "self_l0to1_w8_s4": ((0, 1), True),
        "self_l1_w8_s4": ((1,), False),
        "self_w8_s0": ((0, 1, 2), True),
        WHOLE: ((0, 1, 2), True),
    }
    assert type(manifest).from_json(manifest.to_json()) == manifest
    assert list(manifest.memory_plan) == ["target"]
    # a target whose layers see all rows needs no second program for a view
    llama = made("llama").engine.manifest
    assert "self_w8_s4" not in {entry.name for entry in llama.self_drafts}
