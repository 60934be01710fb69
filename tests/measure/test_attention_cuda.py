"""tests/measure/attention_cuda.py in Triton's interpreter: all contenders compute the same."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.test_layering import ROOT

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU check measures there")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "tests/measure/attention_cuda.py"
    spec = importlib.util.spec_from_file_location("attention_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def attend_by_hand(problem: Any, b: int, head: int, node: int) -> torch.Tensor:
    """One query, one key after the other."""
    case = problem.case
    keys, values = (x[b, head // (case.heads[0] // case.heads[1])] for x in problem.dense[0])
    rows, at = list(range(case.context)), node
    while at >= 0:
        rows.append(case.context + at)
        at = problem.tree.parents[at]
    query = problem.q[b, head, node].float()
    scores = [float(query @ keys[row].float()) / math.sqrt(case.head_dim) for row in rows]
    weights = torch.tensor(scores).softmax(0)
    return sum(w * values[row].float() for w, row in zip(weights, rows, strict=True))


@pytest.mark.parametrize("index", [0, 1])
def test_the_reference_is_attention_of_a_tree(script, index):
    case = script.TINY[index]
    problem = script.Problem(case, CPU)
    wanted = problem.reference()
    for b, head, node in ((0, 0, 0), (1, 3, case.num_nodes - 1), (1, 2, case.num_nodes // 2)):
        by_hand = attend_by_hand(problem, b, head, node)
        torch.testing.assert_close(wanted[b, head, node], by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_report(script, tmp_path, monkeypatch, capsys):
    """The command as it is called, with the cases that the interpreter computes in time."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(script, "measure_copy_bandwidth", lambda *args: {"gb_s": 2.0})
    argv = ["measure", "--only", "tiny", "--rounds", "2", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    script.main()
    report = json.loads(out.read_text())
    assert [item["name"] for item in report["results"]] == ["tiny tree", "tiny token"]
    for item, case in zip(report["results"], script.TINY, strict=True):
        names = ["specc", "SDPA", "packed SDPA", "FlexAttention"]
        assert list(item["contenders"]) == names
        for found in item["contenders"].values():
            assert found.get("error") is None
            assert found["us_min"] <= found["us"] <= found["us_max"]
            assert found["gb_s"] == pytest.approx(item["bytes"] / found["us"] / 1000)
            assert found["copy_share"] == pytest.approx(found["gb_s"] / 2.0)
            assert found["relative_error"] < script.TOLERANCE[case.dtype]
        torch_us = min(item["contenders"][name]["us"] for name in names[1:])
        assert item["contenders"][item["best_of_torch"]]["us"] == torch_us
        own_us = item["contenders"]["specc"]["us"]
        assert item["speedup_over_torch"] == pytest.approx(torch_us / own_us)
    assert "of copy bandwidth" in capsys.readouterr().out


def test_bytes_are_those_of_the_issue(script):
    """Batch 16, 32 nodes, 16k rows of 8 heads of 128, K and V in bfloat16: 1.08 GB."""
    case = script.CASES[0]
    assert (case.batch, case.num_nodes, case.context, case.heads) == (16, 32, 16384, (32, 8))
    assert case.cache_bytes == 16 * (16384 + 32) * 8 * 128 * 2 * 2
    assert case.bytes - case.cache_bytes == 2 * 16 * 32 * 32 * 128 * 2


def test_wrong_numbers_have_no_time(script, monkeypatch):
    """A contender that sees one key too many is an error, and the others keep their figures."""
    contenders = script.Problem.contenders

    def wrong(self: Any, names: Any) -> Any:
        calls = contenders(self, names)
        mask = self.mask.clone()
        mask[..., self.case.context + 1] = True

        def sees_a_sibling(copy: int) -> torch.Tensor:
            return script.sdpa(self.q, *self.dense[copy], attn_mask=mask, enable_gqa=True)

        return {name: calls[name] for name in ("specc", "SDPA")} | {"wrong": sees_a_sibling}

    monkeypatch.setattr(script.Problem, "contenders", wrong)
    found = script.run_case(script.TINY[0], CPU, 1, 1.0)
    assert "off by" in found["contenders"]["wrong"]["error"]
    assert found["best_of_torch"] == "SDPA"
    assert found["contenders"]["specc"]["us"] > 0
