"""Drafts that read the hidden states of a target that is cut for ranks.

Every rank keeps the states of all tokens, since each has the whole residual stream, and rank 0 has
the draft. Random drafts are hardly ever right, so their logits and rows are compared, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import read_manifest
from specc.compiler.build import build
from specc.compiler.reshard import reshard_engine
from specc.drafters.facts import Cache
from specc.drafters.feature_head import FeatureHead
from specc.drafters.registry import facts_of
from specc.errors import ConfigError, SpeccError
from specc.runtime.backends.program_files import read_json
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.speculation.plans import MERGE, SpecPlan
from tests.draft_kinds.mtp import MtpRig
from tests.draft_kinds.rig import all_rigs
from tests.lossless import Zoo
from tests.runtime.draft_cases import outputs, write_target
from tests.runtime.head_rig import (
    BLOCK,
    DYNAMIC,
    TREE,
    HeadOracle,
    load,
    options,
    prompts_of,
    serve,
)
from tests.runtime.live_rig import ScriptedNodes
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.ranks.test_device_ranks import Launch, job
from tests.specc.compiler.test_reshard import compare
from tests.traces import shared_traces

# a rig of each kind, and one of a target that has latents in its caches
RIGS = {rig.kind: rig for rig in all_rigs() if rig.is_first}
KINDS = tuple(RIGS)
RIGS["mla"] = MtpRig("mtp", "deepseek_v3", FeatureHead(0))
# a head and the target itself, and a head and what its text repeats
BESIDE = (
    SpecPlan.from_widths((2, 1), ("draft_0", "self_w16_s4"), MERGE),
    SpecPlan.from_widths((1, 1), ("draft_0", "lookup-2"), MERGE),
)


def path_of(zoo: Zoo, kind: str, num_ranks: int, backend: str = "eager", **changes: Any) -> Path:
    """An engine with a draft of this kind, whole or cut."""
    label = "beside" if "plans" in changes else "-".join(map(str, changes.values()))
    return zoo.once(
        f"head-ranks-{kind}-{backend}-{num_ranks}-{label}",
        lambda path: write(zoo, path, kind, num_ranks, backend, **changes),
    )


def write(
    zoo: Zoo,
    path: Path,
    kind: str,
    num_ranks: int,
    backend: str,
    is_kept: bool = True,
    **changes: Any,
) -> object:
    """Compile such an engine into a directory; what is kept is there for other runs, too."""
    given = {"plans": (TREE, DYNAMIC)} | changes
    given |= {"backend": backend, "tensor_parallel_size": num_ranks}
    rig = RIGS[kind]
    if is_kept:
        return rig.compile(zoo, rig.case, path, **given)
    with shared_traces():
        target, draft = rig.target(zoo, rig.case), rig.draft(zoo, rig.case)
        return build(target, draft, path, options(**given))


def oracle_of(zoo: Zoo, kind: str) -> Any:
    """What says of each pass of a draft what it computes."""
    return RIGS[kind].oracle(zoo)


def check_compared(oracle: Any, least_rows: int = 300) -> None:
    """Logits were looked at, and rows."""
    if isinstance(oracle, HeadOracle):
        assert oracle.num_nodes > 60
    else:
        assert oracle.num_passes > 15
    assert oracle.num_rows > least_rows


class Cut:
    """The engine that is cut and open: a process is in one group."""

    def __init__(self, zoo: Zoo) -> None:
        self._zoo = zoo
        self._open: tuple[Path, Engine] | None = None

    def __call__(self, kind: str, backend: str = "eager", **changes: Any) -> Engine:
        path = path_of(self._zoo, kind, 2, backend, **changes)
        if self._open is None or self._open[0] != path:
            self.close()
            # what was never written is large, but not in bytes
            opened = Engine.load if "kv_cache_dtype" in changes else load
            self._open = path, opened(path, ranks=OPTIONS)
        return self._open[1]

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = None


@pytest.fixture(scope="module")
def cut(zoo: Zoo) -> Iterator[Cut]:
    made = Cut(zoo)
    yield made
    made.close()


def said_by(engine: Engine, plan: str) -> tuple[list[list[int]], float]:
    """Outputs of requests of all kinds, and the mean acceptance length."""
    core = EngineCore(engine, plan)
    found = outputs(core)
    return found, core.scheduler.stats.mean_acceptance_length


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param(
            kind, plan, id=f"{kind}-{plan.name}",
            marks=() if (kind, plan) == ("eagle3", TREE) else pytest.mark.slow,
        )
        for kind in KINDS
        for plan in (TREE, DYNAMIC)
    ],
)  # fmt: skip
def test_every_logit_and_every_row(kind: str, plan: Any, zoo: Zoo, cut: Cut) -> None:
    """Chunks, requests that join, prefixes that are shared, acceptances and rejections."""
    core, oracle = EngineCore(cut(kind), plan.name), oracle_of(zoo, kind)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)
    # of those that keep none, requests are counted
    check_compared(oracle, 50 if facts_of(kind).cache is Cache.NONE else 300)
    assert core.scheduler.stats.num_cached_tokens > 2 * BLOCK
    cut.close()


@pytest.mark.slow
def test_nodes_that_are_not_verified(zoo: Zoo, cut: Cut) -> None:
    policy = ScriptedNodes(TREE)
    core, oracle = EngineCore(cut("eagle3"), policy=policy), oracle_of(zoo, "eagle3")
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)
    assert any(len(set(live)) > 1 for live in policy.asked)
    check_compared(oracle)
    cut.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend", "changes"),
    [
        *((kind, backend, {}) for backend in ("eager", "cpu") for kind in KINDS),
        ("mla", "eager", {}),
        ("eagle3", "eager", {"kv_cache_dtype": "int8"}),
        ("eagle3", "eager", {"plans": BESIDE}),
        ("eagle3", "cpu", {"quantize": "int8"}),
        ("eagle3", "cpu", {"block_size": 0}),
    ],
)
def test_two_ranks_generate_what_one_does(
    kind: str, backend: str, changes: dict[str, Any], zoo: Zoo, cut: Cut
) -> None:
    """In as many steps: what is accepted says that the draft has read the same."""
    whole = Engine.load(path_of(zoo, kind, 1, backend, **changes))
    engine = cut(kind, backend, **changes)
    for plan in (plan.name for plan in changes.get("plans", (TREE, DYNAMIC))):
        found, length = said_by(engine, plan)
        assert (found, length) == said_by(whole, plan)
        assert found == said_by(engine, "off")[0]
        assert length > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_captured_ranks_draft_what_one_does(kind: str, zoo: Zoo) -> None:
    jobs = [
        job(plan, name, 4, max_tokens=40) | {"prompts": prompts_of(BLOCK)[:4]}
        for plan in (TREE.name, DYNAMIC.name)
        for name in ("greedy", "coupled")
    ]
    said = {}
    for num_ranks in (1, 2):
        path = path_of(zoo, kind, num_ranks, "cuda")
        with Launch(path, num_ranks, {"jobs": jobs, "capture": [4]}) as launch:
            said[num_ranks] = launch.said()
            assert launch.codes == [0] * num_ranks, launch.errors
    for one, two in zip(said[1], said[2], strict=True):
        assert "error" not in one, one
        assert "error" not in two, two
        assert two["tokens"] == one["tokens"]
        assert two["accepted"] == one["accepted"]
        assert two["warnings"] == 0
    assert sum(one["accepted"] for one in said[1]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend", "before", "after"),
    [
        pytest.param(*case, id="{}-{}-{}-to-{}".format(*case))
        for case in (
            *((kind, "eager", *way) for kind in KINDS for way in ((1, 2), (2, 1))),
            ("dflash", "cpu", 1, 2),
            # tables of positions that blocks reach
            ("dflash", "cuda", 4, 2),
        )
    ],
)
def test_engines_of_another_number_of_ranks(
    kind: str,
    backend: str,
    before: int,
    after: int,
    zoo: Zoo,
    tmp_path: Path,
) -> None:
    old, wanted = (tmp_path / str(num_ranks) for num_ranks in (before, after))
    for path, num_ranks in ((old, before), (wanted, after)):
        write(zoo, path, kind, num_ranks, backend, is_kept=False)
    reshard_engine(old, tmp_path / "engine", after)
    compare(tmp_path / "engine", wanted)


def test_what_each_rank_has(zoo: Zoo) -> None:
    """States of all tokens; as many sums as without them; and the draft on rank 0."""
    path = path_of(zoo, "eagle3", 2)
    manifest = read_manifest(path)
    assert manifest.led_models == ("target",)
    target, draft = (manifest.memory_plan[name] for name in ("target", "draft_0"))
    assert manifest.memory_of([0]) == target.total + draft.total
    assert manifest.memory_of([1]) == target.total
    layers, kept = manifest.models[0].layers, manifest.models[0].taps
    assert kept is not None
    row = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers) + kept.width
    assert target.cache == manifest.limits.cache_rows() * 4 * row
    collectives = read_json(path / "target" / "shard.json")["collectives"]
    assert len(collectives) == 2 * len(layers) + 1


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"draft_tensor_parallel_size": 2}, "--draft-tensor-parallel-size 2, and the head"),
        ({"draft_ranks": 2}, "--draft-ranks 2, and the head"),
        ({"pipeline_parallel_size": 2}, "hidden states, and --pipeline-parallel-size 2"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], found: str, zoo: Zoo, tmp_path: Path) -> None:
    draft = RIGS["eagle3"].draft(zoo, RIGS["eagle3"].case)
    config = options(plans=(), tensor_parallel_size=2, **changes)
    with pytest.raises(ConfigError, match=found) as caught:
        build(write_target(zoo), [draft, draft], tmp_path / "engine", config)
    assert caught.value.do.startswith("leave out --")
    assert not (tmp_path / "engine").exists()


@pytest.mark.slow
def test_a_pipeline_of_an_engine_with_a_head_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    with pytest.raises(SpeccError, match="hidden states, and --pipeline-parallel-size 2"):
        reshard_engine(path_of(zoo, "eagle3", 1), tmp_path / "engine", 1, num_stages=2)
