"""`--batch-invariant` on CUDA: bits of plain decoding alone, on a simulated device.

Triton's kernels are interpreted, with products in the order of an instruction's columns. Log
probabilities of prompts and outputs are compared to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import read_manifest
from specc.cli.render import weight_lines
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.lossless import Zoo
from tests.runtime.backends.captured.simulated_device import SimulatedDevice

CHAIN, TREE = SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((2, 2, 1))
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 1},
    "gemma3-tied": {},
    "gpt2": {"n_layer": 1},
    "mixtral": {"num_hidden_layers": 1},
}
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=3, prompt_logprobs=2, ignore_eos=True)
# the second is drawn, at the first one's side: what is drawn goes by places, and not by plans
PARAMS = [GREEDY, replace(GREEDY, temperature=1.0, seed=3, prompt_logprobs=None)]
PROMPTS = [[*range(3, 19)], [*range(30, 39)]]
# tokens of a prompt that come in one pass
LONG, SHORT = 32, 7
Compiled = Callable[..., Path]


@pytest.fixture(scope="module")
def compiled(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    root = tmp_path_factory.mktemp("invariant")

    def make(name: str, chunk: int = LONG, is_invariant: bool = True) -> Path:
        config = CompileConfig(
            plans=(CHAIN, TREE), max_batch_size=2, max_seq_len=32, block_size=4,
            prefill_chunk=chunk, batch_invariant=is_invariant, backend="cuda", probe=False,
        )  # fmt: skip
        pair = [zoo.checkpoint(name, draft=x, **CASES[name]) for x in ("target", "noisy")]
        return engines.build(*pair, root / f"{name}-{chunk}-{is_invariant}", config)

    return make


@pytest.fixture
def _interpreted(device: SimulatedDevice, triton_kernels: None) -> Iterator[None]:
    from tests.kernels.cuda.interpreter import products_in_steps

    with products_in_steps():
        yield


def loaded(path: Path, **options: Any) -> Engine:
    return Engine.load(path, capture=CaptureLimits(sizes=(1, 2), max_seconds=-1), **options)


def scores(llm: LLM, places: Sequence[int]) -> list[Any]:
    """Log probabilities of prompts and outputs, of prompts that are decoded together."""
    found = llm.generate([PROMPTS[i] for i in places], [PARAMS[i] for i in places])
    return [(x.prompt_logprobs, x.outputs[0].token_ids, x.outputs[0].logprobs) for x in found]


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_plain_decoding_alone(name: str, compiled: Compiled) -> None:
    engine = loaded(compiled(name))
    wanted = [scores(LLM(engine, plan="off"), [i])[0] for i in range(2)]
    assert scores(LLM(engine, plan=CHAIN.name), [1, 0]) == wanted[::-1]
    # whose prompts come in parts, beside steps of others, and again after they have given way
    llm = LLM(loaded(compiled(name, SHORT), kv_cache_tokens=36), plan=TREE.name)
    assert scores(llm, [0, 1]) == wanted
    assert llm.get_metrics().num_preemptions > 0
    assert scores(llm, [1]) == wanted[1:]
    assert llm.get_metrics().num_cached_tokens > 0


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.slow
def test_bits_differ_without_the_option(compiled: Compiled) -> None:
    """So the test above would see what it is there for."""
    engine = loaded(compiled("qwen3", is_invariant=False))
    alone = [scores(LLM(engine, plan="off"), [i])[0] for i in range(2)]
    assert scores(LLM(engine, plan=TREE.name), [0, 1]) != alone


def test_graphs_say_the_same(compiled: Compiled) -> None:
    """Operator by operator, with the oracles; and inspecting says what is promised."""
    path = compiled("qwen3")
    found, wanted = (
        LLM(compiled("qwen3", is_invariant=x), backend="eager", plan=TREE.name)
        for x in (True, False)
    )
    params = replace(GREEDY, logprobs=None, prompt_logprobs=None)
    told = [
        [x.outputs[0].token_ids for x in llm.generate(PROMPTS, params)] for llm in (found, wanted)
    ]
    assert told[0] == told[1]
    assert any("same bits" in line for line in weight_lines(read_manifest(path)))


@pytest.mark.parametrize(
    ("name", "options", "found", "do"),
    [
        ("minicpm3", {}, "attention over latents", "pass --mla-cache expanded"),
        ("qwen3", {"quantize": "int8"}, "a product by int8", "pass --weight-fragments"),
        ("lfm2", {}, "specc.tree_conv.default", "pass --backend cpu"),
    ],
    ids=["latents", "integers", "states"],
)
def test_what_has_no_order_is_refused(
    name: str, options: dict[str, Any], found: str, do: str, zoo: Zoo, tmp_path: Path
) -> None:
    config = CompileConfig(
        batch_invariant=True, backend="cuda", probe=False, max_seq_len=32, **options
    )
    with pytest.raises(ConfigError, match=f"--batch-invariant, and {found}") as raised:
        engines.build(zoo.checkpoint(name), [], tmp_path / "engine", config)
    assert raised.value.do.startswith(do)
