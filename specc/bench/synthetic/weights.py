"""Random weights, made on the device: one copy for specc's programs and for transformers.

A program reads some parameters concatenated (q, k and v as one matrix). Such a weight is allocated
whole, and the parameters of the module become views of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specc.artifact.in_memory import BenchModel

_SEED = 0
# `initializer_range` of Llama and Qwen3
_HEAD_STD = 0.02


def make_weights(model: BenchModel, device: torch.device, seed: int = _SEED) -> dict[str, Tensor]:
    """Draw the weights of a model on a device; its module gets the same tensors.

    Values are those that transformers gives to a model before training: matrices of small normal
    numbers after norms of one, so activations stay finite in every dtype.

    Args:
        model: whose module is on the meta device.
        device: that weights and constants lie on from now on.
        seed: the same seed gives the same weights on the same device.
    Returns:
        key → tensor of each weight and constant input of the program.
    """
    module = model.module
    weights = {}
    aliases = _aliases(module)
    for item in model.program["inputs"]:
        if item["kind"] == "weight" and item["key"] not in weights:
            assert "blocks_of" not in item, "programs of the CPU backend hold weights in blocks"
            dtype = getattr(torch, item["dtype"])
            weight = torch.empty(item["shape"], dtype=dtype, device=device)
            weights[item["key"]] = weight
            _lend(module, item["key"], weight, item.get("is_turned", False), aliases)
    _allocate_rest(module, device, aliases)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        if model.entry.head is not None:
            _draw_head(module)
        for part in module.modules():
            # norms, rotary frequencies and scales of embeddings get their proper values, too
            module._init_weights(part)  # type: ignore[operator]
        for key, value in model.copies.items():
            weights[key] = torch.empty_like(value, device=device).normal_(0, _HEAD_STD)
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
    aliases: Mapping[int, list[str]],
) -> None:
    """Make the parameters that a weight concatenates views of its rows, transposed if need be."""
    names = key.split("+")
    sizes = [module.get_parameter(name).shape[int(is_turned)] for name in names]
    assert sum(sizes) == weight.shape[0], key
    for name, rows in zip(names, weight.split(sizes), strict=True):
        _assign(module, name, rows.t() if is_turned else rows, aliases)


def _assign(module: nn.Module, name: str, value: Tensor, aliases: Mapping[int, list[str]]) -> None:
    """Replace a parameter under all names that the module knows it by."""
    parameter = nn.Parameter(value, requires_grad=False)
    old = module.get_parameter(name)
    assert old.shape == value.shape, name
    for alias in aliases[id(old)]:
        owner, _, last = alias.rpartition(".")
        module.get_submodule(owner)._parameters[last] = parameter


def _aliases(module: nn.Module) -> dict[int, list[str]]:
    """Names of each parameter: tied ones have several."""
    found: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _allocate_rest(
    module: nn.Module, device: torch.device, aliases: Mapping[int, list[str]]
) -> None:
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
