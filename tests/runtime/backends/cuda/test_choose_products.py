"""Products are chosen by what was measured, and a kernel that is no faster is never launched."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch

from specc.kernels.cuda import few_rows
from specc.kernels.cuda.register import register, unregister
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import Pipeline
from specc.runtime.backends.cuda import choose_products as chosen
from specc.runtime.backends.cuda.choose_products import ProductWarning, calls_of, choose_products
from tests.models import POSITIONS, build_model
from tests.passes.modules import Runner, compiled
from tests.runtime.backends.captured.simulated_device import SimulatedDevice

# operators of a llama, each shape once: those of attention and of a gate are without a norm
NAMES = (
    "embed_norm_rope_write", "skinny_linear", "add_norm_gate_up", "skinny_linear",
    "add_norm_rope_write", "add_norm_head",
)  # fmt: skip
# candidates of each: the library's product, and the tiles of float32
CANDIDATES = tuple([None, 0, 1] if name == "skinny_linear" else [None, 0] for name in NAMES)
NUM_CANDIDATES = sum(map(len, CANDIDATES))


class Lowered:
    """A model's program as a device has it."""

    def __init__(self, name: str = "llama", **options: Any) -> None:
        model = build_model(name, **options)
        program, _ = compiled(model)
        Pipeline(cuda_phases(POSITIONS)).run(program)
        self.graph = program.graph
        runner = Runner(program, model)
        names = [node.target for node in program.graph.find_nodes(op="placeholder")]
        values = zip(names, runner._values, strict=True)
        self.tensors = {name: x for name, x in values if isinstance(x, torch.Tensor)}


@pytest.fixture(scope="module")
def program() -> Lowered:
    return Lowered()


@pytest.fixture(autouse=True)
def no_choices(monkeypatch):
    monkeypatch.setattr(few_rows, "choices", {})


class FakeTimer:
    """Says how long work takes by the tile that is forced meanwhile; runs it if it is asked to."""

    def __init__(self, seconds: dict[int | None, float], runs: bool = False) -> None:
        self.seconds, self.runs = seconds, runs
        self.asked: list[int | None] = []

    def __call__(self, run: Any) -> float:
        forced = few_rows._forced.get()
        assert forced is not None, "what runs is not up to the timer"
        self.asked.append(forced[0])
        if self.runs:
            run()
        # other tiles are as fast as the first
        value = self.seconds.get(forced[0], self.seconds[0])
        if value < 0:
            raise RuntimeError("out of resources")
        return value


def tile(operator: str, program: Lowered, rows: int) -> Any:
    call = next(c for c in calls_of(program) if c.operator == operator)
    return few_rows.tile_for(operator, rows, call.weight)


def test_calls_of_a_llama(program) -> None:
    calls = list(calls_of(program))
    layer = ("skinny_linear", "add_norm_gate_up", "skinny_linear")
    assert [c.operator for c in calls] == [
        "embed_norm_rope_write", *layer, "add_norm_rope_write", *layer, "add_norm_head",
    ]  # fmt: skip
    with_norm = [c for c in calls if isinstance(c, chosen.ProductCall)]
    assert [len(c.caches) for c in with_norm] == [2, 0, 2, 0, 0]
    assert [c.embedding is None for c in with_norm] == [False, True, True, True, True]
    # of two layers; what has gone through attention, and through a gate
    assert [c.kind for c in calls[1:4]] == [c.kind for c in calls[5:8]]
    assert [c.weight.shape for c in calls[1:4:2]] == [(64, 64), (64, 96)]
    assert len({c.kind for c in calls}) == len(NAMES)
    assert calls[1].weight is not calls[5].weight


def test_calls_of_layer_norms() -> None:
    """No product has an RMS norm; those of a layer have biases, that of logits has none."""
    program = Lowered("opt", num_hidden_layers=1)
    *layer, head = calls_of(program)
    assert all(isinstance(call, chosen.LinearCall) for call in (*layer, head))
    assert [call.bias is None for call in layer] == [False] * 4
    assert head.bias is None
    for call in (*layer, head):
        wanted = torch.nn.functional.linear(torch.ones(3, call.weight.shape[1]), call.weight)
        assert call.bind(3)().shape == wanted.shape
    # biases that differ belong to one kind, a bias and none do not
    assert head.kind[-1] != layer[0].kind[-1]


def test_the_fastest_is_chosen(program) -> None:
    timer = FakeTimer({None: 2.0, 0: 1.0})
    report = choose_products([program], SimulatedDevice(), timer, rows=(1, 4))
    # every operator, every number of rows, every candidate, once
    assert timer.asked == [number for own in CANDIDATES for number in 2 * own]
    assert {(item["operator"], item["rows"], item["chosen"]) for item in report} == {
        (name, rows, "tile-0") for name in NAMES for rows in (1, 4)
    }
    assert report[0]["ms"] == {"library": 2000.0, "tile-0": 1000.0}
    assert chosen.measured[-len(report) :] == report
    assert tile("add_norm_gate_up", program, 4) == few_rows.TILES[torch.float32][0]
    assert tile("add_norm_gate_up", program, 3) == few_rows.TILES[torch.float32][0]
    assert tile("skinny_linear", program, 3) == few_rows.LINEAR_TILES[torch.float32][0]
    # what was not measured is the library's
    assert tile("add_norm_gate_up", program, 8) is None
    assert tile("add_norm_gate_up", program, 40) is None


