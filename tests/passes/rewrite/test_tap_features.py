"""What a target keeps for drafts, against the hidden states that transformers puts out."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specc.errors import ConfigError, UnsupportedGraphError
from specc.kernels import ops
from specc.passes.drafters.tap_ids import AFTER, ENTERING, boundaries_of
from specc.passes.facts import features_are_written
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import FEATURES, RUNTIME_INPUTS, Program
from specc.passes.program_json import program_to_json
from specc.passes.proof.verify_graph import verify_graph
from specc.passes.rewrite.tap_features import TapFeatures
from specc.speculation.taps import Taps
from tests import models
from tests.passes.modules import Tiny, dense_logits, flat_logits, traced
from tests.passes.test_residual import LedPast, NoStream, TwoAttentions
from tests.tiers import only
from tests.traces import trace_once

# serial and parallel blocks, norms behind a branch, flattened branches
DEFAULT = ("llama", "gemma3", "phi", "opt")
ALL = (*models.ARCHITECTURES, *models.MORE_ARCHITECTURES)
NAMES = [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in ALL]
# every layer reads something of the embedding that leads past the ones before it; four streams
REFUSED = ("gemma4", "gemma3n")
TOKENS = torch.randint(0, models.VOCAB, (11,), generator=torch.Generator().manual_seed(3))


def tap(program: Program, taps: Taps) -> Program:
    """A copy that keeps them, and is what a runtime can execute."""
    made = program.copy("target")
    result = TapFeatures(taps).run(made)
    assert result.rewrites == len(taps.boundaries)
    assert features_are_written(made)
    verify_graph(made, "taps", is_final=True)
    made.graph.eliminate_dead_code()
    return made


def run(program: Program, model: nn.Module, tokens: Tensor, dead: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of one causal pass, and rows [Nt, W] of the slab; dead tokens are its last."""
    count = len(tokens)
    slot = torch.arange(count, dtype=torch.int32)
    slot[count - dead :] = -1
    features = torch.full((count + 1, 1, program.feature_width), -7.0)
    logits = flat_logits(
        program,
        model,
        {
            "tokens": tokens,
            "positions": torch.arange(count),
            "q_start": torch.tensor([0, count], dtype=torch.int32),
            "slot": slot,
            "cache_len": torch.zeros(1, dtype=torch.int32),
            "ancestors": None,
            # block 0 is nobody's
            "block_table": torch.arange(1, count + 1, dtype=torch.int32)[None],
            "logit_rows": torch.arange(count),
            FEATURES: features,
        },
        count + 1,
    )
    assert (features[0] == -7.0).all()
    return logits, features[1:, 0]


@cache
def of(name: str) -> tuple[Any, Program]:
    model = models.build_model(name)
    program = trace_once(model, "target")
    Pipeline(PHASES).run(program)
    return model, program


def hidden_states(model: Any, tokens: Tensor) -> list[Tensor]:
    """[T, H] at each boundary, and then what the final norm makes of the last one."""
    layers = next(
        child
        for child in model.modules()
        if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers
    )
    found: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    hook = layers[-1].register_forward_hook(keep)
    with torch.no_grad():
        output = model(
            input_ids=tokens[None],
            position_ids=torch.arange(len(tokens))[None],
            use_cache=False,
            output_hidden_states=True,
        )
    hook.remove()
    *entering, normed = (x.reshape(len(tokens), -1) for x in output.hidden_states)
    return [*entering, found[0].reshape(len(tokens), -1), normed]


@pytest.mark.parametrize("name", only(("llama", "opt"), NAMES))
def test_rows_are_the_hidden_states_of_transformers(name: str) -> None:
    model, program = of(name)
    num_layers = len(program.layers)
    if name in REFUSED:
        with pytest.raises(UnsupportedGraphError, match="no value of the stream between"):
            tap(program, Taps((0,)))
        return
    wanted = hidden_states(model, TOKENS)
    assert len(wanted) == num_layers + 2
    # no two are alike
    for i, one in enumerate(wanted):
        assert all((one - other).abs().max() > 1e-2 for other in wanted[:i])
    before = program_to_json(program)
    # not in order
    boundaries = (num_layers, *range(num_layers))
    for is_normed in (False, True):
        made = tap(program, Taps(boundaries, is_normed))
        logits, rows = run(made, model, TOKENS)
        last = wanted[-1] if is_normed else wanted[-2]
        parts = torch.cat([last, *wanted[:num_layers]], -1)
        assert made.feature_width == parts.shape[1]
        torch.testing.assert_close(rows, parts, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, dense_logits(model, TOKENS), rtol=1e-4, atol=1e-4)
    assert program_to_json(program) == before


def test_dead_tokens_write_nothing() -> None:
    model, program = of("llama")
    _, rows = run(tap(program, Taps((1,))), model, TOKENS, dead=3)
    wanted = hidden_states(model, TOKENS)[1]
    torch.testing.assert_close(rows[:-3], wanted[:-3], rtol=1e-4, atol=1e-4)
    assert (rows[-3:] == -7.0).all()


