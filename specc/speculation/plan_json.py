"""Plans as JSON, as programs of steps have them; the manifest has the same keys and more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specc.errors import EngineError
from specc.speculation.block_drafts import BlockDraft
from specc.speculation.dynamic_tree import DynamicTree
from specc.speculation.plans import SpecPlan


def plan_to_json(plan: SpecPlan) -> dict[str, Any]:
    """What `plan_from_json` reads; heads, sharpness and blocks only where there are some."""
    data = asdict(plan)
    data["dynamic"] = asdict(plan.dynamic) if plan.dynamic else None
    for name in ("heads", "sharpness", "blocks"):
        if not data[name]:
            # as plans were before there were any
            del data[name]
    return {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}


def plan_from_json(data: Mapping[str, Any]) -> SpecPlan:
    """Raises EngineError: no plan."""
    try:
        numbers = [*data["widths"], *data["parents"], *dict(data["dynamic"] or {}).values()]
        numbers += [] if data["tile"] is None else [data["tile"]]
        if wrong := [number for number in numbers if type(number) is not int]:
            raise TypeError(f"{wrong[0]!r:.40} is no integer")
        return SpecPlan(
            name=data["name"],
            widths=tuple(data["widths"]),
            parents=tuple(data["parents"]),
            dynamic=DynamicTree(**data["dynamic"]) if data["dynamic"] else None,
            drafts=tuple(data["drafts"]),
            combine=data["combine"],
            tile=data["tile"],
            heads=tuple(data.get("heads", ())),
            sharpness=tuple(map(tuple, data.get("sharpness", ()))),
            blocks=tuple(map(BlockDraft.from_json, data.get("blocks", ()))),
        )
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise EngineError(
            f"a plan {data!s:.300}", "name, shape, drafts", "compile the engine again"
        ) from error
