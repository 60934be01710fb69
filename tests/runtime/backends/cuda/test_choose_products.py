"""Products are chosen by what was measured, and a kernel that is no faster is never launched."""

from __future__ import annotations

import gc
import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specc.kernels.cuda import few_rows
from specc.kernels.cuda.few_rows import Choice
from specc.kernels.cuda.launch import dependent_launches, is_dependent
from specc.kernels.cuda.register import register, unregister
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import Pipeline
from specc.runtime.backends.cuda import choose_products as chosen
from specc.runtime.backends.cuda import product_candidates as candidates_module
from specc.runtime.backends.cuda.choose_products import calls_of, choose_products
from specc.runtime.backends.cuda.product_candidates import (
    LIBRARY,
    Candidate,
    ProductWarning,
    Stopwatch,
    best_dependent,
    best_ordinary,
    early_candidates,
    graph_timer,
    measure,
)
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
    """Says how long work takes by what is forced meanwhile; runs it if it is asked to.

    `asked` has the number of a tile for an ordinary launch, `("early", number)` for another.
    """

    def __init__(
        self,
        seconds: dict[int | None, float],
        early: dict[int, float] | None = None,
        runs: bool = False,
    ) -> None:
        self.seconds, self.early, self.runs = seconds, early or {}, runs
        self.asked: list[Any] = []

    def __call__(self, run: Any, best: float) -> float:
        forced = few_rows._forced.get()
        assert forced is not None, "what runs is not up to the timer"
        (number,) = forced
        known = self.early if is_dependent() else self.seconds
        self.asked.append(("early", number) if is_dependent() else number)
        if self.runs:
            run()
        # other tiles are as fast as the first
        value = known.get(number, known[0])
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
    assert set(few_rows.choices.values()) == {Choice.of(None)}


def candidates(*ordinary: float, **early: float) -> dict[Candidate, float]:
    """Seconds of the library and of tiles; of early ones by `tile_0`, `tile_1`, …"""
    found = {Candidate(i - 1 if i else None): own for i, own in enumerate(ordinary)}
    return found | {Candidate(int(name[5:]), True): own for name, own in early.items()}


def test_the_best_of_several_tiles() -> None:
    assert best_ordinary(candidates(3.0, 2.0, 1.0)) == Candidate(1)
    assert best_ordinary(candidates(3.0, 1.0, 2.0)) == Candidate(0)
    assert best_ordinary(candidates(1.0, 1.1, 2.0)) == LIBRARY
    assert best_ordinary(candidates(1.0)) == LIBRARY
    # however fast it is as another launch
    assert best_ordinary(candidates(1.0, 1.1, tile_0=0.5)) == LIBRARY


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        # slower than the library by itself, faster where it starts early
        (candidates(1.0, 1.1, tile_0=0.9), Candidate(0, True)),
        # as fast: the kernel after it may start early
        (candidates(1.0, 1.1, tile_0=1.02), Candidate(0, True)),
        (candidates(1.0, 1.1, tile_0=1.05), LIBRARY),
        # the best tile of ordinary launches is launched so among dependent ones, too
        (candidates(1.0, 0.8, 0.9, tile_0=0.85, tile_1=0.9), Candidate(0)),
        (candidates(1.0, 0.8, 0.9, tile_0=0.85, tile_1=0.79), Candidate(1, True)),
        (candidates(1.0, 0.8), Candidate(0)),
        (candidates(1.0, 3.0), LIBRARY),
    ],
)
def test_the_best_where_launches_are_dependent(found, wanted) -> None:
    assert best_dependent(found) == wanted


def test_which_tiles_are_timed_as_early_launches() -> None:
    """Those close to the fastest of them, where that is not far from the library."""
    found = candidates(1.0, 1.29, 1.2, 1.3)
    assert early_candidates(found) == [Candidate(0, True), Candidate(1, True)]
    assert early_candidates(candidates(1.0, 1.6, 1.7)) == []
    assert early_candidates(candidates(1.0)) == []


def test_names_of_candidates() -> None:
    names = {"library": LIBRARY, "tile-3": Candidate(3), "tile-12-early": Candidate(12, True)}
    for name, candidate in names.items():
        assert (candidate.name, Candidate.named(name)) == (name, candidate)


def test_dependent_steps_have_products_of_their_own(program, monkeypatch) -> None:
    """The library's in an ordinary step, a tile in one whose kernels start early."""
    # as those of bfloat16 have it
    monkeypatch.setattr(few_rows, "DTYPES", (torch.float32,))
    timer = FakeTimer({None: 1.0, 0: 1.1}, {0: 0.9})
    report = choose_products([program], SimulatedDevice(), timer, rows=(1,), can_depend=True)
    early = [("early", number) for number in (0, 1)]
    assert timer.asked == [x for own in CANDIDATES for x in (*own, *early[: len(own) - 1])]
    assert {(item["chosen"], item["dependent"]) for item in report} == {("library", "tile-0-early")}
    assert report[0]["ms"] == {"library": 1000.0, "tile-0": 1100.0, "tile-0-early": 900.0}
    for operator, tiles in (
        ("add_norm_gate_up", few_rows.TILES), ("skinny_linear", few_rows.LINEAR_TILES),
    ):  # fmt: skip
        assert tile(operator, program, 1) is None
        with dependent_launches():
            early_tile = tile(operator, program, 1)
            assert early_tile == tiles[torch.float32][0]
            assert early_tile.starts_early
            with few_rows.chosen_for(False):
                assert tile(operator, program, 1) is None
        with few_rows.chosen_for(True):
            assert tile(operator, program, 1) == early_tile
    assert all(choice.differs for choice in few_rows.choices.values())