def test_the_input_is_the_last_cache() -> None:
    _, program = of("llama")
    made = tap(program, Taps((2, 0)))
    names = [node.target for node in made.graph.find_nodes(op="placeholder")]
    assert names == [*(n.target for n in program.graph.find_nodes(op="placeholder")), FEATURES]
    assert made.runtime_inputs == RUNTIME_INPUTS
    assert FEATURES not in made.caches
    entry = program_to_json(made)["inputs"][-1]
    assert entry == {
        "name": FEATURES,
        "kind": "cache",
        "layer": len(program.layers),
        "part": "rows",
        "dtype": "float32",
        "shape": [128],
        "boundaries": [2, 0],
        "is_last_normed": False,
    }
    assert made.copy("other").taps == Taps((2, 0))
    assert program.feature_width == 0


def test_what_is_fused_for_a_device_is_the_same() -> None:
    """Norms, products, the embedding and the head are fused as without taps."""
    model, program = of("llama")
    plain, made = program.copy("target"), tap(program, Taps((0, 1)))
    records = [Pipeline(cuda_phases(64)).run(item) for item in (plain, made)]
    rewrites = [[(x.name, x.rewrites, len(x.declined)) for x in found] for found in records]
    assert rewrites[0] == rewrites[1]
    assert made.calls(ops.add_norm_gate_up)
    assert made.calls(ops.embed_norm_rope_write)
    _, rows = run(made, model, TOKENS)
    wanted = torch.cat(hidden_states(model, TOKENS)[:2], -1)
    torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-4)


def test_a_stream_in_another_type_is_kept_in_that_of_the_model() -> None:
    class Wide(TwoAttentions):
        """The stream is float64, and what reads it converts it."""

        def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
            return super().embed(ids, positions).double()

        def split(self, x: Tensor) -> Tensor:
            return super().split(x)

        def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return super().operands(x.float())

        def project(self, x: Tensor) -> Tensor:
            return super().project(x.float())

    model = Wide()
    program, _ = traced(model)
    Pipeline(PHASES).run(program)
    tokens = TOKENS % 13
    _, rows = run(tap(program, Taps((0,))), model, tokens)
    assert rows.dtype == torch.float32
    wanted = model.embed(tokens[None], torch.arange(len(tokens))[None])[0].float()
    torch.testing.assert_close(rows, wanted)


@pytest.mark.parametrize("boundaries", [(3,), (0, -1), ()])
def test_boundaries_that_there_are_not(boundaries: tuple[int, ...]) -> None:
    _, program = of("llama")
    found = f"boundary {min(boundaries) if -1 in boundaries else 3}" if boundaries else "no bound"
    with pytest.raises(ConfigError, match=f"taps at {found}.* of a target of 2 layers"):
        TapFeatures(Taps(boundaries)).run(program.copy("target"))


class Projected(TwoAttentions):
    """A projection follows the last layer."""

    def project(self, x: Tensor) -> Tensor:
        return super().project(torch.tanh(self.o(x)))


@pytest.mark.parametrize(
    ("kind", "taps", "found"),
    [
        (LedPast, Taps((0,)), "layers of target: "),
        pytest.param(NoStream, Taps((0,)), "layers of target: ", marks=pytest.mark.slow),
        (Tiny, Taps((1,)), "taps of target: a single layer"),
        (Projected, Taps((2,)), "taps of target: a product between"),
    ],
)
def test_models_whose_boundaries_are_not_known(kind: type[Tiny], taps: Taps, found: str) -> None:
    program, _ = traced(kind())
    Pipeline(PHASES).run(program)
    with pytest.raises(UnsupportedGraphError) as error:
        TapFeatures(taps).run(program)
    assert error.value.found.startswith(found)
    assert "hidden states cannot be read" in error.value.do


def test_an_id_after_a_layer_is_what_it_returns() -> None:
    """Both conventions on the module itself."""
    model, program = of("llama")
    returned: dict[int, Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda _, __, output, number=number: returned.update({number: output})
        )
    wanted = hidden_states(model, TOKENS)
    for number in range(2):
        taps = Taps(boundaries_of([number], AFTER, 2, "head"))
        _, rows = run(tap(program, taps), model, TOKENS)
        torch.testing.assert_close(rows, returned[number][0], rtol=1e-4, atol=1e-4)
        taps = Taps(boundaries_of([number], ENTERING, 2, "head"))
        _, rows = run(tap(program, taps), model, TOKENS)
        torch.testing.assert_close(rows, wanted[number], rtol=1e-4, atol=1e-4)
    assert len(program.calls(ops.write_rows)) == 0


def test_the_last_boundary_of_any_model() -> None:
    """What logits are projected from is known, whatever leads past layers."""
    model, program = of("gemma4")
    made = tap(program, Taps((len(program.layers),), True))
    _, rows = run(made, model, TOKENS)
    torch.testing.assert_close(rows, hidden_states(model, TOKENS)[-1], rtol=1e-4, atol=1e-4)
