"""The sweep of attention's launch parameters without a GPU: what it launches, what it keeps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.kernels.cuda import attend_few
from specc.kernels.cuda.attend_config import AttendConfig
from specc.kernels.reference.core import attend_reference
from tests.gpu import sweep_attend
from tests.gpu.sweep_attend import Case, Problem

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.cuda.interpreted_calls import patch_calls
    from tests.kernels.cuda.interpreter import patch_bf16

    patch_bf16()
    patch_calls()

CPU = torch.device("cpu")
TINY = Case(2, 5, 40, 16)


def test_points_are_told_apart() -> None:
    points = sweep_attend.points()
    assert len(points) == len({*points}) > 150
    assert {case.batch for case, _, _ in points} == {1, 16}
    # a step takes as many bits from ancestor words as it has keys
    assert all(c.block_n <= 64 for _, c, _ in points)
    first = [c for case, c, splits in points if splits is None and case == points[0][0]]
    assert first[0] == attend_few.config(128, 4), "what ships comes first"


@pytest.mark.parametrize("splits", [None, 1, 3])
def test_a_call_attends_with_these_parameters(splits: int | None) -> None:
    torch.manual_seed(0)
    problem = Problem(TINY, CPU)
    found = problem.call(AttendConfig(32, 16, 4, 2), splits, 0)
    q, (k_cache, v_cache) = problem.q.float(), (x.float() for x in problem.caches[0])
    wanted = attend_reference(q, k_cache, v_cache, *problem.arguments, scale=16**-0.5)
    assert float((found.float() - wanted).norm() / wanted.norm()) < 1e-2


def test_what_fails_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good, bad = AttendConfig(16, 16, 4, 2), AttendConfig(32, 16, 4, 2)
    points = [(TINY, good, None), (TINY, bad, 2), (TINY, good, 2)]

    def measure(problem: Problem, c: AttendConfig, splits: int | None, wanted: Any) -> float:
        if c is bad:
            raise RuntimeError("out of resource: shared memory")
        return 3.0

    monkeypatch.setattr(sweep_attend, "points", lambda: points)
    monkeypatch.setattr(sweep_attend, "measure", measure)
    monkeypatch.setattr(torch, "device", lambda name: CPU)
    sweep_attend.sweep(tmp_path / "found.json", 100.0)
    rows = json.loads((tmp_path / "found.json").read_text())
    assert [row.get("us") for row in rows] == [3.0, None, 3.0]
    assert "out of resource" in rows[1]["error"]
    assert [(row["block_m"], row["splits"]) for row in rows] == [(16, None), (32, 2), (16, 2)]
