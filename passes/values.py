"""What calls give, of arguments that have shapes and no numbers; computed once for those alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout)
# graph → what calls have in common → their value
_values: WeakKeyDictionary[fx.Graph, dict[Hashable, Any]] = WeakKeyDictionary()


def value_of_call(graph: fx.Graph, target: Callable, args: Any, kwargs: Any) -> Any:
    """The value of a call, from `meta["val"]` of the nodes among its arguments.

    Calls of one graph whose arguments are alike, as those of equal layers are, share it: with sizes
    that are symbols, computing it takes milliseconds.

    Args:
        kwargs: likewise.
    """
    key = _key_of_call(target, args, kwargs)
    if key is None:
        return _compute(target, args, kwargs)
    known = _values.setdefault(graph, {})
    if key not in known:
        known[key] = _compute(target, args, kwargs)
    return known[key]


def describe_tensor(value: Tensor) -> Hashable:
    """All of a tensor but its values; of sizes that depend on inputs, the expressions."""
    kinds = type(value), value.dtype, value.device, value.layout, value.requires_grad
    numbers = (*value.shape, None, *value.stride(), value.storage_offset())
    return (*kinds, *(n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers))


def _compute(target: Callable, args: Any, kwargs: Any) -> Any:
    value_of = lambda item: item.meta["val"]  # noqa: E731
    fake_args = fx.map_arg(args, value_of)
    fake_kwargs = fx.map_arg(kwargs, value_of)
    mode = next((v.fake_mode for v in _tensors((fake_args, fake_kwargs))), None)
    if mode is None:
        return target(*fake_args, **fake_kwargs)
    # composite operators see symbolic sizes only with the Python dispatcher (torch 2.11)
    with mode, enable_python_dispatcher():
        return target(*fake_args, **fake_kwargs)


def _key_of_call(target: Callable, args: Any, kwargs: Any) -> Hashable:
    """All that the value of a call depends on; None where that cannot be compared."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    found: list[Hashable] = []
    for leaf in leaves:
        value = leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf
        if isinstance(value, Tensor):
            if not hasattr(value, "fake_mode"):
                return None
            found.append((describe_tensor(value), id(value.fake_mode)))
        elif isinstance(value, torch.SymInt):
            found.append((torch.SymInt, value.node.expr))
        elif isinstance(value, _PLAIN):
            found.append((type(value), value))
        else:
            return None
    return target, repr(spec), tuple(found)


def _tensors(tree: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and hasattr(leaf, "fake_mode"):
            yield leaf
