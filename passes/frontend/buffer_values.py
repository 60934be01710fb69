"""Values of the buffers of a model whose weights nobody has read."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from specc.errors import UnsupportedGraphError


def buffer_values(model: nn.Module, paths: set[str]) -> dict[str, Tensor]:
    """Values of a model's buffers, also where the model is on the meta device.

    Transformers fills such buffers (rotary frequencies, embedding scales) in `_init_weights`, of
    the module itself or of one around it (multipliers of Falcon-H1), so that is what runs here, on
    a shallow copy that holds real buffers and no real weight.

    Raises:
        UnsupportedGraphError: a buffer has no value.
    """
    values: dict[str, Tensor] = {}
    for owner_path in sorted({path.rpartition(".")[0] for path in paths}):
        owner = model.get_submodule(owner_path)
        names = [path.rpartition(".")[2] for path in paths if path.rpartition(".")[0] == owner_path]
        clone = owner
        if any(owner.get_buffer(name).is_meta for name in names):
            places = owner_path.split(".") if owner_path else []
            for count in range(len(places), -1, -1):
                clone = _initialized(model, places[:count]).get_submodule(".".join(places[count:]))
                unknown = [name for name in names if not _is_set(clone.get_buffer(name))]
                if not unknown:
                    break
            if unknown:
                raise UnsupportedGraphError(
                    f"buffer {owner_path}.{unknown[0]} has no value on the meta device",
                    "buffers that the model's _init_weights computes",
                    "pass the loaded module to specc.compile instead of its path",
                )
        for name in names:
            values[f"{owner_path}.{name}" if owner_path else name] = (
                clone.get_buffer(name).detach().cpu().clone()
            )
    return values


def _initialized(model: nn.Module, places: list[str]) -> nn.Module:
    """A copy of a part of a model, with the buffers that `_init_weights` of it fills."""
    path = ".".join(places)
    clone = _without_values(model.get_submodule(path))
    initialize = _initializer(model, path)
    if initialize is not None:
        with torch.no_grad():
            initialize(clone)
    return clone


def _without_values(module: nn.Module) -> nn.Module:
    clone = copy.copy(module)
    clone._buffers = {
        key: None if value is None else _unset(value) for key, value in module._buffers.items()
    }
    clone._modules = {
        key: None if part is None else _without_values(part)
        for key, part in module._modules.items()
    }
    return clone


def _initializer(model: nn.Module, path: str) -> Any:
    """`_init_weights` of the innermost model around a module, which transformers calls for it."""
    found, at = getattr(model, "_init_weights", None), model
    for name in filter(None, path.split(".")):
        at = at.get_submodule(name)
        found = getattr(at, "_init_weights", found)
    return found


def _unset(value: Tensor) -> Tensor:
    fill = float("nan") if value.is_floating_point() else torch.iinfo(torch.int32).min
    return torch.full_like(value, fill, device="cpu") if value.dtype != torch.bool else value


def _is_set(value: Tensor) -> bool:
    return (
        value.dtype != torch.bool
        and not value.is_meta
        and not torch.equal(value.nan_to_num(), _unset(value).nan_to_num())
    )
