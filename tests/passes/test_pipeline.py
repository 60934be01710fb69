"""The pipeline checks what passes promise, records what they did, and dumps what they left."""

from __future__ import annotations

import re
from functools import partial

import pytest

from specc.errors import UnsupportedAttentionError
from specc.passes.base import Pass, PassResult
from specc.passes.frontend.trace import trace
from specc.passes.pipeline import PHASES, PassError, Pipeline
from tests.models import build_model
from tests.passes.modules import Tiny, assert_same_numbers_flat


def holds(program):
    """Something holds."""
    return True


def fails(program):
    """The moon is made of cheese."""
    return False


class Fine(Pass):
    requires = (holds,)
    ensures = (holds,)

    def run(self, program):
        result = PassResult(rewrites=2)
        result.decline("some_node", "some reason")
        return result


class Needy(Fine):
    requires = (holds, fails)


class Liar(Fine):
    ensures = (fails,)


class Crash(Fine):
    def run(self, program):
        raise IndexError("out of range")


class Refuse(Fine):
    def run(self, program):
        raise UnsupportedAttentionError("found it", "needed it", "do it")


class BreakGraph(Fine):
    """Leaves a node whose value nobody knows."""

    def run(self, program):
        for node in program.graph.nodes:
            if node.op == "call_function":
                node.meta.pop("val", None)
        return PassResult()


@pytest.fixture(scope="module")
def program():
    return trace(Tiny().eval(), "target")


@pytest.mark.parametrize(
    ("kind", "message", "before"),
    [
        (Needy, "Needy requires that fails holds for target: The moon is made of cheese.", "Fine"),
        (Liar, "Liar ensures that fails holds for target", "Fine, Liar"),
        (Crash, "Crash failed on target: IndexError: out of range", "Fine"),
    ],
)
def test_broken_contract_names_the_passes_that_ran(program, kind, message, before):
    with pytest.raises(PassError) as caught:
        Pipeline(phases=(("one", (Fine,)), ("two", (kind,)))).run(program)
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"Passes that ran before: {before}.")


def test_first_pass_ran_after_none(program):
    with pytest.raises(PassError, match=r"Passes that ran before: none\.$"):
        Pipeline(phases=(("one", (Needy,)),)).run(program)


def test_cause_is_kept(program):
    with pytest.raises(PassError) as caught:
        Pipeline(phases=(("one", (Crash,)),)).run(program)
    assert isinstance(caught.value.__cause__, IndexError)


def test_errors_for_users_pass_through(program):
    with pytest.raises(UnsupportedAttentionError, match="found it"):
        Pipeline(phases=(("one", (Refuse,)),)).run(program)


def test_verification_runs_after_every_phase():
    program = trace(Tiny().eval(), "target")
    pipeline = Pipeline(phases=(("break", (BreakGraph,)), ("never", (Crash,))))
    with pytest.raises(Exception, match="after break: no value is known"):
        pipeline.run(program)


def test_records_and_progress(program):
    seen = []
    phases = (("one", (Fine, Fine)), ("two", (Fine,)))
    before = {name: partial(seen.append, name) for name in ("one", "end", "none of them")}
    pipeline = Pipeline(phases=(*phases, ("end", (Refuse,))), before=before)
    with pytest.raises(UnsupportedAttentionError):
        pipeline.run(program)
    assert seen == ["one", "end"]
    assert [(r.phase, r.name, r.rewrites) for r in pipeline.records] == [
        ("one", "Fine", 2),
        ("one", "Fine", 2),
        ("two", "Fine", 2),
    ]
    data = pipeline.records[0].to_json()
    assert data.pop("seconds") >= 0
    assert data == {
        "program": "target",
        "phase": "one",
        "pass": "Fine",
        "rewrites": 2,
        "declined": [{"node": "some_node", "reason": "some reason"}],
    }


def test_whole_pipeline_on_a_real_model(tmp_path):
    model = build_model("qwen3")
    program, pipeline = trace(model, "target"), Pipeline(dump_dir=tmp_path / "graphs")
    records = pipeline.run(program)
    counts = {record.name: record.rewrites for record in records}
    layers = 2
    assert counts.pop("Normalize") > 0
    assert counts == {
        "RecoverLinear": 0,
        "ReplaceGroupedMM": 0,
        "ReadTables": 0,
        "RouteExperts": 0,
        "ReadPlaces": 0,
        "DropSentinelMasks": 0,
        "ClassifyMasks": layers,
        "RecoverAttention": 0,
        "RewriteTreeRecurrence": 0,
        "RewriteTreeAttention": layers,
        "SelectLogits": 1,
        "FuseQKV": layers,
        "FuseGateUp": layers,
        "FuseRecurrent": 0,
    }
    assert not any(record.declined for record in records)
    assert all(record.seconds > 0 for record in records)
    assert [layer.name for layer in program.layers] == [
        f"model.layers.{i}.self_attn" for i in range(layers)
    ]
    assert_same_numbers_flat(program, model)

    files = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert files == [
        f"target.{i}-{phase}.txt"
        for i, phase in enumerate(["trace", *(name for name, _ in PHASES)])
    ]
    text = {name: (tmp_path / "graphs" / name).read_text() for name in files}
    assert "scaled_dot_product_attention" in text["target.1-normalize.txt"]
    assert "specc.tree_attention" not in text["target.1-normalize.txt"]
    assert text["target.2-attention.txt"].count("torch.ops.specc.tree_attention") == layers
    assert "scaled_dot_product_attention" not in text["target.2-attention.txt"]
    assert re.search(r"tree_attention.*# float32\[4, ", text["target.4-fuse.txt"])


def test_second_program_has_records_of_its_own():
    pipeline = Pipeline()
    first = pipeline.run(trace(Tiny().eval(), "target"))
    second = pipeline.run(trace(Tiny().eval(), "draft_0"))
    assert {record.program for record in first} == {"target"}
    assert {record.program for record in second} == {"draft_0"}
    assert pipeline.records == [*first, *second]
