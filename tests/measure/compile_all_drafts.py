"""Compile an engine with a plan of each kind: what tests/measure/drafts.py compares.

    python tests/measure/compile_all_drafts.py --target T --draft D1 --draft D2 -o ENGINE

`--tuned` is an engine of the same models that `specc tune` has changed: its plans are added.
`--alone` compiles other plans: of each draft by itself a chain of 4 and two trees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.artifact.directory import open_engine
from specc.cli.progress import make_listener
from specc.compiler import build as compiler
from specc.config import CompileConfig
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan

LOOKUP = "lookup-3"


def plans_of(num_drafts: int) -> tuple[SpecPlan, ...]:
    """One of each kind; those of two drafts where there are two."""
    both = ("draft_0", "draft_1")
    plans = [
        SpecPlan.from_widths((1,) * 4),
        SpecPlan.from_widths((1, 1, 3, 1, 1)),  # SpecInfer's form
        SpecPlan.from_dynamic(DynamicTree(16, 4, 4)),
        SpecPlan.from_widths((1,) * 8, (LOOKUP,)),
        SpecPlan.from_widths((1,) * 4, ("draft_0", LOOKUP), MERGE),
    ]
    if num_drafts > 1:
        plans += [
            SpecPlan.from_widths((1,) * 4, both, MERGE),
            SpecPlan.from_widths((1,) * 4, both, VOTE),
        ]
    return tuple(plans)


def plans_alone(num_drafts: int) -> tuple[SpecPlan, ...]:
    """Of each draft a chain, a static tree and a dynamic one."""
    shapes = ((1,) * 4, (1, 1, 3, 1, 1))
    plans: list[SpecPlan] = []
    for number in range(num_drafts):
        name = f"draft_{number}"
        plans += [SpecPlan.from_widths(widths, (name,)) for widths in shapes]
        plans.append(SpecPlan.from_dynamic(DynamicTree(16, 4, 4), name))
    return tuple(plans)


def main(
    target: Annotated[Path, typer.Option()],
    draft: Annotated[list[Path], typer.Option()],
    output: Annotated[Path, typer.Option("-o", "--output")],
    tuned: Annotated[Path | None, typer.Option()] = None,
    dtype: Annotated[str, typer.Option()] = "float32",
    max_batch_size: Annotated[int, typer.Option()] = 8,
    max_seq_len: Annotated[int, typer.Option()] = 512,
    alone: Annotated[bool, typer.Option()] = False,
    force: Annotated[bool, typer.Option()] = False,
) -> None:
    """Compile."""
    plans = (plans_alone if alone else plans_of)(len(draft))
    if tuned is not None:
        plans += tuple(entry.plan for entry in open_engine(tuned, None).plans)
    config = CompileConfig(
        plans=tuple(dict.fromkeys(plans)),
        dtype=dtype,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        backend="cpu",
    )
    with make_listener() as listen:
        compiler.build(target, draft, output, config, force=force, listen=listen)


if __name__ == "__main__":
    typer.run(main)
