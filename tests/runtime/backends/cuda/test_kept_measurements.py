"""What was measured of products is read by the next load, and by no other GPU or version."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch

from specc.kernels.cuda import few_rows
from specc.kernels.cuda.few_rows import Choice
from specc.runtime.backends.cuda import kept_measurements
from specc.runtime.backends.cuda.backend import choose_and_keep
from specc.runtime.backends.cuda.choose_products import ROWS, DeviceLostError
from specc.runtime.backends.cuda.kept_measurements import Conditions, KeptProducts, kernel_digest
from specc.runtime.backends.cuda.product_candidates import ProductWarning
from specc.system import file_cache
from specc.system.file_cache import FileCache
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.runtime.backends.cuda.test_choose_products import NUM_CANDIDATES, FakeTimer, Lowered

HERE = Conditions("NVIDIA H200", "2.11.0", "3.7.1", "abc")
FASTER, SLOWER = {None: 2.0, 0: 1.0}, {None: 1.0, 0: 2.0}
# every operator, every number of rows, every candidate
ALL = NUM_CANDIDATES * len(ROWS)


@pytest.fixture(scope="module")
def program() -> Lowered:
    return Lowered()


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Choices of a process that has measured nothing."""

    def start() -> None:
        monkeypatch.setattr(few_rows, "choices", {})

    start()
    return start


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    return FileCache(tmp_path / "cache")


def load(program, cache, seconds=FASTER, conditions=HERE) -> FakeTimer:
    """What loading an engine does with products; returns the timer, which knows what was asked."""
    timer = FakeTimer(seconds)
    choose_and_keep([program], SimulatedDevice(), KeptProducts(conditions, cache), timer)
    return timer


def test_the_second_load_measures_nothing_and_chooses_the_same(program, cache, new_process):
    assert len(load(program, cache).asked) == ALL
    chosen = dict(few_rows.choices)
    tables = (few_rows.TILES, few_rows.LINEAR_TILES)
    assert set(chosen.values()) == {Choice.of(tiles[torch.float32][0]) for tiles in tables}
    new_process()
    # were it measured again, the library would be chosen
    assert load(program, cache, SLOWER).asked == []
    assert few_rows.choices == chosen


def test_that_the_library_was_faster_is_kept_too(program, cache, new_process):
    load(program, cache, SLOWER)
    new_process()
    assert load(program, cache, FASTER).asked == []
    assert set(few_rows.choices.values()) == {Choice.of(None)}


@pytest.mark.parametrize("field", [item.name for item in dataclasses.fields(Conditions)])
def test_other_conditions_measure_anew(program, cache, new_process, field):
    load(program, cache)
    new_process()
    other = dataclasses.replace(HERE, **{field: "another"})
    assert len(load(program, cache, SLOWER, other).asked) == ALL
    assert set(few_rows.choices.values()) == {Choice.of(None)}
    # both are kept, each for its own
    new_process()
    assert load(program, cache, SLOWER).asked == []
    assert Choice.of(None) not in few_rows.choices.values()


@pytest.mark.slow
def test_shapes_that_are_not_kept_are_measured(program, cache, new_process):
    load(program, cache)
    new_process()
    wide = Lowered(intermediate_size=160)
    asked = load(wide, cache).asked
    # its gates are of another shape, and what reads them
    assert len(asked) == (2 + 3) * len(ROWS)
    new_process()
    assert load(wide, cache).asked == load(program, cache).asked == []


@pytest.mark.parametrize("break_file", ["cut", "altered", "without its hash"])
def test_a_broken_file_is_measured_anew(program, cache, new_process, break_file):
    load(program, cache)
    (path,) = (cache.root / "products").glob("*.json")
    if break_file == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif break_file == "altered":
        path.write_bytes(path.read_bytes().replace(b"tile-0", b"tile-7"))
    else:
        path.with_name(path.name + ".sha256").unlink()
    new_process()
    assert len(load(program, cache).asked) == ALL
    new_process()
    assert load(program, cache).asked == []


def test_a_cache_that_cannot_be_written_is_a_warning(program, tmp_path, new_process):
    (tmp_path / "file").write_text("")
    cache = FileCache(tmp_path / "file" / "cache")
    with pytest.warns(ProductWarning, match="SPECC_CACHE_DIR"):
        assert len(load(program, cache).asked) == ALL
    assert Choice.of(None) not in few_rows.choices.values()


@pytest.mark.parametrize("error", [RuntimeError("no home"), PermissionError(13, "no entry")])
def test_a_user_without_a_cache_can_load(program, monkeypatch, error):
    def fail() -> Path:
        raise error

    monkeypatch.setattr(file_cache, "default_cache_dir", fail)
    with pytest.warns(ProductWarning, match="no home|no entry"):
        assert len(load(program, None).asked) == ALL
    assert Choice.of(None) not in few_rows.choices.values()


def test_a_cache_that_others_may_write_to_is_not_read(program, cache, new_process):
    load(program, cache)
    (cache.root / "products").chmod(0o777)
    new_process()
    with pytest.warns(ProductWarning, match="others may write"):
        assert len(load(program, cache).asked) == ALL


