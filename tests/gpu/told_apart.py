"""A device on the CPU whose tensors are told apart from the host's, as those of a GPU are.

The simulated device of rehearsals computes on CPU tensors, so a tensor that was left on the host
goes unnoticed there, and on a GPU it is the end of whatever reads it. Here tensors of the device
say that they lie on `cuda:0`; operators that mix them with the host's raise what torch raises, and
Triton's interpreter refuses the host's as a driver does. Memory and arithmetic are the CPU's, and a
graph is the function that it was captured from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._contextlib import _DecoratorContextManager
from torch.utils._pytree import tree_leaves, tree_map

PLACE = torch.device("cuda", 0)
# operators that read tensors of both, and those that read shapes and types alone
_ANYWHERE = ("_to_copy", "view_as", "expand_as", "reshape_as", "empty_like", "zeros_like")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
# ask for a guard of the device, or for numbers on it, which a CPU's torch has not
_GUARDED = ("contiguous", "new_tensor", "__invert__", "where")
# values for Python
_NUMBERS = (
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__",
    "__repr__", "__format__", "__str__",
)  # fmt: skip


class DeviceTensor(torch.Tensor):
    """Says that it lies on the device; `inner` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=PLACE,
        )
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        _refuse_mixtures(func._schema.name.partition("::")[2], args, kwargs)
        is_here = True
        if kwargs.get("device") is not None:
            is_here = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = torch.device("cpu")
        result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        return _wrapped(args, result) if is_here else result


def _wrapped(args: tuple, result: Any) -> Any:
    """Results on the device; one that is an argument is that argument."""
    known = {id(x.inner): x for x in tree_leaves(args) if isinstance(x, DeviceTensor)}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DeviceTensor):
            return value
        return known[id(value)] if id(value) in known else DeviceTensor(value)

    return tree_map(wrap, result)


