"""What an engine holds goes with it, at once: the collector of cycles is off in these tests."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from specc.runtime.backends.cpu.program import CpuProgram
from specc.runtime.backends.program_files import MappedWeights, read_json
from specc.runtime.backends.step_io import StepInputs, StepValues
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests.lossless import PLAN_IDS, Zoo
from tests.mixed_sampling import mixed_sampling
from tests.runtime.backends.cpu.cpu_pair import engine_path

NAME = "gemma3-tied"
WAYS = [
    pytest.param("cpu", False, id="cpu"),
    pytest.param("cpu", True, id="cpu-mapped"),
    pytest.param("eager", None, id="eager"),
]


@pytest.fixture(scope="module")
def path(zoo: Zoo) -> Path:
    return engine_path(zoo, NAME)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def watch(llm: LLM) -> dict[str, Callable[[], bool]]:
    """Name → whether it is gone, for all that is large or holds something large."""
    engine = llm.engine
    # those that are held have no list of their own
    all_weights = engine.mapped_weights or [m.weights for m in (engine.target, *engine.drafts)]  # type: ignore[attr-defined]
    assert len(all_weights) == 2
    objects = {"llm": llm, "engine": engine, "cache": engine.cache, "target": engine.target}
    objects |= {f"draft {i}": draft for i, draft in enumerate(engine.drafts)}
    objects |= {f"step {name}": step for name, step in engine.steps.items()}
    # what a draft may read is a plain dictionary
    mapped = [weights for weights in all_weights if not isinstance(weights, dict)]
    objects |= {f"weights {i}": weights for i, weights in enumerate(mapped)}
    references = {name: weakref.ref(value) for name, value in objects.items()}
    storages = {
        f"{i} {key}": StorageWeakRef(weight.untyped_storage())
        for i, weights in enumerate(all_weights)
        for key, weight in weights.items()
    }
    storages |= {
        name: StorageWeakRef(slab.untyped_storage())
        for name, slab in engine.cache.environment.items()
    }
    return {name: lambda r=reference: r() is None for name, reference in references.items()} | {
        name: storage.expired for name, storage in storages.items()
    }


def assert_gone(watched: dict[str, Callable[[], bool]]) -> None:
    assert [name for name, is_gone in watched.items() if not is_gone()] == []


@pytest.mark.parametrize(("backend", "mmap"), WAYS)
def test_a_dropped_llm_releases_everything(path: Path, backend: str, mmap: bool | None) -> None:
    """After requests with every plan, a hook, and a stream that was left in the middle."""
    engine = Engine.load(path, backend=backend, mmap=mmap)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def replace(values: StepValues) -> None:
        values["logits"] = torch.zeros_like(values["logits"])

    for plan in PLAN_IDS:
        llm = LLM(engine, plan=plan)
        llm.generate([[1, 2, 3], [4, 5]], params)
        engine.steps[plan].before_accept = replace
        llm.generate([[1, 2, 3]], params)
        next(llm.stream([[1, 2, 3]], params))
    watched = watch(llm)
    assert not any(is_gone() for is_gone in watched.values())
    del engine, llm
    assert_gone(watched)


@pytest.mark.parametrize(("backend", "mmap"), WAYS)
def test_a_step_keeps_its_programs(path: Path, backend: str, mmap: bool | None) -> None:
    """What still can run has its weights and caches, whatever else was dropped."""
    engine = Engine.load(path, backend=backend, mmap=mmap)
    step, slabs = engine.steps["chain-4"], engine.cache.environment
    table = engine.cache.block_table([list(range(engine.cache.shape.blocks_per_sequence))])
    for slab in slabs.values():
        slab.zero_()
    inputs = StepInputs([(1, 2, 0)], table, *mixed_sampling(1))
    wanted = step.advance(inputs, slabs)
    for slab in slabs.values():
        slab.zero_()
    watched = watch(LLM(engine))
    del engine
    assert step.advance(inputs, slabs)[:4] == wanted[:4]
    del step, slabs, slab
    assert_gone(watched)


def test_weights_outlive_a_program_that_shared_them(path: Path) -> None:
    """Dropping a program leaves the tensors that it was given as they are."""
    weights = MappedWeights(path / "target/weights.safetensors")
    copies = {key: weight.clone() for key, weight in weights.items()}
    engine = Engine.load(path)
    caches = [(layer[0], layer[1]) for layer in engine.cache.slabs["target"][0]]
    program = read_json(path / "target/program.json")
    made = CpuProgram(program, weights, caches)
    assert made.weights is weights
    del made
    for key, copy in copies.items():
        assert torch.equal(weights[key], copy), key
