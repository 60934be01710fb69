"""The compiler's side of kinds of drafts, found by the names of their modules."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from specc.drafters.drafter import Drafter
from specc.drafters.facts import Cache, DrafterFacts
from specc.drafters.registry import ALL, facts_of
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.drafters.head_spec import HeadSpec


def compiler_drafter(facts: DrafterFacts) -> CompilerDrafter:
    """Of a kind."""
    found: CompilerDrafter = import_module(f"specc.passes.drafters.{facts.module}").DRAFTER
    return found


def drafter_of_files(spec: HeadSpec) -> CompilerDrafter:
    """Of what files hold."""
    return compiler_drafter(facts_of(spec.kind))


def drafters_of_files() -> Iterator[CompilerDrafter]:
    """Those that a directory may hold, in the order in which they are asked whether it does."""
    modules = dict.fromkeys(
        facts.module for facts in reversed(ALL) if facts.reads_hidden and not facts.is_of_target
    )
    for module in modules:
        yield import_module(f"specc.passes.drafters.{module}").DRAFTER


def drafter_of_config(config: Any, name: str) -> Drafter | None:
    """How plans ask a model that reads tokens alone, see `CompilerDrafter.of_config`."""
    kinds = (x for x in ALL if x.cache is Cache.OWN and not x.reads_hidden)
    found = (compiler_drafter(facts).of_config(config, name) for facts in kinds)
    return next((drafter for drafter in found if drafter is not None), None)
