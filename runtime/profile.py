"""What `specc tune` has measured of an engine, as the engine is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specc.artifact.manifest import PROFILE_FILE, Manifest
from specc.errors import EngineError
from specc.runtime.backends.program_files import read_json
from specc.runtime.backends.step import Step
from specc.system.files import format_bytes

_log = logging.getLogger(__name__)


def load_profile(
    path: Path,
    manifest: Manifest,
    steps: Mapping[str, Step],
    offload_weights: int | str | None = None,
) -> dict[str, Any]:
    """Content of an engine's profile.json; empty where it has none.

    A profile of passes that read weights from a file, or of another budget, is taken, and a warning
    says so: its plans are not those that pay here.

    Args:
        steps: plan name → step, of all plans.
        offload_weights: what the engine is loaded with.
    Raises:
        EngineError: a profile that names plans which the engine does not have.
    """
    if PROFILE_FILE not in manifest.files:
        return {}
    profile = read_json(path / PROFILE_FILE)
    plans = profile.get("plans")
    family = plans if isinstance(plans, dict) and all(map(str.isdigit, plans)) else {}
    if not family or not set(family.values()) <= steps.keys():
        raise EngineError(
            f"{path / PROFILE_FILE} with plans {plans}",
            f"batch sizes, and plans of this engine: {', '.join(steps)}",
            "run specc tune again",
        )
    tuned = profile.get("offload_weights")
    if tuned != offload_weights:
        option = f" with --offload-weights {offload_weights}" if offload_weights else ""
        _log.warning(
            "specc tune chose the plans of %s for %s, and it runs with %s: run specc tune%s",
            path, _shown(tuned), _shown(offload_weights), option,
        )  # fmt: skip
    return profile


def _shown(budget: int | str | None) -> str:
    if budget is None:
        return "all weights in memory"
    amount = budget if isinstance(budget, str) else format_bytes(budget)
    return f"{amount} of memory for weights"