def test_a_candidate_that_failed_is_tried_again(program, cache, new_process):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProductWarning)
        load(program, cache, {None: 2.0, 0: -1.0})
    new_process()
    assert len(load(program, cache).asked) == ALL
    assert Choice.of(None) not in few_rows.choices.values()


class LostDevice(SimulatedDevice):
    """Takes no more work once the kernel of a product has failed for the third time."""

    def __init__(self, timer: FakeTimer) -> None:
        super().__init__()
        self.timer = timer

    def synchronize(self) -> None:
        if self.timer.asked.count(0) == 3:
            raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.filterwarnings("ignore::specc.runtime.backends.cuda.product_candidates.ProductWarning")
def test_a_kernel_that_ends_the_work_of_the_device_is_left_out(program, cache, new_process):
    """Two fail and leave the device as it was: they are tried again by the next load."""
    timer = FakeTimer({None: 2.0, 0: -1.0})
    with pytest.raises(DeviceLostError, match=r"tile-0 of .*illegal memory") as caught:
        choose_and_keep([program], LostDevice(timer), KeptProducts(HERE, cache), timer)
    *failed, lost = caught.value.report
    assert len(failed) == 2
    assert lost["lost"] == "tile-0"
    new_process()
    assert len(load(program, cache).asked) == ALL - 2
    kept = [product for product, found in few_rows.choices.items() if found == Choice.of(None)]
    assert [(p.operator, list(p.shape), p.rows) for p in kept] == [
        (lost["operator"], lost["shape"], lost["rows"])
    ]


def test_a_process_keeps_what_another_has_written(program, cache, new_process):
    first, second = KeptProducts(HERE, cache), KeptProducts(HERE, cache)
    item = {"operator": "add_norm_linear", "shape": [8, 8], "dtype": "float32", "rows": 1}
    item |= {"ms": {"library": 2.0, "tile-0": 1.0}, "chosen": "tile-0"}
    first.add([item])
    second.add([item | {"rows": 2}])
    second.add([item | {"rows": 2, "chosen": "library"}])
    assert KeptProducts(HERE, cache).take() == 2
    chosen = {product.rows: choice for product, choice in few_rows.choices.items()}
    assert chosen == {1: Choice.of(few_rows.TILES[torch.float32][0]), 2: Choice.of(None)}


def test_a_tile_that_is_not_there_any_more_is_not_taken(cache, monkeypatch):
    item = {"operator": "add_norm_linear", "shape": [8, 512], "dtype": "bfloat16", "rows": 1}
    item |= {"ms": {"library": 2.0, "tile-0": 1.5, "tile-1": 1.0}, "chosen": "tile-1"}
    KeptProducts(HERE, cache).add([item])
    one = {torch.bfloat16: few_rows.TILES[torch.bfloat16][:1]}
    monkeypatch.setattr(few_rows, "TILES", one)
    assert KeptProducts(HERE, cache).take() == 0
    assert few_rows.choices == {}


def test_products_of_dependent_launches_are_kept(program, cache, new_process, monkeypatch):
    """What was measured where launches are ordinary does for no load where they may be others."""
    monkeypatch.setattr(few_rows, "DTYPES", (torch.float32,))

    def load(early: dict[int, float], can_depend: bool = True) -> int:
        new_process()
        timer = FakeTimer({None: 1.0, 0: 1.1}, early)
        kept = KeptProducts(HERE, cache, can_depend)
        choose_and_keep([program], SimulatedDevice(), kept, timer)
        return len(timer.asked)

    assert load({}, can_depend=False) == ALL
    assert set(few_rows.choices.values()) == {Choice.of(None)}
    # all but the library's once more
    assert load({0: 0.9}) > ALL
    chosen = dict(few_rows.choices)
    assert all(choice.differs for choice in chosen.values())
    assert load({0: 3.0}) == 0
    assert few_rows.choices == chosen
    # ordinary launches take their part of it
    assert load({}, can_depend=False) == 0
    assert few_rows.choices == chosen


@pytest.mark.filterwarnings("ignore::specc.runtime.backends.cuda.product_candidates.ProductWarning")
def test_an_early_launch_that_failed_is_tried_again(program, cache, new_process, monkeypatch):
    monkeypatch.setattr(few_rows, "DTYPES", (torch.float32,))
    for early, expected in (({0: -1.0}, {"tile-0"}), ({0: 0.5}, {"tile-0-early"})):
        new_process()
        timer = FakeTimer({None: 1.0, 0: 0.9}, early)
        kept = KeptProducts(HERE, cache, True)
        report = choose_and_keep([program], SimulatedDevice(), kept, timer)
        assert {item["dependent"] for item in report} == expected


def test_the_digest_follows_the_source(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "a.py").write_text("x = 1\n")

    class Spec:
        origin = str(tmp_path / "__init__.py")

    assert len(kernel_digest()) == 64
    monkeypatch.setattr(kept_measurements.importlib.util, "find_spec", lambda name: Spec)
    before = kernel_digest()
    assert before == kernel_digest()
    (tmp_path / "a.py").write_text("x = 2\n")
    assert kernel_digest() != before
