"""Which layers of a model are equal, so that tracing one of them says what the others compute.

Two layers are equal where nothing that the forward of the first one looked at is another in the
second one: classes, parameters and buffers but for their values, and attributes. Most attributes
are the same in all layers. Those that are not, such as the number of a layer, count where they are
read; `WatchedAttributes` sees that. All else that a forward may look at, such as globals or what a
hook keeps, is left to who knows the classes: `are_known`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from specc.passes.values import describe_tensor

# whose modules compute with their inputs, parameters and attributes alone, and keep nothing
_LIBRARIES = ("transformers.", "torch.nn.", "specc.passes.drafters.")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# what `nn.Module` keeps for itself, compared on its own
_CONTAINERS = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
_NOTHING = object()
_MISSING = "missing"

# (path of a module within its layer, attribute)
Place = tuple[str, str]


def groups_of_layers(model: nn.Module) -> list[tuple[nn.Module, ...]]:
    """Layers of a model that may be equal: those of the outermost lists, of one class each.

    None of a model in which a module has two places: which one is meant, only a trace can say.
    """
    named = list(model.named_modules(remove_duplicate=False))
    if len({id(module) for _, module in named}) != len(named):
        return []
    groups: list[tuple[nn.Module, ...]] = []
    within: tuple[str, ...] = ()
    for path, module in named:
        if path.startswith(within) or not isinstance(module, nn.ModuleList):
            continue
        by_kind: dict[type, list[nn.Module]] = {}
        for layer in module:
            by_kind.setdefault(type(layer), []).append(layer)
        found = [tuple(layers) for layers in by_kind.values() if len(layers) > 1]
        groups += [layers for layers in found if are_known(layers)]
        within = (*within, f"{path}.")
    return groups


def are_known(layers: Sequence[nn.Module]) -> bool:
    """Whether all parts of these are of libraries whose modules have no side effects, unchanged."""
    return all(_is_known(module) for layer in layers for module in layer.modules())


def _is_known(module: nn.Module) -> bool:
    kind, own = type(module), vars(module)
    forward = inspect.unwrap(kind.forward)
    names = f"{kind.__module__}.", f"{getattr(forward, '__module__', None)}."
    is_changed = any(
        isinstance(value, types.FunctionType | types.MethodType)
        for value in (own.get("forward"), own.get("_call_impl"), own.get("__call__"))
    ) or any(own.get(hooks) for hooks in _HOOKS)
    return not is_changed and all(name.startswith(_LIBRARIES) for name in names)


def structure_of(layer: nn.Module) -> Hashable:
    """All of a layer that is not an attribute: classes, parameters and buffers but for values.

    Tensors that are one have one number.
    """
    numbers: dict[int, int] = {}
    modules: list[Hashable] = []
    for path, module in layer.named_modules():
        tensors = []
        for kind in ("_parameters", "_buffers"):
            for name, value in getattr(module, kind).items():
                number = None if value is None else numbers.setdefault(id(value), len(numbers))
                tensors.append(
                    (kind, name, number, None if value is None else describe_tensor(value))
                )
        unsaved = frozenset(module._non_persistent_buffers_set)
        modules.append((path, type(module), module.training, tuple(tensors), unsaved))
    return tuple(modules)


class WatchedAttributes:
    """Attributes that differ between layers of a group, and which of them a forward has read."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._paths = {id(m): path for layer in layers for path, m in layer.named_modules()}
        self._read: set[Place] = set()
        self._descriptors: list[tuple[type, str]] = []
        parts: dict[str, list[nn.Module]] = {}
        for layer in layers:
            for path, module in layer.named_modules():
                parts.setdefault(path, []).append(module)
        self._places = {(path, name) for path in parts for name in _differing(parts[path])}
        self._kinds = {(type(m), name) for path, name in self._places for m in parts[path]}

    @property
    def can_be_watched(self) -> bool:
        """Whether reading any of them can be seen: a class that has a default cannot tell."""
        return not any(hasattr(kind, name) for kind, name in self._kinds)

    def begin(self) -> None:
        """See what is read from now on; ends with `end`."""
        for kind, name in self._kinds:
            setattr(kind, name, _Watched(name, self))

    def end(self) -> None:
        """Leave the classes as they were."""
        for kind, name in self._kinds:
            delattr(kind, name)

    def note(self, module: nn.Module, name: str) -> None:
        """An attribute of a module was read."""
        self._read.add((self._paths.get(id(module), _MISSING), name))

    def take_read(self) -> frozenset[Place]:
        """What was read since the last call."""
        read, self._read = frozenset(self._read), set()
        return read


class _Watched:
    """An attribute of objects, which has a class tell when it is read."""

    def __init__(self, name: str, watched: WatchedAttributes) -> None:
        self._name, self._watched = name, watched

    def __get__(self, module: Any, kind: type) -> Any:
        if module is None:
            return self
        if self._name not in vars(module):
            # `nn.Module.__getattr__` goes on from here
            raise AttributeError(self._name)
        self._watched.note(module, self._name)
        return vars(module)[self._name]

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: Any) -> None:
        del vars(module)[self._name]


def _differing(modules: Sequence[nn.Module]) -> Iterator[str]:
    first = vars(modules[0])
    names = dict.fromkeys(itertools.chain.from_iterable(map(vars, modules)))
    for name in names:
        if name in _CONTAINERS:
            continue
        value = first.get(name, _NOTHING)
        if not all(is_same(value, vars(module).get(name, _NOTHING)) for module in modules):
            yield name


def read_the_same(places: frozenset[Place], first: nn.Module, second: nn.Module) -> bool:
    """Whether these attributes are the same in two layers.

    Args:
        places: that were read of the first one.
    """
    for path, name in places:
        if path == _MISSING:
            return False
        values = [vars(layer.get_submodule(path)).get(name, _NOTHING) for layer in (first, second)]
        if not is_same(*values):
            return False
    return True


def is_same(first: Any, second: Any) -> bool:
    """Whether nothing can tell two values apart: one object, or plain values that are equal."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, _PLAIN):
        return first == second
    if type(first) in (list, tuple):
        return len(first) == len(second) and all(map(is_same, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(is_same(first[k], second[k]) for k in first)
    if type(first) is functools.partial:
        pairs = zip(_parts(first), _parts(second), strict=True)
        return all(is_same(a, b) for a, b in pairs)
    return isinstance(first, set | frozenset) and first == second


def _parts(function: functools.partial) -> tuple[Any, ...]:
    return function.func, function.args, function.keywords
