"""Second programs of the target and drafts with a window, compiled and captured.

`test_self_drafts.py` and `test_draft_kv.py` say what such drafts are to compute, operator by
operator. Here their programs are compiled code, or nodes of graphs that a device replays: bound
to weights, caches and block tables in other places of the runtime. What is bound wrongly changes
no output, so the tokens that are accepted are counted, too: they are those of the plain graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.config import CompileConfig
from specc.runtime.backends.captured import backend as captured_backend
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan
from tests import engines, models
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.runtime.test_views import RowOracle, serve

# the default tier captures programs over windows in backends/captured/test_captured_drafts.py
pytestmark = pytest.mark.slow

# layers of Gemma 3: the second one sees all rows, the others 16
WHOLE = SpecPlan.from_widths((1, 1, 1), ("self_w88_s0",))
PLANS = [
    SpecPlan.from_widths((1, 1, 1), ("self_l0_2",)),
    SpecPlan.from_widths((3, 2, 1), ("self_w8_s4",)),
    SpecPlan.from_dynamic(DynamicTree(6, 3, 3), "self_w8_s4"),
    # of the draft model, over a window
    SpecPlan.from_widths((2, 1, 1)),
    SpecPlan.from_widths((2, 1), ("self_l0_2", "draft_0", "lookup-2"), MERGE),
]
IDS = [plan.name for plan in PLANS]
LENGTHS = (3, 11, 16, 17, 21)


class Made:
    """An engine twice: as its backend runs it, and operator by operator."""

    def __init__(self, root: Path, backend: str) -> None:
        models.save_tiny("gemma3", root / "target")
        models.save_tiny("gemma3", root / "draft", noise=0.1)
        config = CompileConfig(
            plans=(*PLANS, WHOLE), max_seq_len=96, max_batch_size=5, block_size=4,
            prefill_chunk=16, backend=backend, probe=False, draft_kv=("window=8,sink=4",),
        )  # fmt: skip
        path = engines.build(root / "target", root / "draft", root / "engine", config)
        self.engine, self.plain = Engine.load(path), Engine.load(path, backend="eager")
        self.oracle = RowOracle(Engine.load(path, backend="eager"))
        torch.manual_seed(3)
        for engine in (self.engine, self.plain):
            for slabs in engine.cache.slabs.values():
                for slab in slabs:
                    slab.normal_(0.0, 30.0)


@pytest.fixture(scope="module", params=["cuda", pytest.param("cpu", marks=pytest.mark.slow)])
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Of `cuda`, steps that a simulated device captures and replays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(captured_backend, "cuda_device", SimulatedDevice)
        yield Made(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    dice = torch.Generator().manual_seed(11)
    return [torch.randint(0, models.VOCAB, (n,), generator=dice).tolist() for n in LENGTHS]


def sampling(count: int) -> list[SamplingParams]:
    """Greedy and seeded requests."""
    mixed: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0}, {"temperature": 1.0, "repetition_penalty": 1.2},
    ]  # fmt: skip
    return [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=i, **{"temperature": 0, **mixed[i % 5]})
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("plan", "batch"),
    [(plan, batch) for plan in IDS for batch in (1, 5)],
)
def test_tokens_rows_and_what_is_accepted(
    made: Made, texts: list[list[int]], plan: str, batch: int
) -> None:
    """Of plain graphs, after every step; one by one, and of ragged batches."""
    params = sampling(len(texts))
    cores = {
        "off": EngineCore(made.plain, "off", shares_prefixes=False),
        "plain": EngineCore(made.plain, plan, shares_prefixes=False),
        "own": EngineCore(made.engine, plan, shares_prefixes=False),
    }
    before, found = made.oracle.num_rows, {}
    chosen = range(len(texts)) if batch > 1 else range(2, 4)
    for first in chosen[::batch]:
        part = chosen[first - chosen[0] : first - chosen[0] + batch]
        for name, core in cores.items():
            own = name == "own"
            found[name] = serve(
                core,
                [texts[i] for i in part],
                [params[i] for i in part],
                lambda r, own=own: own and made.oracle.check(made.engine, r),
            )
        assert found["own"] == found["plain"] == found["off"]
    stats = {name: core.scheduler.stats for name, core in cores.items()}
    assert stats["own"].num_spec_steps == stats["plain"].num_spec_steps > 5
    assert stats["own"].num_accepted_tokens == stats["plain"].num_accepted_tokens > 0
    assert made.oracle.num_rows - before > 150


def test_steps_in_flight(made: Made, texts: list[list[int]]) -> None:
    """Steps that are queued before the results of those before them are read."""
    params = sampling(len(texts))
    wanted = LLM(made.plain, plan="off").generate(texts, params)
    for plan in IDS:
        outputs = LLM(made.engine, plan=plan).generate(texts, params)
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in wanted]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_window_of_all_rows_is_always_right(
    made: Made, texts: list[list[int]], temperature: float
) -> None:
    """A second program of all layers that sees all rows is the target."""
    count = 1 + 4 * (WHOLE.max_depth + 1)
    params = [
        SamplingParams(max_tokens=count, ignore_eos=True, seed=i, temperature=temperature)
        for i in range(5)
    ]
    llm = LLM(made.engine, plan=WHOLE.name)
    llm.generate(texts, params)
    assert llm.get_metrics().mean_acceptance_length == WHOLE.max_depth + 1
