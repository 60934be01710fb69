"""Which engines refuse to draft for some sequences while they verify others, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specc.artifact.backends import backend_names
from specc.errors import ConfigError
from specc.runtime.backends.overlap import check_overlap
from specc.runtime.engine_args import EngineArgs
from specc.speculation.plans import MERGE, OFF, SpecPlan

CHAIN = SpecPlan.from_widths((1, 1))
LOOKUP = SpecPlan.from_widths((1, 1, 1), ("lookup-2",))


def manifest(*plans: SpecPlan, max_batch: int = 8, num_ranks: int = 1) -> Any:
    return SimpleNamespace(
        plans=[SimpleNamespace(plan=plan) for plan in (OFF, *plans)],
        models=[SimpleNamespace(name=x, reads_hidden=False) for x in ("target", "draft_0")],
        limits=SimpleNamespace(max_batch_size=max_batch),
        parallel=object() if num_ranks > 1 else None,
        num_ranks=num_ranks,
    )


def test_an_engine_with_a_draft_model_is_taken() -> None:
    check_overlap(manifest(CHAIN), "cuda")
    check_overlap(manifest(LOOKUP, CHAIN), "cuda", max_num_seqs=8)
    check_overlap(manifest(CHAIN, max_batch=64), "cuda", max_num_seqs=9)


@pytest.mark.parametrize("backend", sorted({*backend_names()} - {"cuda"}))
def test_other_backends_are_refused(backend) -> None:
    with pytest.raises(ConfigError) as raised:
        check_overlap(manifest(CHAIN), backend)
    assert raised.value.found == f"--overlap with backend {backend}"
    assert raised.value.needed.startswith("backend cuda, ")


VIEW = SpecPlan.from_widths((1, 1), ("draft_0", "self_w64_s4"), MERGE)
CASES = [
    (manifest(CHAIN, num_ranks=2), {}, "of an engine of 2 ranks"),
    (manifest(CHAIN), {"offload_weights": "auto"}, "with --offload-weights"),
    (manifest(CHAIN, VIEW), {}, "of an engine whose target drafts, too (self:window=64,sink=4)"),
    (
        manifest(LOOKUP),
        {},
        "of an engine without a draft model: off drafts nothing; lookup2-chain-3 drafts by lookups"
        " alone, which take no time",
    ),
    (manifest(CHAIN, max_batch=7), {}, "of 7 sequences that run together"),
    (manifest(CHAIN, max_batch=64), {"max_num_seqs": 4}, "of 4 sequences that run together"),
]


@pytest.mark.parametrize(
    ("engine", "options", "found"), CASES, ids=[found[-15:] for _, _, found in CASES]
)
def test_what_cannot_overlap_is_refused(engine, options, found) -> None:
    with pytest.raises(ConfigError) as raised:
        check_overlap(engine, "cuda", **options)
    assert raised.value.found == f"--overlap {found}"
    assert raised.value.do.startswith("leave")


def test_it_is_off_unless_asked_for() -> None:
    assert not EngineArgs("engine").overlaps
