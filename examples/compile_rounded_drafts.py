"""Compile an engine in which a target drafts with its own weights, rounded and not.

    python examples/compile_rounded_drafts.py --target T --draft D -o ENGINE

Chains of 2 to 6 by `self:int8` and `self:int4`, by the target itself as a draft model in bfloat16
(`--draft T --draft-dtype bfloat16`) and by the draft D: what examples/measure_drafts.py compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli.progress import make_listener
from specc.compiler import build as compiler
from specc.config import CompileConfig
from specc.speculation.plans import SpecPlan


def main(
    target: Annotated[Path, typer.Option()],
    draft: Annotated[Path, typer.Option()],
    output: Annotated[Path, typer.Option("-o", "--output")],
    dtype: Annotated[str, typer.Option()] = "float32",
    depth: Annotated[list[int], typer.Option()] = [2, 4, 6],  # noqa: B006
    activation_bits: Annotated[int | None, typer.Option()] = None,
    max_batch_size: Annotated[int, typer.Option()] = 8,
    force: Annotated[bool, typer.Option()] = False,
) -> None:
    """Compile."""
    makers = ("self_int8", "self_int4", "draft_1", "draft_0")
    plans = tuple(SpecPlan.from_widths((1,) * d, (maker,)) for maker in makers for d in depth)
    config = CompileConfig(
        plans=plans,
        dtype=dtype,
        draft_dtype=(dtype, "bfloat16"),
        activation_bits=activation_bits,
        max_batch_size=max_batch_size,
        max_seq_len=512,
        backend="cpu",
    )
    with make_listener() as listen:
        compiler.build(target, [draft, target], output, config, force=force, listen=listen)


if __name__ == "__main__":
    typer.run(main)