def test_a_tile_that_is_slower_early_starts_late(program, monkeypatch) -> None:
    monkeypatch.setattr(few_rows, "DTYPES", (torch.float32,))
    timer = FakeTimer({None: 1.0, 0: 0.8}, {0: 0.9})
    choose_products([program], SimulatedDevice(), timer, rows=(1,), can_depend=True)
    with dependent_launches():
        found = tile("add_norm_gate_up", program, 1)
    assert (found.starts_early, found.block_n) == (False, 16)
    # it computes the same
    assert not any(choice.differs for choice in few_rows.choices.values())


def test_kernels_without_dependent_launches_are_not_timed_so(program) -> None:
    timer = FakeTimer({None: 2.0, 0: 1.0}, {0: 0.5})
    report = choose_products([program], SimulatedDevice(), timer, rows=(1,), can_depend=True)
    assert len(timer.asked) == NUM_CANDIDATES
    assert all("dependent" not in item for item in report)
    with dependent_launches():
        assert tile("add_norm_gate_up", program, 1) == few_rows.TILES[torch.float32][0]


def test_a_kernel_that_fails_early_is_not_launched_so(program, monkeypatch) -> None:
    monkeypatch.setattr(few_rows, "DTYPES", (torch.float32,))
    timer = FakeTimer({None: 1.0, 0: 0.8}, {0: -1.0})
    with pytest.warns(ProductWarning, match="out of resources"):
        report = choose_products([program], SimulatedDevice(), timer, rows=(1,), can_depend=True)
    assert {(item["chosen"], item["dependent"]) for item in report} == {("tile-0", "tile-0")}


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

    def seconds(run: Any, best: float) -> float:
        run()
        return 1.0

    with pytest.warns(ProductWarning, match="results differ") as caught:
        found = dict(measure([call], 4, False, seconds))
    assert {candidate.number for candidate, seconds in found.items() if seconds} == {None, 0}
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


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_is_collected_once_and_not_before_each_capture(is_on, program) -> None:
    """Afterwards collections are as they were, whatever has failed."""
    begun: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            begun.append(phase)

    def seconds(run: Any, best: float) -> float:
        assert not gc.isenabled()
        if len(few_rows.choices) == 2:
            raise RuntimeError("out of resources")
        return 1.0

    before = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    gc.callbacks.append(note)
    try:
        with pytest.raises(RuntimeError, match="out of resources"):
            choose_products([program], SimulatedDevice(), seconds, rows=(1,))
        assert gc.isenabled() == is_on
        assert len(begun) == 1
    finally:
        gc.callbacks.remove(note)
        (gc.enable if before else gc.disable)()


def test_replays_are_timed_on_the_device() -> None:
    device, watch = SimulatedDevice(), Stopwatch()
    ran = []
    seconds = graph_timer(device, watch)(lambda: ran.append(torch.zeros(3) + 1), math.inf)
    assert seconds > 0
    # once to compile, once before the capture, and once in it
    assert len(ran) == 3
    assert len(device.tapes) == 1
    assert device.num_waits == 2 * (1 + candidates_module._REPEATS)
    spent = watch.take()
    assert set(spent) == {"run", "capture", "replay"}
    assert watch.take() == {}


class Clocked:
    """A device on which time passes by work and by waits for it."""

    def __init__(self, wait_s: float) -> None:
        self.now, self._wait_s, self.replays = 0.0, wait_s, 0

    def capture(self, run: Any) -> Any:
        def replay() -> None:
            self.replays += 1
            self.now += run()

        return SimpleNamespace(replay=replay)

    def record_event(self) -> Any:
        def synchronize() -> None:
            self.now += self._wait_s

        return SimpleNamespace(synchronize=synchronize)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    device = Clocked(wait_s=20e-6)
    monkeypatch.setattr(candidates_module, "time", SimpleNamespace(perf_counter=lambda: device.now))
    return device


def test_what_is_far_slower_than_the_best_is_replayed_twice(clocked) -> None:
    """After the replay that prepares the graph one tells."""
    assert graph_timer(clocked)(lambda: 1.2e-3, 0.8e-3) == pytest.approx(1.2e-3 + 20e-6)
    assert clocked.replays == 2


@pytest.mark.parametrize(("library_s", "tile_s"), [(14e-6, 9e-6), (14e-6, 20e-6), (4e-4, 3e-4)])
def test_a_wait_is_not_taken_for_a_product(clocked, library_s: float, tile_s: float) -> None:
    """A product that a model has once takes less time than the wait after one replay."""
    timer = graph_timer(clocked)
    best = timer(lambda: library_s, math.inf)
    assert best == pytest.approx(library_s, rel=0.15)
    assert timer(lambda: tile_s, best) == pytest.approx(tile_s, rel=0.15)


def test_the_best_so_far_is_that_of_this_product(program) -> None:
    told = []

    def seconds(run: Any, best: float) -> float:
        told.append(best)
        return {None: 2.0, 0: 1.0, 1: 3.0}[few_rows._forced.get()[0]]

    choose_products([program], SimulatedDevice(), seconds, rows=(1,))
    rest = {2: [2.0], 3: [2.0, 1.0]}
    assert told == [x for own in CANDIDATES for x in (math.inf, *rest[len(own)])]


def test_seconds_of_measuring_are_reported(program) -> None:
    report = choose_products([program], SimulatedDevice(), rows=(1,))
    for item in report:
        assert set(item["seconds"]) == {"bind", "check", "run", "capture", "replay"}
