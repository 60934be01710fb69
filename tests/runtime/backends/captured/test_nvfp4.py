"""Published checkpoints in nvfp4: tokens of each backend that reads it, of captured steps, too."""

from __future__ import annotations

import pytest

from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests import branded_checkpoints as branded
from tests.runtime.backends.captured.captured_engine import greedy_tokens
from tests.runtime.test_quantized_checkpoints import (
    check_integers,
    make,  # noqa: F401 - a fixture
    stored_layouts,
)

PROMPTS = [[5, 6, 7, 8], [40, 41]]
NVFP4 = {"modelopt": branded.modelopt_nvfp4(), "packed": branded.packed_nvfp4()}


def tokens_of(llm: LLM, count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("name", NVFP4)
def test_tokens(make, name, backend) -> None:  # noqa: F811
    """Those of the decoded checkpoint."""
    written, engine = make("llama", NVFP4[name], weight_only=True, backend=backend)
    assert set(stored_layouts(engine).values()) == {"blocks-nvfp4"}
    wanted = greedy_tokens(written.exact, PROMPTS, 6)
    assert tokens_of(LLM(engine, plan="tree-2-2-1"), 6) == wanted


@pytest.mark.slow
def test_captured_steps(make, device, triton_kernels) -> None:  # noqa: F811
    """The same with the interpreted kernels, of which no launch races."""
    from tests.kernels.cuda.races import watched

    written, engine = make("llama", NVFP4["modelopt"], weight_only=True, backend="cuda")
    check_integers(written, engine)
    limits = CaptureLimits(sizes=(2,), max_seconds=0)
    with watched("off") as launches:
        found = tokens_of(LLM(Engine.load(engine, capture=limits), plan="off"), 2)
    assert found == greedy_tokens(written.exact, PROMPTS, 2)
    assert "linear_q_kernel" in {launch.name for launch in launches}
