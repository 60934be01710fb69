"""Dependent launches are chosen only where results are the same and the step is faster."""

from __future__ import annotations

import dataclasses
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.errors import FaultError
from specc.kernels.cuda import few_rows, launch
from specc.runtime.backends.cuda import choose_launches as chosen
from specc.runtime.backends.cuda.choose_launches import (
    DEPENDENT,
    ORDINARY,
    LaunchWarning,
    can_launch_dependent,
    choose_launches,
)
from specc.runtime.backends.cuda.kept_measurements import Conditions, KeptLaunches
from specc.system.file_cache import FileCache
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.runtime.backends.captured.test_captured_step import Rig, make_rig, same

HERE = Conditions("NVIDIA H200", "2.13.0", "3.7.1", "abc")


# operator, rows, and weight of a product, and its tile
PRODUCT = "add_norm_linear", 1, torch.zeros(8, 8)
TILE = few_rows.TILES[torch.float32][0]


class WayDevice(SimulatedDevice):
    """Knows of each graph how it was captured; dependent ones may be spoiled after a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: list[str] = []
        # what a product of few rows is in each graph
        self.products: list[few_rows.Tile | None] = []
        self.newest = ""
        self.newest_product: few_rows.Tile | None = None
        self.spoil: Callable[[int], object] | None = None
        self.fault: Exception | None = None
        # what is lost by a replay
        self.breaks: Callable[[str], bool] = lambda way: False
        self.num_dependent = 0

    def capture(self, run: Callable[[], object]) -> Any:
        way = DEPENDENT if launch.is_dependent() else ORDINARY
        self.ways.append(way)
        product = few_rows.tile_for(*PRODUCT)
        self.products.append(product)
        tape = super().capture(run)
        replay = tape.replay

        def replayed() -> None:
            self.newest, self.newest_product = way, product
            replay()
            if self.breaks(way):
                self.fault = RuntimeError("illegal memory access")
            if way == DEPENDENT:
                self.num_dependent += 1
                if self.spoil is not None:
                    self.spoil(self.num_dependent)

        tape.replay = replayed  # type: ignore[method-assign]
        return tape

    def record_event(self) -> Any:
        if self.fault is not None:
            raise self.fault
        return super().record_event()


class FakeTimer:
    """Seconds by the way in which a graph was captured."""

    def __init__(self, device: WayDevice, seconds: dict[str, float]) -> None:
        self.device, self.seconds, self.asked = device, seconds, 0

    def __call__(self, replay: Callable[[], object]) -> float:
        replay()
        self.asked += 1
        return self.seconds[self.device.newest]


FASTER = {ORDINARY: 2.0, DEPENDENT: 1.0}
SLOWER = {ORDINARY: 1.0, DEPENDENT: 2.0}
AS_FAST = {ORDINARY: 1.0, DEPENDENT: 0.999}


@pytest.fixture
def rig(tiny_engine: Path) -> Rig:
    return two_plans(tiny_engine)


def two_plans(tiny_engine: Path) -> Rig:
    """With a chain's step and another: what is done for one plan is done for each."""
    rig = make_rig(tiny_engine, WayDevice())
    for name in list(rig.steps)[2:]:
        del rig.steps[name]
    return rig


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "measured", [])
    # a replay of the simulated device takes as long as a step in Python
    monkeypatch.setattr(chosen, "_ROUNDS", 2)
    monkeypatch.setattr(chosen, "_CHECKS", 3)


def choose(rig: Rig, seconds: dict[str, float] = FASTER, **options: Any) -> list[dict[str, Any]]:
    timer = FakeTimer(rig.device, seconds)
    return choose_launches(rig.steps, rig.other.cache, rig.device, timer=timer, **options)


