"""A latency table of a GPU that nobody measured: from bytes, operations and launches.

A matrix product takes as long as reading its weights or as multiplying, whichever is longer; so
does attention with reading rows or comparing tokens with them; and each layer has fixed costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from specc.cost.latency_table import LatencyTable, PassSeconds

_SIZES = sorted({round(2 ** (i / 4)) for i in range(57)})


@dataclass(frozen=True)
class ModelSize:
    """What a pass of a model costs is made of.

    Args:
        parameters: that each token is multiplied with, the output layer included.
        layers: of attention and feed-forward.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: columns of a head.
        bytes_per_value: of weights and caches.
    """

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes_per_value: int = 2


@dataclass(frozen=True)
class Device:
    """Limits of a GPU; the defaults are an H200's data sheet and cautious shares of it.

    Args:
        bytes_per_s: of its memory.
        bytes_share: of that which passes reach.
        flops_per_s: dense bfloat16 multiplications and additions.
        flops_share: of that which passes reach.
        layer_s: fixed seconds of each layer in a captured graph: its kernels' ramps and tails.
        pass_s: fixed seconds of each pass.
        iteration_s: fixed seconds of each iteration: the host's part that nothing hides.
    """

    bytes_per_s: float = 4.8e12
    bytes_share: float = 0.85
    flops_per_s: float = 990e12
    flops_share: float = 0.7
    layer_s: float = 5e-6
    pass_s: float = 20e-6
    iteration_s: float = 300e-6

    @property
    def read(self) -> float:
        """Bytes a second that passes reach."""
        return self.bytes_per_s * self.bytes_share

    @property
    def compute(self) -> float:
        """Operations a second that passes reach."""
        return self.flops_per_s * self.flops_share


LLAMA_8B = ModelSize(8.03e9, 32, 32, 8, 128)
LLAMA_1B = ModelSize(1.24e9, 16, 32, 8, 64)
H200 = Device()


def roofline(
    target: ModelSize = LLAMA_8B,
    drafts: Mapping[str, ModelSize] | None = None,
    device: Device = H200,
) -> LatencyTable:
    """The table of such models on such a device.

    Args:
        drafts: name → its size; None is one of 1B parameters.
        device: where they run.
    """
    drafts = {"draft_0": LLAMA_1B} if drafts is None else drafts
    models = {"target": target, **drafts}
    about = {
        "source": "roofline",
        "device": asdict(device),
        "models": {name: asdict(model) for name, model in models.items()},
    }
    return LatencyTable(
        _passes(target, device, "target"),
        {name: _passes(model, device, name) for name, model in drafts.items()},
        iteration_s=device.iteration_s,
        about=about,
    )


def _passes(model: ModelSize, device: Device, name: str) -> PassSeconds:
    fixed = device.pass_s + model.layers * device.layer_s
    reading = model.parameters * model.bytes_per_value / device.read
    multiplying = 2 * model.parameters / device.compute
    row_bytes = 2 * model.layers * model.kv_heads * model.head_dim * model.bytes_per_value
    # scores, and values by weights: two products, each of a multiplication and an addition
    row_flops = 4 * model.layers * model.heads * model.head_dim
    return PassSeconds(
        {size: fixed + max(reading, size * multiplying) for size in _SIZES},
        {size: max(row_bytes / device.read, size * row_flops / device.compute) for size in _SIZES},
        name,
    )
