"""Engines of several drafts, and plans of every shape and combination that is no expansion."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.passes.step.fuse_step import fuse_step
from specc.runtime.engine import Engine
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree
from tests import engines, models
from tests.lossless import BATCH_SIZES, Zoo, layout_of

TWO = ("draft_0", "draft_1")
# a root of three children, of which the second and the third have fewer than the first
IRREGULAR = TokenTree((-1, 0, 0, 0, 1, 1, 2, 4, 4, 7))
PLANS = (
    SpecPlan.from_tree(IRREGULAR),
    SpecPlan.from_widths((2, 1), ("draft_1",)),
    SpecPlan.from_dynamic(DynamicTree(10, 3, 3)),
    SpecPlan.from_dynamic(DynamicTree(5, 4, 1)),
    SpecPlan.from_widths((1, 1, 1), TWO, MERGE),
    SpecPlan.from_widths((2, 1, 1), TWO, MERGE),
    SpecPlan.from_tree(IRREGULAR, TWO, MERGE),
    SpecPlan.from_widths((1, 1, 1, 1), TWO, VOTE),
    SpecPlan.from_widths((1, 1, 1), (*TWO, "lookup-2"), VOTE),
    SpecPlan.from_widths((1,) * 5, ("lookup-3",)),
    SpecPlan.from_widths((1,) * 5, ("suffix",)),
    SpecPlan.from_widths((2, 2), ("draft_0", "lookup-2"), MERGE),
    SpecPlan.from_widths((2, 1), (*TWO, "suffix"), MERGE),
)
PLAN_IDS = [plan.name for plan in PLANS]
# others of a kind that the default tier has: a chain, or a tree, of another draft or more of them
_MORE = [PLAN_IDS[i] for i in (1, 3, 4, 6, 8, 11)]
# for tests on eager graphs, whose operators are oracles; all plans run compiled, where it is fast
PLAN_PARAMS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in _MORE else []) for name in PLAN_IDS
]
DRAFTS = ("noisy", "random")


@functools.cache
def engine(zoo: Zoo, name: str, backend: str) -> Engine:
    """An engine of two drafts with all plans: one that is often right, one that never is.

    Args:
        name: architecture; its layout is the one of tests/lossless.py.
    """
    config = CompileConfig(
        plans=PLANS,
        max_batch_size=max(BATCH_SIZES),
        max_seq_len=models.MAX_SEQ_LEN,
        backend=backend,
        probe=False,
        **layout_of(name),
    )
    drafts = [zoo.checkpoint(name, draft=draft) for draft in DRAFTS]
    path = zoo.once(
        f"drafts-{name}-{backend}",
        lambda path: engines.build(zoo.checkpoint(name), drafts, path, config),
    )
    loaded = Engine.load(path)
    for slabs in loaded.cache.slabs.values():
        for slab in slabs:
            # whoever attends to a row that was never written shall not get zeros
            slab.normal_(0.0, 30.0)
    # nor may anybody look up what no sequence ever held
    loaded.cache.history.random_(0, models.VOCAB)
    return loaded


@contextlib.contextmanager
def in_tiles(engine: Engine, tile: int) -> Iterator[None]:
    """Let every plan of an engine that speculates run in tiles for a while."""
    models = {"target": engine.target}
    models |= {f"draft_{i}": draft for i, draft in enumerate(engine.drafts)}
    slabs = {name: len(own) for name, own in engine.cache.slabs.items()}
    before = dict(engine.steps)
    for name, step in before.items():
        if step.plan.speculates:
            made = fuse_step(replace(step.plan, tile=tile), slabs).to_json()
            kind: Any = type(step)
            engine.steps[name] = kind(json.loads(json.dumps(made)), models)
    try:
        yield
    finally:
        engine.steps.update(before)
