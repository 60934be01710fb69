"""Plans as JSON, as programs of steps have them; the manifest has the same keys and more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specc.drafters.registry import drafters_from_json
from specc.errors import EngineError
from specc.speculation.dynamic_tree import shape_from_json, shape_to_json
from specc.speculation.plans import SpecPlan


def plan_to_json(plan: SpecPlan) -> dict[str, Any]:
    """What `plan_from_json` reads; heads, sharpness and blocks only where there are some."""
    data = {
        "name": plan.name,
        "widths": list(plan.widths),
        "parents": list(plan.parents),
        "dynamic": shape_to_json(plan.dynamic),
        "drafts": list(plan.drafts),
        "combine": plan.combine,
        "tile": plan.tile,
        "heads": list(heads_of(plan)),
        "sharpness": list(plan.sharpness),
        "blocks": blocks_of(plan),
        "kinds": kinds_of(plan),
    }
    # as plans were before there were any
    rest = ("heads", "sharpness", "blocks", "kinds")
    return {key: value for key, value in data.items() if value or key not in rest}


def heads_of(plan: SpecPlan) -> tuple[str, ...]:
    """Names of those that hand rows on."""
    return tuple(drafter.name for drafter in plan.models if drafter.facts.hands_on)


def kinds_of(plan: SpecPlan) -> dict[str, str]:
    """Head → its kind, of those whose steps are not those of all heads."""
    return {x.name: x.kind_of_head for x in plan.models if x.kind_of_head}


def blocks_of(plan: SpecPlan) -> list[dict[str, Any]]:
    """What those say that propose all levels in one pass."""
    return [data for x in plan.models if (data := x.to_json()) is not None]


def plan_from_json(data: Mapping[str, Any]) -> SpecPlan:
    """Raises EngineError: no plan."""
    try:
        numbers = [*data["widths"], *data["parents"]]
        numbers += [] if data["tile"] is None else [data["tile"]]
        if wrong := [number for number in numbers if type(number) is not int]:
            raise TypeError(f"{wrong[0]!r:.40} is no integer")
        return SpecPlan(
            name=data["name"],
            widths=tuple(data["widths"]),
            parents=tuple(data["parents"]),
            dynamic=shape_from_json(data["dynamic"]),
            drafters=drafters_from_json(
                data["drafts"],
                data.get("heads", ()),
                data.get("blocks", ()),
                data.get("kinds", {}),
            ),
            combine=data["combine"],
            tile=data["tile"],
            sharpness=tuple(map(tuple, data.get("sharpness", ()))),
        )
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise EngineError(
            f"a plan {data!s:.300}", "name, shape, drafts", "compile the engine again"
        ) from error