def _held(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value


def _refuse_mixtures(name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises RuntimeError: tensors of both, other than numbers, indices and what is copied."""
    if name in _ANYWHERE:
        return
    if name in _INDEXED:
        args = (args[0], *args[2:])
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if len({isinstance(x, DeviceTensor) for x in tensors if x.dim() > 0}) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices,"
            f" {PLACE} and cpu! ({name})"
        )


class Machine(TorchFunctionMode):
    """Makes what torch is asked to make on `cuda`, which it has not, and what asks for a guard."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        is_here = any(isinstance(x, DeviceTensor) for x in tree_leaves(args))
        if name == "cuda":
            return _moved(args[0])
        if name == "cpu" and is_here:
            return args[0].inner.clone()
        if name in _NUMBERS and is_here:
            return func(*tree_map(_held, args), **kwargs)
        if name == "numpy" and is_here:
            raise TypeError(f"can't convert {PLACE} device type tensor to numpy")
        if name == "pin_memory":
            return args[0]
        kwargs.pop("pin_memory", None)
        # by the name of torch's function, or of the operator that a graph calls
        if name.partition(".")[0] in _GUARDED and is_here:
            _refuse_mixtures(name, args, kwargs)
            return _wrapped(args, func(*tree_map(_held, args), **tree_map(_held, kwargs)))
        if name == "copy_":
            # from either to either
            func(*tree_map(_held, args), **tree_map(_held, kwargs))
            return args[0]
        if name in ("__getitem__", "__setitem__"):
            return _at(name, func, args)
        if name == "to":
            return _to(func, args, kwargs)
        if name == "scaled_dot_product_attention" and is_here:
            # torch would look for kernels of the device
            _refuse_mixtures(name, args, kwargs)
            return DeviceTensor(func(*tree_map(_held, args), **tree_map(_held, kwargs)))
        if _is_device(kwargs.get("device")) and not is_here:
            kwargs["device"] = "cpu"
            return tree_map(_moved, func(*args, **kwargs))
        return func(*args, **kwargs)


def _at(name: str, func: Any, args: tuple) -> Any:
    tensor, index, *value = args
    has_indices = any(isinstance(x, Tensor) and x.dim() for x in tree_leaves(index))
    if not isinstance(tensor, DeviceTensor):
        # the device's indices into the host's memory
        _refuse_mixtures(name, (tensor, index), {})
    if value and has_indices:
        # a slice is copied to, whatever lies where
        _refuse_mixtures(name, (tensor, *value), {})
    found = func(_held(tensor), tree_map(_bound, index), *map(_held, value))
    return DeviceTensor(found) if isinstance(tensor, DeviceTensor) and not value else found


def _bound(index: Any) -> Any:
    """An index that the host can use; numbers of the device may bound a slice."""
    if isinstance(index, slice):
        return slice(*map(_held, (index.start, index.stop, index.step)))
    return _held(index)


def _to(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    given = (*rest, *kwargs.values())
    others = [x for x in given if isinstance(x, DeviceTensor)]
    if not others and not any(_is_device(x) for x in given):
        return func(*args, **kwargs)
    dtypes = [x for x in given if isinstance(x, torch.dtype)] + [x.dtype for x in others]
    return _moved(tensor.to(dtypes[0]) if dtypes else tensor)


def _is_device(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


def _moved(value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DeviceTensor):
        return value
    return DeviceTensor(value.detach().clone())


class _Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls, "cpu")


class _Graph:
    def replay(self) -> None: ...


class _InferenceMode(_DecoratorContextManager):
    """No gradients: views of the tensors that inference mode makes cannot be wrapped."""

    def __new__(cls, mode: Any = True) -> Any:
        return super().__new__(cls) if isinstance(mode, bool) else cls()(mode)

    def __init__(self, mode: bool = True) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch.set_grad_enabled(self._before and not self._mode)

    def __exit__(self, *_: object) -> None:
        torch.set_grad_enabled(self._before)

    def clone(self) -> _InferenceMode:
        return type(self)(self._mode)


def prepare(is_launched: bool = True) -> None:
    """Let this process have the device, before it imports the runtime; Triton has to interpret.

    Args:
        is_launched: run kernels; otherwise they are asked what they are given, and write nothing.
    """
    from triton.runtime.interpreter import InterpretedFunction

    replace: Any = setattr
    replace(torch, "inference_mode", _InferenceMode)
    replace(torch, "Generator", _Generator)
    fork = torch.random.fork_rng
    replace(torch.random, "fork_rng", lambda devices=None, **options: fork([], **options))
    replace(torch.cuda, "is_available", lambda: True)
    facts = SimpleNamespace(name="apart", total_memory=1 << 37, major=9, minor=0)
    facts.multi_processor_count = 132
    replace(torch.cuda, "get_device_properties", lambda device=None: facts)
    for name in ("synchronize", "empty_cache"):
        replace(torch.cuda, name, lambda device=None: None)
    replace(torch.cuda, "CUDAGraph", _Graph)
    replace(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    replace(
        InterpretedFunction, "run", _launching(InterpretedFunction.run if is_launched else None)
    )
    # for gradients torch asks the device for its streams
    torch.set_grad_enabled(False)
    Machine().__enter__()


def graphs() -> Any:
    """A `GraphDevice` for it; `prepare` comes before."""
    from specc.bench import device as bench_device

    class Graphs(bench_device.RepeatingDevice):
        def __init__(self) -> None:
            self.device = PLACE

    replace: Any = setattr
    replace(bench_device, "make_clock", lambda device: bench_device.HostClock())
    bench_device.COPY_BYTES["cuda"] = 1 << 16

    def count_kernels(work: Callable[[], object], clock: Any) -> Any:
        work()
        return bench_device.Kernels(1, {"k": bench_device.KernelTime(1, 2.0)})

    replace(bench_device, "_profile_kernels", count_kernels)
    return Graphs()


def _launching(run: Callable[..., Any] | None) -> Callable[..., Any]:
    def launch(kernel: Any, *args: Any, **options: Any) -> Any:
        for value in tree_leaves((args, options)):
            if isinstance(value, Tensor) and not isinstance(value, DeviceTensor):
                raise ValueError(
                    f"{kernel.fn.__name__}: Pointer argument cannot be accessed from Triton (cpu"
                    f" tensor?): {list(value.shape)} of {value.dtype}"
                )
        if run is None:
            return None
        return run(kernel, *tree_map(_held, args), **tree_map(_held, options))

    return launch
