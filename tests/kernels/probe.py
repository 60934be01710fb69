"""A program that tells what a pass runs with.

`specc_probe::look` is an operator in Python: the program calls it in the thread and under the
settings of the pass, as it calls everything else. For 13 tokens it fails.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from specc.artifact.weight_layout import blocks_shape
from specc.kernels import native, ops
from tests.runtime.backends.cpu.plain_program import PlainProgram

aten = torch.ops.aten
NUM_OUTPUTS, NUM_INPUTS = 256, 16
WEIGHT_SHAPE = blocks_shape((NUM_OUTPUTS, NUM_INPUTS), torch.float32)
UNLUCKY = 13
# (threads of the loops between kernels, threads of kernels) of each pass
SEEN: list[tuple[int, int]] = []

_LIBRARY = torch.library.Library("specc_probe", "DEF")


def _look(x: Tensor) -> Tensor:
    SEEN.append((torch.get_num_threads(), native.kernel_threads()))
    if x.numel() == UNLUCKY:
        raise ValueError(f"{UNLUCKY} tokens")
    return x.clone()


_LIBRARY.define("look(Tensor x) -> Tensor")
_LIBRARY.impl("look", _look, "CompositeExplicitAutograd")
torch.library.register_fake("specc_probe::look", torch.empty_like, lib=_LIBRARY)


def load_probe(weight: Tensor | None = None) -> PlainProgram:
    """A projection, and after it a look; needs the native library loaded."""
    graph = fx.Graph()
    tokens, x, w0 = (graph.placeholder(name) for name in ("tokens", "x", "w0"))
    projected = graph.call_function(ops.linear, (x, w0, None, NUM_OUTPUTS))
    seen = graph.call_function(torch.ops.specc_probe.look.default, (tokens,))
    column = graph.call_function(aten.unsqueeze.default, (seen, 1))
    graph.output(graph.call_function(aten.add.Tensor, (projected, column)))
    return PlainProgram(
        graph, bound={"w0": torch.zeros(WEIGHT_SHAPE) if weight is None else weight}
    )


def probe_inputs(num_tokens: int) -> list[Tensor]:
    return [torch.arange(num_tokens), torch.zeros(num_tokens, NUM_INPUTS)]
