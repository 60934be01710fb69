"""A pass over texts of unequal length: what comes to each projection, beside transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from specc.passes.quantize.texts_pass import TextsPass
from tests import hybrids, models
from tests.passes.modules import compiled, stored_rows
from tests.tiers import only

aten = torch.ops.aten
LENGTHS = (40, 7, 65)


def rows_of_transformers(model: Any, windows: list[list[int]]) -> dict[str, Tensor]:
    """Of each linear module, its input rows of one window after the other."""
    rows: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: rows.setdefault(name, []).append(args[0].flatten(0, -2))
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.inference_mode():
        for window in windows:
            model(torch.tensor([window]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in rows.items()}


@pytest.mark.parametrize("name", only(("lfm2", "nemotron_h"), ("llama", *hybrids.CONFIGS)))
def test_rows_of_projections(name: str) -> None:
    model = models.build_model(name)
    program, _ = compiled(model)
    generator = torch.Generator().manual_seed(3)
    windows = [torch.randint(0, models.VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    tensors = dict(model.named_buffers()) | dict(model.named_parameters(remove_duplicate=False))
    *linears, head = program.calls(aten.linear.default)
    found: dict[str, Tensor] = {}

    def override(node: fx.Node, args: tuple[Any, ...]) -> Any:
        if node in linears:
            weight = program.weights[str(node.args[1].target)]
            # of projections that are fused, all read the same
            found.update({key: args[0].flatten(0, -2) for key in weight.parameters})
        return NotImplemented

    def read(key: str) -> Tensor:
        return stored_rows(program.weights[key], tensors)

    TextsPass(program, windows, read).run(head, override)
    wanted = rows_of_transformers(model, windows)
    names = [key.removesuffix(".weight") for key in found]
    own = [key for key in names if key in wanted]
    assert len(own) > 5
    for key in own:
        want, spread = wanted[key], wanted[key].std()
        torch.testing.assert_close(found[f"{key}.weight"], want, rtol=0, atol=float(2e-4 * spread))
