"""Drafts without an embedding and a head of their own read those in the target's file.

Beside each engine is one whose draft has copies: files differ by these, and nothing that is
generated does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from specc.artifact.directory import read_manifest
from specc.compiler import lent_weights
from specc.compiler.build import build
from specc.runtime.backends.program_files import read_json
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from tests.draft_kinds import block, mtp
from tests.lossless import Zoo
from tests.runtime.draft_cases import outputs
from tests.runtime.head_rig import TREE, options
from tests.tiers import only
from tests.traces import shared_traces

RIGS = {"dflash": block.RIGS[0], "mtp": mtp.RIGS[0]}
INT8: dict[str, Any] = {"quantize": "int8"}
CASES = {
    "dflash-eager": ("dflash", "eager", {}),
    "dflash-cpu": ("dflash", "cpu", {}),
    "dflash-cpu-int8": ("dflash", "cpu", INT8),
    "mtp-eager-int8": ("mtp", "eager", INT8),
}


def stored(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Of a draft: tensors of its file, the inputs of its program, and the target's tensors."""
    manifest = read_manifest(path)
    target, draft = (load_file(path / model.weights_file) for model in manifest.models)
    return draft, read_json(path / manifest.models[1].program_file)["inputs"], target


@pytest.mark.parametrize("case", only(["dflash-cpu-int8"], CASES))
def test_what_is_the_targets_is_stored_once(
    case: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, backend, changes = CASES[case]
    rig, config = RIGS[kind], options(plans=(TREE,), backend=backend, **changes)
    path, apart = tmp_path / "lent", tmp_path / "apart"
    with shared_traces():
        for engine in (path, apart):
            build(rig.target(zoo, rig.case), rig.draft(zoo, rig.case), engine, config)
            monkeypatch.setattr(lent_weights, "is_lending", lambda config, facts: False)
    (own, inputs, target), (copies, plain, _) = stored(path), stored(apart)
    lent = {item["key"]: item["of_target"] for item in inputs if item.get("is_lent")}
    assert len(lent) == 2
    assert not lent.keys() & own.keys()
    assert copies.keys() == own.keys() | lent.keys()
    for key, name in lent.items():
        assert (copies[key] == target[name]).all()
    assert not any(item.get("is_lent") for item in plain)
    # a quantized target lends integers
    layouts = {item.get("layout") for item in inputs if item.get("is_lent")}
    assert layouts == ({"blocks-int8"} if changes else {None})
    memory = [read_manifest(engine).memory_plan["draft_0"] for engine in (path, apart)]
    assert memory[1].weights - memory[0].weights == sum(copies[key].nbytes for key in lent)
    found = []
    for engine in (path, apart):
        core = EngineCore(Engine.load(engine), TREE.name)
        found.append((outputs(core), core.scheduler.stats.mean_acceptance_length))
    assert found[0] == found[1]
    assert found[0][0] == outputs(EngineCore(Engine.load(path), "off"))
