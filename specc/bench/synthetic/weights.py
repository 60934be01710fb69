"""Random weights, made on the device: one copy for specc's programs and for transformers.

A program reads some parameters concatenated (q, k and v as one matrix). Such a weight is allocated
whole, and the parameters of the module become views of its rows. Quantized weights are drawn as
integers, and no module has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specc.artifact.in_memory import BenchModel
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.bench.synthetic.quantized import draw_blocks

_SEED = 0
# `initializer_range` of Llama and Qwen3
_HEAD_STD = 0.02
# of a parameter of which only integers are read, so much shows how transformers would draw it
_SAMPLED_ROWS, _SAMPLED_MATRICES = 32, 1


def make_weights(model: BenchModel, device: torch.device, seed: int = _SEED) -> dict[str, Tensor]:
    """Draw the weights of a model on a device; its module gets the same tensors.

    Values are those that transformers gives to a model before training: matrices of small normal
    numbers after norms of one, so activations stay finite in every dtype. Quantized weights have
    the same standard deviation, see `draw_blocks`; a parameter of which only these are read stays
    on the meta device.

    Args:
        model: whose module is on the meta device.
        device: that weights and constants lie on from now on.
        seed: the same seed gives the same weights on the same device.
    Returns:
        key → tensor of each weight and constant input of the program.
    """
    module = model.module
    weights: dict[str, Tensor] = {}
    quantized: list[Mapping[str, Any]] = []
    aliases = _aliases(module)
    for item in model.program["inputs"]:
        if item["kind"] == "weight" and item["key"] not in weights:
            assert "blocks_of" not in item, "programs of the CPU backend hold weights in blocks"
            dtype = getattr(torch, item["dtype"])
            weight = torch.empty(item["shape"], dtype=dtype, device=device)
            weights[item["key"]] = weight
            if "quantized_of" in item:
                quantized.append(item)
            else:
                _lend(module, item["key"], weight, item.get("is_turned", False), aliases)
    unread = _take_samples(module, quantized, device, aliases)
    _allocate_rest(module, device, aliases)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        if model.entry.reads_hidden:
            _draw_head(module)
        for part in module.modules():
            # norms, rotary frequencies and scales of embeddings get their proper values, too
            module._init_weights(part)  # type: ignore[operator]
        for key, value in model.copies.items():
            weights[key] = torch.empty_like(value, device=device).normal_(0, _HEAD_STD)
        for item in quantized:
            layout, names = _layout_of(item)
            spread = _spread(module, names, item, unread)
            draw_blocks(weights[item["key"]], item["quantized_of"][-1], layout, spread)
    for name, parameter in unread.items():
        _replace(module, name, parameter, aliases)
    return weights | {key: value.to(device) for key, value in model.constants.items()}


def _draw_head(module: nn.Module) -> None:
    """Of a head, which is no model of transformers and fills in its buffers alone."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, _HEAD_STD)
        else:
            parameter.fill_(0 if name.endswith(".bias") else 1)


def _lend(
    module: nn.Module,
    key: str,
    weight: Tensor,
    is_turned: bool,
    aliases: dict[int, list[str]],
) -> None:
    """Make the parameters that a weight concatenates views of its rows, transposed if need be."""
    names = key.split("+")
    sizes = [module.get_parameter(name).shape[int(is_turned)] for name in names]
    assert sum(sizes) == weight.shape[0], key
    for name, rows in zip(names, weight.split(sizes), strict=True):
        _assign(module, name, rows.t() if is_turned else rows, aliases)


def _layout_of(item: Mapping[str, Any]) -> tuple[QuantizedLayout, list[str]]:
    """How a program's input holds integers, and of which parameters."""
    layout = QuantizedLayout.named(item["layout"].removeprefix("blocks-"))
    return layout, item["key"].removesuffix(f":{layout.name}").split("+")


def _take_samples(
    module: nn.Module,
    quantized: Iterable[Mapping[str, Any]],
    device: torch.device,
    aliases: dict[int, list[str]],
) -> dict[str, nn.Parameter]:
    """Let the module have a few rows of each parameter of which only integers are read.

    Returns:
        what it had instead: name → parameter on the meta device.
    """
    found = {}
    for name in (name for item in quantized for name in _layout_of(item)[1]):
        parameter = module.get_parameter(name)
        if parameter.is_meta:
            found[name] = parameter
            few = torch.empty_like(_few(parameter), device=device)
            _replace(module, name, nn.Parameter(few, requires_grad=False), aliases)
    return found


def _few(parameter: Tensor) -> Tensor:
    return parameter[: _SAMPLED_MATRICES if parameter.dim() > 2 else _SAMPLED_ROWS]


def _spread(
    module: nn.Module,
    names: Sequence[str],
    item: Mapping[str, Any],
    unread: Mapping[str, Tensor],
) -> Tensor:
    """[blocks · 32] standard deviation of each output, as the module's parameters were drawn."""
    *stack, outputs, _ = item["quantized_of"]
    parts = []
    for name in names:
        drawn = module.get_parameter(name)
        shape = unread.get(name, drawn).shape
        rows = outputs if stack else shape[int(item.get("is_turned", False))]
        parts.append(_few(drawn).float().square().mean().sqrt().expand(rows))
    spread = torch.cat(parts)
    assert len(spread) == outputs, item["key"]
    return nn.functional.pad(spread, (0, -outputs % BLOCK)).repeat(math.prod(stack))


def _assign(module: nn.Module, name: str, value: Tensor, aliases: dict[int, list[str]]) -> None:
    """Replace a parameter by one of the same shape."""
    assert module.get_parameter(name).shape == value.shape, name
    _replace(module, name, nn.Parameter(value, requires_grad=False), aliases)


def _replace(
    module: nn.Module, name: str, parameter: nn.Parameter, aliases: dict[int, list[str]]
) -> None:
    """Replace a parameter under all names that the module knows it by."""
    names = aliases[id(module.get_parameter(name))]
    aliases[id(parameter)] = names
    for alias in names:
        owner, _, last = alias.rpartition(".")
        module.get_submodule(owner)._parameters[last] = parameter


def _aliases(module: nn.Module) -> dict[int, list[str]]:
    """Names of each parameter: tied ones have several."""
    found: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _allocate_rest(module: nn.Module, device: torch.device, aliases: dict[int, list[str]]) -> None:
    """Buffers, and parameters that no program reads: transformers may want them."""
    for name, parameter in list(module.named_parameters()):
        if parameter.is_meta:
            _assign(module, name, torch.empty_like(parameter, device=device), aliases)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)


def shared_bytes(module: nn.Module, weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Bytes of a module's parameters that lie in these weights, and of all its parameters."""
    storages = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    sizes: dict[int, tuple[int, Any]] = {
        id(p): (p.nbytes, p.untyped_storage().data_ptr()) for p in module.parameters()
    }
    shared = sum(size for size, storage in sizes.values() if storage in storages)
    return shared, sum(size for size, _ in sizes.values())