def test_the_faster_way_is_chosen_and_captured(rig: Rig) -> None:
    report = choose(rig)
    assert [item["plan"] for item in report] == list(rig.steps)
    for item in report:
        assert item["chosen"] == DEPENDENT
        # with the smallest batch, and the largest
        assert [found["batch"] for found in item["batches"]] == [1, 4]
        assert item["batches"][0]["ms"] == {
            way: 1e3 * seconds / chosen._REPLAYS for way, seconds in FASTER.items()
        }
    rig.device.ways.clear()
    for plan in rig.steps:
        inputs = rig.state(2)
        same(rig.advance(plan, inputs), rig.advance_eager(plan, inputs))
    assert set(rig.device.ways) == {DEPENDENT}
    assert not launch.is_dependent()


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(SLOWER, id="slower"),
        pytest.param(AS_FAST, id="as fast", marks=pytest.mark.slow),
    ],
)
def test_what_is_no_faster_is_not_chosen(rig: Rig, seconds: dict[str, float]) -> None:
    for item in choose(rig, seconds):
        assert (item["chosen"], len(item["batches"])) == (ORDINARY, 1)
    rig.device.ways.clear()
    rig.steps[next(iter(rig.steps))].capture(1)
    assert rig.device.ways == [ORDINARY]


@pytest.mark.slow
def test_the_largest_batch_decides_too(rig: Rig) -> None:
    timer = FakeTimer(rig.device, FASTER)
    step = rig.steps[next(iter(rig.steps))]

    def seconds(replay: Callable[[], object]) -> float:
        timer.seconds = FASTER if len(rig.device.tapes) <= 2 else SLOWER
        return timer(replay)

    (item,) = choose_launches({"x": step}, rig.other.cache, rig.device, timer=seconds)
    assert [len(item["batches"]), item["chosen"]] == [2, ORDINARY]
    assert not step.launches_dependent


def choose_products(monkeypatch: pytest.MonkeyPatch, *chosen: few_rows.Tile | None) -> None:
    choices = {few_rows.Product.of(*PRODUCT): few_rows.Choice(*chosen)}
    monkeypatch.setattr(few_rows, "choices", choices)


def by_product(device: WayDevice, library: float, tile: float, early: float) -> chosen.Timer:
    """Seconds of ordinary steps by their product, and of dependent ones."""

    def seconds(replay: Callable[[], object]) -> float:
        replay()
        if device.newest == DEPENDENT:
            return early
        return tile if device.newest_product else library

    return seconds