@pytest.mark.parametrize("seconds", [2.0, 1.999, 3.0])
def test_a_kernel_that_is_no_faster_is_not_taken(program, seconds) -> None:
    timer = FakeTimer({None: 2.0, 0: seconds})
    report = choose_products([program], SimulatedDevice(), timer, rows=(1,))
    assert {item["chosen"] for item in report} == {"library"}
    assert tile("add_norm_gate_up", program, 1) is None
    assert set(few_rows.choices.values()) == {None}


def test_the_best_of_several_tiles() -> None:
    assert chosen._best({None: 3.0, 0: 2.0, 1: 1.0}) == 1
    assert chosen._best({None: 3.0, 0: 1.0, 1: 2.0}) == 0
    assert chosen._best({None: 1.0, 0: 1.1, 1: 2.0}) is None
    assert chosen._best({None: 1.0}) is None


def test_a_kernel_that_fails_is_not_taken(program) -> None:
    with pytest.warns(ProductWarning, match="out of resources"):
        report = choose_products(
            [program], SimulatedDevice(), FakeTimer({None: 2.0, 0: -1.0}), rows=(1,)
        )
    assert {item["chosen"] for item in report} == {"library"}
    assert "tile-0" not in report[0]["ms"]


def test_a_kernel_with_other_results_is_not_taken() -> None:
    """However fast it is: roundings, a wrong column, no numbers, and what nobody multiplied."""
    right = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    column = right.clone()
    column[:, 7] = 0.0
    results = [right, right * (1 + 1e-5), column, right.log(), torch.zeros(4, 64)]

    def call() -> tuple[torch.Tensor, ...]:
        (number,) = few_rows._forced.get() or (None,)
        return right, results[0 if number is None else number + 1]

    def seconds(run: Any) -> float:
        run()
        return 1.0

    with pytest.warns(ProductWarning, match="results differ") as caught:
        found = dict(chosen._measure([call], 4, seconds))
    assert {number for number, seconds in found.items() if seconds} == {None, 0}
    assert len(caught) == 3


def test_inputs_tell_products_apart(program) -> None:
    """Each value of a result depends on its row: zeros or ones would hide what is wrong."""
    for call in calls_of(program):
        out = call.bind(4)()
        first = out if isinstance(out, torch.Tensor) else out[0]
        rows = first.reshape(4, -1) if first.shape[-2] == 4 else first.movedim(-2, 0).flatten(1)
        assert len({tuple(row.tolist()) for row in rows}) == len(rows), call.operator


def test_a_library_that_fails_is_an_error(program) -> None:
    with pytest.raises(RuntimeError, match="out of resources"):
        choose_products([program], SimulatedDevice(), FakeTimer({None: -1.0, 0: 1.0}), rows=(1,))


def test_nothing_is_measured_twice(program) -> None:
    timer = FakeTimer({None: 2.0, 0: 1.0})
    choose_products([program, program], SimulatedDevice(), timer, rows=(1,))
    assert len(timer.asked) == NUM_CANDIDATES
    assert choose_products([program], SimulatedDevice(), timer, rows=(1,)) == []
    assert len(timer.asked) == NUM_CANDIDATES


def test_real_calls_run_and_write_no_row(program) -> None:
    """All candidates of every call, through the interpreter, on the caches of the engine."""
    caches = [c for call in calls_of(program) for c in getattr(call, "caches", ())]
    before = [cache.clone() for cache in caches]
    timer = FakeTimer({None: 2.0, 0: 1.0}, runs=True)
    register("CPU")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            choose_products([program], SimulatedDevice(), timer, rows=(2,))
    finally:
        unregister("CPU")
    assert len(timer.asked) == NUM_CANDIDATES
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_collections_between_captures_pass_over_what_is_there(is_frozen, program) -> None:
    """And go through all of it again afterwards, unless somebody wants it otherwise."""
    # as conftest.py leaves it
    assert gc.get_freeze_count() > 0
    if not is_frozen:
        gc.unfreeze()
    try:
        counts = []

        def seconds(run: Any) -> float:
            counts.append(gc.get_freeze_count())
            return 1.0

        choose_products([program], SimulatedDevice(), seconds, rows=(1,))
        assert min(counts) > 10_000
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        gc.freeze()


def test_replays_are_timed_on_the_device(program) -> None:
    device = SimulatedDevice()
    ran = []
    seconds = chosen.graph_timer(device)(lambda: ran.append(torch.zeros(3) + 1))
    assert seconds > 0
    # once to compile, once before the capture, and once in it
    assert len(ran) == 3
    assert len(device.tapes) == 1
    assert device.num_waits == 2 * chosen._REPEATS
