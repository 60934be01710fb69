"""Make what Triton's interpreter does between two numpy operations cheap; it computes the same.

- It puts its own functions into `triton.language` before a kernel runs, and again, 4 ms each, at
  every call of a function inside of it, where nothing is left to replace. Here a module's functions
  do that once: kernels of many small functions run several times as fast.
- Sums and products of integers are computed a second time in 64 bits for an assertion that only
  kernels in debug mode have: two fifths of the time of kernels that compute many offsets.
- Shapes of tensors and of their types, and numpy's dtypes, are made anew for every operation.
- Reductions other than sums and extremes take a step of Python for each number.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from tests.kernels.cuda.interpreted_operators import patch_operators


def patch_calls() -> None:
    """Patch the interpreter of this process; a second call changes nothing."""
    if hasattr(InterpretedFunction, "specc_modules"):
        return
    InterpretedFunction.specc_modules = set()

    def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        # modules that see `triton.language` find it replaced by the kernel that runs; what sees
        # its core stays replaced
        name = self.fn.__module__
        if name not in InterpretedFunction.specc_modules:
            interpreter._patch_lang(self.fn)
            InterpretedFunction.specc_modules.add(name)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _patch_dtypes()
    _patch_shapes()
    _patch_xor()
    patch_operators()


def _patch_dtypes() -> None:
    original = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
        if isinstance(dtype, tl.block_type):
            dtype = dtype.element_ty
        if dtype.name not in known:
            known[dtype.name] = original(dtype)
        return known[dtype.name]

    is_equal = tl.dtype.__eq__

    def equals(self: tl.dtype, other: Any) -> bool:
        if self is other:
            return True
        return self.name == other.name if type(other) is tl.dtype else is_equal(self, other)

    interpreter._get_np_dtype = np_dtype
    tl.dtype.__eq__ = equals


def _patch_xor() -> None:
    original = interpreter.ReduceOps.generic_reduce

    def reduce(self: interpreter.ReduceOps, input: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return original(self, input)
        (x,) = input
        data = np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(data, x.dtype)]

    interpreter.ReduceOps.generic_reduce = reduce


def _patch_shapes() -> None:
    make_type = tl.block_type.__init__

    @functools.cache
    def type_of(sizes: tuple[int, ...]) -> tl.block_type:
        made = tl.block_type.__new__(tl.block_type)
        make_type(made, tl.int1, [*sizes])
        return made

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def init_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in getattr(shape, "value", shape))
        like = type_of(sizes)
        self.element_ty, self.shape, self.numel = element_ty, like.shape, like.numel
        self.name = f"<{sizes}, {element_ty}>"

    def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        self.shape, self.numel = shape_of(sizes)

    tl.block_type.__init__ = init_type
    tl.tensor.__init__ = init_tensor