def test_each_way_has_its_products_and_bits_are_those_of_the_same(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary step has the library's; results of a dependent one are held to its own's."""
    choose_products(monkeypatch, None, TILE)
    name, step = next(iter(rig.steps.items()))
    seconds = by_product(rig.device, 3.0, 4.0, 2.0)
    (item,) = choose_launches({name: step}, rig.other.cache, rig.device, timer=seconds)
    assert item["chosen"] == DEPENDENT
    assert rig.device.ways == 2 * [ORDINARY, DEPENDENT, ORDINARY]
    assert rig.device.products == 2 * [TILE, TILE, None]
    for found in item["batches"]:
        ms = {ORDINARY: 3.0, chosen.ALIKE: 4.0, DEPENDENT: 2.0}
        assert found["ms"] == {way: 1e3 * own / chosen._REPLAYS for way, own in ms.items()}
    # what the engine replays, and what runs without a graph
    rig.device.products.clear()
    step.capture(1)
    assert rig.device.products == [TILE]
    assert few_rows.tile_for(*PRODUCT) is None


def test_products_that_launches_have_no_part_in_are_captured_twice(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways: a tile that was slower as an early launch is the same product."""
    choose_products(monkeypatch, TILE, dataclasses.replace(TILE, starts_early=False))
    choose(rig, SLOWER)
    assert rig.device.ways == len(rig.steps) * [ORDINARY, DEPENDENT]


def test_an_ordinary_step_with_the_products_of_the_other_does_not_count(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dependent launches that are faster than the same products, and slower than the best."""
    choose_products(monkeypatch, None, TILE)
    name, step = next(iter(rig.steps.items()))
    seconds = by_product(rig.device, 1.0, 3.0, 2.0)
    (item,) = choose_launches({name: step}, rig.other.cache, rig.device, timer=seconds)
    assert (item["chosen"], len(item["batches"])) == (ORDINARY, 1)
    assert not step.launches_dependent


@pytest.mark.parametrize("which", ["results", "cache", "once"])
def test_other_bits_are_not_chosen_however_fast(rig: Rig, which: str) -> None:
    """In results, in a row of a cache, and in the last of the replays that are compared."""
    slabs = rig.other.cache.environment
    slab = next(x for x in slabs.values() if x.is_floating_point())

    def spoil(number: int) -> None:
        if which == "cache":
            slab[0, 0, 0, 0] = torch.nextafter(slab[0, 0, 0, 0], torch.tensor(9.0))
        elif which == "results" or number % chosen._CHECKS == 0:
            rig.buffers.results[0, 0] += 1

    rig.device.spoil = spoil
    with pytest.warns(LaunchWarning, match="other results"):
        report = choose(rig)
    assert {item["chosen"] for item in report} == {ORDINARY}
    expected = 1 if which == "once" else chosen._CHECKS
    assert report[0]["batches"] == [{"batch": 1, "ms": {}, "differ": expected}]


def test_a_capture_that_fails_is_a_warning(rig: Rig, tmp_path: Path) -> None:
    capture = rig.device.capture

    def fail(run: Callable[[], object]) -> Any:
        if launch.is_dependent():
            raise RuntimeError("operation not permitted")
        return capture(run)

    rig.device.capture = fail  # type: ignore[method-assign]
    kept = KeptLaunches(HERE, "engine", FileCache(tmp_path))
    with pytest.warns(LaunchWarning, match=r"after dependent launches: .*not permitted"):
        report = choose(rig, kept=kept)
    assert {item["chosen"] for item in report} == {ORDINARY}
    # the next load tries again
    assert kept.get(next(iter(rig.steps))) is None


@pytest.mark.slow
def test_a_cache_without_room_leaves_it_to_the_next_load(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load with more memory may measure what this one could not."""
    kept = KeptLaunches(HERE, "engine", FileCache(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(chosen, "_ALL_ROWS", 0)
        report = choose(rig, kept=kept)
    assert [(item["batches"], item["chosen"]) for item in report] == [([], ORDINARY)] * 2
    assert {item["chosen"] for item in choose(rig, kept=kept)} == {DEPENDENT}


def test_a_lost_device_ends_the_load_and_is_noted(rig: Rig, tmp_path: Path) -> None:
    kept = KeptLaunches(HERE, "engine", FileCache(tmp_path))
    rig.device.breaks = lambda way: way == DEPENDENT
    with pytest.raises(FaultError, match=r"after dependent launches of plan .* illegal memory"):
        choose(rig, kept=kept)
    first = next(iter(rig.steps))
    item = kept.get(first)
    assert item is not None
    assert (item["chosen"], item["lost"]) == (ORDINARY, True)


@pytest.mark.parametrize("when", ["first", "while timed"])
def test_ordinary_launches_that_lose_the_device_say_nothing_of_others(
    rig: Rig, tmp_path: Path, when: str
) -> None:
    kept = KeptLaunches(HERE, "engine", FileCache(tmp_path))
    device = rig.device
    device.breaks = lambda way: way == ORDINARY and (when == "first" or device.num_dependent > 0)

    def timer(replay: Callable[[], object]) -> float:
        replay()
        device.record_event().synchronize()
        return 1.0

    with pytest.raises(FaultError, match=r"after ordinary launches of plan .* illegal memory"):
        choose_launches(rig.steps, rig.other.cache, device, kept, timer)
    assert kept.get(next(iter(rig.steps))) is None


def test_products_of_dependent_launches_that_lose_the_device_are_left_out_with_them(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they were launched when that happened: ordinary steps do without them."""
    choose_products(monkeypatch, None, TILE)
    kept = KeptLaunches(HERE, "engine", FileCache(tmp_path))
    rig.device.breaks = lambda way: way == ORDINARY
    with pytest.raises(FaultError, match="illegal memory"):
        choose(rig, kept=kept)
    item = kept.get(next(iter(rig.steps)))
    assert item is not None
    assert (item["chosen"], item["lost"]) == (ORDINARY, True)


def test_caches_and_inputs_are_as_before(rig: Rig) -> None:
    before = {name: slab.clone() for name, slab in rig.other.cache.environment.items()}
    inputs = {name: view.clone() for name, view in rig.buffers.inputs.items()}
    choose(rig)
    for name, slab in rig.other.cache.environment.items():
        assert torch.equal(slab, before[name]), name
    assert set(inputs) == set(rig.buffers.inputs)
    # a step after that is what it would have been
    state = rig.state(3)
    same(rig.advance(next(iter(rig.steps)), state), rig.advance_eager(next(iter(rig.steps)), state))


@pytest.mark.slow
def test_what_was_found_is_kept_for_this_gpu_and_engine(tiny_engine: Path, tmp_path: Path) -> None:
    def load(seconds: dict[str, float], engine: str = "a", conditions: Conditions = HERE) -> Any:
        rig = two_plans(tiny_engine)
        timer = FakeTimer(rig.device, seconds)
        kept = KeptLaunches(conditions, engine, FileCache(tmp_path))
        choose_launches(rig.steps, rig.other.cache, rig.device, kept, timer)
        return timer.asked, {step.launches_dependent for step in rig.steps.values()}

    asked, found = load(FASTER)
    assert (asked > 0, found) == (True, {True})
    assert load(SLOWER) == (0, {True})
    assert load(SLOWER, engine="b")[1] == {False}
    assert load(FASTER, engine="b") == (0, {False})
    other = dataclasses.replace(HERE, gpu="NVIDIA H100")
    assert load(SLOWER, conditions=other)[1] == {False}
    assert load(SLOWER) == (0, {True})


def test_what_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_launch_dependent(torch.device("cpu"))
    facts: dict[str, Any] = {"capability": (9, 0), "cuda": "12.8", "driver": (12, 4)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: facts["capability"])
    monkeypatch.setattr(chosen, "driver_cuda", lambda: facts["driver"])
    device = torch.device("cuda", 0)
    for change, wanted in (
        ({}, True),
        ({"capability": (12, 0), "cuda": "13.0", "driver": (13, 0)}, True),
        ({"capability": (8, 9)}, False),
        ({"cuda": "12.1"}, False),
        ({"driver": (12, 2)}, False),
        ({"driver": (0, 0)}, False),
        ({"cuda": None}, False),
    ):
        before = dict(facts)
        facts.update(change)
        monkeypatch.setattr(torch.version, "cuda", facts["cuda"])
        assert can_launch_dependent(device) == wanted, change
        facts.update(before)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv(chosen.SWITCH, "0")
    assert not can_launch_dependent(device)


DRIVER = """
int cuDriverGetVersion(int *version) {{ *version = {version}; return {status}; }}
"""


@pytest.mark.parametrize(
    ("version", "status", "wanted"), [(12040, 0, (12, 4)), (13000, 0, (13, 0)), (13000, 3, (0, 0))]
)
def test_the_driver_says_its_version(
    version: int, status: int, wanted: tuple[int, int], tmp_path: Path, monkeypatch: Any
) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER.format(version=version, status=status), encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(chosen, "_DRIVER", str(library))
    assert chosen.driver_cuda() == wanted


def test_no_driver_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "_DRIVER", str(tmp_path / "libcuda.so.1"))
    assert chosen.driver_cuda() == (0, 0)


@pytest.mark.slow
def test_a_cache_that_is_not_there_is_a_warning(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = KeptLaunches(HERE, "engine", FileCache(tmp_path / "file"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        report = choose(rig, kept=kept)
    assert {item["chosen"] for item in report} == {DEPENDENT}
    assert any("not kept" in str(item.message) for item in found)


def test_no_position_is_beyond_those_that_the_engine_serves(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many replays go on from one another: a lookup there is a fault of the device."""
    for name in ("_CONTEXT", "_ALL_ROWS"):
        monkeypatch.setattr(chosen, name, 1 << 20)
    for step in rig.steps.values():
        trial = chosen._Trial.of(step, rig.other.cache, rig.device, 1)
        assert trial is not None
        *_, context = trial._inputs.rows[0]
        last = context + (chosen._REPLAYS + 1) * step.plan.num_rows
        assert last == rig.other.cache.shape.max_seq_len
